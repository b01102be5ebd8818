// SPDX-License-Identifier: Apache-2.0
// The ordering words on LSA pointers, for callers outside kernels: a list of them run by one kernel. Each is complete
// before the next begins, which is more than docs/contract.md asks of relaxed ones.
#include "device.cuh"
#include "launch.cuh"

namespace hal::cuda {
namespace {

struct Ops {
    hal_cuda_op op[HAL_CUDA_MAX_OPS];
    int count;
};

__device__ void put(const hal_cuda_op& op) {
    if (op.order == 2) __threadfence_system();  // strong: after everything this rank did before
    const std::uint64_t first = blockIdx.x * static_cast<std::uint64_t>(blockDim.x) + threadIdx.x;
    const std::uint64_t step = static_cast<std::uint64_t>(gridDim.x) * blockDim.x;
    if ((op.address | op.source | op.bytes) % 16 == 0) {
        for (std::uint64_t i = first; i < op.bytes / 16; i += step)
            store_window(reinterpret_cast<uint4*>(op.address) + i,
                         load_window(reinterpret_cast<const uint4*>(op.source) + i));
    } else {
        for (std::uint64_t i = first; i < op.bytes; i += step)
            store_window(reinterpret_cast<char*>(op.address) + i,
                         load_window(reinterpret_cast<const char*>(op.source) + i));
    }
    __threadfence_system();
}

__device__ void signal(const hal_cuda_op& op) {
    auto* slot = reinterpret_cast<std::uint64_t*>(op.address);
    if (op.order == 2) __threadfence_system();
    if (op.signal_op == 0)
        add_release(slot, op.value);
    else
        store_release(slot, op.value);
}

__global__ void words_kernel(const __grid_constant__ hal_cuda_ep ep, const __grid_constant__ Ops ops,
                             std::uint64_t* result) {
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
