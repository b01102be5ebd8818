// SPDX-License-Identifier: Apache-2.0
// What host_shim/hal_hooks.h is to the emulator, on a real device: nothing to pause for, no planted defects.
#pragma once
#include "kernel_operator.h"
#include "raw_queue.h"
#include "shmem.h"

__aicore__ inline void hal_pause(const __gm__ void*, uint64_t, int32_t, int32_t, int32_t) {}
__aicore__ inline uint32_t hal_submit_batch() { return 128; }
__aicore__ inline uint64_t hal_poll_offset(uint64_t offset, uint64_t) { return offset; }
__aicore__ inline uint64_t hal_signal_value(uint64_t value) { return value; }
__aicore__ inline uint64_t hal_order_mask() { return HAL_UDMA_ODR_MASK; }
__aicore__ inline bool hal_reclaim_early() { return false; }

__aicore__ inline void hal_flush_descriptors(hal_raw_queue_t& queue, uint32_t first, uint32_t end) {
    const uint32_t depth = queue.depth, at = first % depth, blocks = end - first;
    const uint32_t span = blocks < depth - at ? blocks : depth - at;
    dcci_cachelines(reinterpret_cast<__gm__ uint8_t*>(queue.sq) + uint64_t(at) * 64, uint64_t(span) * 64);
    if (span < blocks) dcci_cachelines(reinterpret_cast<__gm__ uint8_t*>(queue.sq), uint64_t(blocks - span) * 64);
}

// A word of this PE's own memory, to which peers' engines may add as well: the scalar unit has no atomic add, so callers
// give each publisher a slot of its own and this one is the only writer.
__aicore__ inline void hal_local_atomic_add(uint64_t address, uint64_t value) {
    AscendC::GlobalTensor<uint64_t> word;
    word.SetGlobalBuffer(reinterpret_cast<__gm__ uint64_t*>(address));
    dcci_cacheline(reinterpret_cast<__gm__ uint8_t*>(address));
    word.SetValue(0, word.GetValue(0) + value);
    dcci_cacheline(reinterpret_cast<__gm__ uint8_t*>(address));
}
