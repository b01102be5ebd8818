// SPDX-License-Identifier: Apache-2.0
// Litmus programs (hal/checker) as device code: the words of docs/contract.md are issued one after the other and left in
// flight, and what the reader finds is kept. One warp plays one thread of the program; all repetitions are one launch.
//
// Every repetition has lines of its own, so nothing is reset. A word of the program is a line of 64 bytes whose first 8
// hold its value: that way words are far enough apart to overtake each other, and a put of several can arrive in part.
#include "gin.cuh"
#include "launch.cuh"

namespace hal::cuda {
namespace {

constexpr int kLine = HAL_CUDA_LITMUS_LINE;

__device__ std::uint64_t mix(std::uint64_t x) {  // splitmix64
    x += 0x9e3779b97f4a7c15ull;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

class Player {
  public:
    __device__ Player(const hal_cuda_ep& ep, const hal_cuda_gin& gin, const hal_cuda_litmus& run)
        : ep_(ep), gin_(gin), run_(run), warp_(static_cast<int>(threadIdx.x >> 5)), lane_(threadIdx.x & 31) {}

    // Warp-wide. False: a wait was in vain, and the error record says which.
    __device__ bool once(unsigned repetition) {
        at_ = repetition;
        if (!meet(run_.off_starts, run_.all_threads, ++starts_)) return false;
        const auto* ops = reinterpret_cast<const hal_cuda_litmus_op*>(run_.ops);
        for (int i = 0; i < run_.ops_count; ++i) {
            if (ops[i].thread != warp_) continue;
            pause(i);
            if (!step(ops[i])) return false;
        }
        pause(run_.ops_count);  // before everything is completed
        return true;
    }

    // One warp for the rank, after the others have come to __syncthreads: nothing is in flight any more.
    __device__ bool settle() {
        bool ok = true;
        if (lane_ == 0) {
            __threadfence_system();
            for (int peer = 0; peer < run_.ranks; ++peer)
                for (int queue = 0; queue < run_.queues; ++queue) ok = ok && complete(queue, peer);
        }
        return all(ok);
    }

  private:
    __device__ static bool all(bool ok) { return __all_sync(0xffffffffu, ok) != 0; }
    __device__ std::uint64_t offset(int line) const {
        return run_.off_lines + (static_cast<std::uint64_t>(at_) * run_.lines + line) * kLine;
    }
    __device__ std::uint64_t* own(std::uint64_t offset) const {
        return reinterpret_cast<std::uint64_t*>(run_.peer[run_.rank] + offset);
    }
    __device__ std::uint64_t* result(int reg) const {
        return reinterpret_cast<std::uint64_t*>(run_.results) + static_cast<std::uint64_t>(at_) * run_.registers + reg;
    }
    // Whether `peer` is written by stores; else over the network.
    __device__ bool by_stores(int peer, int network) const {
        return run_.peer[peer] != 0 && (!network || gin_.comm == 0 || peer == run_.rank);
    }
    __device__ std::uint64_t* at_peer(int peer, std::uint64_t offset) const {
        return reinterpret_cast<std::uint64_t*>(run_.peer[peer] + offset);
    }
    __device__ gin::Place place(std::uint64_t offset) const { return {run_.window, offset}; }
    __device__ gin::Word word(std::uint64_t offset) const { return {{run_.window, offset}}; }
    __device__ std::uint64_t value_of(const hal_cuda_litmus_op& op) const {
        return op.value_register < 0 ? op.value : load_relaxed(result(op.value_register));
    }

    // Lets the threads meet in every way: three times in ten, up to `pause_ns`.
    __device__ void pause(int step) const {
        const std::uint64_t chance =
            mix(run_.seed ^ mix((static_cast<std::uint64_t>(at_) << 24) ^ (run_.rank << 16) ^ (warp_ << 12) ^ step));
        if (run_.pause_ns == 0 || chance % 10 >= 3) return;
        const std::uint64_t start = nanoseconds(), time = (chance >> 8) % run_.pause_ns;
        while (lane_ == 0 && nanoseconds() - start < time) load_relaxed(own(run_.off_starts));
        __syncwarp();
    }

    // Everybody who counts on `lines` (one for each thread of the program) has come here `count` times. Orders nothing: the
    // arrivals are weak, and go by a queue of their own.
    __device__ bool meet(std::uint64_t lines, std::uint32_t threads, std::uint64_t count) const {
        bool ok = true;
        if (lane_ == 0) {
            const int me = run_.first_thread + warp_;
            const std::uint64_t mine = lines + static_cast<std::uint64_t>(me) * kLine;
            for (int peer = 0; peer < run_.ranks; ++peer) {
                if (by_stores(peer, 0))
                    add_relaxed(at_peer(peer, mine), 1);
                else
                    gin::Queue(ep_, gin_, run_.queues).signal(peer, word(mine), 1, gin::Order::weak);
            }
            for (int t = 0; t < HAL_CUDA_LITMUS_THREADS && ok; ++t)
                if ((threads >> t & 1) != 0)
                    ok = wait_at_least(ep_, own(lines + static_cast<std::uint64_t>(t) * kLine), count,
                                       HAL_CUDA_STAGE_BARRIER, run_.rank_of_thread[t]);
        }
        return all(ok);
    }

    __device__ bool step(const hal_cuda_litmus_op& op) {
        if (op.what == HAL_CUDA_LITMUS_BARRIER)
            return (op.order == 0 || quiet_all(true)) && meet(run_.off_barriers, run_.barrier_threads, ++barriers_);
        if (op.what == HAL_CUDA_LITMUS_QUIET) return op.queue < 0 ? quiet_all(op.order != 0) : quiet(op, op.queue);
        bool ok = true;
        if (lane_ == 0) {
            if (op.what == HAL_CUDA_LITMUS_PUT) ok = put(op);
            if (op.what == HAL_CUDA_LITMUS_SIGNAL) ok = signal(op, op.queue, op.order == 2);
            if (op.what == HAL_CUDA_LITMUS_WAIT) ok = wait(op);
            if (op.what == HAL_CUDA_LITMUS_WRITE) store_relaxed(own(offset(op.line)), value_of(op));
            // Reads are acquires, so that a thread's reads are in program order: the model has no other.
            if (op.what == HAL_CUDA_LITMUS_READ) store_relaxed(result(op.target_register), sum(op.line, op.count));
        }
        return all(ok);
    }

    __device__ bool put(const hal_cuda_litmus_op& op) const {
        const bool stores = by_stores(op.peer, op.network), bundled = op.own_line >= 0;
        const std::uint64_t bytes = static_cast<std::uint64_t>(op.count) * kLine, to = offset(op.line);
        if (op.order == 2 && !complete_for(op, stores)) return false;
        std::uint64_t from = offset(op.source_line);
        if (op.source_line < 0) {
            from = offset(op.stage_line);
            for (int i = 0; i < op.count * kLine / 8; ++i) store_relaxed(own(from) + i, value_of(op));
        }
        if (stores) {
            for (std::uint64_t i = 0; i < bytes / 16; ++i)
                store_window(reinterpret_cast<uint4*>(at_peer(op.peer, to)) + i,
                             load_window(reinterpret_cast<const uint4*>(own(from)) + i));
            return !bundled || signal_stores(op, op.own_line, op.own_value, op.own_set, op.own_order == 2);
        }
        const gin::Queue queue(ep_, gin_, op.queue);
        if (!bundled) {
            queue.put(op.peer, place(to), place(from), bytes);
            return true;
        }
        const auto order = op.own_order == 2 ? gin::Order::strong : gin::Order::weak;
        return queue.put_signal(op.peer, place(to), place(from), bytes, word(offset(op.own_line)), op.own_value, order);
    }

    __device__ bool signal(const hal_cuda_litmus_op& op, int queue, bool strong) const {
        if (by_stores(op.peer, op.network)) return signal_stores(op, op.line, op.value, op.set, strong);
        const gin::Queue q(ep_, gin_, queue);
        const auto order = strong ? gin::Order::strong : gin::Order::weak;
        if (op.set == 0) return q.signal(op.peer, word(offset(op.line)), op.value, order);
        // GIN only adds. What is set has one writer, so a value put after everything else was completed is the same.
        if (strong && !complete_for(op, false)) return false;
        q.put_value(op.peer, place(offset(op.line)), op.value);
        return true;
    }
    __device__ bool signal_stores(const hal_cuda_litmus_op& op, int line, std::uint64_t value, int set,
                                  bool strong) const {
        std::uint64_t* to = at_peer(op.peer, offset(line));
        if (set != 0 && strong) store_release(to, value);
        if (set != 0 && !strong) store_relaxed(to, value);
        if (set == 0 && strong) add_release(to, value);
        if (set == 0 && !strong) add_relaxed(to, value);
        return true;
    }

    // A slot is as many lines as there are (thread, queue) that signal it: each has one writer. Its value is their sum.
    __device__ std::uint64_t sum(int line, int count) const {
        std::uint64_t total = 0;
        for (int i = 0; i < count; ++i) total += load_acquire(own(offset(line + i)));
        return total;
    }
    __device__ bool wait(const hal_cuda_litmus_op& op) const {
        return wait_until(
            ep_, [&] { return sum(op.line, op.count); }, [&](std::uint64_t v) { return v >= op.value; },
            HAL_CUDA_STAGE_WAIT, op.peer, op.value);
    }

    // One thread. What was given to (queue, peer) is at the peer; stores are fenced by the caller.
    __device__ bool complete(int queue, int peer) const {
        if (gin_.comm == 0 || peer == run_.rank || (run_.peer[peer] != 0 && run_.network == 0)) return true;
        return gin::Queue(ep_, gin_, queue).quiet(peer);
    }
    __device__ bool complete_for(const hal_cuda_litmus_op& op, bool stores) const {
        __threadfence_system();
        return stores || complete(op.queue, op.peer);
    }
    __device__ bool quiet_all(bool remote) const {
        hal_cuda_litmus_op every{};
        every.order = remote, every.peer = -1;
        bool ok = true;
        for (int queue = 0; queue < run_.queues && ok; ++queue) ok = quiet(every, queue);
        return ok;
    }
    // Warp-wide. Stores have read their sources when they are issued.
    __device__ bool quiet(const hal_cuda_litmus_op& op, int queue) const {
        if (op.order == 0) return gin_.comm == 0 || gin::Queue(ep_, gin_, queue).flush();
        bool ok = true;
        if (lane_ == 0) {
            __threadfence_system();
            for (int peer = 0; peer < run_.ranks; ++peer)
                if (op.peer < 0 || op.peer == peer) ok = ok && complete(queue, peer);
        }
        return all(ok);
    }

    const hal_cuda_ep& ep_;
    const hal_cuda_gin& gin_;
    const hal_cuda_litmus& run_;
    int warp_, lane_;
    unsigned at_ = 0;
    std::uint64_t starts_ = 0, barriers_ = 0;
};

__global__ void __launch_bounds__(32 * HAL_CUDA_LITMUS_THREADS, 1)
    litmus_kernel(const __grid_constant__ hal_cuda_ep ep, const __grid_constant__ hal_cuda_gin gin,
                  const __grid_constant__ hal_cuda_litmus run) {
    Player player(ep, gin, run);
    for (unsigned i = 0; i < run.repetitions; ++i) {
        const bool ok = player.once(i);
        if (__syncthreads_and(ok) == 0) return;
        bool settled = true;
        if (threadIdx.x < 32) settled = player.settle();
        if (__syncthreads_and(settled) == 0) return;
    }
}

}  // namespace
}  // namespace hal::cuda

extern "C" int hal_cuda_play(const hal_cuda_ep* ep, const hal_cuda_gin* gin, const hal_cuda_litmus* run,
                             std::uint64_t stream) {
    using namespace hal::cuda;
    if (run->ranks < 1 || run->ranks > HAL_CUDA_LITMUS_RANKS || run->threads < 1 ||
        run->threads > HAL_CUDA_LITMUS_THREADS)
        return fail("litmus: " + std::to_string(run->ranks) + " ranks and " + std::to_string(run->threads) +
                    " threads on this one; at most " + std::to_string(HAL_CUDA_LITMUS_RANKS) + " and " +
                    std::to_string(HAL_CUDA_LITMUS_THREADS));
    return launch(litmus_kernel, ep->device, 1, 32 * run->threads, 0, stream, "a litmus program", *ep, *gin, *run);
}
