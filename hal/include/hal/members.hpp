// SPDX-License-Identifier: Apache-2.0
// Who is left. With on_peer_loss = mask the ranks that are left agree on a new view whenever one is lost; each view masks
// more ranks than the one before, and a masked rank never comes back (docs/contract.md, section 6).
#pragma once
#include <cstdint>

#include "hal/shape.hpp"

namespace hal {

struct Members {
    std::uint64_t view = 0;  // 0: everyone is there
    std::uint64_t lost = 0;  // bit r: rank r is masked
};

HAL_FN constexpr std::int32_t most_maskable_ranks() { return 64; }
HAL_FN std::uint64_t rank_bit(std::int32_t rank) { return std::uint64_t(1) << rank; }
HAL_FN bool is_lost(const Members& m, std::int32_t rank) { return m.lost && (m.lost & rank_bit(rank)) != 0; }

// How rows travel in a view. A lost forwarder leaves the ranks behind it unreached, so once a rank is masked every row
// takes the direct way; combine still sums node by node.
HAL_FN EpShape shape_in_view(EpShape s, const Members& m) {
    if (m.lost && is_hierarchical(s)) s.schedule = Schedule::direct;
    return s;
}

}  // namespace hal
