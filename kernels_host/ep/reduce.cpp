// SPDX-License-Identifier: Apache-2.0
#include "ep/reduce.hpp"

#include <algorithm>
#include <bit>
#include <cstring>

// One binary for every x86-64: the loader picks the widest clone. The arithmetic is the same in each (no contraction).
#if defined(__x86_64__) && defined(__GNUC__) && defined(__gnu_linux__)
#define HAL_VECTOR_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define HAL_VECTOR_CLONES
#endif

namespace hal::ep {
namespace {

using u16 = std::uint16_t;
using u32 = std::uint32_t;

inline __attribute__((always_inline)) float from_bits(u32 b) { return std::bit_cast<float>(b); }
inline __attribute__((always_inline)) u32 to_bits(float f) { return std::bit_cast<u32>(f); }

// Each conversion is branch-free, so that its loop becomes vector code.
struct Bf16 {
    using Stored = u16;
    static inline __attribute__((always_inline)) float load(u16 v) { return from_bits(u32(v) << 16); }
    // Nearest, ties to even; a NaN becomes the quiet NaN of its sign.
    static inline __attribute__((always_inline)) u16 store(float f) {
        const u32 b = to_bits(f);
        const u32 rounded = (b + 0x7fffu + (b >> 16 & 1u)) >> 16;
        const u32 nan = (b >> 16 & 0x8000u) | 0x7fc0u;
        return u16((b & 0x7fffffffu) > 0x7f800000u ? nan : rounded);
    }
};

struct Fp16 {
    using Stored = u16;
    static inline __attribute__((always_inline)) float load(u16 v) {
        const u32 sign = u32(v & 0x8000u) << 16, magnitude = u32(v & 0x7fffu) << 13;
        const u32 normal = magnitude + (112u << 23);
        // Subnormals: the magnitude as an integer, scaled exactly by 2^-24.
        const u32 tiny = to_bits(float(std::int32_t(v & 0x7fffu)) * from_bits(103u << 23));
        const u32 special = magnitude | 0x7f800000u;
        const u32 finite = magnitude < (1u << 23) ? tiny : normal;
        return from_bits(sign | (magnitude >= (31u << 23) ? special : finite));
    }
    static inline __attribute__((always_inline)) u16 store(float f) {
        const u32 b = to_bits(f), sign = b >> 16 & 0x8000u, a = b & 0x7fffffffu;
        const u32 normal = (a - (112u << 23) + 0xfffu + (a >> 13 & 1u)) >> 13;
        // Below 2^-14 the sum with 0.5 rounds to a multiple of 2^-24, ties to even, by itself.
        const u32 tiny = to_bits(from_bits(a) + 0.5F) - to_bits(0.5F);
        const u32 finite = a < (113u << 23) ? tiny : normal;
        const u32 large = a >= 0x47800000u ? 0x7c00u : finite;  // 2^16 and above: infinity
        const u32 nan = 0x7c00u + (a >> 13 & 0x3ffu);           // payload kept, as NumPy keeps it
        const u32 some_nan = nan == 0x7c00u ? 0x7c01u : nan;
        return u16(sign | (a > 0x7f800000u ? some_nan : large));
    }
};

struct Fp32 {
    using Stored = float;
    static inline __attribute__((always_inline)) float load(float v) { return v; }
    static inline __attribute__((always_inline)) float store(float v) { return v; }
};

constexpr std::size_t kChunk = 512;  // accumulators stay in the first-level cache

template <class T>
inline __attribute__((always_inline)) void add_row(float* acc, const void* row, std::size_t at, std::size_t n) {
    const auto* v = static_cast<const typename T::Stored*>(row) + at;
    for (std::size_t i = 0; i < n; ++i) acc[i] += T::load(v[i]);
}
template <class T>
inline __attribute__((always_inline)) void add_scaled(float* acc, const void* row, float w, std::size_t at, std::size_t n) {
    const auto* v = static_cast<const typename T::Stored*>(row) + at;
    for (std::size_t i = 0; i < n; ++i) acc[i] += w * T::load(v[i]);
}
template <class T>
inline __attribute__((always_inline)) void add_range(float* acc, const Sum& s, int from, int until, std::size_t at,
                                                     std::size_t n) {
    for (int r = from; r < until; ++r) {
        if (s.weights)
            add_scaled<T>(acc, s.rows[r], s.weights[r], at, n);
        else
            add_row<T>(acc, s.rows[r], at, n);
    }
}

template <class T>
inline __attribute__((always_inline)) void sum_all(const Sum& s, std::size_t width, void* y) {
    auto* out = static_cast<typename T::Stored*>(y);
    float acc[kChunk], inner[kChunk];
    for (std::size_t at = 0; at < width; at += kChunk) {
        const std::size_t n = std::min(kChunk, width - at);
        std::fill(acc, acc + n, 0.0F);
        add_range<T>(acc, s, 0, s.inner_begin, at, n);
        if (s.inner_end > s.inner_begin) {
            std::fill(inner, inner + n, 0.0F);
            add_range<T>(inner, s, s.inner_begin, s.inner_end, at, n);
            for (std::size_t i = 0; i < n; ++i) acc[i] += inner[i];
        }
        add_range<T>(acc, s, s.inner_end, s.count, at, n);
        for (int b = 0; b < s.bias_count; ++b) add_row<T>(acc, s.bias[b], at, n);
        for (std::size_t i = 0; i < n; ++i) out[at + i] = T::store(acc[i]);
    }
}

HAL_VECTOR_CLONES void sum_bf16(const Sum& s, std::size_t width, void* y) { sum_all<Bf16>(s, width, y); }
HAL_VECTOR_CLONES void sum_fp16(const Sum& s, std::size_t width, void* y) { sum_all<Fp16>(s, width, y); }
HAL_VECTOR_CLONES void sum_fp32(const Sum& s, std::size_t width, void* y) { sum_all<Fp32>(s, width, y); }

}  // namespace

void sum_rows(Element element, const Sum& sum, std::size_t width, void* y) {
    switch (element) {
        case Element::bfloat16: return sum_bf16(sum, width, y);
        case Element::float16: return sum_fp16(sum, width, y);
        case Element::float32: return sum_fp32(sum, width, y);
    }
}

}  // namespace hal::ep
