// SPDX-License-Identifier: Apache-2.0
// The ordering words for callers outside kernels, in runs over several NVLink domains: LSA pointers inside this rank's,
// GIN to the others. Over GIN a relaxed put or signal is only posted, and its source is read later.
#include "gin.cuh"
#include "launch.cuh"
#include "words.cuh"

namespace hal::cuda {
namespace {

using gin::Words;

struct Run {
    const hal_cuda_ep& ep;
    const hal_cuda_gin& gin;

    __device__ bool neighbour(int peer) const { return peer / gin.lsa_size == gin.rank / gin.lsa_size; }
    __device__ gin::Queue queue(const hal_cuda_op& op) const { return gin::Queue(ep, gin, op.queue); }
    __device__ std::uint64_t slot(std::uint64_t number) const {
        return Words::slot(static_cast<int>(number), gin.queues, gin.world);
    }
    __device__ int network_words() const { return gin.queues * gin.world; }
    // The value of the slot whose row is at `row`, without the word for NVLink if that is not asked for.
    __device__ std::uint64_t sum(const std::uint64_t* row, int words) const {
        std::uint64_t total = 0;
        for (int i = 0; i < words; ++i) total += load_acquire(row + i);
        return total;
    }

    // One thread.
    __device__ bool put(const hal_cuda_op& op) const {
        const gin::Queue on = queue(op);
        const gin::Place to{op.window, op.address}, from{op.source_window, op.source};
        if (op.order == 2 && !on.quiet(op.peer)) return false;  // strong: GIN has no put that follows earlier ones
        if (op.kind == HAL_CUDA_PUT_VALUE) return on.put_value(op.peer, to, op.value);
        return on.put(op.peer, to, from, op.bytes);
    }
    // One thread. What neighbours add is one word, what they set is the difference to what the network has added.
    __device__ void signal_neighbour(hal_cuda_op op) const {
        const std::uint64_t there = gin.peers + (op.peer % gin.lsa_size) * gin.peer_stride + slot(op.address);
        if (op.signal_op != 0) op.value -= sum(reinterpret_cast<const std::uint64_t*>(there), network_words());
        op.address = there + network_words() * sizeof(std::uint64_t);
        signal(op);
    }
    // Warp-wide. GIN can only add: the word of this (origin, queue) is raised by what is missing to the value.
    __device__ bool signal_network(const hal_cuda_op& op) const {
        const gin::Queue on = queue(op);
        const std::uint64_t row = slot(op.address);
        const int own = op.queue * gin.world + gin.rank;
        std::uint64_t add = op.value;
        int ok = 1;
        if (op.signal_op != 0) {
            const std::uint64_t copy = slot(static_cast<std::uint64_t>(gin.slots));
            if ((threadIdx.x & 31) == 0) {
                // What this rank added before is in what it reads now.
                ok = on.quiet(op.peer) &&
                     on.get(op.peer, {gin.window, row}, {gin.window, copy}, Words::row(gin.queues, gin.world));
            }
            if (__shfl_sync(0xffffffffu, ok, 0) == 0 || !on.flush()) return false;
            add -= sum(reinterpret_cast<const std::uint64_t*>(gin.words + copy), network_words() + 1);
        }
        if ((threadIdx.x & 31) == 0) {
            const gin::Word word{{gin.window, row + own * sizeof(std::uint64_t)}};
            ok = on.signal(op.peer, word, add, op.order == 2 ? gin::Order::strong : gin::Order::weak);
        }
        return __shfl_sync(0xffffffffu, ok, 0) != 0;
    }
    // All threads of the block.
    __device__ bool quiet(const hal_cuda_op& op) const {
        const gin::Queue on = queue(op);
        if (op.source_only != 0) return threadIdx.x < 32 ? on.flush() : true;
        __threadfence_system();
        bool ok = true;
        for (int peer = static_cast<int>(threadIdx.x); peer < gin.world; peer += static_cast<int>(blockDim.x))
            if (!neighbour(peer) && on.reaches(peer) && (op.peer < 0 || op.peer == peer)) ok = on.quiet(peer) && ok;
        return ok;
    }
    // One thread.
    __device__ bool wait(const hal_cuda_op& op, std::uint64_t* result) const {
        const auto* row = reinterpret_cast<const std::uint64_t*>(gin.words + slot(op.address));
        const int words = network_words() + 1;
        const bool ok = wait_until(
            ep, [&] { return sum(row, words); }, [&](std::uint64_t v) { return v >= op.value; }, op.stage, op.peer,
            op.value);
        if (ok && result != nullptr) store_relaxed(result, sum(row, words));
        return ok;
    }
    __device__ bool arrive(const hal_cuda_op& op) const {
        const gin::Barrier barrier(ep, gin);
        if (neighbour(op.peer)) {
            __threadfence_system();
            barrier.arrive_at_neighbour(op.peer);
            return true;
        }
        bool ok = true;
        for (int i = 0; ok && i < (op.order == 2 ? gin.queues : 1); ++i) ok = barrier.arrive(op.peer, i, op.order == 2);
        return ok;
    }
    __device__ bool await(const hal_cuda_op& op) const {
        const gin::Barrier barrier(ep, gin);
        if (neighbour(op.peer)) return barrier.await_neighbour(op.peer);
        bool ok = true;
        for (int i = 0; ok && i < (op.order == 2 ? gin.queues : 1); ++i) ok = barrier.await(op.peer, i);
        return ok;
    }
};

__global__ void __launch_bounds__(kWordThreads, 1)
    gin_words_kernel(const __grid_constant__ hal_cuda_ep ep, const __grid_constant__ hal_cuda_gin gin,
                     const __grid_constant__ Ops ops, std::uint64_t* result) {
    const Run run{ep, gin};
    const bool first = threadIdx.x == 0, warp = threadIdx.x < 32;
    for (int i = 0; i < ops.count; ++i) {
        const hal_cuda_op& op = ops.op[i];
        bool ok = true;
        switch (op.kind) {
            case HAL_CUDA_PUT:
                if (op.network == 0)
                    put(op);
                else if (first)
                    ok = run.put(op);
                break;
            case HAL_CUDA_PUT_VALUE:
                if (first) ok = run.put(op);
                break;
            case HAL_CUDA_SIGNAL:
                if (run.neighbour(op.peer)) {
                    if (first) run.signal_neighbour(op);
                } else if (warp) {
                    ok = run.signal_network(op);
                }
                break;
            case HAL_CUDA_WAIT:
                if (first) ok = run.wait(op, result);
                break;
            case HAL_CUDA_QUIET:
                ok = run.quiet(op);
                break;
            case HAL_CUDA_ARRIVE:
                if (first) ok = run.arrive(op);
                break;
            case HAL_CUDA_AWAIT:
                if (first) ok = run.await(op);
                break;
        }
        if (__syncthreads_and(ok) == 0) return;
    }
}

}  // namespace
}  // namespace hal::cuda

extern "C" int hal_cuda_gin_ops(const hal_cuda_ep* ep, const hal_cuda_gin* gin, const hal_cuda_op* ops, int count,
                                std::uint64_t timeout_ns, std::uint64_t result, std::uint64_t stream) {
    using namespace hal::cuda;
    if (count < 1 || count > HAL_CUDA_MAX_OPS) return fail("ops: " + std::to_string(count) + " in one call");
    hal_cuda_ep bounded = *ep;
    bounded.timeout_ns = timeout_ns;
    Ops list{};
    list.count = count;
    for (int i = 0; i < count; ++i) list.op[i] = ops[i];
    return launch(gin_words_kernel, ep->device, 1, kWordThreads, 0, stream, "ordering words over GIN", bounded, *gin,
                  list, reinterpret_cast<std::uint64_t*>(result));
}
