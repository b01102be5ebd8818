// SPDX-License-Identifier: Apache-2.0
// Dispatch in one kernel: route, exchange counts and receive slots, store every row straight into its final place at the
// target, signal, and (receive half) wait for the peers' rows. docs/cuda.md has the protocol and the order of its words.
#include <algorithm>

#include "dispatch_fixed.cuh"
#include "launch.cuh"

namespace hal::cuda {
namespace {

__device__ void clear_row(const hal_cuda_ep& ep, const hal_cuda_dispatch_args& a, const RowCut& cut, std::size_t row,
                          bool expert) {
    char* slot = slot_at(ep, ep.rank, a.slot);
    Piece nothing;
    nothing.clear();
    for (int p = 0; p < cut.pieces; ++p) {
        nothing.span(cut, p);
        nothing.store(slot + row * ep.row_bytes);
    }
    const int words = expert ? 1 : ep.topk;
    for (int i = lane_id(); i < words; i += 32) {
        store_window(reinterpret_cast<std::int32_t*>(slot + ep.slot_idx) + row * words + i, -1);
        store_window(reinterpret_cast<float*>(slot + ep.slot_weights) + row * words + i, 0.0f);
    }
    for (int i = lane_id(); i < ep.scale_dim; i += 32)
        store_window(reinterpret_cast<float*>(slot + ep.slot_scales) + row * ep.scale_dim + i, 0.0f);
}

__device__ void signal_peers(const hal_cuda_ep& ep) {
    __syncthreads();  // orders the whole block's stores before the one release for each peer
    for (int peer = threadIdx.x; peer < ep.world; peer += blockDim.x)
        if (peer != ep.rank) add_release(arrival_at(ep, peer, ep.rank), share_of_round());
}

// Rows that nobody writes become padding. Runs are measured before the peers are signalled, since they may then send the
// next round's headers; they are cleared after, since nobody waits for that.
// `dirty.rows(segment)` is where data ends; block 0 has `dirty.keep(segment)` write down where it ends from here on.
template <bool kExpert>
struct Clearing {
    Padding padding;
    int segments, units;
    unsigned first;

    template <class Bounds>
    __device__ Clearing(const hal_cuda_ep& ep, const hal_cuda_dispatch_args& a, const Plan& plan, unsigned rows,
                        bool moved, const Bounds& dirty)
        : padding{ep, a, plan, kExpert, rows}, segments(padding.segments()), units(0), first(rows) {
        if (!moved) {
            for (int s = threadIdx.x; blockIdx.x == 0 && s < segments; s += blockDim.x) dirty.keep(s);
            return;
        }
        if (segments == 1) {
            if (blockIdx.x == 0 && threadIdx.x == 0) dirty.keep(0);
            units = static_cast<int>(padding.length(0, dirty.rows(0))), first = padding.first(0);
            return;
        }
        __syncthreads();                                            // the scratch words are free from here on
        for (int s = threadIdx.x; s < segments; s += blockDim.x) {  // what they load is loaded by all threads at once
            plan.pads[s] = padding.length(s, dirty.rows(s)), plan.scratch[s] = padding.first(s);
            if (blockIdx.x == 0) dirty.keep(s);
        }
        __syncthreads();
        if (warp_id() == 0) warp_prefix(plan.pads, segments, [&](int s) { return plan.pads[s]; });
        __syncthreads();
        units = static_cast<int>(plan.pads[segments]);
    }
    __device__ std::size_t row(const Plan& plan, int unit) const {
        if (segments == 1) return first + unit;
        const int s = segment_of(plan.pads, segments, unit);
        return plan.scratch[s] + unit - plan.pads[s];
    }
};

// Of groups that follow each other: one bound, of the slot, is known before it is asked for and kept when peers were told.
struct TailBound {
    unsigned dirty;
    __device__ unsigned rows(int) const { return dirty; }
    __device__ void keep(int) const {}
};

template <bool kExpert>
__device__ bool send(const hal_cuda_ep& ep, const hal_cuda_dispatch_args& a, const Plan& plan, Launch& launch,
                     hal_cuda_error& bad) {
    __shared__ unsigned dirty;
    if (launch.reads()) {
        launch.read();
        // Has come back before the header goes out: building the directory ends with a block barrier.
        if (blockIdx.x == 0) await_previous_round(ep, launch.finished);
    }
    bool alive = build_directory<kExpert>(ep, a, plan, launch, &bad);
    const std::uint64_t epoch = launch.finished + 1;
    if (blockIdx.x == 0 && alive) {
        if (threadIdx.x == 0 && bad.claimed != 0 && scans_alone(a)) refuse(ep, bad, launch.counters());
        send_header<kExpert>(ep, a, plan, epoch, bad.detail != 0);
    }
    if (kExpert && !a.cached && alive) alive = number_and_send(ep, a, plan, launch, epoch);
    bool moved = false;
    unsigned rows = 0;
    const auto slot = static_cast<unsigned>(a.slot), most = static_cast<unsigned>(ep.slot_rows);
    auto headers = [&] {
        // Has come back before the headers have.
        if (threadIdx.x == 0) dirty = Dirty(ep, slot, 0).rows(most);
        moved = receive_headers<kExpert>(ep, a, plan, epoch);
        if (moved) place_groups<kExpert>(ep, a, plan);
        rows = rows_here<kExpert>(ep, a, plan, moved);
        return moved;
    };
    const RowCut cut(ep.row_bytes);
    const int warps = gridDim.x * warps_in_block(), warp = warp_id() * gridDim.x + blockIdx.x;
    if (!alive) return false;
    if (kExpert) {
        if (headers()) move_expert_rows(ep, a, plan, launch.counters(), cut, static_cast<std::uint32_t>(epoch));
    } else {
        push_rank_rows(ep, a, plan, launch.counters(), headers);
    }
    if (!moved && !a.cached) forget_routing(ep, a, nullptr);  // no block places anything without headers
    const Clearing<kExpert> clearing(ep, a, plan, rows, moved, TailBound{dirty});
    if (kExpert && blockIdx.x == 0) keep_counts<kExpert>(ep, a, plan, epoch, moved, rows);  // may read headers
    signal_peers(ep);
    if (!kExpert && blockIdx.x == 0) keep_counts<kExpert>(ep, a, plan, epoch, moved, rows);
    if (blockIdx.x == 0 && threadIdx.x == 0)
        Dirty(ep, slot, 0).put(moved ? still_dirty(dirty, rows, static_cast<unsigned>(a.pad_to_rows)) : most);
    for (Tickets t(&launch.counters().tickets[1], warp, warps, clearing.units); t.more(); t.advance())
        clear_row(ep, a, cut, clearing.row(plan, t.unit()), kExpert);
    return moved;
}

// Waits for the peers' rows, which land in slot `into`.
template <bool kExpert>
__device__ void receive(const hal_cuda_ep& ep, const hal_cuda_dispatch_args& a, const Launch& launch, unsigned into,
                        std::uint64_t epoch, const std::int32_t* from) {
    if (kExpert) {
        const RowCut cut(ep.row_bytes);
        receive_expert_rows(ep, a, launch.counters(), cut, into, from, Roles(ep, a, false),
                            static_cast<std::uint32_t>(epoch));
        return;
    }
    if (blockIdx.x != 0 && !ep.keep_source) return;
    // The last warp waits, while thread 0 still keeps counts.
    for (int peer = lane_id(); warp_id() == warps_in_block() - 1 && peer < ep.world; peer += 32)
        if (peer != ep.rank)
            wait_at_least(ep, arrival_at(ep, ep.rank, peer), epoch * kRound, HAL_CUDA_STAGE_ROWS, peer);
    if (!ep.keep_source || a.cached) return;
    __syncthreads();
    const auto* source = reinterpret_cast<const std::int32_t*>(slot_at(ep, ep.rank, into) + ep.slot_meta);
    for (int s = 0, first = 0; s < ep.world; first += from[s], ++s) {
        if (s == ep.rank) continue;  // kept when they were sent
        const int begin = ep.fixed_slots ? s * ep.max_tokens : first;
        for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < from[s]; i += gridDim.x * blockDim.x)
            reinterpret_cast<std::int32_t*>(a.source)[begin + i] = __ldcg(source + begin + i);
    }
}

// The send half with fixed slots, and in a whole dispatch of layout expert also the peers' rows. False when a wait failed.
template <bool kExpert>
__device__ bool send_fixed(const hal_cuda_ep& ep, const hal_cuda_dispatch_args& a, Plan& plan, Launch& launch,
                           hal_cuda_error& bad, std::int32_t* from, bool* moved) {
    if (launch.reads()) {
        launch.read();
        if (blockIdx.x == 0) offer_slots(ep, a, launch, launch.finished + 1);
    }
    if (!build_directory<kExpert>(ep, a, plan, launch, &bad)) return false;
    const std::uint64_t epoch = launch.finished + 1;
    if (blockIdx.x == 0 && threadIdx.x == 0 && bad.claimed != 0 && scans_alone(a)) refuse(ep, bad, launch.counters());
    bool alive = true;
    auto offers = [&] {
        alive = await_offers(ep, plan, epoch);
        if (alive && blockIdx.x == 0) send_tallies<kExpert>(ep, a, plan, epoch, bad.detail != 0);
        if (alive && (!kExpert || a.cached)) place_groups<kExpert>(ep, a, plan);
        return alive;
    };
    if constexpr (kExpert) {
        if (!offers()) return false;
        bool good = true;
        if (!a.cached) {
            const OwnedExperts own(ep);
            __syncthreads();  // block 0 still reads its histogram in send_tallies
            number_own_experts(ep, a, plan, own);
            send_expert_tallies(ep, plan, own, epoch);
            place_groups<kExpert>(ep, a, plan);
            if (!grid_barrier(ep, launch.counters(), 1)) return false;
            good = *reinterpret_cast<volatile unsigned*>(&launch.counters().refused) == 0;
        }
        *moved = move_fixed_expert_rows(ep, a, plan, launch.counters(), epoch, good, from);
    } else {
        push_rank_rows(ep, a, plan, launch.counters(), offers);
    }
    if (alive) signal_peers(ep);
    return alive;
}

template <bool kExpert>
__device__ void dispatch_fixed(const hal_cuda_ep& ep, const hal_cuda_dispatch_args& a, Plan& plan, Launch& launch,
                               hal_cuda_error& bad, std::int32_t* from) {
    const bool sends = (a.phases & HAL_CUDA_SEND) != 0, receives = (a.phases & HAL_CUDA_RECV) != 0;
    std::uint64_t epoch = 0;
    bool moved = true;
    std::uint64_t* note = tally_at(ep, ep.rank, static_cast<unsigned>(a.slot), ep.world);
    if (sends) {
        if (!send_fixed<kExpert>(ep, a, plan, launch, bad, from, &moved)) return;
        epoch = launch.finished + 1;
        if (!receives && blockIdx.x == 0 && threadIdx.x == 0) {
            store_window(note, stamped(epoch, plan.here));
            const Dirty uncounted(ep, plan.here, uncounted_run(ep));
            uncounted.put(uncounted.rows(2) == 0 ? 1 : 2);
        }
    } else {
        launch.begin();
        // A receive half belongs to the round that its send half noted, which need not be the last.
        const std::uint64_t noted = load_window(note);
        epoch =
            launch.finished - (static_cast<std::uint32_t>(launch.finished) - static_cast<std::uint32_t>(noted >> 32));
        plan.here = static_cast<std::uint32_t>(noted);
        if (blockIdx.x == 0 && threadIdx.x == 0)
            launch.lane.offered[(launch.launches + 1) & 1] = launch.lane.offered[launch.launches & 1];
    }
    if (!receives) return;
    if (!(kExpert && sends)) {
        moved = receive_tallies<kExpert>(ep, a, plan, epoch);
        fill_from(ep, plan, moved, from);
        receive<kExpert>(ep, a, launch, plan.here, epoch, from);
    }
    if (!moved && !a.cached) forget_routing(ep, a, &launch.counters());
    if (kExpert && !a.cached)
        for (int e = threadIdx.x; e <= ep.local_experts; e += blockDim.x)
            plan.start[e] = static_cast<unsigned>(e) * ep.world * ep.max_tokens;
    __syncthreads();
    const auto rows = static_cast<unsigned>(ep.slot_rows);
    const Clearing<kExpert> clearing(ep, a, plan, rows, moved,
                                     FixedBounds{{ep, a, plan, kExpert, rows}, sends ? 0u : 1u, moved});
    if (blockIdx.x == 0) keep_counts<kExpert>(ep, a, plan, epoch, moved, rows);
    const RowCut cut(ep.row_bytes);
    const int warps = gridDim.x * warps_in_block(), warp = warp_id() * gridDim.x + blockIdx.x;
    for (Tickets t(&launch.counters().tickets[1], warp, warps, clearing.units); t.more(); t.advance())
        clear_row(ep, a, cut, clearing.row(plan, t.unit()), kExpert);
    if (moved && plan.here != static_cast<unsigned>(a.slot)) relocate<kExpert>(ep, a, plan, launch.counters());
}

template <bool kExpert, bool kFixed>
__global__ void __launch_bounds__(512, 1)
    dispatch_kernel(const __grid_constant__ hal_cuda_ep ep, const __grid_constant__ hal_cuda_dispatch_args a) {
    __shared__ std::int32_t from[kMaxRanks];  // rows from each rank
    __shared__ hal_cuda_error bad;
    const bool sends = (a.phases & HAL_CUDA_SEND) != 0;
    Plan plan(dynamic_shared<std::uint32_t>(), ep, sends ? a.tokens : 0, kExpert);
    // What needs nothing of the launches before comes before the wait for them.
    if (threadIdx.x == 0) bad.claimed = 0, bad.detail = 0;
    for (int e = threadIdx.x; sends && e < ep.experts; e += blockDim.x) plan.scratch[e] = 0;
    __syncthreads();
    await_earlier_launch();
    Launch launch(state_of(ep)->dispatch);
    if constexpr (kFixed) {
        dispatch_fixed<kExpert>(ep, a, plan, launch, bad, from);
        launch.end(sends);
        return;
    }
    const auto* counts = reinterpret_cast<const std::int32_t*>(a.counts);
    bool moved = true;
    std::uint64_t epoch = 0;
    if (sends) {
        moved = send<kExpert>(ep, a, plan, launch, bad);
        epoch = launch.finished + 1;
    } else {
        launch.begin();
        // A receive half belongs to the round that its send half noted, which need not be the last.
        epoch = launch.finished -
                (static_cast<std::uint32_t>(launch.finished) - static_cast<std::uint32_t>(counts[ep.world + kEpoch]));
    }
    // A whole dispatch of layout expert received its rows while it pushed its own.
    if ((a.phases & HAL_CUDA_RECV) != 0 && !(kExpert && sends)) {
        for (int s = threadIdx.x; s < ep.world; s += blockDim.x)
            from[s] = !moved ? 0 : sends ? static_cast<std::int32_t>(plan.counts[s * ep.world + ep.rank]) : counts[s];
        __syncthreads();
        receive<kExpert>(ep, a, launch, static_cast<unsigned>(a.slot), epoch, from);
    }
    launch.end(sends);
}

std::size_t shared_words(const hal_cuda_ep& ep, const hal_cuda_dispatch_args& a) {
    const std::size_t tokens = (a.phases & HAL_CUDA_SEND) != 0 ? a.tokens : 0;
    const std::size_t world = ep.world, experts = ep.experts;
    const std::size_t each = (experts + a.blocks - 1) / a.blocks;
    const std::size_t owners = ep.expert_layout ? each * (1 + a.threads / 32) : 0;
    const std::size_t groups = (tokens + 31) / 32, own_groups = (groups + a.blocks - 1) / a.blocks;
    const std::size_t numbering =
        ep.expert_layout && tokens > kScanAlone ? experts * std::min<std::size_t>(own_groups, a.threads / 32) : 0;
    const std::size_t scratch = std::max({experts + 3, owners, numbering});
    return Directory::words(static_cast<int>(tokens), ep.world) + world * (2 + world) + experts +
           (ep.expert_layout ? experts + ep.local_experts + 1 : 0) + experts + 3 + scratch;
}

}  // namespace
}  // namespace hal::cuda

extern "C" int hal_cuda_dispatch(const hal_cuda_ep* ep, const hal_cuda_dispatch_args* args, std::uint64_t stream) {
    using namespace hal::cuda;
    const std::size_t bytes = shared_words(*ep, *args) * 4;
    const auto direct = ep->expert_layout ? dispatch_kernel<true, false> : dispatch_kernel<false, false>;
    const auto fixed = ep->expert_layout ? dispatch_kernel<true, true> : dispatch_kernel<false, true>;
    const auto kernel = ep->fixed_slots ? fixed : direct;
    return launch_early(kernel, ep->device, args->blocks, args->threads, bytes, stream, "dispatch", *ep, *args);
}
