// SPDX-License-Identifier: Apache-2.0
// The sum of combine: float32, in the order given, every product and every sum rounded once, the result rounded once.
#pragma once
#include <cstddef>
#include <cstdint>

namespace hal::ep {

enum class Element : std::uint8_t { bfloat16 = 0, float16 = 1, float32 = 2 };

inline std::size_t element_bytes(Element e) { return e == Element::float32 ? 4 : 2; }

// y = ((0 + row_0) + row_1) + ... + bias_0 + bias_1. With weights, each row is multiplied first. Rows [inner_begin,
// inner_end) are summed on their own, from zero, before that sum is added (a node's own partial sum).
struct Sum {
    const void* const* rows = nullptr;
    const float* weights = nullptr;  // one for each row, or null; rows outside [inner_begin, inner_end) with weight
    int count = 0;                   // exactly one are not changed by it
    int inner_begin = 0, inner_end = 0;
    const void* const* bias = nullptr;
    int bias_count = 0;
};

void sum_rows(Element element, const Sum& sum, std::size_t width, void* y);

}  // namespace hal::ep
