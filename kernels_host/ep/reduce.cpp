// SPDX-License-Identifier: Apache-2.0
#include "ep/reduce.hpp"

#include <cstring>

// One binary for every x86-64: the loader picks the widest clone. The arithmetic is the same in each (no contraction).
#if defined(__x86_64__) && defined(__GNUC__) && defined(__gnu_linux__)
#define HAL_VECTOR_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define HAL_VECTOR_CLONES
#endif
#define HAL_INLINE inline __attribute__((always_inline))
#pragma GCC diagnostic ignored "-Wpsabi"  // vectors never cross a call: everything here is inlined

namespace hal::ep {
namespace {

using F = float __attribute__((vector_size(64)));
using U = std::uint32_t __attribute__((vector_size(64)));
using I = std::int32_t __attribute__((vector_size(64)));

// 32 elements as two vectors of float32. The 16-bit types split into even and odd elements, which needs no lane to move.
constexpr std::size_t kUnit = 32;
struct Unit {
    F a, b;
};

// `mask` lanes are all ones or all zeros, as comparisons give them.
template <class Mask>
HAL_INLINE U choose(Mask mask, U yes, U no) {
    return (U(mask) & yes) | (~U(mask) & no);
}

HAL_INLINE U read_words(const std::byte* from) {
    U v;
    std::memcpy(&v, from, sizeof v);
    return v;
}
HAL_INLINE void write_words(std::byte* to, U v) { std::memcpy(to, &v, sizeof v); }

struct Bf16 {
    static constexpr std::size_t kBytes = 2;
    static HAL_INLINE Unit read(const std::byte* from) {
        const U v = read_words(from);
        return {F(v << 16), F(v & 0xffff0000u)};
    }
    static HAL_INLINE void write(std::byte* to, const Unit& u) {
        write_words(to, round(u.a) >> 16 | (round(u.b) & 0xffff0000u));
    }
    // Nearest, ties to even, in the upper half; a NaN becomes the quiet NaN of its sign.
    static HAL_INLINE U round(F f) {
        const U b = U(f), rounded = b + 0x7fffu + (b >> 16 & 1u), nan = (b & 0x80000000u) | 0x7fc00000u;
        return choose((b & 0x7fffffffu) > 0x7f800000u, nan, rounded);
    }
};

struct Fp16 {
    static constexpr std::size_t kBytes = 2;
    static HAL_INLINE Unit read(const std::byte* from) {
        const U v = read_words(from);
        return {expand(v & 0xffffu), expand(v >> 16)};
    }
    static HAL_INLINE void write(std::byte* to, const Unit& u) { write_words(to, round(u.a) | round(u.b) << 16); }
    static HAL_INLINE F expand(U bits) {
        const U sign = (bits & 0x8000u) << 16, magnitude = (bits & 0x7fffu) << 13;
        // Subnormals: the magnitude as an integer, scaled exactly by 2^-24.
        const U tiny = U(__builtin_convertvector(I(bits & 0x7fffu), F) * 0x1p-24F);
        const U finite = choose(magnitude < (1u << 23), tiny, magnitude + (112u << 23));
        return F(sign | choose(magnitude >= (31u << 23), magnitude | 0x7f800000u, finite));
    }
    static HAL_INLINE U round(F f) {
        const U b = U(f), sign = b >> 16 & 0x8000u, a = b & 0x7fffffffu;
        const U normal = (a - (112u << 23) + 0xfffu + (a >> 13 & 1u)) >> 13;
        // Below 2^-14 the sum with 0.5 rounds to a multiple of 2^-24, ties to even, by itself.
        const U tiny = U(F(a) + 0.5F) - 0x3f000000u;
        const U finite = choose(a < (113u << 23), tiny, normal);
        const U large = choose(a >= 0x47800000u, U{} + 0x7c00u, finite);  // 2^16 and above: infinity
        const U payload = 0x7c00u + (a >> 13 & 0x3ffu);                   // of a NaN, kept as NumPy keeps it
        const U nan = choose(payload == 0x7c00u, U{} + 0x7c01u, payload);
        return sign | choose(a > 0x7f800000u, nan, large);
    }
};

struct Fp32 {
    static constexpr std::size_t kBytes = 4;
    static HAL_INLINE Unit read(const std::byte* from) {
        Unit u;
        std::memcpy(&u.a, from, sizeof u.a);
        std::memcpy(&u.b, from + sizeof u.a, sizeof u.b);
        return u;
    }
    static HAL_INLINE void write(std::byte* to, const Unit& u) {
        std::memcpy(to, &u.a, sizeof u.a);
        std::memcpy(to + sizeof u.a, &u.b, sizeof u.b);
    }
};

// `n` <= 32 elements; the last unit of a row may be short.
template <class T>
HAL_INLINE Unit load_unit(const void* row, std::size_t at, std::size_t n) {
    const auto* from = static_cast<const std::byte*>(row) + at * T::kBytes;
    if (n == kUnit) return T::read(from);
    std::byte whole[kUnit * T::kBytes] = {};
    std::memcpy(whole, from, n * T::kBytes);
    return T::read(whole);
}
template <class T>
HAL_INLINE void store_unit(void* row, std::size_t at, std::size_t n, const Unit& u) {
    auto* to = static_cast<std::byte*>(row) + at * T::kBytes;
    if (n == kUnit) return T::write(to, u);
    std::byte whole[kUnit * T::kBytes];
    T::write(whole, u);
    std::memcpy(to, whole, n * T::kBytes);
}

// Adds rows [from, until) to W units of accumulators, which stay in registers.
template <class T, int W, bool kWeighted>
HAL_INLINE void add_rows(Unit (&acc)[W], const Sum& s, int from, int until, std::size_t at, std::size_t n) {
    for (int r = from; r < until; ++r)
        for (int w = 0; w < W; ++w) {
            const Unit row = load_unit<T>(s.rows[r], at + std::size_t(w) * kUnit, n);
            acc[w].a += kWeighted ? s.weights[r] * row.a : row.a;
            acc[w].b += kWeighted ? s.weights[r] * row.b : row.b;
        }
}

// Columns [at, at + W * 32), or the last n < 32.
template <class T, int W, bool kWeighted>
HAL_INLINE void sum_strip(const Sum& s, std::size_t at, std::size_t n, void* y) {
    Unit acc[W]{};
    add_rows<T, W, kWeighted>(acc, s, 0, s.inner_begin, at, n);
    if (s.inner_end > s.inner_begin) {
        Unit inner[W]{};
        add_rows<T, W, kWeighted>(inner, s, s.inner_begin, s.inner_end, at, n);
        for (int w = 0; w < W; ++w) acc[w] = {acc[w].a + inner[w].a, acc[w].b + inner[w].b};
    }
    add_rows<T, W, kWeighted>(acc, s, s.inner_end, s.count, at, n);
    for (int b = 0; b < s.bias_count; ++b)
        for (int w = 0; w < W; ++w) {
            const Unit bias = load_unit<T>(s.bias[b], at + std::size_t(w) * kUnit, n);
            acc[w] = {acc[w].a + bias.a, acc[w].b + bias.b};
        }
    for (int w = 0; w < W; ++w) store_unit<T>(y, at + std::size_t(w) * kUnit, n, acc[w]);
}

template <class T, bool kWeighted>
HAL_INLINE void sum_row(const Sum& s, std::size_t width, void* y) {
    std::size_t at = 0;
    for (; at + 2 * kUnit <= width; at += 2 * kUnit) sum_strip<T, 2, kWeighted>(s, at, kUnit, y);
    for (; at + kUnit <= width; at += kUnit) sum_strip<T, 1, kWeighted>(s, at, kUnit, y);
    if (at < width) sum_strip<T, 1, kWeighted>(s, at, width - at, y);
}

template <class T>
HAL_INLINE void sum_all(const Sum& s, std::size_t width, void* y) {
    if (s.weights)
        sum_row<T, true>(s, width, y);
    else
        sum_row<T, false>(s, width, y);
}

HAL_VECTOR_CLONES void sum_bf16(const Sum& s, std::size_t width, void* y) { sum_all<Bf16>(s, width, y); }
HAL_VECTOR_CLONES void sum_fp16(const Sum& s, std::size_t width, void* y) { sum_all<Fp16>(s, width, y); }
HAL_VECTOR_CLONES void sum_fp32(const Sum& s, std::size_t width, void* y) { sum_all<Fp32>(s, width, y); }

}  // namespace

void sum_rows(Element element, const Sum& sum, std::size_t width, void* y) {
    switch (element) {
        case Element::bfloat16:
            return sum_bf16(sum, width, y);
        case Element::float16:
            return sum_fp16(sum, width, y);
        case Element::float32:
            return sum_fp32(sum, width, y);
    }
}

}  // namespace hal::ep
