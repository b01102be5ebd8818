// SPDX-License-Identifier: Apache-2.0
// Combine by reading: a rank announces where its rows lie, its peers read them and sum. Few blocks suffice, nothing is
// staged when the rows lie in the window already, and the sum is exactly the contract's in both layouts.
#include <algorithm>

#include "combine.cuh"
#include "launch.cuh"
#include "rows.cuh"
#include "rows_ahead.cuh"

namespace hal::cuda {
namespace {

// Runs of rows in use, when the layout has fixed slots; else one run of all rows.
struct Used {
    const hal_cuda_ep& ep;
    const std::int32_t* counts;
    __device__ int segments() const { return !ep.fixed_slots ? 1 : ep.expert_layout ? ep.experts : ep.world; }
    __device__ unsigned length(int s) const {
        if (!ep.fixed_slots) return counts[ep.world + 1];
        return ep.expert_layout ? counts[ep.world + 3 + s] : counts[s];
    }
};

// Rows and weights that lie elsewhere go into this rank's scratch slot; the last block to finish announces them.
__device__ void copy_in(const hal_cuda_ep& ep, const hal_cuda_combine_args& a, Counters& counters, unsigned* prefix) {
    const Used used{ep, reinterpret_cast<const std::int32_t*>(a.counts)};
    // The scratch slot may be one that peers read in the round before.
    for (int peer = threadIdx.x; peer < ep.world; peer += blockDim.x)
        if (peer != ep.rank) await_readers(ep, peer);
    if (warp_id() == 0) warp_prefix(prefix, used.segments(), [&](int s) { return used.length(s); });
    __syncthreads();
    const RowCut cut(ep.combine_row_bytes);
    const int rows = static_cast<int>(prefix[used.segments()]), words = ep.expert_layout ? 1 : ep.topk;
    char* slot = at_home(ep, slot_offset(ep, a.scratch_slot));
    const int warps = gridDim.x * warps_in_block();
    const int pieces = a.window_offset < 0 ? cut.pieces : 1;
    for (Tickets t(&counters.tickets[0], warp_id() * gridDim.x + blockIdx.x, warps, rows * pieces); t.more();
         t.advance()) {
        const int i = t.unit() / pieces, s = segment_of(prefix, used.segments(), i);
        const std::size_t row = static_cast<std::size_t>(s) * ep.max_tokens + i - prefix[s];
        if (a.window_offset < 0) {
            Piece piece;
            piece.span(cut, t.unit() % pieces);
            piece.load(reinterpret_cast<const char*>(a.x) + row * ep.combine_row_bytes);
            piece.store(slot + row * ep.combine_row_bytes);
        }
        if (a.carries_weights && t.unit() % pieces == 0 && lane_id() < words)
            store_window(reinterpret_cast<float*>(slot + ep.slot_back) + row * words + lane_id(),
                         __ldcg(reinterpret_cast<const float*>(a.row_weights) + row * words + lane_id()));
    }
}

// The rows were written by earlier launches or by other blocks: a fence at system scope comes before, in the same threads.
__device__ void announce(const hal_cuda_ep& ep, const hal_cuda_combine_args& a, std::uint64_t epoch) {
    const std::uint64_t rows =
        a.window_offset >= 0 ? static_cast<std::uint64_t>(a.window_offset) : slot_offset(ep, a.scratch_slot);
    for (int peer = lane_id(); peer < ep.world; peer += 32) {
        if (a.carries_weights)
            store_relaxed(
                ready_at(ep, peer, ep.rank, epoch, 1),
                stamped(epoch, static_cast<std::uint32_t>((slot_offset(ep, a.scratch_slot) + ep.slot_back) / 16)));
        store_relaxed(ready_at(ep, peer, ep.rank, epoch, 0), stamped(epoch, static_cast<std::uint32_t>(rows / 16)));
    }
}

__device__ void send(const hal_cuda_ep& ep, const hal_cuda_combine_args& a, Counters& counters, std::uint64_t epoch,
                     unsigned* prefix) {
    if (a.window_offset >= 0 && !a.carries_weights) {
        if (blockIdx.x == 0 && warp_id() == 0) announce(ep, a, epoch);
        return;
    }
    __shared__ int last;
    copy_in(ep, a, counters, prefix);
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        last = atomicAdd(&counters.arrived[0], 1u) == gridDim.x - 1;
    }
    __syncthreads();
    if (!last || warp_id() != 0) return;
    __threadfence_system();
    announce(ep, a, epoch);
}

template <class Type, class Rows>
__device__ __forceinline__ void sum_terms(const hal_cuda_ep& ep, const hal_cuda_combine_args& a,
                                          const std::uint64_t* rows, int token, Terms<Rows> terms, Sum<Type>& sum) {
    for (int start = 0;;) {
        const auto address = terms.address(ep, rows, start);
        add_rows<kSumRows, Rows::kWeighted>(sum, terms.lanes(), address, terms.weight, [] {});
        start += 32;
        if (start >= terms.count(ep)) break;
        terms = Terms<Rows>(ep, a, token, start);
    }
    add_biases<Type>(ep, a, token, sum);
}

__device__ void fetch_weights(const hal_cuda_ep& ep, const hal_cuda_combine_args& a, const std::uint64_t* weights,
                              int token) {
    if (lane_id() >= ep.topk) return;
    const int entry = token * ep.topk + lane_id();
    const int id = reinterpret_cast<const std::int32_t*>(a.idx)[entry];
    float value = 0.0f;
    if (id >= 0) {
        const int rank = id / ep.local_experts;
        const auto* from = reinterpret_cast<const float*>(at_peer(ep, rank, weights[rank]));
        const auto* pos = reinterpret_cast<const std::int32_t*>(a.pos);
        value = ep.expert_layout
                    ? __ldcg(from + pos[entry])
                    : __ldcg(from + static_cast<std::size_t>(pos[token * ep.world + rank]) * ep.topk + lane_id());
    }
    reinterpret_cast<float*>(a.out_weights)[entry] = value;
}

__device__ void tell_done(const hal_cuda_ep& ep) {
    __syncthreads();
    for (int peer = threadIdx.x; peer < ep.world; peer += blockDim.x)
        if (peer != ep.rank) add_release(done_at(ep, peer, ep.rank), share_of_round());
}

template <class Type, class Rows, bool kFlyAhead>
__device__ void receive(const hal_cuda_ep& ep, const hal_cuda_combine_args& a, Counters& counters,
                        std::uint64_t epoch) {
    __shared__ std::uint64_t rows[kMaxRanks], weights[kMaxRanks];
    const RowCut cut(ep.combine_row_bytes, kSumVectors);
    const int warps = gridDim.x * warps_in_block(), units = a.tokens * cut.pieces;
    Tickets t(&counters.tickets[1], warp_id() * gridDim.x + blockIdx.x, warps, units);
    auto look_up = [&] { return t.more() ? Terms<Rows>(ep, a, t.unit() / cut.pieces, 0) : Terms<Rows>(); };
    Terms<Rows> terms = look_up();  // while the peers' words fly
    int alive = 1;
    for (int r = threadIdx.x; r < ep.world; r += blockDim.x) {
        std::uint32_t offset = 0;
        if (!wait_until(
                ep, [&] { return load_acquire(ready_at(ep, ep.rank, r, epoch, 0)); },
                [&](std::uint64_t v) {
                    offset = static_cast<std::uint32_t>(v);
                    return static_cast<std::uint32_t>(v >> 32) == static_cast<std::uint32_t>(epoch);
                },
                HAL_CUDA_STAGE_READY, r, stamped(epoch, 0)))
            alive = 0;
        rows[r] = static_cast<std::uint64_t>(offset) * 16;
        if (!a.carries_weights) continue;
        if (!wait_stamped(ep, ready_at(ep, ep.rank, r, epoch, 1), epoch, HAL_CUDA_STAGE_READY, r, &offset)) alive = 0;
        weights[r] = static_cast<std::uint64_t>(offset) * 16;
    }
    if (__syncthreads_and(alive) == 0) return;
    auto* out = reinterpret_cast<char*>(a.out);
    // At most one unit for each warp: the peers are told as soon as their rows are in registers, before this rank's stores.
    const bool once = !kFlyAhead && units <= warps;
    if constexpr (kFlyAhead) {
        RowsAhead<Rows> ahead(ep, a, cut, t, terms, rows);
        for (int unit, count; ahead.unit(unit, count);) {
            const int token = unit / cut.pieces, piece = unit - token * cut.pieces;
            Sum<Type> sum(cut, piece);
            ahead.add_to(sum, count > 0);
            for (int i = 1; i < count; ++i) ahead.add_to(sum, true);
            add_biases<Type>(ep, a, token, sum);
            if (a.carries_weights && piece == 0) fetch_weights(ep, a, weights, token);
            sum.store(out + static_cast<std::size_t>(token) * ep.combine_row_bytes);
        }
    }
    while (!kFlyAhead && (t.more() || once)) {
        const bool mine = t.more();
        const int token = mine ? t.unit() / cut.pieces : 0, piece = mine ? t.unit() - token * cut.pieces : 0;
        t.advance();
        const Terms<Rows> next = look_up();  // while this unit's rows fly
        Sum<Type> sum(cut, piece);
        if (mine) sum_terms<Type, Rows>(ep, a, rows, token, terms, sum);
        if (mine && a.carries_weights && piece == 0) fetch_weights(ep, a, weights, token);
        if (once) tell_done(ep);
        if (mine) sum.store(out + static_cast<std::size_t>(token) * ep.combine_row_bytes);
        if (once) break;
        terms = next;
    }
    if (!once) tell_done(ep);
    // The caller may change its rows once this launch has ended, so it ends when the peers have read them; unless the caller
    // was promised less (ep.expert_output).
    if (blockIdx.x != 0 || a.late_done) return;
    for (int peer = threadIdx.x; peer < ep.world; peer += blockDim.x)
        if (peer != ep.rank) wait_at_least(ep, done_at(ep, ep.rank, peer), epoch * kRound, HAL_CUDA_STAGE_DONE, peer);
}

template <class Type, class Rows, bool kFlyAhead>
__global__ void __launch_bounds__(512, 1)
    combine_pull_kernel(const __grid_constant__ hal_cuda_ep ep, const __grid_constant__ hal_cuda_combine_args a) {
    auto* prefix = dynamic_shared<unsigned>();
    await_earlier_launch();
    if (blockIdx.x == 0 && threadIdx.x < 32) __threadfence_system();  // for announce; runs while the counters are read
    Launch launch(state_of(ep)->combine);
    launch.begin();
    Counters& counters = launch.counters();
    const bool sends = (a.phases & HAL_CUDA_SEND) != 0;
    const std::uint64_t epoch = launch.finished + (sends ? 1 : 0);
    if (sends) send(ep, a, counters, epoch, prefix);
    if ((a.phases & HAL_CUDA_RECV) != 0) receive<Type, Rows, kFlyAhead>(ep, a, counters, epoch);
    launch.end(sends, (a.phases & HAL_CUDA_RECV) != 0 ? epoch : 0);
}

template <class Type, class Rows>
int pull_rows(const hal_cuda_ep& ep, const hal_cuda_combine_args& a, std::uint64_t stream) {
    const int units = a.tokens * RowCut(ep.combine_row_bytes, kSumVectors).pieces;
    const bool ahead = a.fly_ahead != 0 && units > a.blocks * (a.threads / 32) && copies_fly(ep.device);
    // copy_in's prefix, and then the rows.
    const std::size_t prefix = (ep.fixed_slots ? ep.experts + ep.world : 1) * 4 + 64;
    const std::size_t shared = std::max(prefix, ahead ? RowsAhead<Rows>::shared_bytes(a.threads) : 0);
    const auto kernel = ahead ? combine_pull_kernel<Type, Rows, true> : combine_pull_kernel<Type, Rows, false>;
    return launch_early(kernel, ep.device, a.blocks, a.threads, shared, stream, "combine", ep, a);
}

template <class Type>
int pull(const hal_cuda_ep& ep, const hal_cuda_combine_args& a, std::uint64_t stream) {
    return !ep.expert_layout ? pull_rows<Type, RankRows>(ep, a, stream)
           : a.weighted      ? pull_rows<Type, WeightedExpertRows>(ep, a, stream)
                             : pull_rows<Type, ExpertRows>(ep, a, stream);
}

}  // namespace
}  // namespace hal::cuda

extern "C" int hal_cuda_combine(const hal_cuda_ep* ep, const hal_cuda_combine_args* args, std::uint64_t stream) {
    using namespace hal::cuda;
    if (args->push) return combine_push(*ep, *args, stream);
    switch (ep->combine_type) {
        case 0:
            return pull<Bfloat16>(*ep, *args, stream);
        case 1:
            return pull<Float16>(*ep, *args, stream);
        default:
            return pull<Float32>(*ep, *args, stream);
    }
}
