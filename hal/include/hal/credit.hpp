// SPDX-License-Identifier: Apache-2.0
// Flow control by counting. A consumer publishes the last round it has finished; a producer of round n into a ring of
// `depth` stagings may write once round n - depth is finished, since n lands where n - depth lay.
#pragma once
#include <cstdint>

#include "hal/ordering.hpp"

namespace hal {

// The finished round to wait for before writing round `n`; 0 means that nothing has to be awaited.
HAL_FN std::uint64_t wanted_credit(std::uint64_t n, std::uint64_t depth) { return n > depth ? n - depth : 0; }
HAL_FN std::uint64_t ring_slot(std::uint64_t n, std::uint64_t depth) { return n % depth; }

// A request ring with free-running 32-bit indices: do `need` more entries fit, `guard` entries kept spare? Across the wrap.
HAL_FN bool ring_fits(std::uint32_t head, std::uint32_t tail, std::uint32_t need, std::uint32_t depth,
                      std::uint32_t guard) {
    return std::uint64_t(std::uint32_t(head - tail)) + need + guard < depth;
}

// Rounds may be finished in any order, but a credit says "this one and all before". Remembers up to 64 rounds ahead.
struct FinishedRounds {
    std::uint64_t all_until = 0;  // every round <= this is finished
    std::uint64_t later = 0;      // bit i: round all_until + 1 + i is finished

    HAL_FN void finish(std::uint64_t n) {
        later |= std::uint64_t(1) << (n - all_until - 1);
        while (later & 1) {
            later >>= 1;
            ++all_until;
        }
    }
};

}  // namespace hal
