// SPDX-License-Identifier: Apache-2.0
// Where rows go: prefix sums over the counts that every source announced. `counts` is [ranks][stride] int32, row s from
// source s, its first destinations() entries the rows to each destination.
#pragma once
#include <cstdint>

#include "hal/shape.hpp"

namespace hal {

struct Counts {
    const std::int32_t* data;
    std::int64_t stride;
    HAL_FN std::int64_t at(std::int32_t source, std::int32_t destination) const {
        return data[source * stride + destination];
    }
};

// Rows to `destination` from sources below `source`; from all of them with source = ranks.
HAL_FN std::int64_t rows_before(const Counts& c, std::int32_t source, std::int32_t destination) {
    std::int64_t sum = 0;
    for (std::int32_t s = 0; s < source; ++s) sum += c.at(s, destination);
    return sum;
}

// start[g], g = 0 ... groups: where `rank`'s group g begins; the last is the number of rows, gaps included.
HAL_FN void group_starts(const EpShape& s, const Counts& c, std::int32_t rank, std::int64_t* start) {
    start[0] = 0;
    for (std::int32_t g = 0; g < groups(s); ++g) {
        const std::int64_t rows = rows_before(c, s.ranks, rank * groups(s) + g);
        start[g + 1] = start[g] + (s.layout == Layout::rank ? rows : align_up(rows, s.alignment));
    }
}

// Schedule latency: the fixed first row of (group, source).
HAL_FN std::int64_t fixed_place(const EpShape& s, std::int32_t group, std::int32_t source) {
    return (std::int64_t(group) * s.ranks + source) * s.max_tokens;
}

// Rows come back in the order in which they were sent: by destination, then token. The first row of `destination` among
// those that `home` sent to destinations `first` and above.
HAL_FN std::int64_t return_place(const Counts& c, std::int32_t home, std::int32_t first, std::int32_t destination) {
    std::int64_t sum = 0;
    for (std::int32_t d = first; d < destination; ++d) sum += c.at(home, d);
    return sum;
}
// Hierarchical: the first row of home `node`'s tokens in a gather area of node `self`, and of `node`'s partial sums at
// a home of node `self`.
HAL_FN std::int64_t gather_base(const EpShape& s, std::int32_t node, std::int32_t self) {
    return other_index(node, self) * direct_return_rows(s);
}
HAL_FN std::int64_t partial_base(const EpShape& s, std::int32_t node, std::int32_t self) {
    return direct_return_rows(s) + std::int64_t(other_index(node, self)) * s.max_tokens;
}
HAL_FN std::int64_t rail_base(const EpShape& s, std::int32_t node, std::int32_t self) {
    return std::int64_t(other_index(node, self)) * s.max_tokens;
}

}  // namespace hal
