// SPDX-License-Identifier: Apache-2.0
#include "emulation/runtime_api.hpp"

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <new>
#include <string>

#include "emulation/device.hpp"

using hal::cuda::emulation::Stream;

namespace {

constexpr int kDevices = 1024;      // emulated GPUs cost nothing until they are used
constexpr int kMostThreads = 1024;  // of a block
constexpr std::size_t kMostShared = 227 * 1024;

struct Event {
    std::shared_ptr<Stream> stream;
    std::uint64_t number = 0;
};

// All handles of the process; never destroyed, since threads of streams outlive main().
struct Handles {
    std::mutex mutex;
    std::map<std::uintptr_t, std::shared_ptr<Stream>> streams;
    std::map<std::uintptr_t, Event> events;
    std::map<int, std::shared_ptr<Stream>> default_streams;
    std::map<void*, std::size_t> sizes;  // of device memory
    std::uintptr_t next = 0x1000;

    static Handles& instance() {
        static auto* handles = new Handles;
        return *handles;
    }
};

thread_local int current_device = 0;
thread_local cudaError_t last_error = cudaSuccess;
thread_local std::string last_reason;

cudaError_t failed(cudaError_t status, const std::string& why) {
    last_error = status, last_reason = why;
    return status;
}

std::shared_ptr<Stream> find(cudaStream_t stream) {
    Handles& all = Handles::instance();
    const std::lock_guard lock(all.mutex);
    if (stream == nullptr) {
        auto& own = all.default_streams[current_device];
        if (!own) {
            own = std::make_shared<Stream>(current_device);
            own->start();
        }
        return own;
    }
    const auto found = all.streams.find(reinterpret_cast<std::uintptr_t>(stream));
    return found == all.streams.end() ? nullptr : found->second;
}

cudaError_t unknown_stream() { return failed(cudaErrorInvalidResourceHandle, "no such stream, or it was destroyed"); }

template <class Work>
cudaError_t add(cudaStream_t stream, Work work) {
    const auto on = find(stream);
    if (!on) return unknown_stream();
    if (const std::string why = on->failure(); !why.empty()) return failed(cudaErrorLaunchFailure, why);
    on->add([work = std::move(work)] {
        work();
        return std::string();
    });
    return cudaSuccess;
}

cudaError_t wait(Stream& stream) {
    const std::string why = stream.wait(stream.last());
    return why.empty() ? cudaSuccess : failed(cudaErrorLaunchFailure, why);
}

void release(void* p) {
    Handles& all = Handles::instance();
    std::size_t bytes = 0;
    {
        const std::lock_guard lock(all.mutex);
        const auto found = all.sizes.find(p);
        if (found == all.sizes.end()) return;
        bytes = found->second;
        all.sizes.erase(found);
    }
    std::memset(p, 0xDD, bytes);
    std::free(p);
}

}  // namespace

const char* cudaGetErrorName(cudaError_t status) {
    switch (status) {
        case cudaSuccess:
            return "cudaSuccess";
        case cudaErrorInvalidValue:
            return "cudaErrorInvalidValue";
        case cudaErrorMemoryAllocation:
            return "cudaErrorMemoryAllocation";
        case cudaErrorInvalidConfiguration:
            return "cudaErrorInvalidConfiguration";
        case cudaErrorInvalidDevice:
            return "cudaErrorInvalidDevice";
        case cudaErrorInvalidResourceHandle:
            return "cudaErrorInvalidResourceHandle";
        case cudaErrorNotReady:
            return "cudaErrorNotReady";
        case cudaErrorLaunchFailure:
            return "cudaErrorLaunchFailure";
    }
    return "unknown error";
}
const char* cudaGetErrorString(cudaError_t status) {
    return status == last_error ? last_reason.c_str() : cudaGetErrorName(status);
}
cudaError_t cudaGetLastError() {
    const cudaError_t status = last_error;
    last_error = cudaSuccess;
    return status;
}

cudaError_t cudaGetDeviceCount(int* count) {
    *count = kDevices;
    return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
    *device = current_device;
    return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
    if (device < 0 || device >= kDevices) return failed(cudaErrorInvalidDevice, "no device " + std::to_string(device));
    current_device = device;
    return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
    std::map<std::uintptr_t, std::shared_ptr<Stream>> streams;
    {
        Handles& all = Handles::instance();
        const std::lock_guard lock(all.mutex);
        streams = all.streams;
    }
    cudaError_t status = wait(*find(nullptr));
    for (const auto& [number, stream] : streams)
        if (stream->device() == current_device && status == cudaSuccess) status = wait(*stream);
    return status;
}

cudaError_t cudaMalloc(void** p, std::size_t bytes) {
    const std::size_t size = (bytes + 255) / 256 * 256 + (bytes == 0 ? 256 : 0);
    *p = std::aligned_alloc(256, size);
    if (*p == nullptr) return failed(cudaErrorMemoryAllocation, std::to_string(bytes) + " bytes");
    std::memset(*p, 0xB7, size);
    Handles& all = Handles::instance();
    const std::lock_guard lock(all.mutex);
    all.sizes[*p] = size;
    return cudaSuccess;
}
cudaError_t cudaFree(void* p) {
    if (const cudaError_t status = cudaDeviceSynchronize(); status != cudaSuccess) return status;
    release(p);
    return cudaSuccess;
}
cudaError_t cudaMallocAsync(void** p, std::size_t bytes, cudaStream_t stream) {
    if (!find(stream)) return unknown_stream();
    return cudaMalloc(p, bytes);
}
cudaError_t cudaFreeAsync(void* p, cudaStream_t stream) {
    const auto on = find(stream);
    if (!on) {
        release(p);  // its stream has ended, and with it all that used the memory
        return cudaSuccess;
    }
    on->add([p] {
        release(p);
        return std::string();
    });
    return cudaSuccess;
}
cudaError_t cudaHostAlloc(void** p, std::size_t bytes, unsigned) {
    *p = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    return *p != nullptr ? cudaSuccess : failed(cudaErrorMemoryAllocation, std::to_string(bytes) + " bytes");
}
cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned) {
    *device = host;
    return cudaSuccess;
}
cudaError_t cudaFreeHost(void* p) {
    std::free(p);
    return cudaSuccess;
}
cudaError_t cudaMemset(void* p, int value, std::size_t bytes) {
    const cudaError_t status = cudaMemsetAsync(p, value, bytes, nullptr);
    return status != cudaSuccess ? status : cudaStreamSynchronize(nullptr);
}
cudaError_t cudaMemsetAsync(void* p, int value, std::size_t bytes, cudaStream_t stream) {
    return add(stream, [=] { std::memset(p, value, bytes); });
}
cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind) {
    const cudaError_t status = cudaMemcpyAsync(to, from, bytes, kind, nullptr);
    return status != cudaSuccess ? status : cudaStreamSynchronize(nullptr);
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
    return add(stream, [=] { std::memmove(to, from, bytes); });
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
    auto made = std::make_shared<Stream>(current_device);
    made->start();
    Handles& all = Handles::instance();
    const std::lock_guard lock(all.mutex);
    all.streams[++all.next] = made;
    *stream = reinterpret_cast<cudaStream_t>(all.next);
    return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    const auto found = find(stream);
    if (!found || stream == nullptr) return unknown_stream();
    found->close();
    Handles& all = Handles::instance();
    const std::lock_guard lock(all.mutex);
    all.streams.erase(reinterpret_cast<std::uintptr_t>(stream));
    return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    const auto on = find(stream);
    return on ? wait(*on) : unknown_stream();
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
    const auto on = find(stream);
    if (!on) return unknown_stream();
    if (!on->idle()) return cudaErrorNotReady;
    const std::string why = on->failure();
    return why.empty() ? cudaSuccess : failed(cudaErrorLaunchFailure, why);
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
    *status = cudaStreamCaptureStatusNone;  // graphs are not emulated
    return find(stream) ? cudaSuccess : unknown_stream();
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
    Handles& all = Handles::instance();
    const std::lock_guard lock(all.mutex);
    all.events[++all.next] = {};
    *event = reinterpret_cast<cudaEvent_t>(all.next);
    return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    const auto on = find(stream);
    if (!on) return unknown_stream();
    Handles& all = Handles::instance();
    const std::lock_guard lock(all.mutex);
    const auto found = all.events.find(reinterpret_cast<std::uintptr_t>(event));
    if (found == all.events.end()) return failed(cudaErrorInvalidResourceHandle, "no such event");
    found->second = {on, on->last()};
    return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
    const auto on = find(stream);
    if (!on) return unknown_stream();
    Event seen;
    {
        Handles& all = Handles::instance();
        const std::lock_guard lock(all.mutex);
        const auto found = all.events.find(reinterpret_cast<std::uintptr_t>(event));
        if (found == all.events.end()) return failed(cudaErrorInvalidResourceHandle, "no such event");
        seen = found->second;
    }
    if (!seen.stream) return cudaSuccess;
    on->add([seen] { return seen.stream->wait(seen.number); });
    return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
    Handles& all = Handles::instance();
    const std::lock_guard lock(all.mutex);
    return all.events.erase(reinterpret_cast<std::uintptr_t>(event)) == 1
               ? cudaSuccess
               : failed(cudaErrorInvalidResourceHandle, "no such event");
}

namespace hal::cuda::emulation {

cudaError_t launch(int blocks, int threads, std::size_t shared, cudaStream_t stream, const char* what,
                   std::function<void()> kernel) {
    const auto on = find(stream);
    if (!on) return unknown_stream();
    if (blocks < 1 || threads < 1 || threads > kMostThreads || shared > kMostShared)
        return failed(cudaErrorInvalidConfiguration, std::to_string(blocks) + " blocks of " + std::to_string(threads) +
                                                         " threads with " + std::to_string(shared) +
                                                         " bytes of dynamic shared memory");
    if (const std::string why = on->failure(); !why.empty()) return failed(cudaErrorLaunchFailure, why);
    on->add([=, kernel = std::move(kernel), device = on->device()] {
        return run_launch(static_cast<unsigned>(blocks), static_cast<unsigned>(threads), shared, what, device, kernel);
    });
    return cudaSuccess;
}

}  // namespace hal::cuda::emulation
