// SPDX-License-Identifier: Apache-2.0
// Rounds are numbered from 1, for ever: signals carry the round's number and are never reset, so a value left by an earlier
// round can never satisfy a later wait.
#pragma once
#include <cstdint>

#include "hal/ordering.hpp"

namespace hal {

// For devices that count in 32 bits: true if `seen` is `wanted` or later, across the wrap (up to 2^31 - 1 rounds apart).
HAL_FN bool reached(std::uint32_t seen, std::uint32_t wanted) { return std::int32_t(seen - wanted) >= 0; }

// The 8-byte word that opens a dispatch round at each peer: which receive slot this rank offers, and whether it exchanges
// counts or reuses a handle (and which, so that two handles are not mixed). The epoch is on top, so words only grow:
// 44 bits last five years at a round every 10 microseconds.
struct Ready {
    std::uint64_t epoch;
    std::uint32_t slot;  // < 64
    bool reuse;
    std::uint32_t tag;  // of the reused handle, modulo 2^13
};

HAL_FN constexpr std::uint32_t ready_slots() { return 64; }
HAL_FN std::uint32_t ready_tag(std::uint64_t epoch) { return std::uint32_t(epoch & 0x1fff); }
HAL_FN std::uint64_t ready_word(const Ready& r) {
    return r.epoch << 20 | std::uint64_t(r.slot) << 14 | std::uint64_t(r.reuse) << 13 | r.tag;
}
HAL_FN Ready ready_of(std::uint64_t word) {
    return {word >> 20, std::uint32_t(word >> 14 & 0x3f), (word >> 13 & 1) != 0, std::uint32_t(word & 0x1fff)};
}

// Value of a rows-have-arrived signal (and of a block's flag): the round and whether weights travel with the rows.
HAL_FN std::uint64_t rows_word(std::uint64_t epoch, bool weights) { return epoch << 1 | std::uint64_t(weights); }

}  // namespace hal
