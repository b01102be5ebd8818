// SPDX-License-Identifier: Apache-2.0
// Dispatch, schedule latency: every source has rows of its own in every slot, so a row's place follows from its sender's
// counts alone, and no rank waits for another's counts before its rows leave. What it must know is the receive slot: a rank
// offers the one for the next round when this round begins, if it has one to spare, else when that round begins. Counts
// travel beside the rows and are read by who needs them, at the receiver.
#pragma once
#include "dispatch_expert.cuh"
#include "dispatch_rank.cuh"

namespace hal::cuda {

// One warp of block 0, while the others work the routing out. A peer whose rows of the round before have come has read the
// offer of that round, whose word is written again; rows that peers read for a combine must be read, since their slot may
// be offered.
__device__ inline void offer_slots(const hal_cuda_ep& ep, const hal_cuda_dispatch_args& a, const Launch& launch,
                                   std::uint64_t epoch) {
    const std::uint64_t ahead = launch.lane.offered[launch.launches & 1];
    const bool offered = static_cast<std::uint32_t>(ahead >> 32) == static_cast<std::uint32_t>(epoch);
    await_previous_round(ep, launch.finished);
    __syncwarp();
    for (int peer = lane_id(); peer < ep.world; peer += 32) {
        if (!offered)
            store_relaxed(offer_at(ep, peer, ep.rank, epoch), stamped(epoch, static_cast<std::uint32_t>(a.slot)));
        if (a.next_slot >= 0)
            store_relaxed(offer_at(ep, peer, ep.rank, epoch + 1),
                          stamped(epoch + 1, static_cast<std::uint32_t>(a.next_slot)));
    }
    if (lane_id() == 0)
        launch.lane.offered[(launch.launches + 1) & 1] =
            a.next_slot >= 0 ? stamped(epoch + 1, static_cast<std::uint32_t>(a.next_slot)) : 0;
}

// Every rank's slot for this round, this one's own too. False when a wait failed.
__device__ inline bool await_offers(const hal_cuda_ep& ep, Plan& plan, std::uint64_t epoch) {
    int failed = 0;
    for (int source = threadIdx.x; source < ep.world; source += blockDim.x) {
        std::uint32_t slot = 0;
        if (!wait_stamped(ep, offer_at(ep, ep.rank, source, epoch), epoch, HAL_CUDA_STAGE_HEADER, source, &slot))
            failed = 1;
        plan.slot[source] = slot;
    }
    const bool known = __syncthreads_or(failed) == 0;
    plan.here = plan.slot[ep.rank];
    return known;
}

// Block 0: flags and rows, and experts' counts unless their blocks send them. Words of a handle's round say nothing new;
// they go out all the same, so that a rank that does without is not left waiting.
template <bool kExpert>
__device__ void send_tallies(const hal_cuda_ep& ep, const hal_cuda_dispatch_args& a, const Plan& plan,
                             std::uint64_t epoch, bool bad) {
    const unsigned flags = (a.cached ? kCached : 0u) | (bad ? kBadInput : 0u);
    const int words = 1 + (kExpert && !a.cached ? 0 : ep.local_experts);
    for (int i = threadIdx.x; i < ep.world * words; i += blockDim.x) {
        const int peer = i / words, word = i % words;
        std::uint32_t value = flags << 24 | (bad || a.cached ? 0u : plan.directory.total(peer));
        if (word > 0) value = a.cached ? 0u : plan.scratch[peer * ep.local_experts + word - 1];
        store_relaxed(tally_at(ep, peer, plan.slot[peer], ep.rank) + word, stamped(epoch, value));
    }
}

__device__ inline void send_expert_tallies(const hal_cuda_ep& ep, const Plan& plan, OwnedExperts own,
                                           std::uint64_t epoch) {
    for (int o = threadIdx.x; o < own.count; o += blockDim.x) {
        const int expert = own.first + o, peer = expert / ep.local_experts;
        store_relaxed(tally_at(ep, peer, plan.slot[peer], ep.rank) + 1 + expert % ep.local_experts,
                      stamped(epoch, plan.scratch[o]));
    }
}

// What the sources say of the rows that land here; false when the round is refused, or a wait failed.
template <bool kExpert>
__device__ bool receive_tallies(const hal_cuda_ep& ep, const hal_cuda_dispatch_args& a, const Plan& plan,
                                std::uint64_t epoch) {
    int refused = 0;
    auto word = [&](int source, int index) {
        std::uint32_t value = 0;
        if (!wait_stamped(ep, tally_at(ep, ep.rank, plan.here, source) + index, epoch, HAL_CUDA_STAGE_HEADER, source,
                          &value))
            refused = 1;
        return value;
    };
    for (int source = threadIdx.x; source < ep.world; source += blockDim.x) {
        const std::uint32_t value = word(source, 0);
        plan.counts[source * ep.world + ep.rank] =
            a.cached ? static_cast<unsigned>(reinterpret_cast<const std::int32_t*>(a.counts)[source])
                     : value & 0xffffffu;
        refused |= look_at_flags(ep, a, source, value >> 24);
    }
    // The last threads take these, so that all words are waited for at once.
    const int back = static_cast<int>(blockDim.x - 1 - threadIdx.x);
    for (int e = back; !a.cached && (kExpert || blockIdx.x == 0) && e < ep.local_experts; e += blockDim.x) {
        unsigned total = 0;
        for (int source = 0; source < ep.world; ++source) total += word(source, 1 + e);
        plan.expert_total[kExpert ? ep.rank * ep.local_experts + e : e] = total;
    }
    return __syncthreads_or(refused) == 0;
}

__device__ inline void fill_from(const hal_cuda_ep& ep, const Plan& plan, bool moved, std::int32_t* from) {
    for (int s = threadIdx.x; s < ep.world; s += blockDim.x)
        from[s] = moved ? static_cast<std::int32_t>(plan.counts[s * ep.world + ep.rank]) : 0;
    __syncthreads();
}

// As move_expert_rows, but what there is to take is learnt from the sources' words, so that too waits until this block's part
// of this rank's rows is sent. Without `good` ids nothing is sent: places would not fit.
__device__ inline bool move_fixed_expert_rows(const hal_cuda_ep& ep, const hal_cuda_dispatch_args& a, const Plan& plan,
                                              Counters& counters, std::uint64_t epoch, bool good, std::int32_t* from) {
    const RowCut cut(ep.row_bytes);
    const auto stamp = static_cast<std::uint32_t>(epoch);
    const Roles roles(ep, a, good);
    if (good) send_expert_rows(ep, a, plan, counters, cut, roles, stamp);
    if ((a.phases & HAL_CUDA_RECV) == 0) return true;
    const bool moved = receive_tallies<true>(ep, a, plan, epoch);
    fill_from(ep, plan, moved, from);
    receive_expert_rows(ep, a, counters, cut, plan.here, from, roles, stamp);
    return moved;
}

// Where data ends in each run of the caller's slot and, if it is another, of the one where this round's rows landed. Peers may put
// rows into an offered slot in a round that is then refused, or that no receive half counts: any of its rows may hold data then.
struct FixedBounds {
    Padding padding;
    unsigned counts;  // send halves whose rows this launch counts: of a receive half 1
    bool moved;

    __device__ Dirty of(unsigned slot, int run) const { return {padding.ep, slot, run}; }
    __device__ unsigned most() const { return static_cast<unsigned>(padding.ep.max_tokens); }
    __device__ unsigned rows(int run) const {
        const auto slot = static_cast<unsigned>(padding.a.slot);
        const Dirty uncounted = of(slot, uncounted_run(padding.ep)), bound = of(slot, run);
        return uncounted.rows(2) > (slot == padding.plan.here ? counts : 0) ? most() : bound.rows(most());
    }
    // For the next dispatch, when this one has cleared the caller's slot.
    __device__ void keep(int run) const {
        const auto slot = static_cast<unsigned>(padding.a.slot);
        const unsigned here = padding.plan.here, used = moved ? padding.received(run) : 0;
        const Dirty uncounted = of(here, uncounted_run(padding.ep)), landed = of(here, run);
        if (moved && here == slot)
            landed.put(used);
        else if (!moved || uncounted.rows(2) > counts)
            landed.put_all();
        else
            landed.put(max(landed.rows(most()), used));
        if (moved && here != slot) of(slot, run).put(used);
        if (run == 0 && uncounted.rows(2) != 0) uncounted.put(0);
    }
};

// Rows landed where they were offered to land, and the caller's arrays are elsewhere: a CUDA graph's are fixed, and the
// dispatch before it could not know of it. Once all have landed they are copied.
template <bool kExpert>
__device__ void relocate(const hal_cuda_ep& ep, const hal_cuda_dispatch_args& a, const Plan& plan, Counters& counters) {
    if (!grid_barrier(ep, counters, 2)) return;
    const Padding used{ep, a, plan, kExpert, 0};
    const RowCut cut(ep.row_bytes);
    const char* from = slot_at(ep, ep.rank, plan.here);
    char* to = slot_at(ep, ep.rank, static_cast<unsigned>(a.slot));
    const int words = kExpert ? 1 : ep.topk;
    const unsigned warps = gridDim.x * warps_in_block();
    auto copy_words = [&](std::uint64_t offset, std::size_t row, int each) {
        for (int i = lane_id(); i < each; i += 32) {
            const std::size_t at = offset + (row * each + i) * 4;
            store_window(reinterpret_cast<std::uint32_t*>(to + at),
                         __ldcg(reinterpret_cast<const unsigned*>(from + at)));
        }
    };
    for (int s = 0; s < used.segments(); ++s) {
        const unsigned length = used.received(s);
        for (unsigned i = blockIdx.x * warps_in_block() + warp_id(); i < length; i += warps) {
            const std::size_t row = static_cast<std::size_t>(s) * ep.max_tokens + i;
            for (int p = 0; p < cut.pieces; ++p) {
                Piece piece;
                piece.span(cut, p);
                piece.load_shared(from + row * ep.row_bytes);
                piece.store(to + row * ep.row_bytes);
            }
            copy_words(ep.slot_idx, row, words);
            copy_words(ep.slot_weights, row, words);
            copy_words(ep.slot_scales, row, ep.scale_dim);
        }
    }
}

}  // namespace hal::cuda
