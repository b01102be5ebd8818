// SPDX-License-Identifier: Apache-2.0
// bfloat16 as CUDA converts it: to nearest, ties to even; every NaN becomes 0x7fff.
#pragma once
#include <cuda_runtime.h>

struct __nv_bfloat16 {
    unsigned short bits;
};
struct alignas(4) __nv_bfloat162 {
    __nv_bfloat16 x, y;
};

inline __nv_bfloat16 __float2bfloat16_rn(float value) {
    const unsigned bits = __float_as_uint(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return {0x7fff};
    return {static_cast<unsigned short>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16)};
}
inline __nv_bfloat16 __float2bfloat16(float value) { return __float2bfloat16_rn(value); }
inline float __bfloat162float(__nv_bfloat16 value) { return __uint_as_float(static_cast<unsigned>(value.bits) << 16); }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
    return {__float2bfloat16_rn(x), __float2bfloat16_rn(y)};
}
inline float2 __bfloat1622float2(__nv_bfloat162 pair) {
    return make_float2(__bfloat162float(pair.x), __bfloat162float(pair.y));
}
