// SPDX-License-Identifier: Apache-2.0
// GIN's promises tried out in a kernel: the same on GPUs over NCCL, over the software NIC, and on the emulation.
#include "gin.cuh"
#include "launch.cuh"

namespace hal::cuda {
namespace {

constexpr int kMostThreads = 256;

// A rank's part of the window: rows received from each source, rows to send to each peer, and words: each row's signal,
// data's, consumption's and the flag of each origin.
struct Places {
    std::uint64_t row_bytes;
    int world, rows;
    __host__ __device__ Places(const hal_cuda_gin& gin, const hal_cuda_gin_check_args& args)
        : row_bytes(args.row_bytes), world(gin.world), rows(args.rows) {}
    __host__ __device__ std::uint64_t received(int source, int row) const {
        return (static_cast<std::uint64_t>(source) * rows + row) * row_bytes;
    }
    __host__ __device__ std::uint64_t sent(int peer, int row) const { return received(world + peer, row); }
    __host__ __device__ std::uint64_t row_word(int origin, int row) const {
        return received(2 * world, 0) + (static_cast<std::uint64_t>(origin) * rows + row) * 8;
    }
    __host__ __device__ std::uint64_t word(int kind, int origin) const {
        return row_word(world, 0) + (static_cast<std::uint64_t>(kind) * world + origin) * 8;
    }
    __host__ __device__ std::uint64_t bytes() const { return word(3, 0); }
};
enum { kData = 0, kConsumed, kFlag };

struct Check {
    const hal_cuda_ep& ep;
    const hal_cuda_gin& gin;
    const hal_cuda_gin_check_args& args;
    Places place;
    gin::Queue queue, other;

    __device__ Check(const hal_cuda_ep& e, const hal_cuda_gin& g, const hal_cuda_gin_check_args& a)
        : ep(e), gin(g), args(a), place(g, a), queue(e, g, a.queue), other(e, g, (a.queue + 1) % g.queues) {}

    __device__ bool involves(int peer) const {
        return peer / gin.lsa_size != gin.rank / gin.lsa_size && queue.reaches(peer);
    }
    __device__ gin::Place at(std::uint64_t offset) const { return {args.window, offset}; }
    __device__ gin::Word word(std::uint64_t offset) const { return {at(offset)}; }
    __device__ std::uint64_t* here(std::uint64_t offset) const {
        return reinterpret_cast<std::uint64_t*>(args.base + offset);
    }
    // Different for each round, source, peer, row and word, and never 0.
    __device__ static std::uint64_t value(int round, int source, int peer, int row, std::uint64_t i) {
        std::uint64_t x = static_cast<std::uint64_t>(round) << 48 ^ static_cast<std::uint64_t>(source) << 40 ^
                          static_cast<std::uint64_t>(peer) << 32 ^ static_cast<std::uint64_t>(row) << 20 ^ i;
        x = (x + 1) * 0x9e3779b97f4a7c15ull;
        return (x ^ x >> 29) | 1;
    }

    // All threads.
    __device__ void fill(int round, bool spoilt) const {
        const std::uint64_t words = args.row_bytes / 8;
        for (int peer = 0; peer < gin.world; ++peer) {
            if (!involves(peer)) continue;
            for (std::uint64_t i = threadIdx.x; i < words * args.rows; i += blockDim.x) {
                const int row = static_cast<int>(i / words);
                store_relaxed(here(place.sent(peer, row)) + i % words,
                              spoilt ? ~0ull : value(round, gin.rank, peer, row, i % words));
            }
        }
        __syncthreads();
    }
    __device__ void look(int round, int source, int row) const {
        std::uint64_t bad = 0, words = args.row_bytes / 8;
        const std::uint64_t* data = here(place.received(source, row));
        // From the end: what is written last is often seen last.
        for (std::uint64_t i = threadIdx.x; i < words; i += blockDim.x)
            bad += load_relaxed(data + (words - 1 - i)) != value(round, source, gin.rank, row, words - 1 - i);
        if (bad != 0) atomicAdd(reinterpret_cast<unsigned long long*>(args.bad), bad);
        if (threadIdx.x == 0) atomicAdd(reinterpret_cast<unsigned long long*>(args.checked), words);
    }

    // One thread.
    __device__ bool send(int peer) const {
        const int last = args.rows - 1;
        for (int row = 0; row <= last; ++row) {
            const gin::Place to = at(place.received(gin.rank, row)), from = at(place.sent(peer, row));
            if (args.kind == HAL_CUDA_CHECK_BUNDLED_WEAK) {
                const gin::Word own = word(place.row_word(gin.rank, row));
                if (!queue.put_signal(peer, to, from, args.row_bytes, own, 1, gin::Order::weak)) return false;
            } else if (row == last && args.kind == HAL_CUDA_CHECK_BUNDLED_STRONG) {
                if (!queue.put_signal(peer, to, from, args.row_bytes, word(place.word(kData, gin.rank)), 1))
                    return false;
            } else if (row == last && args.kind == HAL_CUDA_CHECK_WEAK_PRIOR) {
                if (!queue.put_signal(peer, to, from, args.row_bytes, word(place.word(kData, gin.rank)), 1,
                                      gin::Order::weak))
                    return false;
            } else {
                // The card may be told of all rows at once, with the last.
                if (!queue.put(peer, to, from, args.row_bytes, row != last && args.rows > 2 && row % 3 != 2))
                    return false;
            }
        }
        return true;
    }
    // One thread: after the rows, and after flush where there is one.
    __device__ bool tell(int peer, int round) const {
        const gin::Word data = word(place.word(kData, gin.rank));
        switch (args.kind) {
            case HAL_CUDA_CHECK_STRONG_SIGNAL:
                return queue.signal(peer, gin::Signal{gin.rank}, 1);
            case HAL_CUDA_CHECK_STRONG_WORD:
            case HAL_CUDA_CHECK_FLUSHED:
            case HAL_CUDA_CHECK_REUSED:
                return queue.signal(peer, data, 1);
            case HAL_CUDA_CHECK_WEAK_AFTER:
                return queue.signal(peer, data, 1, gin::Order::weak);
            case HAL_CUDA_CHECK_OTHER_QUEUE:
                return other.signal(peer, data, 1);
            case HAL_CUDA_CHECK_QUIET_FLAG:
                if (!queue.quiet(peer)) return false;
                [[fallthrough]];
            case HAL_CUDA_CHECK_FLAG:
            case HAL_CUDA_CHECK_FLUSH_FLAG:
                return queue.put_value(peer, at(place.word(kFlag, gin.rank)), static_cast<std::uint64_t>(round));
            default:
                return true;
        }
    }
    __device__ bool told(int source, int round) const {
        const auto target = static_cast<std::uint64_t>(round);
        switch (args.kind) {
            case HAL_CUDA_CHECK_BARRIER:
            case HAL_CUDA_CHECK_BARE_BARRIER:
                return true;
            case HAL_CUDA_CHECK_STRONG_SIGNAL:
                return queue.wait(gin::Signal{source}, args.before + target, source, HAL_CUDA_STAGE_WAIT);
            case HAL_CUDA_CHECK_QUIET_FLAG:
            case HAL_CUDA_CHECK_FLAG:
            case HAL_CUDA_CHECK_FLUSH_FLAG:
                return queue.wait(here(place.word(kFlag, source)), target, source, HAL_CUDA_STAGE_WAIT);
            default:
                return queue.wait(here(place.word(kData, source)), target, source, HAL_CUDA_STAGE_WAIT);
        }
    }
    // All threads: each row as soon as its own signal is there.
    __device__ bool look_row_by_row(int round, int source) const {
        for (int row = 0; row < args.rows; ++row) {
            bool ok = true;
            if (threadIdx.x == 0)
                ok = queue.wait(here(place.row_word(source, row)), static_cast<std::uint64_t>(round), source,
                                HAL_CUDA_STAGE_WAIT);
            if (__syncthreads_and(ok) == 0) return false;
            look(round, source, row);
        }
        return true;
    }

    __device__ bool round(int number) const {
        fill(number, false);
        bool ok = true;
        if (threadIdx.x == 0)
            for (int peer = 0; peer < gin.world && ok; ++peer)
                if (involves(peer)) ok = send(peer);
        if (__syncthreads_and(ok) == 0) return false;
        if (args.kind == HAL_CUDA_CHECK_FLUSHED || args.kind == HAL_CUDA_CHECK_FLUSH_FLAG) {
            if (threadIdx.x < 32) ok = queue.flush();
            if (__syncthreads_and(ok) == 0) return false;
        }
        if (args.kind == HAL_CUDA_CHECK_FLUSHED || args.kind == HAL_CUDA_CHECK_REUSED) fill(number, true);
        if (threadIdx.x == 0)
            for (int peer = 0; peer < gin.world && ok; ++peer)
                if (involves(peer)) ok = tell(peer, number);
        if (args.kind == HAL_CUDA_CHECK_BARRIER || args.kind == HAL_CUDA_CHECK_BARE_BARRIER)
            ok = gin::Barrier(ep, gin).arrive_and_wait(gin::Reach::world, args.kind == HAL_CUDA_CHECK_BARRIER) && ok;
        if (__syncthreads_and(ok) == 0) return false;
        for (int source = 0; source < gin.world; ++source) {
            if (!involves(source)) continue;
            if (args.kind == HAL_CUDA_CHECK_BUNDLED_WEAK) {
                if (!look_row_by_row(number, source)) return false;
                continue;
            }
            if (threadIdx.x == 0) ok = told(source, number);
            if (__syncthreads_and(ok) == 0) return false;
            for (int row = args.rows - 1; row >= 0; --row) look(number, source, row);
        }
        __syncthreads();
        return settle(number);
    }
    // Before the next round everything has arrived, and everybody has looked.
    __device__ bool settle(int number) const {
        bool ok = true;
        for (int peer = static_cast<int>(threadIdx.x); peer < gin.world; peer += static_cast<int>(blockDim.x)) {
            if (!involves(peer)) continue;
            ok = ok && queue.quiet(peer) && (args.kind != HAL_CUDA_CHECK_OTHER_QUEUE || other.quiet(peer));
            ok = ok && queue.signal(peer, word(place.word(kConsumed, gin.rank)), 1);
        }
        for (int peer = static_cast<int>(threadIdx.x); peer < gin.world && ok; peer += static_cast<int>(blockDim.x))
            if (involves(peer))
                ok = queue.wait(here(place.word(kConsumed, peer)), static_cast<std::uint64_t>(number), peer,
                                HAL_CUDA_STAGE_WAIT);
        return __syncthreads_and(ok) != 0;
    }
};

__global__ void __launch_bounds__(kMostThreads, 1)
    gin_check_kernel(const __grid_constant__ hal_cuda_ep ep, const __grid_constant__ hal_cuda_gin gin,
                     const __grid_constant__ hal_cuda_gin_check_args args) {
    const Check check(ep, gin, args);
    for (int round = 1; round <= args.rounds; ++round)
        if (!check.round(round)) return;
    // The last words of this kernel must have left before the window may go.
    if (threadIdx.x < 32) check.queue.flush();
}

}  // namespace
}  // namespace hal::cuda

extern "C" {

std::uint64_t hal_cuda_gin_check_bytes(const hal_cuda_gin* gin, const hal_cuda_gin_check_args* args) {
    return hal::cuda::Places(*gin, *args).bytes();
}

int hal_cuda_gin_check(const hal_cuda_ep* ep, const hal_cuda_gin* gin, const hal_cuda_gin_check_args* args,
                       std::uint64_t timeout_ns, std::uint64_t stream) {
    using namespace hal::cuda;
    if (args->kind < 0 || args->kind >= HAL_CUDA_CHECKS) return fail("no such check: " + std::to_string(args->kind));
    if (args->kind == HAL_CUDA_CHECK_STRONG_SIGNAL && gin->signals < gin->world)
        return fail("this check needs " + std::to_string(gin->world) + " indexed signals, there are " +
                    std::to_string(gin->signals));
    if (args->kind == HAL_CUDA_CHECK_OTHER_QUEUE && gin->queues < 2) return fail("this check needs two queues");
    if (args->row_bytes % 8 != 0 || args->rows < 1) return fail("rows of whole 8-byte words, at least one");
    if (args->threads < 32 || args->threads > kMostThreads)
        return fail("this check takes 32 to " + std::to_string(kMostThreads) + " threads, not " +
                    std::to_string(args->threads));
    hal_cuda_ep bounded = *ep;
    bounded.timeout_ns = timeout_ns;
    return launch(gin_check_kernel, ep->device, 1, args->threads, 0, stream, "check of GIN", bounded, *gin, *args);
}

}  // extern "C"
