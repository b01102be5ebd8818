// SPDX-License-Identifier: Apache-2.0
// What both combines share: the words a rank announces its rows or its staging with, and a token's list of rows.
#pragma once
#include "route.cuh"
#include "sum.cuh"

namespace hal::cuda {

// Two words from each rank, 64 bytes apart: where its rows (pull, in 16-byte units) or its staging slot (push) lies, and
// where its weights lie. Two sets in turn: a rank may announce the next round while a slow peer has yet to read this one.
__device__ __forceinline__ std::uint64_t* ready_at(const hal_cuda_ep& ep, int peer, int source, std::uint64_t epoch,
                                                   int word) {
    const std::size_t line = (static_cast<std::size_t>(epoch & 1) * ep.world + source) * 2 + word;
    return reinterpret_cast<std::uint64_t*>(at_peer(ep, peer, ep.off_ready) + line * 64);
}
__device__ __forceinline__ std::uint32_t* combine_flag_at(const hal_cuda_ep& ep, int peer, int source, int token) {
    return reinterpret_cast<std::uint32_t*>(at_peer(ep, peer, ep.off_combine_flags)) +
           static_cast<std::size_t>(source) * ep.max_tokens + token;
}
__device__ __forceinline__ std::uint64_t slot_offset(const hal_cuda_ep& ep, int slot) {
    return ep.off_slots + static_cast<std::uint64_t>(slot) * ep.slot_bytes;
}

// What a kernel that combines is compiled for: what the rows are that make up a token.
struct RankRows {
    static constexpr bool kExpert = false, kWeighted = false;
};
struct ExpertRows {
    static constexpr bool kExpert = true, kWeighted = false;
};
struct WeightedExpertRows {
    static constexpr bool kExpert = true, kWeighted = true;
};

// Those rows, in the order in which they are summed; one for each lane. More than 32 ranks take several rounds of lanes. All is
// loaded at once, and nothing is looked at before it is asked for: a warp has the next unit's terms loaded while it sums.
template <class Rows>
struct Terms {
    int row;       // its place among the rows of its expert's rank or of its rank, -1 = none
    int expert;    // layout expert
    float weight;  // if weighted

    __device__ static int count(const hal_cuda_ep& ep) { return Rows::kExpert ? ep.topk : ep.world; }
    __device__ Terms() : row(-1), expert(-1), weight(1.0f) {}
    __device__ Terms(const hal_cuda_ep& ep, const hal_cuda_combine_args& a, int token, int start) : Terms() {
        const int q = start + lane_id();
        if (q >= count(ep)) return;
        const int entry = token * count(ep) + q;
        row = __ldcg(reinterpret_cast<const std::int32_t*>(a.pos) + entry);
        if (Rows::kExpert) expert = __ldcg(reinterpret_cast<const std::int32_t*>(a.idx) + entry);
        if (Rows::kWeighted) weight = __ldcg(reinterpret_cast<const float*>(a.weights) + entry);
    }
    // The rank whose row it is; only where there is one.
    __device__ int rank(const hal_cuda_ep& ep, int start) const {
        return Rows::kExpert ? Owner(ep).of(expert) : start + lane_id();
    }
    // Where it lies, by where every rank's rows begin; 0 where there is none.
    __device__ unsigned long long address(const hal_cuda_ep& ep, const std::uint64_t* rows, int start) const {
        const int of = row < 0 ? -1 : rank(ep, start);
        return of < 0 ? 0ull
                      : reinterpret_cast<unsigned long long>(at_peer(ep, of, rows[of])) +
                            static_cast<unsigned long long>(row) * ep.combine_row_bytes;
    }
    __device__ unsigned lanes() const { return __ballot_sync(0xffffffffu, row >= 0); }
};

// Adds the rows of the lanes in `left`, lowest lane first: each lane knows its row's address and weight. `kRows` of them are
// loaded before the first is added, so that enough is in flight; `meanwhile` runs while they fly.
template <int kRows, bool kWeighted, class Type, class Meanwhile>
__device__ __forceinline__ void add_rows(Sum<Type>& sum, unsigned left, unsigned long long address, float weight,
                                         Meanwhile meanwhile) {
#pragma unroll 1
    while (left != 0) {
        uint4 v[kRows][kSumVectors];
        unsigned flying = left;
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            if (flying == 0) break;
            sum.load(reinterpret_cast<const char*>(__shfl_sync(0xffffffffu, address, lowest_lane(flying))), v[i]);
            flying &= flying - 1;
        }
        meanwhile();
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            if (left == 0) break;
            sum.template add<kWeighted>(v[i], kWeighted ? __shfl_sync(0xffffffffu, weight, lowest_lane(left)) : 1.0f);
            left &= left - 1;
        }
    }
}

template <class Type>
__device__ __forceinline__ void add_biases(const hal_cuda_ep& ep, const hal_cuda_combine_args& a, int token,
                                           Sum<Type>& sum) {
    const std::size_t at = static_cast<std::size_t>(token) * ep.combine_row_bytes;
#pragma unroll 1
    for (int i = 0; i < 2; ++i) {
        const std::uint64_t bias = i == 0 ? a.bias0 : a.bias1;
        if (bias != 0) sum.add_row(reinterpret_cast<const char*>(bias) + at);
    }
}

int combine_push(const hal_cuda_ep& ep, const hal_cuda_combine_args& a, std::uint64_t stream);

}  // namespace hal::cuda
