// SPDX-License-Identifier: Apache-2.0
// Small kernels for tests/test_cuda_shim.py: each shows one thing that the emulated GPU does as CUDA says, or refuses.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "machine.cuh"

using namespace hal::cuda;

namespace {

// --- conversions ---------------------------------------------------------------------------------------------------

__global__ void to_small(const float* in, std::uint16_t* halves, std::uint16_t* brains, int n) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
        const __half2 h = __floats2half2_rn(in[i], 0.0f);
        const __nv_bfloat162 b = __floats2bfloat162_rn(in[i], 0.0f);
        halves[i] = *reinterpret_cast<const std::uint16_t*>(&h),
        brains[i] = *reinterpret_cast<const std::uint16_t*>(&b);
    }
}
__global__ void from_half(const std::uint16_t* in, float* out, int n) {
    for (int i = threadIdx.x; i < n; i += blockDim.x)
        out[i] = __half22float2(*reinterpret_cast<const __half2*>(in + i)).x;
}

// --- collectives ---------------------------------------------------------------------------------------------------

__global__ void collectives(unsigned* out) {  // [10][threads]
    const unsigned t = threadIdx.x, lane = t & 31, n = blockDim.x, all = 0xffffffffu;
    out[0 * n + t] = __shfl_sync(all, t, (lane * 7 + 3) & 31);
    out[1 * n + t] = __shfl_up_sync(all, t, 5);
    out[2 * n + t] = __shfl_down_sync(all, t, 5);
    out[3 * n + t] = __shfl_xor_sync(all, t, 9);
    out[4 * n + t] = __ballot_sync(all, t % 3 == 0);
    out[5 * n + t] = __match_any_sync(all, t % 5);
    out[6 * n + t] = __reduce_add_sync(all, t);
    // Odd lanes among themselves, while even ones are elsewhere and meet them later.
    unsigned odd = 0;
    if (lane % 2) {
        odd = __ballot_sync(0xaaaaaaaau, lane > 8);
        __syncwarp(0xaaaaaaaau);
        odd += __shfl_sync(0xaaaaaaaau, t, 31);
    }
    __syncwarp();
    out[7 * n + t] = odd;
    out[8 * n + t] = __syncthreads_count(t % 4 == 1) * 4 + __syncthreads_and(t < n) * 2 + __syncthreads_or(t == 40);
    out[9 * n + t] = static_cast<unsigned>(__shfl_sync(all, 1.5f * static_cast<float>(t), 4) +
                                           static_cast<float>(__any_sync(all, t == 2) + 2 * __all_sync(all, t < 64)));
}

// --- shared memory -------------------------------------------------------------------------------------------------

__global__ void shared(std::uint32_t* out) {  // [blocks][3 + threads]
    __shared__ std::uint32_t word;
    __shared__ std::uint32_t each[64];
    std::uint32_t* row = out + blockIdx.x * (3 + blockDim.x);
    if (threadIdx.x == 0) row[0] = word, row[1] = each[63], row[2] = dynamic_shared<std::uint32_t>()[7];
    __syncthreads();
    each[threadIdx.x] = blockIdx.x * 1000 + threadIdx.x;
    __syncthreads();
    row[3 + threadIdx.x] = each[blockDim.x - 1 - threadIdx.x];
}
__global__ void write_past_shared() { dynamic_shared<char>()[threadIdx.x == 0 ? 100 : threadIdx.x] = 1; }

// --- what must not hang --------------------------------------------------------------------------------------------

__global__ void lane_missing() {
    if (threadIdx.x != 5) __syncwarp();
}
__global__ void lane_elsewhere() {
    if (threadIdx.x == 5)
        __syncthreads();
    else
        __ballot_sync(0xffffffffu, 1);
}
__global__ void divergent_barrier() {
    if (threadIdx.x < 32)
        __syncthreads();
    else
        __syncthreads();
}
__global__ void barrier_after_end() {
    if (threadIdx.x == 3) return;
    __syncthreads();
}
__global__ void lane_not_named() { __ballot_sync(0x0000ffffu, 1); }
__global__ void wait_for_ever(const std::uint64_t* word) {
    while (load_acquire(word) == 0) {}
}

// --- memory --------------------------------------------------------------------------------------------------------

// Message passing between two launches that run at the same time: 64 words of data, then a flag.
__global__ void send(std::uint32_t* data, std::uint64_t* flag, int fence, std::uint64_t epoch) {
    store_window(data + threadIdx.x, static_cast<std::uint32_t>(epoch));
    if (fence >= 4) __threadfence();
    if (fence == 3) __syncwarp();
    if (fence != 3) __syncthreads();
    if (threadIdx.x != 0) return;
    if (fence == 1 || fence == 3) __threadfence_system();
    if (fence == 2 || fence == 4)
        add_release(flag, 1);
    else
        store_relaxed(flag, epoch);
}
// How the receiver comes to know that it may read.
enum Knows { kAcquires, kRelaxed, kRelaxedThenFence, kShuffle, kSyncwarp };
__global__ void receive(const std::uint32_t* data, const std::uint64_t* flag, std::uint64_t epoch, int how,
                        unsigned* stale) {
    const bool each_warp = how == kShuffle || how == kSyncwarp;
    if (threadIdx.x == 0 || (each_warp && threadIdx.x % 32 == 0))
        while ((how == kRelaxed || how == kRelaxedThenFence ? load_relaxed(flag) : load_acquire(flag)) < epoch) {}
    if (how == kRelaxedThenFence && threadIdx.x == 0) __threadfence_system();
    if (how == kShuffle) __shfl_sync(0xffffffffu, 1, 0);
    if (how == kSyncwarp) __syncwarp();
    if (!each_warp) __syncthreads();
    if (__ldcg(data + threadIdx.x) < epoch) atomicAdd(stale, 1u);
}
__global__ void store_at(std::uint32_t* p) { store_window(p, 1u); }
__global__ void load_at(const std::uint32_t* p, std::uint32_t* out) { *out = __ldcg(p); }

// --- time ----------------------------------------------------------------------------------------------------------

__global__ void slow(std::uint32_t* out, std::uint32_t value, std::uint64_t nanos) {
    const std::uint64_t start = nanoseconds();
    while (nanoseconds() - start < nanos) __nanosleep(1000);
    *out = value;
}

cudaStream_t on(std::uint64_t stream) { return reinterpret_cast<cudaStream_t>(stream); }

}  // namespace

extern "C" {
int shim_to_small(const float* in, std::uint16_t* halves, std::uint16_t* brains, int n, std::uint64_t stream) {
    return start_kernel(to_small, "to_small", 2, 64, 0, on(stream), in, halves, brains, n);
}
int shim_from_half(const std::uint16_t* in, float* out, int n, std::uint64_t stream) {
    return start_kernel(from_half, "from_half", 1, 64, 0, on(stream), in, out, n);
}
int shim_collectives(unsigned* out, std::uint64_t stream) {
    return start_kernel(collectives, "collectives", 1, 64, 0, on(stream), out);
}
int shim_shared(std::uint32_t* out, std::uint64_t stream) {
    return start_kernel(shared, "shared", 3, 64, 64, on(stream), out);
}
int shim_hang(int which, std::uint64_t* word, std::uint64_t stream) {
    switch (which) {
        case 0:
            return start_kernel(lane_missing, "hang", 1, 64, 0, on(stream));
        case 1:
            return start_kernel(lane_elsewhere, "hang", 1, 32, 0, on(stream));
        case 2:
            return start_kernel(divergent_barrier, "hang", 1, 64, 0, on(stream));
        case 3:
            return start_kernel(barrier_after_end, "hang", 1, 64, 0, on(stream));
        case 4:
            return start_kernel(lane_not_named, "hang", 1, 32, 0, on(stream));
        case 5:
            return start_kernel(write_past_shared, "hang", 1, 32, 100, on(stream));
        default:
            return start_kernel(wait_for_ever, "hang", 2, 32, 0, on(stream), static_cast<const std::uint64_t*>(word));
    }
}
int shim_send(std::uint32_t* data, std::uint64_t* flag, int fence, std::uint64_t epoch, std::uint64_t stream) {
    return start_kernel(send, "send", 1, 64, 0, on(stream), data, flag, fence, epoch);
}
int shim_receive(const std::uint32_t* data, const std::uint64_t* flag, std::uint64_t epoch, int how, unsigned* stale,
                 std::uint64_t stream) {
    return start_kernel(receive, "receive", 1, 64, 0, on(stream), data, flag, epoch, how, stale);
}
int shim_store_at(std::uint32_t* p, std::uint64_t stream) {
    return start_kernel(store_at, "store_at", 1, 1, 0, on(stream), p);
}
int shim_load_at(const std::uint32_t* p, std::uint32_t* out, std::uint64_t stream) {
    return start_kernel(load_at, "load_at", 1, 1, 0, on(stream), p, out);
}
int shim_slow(std::uint32_t* out, std::uint32_t value, std::uint64_t nanos, std::uint64_t stream) {
    return start_kernel(slow, "slow", 1, 1, 0, on(stream), out, value, nanos);
}
int shim_block_of(int blocks, int threads, std::uint64_t stream) {
    return start_kernel(write_past_shared, "shape", blocks, threads, 4096, on(stream));
}
}
