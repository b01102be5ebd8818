// SPDX-License-Identifier: Apache-2.0
// The ordering contract's words (docs/contract.md) for ranks that NVLink does not reach, over GIN: what kernels write to
// windows of other hosts with. A queue is a GIN context. Everything is said of one (queue, peer); nothing is promised
// across queues or peers. Peers are world ranks.
//
//   put, put_value      relaxed: may pass and be passed, may arrive in pieces; the source is read at any time until flush
//                       or quiet. Posting waits only for room: after kRoom posts to a peer the earlier ones must be there.
//   put_signal          a put with its own signal
//   signal              adds to a Word (8 aligned bytes in a window) or a Signal (an indexed one of this queue). Strong:
//                       every earlier operation is at the peer before it, and so are this thread's earlier stores over
//                       NVLink, to whatever rank (and those of threads that it synchronised with). Weak: covers its own
//                       put only, and passes earlier ones.
//   flush               quiet("source"): what was put may be overwritten here. Says nothing of the peer.
//   quiet               quiet("remote"): all of it is at the peer. HAL's own word there is raised by a strong signal and
//                       read back, so the peer's kernels need not answer.
//   wait, read          of this rank's Words and Signals, with acquire
//   Barrier             every rank (of the NVLink domain, the rail, or the world) has come here
//
// Every wait is bounded: it ends after ep.timeout_ns, or when this rank was told to give up; then the error record names
// rank, stage, queue, expected and seen, and the call returns false. The kernel must then end.
//
// A Word or Signal takes adds from the network only, never stores or atomics of a GPU (theirs and the network's are not
// atomic to each other), and each Word adds of one (origin, queue) only: contexts may sit on different network cards.
#pragma once
#include "device.cuh"

namespace hal::cuda::gin {

// Who else posts on the queue while this kernel runs: threads of the whole GPU, of this block, or nobody. One block may
// own several queues, and several blocks share one; the narrower the sharing, the cheaper a post.
enum class Sharing { device, block, thread };
enum class Order { weak, strong };
enum class Reach { domain, rail, world };  // one host's ranks; those of the same lsa_rank on all hosts; all

// A place in a window: hal_cuda_window.handle and an offset in bytes. Places of a put's source are on this rank.
struct Place {
    std::uint64_t window, offset;
    __device__ Place operator+(std::uint64_t bytes) const { return {window, offset + bytes}; }
};
struct Word : Place {};
struct Signal {
    int index;  // below hal_cuda_gin.signals; a queue's own, the same number on another queue is another signal
};

}  // namespace hal::cuda::gin

#if defined(__CUDACC__)
#include "gin_nccl.cuh"
#else
#include <gin_emulated.cuh>
#endif

namespace hal::cuda::gin {

// HAL's own words in the window `gin.window`, for each (queue, origin), each fed by that origin alone: quiet's word, the
// barrier's from the network, the barrier's over NVLink; and for each (queue, peer) what quiet read back.
struct Words {
    enum Kind { kArrived, kBarrier, kDomain, kRead, kKinds };
    __host__ __device__ static std::uint64_t offset(Kind kind, int queue, int rank, int queues, int world) {
        return ((static_cast<std::uint64_t>(kind) * queues + queue) * world + rank) * sizeof(std::uint64_t);
    }
    // Then the slots of Session.signal. Each is a row: what each (queue, origin) added over the network, and last what
    // this domain's ranks added over NVLink; its value is their sum. One row more is for reading a peer's.
    __host__ __device__ static std::uint64_t row(int queues, int world) {
        return sizeof(std::uint64_t) * (static_cast<std::uint64_t>(queues) * world + 1);
    }
    __host__ __device__ static std::uint64_t slot(int number, int queues, int world) {
        return offset(kKinds, 0, 0, queues, world) + number * row(queues, world);
    }
    __host__ __device__ static std::uint64_t bytes(int slots, int queues, int world) {
        return slot(slots + 1, queues, world);
    }
};
// This rank's counters, for each (queue, peer), after the word that ends flushes: adds made to the peer's words of the
// first three kinds; posts, those of them that have certainly left the queue, and who finds that out now.
struct Counts {
    enum Kind { kArrived, kBarrier, kDomain, kPosted, kLeft, kBusy, kKinds };
    __host__ __device__ static std::uint64_t offset(Kind kind, int queue, int peer, int queues, int world) {
        return sizeof(std::uint64_t) * (1 + (static_cast<std::uint64_t>(kind) * queues + queue) * world + peer);
    }
    __host__ __device__ static std::uint64_t bytes(int queues, int world) {
        return offset(kKinds, 0, 0, queues, world);
    }
};
// Below the depth of any queue (a proxy's is 32 times what the network takes at once), since NCCL's own wait for room in
// a queue has no limit: behind a network that stands still it would never end.
constexpr std::int64_t kRoom = 128;

class Queue {
  public:
    // `ep` gives the time limit and the error record. Queues are cheap: a few registers.
    __device__ Queue(const hal_cuda_ep& ep, const hal_cuda_gin& gin, int index, Sharing sharing = Sharing::device)
        : ep_(ep), gin_(gin), index_(index), post_(gin, index, sharing) {}

    __device__ int index() const { return index_; }
    // Whether strong signals cost one message (profile gin) or a round trip (gin-weak).
    __device__ bool has_strong() const { return gin_.strong != 0; }
    // With rail connections only ranks of the same lsa_rank can be named.
    __device__ bool reaches(int peer) const { return gin_.rail == 0 || peer % gin_.lsa_size == gin_.lsa_rank; }

    // One thread each; false after a failed wait, and then nothing was posted. `more` = this thread posts to the same
    // (queue, peer) at once again, the last time without it: the network card is told of all of them together, if the
    // transport can.
    __device__ bool put(int peer, Place to, Place from, std::uint64_t bytes, bool more = false) const {
        if (!room(peer)) return false;
        if (has_strong())
            post_.put(peer, to, from, bytes, more);
        else
            post_.put(peer, to, from, bytes, arrived(), counted(peer), false, more);
        return true;
    }
    // sizeof(T) of 1, 2, 4 or 8; naturally aligned at the peer. There is no source that must live on.
    template <class T>
    __device__ bool put_value(int peer, Place to, T value, bool more = false) const {
        if (!room(peer)) return false;
        if (has_strong())
            post_.put_value(peer, to, value, more);
        else
            post_.put_value(peer, to, value, arrived(), counted(peer), more);
        return true;
    }
    // Without strong signals on the transport a quiet stands in for them.
    template <class Target>
    __device__ bool signal(int peer, Target target, std::uint64_t add, Order order = Order::strong) const {
        if (!room(peer)) return false;
        if (order == Order::weak) {
            post_.signal(peer, target, add, false);
            return true;
        }
        __threadfence_system();  // the other plane: stores over NVLink, of this thread and of those joined before it
        if (!has_strong() && !quiet(peer)) return false;
        post_.signal(peer, target, add, has_strong());
        return true;
    }
    template <class Target>
    __device__ bool put_signal(int peer, Place to, Place from, std::uint64_t bytes, Target target, std::uint64_t add,
                               Order order = Order::strong) const {
        if (!has_strong())  // the put's one signal is taken: quiet counts arrivals with it
            return put(peer, to, from, bytes) && signal(peer, target, add, Order::strong);
        if (!room(peer)) return false;
        if (order == Order::strong) __threadfence_system();
        post_.put(peer, to, from, bytes, target, add, order == Order::strong, false);
        return true;
    }

    // Warp-wide (32 lanes together). All peers: what this queue was given before, by any thread that this warp is
    // synchronised with, no longer reads its source.
    __device__ bool flush() const {
        auto* stop = reinterpret_cast<std::uint32_t*>(gin_.state);
        return post_.flush(stop, [&](auto finished, auto waits_for) {
            return wait_until(
                ep_, [&] { return static_cast<std::uint64_t>(finished()); }, [](std::uint64_t v) { return v != 0; },
                HAL_CUDA_STAGE_SOURCE, waits_for, 1, index_);
        });
    }
    // One thread.
    __device__ __noinline__ bool quiet(int peer) const {
        unsigned long long* busy = count(Counts::kBusy, peer);
        const bool mine = wait_until(
            ep_, [&] { return static_cast<std::uint64_t>(atomicCAS(busy, 0ull, 1ull)); },
            [](std::uint64_t v) { return v == 0; }, HAL_CUDA_STAGE_REMOTE, peer, 0, index_);
        return mine && quiet_alone(peer);
    }
    // One thread. Reads from the peer's window into this rank's; the bytes are there when flush has returned. It is ordered
    // after nothing.
    __device__ bool get(int peer, Place from, Place to, std::uint64_t bytes) const {
        if (!room(peer)) return false;
        post_.get(peer, from, to, bytes);
        return true;
    }

    __device__ std::uint64_t read(Signal signal) const { return post_.read(signal); }
    __device__ std::uint64_t read(const std::uint64_t* word) const { return load_acquire(word); }
    // One thread. Until `signal` of this queue, or the word at `word` in this rank's window, has reached `at_least`;
    // `peer` is who is waited for (-1: nobody in particular).
    __device__ bool wait(Signal signal, std::uint64_t at_least, int peer, int stage) const {
        return wait_until(
            ep_, [&] { return post_.read(signal); }, [&](std::uint64_t v) { return v >= at_least; }, stage, peer,
            at_least, index_);
    }
    __device__ bool wait(const std::uint64_t* word, std::uint64_t at_least, int peer, int stage) const {
        return wait_until(
            ep_, [&] { return load_acquire(word); }, [&](std::uint64_t v) { return v >= at_least; }, stage, peer,
            at_least, index_);
    }

  private:
    friend class Barrier;
    __device__ Word own(Words::Kind kind, int rank) const {
        return {{gin_.window, Words::offset(kind, index_, rank, gin_.queues, gin_.world)}};
    }
    __device__ Word arrived() const { return own(Words::kArrived, gin_.rank); }
    __device__ std::uint64_t* here(Words::Kind kind, int rank) const {
        return reinterpret_cast<std::uint64_t*>(gin_.words +
                                                Words::offset(kind, index_, rank, gin_.queues, gin_.world));
    }
    __device__ unsigned long long* count(Counts::Kind kind, int peer) const {
        return reinterpret_cast<unsigned long long*>(gin_.state +
                                                     Counts::offset(kind, index_, peer, gin_.queues, gin_.world));
    }
    __device__ std::uint64_t counted(int peer) const {
        atomicAdd(count(Counts::kArrived, peer), 1ull);
        return 1;
    }
    __device__ std::uint64_t left(int peer) const {
        return load_relaxed(reinterpret_cast<const std::uint64_t*>(count(Counts::kLeft, peer)));
    }
    __device__ static bool fits(std::uint64_t number, std::uint64_t left) {
        return static_cast<std::int64_t>(number - left) < kRoom;
    }
    __device__ bool room(int peer) const {
        const std::uint64_t number = atomicAdd(count(Counts::kPosted, peer), 1ull);
        return fits(number, left(peer)) || make_room(peer, number);
    }
    // One of those who wait finds out that what was posted has left the queue, since it has arrived.
    __device__ __noinline__ bool make_room(int peer, std::uint64_t number) const {
        return wait_until(
            ep_,
            [&] {
                if (!fits(number, left(peer)) && atomicCAS(count(Counts::kBusy, peer), 0ull, 1ull) == 0)
                    quiet_alone(peer);  // if it fails it has told so, and this wait ends too
                return left(peer);
            },
            [&](std::uint64_t v) { return fits(number, v); }, HAL_CUDA_STAGE_REMOTE, peer, number - kRoom + 1, index_);
    }
    // By whoever has taken kBusy; gives it back.
    __device__ __noinline__ bool quiet_alone(int peer) const {
        const unsigned long long posted = atomicAdd(count(Counts::kPosted, peer), 0ull);
        std::uint64_t target = 0;
        if (has_strong()) {
            target = atomicAdd(count(Counts::kArrived, peer), 1ull) + 1;
            post_.signal(peer, arrived(), 1, true);
        } else {
            target = atomicAdd(count(Counts::kArrived, peer), 0ull);
        }
        const bool ok = read_back(peer, target);
        if (ok) atomicMax(count(Counts::kLeft, peer), posted);
        __threadfence();
        atomicExch(count(Counts::kBusy, peer), 0ull);
        return ok;
    }
    // Until quiet's word at the peer has reached `target`.
    __device__ bool read_back(int peer, std::uint64_t target) const {
        constexpr std::uint64_t kUnread = ~0ull;
        std::uint64_t* landed = here(Words::kRead, peer);
        std::uint64_t seen = 0;
        bool asked = false;
        return wait_until(
            ep_,
            [&] {
                if (!asked) {
                    store_relaxed(landed, kUnread);
                    __threadfence_system();
                    post_.get(peer, arrived(), own(Words::kRead, peer), sizeof(std::uint64_t));
                    asked = true;
                }
                const std::uint64_t word = load_acquire(landed);
                if (word != kUnread) seen = word, asked = false;
                return seen;
            },
            [&](std::uint64_t v) { return v >= target; }, HAL_CUDA_STAGE_REMOTE, peer, target, index_);
    }
    const hal_cuda_ep& ep_;
    const hal_cuda_gin& gin_;
    int index_;
    Requests post_;
};

// Block-wide; by one block of a rank at a time. `complete`: what every member put before, on any queue, and stored over
// NVLink is at its peers when the members return, if the caller has synchronised with the threads that did it. Otherwise
// it orders nothing. Domains are joined over the rails where that is enough: the world then costs hosts + ranks of a host.
class Barrier {
  public:
    __device__ Barrier(const hal_cuda_ep& ep, const hal_cuda_gin& gin) : ep_(ep), gin_(gin) {}

    __device__ bool arrive_and_wait(Reach reach, bool complete) const {
        if (reach == Reach::domain) return domain();
        if (reach == Reach::rail) return network(gin_.lsa_rank, gin_.lsa_size, complete);
        if (complete && gin_.rail == 0) return network(0, 1, true) && domain();
        return domain() && network(gin_.lsa_rank, gin_.lsa_size, complete) && domain();
    }

    // One thread: the two halves towards one peer, for barriers of other sets of ranks. Counts are kept for each pair, so
    // the two sides must take part in the same barriers.
    __device__ void arrive_at_neighbour(int peer) const {
        const std::uint64_t at = Words::offset(Words::kDomain, 0, gin_.rank, gin_.queues, gin_.world);
        const int there = peer % gin_.lsa_size;
        add_release(reinterpret_cast<std::uint64_t*>(gin_.peers + there * gin_.peer_stride + at), 1);
        ++*Queue(ep_, gin_, 0).count(Counts::kDomain, peer);
    }
    __device__ bool await_neighbour(int peer) const {
        const Queue queue(ep_, gin_, 0);
        return queue.wait(queue.here(Words::kDomain, peer), *queue.count(Counts::kDomain, peer), peer,
                          HAL_CUDA_STAGE_BARRIER);
    }
    __device__ bool arrive(int peer, int queue, bool complete) const {
        const Queue on(ep_, gin_, queue);
        ++*on.count(Counts::kBarrier, peer);
        return on.signal(peer, on.own(Words::kBarrier, gin_.rank), 1, complete ? Order::strong : Order::weak);
    }
    __device__ bool await(int peer, int queue) const {
        const Queue on(ep_, gin_, queue);
        return on.wait(on.here(Words::kBarrier, peer), *on.count(Counts::kBarrier, peer), peer, HAL_CUDA_STAGE_BARRIER);
    }

  private:
    __device__ __noinline__ bool domain() const {
        const int host = gin_.rank - gin_.lsa_rank;
        bool ok = true;
        __syncthreads();
        for (int i = static_cast<int>(threadIdx.x); i < gin_.lsa_size; i += static_cast<int>(blockDim.x))
            if (i != gin_.lsa_rank) arrive_at_neighbour(host + i);
        for (int i = static_cast<int>(threadIdx.x); ok && i < gin_.lsa_size; i += static_cast<int>(blockDim.x))
            if (i != gin_.lsa_rank) ok = await_neighbour(host + i);
        return __syncthreads_and(ok) != 0;
    }
    // Ranks first, first + step, ... outside this rank's domain.
    __device__ __noinline__ bool network(int first, int step, bool complete) const {
        const int queues = complete ? gin_.queues : 1, pairs = (gin_.world - first + step - 1) / step * queues;
        bool ok = true;
        __syncthreads();
        for (int turn = 0; turn < 2; ++turn)  // all signals out before the first wait
            for (int i = static_cast<int>(threadIdx.x); ok && i < pairs; i += static_cast<int>(blockDim.x)) {
                const int peer = first + i / queues * step;
                if (peer / gin_.lsa_size == gin_.rank / gin_.lsa_size) continue;
                ok = turn == 0 ? arrive(peer, i % queues, complete) : await(peer, i % queues);
            }
        return __syncthreads_and(ok) != 0;
    }
    const hal_cuda_ep& ep_;
    const hal_cuda_gin& gin_;
};

}  // namespace hal::cuda::gin
