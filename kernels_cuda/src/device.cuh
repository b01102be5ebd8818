// SPDX-License-Identifier: Apache-2.0
// What every kernel here is made of: words shared with peers, bounded waits, tickets, and the end of a launch.
#pragma once
#include <cstdint>

#include "hal_cuda.h"
#include "machine.cuh"

namespace hal::cuda {

// A rank's counters in its own device memory. Only kernels of this rank touch them, and launches of one ExpertParallel
// follow each other in stream order. What one launch counts in, the next one clears: they alternate between two sets.
struct Counters {
    unsigned tickets[4];  // work taken beyond what the warps start with
    unsigned arrived[3];  // blocks at the first, second and third grid barrier
    unsigned refused;     // dispatch: what is wrong with the ids
};
struct alignas(64) Lane {
    unsigned long long launches, epoch;  // launches so far, rounds begun so far; read as one word
    unsigned long long ended;            // combine: rounds that this rank has summed
    unsigned long long offered[2];       // dispatch, fixed slots: the round offered ahead and its slot, by turns
    unsigned entered;                    // blocks of this launch that know the first two
    Counters counters[2];
};
struct State {
    Lane dispatch, combine;
};

// Rounds add this much to an arrival counter, however many blocks share it.
constexpr unsigned long long kRound = 1ull << 16;

// A 64-bit word that carries the round it belongs to, so that it needs neither a reset nor a fence of its own.
__device__ __forceinline__ std::uint64_t stamped(std::uint64_t epoch, std::uint32_t value) {
    return (epoch << 32) | value;
}

__device__ __forceinline__ char* at_peer(const hal_cuda_ep& ep, int rank, std::uint64_t offset) {
    return reinterpret_cast<char*>(ep.peers + static_cast<std::uint64_t>(rank) * ep.peer_stride + offset);
}
__device__ __forceinline__ char* at_home(const hal_cuda_ep& ep, std::uint64_t offset) {
    return at_peer(ep, ep.rank, offset);
}
__device__ __forceinline__ State* state_of(const hal_cuda_ep& ep) { return reinterpret_cast<State*>(ep.state); }

// Code that runs only when something is wrong, or at the 64th poll, is called and not repeated at every wait: a kernel starts
// with none of its instructions at hand, and few tokens wait for them longer than for data.
#define HAL_SELDOM __attribute__((noinline)) __device__ inline

// Writes the error record if nobody has, and tells every block of this rank to give up when the failure is final.
HAL_SELDOM void report(const hal_cuda_ep& ep, const hal_cuda_error& what, bool final_failure) {
    auto* out = reinterpret_cast<hal_cuda_error*>(ep.error);
    if (atomicCAS_system(&out->claimed, 0u, 1u) == 0u) {
        out->rank = what.rank, out->stage = what.stage, out->queue = what.queue, out->detail = what.detail;
        out->token = what.token, out->expert = what.expert, out->expected = what.expected, out->seen = what.seen;
        __threadfence_system();
        *reinterpret_cast<volatile std::int32_t*>(&out->kind) = what.kind;
    }
    if (final_failure) atomicCAS_system(&reinterpret_cast<hal_cuda_abort_words*>(ep.abort)->failed, 0u, 1u);
    __threadfence_system();
}

// Whom a wait is for: a rank, or a question answered when it is wanted.
__device__ __forceinline__ int awaited(int rank) { return rank; }
template <class Who>
__device__ __forceinline__ int awaited(Who who) {
    return who();
}

// Why a wait may have to end, as bits above the abort words' `failed`; 0 = no reason.
constexpr std::uint64_t kSomebodyClosed = 1ull << 32, kTimeIsUp = 1ull << 33;
HAL_SELDOM std::uint64_t look_around(const hal_cuda_ep& ep, std::uint64_t start, unsigned patience) {
    // Both 32-bit words at once.
    const std::uint64_t abort = load_acquire(reinterpret_cast<const std::uint64_t*>(ep.abort));
    return static_cast<std::uint32_t>(abort) | (abort >> 32 != 0 ? kSomebodyClosed : 0) |
           (nanoseconds() - start > patience * ep.timeout_ns ? kTimeIsUp : 0);
}

// Whether a wait ends for those reasons, which is then reported.
HAL_SELDOM bool gives_up(const hal_cuda_ep& ep, std::uint64_t reasons, int stage, int rank, int queue,
                         std::uint64_t expected, std::uint64_t seen) {
    const auto failed = static_cast<std::uint32_t>(reasons);
    // A rank that closed had done all it was asked to before: only who waits for it waits in vain.
    const auto* words = reinterpret_cast<const hal_cuda_abort_words*>(ep.abort);
    const bool closed = failed == 0 && (reasons & kSomebodyClosed) != 0 && rank >= 0 && rank < HAL_CUDA_CLOSED_RANKS &&
                        (load_acquire(&words->closed) >> rank & 1) != 0;
    // A block that waits for its own GPU's leaves it to the one that waits for a peer to say so, until somebody has: `failed`
    // may be the host's word, written over that block's.
    if (failed != 0 && stage == HAL_CUDA_STAGE_GRID &&
        load_acquire(&reinterpret_cast<const hal_cuda_error*>(ep.error)->claimed) != 0)
        return true;
    const bool speaks = (failed != 0 && stage != HAL_CUDA_STAGE_GRID) || closed;
    if (!speaks && (reasons & kTimeIsUp) == 0) return false;
    hal_cuda_error what{};
    what.kind = HAL_CUDA_TIMEOUT, what.rank = failed != 0 ? static_cast<int>(failed) - 2 : rank;
    what.stage = stage, what.queue = queue;
    what.detail = failed != 0 ? 1 : closed ? 2 : 0;
    what.expected = expected, what.seen = seen;
    report(ep, what, true);
    return true;
}

// Polls `load` until `ok`; false after `patience` times ep.timeout_ns, or when another block has failed. The clock is read
// once for many polls: reading it costs more than a poll.
template <class Load, class Ok, class Rank>
__device__ __forceinline__ bool wait_until(const hal_cuda_ep& ep, Load load, Ok ok, int stage, Rank rank,
                                           std::uint64_t expected, int queue = 0, unsigned patience = 1) {
    if (ok(load())) return true;
    const std::uint64_t start = nanoseconds();
    for (;;) {
#pragma unroll 1
        for (int i = 0; i < 64; ++i)
            if (ok(load())) return true;
        const std::uint64_t reasons = look_around(ep, start, patience);
        if (reasons == 0) continue;
        if (static_cast<std::uint32_t>(reasons) == 1) return false;
        const auto value = load();  // what a rank wrote before its last word is visible now, so look once more
        if (ok(value)) return true;
        if (gives_up(ep, reasons, stage, awaited(rank), queue, expected, static_cast<std::uint64_t>(value)))
            return false;
    }
}

// A stamped word of this round. Equality, not order: a peer cannot send the next round's word before this rank is done.
__device__ __forceinline__ bool wait_stamped(const hal_cuda_ep& ep, const std::uint64_t* word, std::uint64_t epoch,
                                             int stage, int rank, std::uint32_t* value) {
    std::uint64_t seen = 0;
    const bool ok = wait_until(
        ep, [&] { return seen = load_relaxed(word); },
        [&](std::uint64_t v) { return static_cast<std::uint32_t>(v >> 32) == static_cast<std::uint32_t>(epoch); },
        stage, rank, stamped(epoch, 0));
    *value = static_cast<std::uint32_t>(seen);
    return ok;
}

__device__ __forceinline__ bool wait_at_least(const hal_cuda_ep& ep, const std::uint64_t* word, std::uint64_t target,
                                              int stage, int rank) {
    return wait_until(
        ep, [&] { return load_acquire(word); }, [&](std::uint64_t v) { return v >= target; }, stage, rank, target);
}

// A row's flag: the round it was last written in. A later round's row is further proof of this one's.
__device__ __forceinline__ bool wait_flag(const hal_cuda_ep& ep, const std::uint32_t* flag, std::uint32_t epoch,
                                          int stage, int rank) {
    return wait_until(
        ep, [&] { return load_acquire(flag); },
        [&](std::uint32_t v) { return static_cast<std::int32_t>(v - epoch) >= 0; }, stage, rank, epoch);
}

__device__ __forceinline__ std::uint64_t* done_at(const hal_cuda_ep& ep, int peer, int source) {
    return reinterpret_cast<std::uint64_t*>(at_peer(ep, peer, ep.off_done) + static_cast<std::size_t>(source) * 64);
}
// Until `peer` has read this rank's rows of every combine that this rank has summed (combines by reading only). Nothing is
// read because of it, so it needs no acquire.
__device__ __forceinline__ bool await_readers(const hal_cuda_ep& ep, int peer) {
    if (ep.keep_source) return true;
    const std::uint64_t rounds = load_relaxed(reinterpret_cast<const std::uint64_t*>(&state_of(ep)->combine.ended));
    const std::uint64_t* done = done_at(ep, ep.rank, peer);
    return wait_until(
        ep, [&] { return load_relaxed(done); }, [&](std::uint64_t v) { return v >= rounds * kRound; },
        HAL_CUDA_STAGE_DONE, peer, rounds * kRound);
}

// This block's part of a round's kRound, so that the parts of any number of blocks sum to it exactly.
__device__ __forceinline__ std::uint64_t share_of_round() {
    const std::uint64_t part = kRound / gridDim.x;
    return blockIdx.x == 0 ? kRound - part * (gridDim.x - 1) : part;
}

// What a block knows of its launch. Its last warp reads it, while the others do what needs none of it, and counts the block
// in; the block that was counted last prepares the next launch, at its end, when the count has long come back.
struct Launch {
    Lane& lane;
    std::uint64_t launches, finished;  // rounds finished before this launch

    __device__ explicit Launch(Lane& l) : lane(l), launches(0), finished(0), order_(0) {}
    __device__ static bool reads() { return threadIdx.x >> 5 == (blockDim.x >> 5) - 1; }
    // The last warp, which knows it then; the others do after a block barrier, by know().
    __device__ void read() {
        if ((threadIdx.x & 31) == 0) {
            unsigned long long n, e;
            load_relaxed_gpu(&lane.launches, n, e);
            // The added value depends on what was read, so the count cannot come before the reading.
            order_ = atomicAdd(&lane.entered, 1u + static_cast<unsigned>(n >> 63));
            known()[0] = n, known()[1] = e;
        }
        __syncwarp();
        know();
    }
    __device__ void know() { launches = known()[0], finished = known()[1]; }
    // `launches` of this block's launch, for who has no register to spare for it.
    __device__ static std::uint64_t number() { return known()[0]; }
    __device__ void begin() {
        if (reads()) read();
        __syncthreads();
        know();
    }
    __device__ Counters& counters() const { return lane.counters[launches & 1]; }
    __device__ void end(bool began_round, std::uint64_t ended = 0) const {
        if (threadIdx.x != blockDim.x - 32 || order_ != gridDim.x - 1) return;
        if (ended != 0) lane.ended = ended;
        lane.counters[(launches + 1) & 1] = Counters{};
        lane.entered = 0;
        lane.launches = launches + 1, lane.epoch = finished + (began_round ? 1 : 0);
    }

  private:
    unsigned order_;  // the last warp's first lane: blocks counted in before this one
    __device__ static unsigned long long* known() {
        __shared__ unsigned long long words[2];
        return words;
    }
};

// Every block of the launch has come this far, and what it wrote before is visible. All blocks must be resident: there
// are never more than the device has multiprocessors.
__device__ inline bool grid_barrier(const hal_cuda_ep& ep, Counters& counters, int number, unsigned patience = 1) {
    int ok = 1;
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        atomicAdd(&counters.arrived[number], 1u);
        auto load = [&] { return load_acquire_gpu(&counters.arrived[number]); };
        ok = wait_until(
            ep, load, [&](unsigned v) { return v >= gridDim.x; }, HAL_CUDA_STAGE_GRID, ep.rank, gridDim.x, 0, patience);
    }
    return __syncthreads_and(ok) != 0;
}

// Work in units, handed to warps by a global counter: blocks get unequal link bandwidth by where they sit, and a fixed
// split would wait for the slowest. The first unit of each warp is its own number, so small launches take no ticket;
// the next ticket is fetched before the current unit is worked on, which hides the counter's latency.
class Tickets {
  public:
    // `warp` is below `warps`, or negative for one that joins later and starts with a ticket.
    __device__ Tickets(unsigned* counter, int warp, int warps, int units)
        : counter_(counter), warps_(warps), units_(units), current_(warp), next_(units) {
        if (units_ > warps_) fetch();
        if (warp < 0) advance();
    }
    __device__ int unit() const { return current_; }
    __device__ bool more() const { return current_ < units_; }
    __device__ void advance() {
        current_ = units_ > warps_ ? __shfl_sync(0xffffffffu, next_, 0) : units_;
        if (current_ < units_) fetch();
    }

  private:
    __device__ void fetch() {
        if ((threadIdx.x & 31) == 0) next_ = warps_ + static_cast<int>(atomicAdd(counter_, 1u));
    }
    unsigned* counter_;
    int warps_, units_, current_, next_;
};

// Rows for whole blocks, one for each warp: a block fences once for all its warps' rows, because a fence at system scope
// waits for everything that the multiprocessor has in flight.
class Batches {
  public:
    // Block-wide. The first batch is the block's own number among `blocks`; a block that joins later (number < 0) and
    // every further batch takes a ticket.
    __device__ Batches(unsigned* counter, int number, int blocks, int units)
        : counter_(counter), blocks_(blocks), units_(units), batch_(number) {
        if (number < 0) advance();
    }
    __device__ bool more() const { return batch_ * warps() < units_; }
    __device__ int first() const { return batch_ * warps(); }
    __device__ int size() const { return min(warps(), units_ - first()); }
    __device__ int unit() const { return first() + static_cast<int>(threadIdx.x >> 5); }  // may be past the last
    __device__ void advance() {
        __shared__ int next;
        if (static_cast<long long>(blocks_) * warps() >= units_) {
            batch_ = units_;
            return;
        }
        __syncthreads();
        if (threadIdx.x == 0) next = blocks_ + static_cast<int>(atomicAdd(counter_, 1u));
        __syncthreads();
        batch_ = next;
    }

  private:
    __device__ static int warps() { return static_cast<int>(blockDim.x >> 5); }
    unsigned* counter_;
    int blocks_, units_, batch_;
};

// How one row is cut for warps: `pieces` units of `vectors` 16-byte vectors, at most kLaneVectors for each lane.
constexpr int kLaneVectors = 8;
struct RowCut {
    int row_vectors, pieces, vectors;
    __host__ __device__ explicit RowCut(int row_bytes, int lane_vectors = kLaneVectors) {
        row_vectors = row_bytes / 16;
        pieces = (row_vectors + 32 * lane_vectors - 1) / (32 * lane_vectors);
        const int even = (row_vectors + pieces - 1) / pieces;
        vectors = (even + 31) / 32 * 32;
        pieces = (row_vectors + vectors - 1) / vectors;
    }
};

}  // namespace hal::cuda
