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

__device__ __forceinline__ unsigned long long row_at(const hal_cuda_ep& ep, const hal_cuda_combine_args& a, int row) {
    return a.x + static_cast<unsigned long long>(row) * ep.combine_row_bytes;
}

// A sum of this rank's own rows does not cross the link, so it stays float32.
__device__ __forceinline__ float* own_sums_at(const hal_cuda_ep& ep, unsigned slot, int token) {
    return reinterpret_cast<float*>(at_home(ep, slot_offset(ep, static_cast<int>(slot)) + ep.slot_own)) +
           static_cast<std::size_t>(token) * (ep.combine_row_bytes / (ep.combine_type == 2 ? 4 : 2));
}

template <class Type, class Rows>
__device__ void push_row(const hal_cuda_ep& ep, const hal_cuda_combine_args& a, const Sources& from, int source,
                         int place, unsigned slot, std::uint32_t** flags) {
    const auto* meta = reinterpret_cast<const std::int32_t*>(a.source);
    const auto* back = reinterpret_cast<const float*>(a.row_weights);
    int token = 0;
    float carried = 0.0f;
    if constexpr (Rows::kExpert) {
        const std::size_t sources = static_cast<std::size_t>(ep.world) * ep.max_tokens, entries = sources * ep.topk;
        const std::size_t at = static_cast<std::size_t>(source) * ep.max_tokens + place;
        int row = -1;
        float weight = 1.0f;
        if (lane_id() < ep.topk) {
            row = __ldcg(meta + at * ep.topk + lane_id());
            if (Rows::kWeighted)
                weight = __ldcg(reinterpret_cast<const float*>(a.source) + entries + at * ep.topk + lane_id());
            if (a.carries_weights && row >= 0) carried = __ldcg(back + row);
        }
        token = __ldcg(meta + 2 * entries + at);
        const RowCut cut(ep.combine_row_bytes, kSumVectors);
        for (int p = 0; p < cut.pieces; ++p) {
            Sum<Type> sum(cut, p);
            add_rows<kSumRows, Rows::kWeighted>(sum, __ballot_sync(0xffffffffu, row >= 0), row_at(ep, a, row), weight,
                                                [] {});
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

template <class Type, class Rows>
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
            push_row<Type, Rows>(ep, a, from, source, place, slot[source], flags);
        }
        flag_rows(t, flags, static_cast<std::uint32_t>(epoch));
    }
}

// One token's terms, and what the flags of its rows said when they were looked at: both while the token before is summed.
template <class Rows>
struct Expected {
    Terms<Rows> terms;
    std::uint32_t seen;

    // Each lane looks at its own row's flag; an acquire, so that the row may be read if the flag is there.
    __device__ void look(const hal_cuda_ep& ep, int token, bool split) {
        // In layout rank without waiting for the terms: a flag without a row does no harm.
        if (Rows::kExpert ? terms.row < 0 : lane_id() >= ep.world) return;
        const int rank = terms.rank(ep, 0);
        if (rank != ep.rank || split) seen = load_acquire(combine_flag_at(ep, ep.rank, rank, token));
    }
    __device__ bool wait(const hal_cuda_ep& ep, const hal_cuda_combine_args& a, int token, std::uint32_t epoch,
                         bool split) const {
        bool ok = is_there(ep, token, 0, epoch, split);
        for (int start = 32; !Rows::kExpert && start < ep.world; start += 32)
            ok = Expected{Terms<Rows>(ep, a, token, start), epoch - 1}.is_there(ep, token, start, epoch, split) && ok;
        __syncwarp();  // every lane reads what another acquired; a vote does not order its loads after that
        return __all_sync(0xffffffffu, ok) != 0;
    }

  private:
    __device__ bool is_there(const hal_cuda_ep& ep, int token, int start, std::uint32_t epoch, bool split) const {
        if (terms.row < 0 || static_cast<std::int32_t>(seen - epoch) >= 0) return true;
        const int rank = terms.rank(ep, start);
        return (rank == ep.rank && !split) ||
               wait_flag(ep, combine_flag_at(ep, ep.rank, rank, token), epoch, HAL_CUDA_STAGE_COMBINE_ROWS, rank);
    }
};

// Layout rank: one row from each rank, this rank's own from where the caller has it.
template <class Type, class Meanwhile>
__device__ __forceinline__ void sum_rows(const hal_cuda_ep& ep, const hal_cuda_combine_args& a, int token,
                                         Terms<RankRows> terms, bool split, Sum<Type>& sum, Meanwhile meanwhile) {
    for (int start = 0;;) {
        const int rank = terms.rank(ep, start);
        const auto address =
            rank == ep.rank && !split
                ? row_at(ep, a, terms.row)
                : reinterpret_cast<unsigned long long>(staging_at(ep, ep.rank, a.scratch_slot, rank, token));
        add_rows<kSumRows, false>(sum, terms.lanes(), address, 1.0f, meanwhile);
        start += 32;
        if (start >= ep.world) return;
        terms = Terms<RankRows>(ep, a, token, start);
    }
}

// Layout expert: one sum from each rank. This rank's own is not rounded, since it does not cross the link; it is made first.
template <class Type, class Rows, class Meanwhile>
__device__ __forceinline__ void sum_parts(const hal_cuda_ep& ep, const hal_cuda_combine_args& a, int token,
                                          const Terms<Rows>& terms, bool split, Sum<Type>& sum, Meanwhile meanwhile) {
    auto* aside = dynamic_shared<float4>();
    const int rank = terms.row < 0 ? -1 : terms.rank(ep, 0);
    if (!split) {
        const unsigned mine = __ballot_sync(0xffffffffu, rank == ep.rank);
        add_rows<kSumRows, Rows::kWeighted>(sum, mine, row_at(ep, a, terms.row), terms.weight, meanwhile);
        sum.put_aside(aside);
    }
#pragma unroll 1
    for (int start = 0; start < ep.world; start += 32) {
        unsigned left = 0;
#pragma unroll 1
        for (int q = start; q < min(start + 32, ep.world); ++q)
            left |= static_cast<unsigned>(__any_sync(0xffffffffu, rank == q) != 0) << (q - start);
        const auto address =
            reinterpret_cast<unsigned long long>(staging_at(ep, ep.rank, a.scratch_slot, start + lane_id(), token));
        const unsigned own = static_cast<unsigned>(ep.rank - start) < 32 ? left & 1u << (ep.rank - start) : 0u;
#pragma unroll 1
        for (unsigned next = own != 0 ? left & (own - 1) : left;; next = left) {
            add_rows<kSumRows, false>(sum, next, address, 1.0f, [] {});
            left &= ~next;
            if (left == 0) break;
            if (split)
                sum.add_sums(own_sums_at(ep, a.scratch_slot, token));
            else
                sum.add_aside(aside);
            left &= ~own;
        }
    }
}

template <class Type, class Rows, class Meanwhile>
__device__ __forceinline__ void sum_token(const hal_cuda_ep& ep, const hal_cuda_combine_args& a, const RowCut& cut,
                                          int token, int piece, const Terms<Rows>& terms, bool split,
                                          Meanwhile meanwhile) {
    Sum<Type> sum(cut, piece);
    if constexpr (Rows::kExpert)
        sum_parts(ep, a, token, terms, split, sum, meanwhile);
    else
        sum_rows(ep, a, token, terms, split, sum, meanwhile);
    add_biases<Type>(ep, a, token, sum);
    sum.store(reinterpret_cast<char*>(a.out) + static_cast<std::size_t>(token) * ep.combine_row_bytes);
    if (!a.carries_weights || piece != 0 || lane_id() >= ep.topk) return;
    const int id = reinterpret_cast<const std::int32_t*>(a.idx)[static_cast<std::size_t>(token) * ep.topk + lane_id()];
    float value = 0.0f;
    if (id >= 0) {
        const int rank = id / ep.local_experts;
        const auto* pos = reinterpret_cast<const std::int32_t*>(a.pos);
        const auto* back = reinterpret_cast<const float*>(a.row_weights);
        if (rank != ep.rank || split)
            value = __ldcg(staged_weights_at(ep, ep.rank, a.scratch_slot, rank, token) + lane_id());
        else
            value = Rows::kExpert ? back[pos[token * ep.topk + lane_id()]]
                                  : back[static_cast<std::size_t>(pos[token * ep.world + rank]) * ep.topk + lane_id()];
    }
    reinterpret_cast<float*>(a.out_weights)[static_cast<std::size_t>(token) * ep.topk + lane_id()] = value;
}

template <class Type, class Rows>
__device__ void sum(const hal_cuda_ep& ep, const hal_cuda_combine_args& a, Counters& counters, std::uint32_t epoch,
                    bool split) {
    const RowCut cut(ep.combine_row_bytes, kSumVectors);
    Tickets t(&counters.tickets[1], warp_id() * gridDim.x + blockIdx.x, static_cast<int>(gridDim.x) * warps_in_block(),
              a.tokens * cut.pieces);
    auto look_up = [&] {
        return Expected<Rows>{t.more() ? Terms<Rows>(ep, a, t.unit() / cut.pieces, 0) : Terms<Rows>(), epoch - 1};
    };
    for (Expected<Rows> rows = look_up(); t.more();) {
        const int token = t.unit() / cut.pieces, piece = t.unit() - token * cut.pieces;
        t.advance();
        Expected<Rows> next = look_up();
        const int next_token = t.unit() / cut.pieces;
        if (!rows.wait(ep, a, token, epoch, split)) return;
        sum_token<Type>(ep, a, cut, token, piece, rows.terms, split, [&] { next.look(ep, next_token, split); });
        rows = next;
    }
}

template <class Type, class Rows>
__global__ void __launch_bounds__(512, 1)
    combine_push_kernel(const __grid_constant__ hal_cuda_ep ep, const __grid_constant__ hal_cuda_combine_args a) {
    await_earlier_launch();
    Launch launch(state_of(ep)->combine);
    launch.begin();
    Counters& counters = launch.counters();
    const bool sends = (a.phases & HAL_CUDA_SEND) != 0, sums = (a.phases & HAL_CUDA_RECV) != 0;
    const std::uint64_t epoch = launch.finished + (sends ? 1 : 0);
    const bool split = !(sends && sums);
    if (sends) send<Type, Rows>(ep, a, counters, epoch, split);
    if (sums) sum<Type, Rows>(ep, a, counters, static_cast<std::uint32_t>(epoch), split);
    launch.end(sends, (a.phases & HAL_CUDA_RECV) != 0 ? epoch : 0);
}

template <class Type>
int push(const hal_cuda_ep& ep, const hal_cuda_combine_args& a, std::uint64_t stream) {
    const auto start = [&](auto kernel, std::size_t shared) {
        return launch_early(kernel, ep.device, a.blocks, a.threads, shared, stream, "combine", ep, a);
    };
    if (!ep.expert_layout) return start(combine_push_kernel<Type, RankRows>, 0);
    return start(a.weighted ? combine_push_kernel<Type, WeightedExpertRows> : combine_push_kernel<Type, ExpertRows>,
                 Sum<Type>::aside_bytes(a.threads));
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
