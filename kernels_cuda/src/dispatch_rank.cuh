// SPDX-License-Identifier: Apache-2.0
// Dispatch, layout rank: one row for each (token, rank), straight into its place.
#pragma once
#include "dispatch_plan.cuh"
#include "rows.cuh"

namespace hal::cuda {

// Ids, weights, source tokens and scales of 32 consecutive rows at one rank: written as runs, since lone 4-byte stores
// would cost the link a packet each. A unit has up to 256 ids and weights, loaded ahead like a row's piece, and the first
// one of its rows the rest.
struct RowWords {
    int peer, first, rows, token;  // token: of row `lane`
    int start;                     // of the rows' ids and weights, the first that are this unit's
    int id[8];
    float weight[8];

    __device__ static int chunks(const hal_cuda_ep& ep) { return (ep.topk + 7) / 8; }
    __device__ static int groups(const Plan& plan, int peer) {
        return static_cast<int>(plan.directory.total(peer) + 31) / 32;
    }
    __device__ static int units(const hal_cuda_ep& ep, const Plan& plan) {
        int n = 0;
        for (int r = 0; r < ep.world; ++r) n += groups(plan, r);
        return n * chunks(ep);
    }
    __device__ void load(const hal_cuda_ep& ep, const hal_cuda_dispatch_args& a, const Plan& plan, int unit) {
        int group = unit;
        if (ep.topk > 8) group = unit / chunks(ep);
        start = (unit - group * chunks(ep)) * 256;
        for (peer = 0; group >= groups(plan, peer); ++peer) group -= groups(plan, peer);
        first = group * 32;
        rows = min(32, static_cast<int>(plan.directory.total(peer)) - first);
        token = lane_id() < rows ? plan.directory.token(peer, first + lane_id()) : 0;
        const Ids ids(a);
        const auto* weights = reinterpret_cast<const float*>(a.topk_weights);
        const Divisor topk(ep.topk);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int word = start + i * 32 + lane_id(), row = topk.of(word);
            const int from = __shfl_sync(0xffffffffu, token, min(row, 31));
            const int entry = from * ep.topk + word - row * ep.topk;
            id[i] = -1, weight[i] = 1.0f;
            if (row >= rows) continue;
            id[i] = ids.good(entry);
            if (weights != nullptr) weight[i] = __ldcg(weights + entry);
        }
    }
    template <class Vector>
    __device__ void copy_scales(const Vector* from, Vector* to, int each) const {
        const Divisor divisor(each);
#pragma unroll 1
        for (int begin = 0; begin < rows * each; begin += 128) {
            Vector v[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int word = begin + i * 32 + lane_id(), row = divisor.of(word);
                const int source = __shfl_sync(0xffffffffu, token, min(row, 31));
                if (row < rows) v[i] = __ldcg(from + static_cast<std::size_t>(source) * each + word - row * each);
            }
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (begin + i * 32 + lane_id() < rows * each) store_window(to + begin + i * 32 + lane_id(), v[i]);
        }
    }
    __device__ void send(const hal_cuda_ep& ep, const hal_cuda_dispatch_args& a, const Plan& plan, Owner owner) const {
        const std::size_t row = plan.base[peer] + first;
        char* slot = slot_at(ep, peer, plan.slot[peer]);
        auto* ids = reinterpret_cast<std::int32_t*>(slot + ep.slot_idx) + row * ep.topk;
        auto* weights = reinterpret_cast<float*>(slot + ep.slot_weights) + row * ep.topk;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int word = start + i * 32 + lane_id();
            if (word >= rows * ep.topk) break;
            const bool here = id[i] >= 0 && owner.of(id[i]) == peer;
            store_window(ids + word, here ? id[i] - peer * ep.local_experts : -1);
            store_window(weights + word, here ? weight[i] : 0.0f);
        }
        if (start > 0) return;
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
        reinterpret_cast<std::int32_t*>(a.idx)[entry] = Ids(a)[entry];
    }
}

// Units of both kinds in one numbering, the few word units spread among the many row pieces: they wait for memory more than
// they move, so no moment should be all of them. One in 2^shift is a word unit while there are any.
struct RankUnits {
    int words, pieces, shift;
    __device__ RankUnits(int word_units, int piece_units) : words(word_units), pieces(piece_units), shift(0) {
        if (words == 0) return;
        shift = __clz(words) - __clz(total());
        if (words << shift > total()) --shift;
    }
    __device__ int total() const { return words + pieces; }
    __device__ int before(int unit) const { return min((unit + (1 << shift) - 1) >> shift, words); }  // word units
    __device__ bool is_words(int unit) const { return (unit & ((1 << shift) - 1)) == 0 && unit >> shift < words; }
    __device__ int word_unit(int unit) const { return unit >> shift; }
    __device__ int piece_unit(int unit) const { return unit - before(unit); }
};

// Each piece of a row is loaded once and stored at every rank that gets it. What the first unit needs is loaded before the
// headers are waited for.
template <class Headers>
__device__ bool push_rank_rows(const hal_cuda_ep& ep, const hal_cuda_dispatch_args& a, const Plan& plan,
                               Counters& counters, Headers headers) {
    const RowCut cut(ep.row_bytes);
    const Owner owner(ep);
    const RankUnits units(RowWords::units(ep, plan), a.tokens * cut.pieces);
    const int warps = gridDim.x * warps_in_block();
    const int warp = warp_id() * gridDim.x + blockIdx.x;  // consecutive units go to different multiprocessors
    Tickets tickets(&counters.tickets[0], warp, warps, units.total());
    Piece piece;
    RowWords words;
    const auto* x = reinterpret_cast<const char*>(a.x);
    for (bool know = false;; tickets.advance()) {
        const bool more = tickets.more(), is_words = more && units.is_words(tickets.unit());
        const int unit = units.piece_unit(tickets.unit()), token = unit / cut.pieces;
        if (is_words) {
            words.load(ep, a, plan, units.word_unit(tickets.unit()));
        } else if (more) {
            piece.span(cut, unit - token * cut.pieces);
            piece.load(x + static_cast<std::size_t>(token) * ep.row_bytes);
        }
        if (!know && !headers()) return false;
        know = true;
        if (!more) return true;
        if (is_words) {
            words.send(ep, a, plan, owner);
            continue;
        }
        for (int hop = 1, peer = ep.rank; hop <= ep.world; ++hop) {  // each rank starts with another peer, itself last
            peer = peer + 1 == ep.world ? 0 : peer + 1;
            if (!plan.directory.has(token, peer)) continue;
            piece.store(slot_at(ep, peer, plan.slot[peer]) +
                        static_cast<std::size_t>(plan.base[peer] + plan.directory.place(token, peer)) * ep.row_bytes);
        }
        if (unit == token * cut.pieces) keep_token(ep, a, plan, token);
    }
}

}  // namespace hal::cuda
