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

__device__ __forceinline__ int lowest_lane(unsigned mask) { return __ffs(static_cast<int>(mask)) - 1; }

// A row goes once over the link to each rank, into the place of its first expert there; the receiver makes the other
// copies. Rows for this rank's own experts are all written here.
__device__ void push_expert_row(const hal_cuda_ep& ep, const hal_cuda_dispatch_args& a, const Plan& plan,
                                const RowCut& cut, int token) {
    const int entry = token * ep.topk + lane_id();
    auto* pos = reinterpret_cast<std::int32_t*>(a.pos);
    int id = -1, row = -1;
    float weight = 0.0f;
    if (lane_id() < ep.topk) {
        id = Ids(a)[entry];
        if (id >= 0) {
            row = a.cached ? pos[entry] : static_cast<int>(plan.expert_base[id]) + place_of(ep, a, token, entry, id);
            weight = a.topk_weights != 0 ? __ldcg(reinterpret_cast<const float*>(a.topk_weights) + entry) : 1.0f;
        }
        if (!a.cached) {
            pos[entry] = row;
            reinterpret_cast<std::int32_t*>(a.idx)[entry] = id;
        }
        reinterpret_cast<float*>(a.weights)[entry] = weight;
    }
    const int peer = id >= 0 ? id / ep.local_experts : -1;
    const unsigned at_peer_lanes = __match_any_sync(0xffffffffu, peer);
    const bool target = peer >= 0 && (peer == ep.rank || lane_id() == lowest_lane(at_peer_lanes));
    char* slot = peer >= 0 ? slot_at(ep, peer, plan.slot[peer]) : nullptr;
    const auto address =
        reinterpret_cast<unsigned long long>(slot + static_cast<std::size_t>(max(row, 0)) * ep.row_bytes);
    const unsigned targets = __ballot_sync(0xffffffffu, target);
    const char* x = reinterpret_cast<const char*>(a.x) + static_cast<std::size_t>(token) * ep.row_bytes;
    for (int p = 0; p < cut.pieces; ++p) {
        Piece piece;
        piece.span(cut, p);
        piece.load(x);
        for (unsigned left = targets; left != 0; left &= left - 1)
            piece.store(reinterpret_cast<char*>(__shfl_sync(0xffffffffu, address, lowest_lane(left))));
    }
    if (ep.scale_dim > 0) {
        const auto scales = reinterpret_cast<unsigned long long>(
            slot + ep.slot_scales + static_cast<std::size_t>(max(row, 0)) * ep.scale_dim * 4);
        for (unsigned left = targets; left != 0; left &= left - 1) {
            auto* out = reinterpret_cast<float*>(__shfl_sync(0xffffffffu, scales, lowest_lane(left)));
            for (int i = lane_id(); i < ep.scale_dim; i += 32)
                store_window(out + i, __ldcg(reinterpret_cast<const float*>(a.scales) +
                                             static_cast<std::size_t>(token) * ep.scale_dim + i));
        }
    }
    if (peer == ep.rank) {
        store_window(reinterpret_cast<std::int32_t*>(slot + ep.slot_idx) + row, id - ep.rank * ep.local_experts);
        store_window(reinterpret_cast<float*>(slot + ep.slot_weights) + row, weight);
    }
    for (int hop = 1; hop <= ep.world; ++hop) {
        const int to = (ep.rank + hop) % ep.world;
        if (!plan.directory.has(token, to)) continue;
        const int place = plan.directory.place(token, to);
        const int there = peer == to ? row : -1;
        if (to == ep.rank) {
            keep_source(ep, a, ep.rank, place, token, there, weight);
            continue;
        }
        if (lane_id() < ep.topk) {
            const Record record(ep, to, plan.slot[to], ep.rank, place);
            store_window(record.rows + lane_id(), there);
            store_window(record.weights + lane_id(), weight);
            store_window(record.experts + lane_id(), id - to * ep.local_experts);
            if (lane_id() == 0) store_window(record.token, token);
        }
    }
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

// A row that a peer pushed to its first place here: copies to its other experts' places, and its words.
__device__ bool receive_expert_row(const hal_cuda_ep& ep, const hal_cuda_dispatch_args& a, const RowCut& cut,
                                   unsigned into, int source, int place, std::uint32_t epoch) {
    int ok = 1;
    if (lane_id() == 0) ok = wait_flag(ep, row_flag_at(ep, ep.rank, source, place), epoch, HAL_CUDA_STAGE_ROWS, source);
    __syncwarp();  // lane 0 alone acquired; a shuffle does not order the other lanes' loads after it
    if (!__shfl_sync(0xffffffffu, ok, 0)) return false;
    const Record record(ep, ep.rank, into, source, place);
    int row = -1, expert = -1;
    float weight = 0.0f;
    if (lane_id() < ep.topk)
        row = __ldcg(record.rows + lane_id()), weight = __ldcg(record.weights + lane_id()),
        expert = __ldcg(record.experts + lane_id());
    const unsigned here = __ballot_sync(0xffffffffu, row >= 0);
    const int first = lowest_lane(here);
    char* slot = slot_at(ep, ep.rank, into);
    if (row >= 0) {
        store_window(reinterpret_cast<std::int32_t*>(slot + ep.slot_idx) + row, expert);
        store_window(reinterpret_cast<float*>(slot + ep.slot_weights) + row, weight);
    }
    keep_source(ep, a, source, place, __ldcg(record.token), row, weight);
    const unsigned others = here & (here - 1);
    if (others == 0) return true;
    const std::size_t first_row = __shfl_sync(0xffffffffu, row, first);
    for (int p = 0; p < cut.pieces; ++p) {
        Piece piece;
        piece.span(cut, p);
        piece.load_shared(slot + first_row * ep.row_bytes);
        for (unsigned left = others; left != 0; left &= left - 1)
            piece.store(slot +
                        static_cast<std::size_t>(__shfl_sync(0xffffffffu, row, lowest_lane(left))) * ep.row_bytes);
    }
    auto* scales = reinterpret_cast<float*>(slot + ep.slot_scales);
    for (unsigned left = others; ep.scale_dim > 0 && left != 0; left &= left - 1) {
        const std::size_t to = __shfl_sync(0xffffffffu, row, lowest_lane(left));
        for (int i = lane_id(); i < ep.scale_dim; i += 32)
            store_window(scales + to * ep.scale_dim + i, __ldcg(scales + first_row * ep.scale_dim + i));
    }
    return true;
}

// A unit's source and place among the rows that peers push here.
__device__ __forceinline__ void find_source(const hal_cuda_ep& ep, const std::int32_t* from, int unit, int* source,
                                            int* place) {
    int s = 0;
    for (; s == ep.rank || unit >= from[s]; ++s) unit -= s == ep.rank ? 0 : from[s];
    *source = s, *place = unit;
}
__device__ __forceinline__ int rows_from_peers(const hal_cuda_ep& ep, const std::int32_t* from) {
    int n = 0;
    for (int s = 0; s < ep.world; ++s) n += s == ep.rank ? 0 : from[s];
    return n;
}

// Warps of `receivers` that start with unit `first`, or with a ticket if it is negative, take the peers' rows.
__device__ inline void receive_expert_rows(const hal_cuda_ep& ep, const hal_cuda_dispatch_args& a, Counters& counters,
                                           const RowCut& cut, unsigned into, const std::int32_t* from, int first,
                                           int receivers, std::uint32_t epoch) {
    for (Tickets t(&counters.tickets[2], first, receivers, rows_from_peers(ep, from)); t.more(); t.advance()) {
        int source = 0, place = 0;
        find_source(ep, from, t.unit(), &source, &place);
        if (!receive_expert_row(ep, a, cut, into, source, place, epoch)) return;
    }
}

// Block number `first` of `pushers`, or one that joins late if it is negative, pushes this rank's rows.
__device__ inline void push_expert_rows(const hal_cuda_ep& ep, const hal_cuda_dispatch_args& a, const Plan& plan,
                                        Counters& counters, const RowCut& cut, int first, int pushers,
                                        std::uint32_t epoch) {
    for (Batches t(&counters.tickets[0], first, pushers, a.tokens); t.more(); t.advance()) {
        if (t.unit() < a.tokens) push_expert_row(ep, a, plan, cut, t.unit());
        flag_expert_rows(ep, plan, t, epoch);
    }
}

// Pushes this rank's rows; in a whole dispatch also receives the peers' at the same time, so that the link and the memory
// are busy together. Most blocks push first and receive then, the others the reverse: blocks that push wait for nobody, so
// every rank's pushes end, and with them every wait for a row.
__device__ inline void move_expert_rows(const hal_cuda_ep& ep, const hal_cuda_dispatch_args& a, const Plan& plan,
                                        Counters& counters, const RowCut& cut, std::uint32_t epoch) {
    __shared__ std::int32_t from[kMaxRanks];
    for (int s = threadIdx.x; s < ep.world; s += blockDim.x)
        from[s] = static_cast<std::int32_t>(plan.counts[s * ep.world + ep.rank]);
    __syncthreads();
    const int receives = (a.phases & HAL_CUDA_RECV) != 0 ? rows_from_peers(ep, from) : 0;
    const int blocks = static_cast<int>(gridDim.x), block = static_cast<int>(blockIdx.x);
    const int pushers = receives == 0 ? blocks : max(blocks * 5 / 8, 1);
    const bool pushes = block < pushers;
#pragma unroll 1
    for (int turn = 0; turn < 2; ++turn) {
        if (pushes == (turn == 0)) push_expert_rows(ep, a, plan, counters, cut, pushes ? block : -1, pushers, epoch);
        if (turn == 1) break;
        if (receives != 0)
            receive_expert_rows(ep, a, counters, cut, static_cast<unsigned>(a.slot), from,
                                pushes ? -1 : warp_id() * (blocks - pushers) + block - pushers,
                                (blocks - pushers) * warps_in_block(), epoch);
        __syncthreads();
    }
}

}  // namespace hal::cuda
