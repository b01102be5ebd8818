// SPDX-License-Identifier: Apache-2.0
// Several hosts: the start of a dispatch. Tokens are numbered for each destination; every rank's counts come to every rank,
// over the rails and then to the neighbours; and from them follows every row's final place, at the rank that sends it.
#pragma once
#include "hosts.cuh"

namespace hal::cuda::hosts {

// What the blocks of one launch tell one another, in this rank's own memory.
struct Plan {
    std::uint32_t *count, *slot;  // counts: of each rank, then each expert, then each host
    __device__ explicit Plan(const Map& m) {
        count = reinterpret_cast<std::uint32_t*>(m.h.plan);
        slot = count + m.ep.world + m.ep.experts + m.hosts();
    }
};

// A header's words: slot and flags, then tokens to each rank, entries for each expert, tokens to each host. Stamped with
// the round, in two sets in turn: a rank sends header e + 2 when it has every rank's e + 1, and a rank sends that when
// nothing of it reads headers of round e any more.
struct Headers {
    const Map& m;
    std::uint64_t epoch;
    int words;
    __device__ Headers(const Map& map, std::uint64_t round)
        : m(map), epoch(round), words(1 + map.ep.world + map.ep.experts + map.hosts()) {}
    __device__ std::uint64_t set(std::uint64_t base, int members, int member) const {
        return base + ((epoch & 1) * members + member) * static_cast<std::uint64_t>(words) * 8;
    }
    // Of `source`, where the ranks of a host look.
    __device__ std::uint64_t* table(int rank, int source) const {
        return reinterpret_cast<std::uint64_t*>(m.at(rank, set(m.ep.off_header, m.ep.world, source)));
    }
    __device__ std::uint64_t outbox() const { return set(m.h.off_outbox, 1, 0); }
    __device__ std::uint64_t inbox(int from_host) const { return set(m.h.off_inbox, m.hosts(), from_host); }
    // How many headers have come from a host.
    __device__ std::uint64_t came(int from_host) const { return m.h.off_headers_came + from_host * 64ull; }
    __device__ int to_rank(int rank) const { return 1 + rank; }
    __device__ int to_expert(int expert) const { return 1 + m.ep.world + expert; }
    __device__ int to_host(int host) const { return 1 + m.ep.world + m.ep.experts + host; }
};

__device__ inline void check_ids(const Map& m, const hal_cuda_dispatch_args& a, Counters& counters) {
    const hal_cuda_ep& ep = m.ep;
    const int step = static_cast<int>(gridDim.x * blockDim.x);
    for (int token = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x); token < a.tokens; token += step) {
        hal_cuda_error bad{};
        for (int j = 0; j < ep.topk; ++j) {
            const int entry = token * ep.topk + j, id = Ids(a)[entry];
            const bool good = static_cast<unsigned>(id) < static_cast<unsigned>(ep.experts);
            reinterpret_cast<std::int32_t*>(a.idx)[entry] = good ? id : -1;
            if (!good) reinterpret_cast<std::int32_t*>(a.pos)[entry] = -1;
            if (!good && id != -1) bad.detail = HAL_CUDA_BAD_ID, bad.token = token, bad.expert = id;
            for (int other = 0; good && other < j; ++other)
                if (Ids(a)[token * ep.topk + other] == id)
                    bad.detail = HAL_CUDA_BAD_DUPLICATE, bad.token = token, bad.expert = id;
        }
        if (bad.detail != 0) refuse(ep, bad, counters);
    }
}

// Numbers the tokens for which `match` holds, in order; one warp.
template <class Match, class Found>
__device__ int number_tokens(int tokens, Match match, Found found) {
    int before = 0;
    for (int start = 0; start < tokens; start += 32) {
        const int token = start + lane_id();
        const bool has = token < tokens && match(token);
        const unsigned mask = __ballot_sync(0xffffffffu, has);
        if (has) found(token, before + __popc(mask & lanes_below()));
        before += __popc(mask);
    }
    return before;
}

// Places of all entries, the tokens that cross to each peer, and all counts; a warp for each destination.
__device__ inline void number_all(const Map& m, const hal_cuda_dispatch_args& a, const Plan& plan, const Lists& lists) {
    const hal_cuda_ep& ep = m.ep;
    const Owner owner(ep);
    auto* pos = reinterpret_cast<std::int32_t*>(a.pos);
    auto any = [&](int token, auto wanted) {
        for (int j = 0; j < ep.topk; ++j) {
            const int id = Ids(a)[token * ep.topk + j];
            if (static_cast<unsigned>(id) < static_cast<unsigned>(ep.experts) && wanted(id)) return true;
        }
        return false;
    };
    auto place = [&](int token, int number, auto wanted) {
        for (int j = 0; j < ep.topk; ++j) {
            const int id = Ids(a)[token * ep.topk + j];
            if (static_cast<unsigned>(id) < static_cast<unsigned>(ep.experts) && wanted(id))
                pos[token * ep.topk + j] = number;
        }
    };
    auto cross = [&](int peer, int token, int number) {
        lists.cross[static_cast<std::size_t>(peer) * a.tokens + number] = token;
    };
    const int units = ep.world + ep.experts + m.hosts(), warps = static_cast<int>(gridDim.x) * warps_in_block();
    for (int unit = warp_id() * static_cast<int>(gridDim.x) + static_cast<int>(blockIdx.x); unit < units;
         unit += warps) {
        int count = 0;
        if (unit < ep.world) {
            auto wanted = [&](int id) { return owner.of(id) == unit; };
            const bool crosses = !m.h.hierarchical && !m.near(unit);
            count = number_tokens(
                a.tokens, [&](int token) { return any(token, wanted); },
                [&](int token, int number) {
                    if (!ep.expert_layout) place(token, number, wanted);
                    if (crosses) cross(m.peer_to(unit), token, number);
                });
            if (crosses && lane_id() == 0) lists.sent[m.peer_to(unit)] = count;
        } else if (unit < ep.world + ep.experts) {
            auto wanted = [&](int id) { return id == unit - ep.world; };
            count = number_tokens(
                a.tokens, [&](int token) { return any(token, wanted); },
                [&](int token, int number) {
                    if (ep.expert_layout) place(token, number, wanted);
                });
        } else {
            const int host = unit - ep.world - ep.experts;
            auto wanted = [&](int id) { return m.host_of(owner.of(id)) == host; };
            const bool crosses = m.h.hierarchical && host != m.host;
            count = number_tokens(
                a.tokens, [&](int token) { return any(token, wanted); },
                [&](int token, int number) {
                    if (crosses) cross(m.peer_to(host * m.local), token, number);
                });
            if (crosses && lane_id() == 0) lists.sent[m.peer_to(host * m.local)] = count;
        }
        if (lane_id() == 0) plan.count[unit] = static_cast<std::uint32_t>(count);
    }
}

// Block 0: this rank's header to its neighbours, over the rail to each other host, and what comes back from there to the
// neighbours. False when a wait failed.
__device__ inline bool exchange_headers(const Headers& headers, const hal_cuda_dispatch_args& a, const Plan& plan,
                                        bool bad) {
    const Map& m = headers.m;
    const hal_cuda_ep& ep = m.ep;
    const std::uint64_t epoch = headers.epoch;
    const bool counted = !a.cached && !bad;
    auto* outbox = reinterpret_cast<std::uint64_t*>(m.here(headers.outbox()));
    for (int word = static_cast<int>(threadIdx.x); word < headers.words; word += static_cast<int>(blockDim.x)) {
        std::uint32_t value = (a.cached ? kCached : 0u) | (bad ? kBadInput : 0u);
        value = word == 0 ? value << 24 | static_cast<unsigned>(a.slot) : counted ? __ldcg(plan.count + word - 1) : 0u;
        for (int i = 0; i < m.local; ++i)
            store_relaxed(headers.table(m.first() + i, ep.rank) + word, stamped(epoch, value));
        store_relaxed(outbox + word, stamped(epoch, value));
    }
    __syncthreads();
    const gin::Queue queue(ep, m.h.gin, 0);
    bool ok = true;
    for (int i = 1 + warp_id(); i < m.hosts(); i += warps_in_block()) {
        const int to = (m.host + i) % m.hosts(), rank = to * m.local + m.h.gin.lsa_rank;
        if (lane_id() != 0) continue;
        ok = queue.put(rank, m.place(headers.inbox(m.host)), m.place(headers.outbox()), headers.words * 8ull) &&
             queue.signal(rank, gin::Word{m.place(headers.came(m.host))}, 1) && ok;
    }
    for (int i = 1 + warp_id(); i < m.hosts(); i += warps_in_block()) {
        const int from = (m.host + m.hosts() - i) % m.hosts(), source = from * m.local + m.h.gin.lsa_rank;
        bool came = true;
        if (lane_id() == 0)
            came = ok && queue.wait(reinterpret_cast<const std::uint64_t*>(m.here(headers.came(from))), epoch, source,
                                    HAL_CUDA_STAGE_HEADER);
        ok = all_lanes(came) && ok;
        if (!ok) break;
        const auto* words = reinterpret_cast<const std::uint64_t*>(m.here(headers.inbox(from)));
        for (int word = lane_id(); word < headers.words; word += 32) {
            const std::uint64_t value = load_relaxed(words + word);
            for (int neighbour = 0; neighbour < m.local; ++neighbour)
                store_relaxed(headers.table(m.first() + neighbour, source) + word, value);
        }
    }
    return __syncthreads_and(ok) != 0;
}

// Block 0: one word of every source that `index` names for it, to `take(source, value)`. Neighbours' words are waited for
// first and other hosts' then, so that a neighbour that is away is blamed, and not those whose words it hands on.
template <class Index, class Take>
__device__ bool read_headers(const Headers& headers, int each, Index index, Take take) {
    const Map& m = headers.m;
    bool ok = true;
    for (int pass = 0; pass < 2; ++pass) {
        for (int i = static_cast<int>(threadIdx.x); i < m.ep.world * each && ok; i += static_cast<int>(blockDim.x)) {
            const int source = i / each;
            if (m.near(source) != (pass == 0)) continue;
            std::uint32_t value = 0;
            ok = wait_stamped(m.ep, headers.table(m.ep.rank, source) + index(i % each), headers.epoch,
                              HAL_CUDA_STAGE_HEADER, source, &value);
            if (ok) take(source, i % each, value);
        }
        if (__syncthreads_and(ok) == 0) return false;
    }
    return true;
}

__device__ __forceinline__ std::uint32_t word_of(const Headers& headers, int source, int index) {
    return static_cast<std::uint32_t>(load_relaxed(headers.table(headers.m.ep.rank, source) + index));
}

// Block 0: first rows and counts into the handle, from all headers.
__device__ inline void place_all(const Headers& headers, const hal_cuda_dispatch_args& a, const Lists& lists) {
    const Map& m = headers.m;
    const hal_cuda_ep& ep = m.ep;
    auto* counts = reinterpret_cast<std::int32_t*>(a.counts);
    auto* expert_counts = reinterpret_cast<std::int32_t*>(a.expert_counts);
    auto* offsets = reinterpret_cast<long long*>(a.expert_offsets);
    const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
    const unsigned alignment = static_cast<unsigned>(ep.alignment);
    for (int source = thread; source < ep.world; source += threads)
        counts[source] = static_cast<std::int32_t>(word_of(headers, source, headers.to_rank(ep.rank)));
    for (int peer = thread; peer < m.h.peers; peer += threads)
        lists.got[peer] = static_cast<std::int32_t>(
            word_of(headers, m.peer_rank(peer), m.h.hierarchical ? headers.to_host(m.host) : headers.to_rank(ep.rank)));
    for (int rank = warp_id(); rank < ep.world; rank += warps_in_block()) {
        unsigned start = 0;  // of the group that comes next, at that rank
        if (!ep.expert_layout) {
            for (int source = lane_id(); source < ep.rank && !ep.fixed_slots; source += 32)
                start += word_of(headers, source, headers.to_rank(rank));
            start = __shfl_sync(0xffffffffu, warp_scan(start), 31);
            if (lane_id() == 0)
                lists.base[rank] = ep.fixed_slots ? ep.rank * ep.max_tokens : static_cast<std::int32_t>(start);
            if (rank != ep.rank) continue;
        }
        for (int first = 0; first < ep.local_experts; first += 32) {
            const int e = first + lane_id(), expert = rank * ep.local_experts + e;
            unsigned total = 0, before = 0;
            for (int source = 0; e < ep.local_experts && source < ep.world; ++source) {
                const unsigned n = word_of(headers, source, headers.to_expert(expert));
                if (source < ep.rank) before += n;
                total += n;
            }
            if (rank == ep.rank && e < ep.local_experts) expert_counts[e] = static_cast<std::int32_t>(total);
            if (!ep.expert_layout) continue;
            const unsigned group = ep.fixed_slots ? ep.world * static_cast<unsigned>(ep.max_tokens)
                                                  : (total + alignment - 1) / alignment * alignment;
            const unsigned inclusive = warp_scan(e < ep.local_experts ? group : 0u);
            const unsigned begin = start + inclusive - group;
            if (e < ep.local_experts) {
                lists.base[expert] =
                    static_cast<std::int32_t>(ep.fixed_slots ? begin + ep.rank * ep.max_tokens : begin + before);
                if (rank == ep.rank) offsets[e] = begin;
            }
            start += __shfl_sync(0xffffffffu, inclusive, 31);
        }
        if (ep.expert_layout && rank == ep.rank && lane_id() == 0) offsets[ep.local_experts] = start;
    }
    for (int i = thread; ep.fixed_slots && ep.expert_layout && i < ep.local_experts * ep.world; i += threads)
        counts[ep.world + kTails + i] = static_cast<std::int32_t>(
            word_of(headers, i % ep.world, headers.to_expert(ep.rank * ep.local_experts + i / ep.world)));
    __syncthreads();
    if (thread != 0) return;
    int total = 0;
    for (int source = 0; source < ep.world; ++source) total += counts[source];
    counts[ep.world + kTotal] = total;
    counts[ep.world + kRows] = ep.fixed_slots     ? ep.slot_rows
                               : ep.expert_layout ? static_cast<std::int32_t>(offsets[ep.local_experts])
                                                  : total;
}

// Block 0: nothing comes in this round.
__device__ inline void place_nothing(const Map& m, const hal_cuda_dispatch_args& a, const Lists& lists) {
    const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
    const int tails = m.ep.fixed_slots && m.ep.expert_layout ? m.ep.local_experts * m.ep.world : 0;
    if (a.cached) return;  // the handle is whole
    forget_routing(m.ep, a, m.ep.topk, thread, threads);
    for (int i = thread; i < m.ep.world + kTails + tails; i += threads)
        reinterpret_cast<std::int32_t*>(a.counts)[i] = 0;
    for (int i = thread; i < m.ep.local_experts; i += threads) reinterpret_cast<std::int32_t*>(a.expert_counts)[i] = 0;
    for (int i = thread; m.ep.expert_layout && i <= m.ep.local_experts; i += threads)
        reinterpret_cast<long long*>(a.expert_offsets)[i] = 0;
    for (int i = thread; i < m.h.peers; i += threads) lists.got[i] = 0, lists.sent[i] = 0;
    __syncthreads();
}

// Block 0: exchange counts, decide whether rows move, place them, and tell the host how many come.
__device__ inline bool notify(const Map& m, const hal_cuda_dispatch_args& a, const Plan& plan, const Lists& lists,
                              const Launch& launch, std::uint64_t epoch) {
    const hal_cuda_ep& ep = m.ep;
    const Headers headers(m, epoch);
    const bool bad = *reinterpret_cast<volatile unsigned*>(&launch.counters().refused) != 0;
    // Neighbours that were reading this rank's rows for a combine must have read them: their slot may be offered now.
    bool ok = true;
    for (int i = static_cast<int>(threadIdx.x); i < m.local; i += static_cast<int>(blockDim.x))
        if (m.first() + i != ep.rank) ok = await_neighbour(m, m.first() + i) && ok;
    if (__syncthreads_and(ok) == 0 || !exchange_headers(headers, a, plan, bad)) return false;
    int refused = 0;
    ok = read_headers(
        headers, 1, [](int) { return 0; },
        [&](int source, int, std::uint32_t value) {
            plan.slot[source] = value & 0xffffffu;
            refused |= look_at_flags(ep, a, source, value >> 24);
        });
    refused = __syncthreads_or(refused);
    if (!ok) return false;
    if (!a.cached && !refused)
        // All words are waited for here, and read again below.
        ok = read_headers(headers, headers.words - 1, [](int i) { return 1 + i; }, [](int, int, std::uint32_t) {});
    if (!ok) return false;
    if (refused) {
        place_nothing(m, a, lists);
    } else if (!a.cached) {
        place_all(headers, a, lists);
    }
    if (threadIdx.x == 0) {
        auto* counts = reinterpret_cast<std::int32_t*>(a.counts);
        counts[ep.world + kEpoch] = static_cast<std::int32_t>(epoch);
        *moved(a.source) = refused ? 0 : 1;
        if (a.host_word != 0) {
            __threadfence_system();  // an error record must be there before the word that ends the host's wait
            store_relaxed(reinterpret_cast<std::uint64_t*>(a.host_word),
                          stamped(a.sequence, refused ? 0u : static_cast<std::uint32_t>(counts[ep.world + kRows])));
        }
    }
    return true;
}

}  // namespace hal::cuda::hosts
