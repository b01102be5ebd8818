// SPDX-License-Identifier: Apache-2.0
#include "emulation/runtime_api.hpp"

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "emulation/device.hpp"

using hal::cuda::emulation::Capture;
using hal::cuda::emulation::Stream;
using hal::cuda::emulation::Work;

namespace {

constexpr int kDevices = 1024;      // emulated GPUs cost nothing until they are used
constexpr int kMostThreads = 1024;  // of a block
constexpr std::size_t kMostShared = 227 * 1024;

struct Event {
    std::shared_ptr<Stream> stream;
    std::uint64_t number = 0;
    std::shared_ptr<Capture> capture;  // recorded while it was on, which no stream can be waited for
};

using Graph = std::vector<Work>;
struct GraphExec {
    const Graph work;
    std::mutex mutex;
    Event last;  // launches of one graph follow each other, on whatever stream
};

// All handles of the process; never destroyed, since threads of streams outlive main().
struct Handles {
    std::mutex mutex;
    std::map<std::uintptr_t, std::shared_ptr<Stream>> streams;
    std::map<std::uintptr_t, std::weak_ptr<Stream>> destroyed;  // streams that may still do what they have
    std::map<std::uintptr_t, Event> events;
    std::map<int, std::shared_ptr<Stream>> default_streams;
    std::map<void*, std::size_t> sizes;  // of device memory
    std::map<std::uintptr_t, Graph> graphs;
    std::map<std::uintptr_t, std::shared_ptr<GraphExec>> execs;
    std::vector<std::shared_ptr<Capture>> captures;  // that are on
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

// A destroyed stream that has not ended, or may just have.
std::shared_ptr<Stream> find_destroyed(cudaStream_t stream) {
    Handles& all = Handles::instance();
    const std::lock_guard lock(all.mutex);
    const auto found = all.destroyed.find(reinterpret_cast<std::uintptr_t>(stream));
    return found == all.destroyed.end() ? nullptr : found->second.lock();
}

cudaError_t unknown_stream() { return failed(cudaErrorInvalidResourceHandle, "no such stream, or it was destroyed"); }

cudaError_t invalidate(Capture& capture, cudaError_t status, const std::string& why) {
    capture.invalid = true;
    return failed(status, why);
}

// What a captured stream cannot be asked for.
cudaError_t refuse_captured(Stream& stream, const char* what) {
    const auto capture = stream.capture();
    if (!capture) return cudaSuccess;
    return invalidate(*capture, cudaErrorStreamCaptureUnsupported,
                      std::string(what) + " with a stream that is being captured");
}

// What may wait for every stream; it ends the captures whose mode forbids it on this thread.
cudaError_t refuse_unsafe(const char* what) {
    Handles& all = Handles::instance();
    const std::lock_guard lock(all.mutex);
    cudaError_t status = cudaSuccess;
    for (const auto& capture : all.captures) {
        const bool own = capture->thread == std::this_thread::get_id();
        if (capture->mode == Capture::Mode::relaxed || (capture->mode == Capture::Mode::thread_local_only && !own))
            continue;
        status =
            invalidate(*capture, cudaErrorStreamCaptureUnsupported,
                       std::string(what) + " while a stream is being captured" + (own ? "" : " by another thread"));
    }
    return status;
}

// In its turn; a stream that is being captured only keeps it.
cudaError_t give(Stream& on, Work work) {
    if (const std::string why = on.failure(); !why.empty()) return failed(cudaErrorLaunchFailure, why);
    const auto capture = on.capture();
    if (!capture) {
        on.add(std::move(work));
        return cudaSuccess;
    }
    if (capture->invalid) return failed(cudaErrorStreamCaptureInvalidated, "an earlier call invalidated the capture");
    capture->work.push_back(std::move(work));
    return cudaSuccess;
}

template <class Does>
cudaError_t add(cudaStream_t stream, Does does) {
    const auto on = find(stream);
    if (!on) return unknown_stream();
    return give(*on, [does = std::move(does)] {
        does();
        return std::string();
    });
}

cudaError_t wait(Stream& stream, const char* what) {
    if (const cudaError_t status = refuse_captured(stream, what); status != cudaSuccess) return status;
    const std::string why = stream.wait(stream.last());
    return why.empty() ? cudaSuccess : failed(cudaErrorLaunchFailure, why);
}

cudaError_t allocate(void** p, std::size_t bytes) {
    const std::size_t size = (bytes + 255) / 256 * 256 + (bytes == 0 ? 256 : 0);
    *p = std::aligned_alloc(256, size);
    if (*p == nullptr) return failed(cudaErrorMemoryAllocation, std::to_string(bytes) + " bytes");
    std::memset(*p, 0xB7, size);
    Handles& all = Handles::instance();
    const std::lock_guard lock(all.mutex);
    all.sizes[*p] = size;
    return cudaSuccess;
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
    asm volatile("" : : "r"(p) : "memory");  // somebody may still read it, for all the compiler knows
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
        case cudaErrorIllegalState:
            return "cudaErrorIllegalState";
        case cudaErrorStreamCaptureUnsupported:
            return "cudaErrorStreamCaptureUnsupported";
        case cudaErrorStreamCaptureInvalidated:
            return "cudaErrorStreamCaptureInvalidated";
        case cudaErrorStreamCaptureMerge:
            return "cudaErrorStreamCaptureMerge";
        case cudaErrorStreamCaptureIsolation:
            return "cudaErrorStreamCaptureIsolation";
        case cudaErrorCapturedEvent:
            return "cudaErrorCapturedEvent";
        case cudaErrorStreamCaptureWrongThread:
            return "cudaErrorStreamCaptureWrongThread";
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
    cudaError_t status = wait(*find(nullptr), "cudaDeviceSynchronize");
    for (const auto& [number, stream] : streams)
        if (stream->device() == current_device && status == cudaSuccess)
            status = wait(*stream, "cudaDeviceSynchronize");
    return status;
}

cudaError_t cudaMalloc(void** p, std::size_t bytes) {
    const cudaError_t status = refuse_unsafe("cudaMalloc");
    return status != cudaSuccess ? status : allocate(p, bytes);
}
cudaError_t cudaFree(void* p) {
    if (const cudaError_t status = refuse_unsafe("cudaFree"); status != cudaSuccess) return status;
    if (const cudaError_t status = cudaDeviceSynchronize(); status != cudaSuccess) return status;
    release(p);
    return cudaSuccess;
}
cudaError_t cudaMallocAsync(void** p, std::size_t bytes, cudaStream_t stream) {
    const auto on = find(stream);
    if (!on) return unknown_stream();
    if (const cudaError_t status = refuse_captured(*on, "cudaMallocAsync"); status != cudaSuccess) return status;
    return allocate(p, bytes);
}
cudaError_t cudaFreeAsync(void* p, cudaStream_t stream) {
    const auto on = find(stream);
    Work work = [p] {
        release(p);
        return std::string();
    };
    if (!on) {  // it was destroyed, and may still do what uses the memory
        const auto last = find_destroyed(stream);
        if (!last || last->add(std::move(work)) == 0) release(p);
        return cudaSuccess;
    }
    if (const cudaError_t status = refuse_captured(*on, "cudaFreeAsync"); status != cudaSuccess) return status;
    on->add(std::move(work));
    return cudaSuccess;
}
cudaError_t cudaHostAlloc(void** p, std::size_t bytes, unsigned) {
    if (const cudaError_t status = refuse_unsafe("cudaHostAlloc"); status != cudaSuccess) return status;
    *p = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    return *p != nullptr ? cudaSuccess : failed(cudaErrorMemoryAllocation, std::to_string(bytes) + " bytes");
}
cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned) {
    *device = host;
    return cudaSuccess;
}
cudaError_t cudaFreeHost(void* p) {
    if (const cudaError_t status = refuse_unsafe("cudaFreeHost"); status != cudaSuccess) return status;
    std::free(p);
    return cudaSuccess;
}
cudaError_t cudaMemset(void* p, int value, std::size_t bytes) {
    if (const cudaError_t status = refuse_unsafe("cudaMemset"); status != cudaSuccess) return status;
    const cudaError_t status = cudaMemsetAsync(p, value, bytes, nullptr);
    return status != cudaSuccess ? status : cudaStreamSynchronize(nullptr);
}
cudaError_t cudaMemsetAsync(void* p, int value, std::size_t bytes, cudaStream_t stream) {
    return add(stream, [=] { std::memset(p, value, bytes); });
}
cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind) {
    if (const cudaError_t status = refuse_unsafe("cudaMemcpy"); status != cudaSuccess) return status;
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
    if (const cudaError_t status = refuse_captured(*found, "cudaStreamDestroy"); status != cudaSuccess) return status;
    found->close();
    Handles& all = Handles::instance();
    const std::lock_guard lock(all.mutex);
    all.streams.erase(reinterpret_cast<std::uintptr_t>(stream));
    std::erase_if(all.destroyed, [](const auto& entry) { return entry.second.expired(); });
    all.destroyed[reinterpret_cast<std::uintptr_t>(stream)] = found;
    return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    const auto on = find(stream);
    return on ? wait(*on, "cudaStreamSynchronize") : unknown_stream();
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
    const auto on = find(stream);
    if (!on) return unknown_stream();
    if (const cudaError_t status = refuse_captured(*on, "cudaStreamQuery"); status != cudaSuccess) return status;
    if (!on->idle()) return cudaErrorNotReady;
    const std::string why = on->failure();
    return why.empty() ? cudaSuccess : failed(cudaErrorLaunchFailure, why);
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
    const auto on = find(stream);
    if (!on) return unknown_stream();
    const auto capture = on->capture();
    *status = !capture           ? cudaStreamCaptureStatusNone
              : capture->invalid ? cudaStreamCaptureStatusInvalidated
                                 : cudaStreamCaptureStatusActive;
    return cudaSuccess;
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
    found->second = {on, on->last(), on->capture()};
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
    const auto capture = on->capture();
    if (seen.capture && seen.capture->ended)
        return failed(cudaErrorCapturedEvent, "the event was recorded in a capture, which has ended");
    if (seen.capture && seen.capture == capture) return cudaSuccess;  // the same stream, whose work is in order
    if (seen.capture && capture) {
        capture->invalid = true;
        return invalidate(*seen.capture, cudaErrorStreamCaptureMerge, "the event was recorded in another capture");
    }
    if (seen.capture)
        return invalidate(*seen.capture, cudaErrorStreamCaptureUnsupported,
                          "the event was recorded in a capture, and a second stream of one is not emulated");
    if (capture)
        return invalidate(*capture, cudaErrorStreamCaptureIsolation,
                          "a stream that is being captured cannot wait for an event of outside");
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

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
    if (stream == nullptr)
        return failed(cudaErrorStreamCaptureUnsupported, "the legacy default stream cannot be captured");
    const auto on = find(stream);
    if (!on) return unknown_stream();
    if (on->capture()) return failed(cudaErrorIllegalState, "the stream is being captured already");
    auto capture = std::make_shared<Capture>(static_cast<Capture::Mode>(mode));
    on->set_capture(capture);
    Handles& all = Handles::instance();
    const std::lock_guard lock(all.mutex);
    all.captures.push_back(std::move(capture));
    return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
    *graph = nullptr;
    const auto on = find(stream);
    if (!on) return unknown_stream();
    const auto capture = on->capture();
    if (!capture) return failed(cudaErrorIllegalState, "the stream is not being captured");
    if (capture->mode != Capture::Mode::relaxed && capture->thread != std::this_thread::get_id())
        return failed(cudaErrorStreamCaptureWrongThread, "another thread began the capture");
    on->set_capture(nullptr);
    capture->ended = true;
    Handles& all = Handles::instance();
    const std::lock_guard lock(all.mutex);
    std::erase(all.captures, capture);
    if (capture->invalid) return failed(cudaErrorStreamCaptureInvalidated, "an earlier call invalidated the capture");
    all.graphs[++all.next] = std::move(capture->work);
    *graph = reinterpret_cast<cudaGraph_t>(all.next);
    return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long) {
    Handles& all = Handles::instance();
    const std::lock_guard lock(all.mutex);
    const auto found = all.graphs.find(reinterpret_cast<std::uintptr_t>(graph));
    if (found == all.graphs.end()) return failed(cudaErrorInvalidValue, "no such graph");
    all.execs[++all.next] = std::shared_ptr<GraphExec>(new GraphExec{found->second, {}, {}});
    *exec = reinterpret_cast<cudaGraphExec_t>(all.next);
    return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) {
    const auto on = find(stream);
    if (!on) return unknown_stream();
    if (const cudaError_t status = refuse_captured(*on, "cudaGraphLaunch"); status != cudaSuccess) return status;
    if (const std::string why = on->failure(); !why.empty()) return failed(cudaErrorLaunchFailure, why);
    std::shared_ptr<GraphExec> exec;
    {
        Handles& all = Handles::instance();
        const std::lock_guard lock(all.mutex);
        const auto found = all.execs.find(reinterpret_cast<std::uintptr_t>(graph));
        if (found == all.execs.end()) return failed(cudaErrorInvalidValue, "no such executable graph");
        exec = found->second;
    }
    const std::lock_guard lock(exec->mutex);
    const std::uint64_t number = on->add([exec, before = exec->last] {
        std::string why = before.stream ? before.stream->wait(before.number) : std::string();
        for (auto work = exec->work.begin(); why.empty() && work != exec->work.end(); ++work) why = (*work)();
        return why;
    });
    exec->last = {on, number, nullptr};
    return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
    Handles& all = Handles::instance();
    const std::lock_guard lock(all.mutex);
    return all.execs.erase(reinterpret_cast<std::uintptr_t>(exec)) == 1
               ? cudaSuccess
               : failed(cudaErrorInvalidValue, "no such executable graph");
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    Handles& all = Handles::instance();
    const std::lock_guard lock(all.mutex);
    return all.graphs.erase(reinterpret_cast<std::uintptr_t>(graph)) == 1
               ? cudaSuccess
               : failed(cudaErrorInvalidValue, "no such graph");
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
    return give(*on, [=, kernel = std::move(kernel), device = on->device()] {
        return run_launch(static_cast<unsigned>(blocks), static_cast<unsigned>(threads), shared, what, device, kernel);
    });
}

}  // namespace hal::cuda::emulation
