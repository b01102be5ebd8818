// SPDX-License-Identifier: Apache-2.0
// Dispatch, layout expert: one row for each (token, expert); over the link once for each (token, rank).
#pragma once
#include "dispatch_plan.cuh"
#include "rows.cuh"

namespace hal::cuda {

// Where the entries lie among those of their experts, and in plan.scratch the totals of this block's experts. With few
// tokens the block looks at all entries; with many they were numbered when the directory was built.
__device__ inline void number_own_experts(const hal_cuda_ep& ep, const hal_cuda_dispatch_args& a, const Plan& plan,
                                          OwnedExperts own) {
    if (scans_alone(a))
        number_entries(ep, a, own, plan.scratch + own.count, plan.scratch, reinterpret_cast<std::int32_t*>(a.pos));
    else
        sum_groups(ep, plan.directory.groups, own, Scratch(ep).counts, plan.scratch);
}

// An entry's number among this rank's of the same expert, once all blocks have numbered theirs.
__device__ __forceinline__ int place_of(const hal_cuda_ep& ep, const hal_cuda_dispatch_args& a, int token, int entry,
                                        int id) {
    const int place = reinterpret_cast<const std::int32_t*>(a.pos)[entry];
    if (scans_alone(a)) return place;
    return place +
           static_cast<int>(__ldcg(Scratch(ep).counts + static_cast<std::size_t>(token >> 5) * ep.experts + id));
}

// Numbers the entries of this block's experts, sends their counts to everybody, and waits until all blocks have done so.
__device__ inline bool number_and_send(const hal_cuda_ep& ep, const hal_cuda_dispatch_args& a, const Plan& plan,
                                       const Launch& launch, std::uint64_t epoch) {
    const OwnedExperts own(ep);
    __syncthreads();  // block 0 still reads its histogram in send_header
    number_own_experts(ep, a, plan, own);
    // The round before must be over for these words too, and the ids good: block 0's header to this rank says both.
    std::uint32_t header = 0;
    if (threadIdx.x == 0)
        wait_stamped(ep, header_at(ep, ep.rank, ep.rank), epoch, HAL_CUDA_STAGE_GRID, ep.rank, &header);
    const bool bad = __syncthreads_or((header >> 24 & kBadInput) != 0) != 0;
    if (!bad) send_expert_counts(ep, own, plan.scratch, epoch);
    return grid_barrier(ep, launch.counters(), 1);
}

// What travels with a row to another rank: its token, and for each top-k position its row there (-1 = not there), weight
// and local expert.
struct Record {
    std::int32_t* rows;
    float* weights;
    std::int32_t *experts, *token;
    __device__ Record(const hal_cuda_ep& ep, int peer, unsigned slot, int source, int place) {
        const std::size_t at = static_cast<std::size_t>(source) * ep.max_tokens + place;
        rows = reinterpret_cast<std::int32_t*>(slot_at(ep, peer, slot) + ep.slot_meta) + at * (3 * ep.topk + 1);
        weights = reinterpret_cast<float*>(rows + ep.topk);
        experts = rows + 2 * ep.topk;
        token = rows + 3 * ep.topk;
    }
};

// Rows and weights of one source row into the handle, for a combine that sums them here.
__device__ void keep_source(const hal_cuda_ep& ep, const hal_cuda_dispatch_args& a, int source, int place, int token,
                            int row, float weight) {
    if (!ep.keep_source || lane_id() >= ep.topk) return;
    const std::size_t sources = static_cast<std::size_t>(ep.world) * ep.max_tokens, entries = sources * ep.topk;
    const std::size_t from = static_cast<std::size_t>(source) * ep.max_tokens + place;
    const std::size_t at = from * ep.topk + lane_id();
    if (lane_id() == 0) reinterpret_cast<std::int32_t*>(a.source)[2 * entries + from] = token;
    reinterpret_cast<std::int32_t*>(a.source)[at] = row;
    reinterpret_cast<float*>(a.source)[entries + at] = row >= 0 ? weight : 0.0f;
}

// One of a token's entries in each lane: those of other ranks' experts, or all others (`kOwn`); -1 in lanes that have none.
// Who takes an entry writes its words of the handle, and its place is read by nobody else, since its row replaces it there.
struct Entry {
    int id, peer, row;
    float weight;
};
template <bool kOwn>
__device__ __forceinline__ Entry take_entry(const hal_cuda_ep& ep, const hal_cuda_dispatch_args& a, const Plan& plan,
                                            int token) {
    Entry entry{-1, -1, -1, 0.0f};
    if (lane_id() >= ep.topk) return entry;
    const int at = token * ep.topk + lane_id(), id = Ids(a)[at];
    const int peer = id >= 0 ? id / ep.local_experts : -1;
    if (kOwn != (peer < 0 || peer == ep.rank)) return entry;
    auto* pos = reinterpret_cast<std::int32_t*>(a.pos);
    entry.id = id, entry.peer = peer;
    if (id >= 0) {
        entry.row = a.cached ? pos[at] : static_cast<int>(plan.expert_base[id]) + place_of(ep, a, token, at, id);
        entry.weight = a.topk_weights != 0 ? __ldcg(reinterpret_cast<const float*>(a.topk_weights) + at) : 1.0f;
    }
    if (!a.cached) {
        pos[at] = entry.row;
        reinterpret_cast<std::int32_t*>(a.idx)[at] = id;
    }
    reinterpret_cast<float*>(a.weights)[at] = entry.weight;
    return entry;
}

// A token's row and scales to the entries of the lanes `targets`.
__device__ __forceinline__ void store_row(const hal_cuda_ep& ep, const hal_cuda_dispatch_args& a, const Plan& plan,
                                          const RowCut& cut, int token, const Entry& entry, unsigned targets) {
    char* slot = entry.peer >= 0 ? slot_at(ep, entry.peer, plan.slot[entry.peer]) : nullptr;
    const std::size_t row = max(entry.row, 0);
    const auto address = reinterpret_cast<unsigned long long>(slot + row * ep.row_bytes);
    const char* x = reinterpret_cast<const char*>(a.x) + static_cast<std::size_t>(token) * ep.row_bytes;
#pragma unroll 1
    for (int p = 0; p < cut.pieces; ++p) {
        Piece piece;
        piece.span(cut, p);
        piece.load(x);
#pragma unroll 1
        for (unsigned left = targets; left != 0; left &= left - 1)
            piece.store(reinterpret_cast<char*>(__shfl_sync(0xffffffffu, address, lowest_lane(left))));
    }
    if (ep.scale_dim == 0) return;
    const auto scales = reinterpret_cast<unsigned long long>(slot + ep.slot_scales + row * ep.scale_dim * 4);
    for (unsigned left = targets; left != 0; left &= left - 1) {
        auto* out = reinterpret_cast<float*>(__shfl_sync(0xffffffffu, scales, lowest_lane(left)));
        for (int i = lane_id(); i < ep.scale_dim; i += 32)
            store_window(out + i, __ldcg(reinterpret_cast<const float*>(a.scales) +
                                         static_cast<std::size_t>(token) * ep.scale_dim + i));
    }
}

// A row goes once over the link to each other rank that gets it, into the place of its first expert there; the receiver
// makes the other copies.
__device__ __forceinline__ void push_expert_row(const hal_cuda_ep& ep, const hal_cuda_dispatch_args& a,
                                                const Plan& plan, const RowCut& cut, int token) {
    const Entry entry = take_entry<false>(ep, a, plan, token);
    const unsigned at_peer_lanes = __match_any_sync(0xffffffffu, entry.peer);
    const bool first = entry.peer >= 0 && lane_id() == lowest_lane(at_peer_lanes);
    store_row(ep, a, plan, cut, token, entry, __ballot_sync(0xffffffffu, first));
    for (int hop = 1; hop < ep.world; ++hop) {
        const int to = (ep.rank + hop) % ep.world;
        if (lane_id() >= ep.topk || !plan.directory.has(token, to)) continue;
        const Record record(ep, to, plan.slot[to], ep.rank, plan.directory.place(token, to));
        store_window(record.rows + lane_id(), entry.peer == to ? entry.row : -1);
        store_window(record.weights + lane_id(), entry.weight);
        store_window(record.experts + lane_id(), entry.id - to * ep.local_experts);
        if (lane_id() == 0) store_window(record.token, token);
    }
}

// A token's rows for this rank's own experts.
__device__ __forceinline__ void keep_expert_row(const hal_cuda_ep& ep, const hal_cuda_dispatch_args& a,
                                                const Plan& plan, const RowCut& cut, int token) {
    const Entry entry = take_entry<true>(ep, a, plan, token);
    const unsigned targets = __ballot_sync(0xffffffffu, entry.row >= 0);
    if (targets == 0) return;
    store_row(ep, a, plan, cut, token, entry, targets);
    if (entry.row >= 0) {
        char* slot = slot_at(ep, ep.rank, plan.slot[ep.rank]);
        store_window(reinterpret_cast<std::int32_t*>(slot + ep.slot_idx) + entry.row,
                     entry.id - ep.rank * ep.local_experts);
        store_window(reinterpret_cast<float*>(slot + ep.slot_weights) + entry.row, entry.weight);
    }
    keep_source(ep, a, ep.rank, plan.directory.place(token, ep.rank), token, entry.row, entry.weight);
}

// The flags of a block's batch of rows, one lane a row: the barrier orders all warps' stores before the fence.
__device__ inline void flag_expert_rows(const hal_cuda_ep& ep, const Plan& plan, const Batches& batch,
                                        std::uint32_t epoch) {
    __syncthreads();
    if (warp_id() != 0 || lane_id() >= batch.size()) return;
    __threadfence_system();
    const int token = batch.first() + lane_id();
    for (int hop = 1; hop < ep.world; ++hop) {
        const int to = (ep.rank + hop) % ep.world;
        if (plan.directory.has(token, to))
            store_relaxed(row_flag_at(ep, to, ep.rank, plan.directory.place(token, to)), epoch);
    }
}

// One piece of a row that a peer pushed to its first place here: copies to its other experts' places, and with the first
// piece its words.
__device__ __forceinline__ bool receive_expert_row(const hal_cuda_ep& ep, const hal_cuda_dispatch_args& a,
                                                   const RowCut& cut, unsigned into, int source, int place, int part,
                                                   std::uint32_t epoch) {
    int ok = 1;
    if (lane_id() == 0) ok = wait_flag(ep, row_flag_at(ep, ep.rank, source, place), epoch, HAL_CUDA_STAGE_ROWS, source);
    __syncwarp();  // lane 0 alone acquired; a shuffle does not order the other lanes' loads after it
    if (!__shfl_sync(0xffffffffu, ok, 0)) return false;
    const Record record(ep, ep.rank, into, source, place);
    const int row = lane_id() < ep.topk ? __ldcg(record.rows + lane_id()) : -1;
    const unsigned here = __ballot_sync(0xffffffffu, row >= 0), others = here & (here - 1);
    char* slot = slot_at(ep, ep.rank, into);
    const std::size_t first_row = __shfl_sync(0xffffffffu, row, lowest_lane(here));
    if (others != 0) {
        Piece piece;
        piece.span(cut, part);
        piece.load_shared(slot + first_row * ep.row_bytes);
#pragma unroll 1
        for (unsigned left = others; left != 0; left &= left - 1)
            piece.store(slot +
                        static_cast<std::size_t>(__shfl_sync(0xffffffffu, row, lowest_lane(left))) * ep.row_bytes);
    }
    if (part != 0) return true;
    float weight = 0.0f;
    if (row >= 0) {
        weight = __ldcg(record.weights + lane_id());
        store_window(reinterpret_cast<std::int32_t*>(slot + ep.slot_idx) + row, __ldcg(record.experts + lane_id()));
        store_window(reinterpret_cast<float*>(slot + ep.slot_weights) + row, weight);
    }
    keep_source(ep, a, source, place, __ldcg(record.token), row, weight);
    auto* scales = reinterpret_cast<float*>(slot + ep.slot_scales);
    for (unsigned left = others; ep.scale_dim > 0 && left != 0; left &= left - 1) {
        const std::size_t to = __shfl_sync(0xffffffffu, row, lowest_lane(left));
        for (int i = lane_id(); i < ep.scale_dim; i += 32)
            store_window(scales + to * ep.scale_dim + i, __ldcg(scales + first_row * ep.scale_dim + i));
    }
    return true;
}

// A row's source and place among the rows that peers push here.
__device__ __forceinline__ void find_source(const hal_cuda_ep& ep, const std::int32_t* from, int row, int* source,
                                            int* place) {
    int s = 0;
    for (; s == ep.rank || row >= from[s]; ++s) row -= s == ep.rank ? 0 : from[s];
    *source = s, *place = row;
}
__device__ __forceinline__ int rows_from_peers(const hal_cuda_ep& ep, const std::int32_t* from) {
    int n = 0;
    for (int s = 0; s < ep.world; ++s) n += s == ep.rank ? 0 : from[s];
    return n;
}

// Who begins with what. The first blocks push rows to other ranks: as many as keep the link busy, and with few tokens as many
// as have a row for each warp, but where there is a choice a quarter of the blocks begins with rows that are here already.
// The pushers join those by ticket.
struct Roles {
    int pushers, others;
    __device__ Roles(const hal_cuda_ep& ep, const hal_cuda_dispatch_args& a, bool pushes) {
        const int blocks = static_cast<int>(gridDim.x), warps = warps_in_block();
        const int for_link = (a.push_warps + warps - 1) / warps, for_rows = (a.tokens + warps - 1) / warps;
        pushers = pushes && ep.world > 1 ? min(max(min(for_link, blocks * 3 / 4), 1), for_rows) : 0;
        others = blocks - pushers;
    }
    __device__ bool pushes() const { return static_cast<int>(blockIdx.x) < pushers; }
    // Consecutive numbers, of which each warp begins with the unit, are on different multiprocessors.
    __device__ int warp() const { return pushes() ? -1 : warp_id() * others + static_cast<int>(blockIdx.x) - pushers; }
    __device__ int warps() const { return others * warps_in_block(); }
};

// Takes the peers' rows. The unit is a piece of a row, so that the rows that come last are everybody's work.
__device__ inline void receive_expert_rows(const hal_cuda_ep& ep, const hal_cuda_dispatch_args& a, Counters& counters,
                                           const RowCut& cut, unsigned into, const std::int32_t* from,
                                           const Roles& roles, std::uint32_t epoch) {
    const int units = rows_from_peers(ep, from) * cut.pieces;
    for (Tickets t(&counters.tickets[2], roles.warp(), roles.warps(), units); t.more(); t.advance()) {
        int source = 0, place = 0;
        const int row = t.unit() / cut.pieces;
        find_source(ep, from, row, &source, &place);
        if (!receive_expert_row(ep, a, cut, into, source, place, t.unit() - row * cut.pieces, epoch)) return;
    }
}

// Sends this rank's rows. Few blocks suffice for those of other ranks, which go at the link's pace, and these do that before
// all else; the others begin with the rows that stay here. Nobody waits for anybody here, and whoever waits for rows has been
// here: so every rank's pushes end, and with them every wait for a row.
__device__ inline void send_expert_rows(const hal_cuda_ep& ep, const hal_cuda_dispatch_args& a, const Plan& plan,
                                        Counters& counters, const RowCut& cut, const Roles& roles,
                                        std::uint32_t epoch) {
    if (roles.pushes()) {
        for (Batches t(&counters.tickets[0], blockIdx.x, roles.pushers, a.tokens); t.more(); t.advance()) {
            if (t.unit() < a.tokens) push_expert_row(ep, a, plan, cut, t.unit());
            flag_expert_rows(ep, plan, t, epoch);
        }
    }
    for (Tickets t(&counters.tickets[3], roles.warp(), roles.warps(), a.tokens); t.more(); t.advance())
        keep_expert_row(ep, a, plan, cut, t.unit());
}

// Sends this rank's rows, and in a whole dispatch then takes the peers', most of which come while this rank pushes its own.
__device__ inline void move_expert_rows(const hal_cuda_ep& ep, const hal_cuda_dispatch_args& a, const Plan& plan,
                                        Counters& counters, const RowCut& cut, std::uint32_t epoch) {
    __shared__ std::int32_t from[kMaxRanks];
    for (int s = threadIdx.x; s < ep.world; s += blockDim.x)
        from[s] = static_cast<std::int32_t>(plan.counts[s * ep.world + ep.rank]);
    __syncthreads();
    const Roles roles(ep, a, true);
    send_expert_rows(ep, a, plan, counters, cut, roles, epoch);
    if ((a.phases & HAL_CUDA_RECV) != 0)
        receive_expert_rows(ep, a, counters, cut, static_cast<unsigned>(a.slot), from, roles, epoch);
}

}  // namespace hal::cuda
