// SPDX-License-Identifier: Apache-2.0
// float16 as CUDA converts it: to nearest, ties to even, subnormals kept; every NaN becomes 0x7fff.
#pragma once
#include <cuda_runtime.h>

struct __half {
    unsigned short bits;
};
struct alignas(4) __half2 {
    __half x, y;
};

inline __half __float2half_rn(float value) {
    const unsigned bits = __float_as_uint(value), magnitude = bits & 0x7fffffffu;
    const unsigned sign = bits >> 16 & 0x8000u;
    unsigned half;
    if (magnitude > 0x7f800000u) return {0x7fff};
    if (magnitude >= 0x477ff000u) {  // 65520 and more round to infinity
        half = 0x7c00u;
    } else if (magnitude >= 0x38800000u) {  // normal: 13 bits of the fraction go
        const unsigned rebased = magnitude - 0x38000000u;
        half = (rebased + 0xfffu + (rebased >> 13 & 1u)) >> 13;
    } else if (magnitude > 0x33000000u) {  // subnormal: units of 2^-24; half a unit rounds to zero
        const unsigned shift = 126u - (magnitude >> 23);
        const unsigned fraction = (magnitude & 0x7fffffu) | 0x800000u;
        const unsigned rest = fraction & ((1u << shift) - 1u), middle = 1u << (shift - 1u);
        half = fraction >> shift;
        if (rest > middle || (rest == middle && (half & 1u) != 0)) ++half;
    } else {
        half = 0;
    }
    return {static_cast<unsigned short>(sign | half)};
}
inline __half __float2half(float value) { return __float2half_rn(value); }
inline float __half2float(__half value) {
    const unsigned sign = static_cast<unsigned>(value.bits & 0x8000u) << 16;
    const unsigned exponent = value.bits >> 10 & 0x1fu, fraction = value.bits & 0x3ffu;
    if (exponent == 31) return __uint_as_float(sign | 0x7f800000u | fraction << 13);
    if (exponent != 0) return __uint_as_float(sign | (exponent + 112u) << 23 | fraction << 13);
    const float magnitude = static_cast<float>(fraction) * 0x1p-24f;
    return __uint_as_float(sign | __float_as_uint(magnitude));
}
inline __half2 __floats2half2_rn(float x, float y) { return {__float2half_rn(x), __float2half_rn(y)}; }
inline float2 __half22float2(__half2 pair) { return make_float2(__half2float(pair.x), __half2float(pair.y)); }
