// SPDX-License-Identifier: Apache-2.0
// What a GPU and its emulation on CPUs (host_shim/machine.cuh) do differently, and nothing else: words of PTX, plain
// accesses of windows, dynamic shared memory, and starting a kernel. The include path chooses between the two.
//
// Kernels touch windows, their own rank's and the peers', by the words below, by __ldg and by __ldcg only: the emulation
// has to see every access to know which stores a fence has to force out.
#pragma once
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

namespace hal::cuda {

__device__ __forceinline__ std::uint64_t load_acquire(const std::uint64_t* p) {
    std::uint64_t v;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}
__device__ __forceinline__ std::uint32_t load_acquire(const std::uint32_t* p) {
    std::uint32_t v;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
__device__ __forceinline__ std::uint32_t load_acquire_gpu(const std::uint32_t* p) {
    std::uint32_t v;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
__device__ __forceinline__ std::uint64_t load_relaxed(const std::uint64_t* p) {
    std::uint64_t v;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}
// Two words of one 16-byte line, read at once.
__device__ __forceinline__ void load_relaxed_gpu(const unsigned long long* p, unsigned long long& first,
                                                 unsigned long long& second) {
    asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];" : "=l"(first), "=l"(second) : "l"(p) : "memory");
}
__device__ __forceinline__ void store_relaxed(std::uint64_t* p, std::uint64_t v) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
__device__ __forceinline__ void store_relaxed(std::uint32_t* p, std::uint32_t v) {
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
__device__ __forceinline__ void store_release(std::uint64_t* p, std::uint64_t v) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
__device__ __forceinline__ void add_release(std::uint64_t* p, std::uint64_t v) {
    asm volatile("red.release.sys.global.add.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
__device__ __forceinline__ void add_relaxed(std::uint64_t* p, std::uint64_t v) {
    asm volatile("red.relaxed.sys.global.add.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
__device__ __forceinline__ std::uint64_t nanoseconds() {
    std::uint64_t t;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
    return t;
}

// Plain accesses of windows, at most 16 bytes each and aligned to their size.
template <class T>
__device__ __forceinline__ void store_window(T* p, T v) {
    *p = v;
}
template <class T>
__device__ __forceinline__ T load_window(const T* p) {
    return *p;
}

// A warp's copies into shared memory that go on while it does other things. `Arrival`, in shared memory, tells of one copy after
// the other: its n-th has arrived when its phase n has ended. From Hopper on: see copies_fly().
struct Arrival {
    std::uint64_t word;
};
__device__ __forceinline__ std::uint32_t shared_address(const void* p) {
    return static_cast<std::uint32_t>(__cvta_generic_to_shared(p));
}
// One lane, before the warp meets.
__device__ __forceinline__ void begin_arrivals(Arrival* arrival) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(shared_address(&arrival->word)) : "memory");
#endif
}
// After begin_arrivals, and after what made the sources visible: the copies are of another proxy.
__device__ __forceinline__ void order_copies() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("fence.proxy.async;" ::: "memory");
#endif
}
// By all lanes together: `vectors` times 16 bytes, which may be none. Nobody may still read what lies at `to`.
__device__ __forceinline__ void copy_to_shared(uint4* to, const uint4* from, int vectors, Arrival* arrival) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    if ((threadIdx.x & 31) != 0) return;
    const std::uint32_t bytes = static_cast<std::uint32_t>(vectors) * 16, word = shared_address(&arrival->word);
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(word), "r"(bytes) : "memory");
    if (bytes != 0)
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                         shared_address(to)),
                     "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(word)
                     : "memory");
#endif
}
// By all lanes together: until the copy of phase `parity` (of the copy's number, from 0) has arrived.
__device__ __forceinline__ void await_arrival(Arrival* arrival, unsigned parity) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    unsigned done = 0;
    while (done == 0)
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                     : "=r"(done)
                     : "r"(shared_address(&arrival->word)), "r"(parity)
                     : "memory");
#endif
}
inline int compute_major(int device) {
    int major = 0;
    return cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess ? major : 0;
}
// Whether kernels on this device may use the copies above.
inline bool copies_fly(int device) { return compute_major(device) >= 9; }

// The dynamic shared memory of this block.
template <class T>
__device__ __forceinline__ T* dynamic_shared() {
    extern __shared__ uint4 hal_dynamic_shared[];
    return reinterpret_cast<T*>(hal_dynamic_shared);
}

// Threads of the ordering words' interpreter.
constexpr int kWordThreads = 512;
// Of arrays in device memory, as DLPack numbers kinds of devices: CUDA.
constexpr std::int32_t kDlpackDevice = 2;

template <class Kernel, class... Args>
cudaError_t start_kernel(Kernel kernel, const char*, int blocks, int threads, std::size_t shared, cudaStream_t stream,
                         const Args&... args) {
    kernel<<<blocks, threads, shared, stream>>>(args...);
    return cudaGetLastError();
}
// Programmatic dependent launch: the kernel may be placed on the GPU before its predecessor in the stream has ended, if that
// has started all its blocks and said so or ended them; await_earlier_launch() is where it then waits. Older GPUs than
// Hopper do not have it.
template <class Kernel, class... Args>
cudaError_t start_kernel_early(Kernel kernel, int device, const char*, int blocks, int threads, std::size_t shared,
                               cudaStream_t stream, const Args&... args) {
    cudaLaunchAttribute early{};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(blocks)), config.blockDim = dim3(static_cast<unsigned>(threads));
    config.dynamicSmemBytes = shared, config.stream = stream;
    config.attrs = &early, config.numAttrs = compute_major(device) >= 9 ? 1 : 0;
    return cudaLaunchKernelEx(&config, kernel, args...);
}
// Until the kernel before this one in the stream has ended and all that it wrote is visible; then lets the next one be placed.
__device__ __forceinline__ void await_earlier_launch() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
// The host looks again and again at memory that a kernel writes.
inline void host_looks_again() {}

}  // namespace hal::cuda
