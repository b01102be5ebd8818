// SPDX-License-Identifier: Apache-2.0
// Dispatch over several hosts. Hierarchical: a row crosses once to each host that needs it, over the rail, in the cells of
// a channel; there the rank of the same rail stores it at every neighbour that gets it, in its final place. Direct: a row
// is put from a staged copy straight into its final place at each rank of another host. Rows for this rank's own host are
// stored there over NVLink in both.
#include "hosts_plan.cuh"
#include "launch.cuh"

namespace hal::cuda::hosts {
namespace {

// Dispatch of one rank in one launch, as its warps see it.
struct Rows {
    const Map& m;
    const hal_cuda_dispatch_args& a;
    const Plan plan;
    const Lists lists;
    const RowCut cut;

    __device__ Rows(const Map& map, const hal_cuda_dispatch_args& args)
        : m(map), a(args), plan(map), lists(map, args.lists), cut(map.ep.row_bytes) {}

    // This rank's token, with its final rows.
    __device__ Entry entry(int token) const {
        Entry e{-1, -1, 0.0f};
        if (lane_id() >= m.ep.topk) return e;
        const int at = token * m.ep.topk + lane_id();
        e.id = __ldcg(reinterpret_cast<const std::int32_t*>(a.idx) + at);
        if (e.id < 0) return e;
        const int destination = m.ep.expert_layout ? e.id : e.owner(m.ep);
        e.row = __ldcg(lists.base + destination) + __ldcg(reinterpret_cast<const std::int32_t*>(a.pos) + at);
        e.weight = a.topk_weights != 0 ? __ldg(reinterpret_cast<const float*>(a.topk_weights) + at) : 1.0f;
        return e;
    }
    // For a combine that weighs rows at home.
    __device__ void keep_weights() const {
        const int step = static_cast<int>(gridDim.x * blockDim.x);
        for (int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
             m.ep.expert_layout && i < a.tokens * m.ep.topk; i += step)
            reinterpret_cast<float*>(a.weights)[i] =
                a.topk_weights != 0 ? __ldg(reinterpret_cast<const float*>(a.topk_weights) + i) : 1.0f;
    }
    // Only what `wanted(owner)` is to have.
    template <class Wanted>
    __device__ Entry part(Entry e, Wanted wanted) const {
        const int owner = e.owner(m.ep);
        return owner >= 0 && wanted(owner) ? e : Entry{-1, -1, 0.0f};
    }
    __device__ const char* x(int token) const {
        return reinterpret_cast<const char*>(a.x) + static_cast<std::size_t>(token) * m.ep.row_bytes;
    }
    __device__ const float* scales(int token) const {
        return reinterpret_cast<const float*>(a.scales) + static_cast<std::size_t>(token) * m.ep.scale_dim;
    }

    // Stores a row at the neighbours of an entry: its payload and scales at the lanes `targets`, its ids and weights where
    // the entry says. kCame: the row came over the network during this launch.
    template <bool kCame>
    __device__ void store(const Entry& e, unsigned targets, const char* row, const float* row_scales) const {
        const hal_cuda_ep& ep = m.ep;
        const int owner = e.owner(ep);
        char* slot = owner >= 0 ? m.at(owner, m.slot(__ldcg(plan.slot + owner))) : nullptr;
        const auto base = reinterpret_cast<unsigned long long>(slot);
        for (int p = 0; p < cut.pieces; ++p) {
            Piece piece;
            piece.span(cut, p);
            if (kCame)
                piece.load_shared(row);
            else
                piece.load(row);
            for (unsigned left = targets; left != 0; left &= left - 1) {
                const int lane = lowest_lane(left);
                piece.store(reinterpret_cast<char*>(__shfl_sync(0xffffffffu, base, lane)) +
                            static_cast<std::size_t>(__shfl_sync(0xffffffffu, e.row, lane)) * ep.row_bytes);
            }
        }
        for (unsigned left = targets; ep.scale_dim > 0 && left != 0; left &= left - 1) {
            const int lane = lowest_lane(left);
            auto* to = reinterpret_cast<float*>(reinterpret_cast<char*>(__shfl_sync(0xffffffffu, base, lane)) +
                                                ep.slot_scales) +
                       static_cast<std::size_t>(__shfl_sync(0xffffffffu, e.row, lane)) * ep.scale_dim;
            for (int i = lane_id(); i < ep.scale_dim; i += 32)
                store_window(to + i, kCame ? __ldcg(row_scales + i) : __ldg(row_scales + i));
        }
        store_words(e, owner, base);
    }
    __device__ void store_words(const Entry& e, int owner, unsigned long long base) const {
        const hal_cuda_ep& ep = m.ep;
        if (ep.expert_layout) {
            if (owner < 0) return;
            auto* slot = reinterpret_cast<char*>(base);
            store_window(reinterpret_cast<std::int32_t*>(slot + ep.slot_idx) + e.row, e.id - owner * ep.local_experts);
            store_window(reinterpret_cast<float*>(slot + ep.slot_weights) + e.row, e.weight);
            return;
        }
        for (unsigned left = __ballot_sync(0xffffffffu, is_first(owner >= 0, owner)); left != 0; left &= left - 1) {
            const int lane = lowest_lane(left), rank = __shfl_sync(0xffffffffu, owner, lane);
            auto* slot = reinterpret_cast<char*>(__shfl_sync(0xffffffffu, base, lane));
            const std::size_t at =
                static_cast<std::size_t>(__shfl_sync(0xffffffffu, e.row, lane)) * ep.topk + lane_id();
            if (lane_id() >= ep.topk) continue;
            const bool there = owner == rank;
            store_window(reinterpret_cast<std::int32_t*>(slot + ep.slot_idx) + at,
                         there ? e.id - rank * ep.local_experts : -1);
            store_window(reinterpret_cast<float*>(slot + ep.slot_weights) + at, there ? e.weight : 0.0f);
        }
    }
    // The lanes whose rows an entry's payload goes to: one for each rank (layout rank) or each position.
    __device__ unsigned payloads(const Entry& e) const {
        const int owner = e.owner(m.ep);
        return __ballot_sync(0xffffffffu, m.ep.expert_layout ? owner >= 0 : is_first(owner >= 0, owner));
    }

    // A row and its entry into memory that the network reads.
    __device__ void stage(char* cell, int token, const Entry& e) const {
        for (int p = 0; p < cut.pieces; ++p) {
            Piece piece;
            piece.span(cut, p);
            piece.load(x(token));
            piece.store(cell);
        }
        const Record record(cell + m.ep.row_bytes, m.ep.topk);
        record.store(token, e);
        for (int i = lane_id(); i < m.ep.scale_dim; i += 32)
            store_window(record.scales() + i, __ldg(scales(token) + i));
    }

    // Channel c takes every channels-th token of those that cross.
    __device__ int cells(int tokens, const Channel& c) const {
        return (tokens - c.number + m.h.channels - 1) / m.h.channels;
    }

    __device__ bool scale_out(const Channel& c) const {
        Sender sender(m, c, false);
        const int n = cells(__ldcg(lists.sent + c.peer), c), to = m.host_of(c.rank);
        for (int i = 0; i < n; ++i) {
            const int token = crossing(c, i);
            char* cell = sender.cell();
            if (cell == nullptr) return false;
            stage(cell, token, part(entry(token), [&](int owner) { return m.host_of(owner) == to; }));
            if (!sender.fill()) return false;
        }
        return sender.end();
    }
    __device__ int crossing(const Channel& c, int i) const {
        return __ldcg(lists.cross + static_cast<std::size_t>(c.peer) * a.tokens + i * m.h.channels + c.number);
    }

    // What a channel brings goes to the neighbours, and its entries into the handle.
    __device__ bool forward(const Channel& c) const {
        const gin::Queue queue(m.ep, m.h.gin, c.queue(m));
        std::uint64_t* count = count_of(m, Count::taken, c);
        const std::uint64_t* tail = raised_here(m, Raised::tail, c);
        std::uint64_t taken = *count, here = 0;
        const int n = cells(__ldcg(lists.got + c.peer), c);
        for (int i = 0; i < n; ++i, ++taken) {
            if (here <= taken) {
                bool ok = true;
                if (lane_id() == 0) {
                    ok = queue.wait(tail, taken + 1, c.rank, HAL_CUDA_STAGE_CROSSING);
                    here = queue.read(tail);
                }
                if (!all_lanes(ok)) return false;
                here = __shfl_sync(0xffffffffu, static_cast<unsigned long long>(here), 0);
            }
            const char* cell = received_cell(m, c, false, taken);
            const Record record(cell + m.ep.row_bytes, m.ep.topk);
            const Entry e = record.load();
            store<true>(e, payloads(e), cell, record.scales());
            came_from(m, a.source, c.peer, i * m.h.channels + c.number).store(record.token(), e);
            __syncwarp();
            if (!all_lanes(lane_id() != 0 || give_back(m, c, false, taken, taken + 1))) return false;
        }
        __syncwarp();
        if (lane_id() == 0) *count = taken;
        return true;
    }

    // Schedule direct: rows and entries straight to their places at one peer. Staged rows may be overwritten once the
    // network has read them, so the ring is flushed when it comes round, and before its first use in a round.
    __device__ bool put_rows(const Channel& c, bool moves) const {
        const gin::Queue queue(m.ep, m.h.gin, c.queue(m));
        const int n = moves ? cells(__ldcg(lists.sent + c.peer), c) : 0;
        const std::uint64_t slot = m.slot(__ldcg(plan.slot + c.rank));
        const std::uint64_t ring =
            m.h.off_sending + static_cast<std::uint64_t>(c.index(m)) * m.h.cells * m.h.cell_bytes;
        for (int i = 0; i < n; ++i) {
            if (i % m.h.cells == 0 && !queue.flush()) return false;
            const int token = crossing(c, i), number = i * m.h.channels + c.number;
            const Entry e = part(entry(token), [&](int owner) { return owner == c.rank; });
            const std::uint64_t cell = ring + static_cast<std::uint64_t>(i % m.h.cells) * m.h.cell_bytes;
            stage(m.here(cell), token, e);
            const std::uint64_t row =
                __shfl_sync(0xffffffffu, e.row, lowest_lane(__ballot_sync(0xffffffffu, e.id >= 0)));
            __syncwarp();
            bool ok = true;
            if (lane_id() == 0)
                ok = queue.put(c.rank, m.place(slot + row * m.ep.row_bytes), m.place(cell), m.ep.row_bytes, true) &&
                     queue.put(c.rank, m.place(slot + record_offset(m.index_at(c.peer), number)),
                               m.place(cell + m.ep.row_bytes), m.h.record_bytes);
            if (!all_lanes(ok)) return false;
        }
        __syncwarp();
        bool ok = true;
        if (lane_id() == 0) ok = queue.signal(c.rank, raised_there(m, Raised::tail, c), 1);
        return all_lanes(ok);
    }
    __device__ std::uint64_t record_offset(int peer, int number) const {
        return m.ep.slot_meta + (static_cast<std::uint64_t>(peer) * m.ep.max_tokens + number) * m.h.record_bytes;
    }

    // Rows for this host's ranks, this one included.
    __device__ void store_near(int token) const {
        const Entry e = part(entry(token), [&](int owner) { return m.near(owner); });
        const unsigned targets = payloads(e);
        if (targets != 0) store<false>(e, targets, x(token), scales(token));
    }

    // Schedule direct, receiving: words and further copies of a row that a peer put at its first place.
    __device__ void unpack(int peer, int number) const {
        char* slot = m.here(m.slot(a.slot));
        const Record record(slot + record_offset(peer, number), m.ep.topk);
        const Entry e = record.load();
        const unsigned targets = payloads(e);
        const std::size_t first = __shfl_sync(0xffffffffu, e.row, lowest_lane(targets));
        const unsigned others = targets & (targets - 1);
        if (others != 0) copy_row(slot, first, others, e.row);
        for (unsigned left = targets; m.ep.scale_dim > 0 && left != 0; left &= left - 1) {
            auto* to = reinterpret_cast<float*>(slot + m.ep.slot_scales) +
                       static_cast<std::size_t>(__shfl_sync(0xffffffffu, e.row, lowest_lane(left))) * m.ep.scale_dim;
            for (int i = lane_id(); i < m.ep.scale_dim; i += 32) store_window(to + i, __ldcg(record.scales() + i));
        }
        store_words(e, e.owner(m.ep), reinterpret_cast<unsigned long long>(slot));
        came_from(m, a.source, peer, number).store(record.token(), e);
    }
    __device__ void copy_row(char* slot, std::size_t first, unsigned others, int row) const {
        for (int p = 0; p < cut.pieces; ++p) {
            Piece piece;
            piece.span(cut, p);
            piece.load_shared(slot + first * m.ep.row_bytes);
            for (unsigned left = others; left != 0; left &= left - 1)
                piece.store(slot + static_cast<std::size_t>(__shfl_sync(0xffffffffu, row, lowest_lane(left))) *
                                       m.ep.row_bytes);
        }
    }

    // Rows that nobody writes must read as padding: those are cleared where data of an earlier dispatch may be. All of a slot
    // may hold data after a round that does not move rows (`moves`), since its end is not known then.
    __device__ void clear(bool moves) const {
        const hal_cuda_ep& ep = m.ep;
        const auto* counts = reinterpret_cast<const std::int32_t*>(a.counts);
        for (int gap = 0; moves && ep.expert_layout && !ep.fixed_slots && gap < ep.local_experts; ++gap) {
            const auto* offsets = reinterpret_cast<const long long*>(a.expert_offsets) + gap;
            clear_rows(static_cast<unsigned>(__ldcg(offsets)) +
                           __ldcg(reinterpret_cast<const unsigned*>(a.expert_counts) + gap),
                       static_cast<unsigned>(__ldcg(offsets + 1)));
        }
        const auto most = static_cast<unsigned>(ep.fixed_slots ? ep.max_tokens : ep.slot_rows);
        const unsigned shown = ep.fixed_slots ? most : static_cast<unsigned>(a.pad_to_rows);
        for (int run = 0; run < runs_of(ep); ++run) {
            const Dirty bound(ep, static_cast<unsigned>(a.slot), run);
            const int kept = !ep.fixed_slots ? ep.world + kRows : ep.expert_layout ? ep.world + kTails + run : run;
            const auto used = static_cast<unsigned>(__ldcg(counts + kept));
            const unsigned dirty = bound.rows(most), start = static_cast<unsigned>(run) * most;
            if (moves) clear_rows(start + used, start + min(dirty, shown));
            if (blockIdx.x == 0 && threadIdx.x == 0) bound.put(moves ? still_dirty(dirty, used, shown) : most);
        }
    }
    __device__ void clear_rows(unsigned first, unsigned end) const {
        const unsigned warps = gridDim.x * warps_in_block(), warp = warp_id() * gridDim.x + blockIdx.x;
        for (unsigned row = first + warp; row < end; row += warps) clear_row(row);
    }
    __device__ void clear_row(std::size_t row) const {
        char* slot = m.here(m.slot(a.slot));
        Piece nothing;
        nothing.clear();
        for (int p = 0; p < cut.pieces; ++p) {
            nothing.span(cut, p);
            nothing.store(slot + row * m.ep.row_bytes);
        }
        const int words = m.ep.expert_layout ? 1 : m.ep.topk;
        for (int i = lane_id(); i < words; i += 32) {
            store_window(reinterpret_cast<std::int32_t*>(slot + m.ep.slot_idx) + row * words + i, -1);
            store_window(reinterpret_cast<float*>(slot + m.ep.slot_weights) + row * words + i, 0.0f);
        }
        for (int i = lane_id(); i < m.ep.scale_dim; i += 32)
            store_window(reinterpret_cast<float*>(slot + m.ep.slot_scales) + row * m.ep.scale_dim + i, 0.0f);
    }
};

// Block 0: counts where the caller finds them, apart from the handle's, which the caller may not change.
__device__ void hand_out_counts(const Rows& r) {
    const hal_cuda_ep& ep = r.m.ep;
    char* slot = r.m.here(r.m.slot(r.a.slot));
    for (int e = static_cast<int>(threadIdx.x); e < ep.local_experts; e += static_cast<int>(blockDim.x))
        store_window(reinterpret_cast<std::int32_t*>(slot + ep.slot_counts) + e,
                     reinterpret_cast<const std::int32_t*>(r.a.expert_counts)[e]);
    for (int e = static_cast<int>(threadIdx.x); ep.expert_layout && e <= ep.local_experts;
         e += static_cast<int>(blockDim.x))
        store_window(reinterpret_cast<long long*>(slot + ep.slot_offsets) + e,
                     reinterpret_cast<const long long*>(r.a.expert_offsets)[e]);
}

// Each warp first does its channel's work, which waits for nobody but the warp at the channel's other end; then all share
// this rank's own rows for its host.
__device__ bool move_rows(const Rows& r, Counters& counters, bool moves) {
    const Map& m = r.m;
    const int channels = channel_count(m.h), roles = m.h.hierarchical ? 2 * channels : channels;
    const int warps = static_cast<int>(gridDim.x) * warps_in_block();
    const int warp = warp_id() * static_cast<int>(gridDim.x) + static_cast<int>(blockIdx.x);
    bool ok = true;
    if (warp < channels) {
        const Channel c(m, warp);
        if (!m.h.hierarchical)
            ok = r.put_rows(c, moves);
        else if (moves)
            ok = r.scale_out(c);
    } else if (warp < roles && moves) {
        ok = r.forward(Channel(m, warp - channels));
    }
    if (moves)
        for (Tickets t(&counters.tickets[0], warp < roles ? -1 : warp - roles, warps - roles, r.a.tokens); t.more();
             t.advance())
            r.store_near(t.unit());
    return ok;
}

__device__ bool send(const Rows& r, const Launch& launch, std::uint64_t epoch) {
    const Map& m = r.m;
    if (!r.a.cached) {
        check_ids(m, r.a, launch.counters());
        number_all(m, r.a, r.plan, r.lists);
    }
    r.keep_weights();
    if (!grid_barrier(m.ep, launch.counters(), 0)) return false;
    bool ok = blockIdx.x != 0 || notify(m, r.a, r.plan, r.lists, launch, epoch);
    // The others wait here while block 0 waits for the peers, and must not give up before it.
    if (!ok || !grid_barrier(m.ep, launch.counters(), 1, 2 * kPatience)) return false;
    const bool moves = __ldcg(moved(r.a.source)) != 0;
    ok = move_rows(r, launch.counters(), moves);
    signal_neighbours(m, arrival_at);
    if (blockIdx.x == 0) hand_out_counts(r);
    r.clear(moves);
    return ok;
}

// Until every neighbour has stored what it stores here, and (direct) every peer's rows have come, which are then unpacked.
__device__ void receive(const Rows& r, std::uint64_t epoch) {
    const Map& m = r.m;
    bool ok = true;
    // A neighbour may itself wait for another host, and it is the one to say so.
    for (int i = static_cast<int>(threadIdx.x); i < m.local; i += static_cast<int>(blockDim.x))
        if (m.first() + i != m.ep.rank)
            ok = wait_patiently(m, arrival_at(m, m.ep.rank, m.first() + i), epoch * kRound, HAL_CUDA_STAGE_ROWS,
                                m.first() + i) &&
                 ok;
    if (m.h.hierarchical) return;
    for (int i = static_cast<int>(threadIdx.x); i < channel_count(m.h); i += static_cast<int>(blockDim.x)) {
        const Channel c(m, i);
        const gin::Queue queue(m.ep, m.h.gin, c.queue(m));
        ok = queue.wait(raised_here(m, Raised::tail, c), epoch, c.rank, HAL_CUDA_STAGE_CROSSING) && ok;
    }
    if (__syncthreads_and(ok) == 0 || __ldcg(moved(r.a.source)) == 0) return;
    const int warps = static_cast<int>(gridDim.x) * warps_in_block();
    const int warp = warp_id() * static_cast<int>(gridDim.x) + static_cast<int>(blockIdx.x);
    for (int peer = 0, before = 0; peer < m.h.peers; ++peer) {
        const int n = __ldcg(r.lists.got + peer);
        for (int i = (warp + warps - before % warps) % warps; i < n; i += warps) r.unpack(peer, i);
        before += n;
    }
}

__global__ void __launch_bounds__(512, 1)
    hosts_dispatch_kernel(const __grid_constant__ hal_cuda_ep ep, const __grid_constant__ hal_cuda_hosts h,
                          const __grid_constant__ hal_cuda_dispatch_args a) {
    Launch launch(state_of(ep)->dispatch);
    launch.begin();
    const Map m(ep, h);
    const Rows rows(m, a);
    const bool sends = (a.phases & HAL_CUDA_SEND) != 0;
    bool ok = true;
    std::uint64_t epoch = launch.finished + 1;
    // A receive half belongs to the round that its send half noted, which need not be the last.
    if (sends)
        ok = send(rows, launch, epoch);
    else
        epoch = launch.finished -
                (static_cast<std::uint32_t>(launch.finished) -
                 static_cast<std::uint32_t>(reinterpret_cast<const std::int32_t*>(a.counts)[ep.world + kEpoch]));
    if ((a.phases & HAL_CUDA_RECV) != 0 && __syncthreads_and(ok) != 0) receive(rows, epoch);
    launch.end(sends);
}

}  // namespace
}  // namespace hal::cuda::hosts

extern "C" int hal_cuda_hosts_dispatch(const hal_cuda_ep* ep, const hal_cuda_hosts* hosts,
                                       const hal_cuda_dispatch_args* args, std::uint64_t stream) {
    using namespace hal::cuda;
    return launch(hosts::hosts_dispatch_kernel, ep->device, args->blocks, args->threads, 0, stream, "dispatch", *ep,
                  *hosts, *args);
}
