// SPDX-License-Identifier: Apache-2.0
// Descriptors written by hand, the only way to a strong signal without a completion entry: the public interface asks for
// one on every request that is not deferred. It depends on the layout of the SDK's queues, so it stays in this file, uses
// QPs of its own (never mixed with the public interface's counters), and checks what it can at compile time.
#pragma once
#include "core.h"

namespace hal::ascend {

static_assert(HAL_UDMA_OPCODE_WRITE == 3 && HAL_UDMA_SQE_BYTES + HAL_UDMA_SGE_BYTES == 64, "one write is one block");
static_assert(ACLSHMEMX_UDMA_ODR_RO == 5 && ACLSHMEMX_UDMA_ODR_SO == 6 && HAL_UDMA_ODR_SHIFT == 16, "order code");
static_assert(HAL_UDMA_CQE_BIT == 1ULL << 21 && HAL_UDMA_ODR_MASK == 7ULL << 16, "bits of word 0");

// One queue while descriptors are added to it; nothing is seen by the engine before ring().
class RawQueue {
  public:
    HAL_AICORE RawQueue() = default;
    HAL_AICORE RawQueue(std::int32_t peer, std::int32_t qp)
        : peer_(peer), queue_(hal_raw_queue(peer, std::uint32_t(qp))) {
        first_ = head_ = *queue_.head;
    }

    // Room for `blocks` more in what is not yet reclaimed? Asked before anything is built: without completion entries
    // nothing would ever make room.
    HAL_AICORE bool fits(std::uint32_t blocks) const {
        return ring_fits(head_, *queue_.tail, blocks, queue_.depth, HAL_UDMA_CREDIT_GUARD);
    }
    HAL_AICORE std::uint32_t room() const { return queue_.depth - HAL_UDMA_CREDIT_GUARD - (head_ - *queue_.tail) - 1; }

    // A relaxed write without completion entry.
    HAL_AICORE void write(std::uint64_t dst, std::uint64_t src, std::uint32_t bytes) {
        const auto remote = reinterpret_cast<std::uint64_t>(aclshmem_ptr(reinterpret_cast<__gm__ void*>(dst), peer_));
        const std::uint64_t words[8] = {(std::uint64_t{ACLSHMEMX_UDMA_ODR_RO} << HAL_UDMA_ODR_SHIFT) |
                                            (HAL_UDMA_OPCODE_WRITE << HAL_UDMA_OPCODE_SHIFT),
                                        1ULL << 24,
                                        0,
                                        0,
                                        0,
                                        remote,
                                        bytes,
                                        src};
        const auto block = global<std::uint64_t>(word_address(head_));
        for (std::uint32_t i = 0; i < 8; ++i) block.SetValue(i, words[i]);
        ++head_;
    }

    // The block at `index` becomes strong: its old order code is cleared first, or the two would mix to a reserved one.
    HAL_AICORE void mark_strong(std::uint32_t index) {
        const auto block = global<std::uint64_t>(word_address(index));
        std::uint64_t word = block.GetValue(0);
        word &= ~hal_order_mask();
        word |= std::uint64_t{ACLSHMEMX_UDMA_ODR_SO} << HAL_UDMA_ODR_SHIFT;
        block.SetValue(0, word);
    }
    HAL_AICORE std::uint32_t last() const { return head_ - 1; }

    // The engine reads memory and not this core's cache: descriptors are flushed, both parts where the ring wraps, and
    // only then is the doorbell written.
    HAL_AICORE void ring() {
        if (head_ == first_) return;
        hal_flush_descriptors(queue_, first_, head_);
        *queue_.head = head_;
        st_dev(head_, queue_.doorbell, 0);
        if (hal_reclaim_early()) reclaim(head_);
        first_ = head_;
    }
    HAL_AICORE std::uint32_t head() const { return head_; }

    // Blocks before `until` are complete, as everyone's exit from the round has proved: never sooner.
    HAL_AICORE void reclaim(std::uint32_t until) {
        if (reached(until, *queue_.tail)) *queue_.tail = until;
    }

  private:
    HAL_AICORE std::uint64_t word_address(std::uint32_t index) const {
        return reinterpret_cast<std::uint64_t>(queue_.sq) + std::uint64_t(index % queue_.depth) * 64;
    }
    std::int32_t peer_ = 0;
    hal_raw_queue_t queue_{};
    std::uint32_t first_ = 0, head_ = 0;
};

}  // namespace hal::ascend
