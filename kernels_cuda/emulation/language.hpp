// SPDX-License-Identifier: Apache-2.0
// CUDA's words for g++. A block's threads are fibers of one operating-system thread (block.hpp), so `__shared__` variables
// are that thread's own.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "emulation/block.hpp"
#include "emulation/memory.hpp"

#define __global__
#define __device__
#define __host__
#define __shared__ thread_local
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __restrict__ __restrict
#define __align__(n) alignas(n)

// --- vectors -------------------------------------------------------------------------------------------------------

struct uint3 {
    unsigned x, y, z;
};
struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};
struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(8) int2 {
    int x, y;
};
struct alignas(16) int4 {
    int x, y, z, w;
};
struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(16) ulonglong2 {
    unsigned long long x, y;
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline ulonglong2 make_ulonglong2(unsigned long long x, unsigned long long y) { return {x, y}; }

// --- where a thread is ---------------------------------------------------------------------------------------------

namespace hal::cuda::emulation {
inline uint3 thread_index() { return {running->thread, 0, 0}; }
inline uint3 block_index() { return {running->block->index(), 0, 0}; }
inline uint3 block_size() { return {running->block->threads(), 1, 1}; }
inline uint3 grid_size() { return {running->block->blocks(), 1, 1}; }
}  // namespace hal::cuda::emulation
#define threadIdx (::hal::cuda::emulation::thread_index())
#define blockIdx (::hal::cuda::emulation::block_index())
#define blockDim (::hal::cuda::emulation::block_size())
#define gridDim (::hal::cuda::emulation::grid_size())
constexpr int warpSize = 32;

// --- barriers and fences -------------------------------------------------------------------------------------------

// The place of each call is known, so that threads that meet at different ones are told apart.
#define HAL_SITE const char *file = __builtin_FILE(), int line = __builtin_LINE()

inline void __syncthreads(HAL_SITE) {
    using namespace hal::cuda::emulation;
    running->block->meet(*running, BlockWord::sync, 0, {file, line});
}
inline int __syncthreads_and(int predicate, HAL_SITE) {
    using namespace hal::cuda::emulation;
    return running->block->meet(*running, BlockWord::all, predicate != 0, {file, line});
}
inline int __syncthreads_or(int predicate, HAL_SITE) {
    using namespace hal::cuda::emulation;
    return running->block->meet(*running, BlockWord::any, predicate != 0, {file, line});
}
inline int __syncthreads_count(int predicate, HAL_SITE) {
    using namespace hal::cuda::emulation;
    return running->block->meet(*running, BlockWord::count, predicate != 0, {file, line});
}
inline void __syncwarp(unsigned mask = 0xffffffffu, HAL_SITE) {
    using namespace hal::cuda::emulation;
    running->block->exchange(*running, WarpWord::sync, mask, 0, 0, {file, line});
}
inline void __threadfence_block() {}
inline void __threadfence() { hal::cuda::emulation::running->block->fence(*hal::cuda::emulation::running, false); }
inline void __threadfence_system() {
    hal::cuda::emulation::running->block->fence(*hal::cuda::emulation::running, true);
}

// --- collectives of a warp -----------------------------------------------------------------------------------------

namespace hal::cuda::emulation {
template <class T>
std::uint64_t to_word(T value) {
    static_assert(sizeof(T) <= 8 && std::is_trivially_copyable_v<T>);
    std::uint64_t word = 0;
    std::memcpy(&word, &value, sizeof value);
    return word;
}
template <class T>
T from_word(std::uint64_t word) {
    T value;
    std::memcpy(&value, &word, sizeof value);
    return value;
}
template <class T>
T warp_word(WarpWord word, unsigned mask, T value, int argument, Site site) {
    return from_word<T>(running->block->exchange(*running, word, mask, to_word(value), argument, site));
}
}  // namespace hal::cuda::emulation

// Width 32 only: HAL's kernels use no other.
template <class T>
T __shfl_sync(unsigned mask, T value, int lane, HAL_SITE) {
    return hal::cuda::emulation::warp_word(hal::cuda::emulation::WarpWord::shfl, mask, value, lane & 31, {file, line});
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, HAL_SITE) {
    return hal::cuda::emulation::warp_word(hal::cuda::emulation::WarpWord::shfl_up, mask, value,
                                           static_cast<int>(delta), {file, line});
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, HAL_SITE) {
    return hal::cuda::emulation::warp_word(hal::cuda::emulation::WarpWord::shfl_down, mask, value,
                                           static_cast<int>(delta), {file, line});
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lanes, HAL_SITE) {
    return hal::cuda::emulation::warp_word(hal::cuda::emulation::WarpWord::shfl_xor, mask, value, lanes, {file, line});
}
template <class T>
unsigned __ballot_sync(unsigned mask, T predicate, HAL_SITE) {
    using namespace hal::cuda::emulation;
    return static_cast<unsigned>(
        running->block->exchange(*running, WarpWord::ballot, mask, predicate ? 1 : 0, 0, {file, line}));
}
template <class T>
int __any_sync(unsigned mask, T predicate, HAL_SITE) {
    return __ballot_sync(mask, predicate, file, line) != 0;
}
template <class T>
int __all_sync(unsigned mask, T predicate, HAL_SITE) {
    return __ballot_sync(mask, predicate, file, line) == mask;
}
template <class T>
unsigned __match_any_sync(unsigned mask, T value, HAL_SITE) {
    using namespace hal::cuda::emulation;
    return static_cast<unsigned>(
        running->block->exchange(*running, WarpWord::match, mask, to_word(value), 0, {file, line}));
}
inline unsigned __reduce_add_sync(unsigned mask, unsigned value, HAL_SITE) {
    using namespace hal::cuda::emulation;
    return static_cast<unsigned>(running->block->exchange(*running, WarpWord::add, mask, value, 0, {file, line}));
}
inline unsigned __activemask() = delete;  // what it gives is not defined well enough to build on

// --- atomics -------------------------------------------------------------------------------------------------------

namespace hal::cuda::emulation {
template <class T, class Do>
T atomic(T* p, Do&& what) {
    Block& block = *running->block;
    block.check(p, sizeof(T));
    block.flush(p, sizeof(T));
    const T seen = what();
    block.saw(*running, p, sizeof(T), false);
    return seen;
}
}  // namespace hal::cuda::emulation

#define HAL_ATOMIC(name, builtin)                                                                \
    template <class T>                                                                           \
    T name(T* p, std::type_identity_t<T> v) {                                                    \
        return hal::cuda::emulation::atomic(p, [&] { return builtin(p, v, __ATOMIC_SEQ_CST); }); \
    }                                                                                            \
    template <class T>                                                                           \
    T name##_system(T* p, std::type_identity_t<T> v) {                                           \
        return name(p, v);                                                                       \
    }
HAL_ATOMIC(atomicAdd, __atomic_fetch_add)
HAL_ATOMIC(atomicSub, __atomic_fetch_sub)
HAL_ATOMIC(atomicAnd, __atomic_fetch_and)
HAL_ATOMIC(atomicOr, __atomic_fetch_or)
HAL_ATOMIC(atomicExch, __atomic_exchange_n)
#undef HAL_ATOMIC

template <class T>
T atomicCAS(T* p, std::type_identity_t<T> expected, std::type_identity_t<T> desired) {
    return hal::cuda::emulation::atomic(p, [&] {
        T seen = expected;
        __atomic_compare_exchange_n(p, &seen, desired, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
        return seen;
    });
}
template <class T>
T atomicCAS_system(T* p, std::type_identity_t<T> expected, std::type_identity_t<T> desired) {
    return atomicCAS(p, expected, desired);
}
template <class T>
T atomicMax(T* p, std::type_identity_t<T> v) {
    return hal::cuda::emulation::atomic(p, [&] {
        T seen = __atomic_load_n(p, __ATOMIC_SEQ_CST);
        while (seen < v && !__atomic_compare_exchange_n(p, &seen, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {}
        return seen;
    });
}

// --- loads ---------------------------------------------------------------------------------------------------------

template <class T>
T __ldcg(const T* p) {
    return hal::cuda::emulation::load(p);
}
template <class T>
T __ldg(const T* p) {
    return hal::cuda::emulation::load(p);
}
template <class T>
T __ldcv(const T* p) {
    return hal::cuda::emulation::load(p);
}

// --- arithmetic ----------------------------------------------------------------------------------------------------

inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __popcll(unsigned long long v) { return __builtin_popcountll(v); }
inline int __ffs(int v) { return __builtin_ffs(v); }
inline int __ffsll(long long v) { return __builtin_ffsll(v); }
inline int __clz(int v) { return v == 0 ? 32 : __builtin_clz(static_cast<unsigned>(v)); }
inline unsigned __umulhi(unsigned a, unsigned b) {
    return static_cast<unsigned>(static_cast<unsigned long long>(a) * b >> 32);
}
inline float __uint_as_float(unsigned v) { return hal::cuda::emulation::from_word<float>(v); }
inline unsigned __float_as_uint(float v) { return static_cast<unsigned>(hal::cuda::emulation::to_word(v)); }
inline float __int_as_float(int v) { return __uint_as_float(static_cast<unsigned>(v)); }
inline int __float_as_int(float v) { return static_cast<int>(__float_as_uint(v)); }
// The build forbids contraction (-ffp-contract=off), so each of these rounds once.
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fmaf(a, b, c); }
inline void __nanosleep(unsigned) { hal::cuda::emulation::running->block->poll(*hal::cuda::emulation::running); }
inline void __trap() { hal::cuda::emulation::running->block->trap("__trap was called"); }

template <class T>
constexpr T min(T a, std::type_identity_t<T> b) {
    return b < a ? b : a;
}
template <class T>
constexpr T max(T a, std::type_identity_t<T> b) {
    return a < b ? b : a;
}
