// SPDX-License-Identifier: Apache-2.0
// The binding of hand-written descriptors to the SDK's queues. The SDK's internal queue structures changed incompatibly three
// times within two months, so none is guessed here: who has the headers of one revision writes the five lines that fill
// hal_raw_queue_t from them in a header of his own, and builds with -DHAL_RAW_QUEUE_BINDING=<that header> (docs/ascend.md,
// "Hand-written descriptors"). Without it, completion strong_signal_no_cqe is refused by the host before any launch.
#pragma once
#include "kernel_operator.h"
#include "shmem.h"

struct hal_raw_queue_t {
    __gm__ uint64_t* sq;
    uint32_t depth;
    __gm__ uint32_t* head;
    __gm__ uint32_t* tail;
    __gm__ uint8_t* doorbell;
};

inline constexpr uint64_t HAL_UDMA_OPCODE_WRITE = 3, HAL_UDMA_SQE_BYTES = 48, HAL_UDMA_SGE_BYTES = 16;
inline constexpr int HAL_UDMA_ODR_SHIFT = 16, HAL_UDMA_OPCODE_SHIFT = 40;
inline constexpr uint64_t HAL_UDMA_CQE_BIT = 1ULL << 21, HAL_UDMA_ODR_MASK = 7ULL << 16;
inline constexpr uint32_t HAL_UDMA_CREDIT_GUARD = 10;

#if defined(HAL_RAW_QUEUE_BINDING)
#include HAL_RAW_QUEUE_BINDING
#else
__aicore__ inline hal_raw_queue_t hal_raw_queue(int, uint32_t) { return {}; }
#endif
