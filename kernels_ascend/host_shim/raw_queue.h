// SPDX-License-Identifier: Apache-2.0
// What kernels/raw_wqe.h needs to know of a queue's innards, here those of the emulated one. On real devices this binding
// depends on the exact header revision (docs/ascend.md, "Hand-written descriptors").
#pragma once
#include "shmem.h"

struct hal_raw_queue_t {
    __gm__ std::uint64_t* sq;  // depth blocks of 8 words
    std::uint32_t depth;
    __gm__ std::uint32_t* head;  // free-running, in blocks
    __gm__ std::uint32_t* tail;
    __gm__ void* doorbell;
};

inline constexpr std::uint64_t HAL_UDMA_OPCODE_WRITE = 3, HAL_UDMA_SQE_BYTES = 48, HAL_UDMA_SGE_BYTES = 16;
inline constexpr int HAL_UDMA_ODR_SHIFT = hal::udma::kOdrShift, HAL_UDMA_OPCODE_SHIFT = hal::udma::kOpcodeShift;
inline constexpr std::uint64_t HAL_UDMA_CQE_BIT = hal::udma::kCqeBit, HAL_UDMA_ODR_MASK = hal::udma::kOdrMask;
inline constexpr std::uint32_t HAL_UDMA_CREDIT_GUARD = hal::udma::kCreditGuard;

ACLSHMEM_DEVICE hal_raw_queue_t hal_raw_queue(int pe, std::uint32_t qp) {
    auto& device = hal_shim::core().device;
    auto& q = device.engine.queue(pe, qp);
    return {q.sq->word, device.engine.config.sq_depth, &q.head, &q.tail, &q.doorbell_register};
}

namespace hal_shim {
inline bool mutated(hal::udma::Mutation which) { return core().device.engine.config.mutation == which; }
}  // namespace hal_shim
