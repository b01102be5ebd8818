// SPDX-License-Identifier: Apache-2.0
// Dispatch, layout rank: one row for each (token, rank), straight into its place.
#pragma once
#include "dispatch_plan.cuh"
#include "rows.cuh"

namespace hal::cuda {

// Ids, weights, source tokens and scales of 32 consecutive rows at one rank: written as runs, since lone 4-byte stores
// would cost the link a packet each.
__device__ void send_row_words(const hal_cuda_ep& ep, const hal_cuda_dispatch_args& a, const Plan& plan, int peer,
                               unsigned first) {
    const unsigned total = plan.directory.total(peer);
    const unsigned n = min(32u, total - first);
    const int mine = lane_id() < n ? plan.directory.token(peer, first + lane_id()) : 0;
    const std::size_t row = plan.base[peer] + first;
    char* slot = slot_at(ep, peer, plan.slot[peer]);
    const auto* weights = reinterpret_cast<const float*>(a.topk_weights);
    auto* idx_out = reinterpret_cast<std::int32_t*>(slot + ep.slot_idx) + row * ep.topk;
    auto* weight_out = reinterpret_cast<float*>(slot + ep.slot_weights) + row * ep.topk;
    const unsigned words = n * ep.topk;
    for (unsigned start = 0; start < words; start += 32) {
        const unsigned i = start + lane_id();
        const unsigned r = min(i / ep.topk, 31u);
        const int token = __shfl_sync(0xffffffffu, mine, static_cast<int>(r));
        if (i >= words) continue;
        const int entry = token * ep.topk + static_cast<int>(i % ep.topk);
        const int id = expert_id(a, entry);
        const bool here = id >= 0 && id / ep.local_experts == peer;
        idx_out[i] = here ? id - peer * ep.local_experts : -1;
        weight_out[i] = !here ? 0.0f : weights != nullptr ? __ldg(weights + entry) : 1.0f;
    }
    if (ep.keep_source && lane_id() < n) reinterpret_cast<std::int32_t*>(slot + ep.slot_meta)[row + lane_id()] = mine;
    if (ep.scale_dim == 0) return;
    const auto* scales = reinterpret_cast<const float*>(a.scales);
    auto* scale_out = reinterpret_cast<float*>(slot + ep.slot_scales) + row * ep.scale_dim;
    if (ep.scale_dim % 4 == 0) {
        const unsigned each = ep.scale_dim / 4, vectors = n * each;
        for (unsigned start = 0; start < vectors; start += 32) {
            const unsigned i = start + lane_id();
            const int token = __shfl_sync(0xffffffffu, mine, static_cast<int>(min(i / each, 31u)));
            if (i < vectors)
                reinterpret_cast<float4*>(scale_out)[i] =
                    __ldg(reinterpret_cast<const float4*>(scales) + static_cast<std::size_t>(token) * each + i % each);
        }
        return;
    }
    for (unsigned start = 0; start < n * ep.scale_dim; start += 32) {
        const unsigned i = start + lane_id();
        const int token = __shfl_sync(0xffffffffu, mine, static_cast<int>(min(i / ep.scale_dim, 31u)));
        if (i < n * ep.scale_dim) scale_out[i] = __ldg(scales + static_cast<std::size_t>(token) * ep.scale_dim + i % ep.scale_dim);
    }
}

// What the handle keeps of one token.
__device__ void keep_token(const hal_cuda_ep& ep, const hal_cuda_dispatch_args& a, const Plan& plan, int token) {
    if (a.cached) return;
    auto* pos = reinterpret_cast<std::int32_t*>(a.pos);
    for (int r = lane_id(); r < ep.world; r += 32)
        pos[token * ep.world + r] = plan.directory.has(token, r) ? static_cast<int>(plan.base[r]) + plan.directory.place(token, r) : -1;
    if (lane_id() < ep.topk) {
        const int entry = token * ep.topk + lane_id();
        reinterpret_cast<std::int32_t*>(a.idx)[entry] = expert_id(a, entry);
    }
}

__device__ int row_word_units(const Plan& plan, int world) {
    int units = 0;
    for (int r = 0; r < world; ++r) units += static_cast<int>(plan.directory.total(r) + 31) / 32;
    return units;
}

// Each piece of a row is loaded once and stored at every rank that gets it. The first piece is loaded before the headers
// are waited for: it needs nothing of them.
template <class Headers>
__device__ bool push_rank_rows(const hal_cuda_ep& ep, const hal_cuda_dispatch_args& a, const Plan& plan, Counters& counters,
                               Headers headers) {
    const RowCut cut(ep.row_bytes);
    const int word_units = row_word_units(plan, ep.world);
    const int warps = gridDim.x * warps_in_block();
    const int warp = warp_id() * gridDim.x + blockIdx.x;  // consecutive units go to different multiprocessors
    Tickets tickets(&counters.tickets[0], warp, warps, word_units + a.tokens * cut.pieces);
    Piece piece;
    const auto* x = reinterpret_cast<const char*>(a.x);
    auto load = [&] {
        const int unit = tickets.unit() - word_units;
        piece.span(cut, unit % cut.pieces);
        piece.load(x + static_cast<std::size_t>(unit / cut.pieces) * ep.row_bytes);
    };
    bool loaded = tickets.more() && tickets.unit() >= word_units;
    if (loaded) load();
    if (!headers()) return false;
    for (; tickets.more(); tickets.advance()) {
        int unit = tickets.unit();
        if (unit < word_units) {
            int peer = 0;
            for (; unit >= static_cast<int>(plan.directory.total(peer) + 31) / 32; ++peer) unit -= static_cast<int>(plan.directory.total(peer) + 31) / 32;
            send_row_words(ep, a, plan, peer, unit * 32u);
            continue;
        }
        if (!loaded) load();
        loaded = false;
        const int token = (unit - word_units) / cut.pieces;
        for (int hop = 1; hop <= ep.world; ++hop) {  // each rank starts with another peer, and ends with itself
            const int peer = (ep.rank + hop) % ep.world;
            if (!plan.directory.has(token, peer)) continue;
            piece.store(slot_at(ep, peer, plan.slot[peer]) +
                        static_cast<std::size_t>(plan.base[peer] + plan.directory.place(token, peer)) * ep.row_bytes);
        }
        if ((unit - word_units) % cut.pieces == 0) keep_token(ep, a, plan, token);
    }
    return true;
}

}  // namespace hal::cuda
