// SPDX-License-Identifier: Apache-2.0
// What every block knows of a round before it moves rows: the directory, the peers' slots and counts, first rows, padding.
#pragma once
#include "dirty.cuh"
#include "route.cuh"

namespace hal::cuda {

constexpr unsigned kCached = 1, kBadInput = 2;  // flags in a header's first word, above the 24-bit slot number

// Words of one source's header: slot and flags, rows for each rank, entries for each expert.
__device__ __forceinline__ std::uint64_t* header_at(const hal_cuda_ep& ep, int peer, int source) {
    const int words = 1 + ep.world + ep.experts;
    return reinterpret_cast<std::uint64_t*>(at_peer(ep, peer, ep.off_header)) +
           static_cast<std::size_t>(source) * words;
}
__device__ __forceinline__ std::uint64_t* arrival_at(const hal_cuda_ep& ep, int peer, int source) {
    return reinterpret_cast<std::uint64_t*>(at_peer(ep, peer, ep.off_arrive) + static_cast<std::size_t>(source) * 64);
}
// Fixed slots: the slot that a rank offers for a round, told to every peer; two in turn, since it may be told a round ahead.
__device__ __forceinline__ std::uint64_t* offer_at(const hal_cuda_ep& ep, int peer, int source, std::uint64_t epoch) {
    return reinterpret_cast<std::uint64_t*>(at_peer(ep, peer, ep.off_header)) + (epoch & 1) * ep.world + source;
}
// Fixed slots: what a source says of its rows, in the slot that they go to: flags and rows, then entries for each expert of
// that rank. "Source" R is the owner's own note: the round, and where its rows landed.
__device__ __forceinline__ std::uint64_t* tally_at(const hal_cuda_ep& ep, int peer, unsigned slot, int source) {
    return reinterpret_cast<std::uint64_t*>(at_peer(ep, peer, ep.off_slots + slot * ep.slot_bytes + ep.slot_tallies)) +
           static_cast<std::size_t>(source) * (1 + ep.local_experts);
}
__device__ __forceinline__ std::uint32_t* row_flag_at(const hal_cuda_ep& ep, int peer, int source, int place) {
    return reinterpret_cast<std::uint32_t*>(at_peer(ep, peer, ep.off_dispatch_flags)) +
           static_cast<std::size_t>(source) * ep.max_tokens + place;
}

// The handle's counts: rows from each rank, then these, then (fixed slots, layout expert) entries [expert][rank].
enum { kTotal = 0, kRows, kEpoch, kTails };

struct Plan {
    Directory directory;
    unsigned *slot, *counts, *base;  // [R], [R][R] source-major, [R] first row of mine at each rank
    unsigned* expert_total;          // [E]; layout rank: of this rank's own experts only, in block 0
    unsigned *expert_base, *start;   // layout expert: [E], [L + 1] of this rank's own experts
    unsigned *pads, *scratch;
    unsigned here;  // fixed slots: where this round's rows land
    __device__ Plan(std::uint32_t* memory, const hal_cuda_ep& ep, int tokens, bool expert) {
        directory.groups = (tokens + 31) / 32, directory.world = ep.world;
        auto take = [&](std::size_t words) {
            auto* p = memory;
            memory += words;
            return p;
        };
        directory.bits = take(static_cast<std::size_t>(ep.world) * directory.groups);
        directory.before = take(static_cast<std::size_t>(ep.world) * (directory.groups + 1));
        slot = take(ep.world), counts = take(ep.world * ep.world), base = take(ep.world);
        expert_total = take(ep.experts), expert_base = expert ? take(ep.experts) : nullptr;
        start = expert ? take(ep.local_experts + 1) : nullptr;
        pads = take(ep.experts + 3);
        scratch = memory, here = 0;
    }
};

// Before block 0 sends its header the peers must have finished the round before: until then they may still read the old
// one. Rows that peers were reading for a combine must be
// read, since their slot may be offered now. One warp looks while the others work the routing out.
__device__ inline void await_previous_round(const hal_cuda_ep& ep, std::uint64_t finished) {
    for (int peer = lane_id(); peer < ep.world; peer += 32) {
        if (peer == ep.rank) continue;
        const std::uint64_t* arrived = arrival_at(ep, ep.rank, peer);
        wait_until(
            ep, [&] { return load_relaxed(arrived); }, [&](std::uint64_t v) { return v >= finished * kRound; },
            HAL_CUDA_STAGE_PREVIOUS_ROUND, peer, finished * kRound);
        await_readers(ep, peer);
    }
}

// Ids that break the contract: reported by the block that found them, and known to all blocks.
HAL_SELDOM void refuse(const hal_cuda_ep& ep, hal_cuda_error bad, Counters& counters) {
    bad.kind = HAL_CUDA_BAD_INPUT, bad.rank = ep.rank, bad.stage = HAL_CUDA_STAGE_HEADER, bad.queue = 0;
    bad.expected = ep.experts, bad.seen = 0;
    report(ep, bad, false);
    atomicExch(&counters.refused, static_cast<unsigned>(bad.detail));
}

// The handle of a refused round routes nothing. Where the host waits for no counts it hears of the refusal late, and what it
// launched by this handle before then must wait for nobody and read nothing astray. `places`: of a token. The caller sees to
// it that nobody writes them any more; `threads` threads, of which this is one, share them.
HAL_SELDOM void forget_routing(const hal_cuda_ep& ep, const hal_cuda_dispatch_args& a, int places, int thread,
                               int threads) {
    for (int i = thread; i < a.tokens * places; i += threads) reinterpret_cast<std::int32_t*>(a.pos)[i] = -1;
    for (int i = thread; i < a.tokens * ep.topk; i += threads) reinterpret_cast<std::int32_t*>(a.idx)[i] = -1;
}
// By all blocks. `counters`: of the launch when other blocks may still write places, or null.
HAL_SELDOM void forget_routing(const hal_cuda_ep& ep, const hal_cuda_dispatch_args& a, Counters* counters) {
    if (counters != nullptr && !grid_barrier(ep, *counters, 2)) return;
    forget_routing(ep, a, ep.expert_layout ? ep.topk : ep.world,
                   static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x), static_cast<int>(gridDim.x * blockDim.x));
}

// Few tokens: every block looks at all of them. Many: each block looks at its part, and they exchange what they found
// in this rank's own memory, which costs a grid barrier but reads the ids once.
constexpr int kScanAlone = 1024;
__device__ __forceinline__ bool scans_alone(const hal_cuda_dispatch_args& a) {
    return a.tokens <= kScanAlone || gridDim.x == 1;
}

struct Scratch {
    std::uint32_t* bits;    // as in the directory
    std::uint32_t* counts;  // entries of each expert: layout rank [blocks][E], layout expert [groups of 32 tokens][E]
    __device__ explicit Scratch(const hal_cuda_ep& ep)
        : bits(reinterpret_cast<std::uint32_t*>(ep.scratch)),
          counts(bits + static_cast<std::size_t>(ep.world) * ((ep.max_tokens + 31) / 32)) {}
};

__device__ __forceinline__ std::uint64_t ranks_of_handle(const hal_cuda_ep& ep, const hal_cuda_dispatch_args& a,
                                                         int token) {
    const auto* pos = reinterpret_cast<const std::int32_t*>(a.pos);
    std::uint64_t mask = 0;
#pragma unroll 1
    for (int r = 0; r < ep.world; ++r)
        if (pos[token * ep.world + r] >= 0) mask |= 1ull << r;
    return mask;
}

// Fills the groups, and where `checks` also counts experts (plan.scratch) and looks for bad ids.
template <bool kExpert>
__device__ void scan_tokens(const hal_cuda_ep& ep, const hal_cuda_dispatch_args& a, const Plan& plan, int begin,
                            int end, bool checks, hal_cuda_error* bad) {
    const Owner owner(ep);
    plan.directory.fill(begin, end, a.tokens, [&](int token) {
        if (!kExpert && a.cached) return ranks_of_handle(ep, a, token);
        bool wrong = false;
        const std::uint64_t mask = ranks_of(ep, a, owner, token, checks ? plan.scratch : nullptr, &wrong);
        if (wrong) explain(ep, a, token, *bad);
        return mask;
    });
}

// The bits of all groups, once each block has those of its own; in block 0 also what they found. False when a wait failed.
template <bool kExpert>
__device__ bool share_directory(const hal_cuda_ep& ep, const hal_cuda_dispatch_args& a, const Plan& plan,
                                const Launch& launch, int begin, int end, hal_cuda_error* bad) {
    const int groups = plan.directory.groups;
    if (threadIdx.x == 0 && bad->detail != 0) refuse(ep, *bad, launch.counters());
    const Scratch shared(ep);
    for (int i = threadIdx.x; i < ep.world * (end - begin); i += blockDim.x) {
        const int at = i / (end - begin) * groups + begin + i % (end - begin);
        shared.bits[at] = plan.directory.bits[at];
    }
    for (int e = threadIdx.x; !a.cached && !kExpert && e < ep.experts; e += blockDim.x)
        shared.counts[static_cast<std::size_t>(blockIdx.x) * ep.experts + e] = plan.scratch[e];
    if (!a.cached && kExpert)
        number_groups(ep, a, begin, end, plan.scratch, reinterpret_cast<std::int32_t*>(a.pos), shared.counts);
    if (!grid_barrier(ep, launch.counters(), 0)) return false;
    for (int i = threadIdx.x; i < ep.world * groups; i += blockDim.x) plan.directory.bits[i] = __ldcg(shared.bits + i);
    if (blockIdx.x == 0 && !a.cached) {
        if (threadIdx.x == 0)
            bad->detail = static_cast<int>(*reinterpret_cast<volatile unsigned*>(&launch.counters().refused));
        for (int e = threadIdx.x; !kExpert && e < ep.experts; e += blockDim.x) {
            unsigned total = 0;
#pragma unroll 12
            for (unsigned block = 0; block < gridDim.x; ++block)  // many loads in flight
                total += __ldcg(shared.counts + static_cast<std::size_t>(block) * ep.experts + e);
            plan.scratch[e] = total;
        }
    }
    __syncthreads();
    return true;
}

// The directory; in block 0 also the experts' counts and whether ids are bad. The last warp has read the launch before, and
// all know it after. False when a wait failed.
template <bool kExpert>
__device__ bool build_directory(const hal_cuda_ep& ep, const hal_cuda_dispatch_args& a, const Plan& plan,
                                Launch& launch, hal_cuda_error* bad) {
    const int groups = plan.directory.groups;
    const bool alone = scans_alone(a);
    const int each = alone ? groups : (groups + gridDim.x - 1) / gridDim.x;
    const int begin = alone ? 0 : min(each * static_cast<int>(blockIdx.x), groups), end = min(begin + each, groups);
    scan_tokens<kExpert>(ep, a, plan, begin, end, !a.cached && (!alone || blockIdx.x == 0), bad);
    launch.know();  // the scan ended with a block barrier
    if (!alone && !share_directory<kExpert>(ep, a, plan, launch, begin, end, bad)) return false;
    plan.directory.count();
    return true;
}

// Block 0: this rank's slot, row counts and (layout rank) each rank's own experts' counts, to every rank and itself. A
// handle's counts are known already; words go out all the same, so that a rank that does without is not left waiting.
template <bool kExpert>
__device__ void send_header(const hal_cuda_ep& ep, const hal_cuda_dispatch_args& a, const Plan& plan,
                            std::uint64_t epoch, bool bad) {
    const unsigned flags = (a.cached ? kCached : 0u) | (bad ? kBadInput : 0u);
    const bool counted = !a.cached && !bad;
    for (int peer = 0; peer < ep.world; ++peer) {
        std::uint64_t* header = header_at(ep, peer, ep.rank);
        // Layout expert: each expert's block sends its count to everybody; if nobody counts, zeros go out from here.
        const int first = kExpert ? 0 : peer * ep.local_experts, experts = kExpert ? ep.experts : ep.local_experts;
        const int words = 1 + ep.world + (kExpert && counted ? 0 : experts);
        for (int word = threadIdx.x; word < words; word += blockDim.x) {
            if (word == 0) {
                store_relaxed(header, stamped(epoch, flags << 24 | static_cast<unsigned>(a.slot)));
            } else if (word <= ep.world) {
                store_relaxed(header + word, stamped(epoch, counted ? plan.directory.total(word - 1) : 0u));
            } else {
                const int expert = first + word - 1 - ep.world;
                store_relaxed(header + 1 + ep.world + expert, stamped(epoch, counted ? plan.scratch[expert] : 0u));
            }
        }
    }
}

__device__ inline void send_expert_counts(const hal_cuda_ep& ep, OwnedExperts own, const unsigned* totals,
                                          std::uint64_t epoch) {
    for (int i = threadIdx.x; i < own.count * ep.world; i += blockDim.x) {
        const int peer = i / own.count, o = i % own.count;
        store_relaxed(header_at(ep, peer, ep.rank) + 1 + ep.world + own.first + o, stamped(epoch, totals[o]));
    }
}

// Whether a source's flags stop the round; the first block says why.
__device__ inline bool look_at_flags(const hal_cuda_ep& ep, const hal_cuda_dispatch_args& a, int source,
                                     unsigned flags) {
    const bool bad = (flags & kBadInput) != 0, mixed = ((flags & kCached) != 0) != (a.cached != 0);
    if (!bad && !mixed) return false;
    hal_cuda_error what{};
    what.kind = bad ? HAL_CUDA_BAD_INPUT : HAL_CUDA_MIXED_HANDLES;
    what.rank = source, what.stage = HAL_CUDA_STAGE_HEADER, what.token = -1;
    if (blockIdx.x == 0 && (!bad || source != ep.rank)) report(ep, what, false);
    return true;
}

// Every rank's slot and counts into shared memory; false when the round moves no rows (bad input, or a failed wait).
template <bool kExpert>
__device__ bool receive_headers(const hal_cuda_ep& ep, const hal_cuda_dispatch_args& a, const Plan& plan,
                                std::uint64_t epoch) {
    int refused = 0;
    auto word = [&](int source, int index) {
        std::uint32_t value = 0;
        if (!wait_stamped(ep, header_at(ep, ep.rank, source) + index, epoch, HAL_CUDA_STAGE_HEADER, source, &value))
            refused = 1;
        return value;
    };
    const int each = a.cached ? 1 : 1 + ep.world;
    for (int i = threadIdx.x; i < ep.world * each; i += blockDim.x) {
        const int source = i / each, index = i % each;
        const std::uint32_t value = word(source, index);
        if (index > 0) {
            plan.counts[source * ep.world + index - 1] = value;
        } else {
            plan.slot[source] = value & 0xffffffu;
            refused |= look_at_flags(ep, a, source, value >> 24);
        }
    }
    // The last threads take these, so that all words are waited for at once.
    const int back = static_cast<int>(blockDim.x - 1 - threadIdx.x);
    for (int e = back; !kExpert && blockIdx.x == 0 && !a.cached && e < ep.local_experts; e += blockDim.x) {
        unsigned total = 0;
        for (int source = 0; source < ep.world; ++source)
            total += word(source, 1 + ep.world + ep.rank * ep.local_experts + e);
        plan.expert_total[e] = total;
    }
    for (int e = back; kExpert && !a.cached && e < ep.experts; e += blockDim.x) {
        unsigned total = 0, before = 0;
        for (int source = 0; source < ep.world; ++source) {
            const unsigned n = word(source, 1 + ep.world + e);
            if (source < ep.rank) before += n;
            total += n;
        }
        plan.expert_total[e] = total, plan.expert_base[e] = before;
    }
    return __syncthreads_or(refused) == 0;
}

// First rows: of mine at each rank (layout rank), of each expert's group at its rank (layout expert).
template <bool kExpert>
__device__ void place_groups(const hal_cuda_ep& ep, const hal_cuda_dispatch_args& a, const Plan& plan) {
    const unsigned alignment = static_cast<unsigned>(ep.alignment);
    auto aligned = [&](unsigned n) { return (n + alignment - 1) / alignment * alignment; };
    if (!kExpert) {
        for (int r = threadIdx.x; r < ep.world; r += blockDim.x) {
            unsigned first = 0;
            if (a.cached) {
                if (plan.directory.total(r) > 0)
                    first = reinterpret_cast<const std::int32_t*>(a.pos)[plan.directory.token(r, 0) * ep.world + r];
            } else if (ep.fixed_slots) {
                first = ep.rank * ep.max_tokens;
            } else {
                for (int source = 0; source < ep.rank; ++source) first += plan.counts[source * ep.world + r];
            }
            plan.base[r] = first;
        }
        if (a.cached)
            for (int s = threadIdx.x; s < ep.world; s += blockDim.x)
                plan.counts[s * ep.world + ep.rank] = reinterpret_cast<const std::int32_t*>(a.counts)[s];
    } else if (a.cached) {
        for (int s = threadIdx.x; s < ep.world; s += blockDim.x)
            plan.counts[s * ep.world + ep.rank] = reinterpret_cast<const std::int32_t*>(a.counts)[s];
        for (int e = threadIdx.x; e <= ep.local_experts; e += blockDim.x) {
            plan.start[e] = static_cast<unsigned>(reinterpret_cast<const long long*>(a.expert_offsets)[e]);
            if (e < ep.local_experts)
                plan.expert_total[ep.rank * ep.local_experts + e] =
                    reinterpret_cast<const std::int32_t*>(a.expert_counts)[e];
        }
    } else if (ep.fixed_slots) {
        for (int e = threadIdx.x; e < ep.experts; e += blockDim.x)
            plan.expert_base[e] = (static_cast<unsigned>(e % ep.local_experts) * ep.world + ep.rank) * ep.max_tokens;
        for (int e = threadIdx.x; e <= ep.local_experts; e += blockDim.x)
            plan.start[e] = static_cast<unsigned>(e) * ep.world * ep.max_tokens;
    } else {
        for (int r = warp_id(); r < ep.world; r += warps_in_block()) {
            unsigned running = 0;
            for (int start = 0; start < ep.local_experts; start += 32) {
                const int e = start + lane_id();
                const unsigned n = e < ep.local_experts ? aligned(plan.expert_total[r * ep.local_experts + e]) : 0u;
                const unsigned inclusive = warp_scan(n);
                if (e < ep.local_experts) {
                    plan.expert_base[r * ep.local_experts + e] += running + inclusive - n;
                    if (r == ep.rank) plan.start[e] = running + inclusive - n;
                }
                running += __shfl_sync(0xffffffffu, inclusive, 31);
            }
            if (r == ep.rank && lane_id() == 0) plan.start[ep.local_experts] = running;
        }
    }
    __syncthreads();
}

// Runs of rows that no peer writes and that must read as padding. The lengths of what is to be cleared of them are summed into
// plan.pads.
struct Padding {
    const hal_cuda_ep& ep;
    const hal_cuda_dispatch_args& a;
    const Plan& plan;
    bool expert;
    unsigned rows;  // that hold or may hold data, without the tail that only pad_to_rows adds

    __device__ int segments() const {
        if (ep.fixed_slots) return expert ? ep.local_experts * ep.world : ep.world;
        return has_gaps() ? ep.local_experts + 1 : 1;
    }
    __device__ bool has_gaps() const { return expert && !ep.fixed_slots && ep.alignment > 1; }  // between groups
    __device__ unsigned received(int segment) const {  // fixed slots: rows in use
        if (!expert) return plan.counts[segment * ep.world + ep.rank];
        if (a.cached) return reinterpret_cast<const std::int32_t*>(a.counts)[ep.world + kTails + segment];
        const int e = segment / ep.world, source = segment % ep.world;
        // Not a plain load: another thread awaited the word, and a cache may hold it from before it came.
        return static_cast<std::uint32_t>(load_relaxed(tally_at(ep, ep.rank, plan.here, source) + 1 + e));
    }
    __device__ unsigned first(int segment) const {
        if (ep.fixed_slots) return static_cast<unsigned>(segment) * ep.max_tokens + received(segment);
        if (has_gaps() && segment < ep.local_experts)
            return plan.start[segment] + plan.expert_total[ep.rank * ep.local_experts + segment];
        return rows;
    }
    // `dirty`: where the rows end that may hold data, in the run (fixed slots), or in the slot. Gaps between groups move, and
    // are always cleared.
    __device__ unsigned length(int segment, unsigned dirty) const {
        if (has_gaps() && segment < ep.local_experts) return plan.start[segment + 1] - first(segment);
        const unsigned used = ep.fixed_slots ? received(segment) : rows;
        const unsigned end = ep.fixed_slots ? dirty : min(dirty, static_cast<unsigned>(a.pad_to_rows));
        return end > used ? end - used : 0u;
    }
};

// Rows of this rank's arrays, padding included; the host is told at once.
template <bool kExpert>
__device__ unsigned rows_here(const hal_cuda_ep& ep, const hal_cuda_dispatch_args& a, const Plan& plan, bool moved) {
    unsigned rows = 0;
    for (int s = 0; moved && s < ep.world; ++s) rows += plan.counts[s * ep.world + ep.rank];
    if (ep.fixed_slots)
        rows = static_cast<unsigned>(ep.slot_rows);
    else if (kExpert)
        rows = moved ? plan.start[ep.local_experts] : 0u;
    if (blockIdx.x == 0 && threadIdx.x == 0 && a.host_word != 0) {
        __threadfence_system();  // an error record must be there before the word that ends the host's wait
        store_relaxed(reinterpret_cast<std::uint64_t*>(a.host_word), stamped(a.sequence, rows));
    }
    return rows;
}

// Block 0 keeps what the receive half and the combine need, and what the caller gets: apart, since that may be overwritten.
template <bool kExpert>
__device__ void keep_counts(const hal_cuda_ep& ep, const hal_cuda_dispatch_args& a, const Plan& plan,
                            std::uint64_t epoch, bool moved, unsigned rows) {
    auto* counts = reinterpret_cast<std::int32_t*>(a.counts);
    char* slot = at_home(ep, ep.off_slots + a.slot * ep.slot_bytes);
    if (threadIdx.x == 0) counts[ep.world + kEpoch] = static_cast<std::int32_t>(epoch);
    if (threadIdx.x == 0 && !a.cached) {
        unsigned total = 0;
        for (int s = 0; s < ep.world; ++s) {
            const unsigned n = moved ? plan.counts[s * ep.world + ep.rank] : 0u;
            counts[s] = static_cast<std::int32_t>(n), total += n;
        }
        counts[ep.world + kTotal] = static_cast<std::int32_t>(total),
                          counts[ep.world + kRows] = static_cast<std::int32_t>(rows);
    }
    auto* kept = reinterpret_cast<std::int32_t*>(a.expert_counts);
    for (int e = threadIdx.x; e < ep.local_experts; e += blockDim.x) {
        std::int32_t n = a.cached ? kept[e] : 0;
        if (!a.cached && moved)
            n = static_cast<std::int32_t>(plan.expert_total[kExpert ? ep.rank * ep.local_experts + e : e]);
        kept[e] = n;
        store_window(reinterpret_cast<std::int32_t*>(slot + ep.slot_counts) + e, n);
    }
    if (!kExpert) return;
    auto* offsets = reinterpret_cast<long long*>(a.expert_offsets);
    for (int e = threadIdx.x; e <= ep.local_experts; e += blockDim.x) {
        const long long offset = a.cached ? offsets[e] : moved ? plan.start[e] : 0;
        offsets[e] = offset;
        store_window(reinterpret_cast<long long*>(slot + ep.slot_offsets) + e, offset);
    }
    for (int i = threadIdx.x; ep.fixed_slots && !a.cached && i < ep.local_experts * ep.world; i += blockDim.x)
        counts[ep.world + kTails + i] =
            moved ? static_cast<std::int32_t>(Padding{ep, a, plan, true, 0}.received(i)) : 0;
}

__device__ __forceinline__ char* slot_at(const hal_cuda_ep& ep, int peer, unsigned slot) {
    return at_peer(ep, peer, ep.off_slots + slot * ep.slot_bytes);
}

}  // namespace hal::cuda
