// SPDX-License-Identifier: Apache-2.0
// The ordering words on LSA pointers, for callers outside kernels: a list of them run by one kernel. Each is complete
// before the next begins, which is more than docs/contract.md asks of relaxed ones.
#include "launch.cuh"
#include "words.cuh"

namespace hal::cuda {
namespace {

__global__ void __launch_bounds__(kWordThreads, 1)
    words_kernel(const __grid_constant__ hal_cuda_ep ep, const __grid_constant__ Ops ops, std::uint64_t* result) {
    for (int i = 0; i < ops.count; ++i) {
        const hal_cuda_op& op = ops.op[i];
        __syncthreads();
        if (op.kind == HAL_CUDA_PUT) put(op);
        if (threadIdx.x != 0 || blockIdx.x != 0) continue;
        if (op.kind == HAL_CUDA_SIGNAL) signal(op);
        if (op.kind == HAL_CUDA_QUIET) __threadfence_system();
        if (op.kind != HAL_CUDA_WAIT) continue;
        const auto* slot = reinterpret_cast<const std::uint64_t*>(op.address);
        wait_at_least(ep, slot, op.value, op.stage, op.peer);
        if (result != nullptr) store_relaxed(result, load_acquire(slot));
    }
}

}  // namespace
}  // namespace hal::cuda

extern "C" int hal_cuda_ops(const hal_cuda_ep* ep, const hal_cuda_op* ops, int count, std::uint64_t timeout_ns,
                            std::uint64_t result, std::uint64_t stream) {
    using namespace hal::cuda;
    if (count < 1 || count > HAL_CUDA_MAX_OPS) return fail("ops: " + std::to_string(count) + " in one call");
    hal_cuda_ep bounded = *ep;
    bounded.timeout_ns = timeout_ns;
    Ops list{};
    list.count = count;
    for (int i = 0; i < count; ++i) list.op[i] = ops[i];
    // Several blocks only for one large put: between blocks there is no order.
    const bool large = count == 1 && ops[0].kind == HAL_CUDA_PUT && ops[0].bytes > (1u << 16);
    return launch(words_kernel, ep->device, large ? 16 : 1, kWordThreads, 0, stream, "ordering words", bounded, list,
                  reinterpret_cast<std::uint64_t*>(result));
}
