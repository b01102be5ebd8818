// SPDX-License-Identifier: Apache-2.0
// The settings of one ExpertParallel that decide where bytes lie, and the numbers that follow from them. Plain data and
// arithmetic: no I/O, no allocation, so host, CUDA and Ascend kernels share it.
#pragma once
#include <cstdint>

#include "hal/ordering.hpp"

namespace hal {

enum class Layout : std::uint8_t { rank = 0, expert = 1 };
enum class Schedule : std::uint8_t { direct = 0, hierarchical = 1, latency = 2 };
enum class Completion : std::uint8_t {
    strong_signal = 0,
    strong_signal_no_cqe = 1,
    strong_last = 2,
    flag_in_block = 3
};

struct EpShape {
    std::int32_t ranks = 1;
    std::int32_t nodes = 1;  // equal groups of consecutive ranks
    std::int32_t num_experts = 1;
    std::int32_t top_k = 1;
    std::int32_t max_tokens = 1;
    std::int32_t alignment = 1;  // rows; layout expert
    std::int32_t num_buffers = 2;
    std::int32_t scale_dim = 0;           // float32 values for each row
    std::int32_t row_bytes = 16;          // of a dispatched row
    std::int32_t combine_row_bytes = 16;  // of a combined row
    std::int32_t signal_stride = 64;      // bytes between signal slots; 512 on Ascend
    Layout layout = Layout::rank;
    Schedule schedule = Schedule::direct;
    Completion completion = Completion::strong_signal;
    bool agreed = false;  // a round ends with every rank's word that it holds all rows (on_peer_loss = mask)
};

HAL_FN std::int64_t align_up(std::int64_t n, std::int64_t a) { return (n + a - 1) / a * a; }
HAL_FN std::int64_t smaller(std::int64_t a, std::int64_t b) { return a < b ? a : b; }

HAL_FN bool is_hierarchical(const EpShape& s) { return s.schedule == Schedule::hierarchical && s.nodes > 1; }

// A *destination* is what a row is addressed to: a rank (layout rank) or an expert (layout expert). Rank r owns the
// destinations r * G ... (r + 1) * G - 1, its *groups*, so one arithmetic serves both layouts.
HAL_FN std::int32_t local_experts(const EpShape& s) { return s.num_experts / s.ranks; }
HAL_FN std::int32_t groups(const EpShape& s) { return s.layout == Layout::rank ? 1 : local_experts(s); }
HAL_FN std::int32_t destinations(const EpShape& s) { return s.ranks * groups(s); }
HAL_FN std::int32_t destination_of(const EpShape& s, std::int32_t expert) {
    return s.layout == Layout::rank ? expert / local_experts(s) : expert;
}
HAL_FN std::int32_t owner_of(const EpShape& s, std::int32_t destination) { return destination / groups(s); }

// Ranks in nodes. A rank's *rail* on a node is the rank there with the same local index.
HAL_FN std::int32_t node_ranks(const EpShape& s) { return s.ranks / s.nodes; }
HAL_FN std::int32_t node_of(const EpShape& s, std::int32_t rank) { return rank / node_ranks(s); }
HAL_FN std::int32_t rail_of(const EpShape& s, std::int32_t rank, std::int32_t node) {
    return node * node_ranks(s) + rank % node_ranks(s);
}
HAL_FN std::int32_t node_destinations(const EpShape& s) { return destinations(s) / s.nodes; }
// Index of `node` among the nodes other than `self`, and back.
HAL_FN std::int32_t other_index(std::int32_t node, std::int32_t self) { return node < self ? node : node - 1; }
HAL_FN std::int32_t other_node(std::int32_t index, std::int32_t self) { return index < self ? index : index + 1; }
// The rank that delivers source's rows to `rank`: the source itself, or, from another node, the source's rail here.
HAL_FN std::int32_t deliverer_of(const EpShape& s, std::int32_t source, std::int32_t rank) {
    if (!is_hierarchical(s) || node_of(s, source) == node_of(s, rank)) return source;
    return rail_of(s, source, node_of(s, rank));
}

// The most rows that can arrive at a rank, alignment gaps included.
HAL_FN std::int64_t receive_rows(const EpShape& s) {
    const std::int64_t tokens = std::int64_t(s.ranks) * s.max_tokens;
    if (s.schedule == Schedule::latency) return tokens * groups(s);
    const std::int64_t rows = tokens * smaller(s.top_k, groups(s));
    return s.layout == Layout::rank ? rows : align_up(rows + std::int64_t(groups(s)) * (s.alignment - 1), s.alignment);
}
// The most rows that come back to a home rank without passing a node's partial sum.
HAL_FN std::int64_t direct_return_rows(const EpShape& s) {
    return s.max_tokens * smaller(s.top_k, is_hierarchical(s) ? node_destinations(s) : destinations(s));
}
HAL_FN std::int64_t other_nodes_rows(const EpShape& s) {
    return is_hierarchical(s) ? std::int64_t(s.nodes - 1) * s.max_tokens : 0;
}

// What travels beside a dispatched row: its scales, the token's global expert ids and weights, all 4 bytes each.
HAL_FN std::int64_t meta_bytes(const EpShape& s) { return align_up(4 * (s.scale_dim + 2 * std::int64_t(s.top_k)), 16); }
// Weights of a row on the way back (only on request); a node's partial row carries all k.
HAL_FN std::int64_t return_weights(const EpShape& s) {
    return s.layout == Layout::rank || is_hierarchical(s) ? s.top_k : 1;
}
// Counts in a header: rows to each destination, then tokens that cross to each node.
HAL_FN std::int64_t header_ints(const EpShape& s) { return destinations(s) + (is_hierarchical(s) ? s.nodes : 0); }

}  // namespace hal
