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

// The rows that make up one token, in the order in which they are summed; one for each lane. More than 32 ranks take
// several rounds of lanes.
struct Terms {
    int rank, row;
    float weight;
    __device__ static int count(const hal_cuda_ep& ep) { return ep.expert_layout ? ep.topk : ep.world; }
    __device__ Terms(const hal_cuda_ep& ep, const hal_cuda_combine_args& a, int token, int start)
        : rank(-1), row(-1), weight(1.0f) {
        const int q = start + lane_id();
        if (q >= count(ep)) return;
        const int entry = token * count(ep) + q;
        row = __ldcg(reinterpret_cast<const std::int32_t*>(a.pos) + entry);
        if (row < 0) return;
        rank = ep.expert_layout ? __ldcg(reinterpret_cast<const std::int32_t*>(a.idx) + entry) / ep.local_experts : q;
        if (a.weighted) weight = __ldcg(reinterpret_cast<const float*>(a.weights) + entry);
    }
    __device__ unsigned lanes() const { return __ballot_sync(0xffffffffu, row >= 0); }
};

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
