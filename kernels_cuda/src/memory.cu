// SPDX-License-Identifier: Apache-2.0
// Memory, streams, and the host's one bounded wait, behind the C interface.
#include <chrono>

#include "device.cuh"
#include "launch.cuh"

namespace hal::cuda {
namespace {
thread_local std::string last_error;
cudaStream_t as_stream(std::uint64_t stream) { return reinterpret_cast<cudaStream_t>(stream); }
}  // namespace

int fail(const std::string& text) {
    last_error = text;
    return -1;
}

int check(cudaError_t status, const char* what) {
    if (status == cudaSuccess) return 0;
    return fail(std::string(what) + ": " + cudaGetErrorName(status) + ", " + cudaGetErrorString(status));
}

}  // namespace hal::cuda

using hal::cuda::as_stream;
using hal::cuda::check;
using hal::cuda::OnDevice;

extern "C" {

const char* hal_cuda_last_error(void) { return hal::cuda::last_error.c_str(); }
int hal_cuda_abi(void) { return HAL_CUDA_ABI; }
int hal_cuda_state_bytes(void) { return static_cast<int>(sizeof(hal::cuda::State)); }
int hal_cuda_device_count(int* count) { return check(cudaGetDeviceCount(count), "device count"); }

int hal_cuda_malloc(int device, std::uint64_t bytes, std::uint64_t stream, std::uint64_t* ptr) {
    const OnDevice here(device);
    void* p = nullptr;
    if (check(cudaMallocAsync(&p, bytes, as_stream(stream)), "cudaMallocAsync") != 0) return -1;
    *ptr = reinterpret_cast<std::uint64_t>(p);
    return 0;
}
int hal_cuda_free(int device, std::uint64_t ptr, std::uint64_t stream) {
    const OnDevice here(device);
    return check(cudaFreeAsync(reinterpret_cast<void*>(ptr), as_stream(stream)), "cudaFreeAsync");
}
int hal_cuda_host_alloc(int device, std::uint64_t bytes, void** host, std::uint64_t* address) {
    const OnDevice here(device);
    if (check(cudaHostAlloc(host, bytes, cudaHostAllocMapped | cudaHostAllocPortable), "cudaHostAlloc") != 0) return -1;
    void* p = nullptr;
    if (check(cudaHostGetDevicePointer(&p, *host, 0), "cudaHostGetDevicePointer") != 0) return -1;
    *address = reinterpret_cast<std::uint64_t>(p);
    return 0;
}
int hal_cuda_host_free(void* host) { return check(cudaFreeHost(host), "cudaFreeHost"); }
int hal_cuda_memset(int device, std::uint64_t ptr, int value, std::uint64_t bytes, std::uint64_t stream) {
    const OnDevice here(device);
    return check(cudaMemsetAsync(reinterpret_cast<void*>(ptr), value, bytes, as_stream(stream)), "cudaMemsetAsync");
}
int hal_cuda_copy(int device, std::uint64_t dst, std::uint64_t src, std::uint64_t bytes, std::uint64_t stream) {
    const OnDevice here(device);
    return check(cudaMemcpyAsync(reinterpret_cast<void*>(dst), reinterpret_cast<const void*>(src), bytes,
                                 cudaMemcpyDefault, as_stream(stream)),
                 "cudaMemcpyAsync");
}
int hal_cuda_stream_create(int device, std::uint64_t* stream) {
    const OnDevice here(device);
    cudaStream_t s = nullptr;
    if (check(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking), "cudaStreamCreate") != 0) return -1;
    *stream = reinterpret_cast<std::uint64_t>(s);
    return 0;
}
int hal_cuda_stream_destroy(int device, std::uint64_t stream) {
    const OnDevice here(device);
    return check(cudaStreamDestroy(as_stream(stream)), "cudaStreamDestroy");
}
int hal_cuda_stream_sync(int device, std::uint64_t stream) {
    const OnDevice here(device);
    return check(cudaStreamSynchronize(as_stream(stream)), "cudaStreamSynchronize");
}
int hal_cuda_stream_query(int device, std::uint64_t stream, int* idle) {
    const OnDevice here(device);
    const cudaError_t status = cudaStreamQuery(as_stream(stream));
    *idle = status == cudaSuccess;
    return status == cudaErrorNotReady ? 0 : check(status, "cudaStreamQuery");
}
int hal_cuda_stream_capturing(int device, std::uint64_t stream, int* capturing) {
    const OnDevice here(device);
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    if (check(cudaStreamIsCapturing(as_stream(stream), &status), "cudaStreamIsCapturing") != 0) return -1;
    *capturing = status != cudaStreamCaptureStatusNone;
    return 0;
}
int hal_cuda_stream_order(int device, std::uint64_t earlier, std::uint64_t later) {
    const OnDevice here(device);
    cudaEvent_t event = nullptr;
    if (check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreate") != 0) return -1;
    const int recorded = check(cudaEventRecord(event, as_stream(earlier)), "cudaEventRecord");
    const int waits =
        recorded == 0 ? check(cudaStreamWaitEvent(as_stream(later), event, 0), "cudaStreamWaitEvent") : -1;
    cudaEventDestroy(event);
    return waits;
}

int hal_cuda_await_rows(const std::uint64_t* word, std::uint32_t sequence, const hal_cuda_error* error, double seconds,
                        std::uint32_t* value) {
    const auto start = std::chrono::steady_clock::now();
    for (;;) {
        for (int i = 0; i < 256; ++i) {
            const std::uint64_t seen = __atomic_load_n(word, __ATOMIC_ACQUIRE);
            if (static_cast<std::uint32_t>(seen >> 32) == sequence) {
                *value = static_cast<std::uint32_t>(seen);
                return 0;
            }
        }
        hal::cuda::host_looks_again();
        if (__atomic_load_n(&error->kind, __ATOMIC_ACQUIRE) == HAL_CUDA_TIMEOUT) return 2;
        if (std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() > seconds) return 1;
    }
}

}  // extern "C"
