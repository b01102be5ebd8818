// SPDX-License-Identifier: Apache-2.0
// Combine by writing: rows go into the home rank's staging, each with a flag of its own, and are summed as they come.
// Both directions busy, stores get more of the link than loads. In layout expert a rank first sums its own rows of a
// token (rounding that partial sum to the rows' type), so that one row crosses the link instead of up to k.
#include "combine.cuh"
#include "launch.cuh"
#include "rows.cuh"

namespace hal::cuda {
namespace {

// Rows this rank returns: of each source that it got rows from; this rank's own as well when the halves are separate
// launches, since the caller may then change them in between.
struct Sources {
    const hal_cuda_ep& ep;
    const std::int32_t* counts;
    bool own;
    __device__ int of(int source) const { return source == ep.rank && !own ? 0 : counts[source]; }
    __device__ int total() const {
        int n = 0;
        for (int s = 0; s < ep.world; ++s) n += of(s);
        return n;
    }
    __device__ int first_row(int source) const {
        if (ep.fixed_slots) return source * ep.max_tokens;
        int n = 0;
        for (int s = 0; s < source; ++s) n += counts[s];
        return n;
    }
};

__device__ __forceinline__ char* staging_at(const hal_cuda_ep& ep, int home, unsigned slot, int source, int token) {
    const std::size_t row = static_cast<std::size_t>(source) * ep.max_tokens + token;
    return at_peer(ep, home, slot_offset(ep, static_cast<int>(slot))) + row * ep.combine_row_bytes;
}
__device__ __forceinline__ float* staged_weights_at(const hal_cuda_ep& ep, int home, unsigned slot, int source,
                                                    int token) {
    const std::size_t row = static_cast<std::size_t>(source) * ep.max_tokens + token;
    return reinterpret_cast<float*>(at_peer(ep, home, slot_offset(ep, static_cast<int>(slot)) + ep.slot_back)) +
           row * ep.topk;
}

// A sum of this rank's own rows does not cross the link, so it stays float32.
__device__ __forceinline__ float* own_sums_at(const hal_cuda_ep& ep, unsigned slot, int token) {
    return reinterpret_cast<float*>(at_home(ep, slot_offset(ep, static_cast<int>(slot)) + ep.slot_own)) +
           static_cast<std::size_t>(token) * (ep.combine_row_bytes / (ep.combine_type == 2 ? 4 : 2));
}

// This rank's part of one token from the rows that `row` names for each lane, in top-k order, rounded to the rows' type.
template <class Type, bool kWeighted>
__device__ __forceinline__ void sum_rows(const hal_cuda_ep& ep, const hal_cuda_combine_args& a, int row, float weight,
                                         Sum<Type>& sum) {
    for (unsigned left = __ballot_sync(0xffffffffu, row >= 0); left != 0;) {
        const int one = __ffs(static_cast<int>(left)) - 1;
        left &= left - 1;
        const int two = left != 0 ? __ffs(static_cast<int>(left)) - 1 : -1;
        left &= left - 1;
        const std::size_t first = __shfl_sync(0xffffffffu, row, one),
                          second = __shfl_sync(0xffffffffu, row, max(two, 0));
        uint4 v[kSumVectors], w[kSumVectors];
        const auto* x = reinterpret_cast<const char*>(a.x);
        sum.load(x + first * ep.combine_row_bytes, v);
        if (two >= 0) sum.load(x + second * ep.combine_row_bytes, w);
        const float u = __shfl_sync(0xffffffffu, weight, one), t = __shfl_sync(0xffffffffu, weight, max(two, 0));
        sum.template add<kWeighted>(v, u);
        if (two >= 0) sum.template add<kWeighted>(w, t);
    }
}

template <class Type, bool kWeighted>
__device__ void push_row(const hal_cuda_ep& ep, const hal_cuda_combine_args& a, const Sources& from, int source,
                         int place, unsigned slot, std::uint32_t** flags) {
    const auto* meta = reinterpret_cast<const std::int32_t*>(a.source);
    const auto* back = reinterpret_cast<const float*>(a.row_weights);
    int token = 0;
    float carried = 0.0f;
    if (ep.expert_layout) {
        const std::size_t sources = static_cast<std::size_t>(ep.world) * ep.max_tokens, entries = sources * ep.topk;
        const std::size_t at = static_cast<std::size_t>(source) * ep.max_tokens + place;
        int row = -1;
        float weight = 1.0f;
        if (lane_id() < ep.topk) {
            row = __ldcg(meta + at * ep.topk + lane_id());
            if (kWeighted)
                weight = __ldcg(reinterpret_cast<const float*>(a.source) + entries + at * ep.topk + lane_id());
            if (a.carries_weights && row >= 0) carried = __ldcg(back + row);
        }
        token = __ldcg(meta + 2 * entries + at);
        const RowCut cut(ep.combine_row_bytes, kSumVectors);
        for (int p = 0; p < cut.pieces; ++p) {
            Sum<Type> sum(cut, p);
            sum_rows<Type, kWeighted>(ep, a, row, weight, sum);
            if (source == ep.rank)
                sum.store_sums(own_sums_at(ep, slot, token));
            else
                sum.store(staging_at(ep, source, slot, ep.rank, token));
        }
    } else {
        const int row = from.first_row(source) + place;
        token = __ldcg(meta + row);
        if (a.carries_weights && lane_id() < ep.topk)
            carried = __ldcg(back + static_cast<std::size_t>(row) * ep.topk + lane_id());
        const RowCut cut(ep.combine_row_bytes);
        for (int p = 0; p < cut.pieces; ++p) {
            Piece piece;
            piece.span(cut, p);
            piece.load(reinterpret_cast<const char*>(a.x) + static_cast<std::size_t>(row) * ep.combine_row_bytes);
            piece.store(staging_at(ep, source, slot, ep.rank, token));
        }
    }
    if (a.carries_weights && lane_id() < ep.topk)
        store_window(staged_weights_at(ep, source, slot, ep.rank, token) + lane_id(), carried);
    if (lane_id() == 0) flags[warp_id()] = combine_flag_at(ep, source, ep.rank, token);
}

// The flags of a block's batch of rows, one lane a row: the barrier orders all warps' stores before the fence.
__device__ __forceinline__ void flag_rows(const Batches& batch, std::uint32_t* const* flags, std::uint32_t epoch) {
    __syncthreads();
    if (warp_id() != 0 || lane_id() >= batch.size()) return;
    __threadfence_system();
    store_relaxed(flags[lane_id()], epoch);
}

template <class Type, bool kWeighted>
__device__ void send(const hal_cuda_ep& ep, const hal_cuda_combine_args& a, Counters& counters, std::uint64_t epoch,
                     bool split) {
    __shared__ unsigned slot[kMaxRanks];
    if (blockIdx.x == 0)
        for (int peer = threadIdx.x; peer < ep.world; peer += blockDim.x)
            store_relaxed(ready_at(ep, peer, ep.rank, epoch, 0),
                          stamped(epoch, static_cast<std::uint32_t>(a.scratch_slot)));
    // In a fused launch some blocks push and then sum, the others sum from the start. No block waits for rows before its
    // own pushes are done, so it does not matter which blocks run at the same time.
    const int pushers = split ? static_cast<int>(gridDim.x) : min(a.push_blocks, static_cast<int>(gridDim.x));
    if (static_cast<int>(blockIdx.x) >= pushers) return;
    const Sources from{ep, reinterpret_cast<const std::int32_t*>(a.counts), split};
    int alive = 1;
    for (int s = threadIdx.x; s < ep.world; s += blockDim.x) {
        std::uint32_t value = 0;
        // A rank that gets no rows may be a round ahead already, so its word is not waited for.
        if (from.of(s) > 0 &&
            !wait_stamped(ep, ready_at(ep, ep.rank, s, epoch, 0), epoch, HAL_CUDA_STAGE_READY, s, &value))
            alive = 0;
        slot[s] = value;
    }
    if (__syncthreads_and(alive) == 0) return;
    const int total = from.total();
    __shared__ std::uint32_t* flags[32];
    for (Batches t(&counters.tickets[0], blockIdx.x, pushers, total); t.more(); t.advance()) {
        if (t.unit() < total) {
            int place = t.unit(), hop = 1;
            for (; place >= from.of((ep.rank + hop) % ep.world); ++hop) place -= from.of((ep.rank + hop) % ep.world);
            const int source = (ep.rank + hop) % ep.world;
            push_row<Type, kWeighted>(ep, a, from, source, place, slot[source], flags);
        }
        flag_rows(t, flags, static_cast<std::uint32_t>(epoch));
    }
}

// This rank's own part, from the caller's rows.
template <class Type, bool kWeighted>
__device__ __forceinline__ void add_own(const hal_cuda_ep& ep, const hal_cuda_combine_args& a, const RowCut& cut,
                                        int piece, const Terms& terms, Sum<Type>& sum) {
    if (!ep.expert_layout) {
        const std::size_t row = __shfl_sync(0xffffffffu, terms.row, ep.rank & 31);
        sum.add_row(reinterpret_cast<const char*>(a.x) + row * ep.combine_row_bytes);
        return;
    }
    // Not rounded: this part does not cross the link.
    Sum<Type> part(cut, piece);
    sum_rows<Type, kWeighted>(ep, a, terms.rank == ep.rank ? terms.row : -1, terms.weight, part);
#pragma unroll
    for (int i = 0; i < kSumVectors; ++i)
#pragma unroll
        for (int j = 0; j < Type::kValues; ++j) sum.value[i][j] = __fadd_rn(sum.value[i][j], part.value[i][j]);
}

template <class Type, bool kWeighted>
__device__ bool sum_token(const hal_cuda_ep& ep, const hal_cuda_combine_args& a, const RowCut& cut, int token,
                          int piece, std::uint32_t epoch, bool split) {
    Sum<Type> sum(cut, piece);
    const auto* idx = reinterpret_cast<const std::int32_t*>(a.idx) + static_cast<std::size_t>(token) * ep.topk;
    for (int start = 0; start < (ep.expert_layout ? 32 : ep.world); start += 32) {
        const Terms terms(ep, a, token, start);
        for (int rank = start; rank < (ep.expert_layout ? ep.world : min(ep.world, start + 32)); ++rank) {
            if (__ballot_sync(0xffffffffu, terms.rank == rank) == 0) continue;
            if (rank == ep.rank && !split) {
                add_own<Type, kWeighted>(ep, a, cut, piece, terms, sum);
                continue;
            }
            int ok = 1;
            if (lane_id() == 0)
                ok = wait_flag(ep, combine_flag_at(ep, ep.rank, rank, token), epoch, HAL_CUDA_STAGE_COMBINE_ROWS, rank);
            __syncwarp();  // lane 0 alone acquired; a shuffle does not order the other lanes' loads after it
            if (!__shfl_sync(0xffffffffu, ok, 0)) return false;
            if (rank == ep.rank && ep.expert_layout)
                sum.add_sums(own_sums_at(ep, a.scratch_slot, token));
            else
                sum.add_row(staging_at(ep, ep.rank, a.scratch_slot, rank, token));
        }
    }
    add_biases<Type>(ep, a, token, sum);
    sum.store(reinterpret_cast<char*>(a.out) + static_cast<std::size_t>(token) * ep.combine_row_bytes);
    if (!a.carries_weights || piece != 0 || lane_id() >= ep.topk) return true;
    const int id = idx[lane_id()];
    float value = 0.0f;
    if (id >= 0) {
        const int rank = id / ep.local_experts;
        const auto* pos = reinterpret_cast<const std::int32_t*>(a.pos);
        const auto* back = reinterpret_cast<const float*>(a.row_weights);
        if (rank != ep.rank || split)
            value = __ldcg(staged_weights_at(ep, ep.rank, a.scratch_slot, rank, token) + lane_id());
        else
            value = ep.expert_layout
                        ? back[pos[token * ep.topk + lane_id()]]
                        : back[static_cast<std::size_t>(pos[token * ep.world + rank]) * ep.topk + lane_id()];
    }
    reinterpret_cast<float*>(a.out_weights)[static_cast<std::size_t>(token) * ep.topk + lane_id()] = value;
    return true;
}

template <class Type, bool kWeighted>
__global__ void __launch_bounds__(512, 1)
    combine_push_kernel(const __grid_constant__ hal_cuda_ep ep, const __grid_constant__ hal_cuda_combine_args a) {
    await_earlier_launch();
    Launch launch(state_of(ep)->combine);
    launch.begin();
    Counters& counters = launch.counters();
    const bool sends = (a.phases & HAL_CUDA_SEND) != 0, sums = (a.phases & HAL_CUDA_RECV) != 0;
    const std::uint64_t epoch = launch.finished + (sends ? 1 : 0);
    const bool split = !(sends && sums);
    if (sends) send<Type, kWeighted>(ep, a, counters, epoch, split);
    if (sums) {
        const RowCut cut(ep.combine_row_bytes, kSumVectors);
        const int warps = gridDim.x * warps_in_block();
        for (Tickets t(&counters.tickets[1], warp_id() * gridDim.x + blockIdx.x, warps, a.tokens * cut.pieces);
             t.more(); t.advance())
            if (!sum_token<Type, kWeighted>(ep, a, cut, t.unit() / cut.pieces, t.unit() % cut.pieces,
                                            static_cast<std::uint32_t>(epoch), split))
                break;
    }
    launch.end(sends, (a.phases & HAL_CUDA_RECV) != 0 ? epoch : 0);
}

template <class Type>
int push(const hal_cuda_ep& ep, const hal_cuda_combine_args& a, std::uint64_t stream) {
    const auto kernel = a.weighted ? combine_push_kernel<Type, true> : combine_push_kernel<Type, false>;
    return launch_early(kernel, ep.device, a.blocks, a.threads, 0, stream, "combine", ep, a);
}

}  // namespace

int combine_push(const hal_cuda_ep& ep, const hal_cuda_combine_args& a, std::uint64_t stream) {
    switch (ep.combine_type) {
        case 0:
            return push<Bfloat16>(ep, a, stream);
        case 1:
            return push<Float16>(ep, a, stream);
        default:
            return push<Float32>(ep, a, stream);
    }
}

}  // namespace hal::cuda
