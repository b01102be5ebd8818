// SPDX-License-Identifier: Apache-2.0
// The device compiler's half and bfloat16_t for the host: storage, and the conversions that Cast does. Rounding is to
// nearest, ties to even; a NaN becomes the quiet NaN of its sign (bfloat16) or keeps its upper payload (half).
#pragma once
#include <bit>
#include <cstdint>

struct bfloat16_t {
    std::uint16_t bits;
};
struct half {
    std::uint16_t bits;
};

namespace hal_shim {

inline float to_float(float v) { return v; }
inline float to_float(bfloat16_t v) { return std::bit_cast<float>(std::uint32_t{v.bits} << 16); }
inline float to_float(half v) {
    const std::uint32_t sign = std::uint32_t(v.bits & 0x8000u) << 16, low = v.bits & 0x7fffu;
    if (low >= 0x7c00u) return std::bit_cast<float>(sign | 0x7f800000u | (low & 0x3ffu) << 13);
    if (low < 0x400u) {  // subnormal: an integer times 2^-24, exactly
        const float magnitude = float(low) * std::bit_cast<float>(103u << 23);
        return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(magnitude));
    }
    return std::bit_cast<float>(sign | ((low << 13) + (112u << 23)));
}

inline void from_float(float f, float& out) { out = f; }
inline void from_float(float f, bfloat16_t& out) {
    const auto b = std::bit_cast<std::uint32_t>(f);
    const bool nan = (b & 0x7fffffffu) > 0x7f800000u;
    out.bits = std::uint16_t(nan ? ((b >> 16 & 0x8000u) | 0x7fc0u) : (b + 0x7fffu + (b >> 16 & 1u)) >> 16);
}
inline void from_float(float f, half& out) {
    const auto b = std::bit_cast<std::uint32_t>(f);
    const std::uint32_t sign = b >> 16 & 0x8000u, a = b & 0x7fffffffu;
    std::uint32_t low;
    if (a > 0x7f800000u) {
        low = 0x7c00u + (a >> 13 & 0x3ffu);
        if (low == 0x7c00u) low = 0x7c01u;
    } else if (a >= 0x47800000u) {
        low = 0x7c00u;  // 2^16 and above
    } else if (a < (113u << 23)) {
        // Below 2^-14 the sum with 0.5 rounds to a multiple of 2^-24 by itself.
        low = std::bit_cast<std::uint32_t>(std::bit_cast<float>(a) + 0.5F) - std::bit_cast<std::uint32_t>(0.5F);
    } else {
        low = (a - (112u << 23) + 0xfffu + (a >> 13 & 1u)) >> 13;
    }
    out.bits = std::uint16_t(sign | low);
}

}  // namespace hal_shim
