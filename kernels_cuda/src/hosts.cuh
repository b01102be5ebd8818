// SPDX-License-Identifier: Apache-2.0
// Several hosts: ranks of this rank's own host are reached by NVLink stores and loads ("neighbours"), all others over GIN
// ("peers"). docs/cuda.md, section "Several hosts", has the protocol and why each wait and each reuse of memory is right.
#pragma once
#include "combine.cuh"
#include "dispatch_plan.cuh"
#include "gin.cuh"
#include "rows.cuh"

namespace hal::cuda::hosts {

constexpr unsigned kPatience = 2;  // of waits that may hang on another rank's wait, in time limits

// Where ranks are. Schedule hierarchical has one peer on each other host, the rank of this rail; direct has every rank of
// every other host.
struct Map {
    const hal_cuda_ep& ep;
    const hal_cuda_hosts& h;
    int local, host;  // ranks of a host; this rank's host

    __device__ Map(const hal_cuda_ep& ep_, const hal_cuda_hosts& h_)
        : ep(ep_), h(h_), local(h_.gin.lsa_size), host(ep_.rank / h_.gin.lsa_size) {}
    __device__ int hosts() const { return ep.world / local; }
    __device__ int host_of(int rank) const { return rank / local; }
    __device__ int first() const { return host * local; }  // this host's first rank
    __device__ bool near(int rank) const { return rank >= first() && rank < first() + local; }
    __device__ int peer_rank(int peer) const {
        if (h.hierarchical) return (peer < host ? peer : peer + 1) * local + h.gin.lsa_rank;
        return peer < first() ? peer : peer + local;
    }
    // The peer that leads to a rank of another host.
    __device__ int peer_to(int rank) const {
        if (h.hierarchical) return host_of(rank) < host ? host_of(rank) : host_of(rank) - 1;
        return rank < first() ? rank : rank - local;
    }
    // Which peer this rank is there.
    __device__ int index_at(int peer) const {
        const int there = host_of(peer_rank(peer));
        if (h.hierarchical) return host < there ? host : host - 1;
        return ep.rank < there * local ? ep.rank : ep.rank - local;
    }
    __device__ char* at(int rank, std::uint64_t offset) const {  // of a neighbour, or this rank itself
        return at_peer(ep, rank - first(), offset);
    }
    __device__ char* here(std::uint64_t offset) const { return at_peer(ep, h.gin.lsa_rank, offset); }
    __device__ gin::Place place(std::uint64_t offset) const { return {h.window, offset}; }
    __device__ std::uint64_t slot(unsigned number) const { return ep.off_slots + number * ep.slot_bytes; }
    __device__ int destinations() const { return ep.expert_layout ? ep.experts : ep.world; }
};

// A channel is a stream of cells to one peer: a ring of `cells` cells here and one there, one queue, one warp at each end.
// The sender may write cell i once cell i - cells was given back; so both rings are bounded, whatever the token count.
struct Channel {
    int peer, number, rank;
    __device__ Channel(const Map& m, int index) : peer(index % m.h.peers), number(index / m.h.peers) {
        // Each rank starts at another peer, so that none is everyone's first.
        const int me = m.h.hierarchical ? m.host : m.ep.rank;
        peer = (peer + me) % m.h.peers;
        rank = m.peer_rank(peer);
    }
    __device__ Channel(const Map& m, int peer_, int number_) : peer(peer_), number(number_), rank(m.peer_rank(peer_)) {}
    __device__ int queue(const Map& m) const { return number % m.h.gin.queues; }  // the same at both ends
    __device__ int index(const Map& m) const { return peer * m.h.channels + number; }
    __device__ int index_there(const Map& m) const { return m.index_at(peer) * m.h.channels + number; }
};
__device__ __forceinline__ int channel_count(const hal_cuda_hosts& h) { return h.peers * h.channels; }

// Words that GIN raises, a line each: by kind, then by channel, as this rank numbers them.
enum class Raised { tail, credit, combine_tail, combine_credit };
__device__ __forceinline__ std::uint64_t raised_offset(const Map& m, Raised kind, int channel) {
    return m.h.off_raised + (static_cast<std::uint64_t>(kind) * channel_count(m.h) + channel) * 64;
}
__device__ __forceinline__ const std::uint64_t* raised_here(const Map& m, Raised kind, const Channel& c) {
    return reinterpret_cast<const std::uint64_t*>(m.here(raised_offset(m, kind, c.index(m))));
}
__device__ __forceinline__ gin::Word raised_there(const Map& m, Raised kind, const Channel& c) {
    return {m.place(raised_offset(m, kind, c.index_there(m)))};
}

// Cells sent and taken so far, over all rounds, in this rank's own memory; each is one warp's.
enum class Count { sent, taken, combine_sent, combine_taken };
__device__ __forceinline__ std::uint64_t* count_of(const Map& m, Count kind, const Channel& c) {
    return reinterpret_cast<std::uint64_t*>(m.h.counts) + static_cast<int>(kind) * channel_count(m.h) + c.index(m);
}

__device__ __forceinline__ bool all_lanes(bool lane0) {
    __syncwarp();  // what lane 0 acquired is there for the others: a shuffle orders nothing
    return __shfl_sync(0xffffffffu, lane0 ? 1 : 0, 0) != 0;
}

// What the sender of a channel does: wait for room, fill cells, post them together, raise the tail.
class Sender {
  public:
    __device__ Sender(const Map& m, const Channel& channel, bool combine)
        : m_(m), c_(channel), queue_(m.ep, m.h.gin, channel.queue(m)), combine_(combine),
          count_(count_of(m, combine ? Count::combine_sent : Count::sent, channel)), next_(*count_), room_(0),
          pending_(0) {}

    // Warp-wide. The next cell, or null when the wait for room failed.
    __device__ char* cell() {
        const std::uint64_t wanted = next_ + 1, cells = static_cast<std::uint64_t>(m_.h.cells);
        if (wanted > cells && room_ < wanted - cells) {
            if (!post()) return nullptr;
            bool ok = true;
            const std::uint64_t* word = raised_here(m_, combine_ ? Raised::combine_credit : Raised::credit, c_);
            if (lane_id() == 0) {
                // In a combine the peer gives back what it sums, and for that it may wait for a neighbour of its own.
                ok = wait_until(
                    m_.ep, [&] { return room_ = load_acquire(word); },
                    [&](std::uint64_t v) { return v >= wanted - cells; },
                    combine_ ? HAL_CUDA_STAGE_COMBINE_ROOM : HAL_CUDA_STAGE_ROOM, c_.rank, wanted - cells,
                    queue_.index(), combine_ && m_.local > 1 ? kPatience : 1u);
            }
            if (!all_lanes(ok)) return nullptr;
            room_ = __shfl_sync(0xffffffffu, static_cast<unsigned long long>(room_), 0);
        }
        return m_.here(source(next_));
    }
    // Warp-wide: the cell is filled. Cells side by side go as one put.
    __device__ bool fill() {
        ++next_, ++pending_;
        return pending_ < m_.h.batch && next_ % m_.h.cells != 0 ? true : post();
    }
    __device__ bool post() {
        __syncwarp();
        bool ok = true;
        if (pending_ > 0 && lane_id() == 0) {
            const std::uint64_t first = next_ - pending_;
            const std::uint64_t target =
                (combine_ ? m_.h.off_combine_received : m_.h.off_received) + ring(c_.index_there(m_), first);
            ok = queue_.put(c_.rank, m_.place(target), m_.place(source(first)),
                            static_cast<std::uint64_t>(pending_) * bytes()) &&
                 queue_.signal(c_.rank, raised_there(m_, combine_ ? Raised::combine_tail : Raised::tail, c_), pending_);
        }
        pending_ = 0;
        return all_lanes(ok);
    }
    __device__ bool end() {
        const bool ok = post();
        if (lane_id() == 0) *count_ = next_;
        return ok;
    }

  private:
    __device__ std::uint64_t bytes() const { return combine_ ? m_.h.combine_cell_bytes : m_.h.cell_bytes; }
    __device__ std::uint64_t ring(int channel, std::uint64_t cell) const {
        return (static_cast<std::uint64_t>(channel) * m_.h.cells + cell % m_.h.cells) * bytes();
    }
    __device__ std::uint64_t source(std::uint64_t cell) const {
        return (combine_ ? m_.h.off_combine_sending : m_.h.off_sending) + ring(c_.index(m_), cell);
    }
    const Map& m_;
    const Channel c_;
    const gin::Queue queue_;
    const bool combine_;
    std::uint64_t* count_;
    std::uint64_t next_, room_;
    int pending_;
};

// Cells of a channel as they come. Room is given back in whole batches, counted over all rounds, so nothing is left over at
// a round's end; a batch is at most half a ring, so the sender never waits for cells that this side keeps.
__device__ __forceinline__ const char* received_cell(const Map& m, const Channel& c, bool combine, std::uint64_t cell) {
    const std::uint64_t bytes = combine ? m.h.combine_cell_bytes : m.h.cell_bytes;
    return m.here((combine ? m.h.off_combine_received : m.h.off_received) +
                  (static_cast<std::uint64_t>(c.index(m)) * m.h.cells + cell % m.h.cells) * bytes);
}
// One thread, synchronised with all that read the cells before `after`.
__device__ inline bool give_back(const Map& m, const Channel& c, bool combine, std::uint64_t before,
                                 std::uint64_t after) {
    const std::uint64_t batch = m.h.batch, add = after / batch * batch - before / batch * batch;
    if (add == 0) return true;
    const gin::Queue queue(m.ep, m.h.gin, c.queue(m));  // whose posts come after what was read before them
    return queue.signal(c.rank, raised_there(m, combine ? Raised::combine_credit : Raised::credit, c), add,
                        gin::Order::weak);
}

// A token on its way: lane j < top-k holds its j-th position, those that the receiver is to have.
struct Entry {
    int id, row;  // global expert, -1 = none; final row at its owner
    float weight;
    __device__ int owner(const hal_cuda_ep& ep) const { return id >= 0 ? Owner(ep).of(id) : -1; }
};

// An entry in memory: token, then ids, rows and weights of all k positions; in a cell the scales follow.
struct Record {
    std::int32_t* words;
    int topk;
    __device__ Record(const void* at, int k) : words(static_cast<std::int32_t*>(const_cast<void*>(at))), topk(k) {}
    __device__ void store(int token, const Entry& e) const {
        if (lane_id() == 0) store_window(words, token);
        if (lane_id() >= topk) return;
        store_window(words + 1 + lane_id(), e.id);
        store_window(words + 1 + topk + lane_id(), e.row);
        store_window(words + 1 + 2 * topk + lane_id(), __float_as_int(e.weight));
    }
    __device__ int token() const { return __ldcg(words); }
    __device__ Entry load() const {
        if (lane_id() >= topk) return {-1, -1, 0.0f};
        return {__ldcg(words + 1 + lane_id()), __ldcg(words + 1 + topk + lane_id()),
                __int_as_float(__ldcg(words + 1 + 2 * topk + lane_id()))};
    }
    __device__ float* scales() const { return reinterpret_cast<float*>(words + 1 + 3 * topk); }
};

// What a handle keeps beside what a handle of one host keeps. Shared by all dispatches that reuse it: first rows of this
// rank's tokens at each destination, how many tokens cross to each peer and come from it, and which cross. A dispatch's
// own (`source`): whether rows moved, then an entry for each token that came from each peer.
struct Lists {
    std::int32_t *base, *sent, *got, *cross;
    __device__ Lists(const Map& m, std::uint64_t at) {
        base = reinterpret_cast<std::int32_t*>(at);
        sent = base + m.destinations(), got = sent + m.h.peers, cross = got + m.h.peers;
    }
};
constexpr int kSourceWords = 4;
__device__ __forceinline__ std::int32_t* moved(std::uint64_t source) { return reinterpret_cast<std::int32_t*>(source); }
__device__ __forceinline__ Record came_from(const Map& m, std::uint64_t source, int peer, int n) {
    const std::size_t at = static_cast<std::size_t>(peer) * m.ep.max_tokens + n;
    return {reinterpret_cast<const std::int32_t*>(source) + kSourceWords + at * (1 + 3 * m.ep.topk), m.ep.topk};
}

// Words between neighbours: `rank` is whose memory it is, `from` who writes it.
__device__ __forceinline__ std::uint64_t* arrival_at(const Map& m, int rank, int from) {
    return reinterpret_cast<std::uint64_t*>(m.at(rank, m.ep.off_arrive) + (from - m.first()) * 64ull);
}
__device__ __forceinline__ std::uint64_t* done_at(const Map& m, int rank, int from) {
    return reinterpret_cast<std::uint64_t*>(m.at(rank, m.ep.off_done) + (from - m.first()) * 64ull);
}
__device__ __forceinline__ std::uint64_t* ready_at(const Map& m, int rank, int from, std::uint64_t epoch, int word) {
    const std::uint64_t line = ((epoch & 1) * m.local + from - m.first()) * 2 + word;
    return reinterpret_cast<std::uint64_t*>(m.at(rank, m.ep.off_ready) + line * 64);
}
// Until a neighbour has read this rank's rows of every combine that this rank has summed. Nothing is read because of it, so
// it needs no acquire.
__device__ __forceinline__ bool await_neighbour(const Map& m, int rank) {
    const std::uint64_t rounds = load_relaxed(reinterpret_cast<const std::uint64_t*>(&state_of(m.ep)->combine.ended));
    const std::uint64_t* done = done_at(m, m.ep.rank, rank);
    return wait_until(
        m.ep, [&] { return load_relaxed(done); }, [&](std::uint64_t v) { return v >= rounds * kRound; },
        HAL_CUDA_STAGE_DONE, rank, rounds * kRound);
}
template <class Word>
__device__ __forceinline__ void signal_neighbours(const Map& m, Word word) {
    __syncthreads();  // orders the whole block's work before the one release for each neighbour
    for (int i = static_cast<int>(threadIdx.x); i < m.local; i += static_cast<int>(blockDim.x))
        if (m.first() + i != m.ep.rank) add_release(word(m, m.first() + i, m.ep.rank), share_of_round());
}
// A neighbour that waits for another host is the one to say so: this rank, which waits for both, has more patience.
__device__ __forceinline__ bool wait_patiently(const Map& m, const std::uint64_t* word, std::uint64_t target, int stage,
                                               int rank) {
    return wait_until(
        m.ep, [&] { return load_acquire(word); }, [&](std::uint64_t v) { return v >= target; }, stage, rank, target, 0,
        kPatience);
}

// The lowest lane with the same value, for lanes where `valid`.
__device__ __forceinline__ bool is_first(bool valid, int value) {
    const unsigned same = __match_any_sync(0xffffffffu, valid ? value : -1 - lane_id());
    return valid && (same & lanes_below()) == 0;
}

}  // namespace hal::cuda::hosts
