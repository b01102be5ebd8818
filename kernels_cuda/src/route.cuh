// SPDX-License-Identifier: Apache-2.0
// Where rows go. Every block works the routing out for itself in shared memory, from the ids alone: a bitmap for each
// destination rank with running counts, so that a token's place among the rows for a rank is two loads and a popcount,
// and no block waits for another. Places among an expert's rows are found by the block that owns the expert.
#pragma once
#include "device.cuh"

namespace hal::cuda {

constexpr int kMaxRanks = 64;

__device__ __forceinline__ int warp_id() { return threadIdx.x >> 5; }
__device__ __forceinline__ int lane_id() { return threadIdx.x & 31; }
__device__ __forceinline__ int warps_in_block() { return blockDim.x >> 5; }
__device__ __forceinline__ unsigned lanes_below() { return (1u << lane_id()) - 1u; }

// -1 in an empty set; the lanes a shuffle may ask are counted modulo 32.
__device__ __forceinline__ int lowest_lane(unsigned lanes) { return __ffs(static_cast<int>(lanes)) - 1; }

// Ids as they come: 4 or 8 bytes each. -2 stands for all that do not fit an int: out of range, as any such id is.
struct Ids {
    std::uint64_t base;
    bool wide;
    __device__ explicit Ids(const hal_cuda_dispatch_args& a)
        : base(a.cached ? a.idx : a.topk_idx), wide(!a.cached && a.idx_is_64) {}
    __device__ __forceinline__ int operator[](int entry) const {
        return wide ? narrow(__ldcg(reinterpret_cast<const long long*>(base) + entry))
                    : __ldcg(reinterpret_cast<const std::int32_t*>(base) + entry);
    }
    // The same of ids that the scan has found good, or has refused so that nothing comes of them: the low word says it all, so
    // nobody waits for the value to see whether it fits.
    __device__ __forceinline__ int good(int entry) const {
        return __ldcg(reinterpret_cast<const std::int32_t*>(base) +
                      (wide ? 2 * static_cast<std::int64_t>(entry) : entry));
    }
    // kCount of them, of the entries that `entry(i)` names (negative = none, which gives -1). All loads are issued before the
    // first value is looked at.
    template <int kCount, class Entry>
    __device__ __forceinline__ void load(int (&id)[kCount], Entry entry) const {
        if (!wide) {
#pragma unroll
            for (int i = 0; i < kCount; ++i) {
                const int at = entry(i);
                id[i] = -1;
                if (at >= 0) id[i] = __ldcg(reinterpret_cast<const std::int32_t*>(base) + at);
            }
            return;
        }
        long long all[kCount];
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            const int at = entry(i);
            all[i] = -1;
            if (at >= 0) all[i] = __ldcg(reinterpret_cast<const long long*>(base) + at);
        }
#pragma unroll
        for (int i = 0; i < kCount; ++i) id[i] = narrow(all[i]);
    }

  private:
    __device__ static int narrow(long long id) {
        return id == static_cast<std::int32_t>(id) ? static_cast<std::int32_t>(id) : -2;
    }
};

// Inclusive sum over the warp.
__device__ __forceinline__ unsigned warp_scan(unsigned v) {
    for (int step = 1; step < 32; step <<= 1) {
        const unsigned other = __shfl_up_sync(0xffffffffu, v, step);
        if (lane_id() >= step) v += other;
    }
    return v;
}

// out[i] = sum of value(0 .. i-1) for i in 0 .. n; one whole warp.
template <class Value>
__device__ void warp_prefix(unsigned* out, int n, Value value) {
    unsigned running = 0;
#pragma unroll 1
    for (int start = 0; start < n; start += 32) {
        const int i = start + lane_id();
        const unsigned v = i < n ? value(i) : 0u;
        const unsigned inclusive = warp_scan(v);
        if (i < n) out[i] = running + inclusive - v;
        running += __shfl_sync(0xffffffffu, inclusive, 31);
    }
    if (lane_id() == 0) out[n] = running;
}

// Largest i in [0, n) with prefix[i] <= value, for prefix ascending and prefix[0] == 0.
__device__ __forceinline__ int segment_of(const unsigned* prefix, int n, unsigned value) {
    int low = 0, high = n - 1;
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (prefix[middle] <= value)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

// Which tokens go to which rank. bits and before are [rank][group of 32 tokens], before with one more entry for the
// total.
struct Directory {
    std::uint32_t* bits;
    unsigned* before;
    int groups, world;

    __device__ unsigned* prefix(int rank) const { return before + rank * (groups + 1); }
    __device__ unsigned total(int rank) const { return prefix(rank)[groups]; }
    __device__ bool has(int token, int rank) const { return bits[rank * groups + (token >> 5)] >> (token & 31) & 1u; }
    __device__ int place(int token, int rank) const {
        const unsigned below = (1u << (token & 31)) - 1u;
        return static_cast<int>(prefix(rank)[token >> 5]) + __popc(bits[rank * groups + (token >> 5)] & below);
    }
    // The token that is number `place` of those that go to `rank`.
    __device__ int token(int rank, unsigned place) const {
        const int group = segment_of(prefix(rank), groups, place);
        const std::uint32_t tokens = bits[rank * groups + group];
        unsigned skip = place - prefix(rank)[group];
        int bit = 0;
#pragma unroll 1
        for (int half = 16; half > 0; half /= 2) {  // which half of the bits left has the one after `skip` others
            const unsigned lower = static_cast<unsigned>(__popc(tokens >> bit & ((1u << half) - 1u)));
            if (skip >= lower) skip -= lower, bit += half;
        }
        return group * 32 + bit;
    }
    // Bits of the groups begin .. end - 1. `mask_of(token)` gives the token's ranks as bits; it is called once for each
    // token, by whole warps.
    template <class MaskOf>
    __device__ void fill(int begin, int end, int tokens, MaskOf mask_of) const {
        for (int group = begin + warp_id(); group < end; group += warps_in_block()) {
            const int token = group * 32 + lane_id();
            const std::uint64_t mask = token < tokens ? mask_of(token) : 0ull;
#pragma unroll 1
            for (int rank = 0; rank < world; ++rank) {
                const std::uint32_t row = __ballot_sync(0xffffffffu, mask >> rank & 1ull);
                if (lane_id() == 0) bits[rank * groups + group] = row;
            }
        }
        __syncthreads();
    }
    // Running counts, once all bits are there.
    __device__ void count() const {
        for (int rank = warp_id(); rank < world; rank += warps_in_block())
            warp_prefix(prefix(rank), groups,
                        [&](int g) { return static_cast<unsigned>(__popc(bits[rank * groups + g])); });
        __syncthreads();
    }
    __host__ __device__ static std::size_t words(int tokens, int world) {
        const int groups = (tokens + 31) / 32;
        return static_cast<std::size_t>(world) * (2 * groups + 1);
    }
};

// n / divisor by a multiplication: exact for 0 <= n while n * divisor < 2^32.
struct Divisor {
    int divisor;
    unsigned inverse;
    __device__ explicit Divisor(int d) : Divisor(d, 0xffffffffu / static_cast<unsigned>(d) + 1u) {}
    __device__ Divisor(int d, unsigned i) : divisor(d), inverse(i) {}
    __device__ int of(int n) const {
        return divisor == 1 ? n : static_cast<int>(__umulhi(static_cast<unsigned>(n), inverse));
    }
};
// The rank that has an expert.
struct Owner : Divisor {
    __device__ explicit Owner(const hal_cuda_ep& ep) : Divisor(ep.local_experts, ep.owner_inverse) {}
};

// Says which id of a token breaks the contract, once one of the token's ids does.
HAL_SELDOM void explain(const hal_cuda_ep& ep, const hal_cuda_dispatch_args& a, int token, hal_cuda_error& bad) {
    if (atomicCAS(&bad.claimed, 0u, 1u) != 0u) return;
    const Ids ids(a);
    bad.token = token;
    for (int j = 0; j < ep.topk; ++j) {
        const int id = ids[token * ep.topk + j];
        if (id == -1) continue;
        bad.expert = id;
        if (static_cast<unsigned>(id) >= static_cast<unsigned>(ep.experts)) {
            bad.detail = HAL_CUDA_BAD_ID;
            return;
        }
        for (int other = 0; other < j; ++other) {
            if (ids[token * ep.topk + other] != id) continue;
            bad.detail = HAL_CUDA_BAD_DUPLICATE;
            return;
        }
    }
}

// Whether one of the ids start .. start + 7 of a token is among those before.
HAL_SELDOM bool repeats(const hal_cuda_ep& ep, const hal_cuda_dispatch_args& a, int token, int start) {
    const Ids ids(a);
    for (int j = start; j < min(start + 8, ep.topk); ++j) {
        const int id = ids[token * ep.topk + j];
        for (int other = 0; id != -1 && other < start; ++other)
            if (ids[token * ep.topk + other] == id) return true;
    }
    return false;
}

// The ranks of one token from its ids, eight of which are loaded at a time; with a histogram also counts experts, and says
// whether some id breaks the contract.
__device__ __forceinline__ std::uint64_t ranks_of(const hal_cuda_ep& ep, const hal_cuda_dispatch_args& a, Owner owner,
                                                  int token, unsigned* histogram, bool* wrong) {
    const Ids ids(a);
    std::uint64_t mask = 0;
#pragma unroll 1
    for (int start = 0; start < ep.topk; start += 8) {
        int id[8];
        ids.load(id, [&](int j) { return start + j < ep.topk ? token * ep.topk + start + j : -1; });
#pragma unroll
        for (int j = 0; j < 8; ++j)
            if (static_cast<unsigned>(id[j]) < static_cast<unsigned>(ep.experts)) mask |= 1ull << owner.of(id[j]);
        if (histogram == nullptr) continue;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const bool good = static_cast<unsigned>(id[j]) < static_cast<unsigned>(ep.experts);
            if (good) atomicAdd(&histogram[id[j]], 1u);
            *wrong |= !good && id[j] != -1;
#pragma unroll
            for (int other = 0; other < j; ++other) *wrong |= good && id[other] == id[j];
        }
        if (start > 0) *wrong |= repeats(ep, a, token, start);
    }
    return mask;
}

// The experts [first, first + count) belong to this block, which numbers each one's entries in token order.
struct OwnedExperts {
    int first, count;
    __device__ explicit OwnedExperts(const hal_cuda_ep& ep) {
        const int each = (ep.experts + gridDim.x - 1) / gridDim.x;
        first = min(each * static_cast<int>(blockIdx.x), ep.experts);
        count = min(each, ep.experts - first);
    }
};

constexpr int kBatch = 8;  // ids in flight for each lane

// Warp-wide: place[lane] = how often the lane's id was met before, by lower lanes or as `mine` (the warp's counters by id)
// says, which then counts these lanes in. Only lanes that `take` part count.
__device__ __forceinline__ void number_lanes(int id, bool take, unsigned* mine, std::int32_t* place) {
    const unsigned active = __ballot_sync(0xffffffffu, take);
    if (take) {
        const unsigned same = __match_any_sync(active, id);
        const unsigned base = mine[id];
        place[lane_id()] = static_cast<std::int32_t>(base + __popc(same & lanes_below()));
        __syncwarp(active);
        if ((same & lanes_below()) == 0) mine[id] = base + __popc(same);
    }
    __syncwarp();
}

// place[entry] = number of earlier tokens with the same expert, for this block's experts; totals[own] their counts.
// `histogram` is [warps][owned]: each warp counts a run of consecutive entries, so the order of tokens is kept.
__device__ inline void number_entries(const hal_cuda_ep& ep, const hal_cuda_dispatch_args& a, OwnedExperts own,
                                      unsigned* histogram, unsigned* totals, std::int32_t* place) {
    const int entries = a.tokens * ep.topk;
    const int run = ((entries + warps_in_block() - 1) / warps_in_block() + 31) / 32 * 32;
    const int begin = warp_id() * run, end = min(begin + run, entries);
    for (int i = threadIdx.x; i < own.count * warps_in_block(); i += blockDim.x) histogram[i] = 0;
    __syncthreads();
    unsigned* mine = histogram + warp_id() * own.count;
    const Ids ids(a);
    int id[kBatch];
    auto load = [&](int start) {
        ids.load(id, [&](int i) { return start + i * 32 + lane_id() < end ? start + i * 32 + lane_id() : -1; });
#pragma unroll
        for (int i = 0; i < kBatch; ++i) id[i] = id[i] < 0 ? -1 : id[i] - own.first;
    };
    for (int start = begin; start < end; start += 32 * kBatch) {
        load(start);
#pragma unroll
        for (int i = 0; i < kBatch; ++i)
            if (id[i] >= 0 && id[i] < own.count) atomicAdd(&mine[id[i]], 1u);
    }
    __syncthreads();
    for (int o = threadIdx.x; o < own.count; o += blockDim.x) {
        unsigned running = 0;
        for (int w = 0; w < warps_in_block(); ++w) {
            const unsigned n = histogram[w * own.count + o];
            histogram[w * own.count + o] = running;
            running += n;
        }
        totals[o] = running;
    }
    __syncthreads();
    for (int start = begin; start < end; start += 32 * kBatch) {
        load(start);
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            number_lanes(id[i], id[i] >= 0 && id[i] < own.count, mine, place + start + i * 32);
        }
    }
}

// Many entries are numbered once, each by the block that looks at its token: first within its group of 32 tokens, then
// each expert's owner sums over the groups. place[entry] = number of earlier tokens of the group with the same expert;
// group_counts[group][expert] = entries of the group. `counters` is [warps that have a group][experts].
__device__ inline void number_groups(const hal_cuda_ep& ep, const hal_cuda_dispatch_args& a, int begin, int end,
                                     unsigned* counters, std::int32_t* place, unsigned* group_counts) {
    const int each = 32 * ep.topk, entries = a.tokens * ep.topk;
    const Ids ids(a);
    unsigned* mine = counters + warp_id() * ep.experts;
    for (int group = begin + warp_id(); group < end; group += warps_in_block()) {
        for (int e = lane_id(); e < ep.experts; e += 32) mine[e] = 0;
        __syncwarp();
        const int last = min((group + 1) * each, entries);
        for (int start = group * each; start < last; start += 32 * kBatch) {
            int id[kBatch];
            ids.load(id, [&](int i) { return start + i * 32 + lane_id() < last ? start + i * 32 + lane_id() : -1; });
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                number_lanes(id[i], static_cast<unsigned>(id[i]) < static_cast<unsigned>(ep.experts), mine,
                             place + start + i * 32);
            }
        }
        for (int e = lane_id(); e < ep.experts; e += 32)
            group_counts[static_cast<std::size_t>(group) * ep.experts + e] = mine[e];
        __syncwarp();
    }
}

// Of this block's experts: each group's count becomes the number of entries in earlier groups; totals[own] their sum.
__device__ inline void sum_groups(const hal_cuda_ep& ep, int groups, OwnedExperts own, unsigned* group_counts,
                                  unsigned* totals) {
    for (int o = warp_id(); o < own.count; o += warps_in_block()) {
        unsigned* count = group_counts + own.first + o;
        unsigned running = 0;
        for (int start = 0; start < groups; start += 32 * kBatch) {
            unsigned n[kBatch];
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {  // all loads are issued together
                const int group = start + i * 32 + lane_id();
                n[i] = group < groups ? __ldcg(count + static_cast<std::size_t>(group) * ep.experts) : 0u;
            }
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                const int group = start + i * 32 + lane_id();
                const unsigned inclusive = warp_scan(n[i]);
                if (group < groups) count[static_cast<std::size_t>(group) * ep.experts] = running + inclusive - n[i];
                running += __shfl_sync(0xffffffffu, inclusive, 31);
            }
        }
        if (lane_id() == 0) totals[o] = running;
    }
    __syncthreads();
}

}  // namespace hal::cuda
