// SPDX-License-Identifier: Apache-2.0
// Dispatch, layout rank: one row for each (token, rank), straight into its place.
#pragma once
#include "dispatch_plan.cuh"
#include "rows.cuh"

namespace hal::cuda {

// Ids, weights, source tokens and scales of 32 consecutive rows at one rank: written as runs, since lone 4-byte stores
// would cost the link a packet each. The first words are loaded ahead, like a row's piece.
struct RowWords {
    int peer, first, rows, token;  // token: of row `lane`
    int id[8];
    float weight[8];

    __device__ void find(const Plan& plan, int unit) {
        peer = 0;
        for (; unit >= units_of(plan, peer); ++peer) unit -= units_of(plan, peer);
        first = unit * 32;
        rows = min(32, static_cast<int>(plan.directory.total(peer)) - first);
        token = lane_id() < rows ? plan.directory.token(peer, first + lane_id()) : 0;
    }
    __device__ static int units_of(const Plan& plan, int peer) {
        return static_cast<int>(plan.directory.total(peer) + 31) / 32;
    }
    __device__ static int units(const Plan& plan, int world) {
        int n = 0;
        for (int r = 0; r < world; ++r) n += units_of(plan, r);
        return n;
    }
    // Words start .. start + 255 of the rows' ids and weights, eight for each lane.
    __device__ void load(const hal_cuda_ep& ep, const hal_cuda_dispatch_args& a, int start) {
        const auto* weights = reinterpret_cast<const float*>(a.topk_weights);
        int entry[8];
        int row = (start + lane_id()) / ep.topk, column = start + lane_id() - row * ep.topk;
        const int rows_on = 32 / ep.topk, columns_on = 32 - rows_on * ep.topk;  // 32 words further on
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int from = __shfl_sync(0xffffffffu, token, min(row, 31));
            entry[i] = row < rows ? from * ep.topk + column : -1;
            row += rows_on, column += columns_on;
            if (column >= ep.topk) column -= ep.topk, ++row;
        }
        expert_ids(a, id, [&](int i) { return entry[i]; });
#pragma unroll
        for (int i = 0; i < 8; ++i) weight[i] = weights != nullptr && entry[i] >= 0 ? __ldg(weights + entry[i]) : 1.0f;
    }
    __device__ void store(const hal_cuda_ep& ep, char* slot, std::size_t row, int start, Owner owner) const {
        auto* ids = reinterpret_cast<std::int32_t*>(slot + ep.slot_idx) + row * ep.topk;
        auto* weights = reinterpret_cast<float*>(slot + ep.slot_weights) + row * ep.topk;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int word = start + i * 32 + lane_id();
            if (word >= rows * ep.topk) continue;
            const bool here = id[i] >= 0 && owner.of(id[i], ep) == peer;
            store_window(ids + word, here ? id[i] - peer * ep.local_experts : -1);
            store_window(weights + word, here ? weight[i] : 0.0f);
        }
    }
    template <class Vector>
    __device__ void copy_scales(const Vector* from, Vector* to, int each) const {
        for (int start = 0; start < rows * each; start += 256) {
            Vector v[8];
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const int word = start + i * 32 + lane_id(), row = word / each;
                const int source = __shfl_sync(0xffffffffu, token, min(row, 31));
                if (row < rows) v[i] = __ldg(from + static_cast<std::size_t>(source) * each + word - row * each);
            }
#pragma unroll
            for (int i = 0; i < 8; ++i)
                if (start + i * 32 + lane_id() < rows * each) store_window(to + start + i * 32 + lane_id(), v[i]);
        }
    }
    __device__ void send(const hal_cuda_ep& ep, const hal_cuda_dispatch_args& a, const Plan& plan, Owner owner) {
        const std::size_t row = plan.base[peer] + first;
        char* slot = slot_at(ep, peer, plan.slot[peer]);
        store(ep, slot, row, 0, owner);
        for (int start = 256; start < rows * ep.topk; start += 256) {
            load(ep, a, start);
            store(ep, slot, row, start, owner);
        }
        // Of this rank's own rows straight into the handle: no block of this launch waits for another's stores.
        if (ep.keep_source && lane_id() < rows) {
            if (peer != ep.rank)
                store_window(reinterpret_cast<std::int32_t*>(slot + ep.slot_meta) + row + lane_id(), token);
            else if (!a.cached)
                reinterpret_cast<std::int32_t*>(a.source)[row + lane_id()] = token;
        }
        if (ep.scale_dim == 0) return;
        const auto* scales = reinterpret_cast<const float*>(a.scales);
        auto* out = reinterpret_cast<float*>(slot + ep.slot_scales) + row * ep.scale_dim;
        if (ep.scale_dim % 4 == 0)
            copy_scales(reinterpret_cast<const float4*>(scales), reinterpret_cast<float4*>(out), ep.scale_dim / 4);
        else
            copy_scales(scales, out, ep.scale_dim);
    }
};

// What the handle keeps of one token.
__device__ void keep_token(const hal_cuda_ep& ep, const hal_cuda_dispatch_args& a, const Plan& plan, int token) {
    if (a.cached) return;
    auto* pos = reinterpret_cast<std::int32_t*>(a.pos);
    for (int r = lane_id(); r < ep.world; r += 32)
        pos[token * ep.world + r] =
            plan.directory.has(token, r) ? static_cast<int>(plan.base[r]) + plan.directory.place(token, r) : -1;
    if (lane_id() < ep.topk) {
        const int entry = token * ep.topk + lane_id();
        reinterpret_cast<std::int32_t*>(a.idx)[entry] = expert_id(a, entry);
    }
}

// Units of both kinds in one numbering, the few word units spread evenly among the many row pieces: they wait for memory
// more than they move, so no moment should be all of them.
struct RankUnits {
    int words, pieces, stride;
    __device__ RankUnits(int word_units, int piece_units)
        : words(word_units), pieces(piece_units), stride(word_units > 0 ? max(piece_units / word_units, 0) + 1 : 1) {}
    __device__ int total() const { return words + pieces; }
    __device__ bool is_words(int unit) const { return words > 0 && unit < words * stride && unit % stride == 0; }
    __device__ int word_unit(int unit) const { return unit / stride; }
    __device__ int piece_unit(int unit) const {
        return words == 0 ? unit : unit - min((unit + stride - 1) / stride, words);
    }
};

// Each piece of a row is loaded once and stored at every rank that gets it. What the first unit needs is loaded before the
// headers are waited for.
template <class Headers>
__device__ bool push_rank_rows(const hal_cuda_ep& ep, const hal_cuda_dispatch_args& a, const Plan& plan,
                               Counters& counters, Headers headers) {
    const RowCut cut(ep.row_bytes);
    const Owner owner(ep);
    const RankUnits units(RowWords::units(plan, ep.world), a.tokens * cut.pieces);
    const int warps = gridDim.x * warps_in_block();
    const int warp = warp_id() * gridDim.x + blockIdx.x;  // consecutive units go to different multiprocessors
    Tickets tickets(&counters.tickets[0], warp, warps, units.total());
    Piece piece;
    RowWords words;
    const auto* x = reinterpret_cast<const char*>(a.x);
    auto load = [&] {
        if (units.is_words(tickets.unit())) {
            words.find(plan, units.word_unit(tickets.unit()));
            words.load(ep, a, 0);
            return;
        }
        const int unit = units.piece_unit(tickets.unit());
        piece.span(cut, unit % cut.pieces);
        piece.load(x + static_cast<std::size_t>(unit / cut.pieces) * ep.row_bytes);
    };
    if (tickets.more()) load();
    if (!headers()) return false;
    while (tickets.more()) {
        if (units.is_words(tickets.unit())) {
            words.send(ep, a, plan, owner);
        } else {
            const int unit = units.piece_unit(tickets.unit());
            const int token = unit / cut.pieces;
            for (int hop = 1, peer = ep.rank; hop <= ep.world;
                 ++hop) {  // each rank starts with another peer, itself last
                peer = peer + 1 == ep.world ? 0 : peer + 1;
                if (!plan.directory.has(token, peer)) continue;
                piece.store(slot_at(ep, peer, plan.slot[peer]) +
                            static_cast<std::size_t>(plan.base[peer] + plan.directory.place(token, peer)) *
                                ep.row_bytes);
            }
            if (unit % cut.pieces == 0) keep_token(ep, a, plan, token);
        }
        tickets.advance();
        if (tickets.more()) load();
    }
    return true;
}

}  // namespace hal::cuda
