// SPDX-License-Identifier: Apache-2.0
// Combine over several hosts. A rank's rows are read by its neighbours over NVLink; what goes to another host crosses in
// the cells of a channel. Hierarchical: the rank of the home's rail sums its host's rows of a token and sends one row.
// Direct: every rank sends its rows, and the home sums them all in the contract's order. At home a warp takes the tokens
// of its channels one after the other, so cells are taken in the order in which they come, whatever the routing.
#include "hosts.cuh"
#include "launch.cuh"

namespace hal::cuda::hosts {
namespace {

// Runs of rows in use: one run of all rows, or with fixed slots one for each source, or expert and source.
struct Used {
    const Map& m;
    const std::int32_t* counts;
    __device__ int runs() const {
        if (!m.ep.fixed_slots) return 1;
        return m.ep.expert_layout ? m.ep.local_experts * m.ep.world : m.ep.world;
    }
    __device__ int length(int run) const {
        if (!m.ep.fixed_slots) return counts[m.ep.world + kRows];
        return m.ep.expert_layout ? counts[m.ep.world + kTails + run] : counts[run];
    }
};

__device__ __forceinline__ int this_warp() {
    return warp_id() * static_cast<int>(gridDim.x) + static_cast<int>(blockIdx.x);
}
__device__ __forceinline__ int all_warps() { return static_cast<int>(gridDim.x) * warps_in_block(); }

// Rows and weights that lie elsewhere go into this rank's scratch slot, where neighbours can read them.
__device__ bool copy_in(const Map& m, const hal_cuda_combine_args& a) {
    bool ok = true;
    // The scratch slot may be one that neighbours read in the round before.
    for (int i = static_cast<int>(threadIdx.x); i < m.local; i += static_cast<int>(blockDim.x))
        if (m.first() + i != m.ep.rank) ok = await_neighbour(m, m.first() + i) && ok;
    if (__syncthreads_and(ok) == 0) return false;
    const Used used{m, reinterpret_cast<const std::int32_t*>(a.counts)};
    const RowCut cut(m.ep.combine_row_bytes);
    const int words = m.ep.expert_layout ? 1 : m.ep.topk;
    char* slot = m.here(m.slot(a.scratch_slot));
    int skip = this_warp();
    for (int run = 0; run < used.runs(); ++run) {
        const int length = used.length(run);
        int i = skip;
        for (; i < length; i += all_warps()) {
            const std::size_t row = static_cast<std::size_t>(run) * m.ep.max_tokens + i;
            for (int p = 0; a.window_offset < 0 && p < cut.pieces; ++p) {
                Piece piece;
                piece.span(cut, p);
                piece.load(reinterpret_cast<const char*>(a.x) + row * m.ep.combine_row_bytes);
                piece.store(slot + row * m.ep.combine_row_bytes);
            }
            if (a.carries_weights && lane_id() < words)
                store_window(reinterpret_cast<float*>(slot + m.ep.slot_back) + row * words + lane_id(),
                             __ldg(reinterpret_cast<const float*>(a.row_weights) + row * words + lane_id()));
        }
        skip = i - length;
    }
    return true;
}

// To every neighbour: where this rank's rows and weights lie, in 16-byte units. What it names was written by earlier
// launches or by other blocks; a fence at system scope comes before, in the same threads.
__device__ void announce(const Map& m, const hal_cuda_combine_args& a, std::uint64_t epoch) {
    const std::uint64_t scratch = m.slot(a.scratch_slot);
    const std::uint64_t rows = a.window_offset >= 0 ? static_cast<std::uint64_t>(a.window_offset) : scratch;
    for (int i = lane_id(); i < m.local; i += 32) {
        if (a.carries_weights)
            store_relaxed(ready_at(m, m.first() + i, m.ep.rank, epoch, 1),
                          stamped(epoch, static_cast<std::uint32_t>((scratch + m.ep.slot_back) / 16)));
        store_relaxed(ready_at(m, m.first() + i, m.ep.rank, epoch, 0),
                      stamped(epoch, static_cast<std::uint32_t>(rows / 16)));
    }
}

__device__ bool send(const Map& m, const hal_cuda_combine_args& a, Counters& counters, std::uint64_t epoch) {
    __shared__ int last;
    if (a.window_offset < 0 || a.carries_weights) {
        if (!copy_in(m, a)) return false;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        last = atomicAdd(&counters.arrived[0], 1u) == gridDim.x - 1;
    }
    __syncthreads();
    if (!last || warp_id() != 0) return true;
    __threadfence_system();
    announce(m, a, epoch);
    return true;
}

// One token's rows in the order of their sum; one for each lane, at most one for each top-k position.
struct Terms {
    const char* row;
    const float* weights;  // those that come home with the row
    float weight;
    int order;   // place in the sum, from 0; -1 = this lane has none
    int source;  // rank the row is of; hierarchical, of another host: any rank of that host
    bool near;
    int number, first_near, end_near;  // terms, and which of them are this host's

    __device__ unsigned lanes() const { return __ballot_sync(0xffffffffu, order >= 0); }
    __device__ int lane_of(int place) const { return lowest_lane(__ballot_sync(0xffffffffu, order == place)); }
    // Places from keys, which are distinct where `has`.
    __device__ void sort(bool has, int key) {
        order = has ? 0 : -1;
        for (int lane = 0; lane < 32; ++lane) {
            const int other = __shfl_sync(0xffffffffu, has ? key : 0x7fffffff, lane);
            if (has && other < key) ++order;
        }
        number = __popc(lanes());
        const unsigned mine = __ballot_sync(0xffffffffu, has && near);
        first_near = 32, end_near = 0;
        for (unsigned left = mine; left != 0; left &= left - 1) {
            const int at = __shfl_sync(0xffffffffu, order, lowest_lane(left));
            first_near = min(first_near, at), end_near = max(end_near, at + 1);
        }
    }
};

// Combine of one rank in one launch, as its warps see it.
template <class Type, bool kWeighted>
struct Sums {
    const Map& m;
    const hal_cuda_combine_args& a;
    const std::uint64_t *rows, *weights;  // of each neighbour, offsets of what it announced
    const Lists lists;
    const RowCut cut;

    __device__ Sums(const Map& map, const hal_cuda_combine_args& args, const std::uint64_t* r, const std::uint64_t* w)
        : m(map), a(args), rows(r), weights(w), lists(map, args.lists), cut(map.ep.combine_row_bytes, kSumVectors) {}

    __device__ const char* near_row(int rank, int row) const {
        return m.at(rank, rows[rank - m.first()]) + static_cast<std::size_t>(row) * m.ep.combine_row_bytes;
    }
    __device__ const float* near_weights(int rank, int row) const {
        return reinterpret_cast<const float*>(m.at(rank, weights[rank - m.first()])) +
               static_cast<std::size_t>(row) * (m.ep.expert_layout ? 1 : m.ep.topk);
    }

    __device__ void add(Sum<Type>& sum, const Terms& t, int from, int to) const {
        const auto address = reinterpret_cast<unsigned long long>(t.row);
        for (int place = from; place < to; ++place) {
            const int lane = t.lane_of(place);
            uint4 v[kSumVectors];
            sum.load(reinterpret_cast<const char*>(__shfl_sync(0xffffffffu, address, lane)), v);
            sum.template add<kWeighted>(v, __shfl_sync(0xffffffffu, t.weight, lane));
        }
    }
    // This host's part is summed for itself before it joins the others'.
    __device__ void add_near_part(Sum<Type>& sum, const Terms& t, int piece) const {
        Sum<Type> part(cut, piece);
        add(part, t, t.first_near, t.end_near);
#pragma unroll
        for (int i = 0; i < kSumVectors; ++i)
#pragma unroll
            for (int j = 0; j < Type::kValues; ++j) sum.value[i][j] = __fadd_rn(sum.value[i][j], part.value[i][j]);
    }

    // --- rows that leave this host ---------------------------------------------------------------------------------

    // What came from a peer's token and goes back as cells: the tokens of a home's channel, in their order there.
    __device__ bool send_back(const Channel& c) const {
        Sender sender(m, c, true);
        const int n = __ldcg(lists.got + c.peer);
        for (int start = 0; start < n; start += 32) {
            const int i = start + lane_id();
            const bool mine = i < n && came_from(m, a.source, c.peer, i).token() % m.h.channels == c.number;
            for (unsigned left = __ballot_sync(0xffffffffu, mine); left != 0; left &= left - 1) {
                const Record record = came_from(m, a.source, c.peer, start + lowest_lane(left));
                const bool ok = m.h.hierarchical ? send_sum(sender, record) : send_each(sender, record);
                if (!ok) return false;
            }
        }
        return sender.end();
    }
    // Hierarchical: the sum of this host's rows, rounded to their type.
    __device__ bool send_sum(Sender& sender, const Record& record) const {
        char* cell = sender.cell();
        if (cell == nullptr) return false;
        const Entry e = record.load();
        const int owner = e.owner(m.ep);
        Terms t{};
        t.near = true, t.weight = kWeighted ? e.weight : 1.0f;
        const bool has = m.ep.expert_layout ? owner >= 0 : is_first(owner >= 0, owner);
        t.row = has ? near_row(owner, e.row) : nullptr;
        t.sort(has, m.ep.expert_layout ? lane_id() : owner);
        for (int p = 0; p < cut.pieces; ++p) {
            Sum<Type> sum(cut, p);
            add(sum, t, 0, t.number);
            sum.store(cell);
        }
        if (a.carries_weights && lane_id() < m.ep.topk)
            store_window(cell_weights(cell) + lane_id(),
                         owner < 0 ? 0.0f : __ldcg(near_weights(owner, e.row) + (m.ep.expert_layout ? 0 : lane_id())));
        return sender.fill();
    }
    // Direct: each of this rank's rows of the token, as it is.
    __device__ bool send_each(Sender& sender, const Record& record) const {
        const Entry e = record.load();
        const RowCut whole(m.ep.combine_row_bytes);
        const int owner = e.owner(m.ep);
        for (unsigned left = __ballot_sync(0xffffffffu, m.ep.expert_layout ? owner >= 0 : is_first(owner >= 0, owner));
             left != 0; left &= left - 1) {
            const int lane = lowest_lane(left), row = __shfl_sync(0xffffffffu, e.row, lane);
            char* cell = sender.cell();
            if (cell == nullptr) return false;
            for (int p = 0; p < whole.pieces; ++p) {
                Piece piece;
                piece.span(whole, p);
                piece.load_shared(near_row(m.ep.rank, row));
                piece.store(cell);
            }
            if (a.carries_weights && lane_id() < (m.ep.expert_layout ? 1 : m.ep.topk))
                store_window(cell_weights(cell) + lane_id(), __ldcg(near_weights(m.ep.rank, row) + lane_id()));
            if (!sender.fill()) return false;
        }
        return true;
    }
    __device__ float* cell_weights(const char* cell) const {
        return reinterpret_cast<float*>(const_cast<char*>(cell) + m.ep.combine_row_bytes);
    }

    // --- at home ---------------------------------------------------------------------------------------------------

    // A token's terms; rows of other hosts have no address yet.
    __device__ Terms find(int token) const {
        const hal_cuda_ep& ep = m.ep;
        Terms t{};
        int id = -1;
        const int at = token * ep.topk + lane_id();
        if (lane_id() < ep.topk) id = __ldg(reinterpret_cast<const std::int32_t*>(a.idx) + at);
        t.source = id >= 0 ? Owner(ep).of(id) : -1;
        t.near = t.source >= 0 && m.near(t.source);
        t.weight = 1.0f;
        const bool summed_there = m.h.hierarchical && !t.near;  // one row for its host
        const int host = t.source >= 0 ? m.host_of(t.source) : -1;
        const bool first_of_host = is_first(t.source >= 0, host), first_of_rank = is_first(t.source >= 0, t.source);
        const bool has = t.source >= 0 && (summed_there ? first_of_host : ep.expert_layout || first_of_rank);
        if (kWeighted && has && !summed_there) t.weight = __ldg(reinterpret_cast<const float*>(a.weights) + at);
        int key = ep.expert_layout ? lane_id() : t.source;
        if (m.h.hierarchical)
            key = host * kMaxRanks + (summed_there ? 0 : ep.expert_layout ? lane_id() : t.source % m.local);
        if (t.near) {
            const int row = __ldg(lists.base + (ep.expert_layout ? id : t.source)) +
                            __ldg(reinterpret_cast<const std::int32_t*>(a.pos) + at);
            t.row = near_row(t.source, row);
            if (a.carries_weights) t.weights = near_weights(t.source, row) + (ep.expert_layout ? 0 : lane_id());
        }
        t.sort(has, key);
        return t;
    }

    // Rows that other hosts send: cells in the order of their terms. `n`: how many came from the lane's peer.
    __device__ bool take_cells(Terms& t, int number, int* n) const {
        const bool far = t.order >= 0 && !t.near;
        const int peer = t.source >= 0 && !t.near ? m.peer_to(t.source) : -1 - lane_id();
        const unsigned same = __match_any_sync(0xffffffffu, far ? peer : -1 - lane_id());
        const int before = __popc(same & lanes_below());
        bool ok = true;
        if (far) {
            const Channel c(m, peer, number);
            const std::uint64_t cell = *count_of(m, Count::combine_taken, c) + before;
            const gin::Queue queue(m.ep, m.h.gin, c.queue(m));
            // The peer may wait for a neighbour of its own, and is the one to say so.
            ok = wait_until(
                m.ep, [&] { return load_acquire(raised_here(m, Raised::combine_tail, c)); },
                [&](std::uint64_t v) { return v > cell; }, HAL_CUDA_STAGE_COMBINE_CROSSING, c.rank, cell + 1,
                c.queue(m), m.local > 1 ? kPatience : 1u);
            t.row = received_cell(m, c, true, cell);
        }
        *n = far ? __popc(same) : 0;
        __syncwarp();  // every lane reads what some lanes acquired
        return __all_sync(0xffffffffu, ok) != 0;
    }
    __device__ bool give_cells_back(const Terms& t, int number, int n) const {
        __syncwarp();
        const bool far = t.order >= 0 && !t.near;
        const int peer = far ? m.peer_to(t.source) : -1;
        bool ok = true;
        if (is_first(far, peer)) {
            const Channel c(m, peer, number);
            std::uint64_t* taken = count_of(m, Count::combine_taken, c);
            ok = give_back(m, c, true, *taken, *taken + n);
            *taken += n;
        }
        __syncwarp();  // another lane may count the next token's cells
        return __all_sync(0xffffffffu, ok) != 0;
    }

    __device__ void finish(int token, const Terms& t) const {
        for (int p = 0; p < cut.pieces; ++p) {
            Sum<Type> sum(cut, p);
            if (!m.h.hierarchical) {
                add(sum, t, 0, t.number);
            } else {
                add(sum, t, 0, min(t.first_near, t.number));
                if (t.end_near > 0) {
                    add_near_part(sum, t, p);
                    add(sum, t, t.end_near, t.number);
                }
            }
            add_biases<Type>(m.ep, a, token, sum);
            sum.store(reinterpret_cast<char*>(a.out) + static_cast<std::size_t>(token) * m.ep.combine_row_bytes);
        }
        if (a.carries_weights) fetch_weights(token, t);
    }
    __device__ void fetch_weights(int token, const Terms& t) const {
        // A position's weight came with its rank's row (near), or with the row of its host or rank.
        const int group = m.h.hierarchical && t.source >= 0 ? m.host_of(t.source) : t.source;
        const unsigned same = __match_any_sync(0xffffffffu, t.source >= 0 && !t.near ? group : -1 - lane_id());
        const int with = lowest_lane(same & t.lanes());
        const bool own_row = m.ep.expert_layout && !m.h.hierarchical;
        const auto address = reinterpret_cast<unsigned long long>(t.row);
        const auto cell = __shfl_sync(0xffffffffu, address, own_row ? lane_id() : max(with, 0));
        if (lane_id() >= m.ep.topk) return;
        float value = 0.0f;
        if (t.near)
            value = __ldcg(t.weights);
        else if (t.source >= 0)
            value = __ldcg(cell_weights(reinterpret_cast<const char*>(cell)) + (own_row ? 0 : lane_id()));
        reinterpret_cast<float*>(a.out_weights)[token * m.ep.topk + lane_id()] = value;
    }
    __device__ static bool has_far(const Terms& t) { return __any_sync(0xffffffffu, t.order >= 0 && !t.near) != 0; }

    // Tokens of channel `number`, in order; those without rows of other hosts are left to all warps.
    __device__ bool sum_channel(int number) const {
        for (int token = number; token < a.tokens; token += m.h.channels) {
            Terms t = find(token);
            if (!has_far(t)) continue;
            int n = 0;
            if (!take_cells(t, number, &n)) return false;
            finish(token, t);
            if (!give_cells_back(t, number, n)) return false;
        }
        return true;
    }
    __device__ void sum_near(int token) const {
        const Terms t = find(token);
        if (!has_far(t)) finish(token, t);
    }
};

template <class Type, bool kWeighted>
__device__ bool receive(const Map& m, const hal_cuda_combine_args& a, Counters& counters, std::uint64_t epoch) {
    __shared__ std::uint64_t rows[kMaxRanks], weights[kMaxRanks];
    bool ok = true;
    for (int i = static_cast<int>(threadIdx.x); i < m.local; i += static_cast<int>(blockDim.x)) {
        const int rank = m.first() + i;
        std::uint32_t offset = 0;
        ok = wait_until(
            m.ep, [&] { return load_acquire(ready_at(m, m.ep.rank, rank, epoch, 0)); },
            [&](std::uint64_t v) {
                offset = static_cast<std::uint32_t>(v);
                return static_cast<std::uint32_t>(v >> 32) == static_cast<std::uint32_t>(epoch);
            },
            HAL_CUDA_STAGE_READY, rank, stamped(epoch, 0));
        rows[i] = static_cast<std::uint64_t>(offset) * 16;
        if (!a.carries_weights || !ok) continue;
        ok = wait_stamped(m.ep, ready_at(m, m.ep.rank, rank, epoch, 1), epoch, HAL_CUDA_STAGE_READY, rank, &offset);
        weights[i] = static_cast<std::uint64_t>(offset) * 16;
    }
    if (__syncthreads_and(ok) == 0) return false;
    const Sums<Type, kWeighted> sums(m, a, rows, weights);
    const int channels = channel_count(m.h), roles = channels + m.h.channels, warp = this_warp();
    if (warp < channels)
        ok = sums.send_back(Channel(m, warp));
    else if (warp < roles)
        ok = sums.sum_channel(warp - channels);
    for (Tickets t(&counters.tickets[1], warp < roles ? -1 : warp - roles, all_warps() - roles, a.tokens); t.more();
         t.advance())
        sums.sum_near(t.unit());
    signal_neighbours(m, [](const Map& map, int rank, int from) { return done_at(map, rank, from); });
    // The caller may change its rows once this launch has ended, so it ends when the neighbours have read them; unless the
    // caller was promised less (ep.expert_output).
    if (blockIdx.x != 0 || a.late_done) return ok;
    for (int i = static_cast<int>(threadIdx.x); i < m.local; i += static_cast<int>(blockDim.x))
        if (m.first() + i != m.ep.rank)
            ok = wait_patiently(m, done_at(m, m.ep.rank, m.first() + i), epoch * kRound, HAL_CUDA_STAGE_DONE,
                                m.first() + i) &&
                 ok;
    return ok;
}

template <class Type, bool kWeighted>
__global__ void __launch_bounds__(512, 1)
    hosts_combine_kernel(const __grid_constant__ hal_cuda_ep ep, const __grid_constant__ hal_cuda_hosts h,
                         const __grid_constant__ hal_cuda_combine_args a) {
    Launch launch(state_of(ep)->combine);
    launch.begin();
    const Map m(ep, h);
    const bool sends = (a.phases & HAL_CUDA_SEND) != 0, sums = (a.phases & HAL_CUDA_RECV) != 0;
    const std::uint64_t epoch = launch.finished + (sends ? 1 : 0);
    const bool ok = !sends || send(m, a, launch.counters(), epoch);
    if (sums && __syncthreads_and(ok) != 0) receive<Type, kWeighted>(m, a, launch.counters(), epoch);
    launch.end(sends, sums ? epoch : 0);
}

template <class Type>
int combine(const hal_cuda_ep& ep, const hal_cuda_hosts& h, const hal_cuda_combine_args& a, std::uint64_t stream) {
    const auto kernel = a.weighted ? hosts_combine_kernel<Type, true> : hosts_combine_kernel<Type, false>;
    return launch(kernel, ep.device, a.blocks, a.threads, 0, stream, "combine", ep, h, a);
}

}  // namespace
}  // namespace hal::cuda::hosts

extern "C" int hal_cuda_hosts_combine(const hal_cuda_ep* ep, const hal_cuda_hosts* hosts,
                                      const hal_cuda_combine_args* args, std::uint64_t stream) {
    using namespace hal::cuda;
    switch (ep->combine_type) {
        case 0:
            return hosts::combine<Bfloat16>(*ep, *hosts, *args, stream);
        case 1:
            return hosts::combine<Float16>(*ep, *hosts, *args, stream);
        default:
            return hosts::combine<Float32>(*ep, *hosts, *args, stream);
    }
}
