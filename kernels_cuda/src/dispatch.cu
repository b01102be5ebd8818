// SPDX-License-Identifier: Apache-2.0
// Dispatch in one kernel: route, exchange counts and receive slots, store every row straight into its final place at the
// target, signal, and (receive half) wait for the peers' rows. docs/cuda.md has the protocol and the order of its words.
#include "route.cuh"
#include "rows.cuh"

namespace hal::cuda {
namespace {

constexpr unsigned kCached = 1, kBadInput = 2;  // flags in a header's first word, above the 24-bit slot number

// Words of one source's header: slot and flags, rows for each rank, entries for each expert.
__device__ __forceinline__ std::uint64_t* header_at(const hal_cuda_ep& ep, int peer, int source) {
    const int words = 1 + ep.world + ep.experts;
    return reinterpret_cast<std::uint64_t*>(at_peer(ep, peer, ep.off_header)) + static_cast<std::size_t>(source) * words;
}
__device__ __forceinline__ std::uint64_t* arrival_at(const hal_cuda_ep& ep, int peer, int source) {
    return reinterpret_cast<std::uint64_t*>(at_peer(ep, peer, ep.off_arrive) + static_cast<std::size_t>(source) * 64);
}
__device__ __forceinline__ std::uint32_t* row_flag_at(const hal_cuda_ep& ep, int peer, int source, int place) {
    return reinterpret_cast<std::uint32_t*>(at_peer(ep, peer, ep.off_dispatch_flags)) +
           static_cast<std::size_t>(source) * ep.max_tokens + place;
}

// The handle's counts: rows from each rank, then these, then (fixed slots, layout expert) entries [expert][rank].
enum { kTotal = 0, kRows, kEpoch, kTails };

struct Plan {
    Directory directory;
    unsigned *slot, *counts, *base;              // [R], [R][R] source-major, [R] first row of mine at each rank
    unsigned *expert_total, *expert_base, *start;  // [E], [E], [L + 1] of this rank's own experts
    unsigned *pads, *scratch;
    __device__ Plan(std::uint32_t* memory, const hal_cuda_ep& ep, int tokens, bool expert) {
        directory.groups = (tokens + 31) / 32, directory.world = ep.world;
        auto take = [&](std::size_t words) { auto* p = memory; memory += words; return p; };
        directory.bits = take(static_cast<std::size_t>(ep.world) * directory.groups);
        directory.before = take(static_cast<std::size_t>(ep.world) * (directory.groups + 1));
        slot = take(ep.world), counts = take(ep.world * ep.world), base = take(ep.world);
        expert_total = expert ? take(ep.experts) : nullptr, expert_base = expert ? take(ep.experts) : nullptr;
        start = expert ? take(ep.local_experts + 1) : nullptr;
        pads = take(ep.experts + 3);
        scratch = memory;
    }
};

__device__ bool use_second_half(const hal_cuda_dispatch_args& a) { return (a.phases & HAL_CUDA_RECV) != 0; }

// Block 0 may send its header when the peers have finished the round before: until then they may still read the old one.
__device__ void await_previous_round(const hal_cuda_ep& ep, std::uint64_t epoch) {
    for (int peer = threadIdx.x; peer < ep.world; peer += blockDim.x)
        if (peer != ep.rank)
            wait_at_least(ep, arrival_at(ep, ep.rank, peer), (epoch - 1) * kRound, HAL_CUDA_STAGE_PREVIOUS_ROUND, peer);
}

template <bool kExpert>
__device__ void build_directory(const hal_cuda_ep& ep, const hal_cuda_dispatch_args& a, const Plan& plan,
                                hal_cuda_error* bad) {
    if (a.cached) {
        const auto* pos = reinterpret_cast<const std::int32_t*>(a.pos);
        plan.directory.build(a.tokens, [&](int token) {
            if constexpr (kExpert) {
                return ranks_of<false>(ep, a, token, nullptr, nullptr);
            } else {
                std::uint64_t mask = 0;
                for (int r = 0; r < ep.world; ++r)
                    if (pos[token * ep.world + r] >= 0) mask |= 1ull << r;
                return mask;
            }
        });
    } else if (blockIdx.x == 0) {
        for (int e = threadIdx.x; e < ep.experts; e += blockDim.x) plan.scratch[e] = 0;
        __syncthreads();
        plan.directory.build(a.tokens, [&](int token) {
            hal_cuda_error found{};
            const std::uint64_t mask = ranks_of<true>(ep, a, token, plan.scratch, &found);
            if (found.detail != 0 && atomicCAS(&bad->claimed, 0u, 1u) == 0u)
                bad->detail = found.detail, bad->token = found.token, bad->expert = found.expert;
            return mask;
        });
    } else {
        plan.directory.build(a.tokens, [&](int token) { return ranks_of<false>(ep, a, token, nullptr, nullptr); });
    }
}

// Block 0: this rank's slot, row counts and (layout rank) each rank's own experts' counts, to every rank and itself.
template <bool kExpert>
__device__ void send_header(const hal_cuda_ep& ep, const hal_cuda_dispatch_args& a, const Plan& plan, std::uint64_t epoch,
                            bool bad) {
    const unsigned flags = (a.cached ? kCached : 0u) | (bad ? kBadInput : 0u);
    const int local = kExpert ? 0 : ep.local_experts;
    const int each = 1 + ep.world + local;
    for (int i = threadIdx.x; i < ep.world * each; i += blockDim.x) {
        const int peer = i / each, word = i % each;
        std::uint64_t* header = header_at(ep, peer, ep.rank);
        if (word == 0) {
            store_relaxed(header, stamped(epoch, flags << 24 | static_cast<unsigned>(a.slot)));
        } else if (!a.cached && word <= ep.world) {
            store_relaxed(header + word, stamped(epoch, bad ? 0u : plan.directory.total(word - 1)));
        } else if (!a.cached) {
            const int expert = peer * ep.local_experts + word - 1 - ep.world;
            store_relaxed(header + 1 + ep.world + expert, stamped(epoch, bad ? 0u : plan.scratch[expert]));
        }
    }
}

__device__ void send_expert_counts(const hal_cuda_ep& ep, OwnedExperts own, const unsigned* totals, std::uint64_t epoch) {
    for (int i = threadIdx.x; i < own.count * ep.world; i += blockDim.x) {
        const int peer = i / own.count, o = i % own.count;
        store_relaxed(header_at(ep, peer, ep.rank) + 1 + ep.world + own.first + o, stamped(epoch, totals[o]));
    }
}

// Every rank's slot and counts into shared memory; false when the round moves no rows (bad input, or a failed wait). The
// first words are looked at before the counts are waited for: a rank that reuses a handle sends none.
template <bool kExpert>
__device__ bool receive_headers(const hal_cuda_ep& ep, const hal_cuda_dispatch_args& a, const Plan& plan,
                                std::uint64_t epoch) {
    int refused = 0;
    auto word = [&](int source, int index) {
        std::uint32_t value = 0;
        if (!wait_stamped(ep, header_at(ep, ep.rank, source) + index, epoch, HAL_CUDA_STAGE_HEADER, source, &value)) refused = 1;
        return value;
    };
    for (int source = threadIdx.x; source < ep.world; source += blockDim.x) {
        const std::uint32_t value = word(source, 0);
        if (refused) break;
        plan.slot[source] = value & 0xffffffu;
        const bool bad = (value >> 24 & kBadInput) != 0, mixed = ((value >> 24 & kCached) != 0) != (a.cached != 0);
        if (!bad && !mixed) continue;
        refused = 1;
        hal_cuda_error what{};
        what.kind = bad ? HAL_CUDA_BAD_INPUT : HAL_CUDA_MIXED_HANDLES;
        what.rank = source, what.stage = HAL_CUDA_STAGE_HEADER, what.token = -1;
        if (mixed || source != ep.rank) report(ep, what, false);
    }
    if (__syncthreads_or(refused) != 0) return false;
    if (a.cached) return true;
    for (int i = threadIdx.x; i < ep.world * ep.world; i += blockDim.x) plan.counts[i] = word(i / ep.world, 1 + i % ep.world);
    for (int e = threadIdx.x; kExpert && e < ep.experts; e += blockDim.x) {
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
                plan.expert_total[ep.rank * ep.local_experts + e] = reinterpret_cast<const std::int32_t*>(a.expert_counts)[e];
        }
    } else if (ep.fixed_slots) {
        for (int e = threadIdx.x; e < ep.experts; e += blockDim.x)
            plan.expert_base[e] = (static_cast<unsigned>(e % ep.local_experts) * ep.world + ep.rank) * ep.max_tokens;
        for (int e = threadIdx.x; e <= ep.local_experts; e += blockDim.x) plan.start[e] = static_cast<unsigned>(e) * ep.world * ep.max_tokens;
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

// Runs of rows that no peer writes and that must read as padding. Their lengths are summed into plan.pads.
struct Padding {
    const hal_cuda_ep& ep;
    const hal_cuda_dispatch_args& a;
    const Plan& plan;
    bool expert;
    unsigned rows;  // that hold or may hold data, without the tail that only pad_to_rows adds

    __device__ int segments() const {
        if (ep.fixed_slots) return expert ? ep.local_experts * ep.world : ep.world;
        return expert ? ep.local_experts + 1 : 1;
    }
    __device__ unsigned received(int segment) const {  // fixed slots: rows in use
        if (!expert) return plan.counts[segment * ep.world + ep.rank];
        if (a.cached) return reinterpret_cast<const std::int32_t*>(a.counts)[ep.world + kTails + segment];
        const int e = segment / ep.world, source = segment % ep.world;
        return static_cast<unsigned>(header_at(ep, ep.rank, source)[1 + ep.world + ep.rank * ep.local_experts + e]);
    }
    __device__ unsigned first(int segment) const {
        if (ep.fixed_slots) return static_cast<unsigned>(segment) * ep.max_tokens + received(segment);
        if (expert && segment < ep.local_experts)
            return plan.start[segment] + plan.expert_total[ep.rank * ep.local_experts + segment];
        return rows;
    }
    __device__ unsigned length(int segment) const {
        if (ep.fixed_slots) return ep.max_tokens - received(segment);
        if (expert && segment < ep.local_experts) return plan.start[segment + 1] - first(segment);
        return static_cast<unsigned>(a.pad_to_rows) > rows ? a.pad_to_rows - rows : 0u;
    }
};

// Entries of one of this rank's own experts, of all ranks.
template <bool kExpert>
__device__ unsigned count_of(const hal_cuda_ep& ep, const Plan& plan, std::uint64_t epoch, int expert) {
    const int global = ep.rank * ep.local_experts + expert;
    if (kExpert) return plan.expert_total[global];
    unsigned total = 0;
    for (int s = 0; s < ep.world; ++s) {
        std::uint32_t n = 0;
        wait_stamped(ep, header_at(ep, ep.rank, s) + 1 + ep.world + global, epoch, HAL_CUDA_STAGE_HEADER, s, &n);
        total += n;
    }
    return total;
}

// Block 0 keeps what the receive half, the caller and the combine need.
template <bool kExpert>
__device__ void keep_counts(const hal_cuda_ep& ep, const hal_cuda_dispatch_args& a, const Plan& plan, std::uint64_t epoch,
                            bool moved, unsigned* rows) {
    auto* counts = reinterpret_cast<std::int32_t*>(a.counts);
    if (threadIdx.x == 0) {
        unsigned total = 0;
        for (int s = 0; s < ep.world; ++s) {
            const unsigned n = moved ? plan.counts[s * ep.world + ep.rank] : 0u;
            if (blockIdx.x == 0 && !a.cached) counts[s] = static_cast<std::int32_t>(n);
            total += n;
        }
        *rows = ep.fixed_slots ? static_cast<unsigned>(ep.slot_rows) : kExpert ? (moved ? plan.start[ep.local_experts] : 0u) : total;
        if (blockIdx.x == 0) {
            counts[ep.world + kEpoch] = static_cast<std::int32_t>(epoch);
            if (!a.cached) counts[ep.world + kTotal] = static_cast<std::int32_t>(total), counts[ep.world + kRows] = static_cast<std::int32_t>(*rows);
            if (a.host_word != 0) {
                __threadfence_system();  // an error record must be there before the word that ends the host's wait
                store_relaxed(reinterpret_cast<std::uint64_t*>(a.host_word), stamped(a.sequence, *rows));
            }
        }
    }
    __syncthreads();
    if (blockIdx.x != 0) return;
    // Once for the handle and once for the caller, who may overwrite its own.
    char* slot = at_home(ep, ep.off_slots + a.slot * ep.slot_bytes);
    auto* per_expert = reinterpret_cast<std::int32_t*>(a.expert_counts);
    for (int e = threadIdx.x; e < ep.local_experts; e += blockDim.x) {
        if (!a.cached) per_expert[e] = moved ? static_cast<std::int32_t>(count_of<kExpert>(ep, plan, epoch, e)) : 0;
        reinterpret_cast<std::int32_t*>(slot + ep.slot_counts)[e] = per_expert[e];
    }
    if (!kExpert) return;
    auto* offsets = reinterpret_cast<long long*>(a.expert_offsets);
    for (int e = threadIdx.x; e <= ep.local_experts; e += blockDim.x) {
        if (!a.cached) offsets[e] = moved ? plan.start[e] : 0;
        reinterpret_cast<long long*>(slot + ep.slot_offsets)[e] = offsets[e];
    }
    for (int i = threadIdx.x; ep.fixed_slots && !a.cached && i < ep.local_experts * ep.world; i += blockDim.x)
        counts[ep.world + kTails + i] = moved ? static_cast<std::int32_t>(Padding{ep, a, plan, true, 0}.received(i)) : 0;
}

__device__ __forceinline__ char* slot_at(const hal_cuda_ep& ep, int peer, unsigned slot) {
    return at_peer(ep, peer, ep.off_slots + slot * ep.slot_bytes);
}

// ---- layout rank ----------------------------------------------------------------------------------------------------

// Ids, weights, source tokens and scales of 32 consecutive rows at one rank: written as runs, since lone 4-byte stores
// would cost the link a packet each.
__device__ void send_row_words(const hal_cuda_ep& ep, const hal_cuda_dispatch_args& a, const Plan& plan, int peer,
                               unsigned first) {
    const unsigned total = plan.directory.total(peer);
    const unsigned n = min(32u, total - first);
    const int mine = lane_id() < n ? plan.directory.token(peer, first + lane_id()) : 0;
    const std::size_t row = plan.base[peer] + first;
    char* slot = slot_at(ep, peer, plan.slot[peer]);
    const auto* weights = reinterpret_cast<const float*>(a.topk_weights);
    auto* idx_out = reinterpret_cast<std::int32_t*>(slot + ep.slot_idx) + row * ep.topk;
    auto* weight_out = reinterpret_cast<float*>(slot + ep.slot_weights) + row * ep.topk;
    const unsigned words = n * ep.topk;
    for (unsigned start = 0; start < words; start += 32) {
        const unsigned i = start + lane_id();
        const unsigned r = min(i / ep.topk, 31u);
        const int token = __shfl_sync(0xffffffffu, mine, static_cast<int>(r));
        if (i >= words) continue;
        const int entry = token * ep.topk + static_cast<int>(i % ep.topk);
        const int id = expert_id(a, entry);
        const bool here = id >= 0 && id / ep.local_experts == peer;
        idx_out[i] = here ? id - peer * ep.local_experts : -1;
        weight_out[i] = !here ? 0.0f : weights != nullptr ? __ldg(weights + entry) : 1.0f;
    }
    if (ep.keep_source && lane_id() < n) reinterpret_cast<std::int32_t*>(slot + ep.slot_meta)[row + lane_id()] = mine;
    if (ep.scale_dim == 0) return;
    const auto* scales = reinterpret_cast<const float*>(a.scales);
    auto* scale_out = reinterpret_cast<float*>(slot + ep.slot_scales) + row * ep.scale_dim;
    if (ep.scale_dim % 4 == 0) {
        const unsigned each = ep.scale_dim / 4, vectors = n * each;
        for (unsigned start = 0; start < vectors; start += 32) {
            const unsigned i = start + lane_id();
            const int token = __shfl_sync(0xffffffffu, mine, static_cast<int>(min(i / each, 31u)));
            if (i < vectors)
                reinterpret_cast<float4*>(scale_out)[i] =
                    __ldg(reinterpret_cast<const float4*>(scales) + static_cast<std::size_t>(token) * each + i % each);
        }
        return;
    }
    for (unsigned start = 0; start < n * ep.scale_dim; start += 32) {
        const unsigned i = start + lane_id();
        const int token = __shfl_sync(0xffffffffu, mine, static_cast<int>(min(i / ep.scale_dim, 31u)));
        if (i < n * ep.scale_dim) scale_out[i] = __ldg(scales + static_cast<std::size_t>(token) * ep.scale_dim + i % ep.scale_dim);
    }
}

// What the handle keeps of one token.
__device__ void keep_token(const hal_cuda_ep& ep, const hal_cuda_dispatch_args& a, const Plan& plan, int token) {
    if (a.cached) return;
    auto* pos = reinterpret_cast<std::int32_t*>(a.pos);
    for (int r = lane_id(); r < ep.world; r += 32)
        pos[token * ep.world + r] = plan.directory.has(token, r) ? static_cast<int>(plan.base[r]) + plan.directory.place(token, r) : -1;
    if (lane_id() < ep.topk) {
        const int entry = token * ep.topk + lane_id();
        reinterpret_cast<std::int32_t*>(a.idx)[entry] = expert_id(a, entry);
    }
}

__device__ int row_word_units(const Plan& plan, int world) {
    int units = 0;
    for (int r = 0; r < world; ++r) units += static_cast<int>(plan.directory.total(r) + 31) / 32;
    return units;
}

// Each piece of a row is loaded once and stored at every rank that gets it. The first piece is loaded before the headers
// are waited for: it needs nothing of them.
template <class Headers>
__device__ bool push_rank_rows(const hal_cuda_ep& ep, const hal_cuda_dispatch_args& a, const Plan& plan, Lane& lane,
                               Headers headers) {
    const RowCut cut(ep.row_bytes);
    const int word_units = row_word_units(plan, ep.world);
    const int warps = gridDim.x * warps_in_block();
    const int warp = warp_id() * gridDim.x + blockIdx.x;  // consecutive units go to different multiprocessors
    Tickets tickets(&lane.tickets[0], warp, warps, word_units + a.tokens * cut.pieces);
    Piece piece;
    const auto* x = reinterpret_cast<const char*>(a.x);
    auto load = [&] {
        const int unit = tickets.unit() - word_units;
        piece.span(cut, unit % cut.pieces);
        piece.load(x + static_cast<std::size_t>(unit / cut.pieces) * ep.row_bytes);
    };
    bool loaded = tickets.more() && tickets.unit() >= word_units;
    if (loaded) load();
    if (!headers()) return false;
    for (; tickets.more(); tickets.advance()) {
        int unit = tickets.unit();
        if (unit < word_units) {
            int peer = 0;
            for (; unit >= static_cast<int>(plan.directory.total(peer) + 31) / 32; ++peer) unit -= static_cast<int>(plan.directory.total(peer) + 31) / 32;
            send_row_words(ep, a, plan, peer, unit * 32u);
            continue;
        }
        if (!loaded) load();
        loaded = false;
        const int token = (unit - word_units) / cut.pieces;
        for (int hop = 1; hop <= ep.world; ++hop) {  // each rank starts with another peer, and ends with itself
            const int peer = (ep.rank + hop) % ep.world;
            if (!plan.directory.has(token, peer)) continue;
            piece.store(slot_at(ep, peer, plan.slot[peer]) +
                        static_cast<std::size_t>(plan.base[peer] + plan.directory.place(token, peer)) * ep.row_bytes);
        }
        if ((unit - word_units) % cut.pieces == 0) keep_token(ep, a, plan, token);
    }
    return true;
}

// ---- layout expert --------------------------------------------------------------------------------------------------

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
__device__ void push_expert_row(const hal_cuda_ep& ep, const hal_cuda_dispatch_args& a, const Plan& plan, const RowCut& cut,
                                int token, std::uint32_t epoch) {
    const int entry = token * ep.topk + lane_id();
    auto* pos = reinterpret_cast<std::int32_t*>(a.pos);
    int id = -1, row = -1;
    float weight = 0.0f;
    if (lane_id() < ep.topk) {
        id = expert_id(a, entry);
        if (id >= 0) {
            row = a.cached ? pos[entry] : static_cast<int>(plan.expert_base[id]) + pos[entry];
            weight = a.topk_weights != 0 ? __ldg(reinterpret_cast<const float*>(a.topk_weights) + entry) : 1.0f;
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
    const auto address = reinterpret_cast<unsigned long long>(slot + static_cast<std::size_t>(max(row, 0)) * ep.row_bytes);
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
        const auto scales = reinterpret_cast<unsigned long long>(slot + ep.slot_scales + static_cast<std::size_t>(max(row, 0)) * ep.scale_dim * 4);
        for (unsigned left = targets; left != 0; left &= left - 1) {
            auto* out = reinterpret_cast<float*>(__shfl_sync(0xffffffffu, scales, lowest_lane(left)));
            for (int i = lane_id(); i < ep.scale_dim; i += 32)
                out[i] = __ldg(reinterpret_cast<const float*>(a.scales) + static_cast<std::size_t>(token) * ep.scale_dim + i);
        }
    }
    if (peer == ep.rank) {
        reinterpret_cast<std::int32_t*>(slot + ep.slot_idx)[row] = id - ep.rank * ep.local_experts;
        reinterpret_cast<float*>(slot + ep.slot_weights)[row] = weight;
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
            record.rows[lane_id()] = there;
            record.weights[lane_id()] = weight;
            record.experts[lane_id()] = id - to * ep.local_experts;
            if (lane_id() == 0) *record.token = token;
        }
        // All lanes' stores to this peer come before the flag: __syncwarp orders them, the release carries them.
        __syncwarp();
        if (lane_id() == 0) store_release(row_flag_at(ep, to, ep.rank, place), epoch);
    }
}

// A row that a peer pushed to its first place here: copies to its other experts' places, and its words.
__device__ bool receive_expert_row(const hal_cuda_ep& ep, const hal_cuda_dispatch_args& a, const RowCut& cut, int source,
                                   int place, std::uint32_t epoch) {
    int ok = 1;
    if (lane_id() == 0)
        ok = wait_flag(ep, row_flag_at(ep, ep.rank, source, place), epoch, HAL_CUDA_STAGE_ROWS, source);
    if (!__shfl_sync(0xffffffffu, ok, 0)) return false;
    const Record record(ep, ep.rank, a.slot, source, place);
    int row = -1, expert = -1;
    float weight = 0.0f;
    if (lane_id() < ep.topk)
        row = __ldcg(record.rows + lane_id()), weight = __ldcg(record.weights + lane_id()), expert = __ldcg(record.experts + lane_id());
    const unsigned here = __ballot_sync(0xffffffffu, row >= 0);
    const int first = lowest_lane(here);
    char* slot = slot_at(ep, ep.rank, a.slot);
    if (row >= 0) {
        reinterpret_cast<std::int32_t*>(slot + ep.slot_idx)[row] = expert;
        reinterpret_cast<float*>(slot + ep.slot_weights)[row] = weight;
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
            piece.store(slot + static_cast<std::size_t>(__shfl_sync(0xffffffffu, row, lowest_lane(left))) * ep.row_bytes);
    }
    auto* scales = reinterpret_cast<float*>(slot + ep.slot_scales);
    for (unsigned left = others; ep.scale_dim > 0 && left != 0; left &= left - 1) {
        const std::size_t to = __shfl_sync(0xffffffffu, row, lowest_lane(left));
        for (int i = lane_id(); i < ep.scale_dim; i += 32) scales[to * ep.scale_dim + i] = __ldcg(scales + first_row * ep.scale_dim + i);
    }
    return true;
}

// ---- both -----------------------------------------------------------------------------------------------------------

__device__ void clear_row(const hal_cuda_ep& ep, const hal_cuda_dispatch_args& a, const RowCut& cut, std::size_t row, bool expert) {
    char* slot = slot_at(ep, ep.rank, a.slot);
    Piece nothing;
    nothing.clear();
    for (int p = 0; p < cut.pieces; ++p) {
        nothing.span(cut, p);
        nothing.store(slot + row * ep.row_bytes);
    }
    const int words = expert ? 1 : ep.topk;
    for (int i = lane_id(); i < words; i += 32) {
        reinterpret_cast<std::int32_t*>(slot + ep.slot_idx)[row * words + i] = -1;
        reinterpret_cast<float*>(slot + ep.slot_weights)[row * words + i] = 0.0f;
    }
    for (int i = lane_id(); i < ep.scale_dim; i += 32) reinterpret_cast<float*>(slot + ep.slot_scales)[row * ep.scale_dim + i] = 0.0f;
}

__device__ void signal_peers(const hal_cuda_ep& ep) {
    __syncthreads();  // orders the whole block's stores before the one release for each peer
    for (int peer = threadIdx.x; peer < ep.world; peer += blockDim.x)
        if (peer != ep.rank) add_release(arrival_at(ep, peer, ep.rank), share_of_round());
}

template <bool kExpert>
__device__ bool send(const hal_cuda_ep& ep, const hal_cuda_dispatch_args& a, const Plan& plan, Lane& lane, std::uint64_t epoch) {
    __shared__ hal_cuda_error bad;
    __shared__ unsigned rows;
    if (threadIdx.x == 0) bad.claimed = 0, bad.detail = 0;
    __syncthreads();
    build_directory<kExpert>(ep, a, plan, &bad);
    if (blockIdx.x == 0) {
        if (threadIdx.x == 0 && bad.detail != 0) {
            bad.kind = HAL_CUDA_BAD_INPUT, bad.rank = ep.rank, bad.stage = HAL_CUDA_STAGE_HEADER, bad.queue = 0;
            bad.expected = ep.experts, bad.seen = 0;
            report(ep, bad, false);
        }
        await_previous_round(ep, epoch);
        __syncthreads();
        send_header<kExpert>(ep, a, plan, epoch, bad.detail != 0);
    }
    bool alive = true;
    if (kExpert && !a.cached) {
        const OwnedExperts own(ep);
        __syncthreads();  // block 0 still reads its histogram in send_header
        number_entries(ep, a, own, plan.scratch + own.count, plan.scratch, reinterpret_cast<std::int32_t*>(a.pos));
        // The previous round must be over for these words too: block 0's header to this rank says so.
        std::uint32_t unused = 0;
        if (threadIdx.x == 0) wait_stamped(ep, header_at(ep, ep.rank, ep.rank), epoch, HAL_CUDA_STAGE_GRID, ep.rank, &unused);
        __syncthreads();
        send_expert_counts(ep, own, plan.scratch, epoch);
        alive = grid_barrier(ep, lane);
    }
    bool moved = false;
    auto headers = [&] {
        moved = receive_headers<kExpert>(ep, a, plan, epoch);
        if (moved) place_groups<kExpert>(ep, a, plan);
        keep_counts<kExpert>(ep, a, plan, epoch, moved, &rows);
        return moved;
    };
    const RowCut cut(ep.row_bytes);
    if (!kExpert) {
        push_rank_rows(ep, a, plan, lane, headers);
    } else if (alive && headers()) {
        const int warps = gridDim.x * warps_in_block();
        for (Tickets t(&lane.tickets[0], warp_id() * gridDim.x + blockIdx.x, warps, a.tokens); t.more(); t.advance())
            push_expert_row(ep, a, plan, cut, t.unit(), static_cast<std::uint32_t>(epoch));
    }
    // Lengths are taken now: once the peers are signalled they may send the next round's headers.
    const Padding padding{ep, a, plan, kExpert, rows};
    if (warp_id() == 0 && moved) warp_prefix(plan.pads, padding.segments(), [&](int s) { return padding.length(s); });
    __syncthreads();
    const int clear_units = moved ? static_cast<int>(plan.pads[padding.segments()]) : 0;
    // plan.scratch is free by now; the first rows must be read before the signal as well.
    for (int s = threadIdx.x; moved && clear_units > 0 && s < padding.segments(); s += blockDim.x) plan.scratch[s] = padding.first(s);
    signal_peers(ep);
    const int warps = gridDim.x * warps_in_block();
    for (Tickets t(&lane.tickets[1], warp_id() * gridDim.x + blockIdx.x, warps, clear_units); t.more(); t.advance()) {
        const int s = segment_of(plan.pads, padding.segments(), t.unit());
        clear_row(ep, a, cut, plan.scratch[s] + t.unit() - plan.pads[s], kExpert);
    }
    return moved;
}

template <bool kExpert>
__device__ void receive(const hal_cuda_ep& ep, const hal_cuda_dispatch_args& a, Lane& lane, std::uint64_t epoch,
                        const std::int32_t* from) {
    const int warps = gridDim.x * warps_in_block();
    if (kExpert) {
        const RowCut cut(ep.row_bytes);
        int units = 0;
        for (int s = 0; s < ep.world; ++s) units += s == ep.rank ? 0 : from[s];
        for (Tickets t(&lane.tickets[2], warp_id() * gridDim.x + blockIdx.x, warps, units); t.more(); t.advance()) {
            int place = t.unit(), source = 0;
            for (; source == ep.rank || place >= from[source]; ++source) place -= source == ep.rank ? 0 : from[source];
            if (!receive_expert_row(ep, a, cut, source, place, static_cast<std::uint32_t>(epoch))) break;
        }
        return;
    }
    if (blockIdx.x != 0 && !ep.keep_source) return;
    for (int peer = threadIdx.x; peer < ep.world; peer += blockDim.x)
        if (peer != ep.rank) wait_at_least(ep, arrival_at(ep, ep.rank, peer), epoch * kRound, HAL_CUDA_STAGE_ROWS, peer);
    __syncthreads();
    if (!ep.keep_source || a.cached) return;
    const auto* source = reinterpret_cast<const std::int32_t*>(slot_at(ep, ep.rank, a.slot) + ep.slot_meta);
    for (int s = 0, first = 0; s < ep.world; first += from[s], ++s) {
        const int begin = ep.fixed_slots ? s * ep.max_tokens : first;
        for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < from[s]; i += gridDim.x * blockDim.x)
            reinterpret_cast<std::int32_t*>(a.source)[begin + i] = __ldcg(source + begin + i);
    }
}

template <bool kExpert>
__global__ void __launch_bounds__(512, 1)
    dispatch_kernel(const __grid_constant__ hal_cuda_ep ep, const __grid_constant__ hal_cuda_dispatch_args a) {
    extern __shared__ std::uint32_t memory[];
    Lane& lane = state_of(ep)->dispatch;
    const bool sends = (a.phases & HAL_CUDA_SEND) != 0;
    const std::uint64_t finished = lane.epoch;
    const auto* counts = reinterpret_cast<const std::int32_t*>(a.counts);
    // A receive half belongs to the round that its send half noted, which need not be the last.
    const std::uint64_t epoch = sends ? finished + 1 : finished - (static_cast<std::uint32_t>(finished) - static_cast<std::uint32_t>(counts[ep.world + kEpoch]));
    const Plan plan(memory, ep, sends ? a.tokens : 0, kExpert);
    bool moved = true;
    if (sends) moved = send<kExpert>(ep, a, plan, lane, epoch);
    if (use_second_half(a)) {
        auto* from = reinterpret_cast<std::int32_t*>(plan.slot);  // rows from each rank; the slots are not needed again
        __syncthreads();
        for (int s = threadIdx.x; s < ep.world; s += blockDim.x)
            from[s] = !moved ? 0 : sends ? static_cast<std::int32_t>(plan.counts[s * ep.world + ep.rank]) : counts[s];
        __syncthreads();
        receive<kExpert>(ep, a, lane, epoch, from);
    }
    leave(lane, sends);
}

std::size_t shared_words(const hal_cuda_ep& ep, const hal_cuda_dispatch_args& a) {
    const std::size_t tokens = (a.phases & HAL_CUDA_SEND) != 0 ? a.tokens : 0;
    const std::size_t world = ep.world, experts = ep.experts;
    const std::size_t each = (experts + a.blocks - 1) / a.blocks;
    const std::size_t owners = ep.expert_layout ? each * (1 + a.threads / 32) : 0;
    const std::size_t scratch = std::max(experts + 3, owners);
    return Directory::words(static_cast<int>(tokens), ep.world) + world * (2 + world) +
           (ep.expert_layout ? 2 * experts + ep.local_experts + 1 : 0) + experts + 3 + scratch;
}

}  // namespace
}  // namespace hal::cuda

#include "launch.cuh"

extern "C" int hal_cuda_dispatch(const hal_cuda_ep* ep, const hal_cuda_dispatch_args* args, std::uint64_t stream) {
    using namespace hal::cuda;
    const std::size_t bytes = shared_words(*ep, *args) * 4;
    const auto kernel = ep->expert_layout ? dispatch_kernel<true> : dispatch_kernel<false>;
    return launch(kernel, ep->device, args->blocks, args->threads, bytes, stream, "dispatch", *ep, *args);
}
