// SPDX-License-Identifier: Apache-2.0
// The ordering words on LSA pointers, as the interpreter kernels run them.
#pragma once
#include "device.cuh"

namespace hal::cuda {

struct Ops {
    hal_cuda_op op[HAL_CUDA_MAX_OPS];
    int count;
};

// All threads of the grid.
__device__ inline void put(const hal_cuda_op& op) {
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

// One thread.
__device__ inline void signal(const hal_cuda_op& op) {
    auto* slot = reinterpret_cast<std::uint64_t*>(op.address);
    if (op.order == 2) __threadfence_system();
    if (op.signal_op == 0)
        add_release(slot, op.value);
    else
        store_release(slot, op.value);
}

}  // namespace hal::cuda
