// SPDX-License-Identifier: Apache-2.0
// Where the emulator looks into the kernels: a wait's turn, and the places at which a planted defect (emulation/config.hpp)
// bites. On real devices device/hal_hooks.h takes its place, in which all of these are empty or constant.
#pragma once
#include "raw_queue.h"

// One turn of a wait for `at_least` in the word at `address`, which `source` will signal.
ACLSHMEM_DEVICE void hal_pause(const void* address, std::uint64_t at_least, int source, int queue, int stage) {
    auto& core = hal_shim::core();
    core.awaited = {reinterpret_cast<std::uint64_t>(address), at_least, source, queue, stage};
    core.pause();
    core.awaited = {};
}

ACLSHMEM_DEVICE std::uint32_t hal_submit_batch() {
    return hal_shim::mutated(hal::udma::Mutation::batch_of_129) ? 129 : 128;
}
ACLSHMEM_DEVICE std::uint64_t hal_poll_offset(std::uint64_t offset, std::uint64_t stride) {
    return hal_shim::mutated(hal::udma::Mutation::wait_on_wrong_slot) ? offset + 2 * stride : offset;
}
ACLSHMEM_DEVICE std::uint64_t hal_signal_value(std::uint64_t value) {
    return hal_shim::mutated(hal::udma::Mutation::constant_one) ? 2 : value;
}
ACLSHMEM_DEVICE std::uint64_t hal_order_mask() {
    return hal_shim::mutated(hal::udma::Mutation::keep_relaxed_bits) ? 0 : HAL_UDMA_ODR_MASK;
}
ACLSHMEM_DEVICE bool hal_reclaim_early() { return hal_shim::mutated(hal::udma::Mutation::early_reclaim); }
ACLSHMEM_DEVICE void hal_flush_descriptors(hal_raw_queue_t& queue, std::uint32_t first, std::uint32_t end) {
    const std::uint32_t depth = queue.depth, at = first % depth, blocks = end - first;
    if (hal_shim::mutated(hal::udma::Mutation::no_flush)) return;
    const std::uint32_t span = std::min(blocks, depth - at);
    dcci_cachelines(queue.sq + std::uint64_t{at} * 8, std::uint64_t{span} * 64);
    if (hal_shim::mutated(hal::udma::Mutation::flush_first_span_only)) return;
    if (span < blocks) dcci_cachelines(queue.sq, std::uint64_t{blocks - span} * 64);
}
// Adds to a word of this PE's own memory, to which others add as well.
ACLSHMEM_DEVICE void hal_local_atomic_add(std::uint64_t address, std::uint64_t value) {
    __atomic_fetch_add(reinterpret_cast<std::uint64_t*>(address), value, __ATOMIC_ACQ_REL);
}
