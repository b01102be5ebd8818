// SPDX-License-Identifier: Apache-2.0
// Moving rows to one peer and learning that they arrived, under each completion protocol (docs/contract.md, Ordering).
// Every leg of dispatch and combine goes through these two, so a protocol is stated once.
#pragma once
#include <algorithm>
#include <cstring>

#include "hal/buffer_layout.hpp"
#include "hal/fabric.hpp"
#include "hal/queues.hpp"

namespace hal::ep {

// A row's payload and what travels beside it (may be empty).
struct Record {
    const void* x;
    std::size_t x_bytes;
    const void* meta;
    std::size_t meta_bytes;
};

// A leg's arrival signals at the target: one slot for each queue, and the word that says "this round".
struct Arrival {
    std::uint64_t slot[2];
    std::uint64_t word;
};

template <class Fabric>
class RowWriter {
  public:
    // `total` rows will follow; `area` is the target's.
    RowWriter(Fabric& fabric, Completion completion, int peer, const RowArea& area, const Arrival& arrival,
              std::int64_t total)
        : fabric_(fabric), completion_(completion), peer_(peer), queues_(used_queues(fabric.queues())), area_(area),
          arrival_(arrival), last_{last_on_queue(total, 0, queues_), last_on_queue(total, 1, queues_)} {}

    void row(std::uint64_t row, const Record& r) {
        const std::int64_t n = sent_++;
        const int queue = queue_of(n, queues_);
        if (completion_ == Completion::flag_in_block) return blocks(queue, row, r);
        fabric_.put(queue, peer_, area_.meta(row), r.meta, r.meta_bytes, Order::relaxed);
        // strong_last: the last row of a queue takes effect only after all rows before it.
        const bool strong = completion_ == Completion::strong_last && n == last_[queue];
        fabric_.put(queue, peer_, area_.x(row), r.x, r.x_bytes, strong ? Order::strong : Order::relaxed);
    }

    // After the last row. Empty legs signal too: the peer cannot tell "nothing" from "not yet".
    void complete() {
        switch (completion_) {
            case Completion::strong_signal:
            case Completion::strong_signal_no_cqe:
                // A strong signal says nothing of the other queue, so each gets its own.
                for (int q = 0; q < queues_; ++q)
                    fabric_.signal(q, peer_, arrival_.slot[q], arrival_.word, SignalOp::set, Order::strong);
                return;
            case Completion::strong_last:
                // One signal for both queues, so both must be complete at the target first.
                for (int q = 0; q < queues_; ++q)
                    if (last_[q] >= 0) fabric_.quiet(q, peer_, QuietScope::remote);
                fabric_.signal(0, peer_, arrival_.slot[0], arrival_.word, SignalOp::set, Order::strong);
                return;
            case Completion::flag_in_block:
                return;  // each block's flag said it
        }
    }

  private:
    void blocks(int queue, std::uint64_t row, const Record& r) {
        const std::size_t bytes = r.x_bytes + r.meta_bytes;
        for (std::size_t from = 0, block = area_.blocks(row); from < bytes;
             from += block_data(), block += block_bytes()) {
            const std::size_t until = std::min(bytes, from + std::size_t(block_data()));
            // A block may hold the payload's end and the meta's start.
            if (from < r.x_bytes)
                fabric_.put(queue, peer_, block, static_cast<const std::byte*>(r.x) + from,
                            std::min(until, r.x_bytes) - from, Order::relaxed);
            if (until > r.x_bytes) {
                const std::size_t start = std::max(from, r.x_bytes);
                fabric_.put(queue, peer_, block + (start - from),
                            static_cast<const std::byte*>(r.meta) + (start - r.x_bytes), until - start, Order::relaxed);
            }
            // Nothing promises that a put lands front to back, so the flag is its own strong signal.
            fabric_.signal(queue, peer_, block + block_data(), arrival_.word, SignalOp::set, Order::strong);
        }
    }

    Fabric& fabric_;
    const Completion completion_;
    const int peer_, queues_;
    const RowArea area_;
    const Arrival arrival_;
    const std::int64_t last_[2];
    std::int64_t sent_ = 0;
};

// A row that does not leave this rank.
template <class Fabric>
void local_row(Fabric& fabric, const RowArea& area, std::uint64_t row, const Record& r) {
    std::memcpy(fabric.write(area.x(row), r.x_bytes), r.x, r.x_bytes);
    if (r.meta_bytes) std::memcpy(fabric.write(area.meta(row), r.meta_bytes), r.meta, r.meta_bytes);
}

// The receiving end of a leg from `source`.
template <class Fabric>
class RowReader {
  public:
    RowReader(Fabric& fabric, Completion completion, int source, const RowArea& area, const Arrival& arrival,
              std::size_t meta_bytes, const char* stage)
        : fabric_(fabric), completion_(completion), source_(source), area_(area), arrival_(arrival),
          meta_bytes_(meta_bytes), stage_(stage) {}

    // Before any row is read.
    void wait() {
        if (completion_ == Completion::flag_in_block) return;
        const int signals = completion_ == Completion::strong_last ? 1 : used_queues(fabric_.queues());
        for (int q = 0; q < signals; ++q)
            check(fabric_.wait(arrival_.slot[q], arrival_.word & ~std::uint64_t(1), source_, q, stage_));
    }

    // Rows [first, first + n) are in their planes afterwards.
    void take(std::uint64_t first, std::uint64_t n) {
        if (completion_ != Completion::flag_in_block) return;
        for (std::uint64_t row = first; row < first + n; ++row) unpack(row);
    }

  private:
    void unpack(std::uint64_t row) {
        const std::size_t bytes = area_.x_bytes + meta_bytes_;
        for (std::size_t from = 0, block = area_.blocks(row); from < bytes;
             from += block_data(), block += block_bytes()) {
            const std::size_t until = std::min(bytes, from + std::size_t(block_data()));
            check(fabric_.wait(block + block_data(), arrival_.word & ~std::uint64_t(1), source_, 0, stage_));
            const std::byte* data = fabric_.read(block, until - from);
            if (from < area_.x_bytes) {
                const std::size_t n = std::min<std::size_t>(until, area_.x_bytes) - from;
                std::memcpy(fabric_.write(area_.x(row) + from, n), data, n);
            }
            if (until > area_.x_bytes) {
                const std::size_t start = std::max<std::size_t>(from, area_.x_bytes), n = until - start;
                std::memcpy(fabric_.write(area_.meta(row) + (start - area_.x_bytes), n), data + (start - from), n);
            }
        }
    }

    // The lowest bit says whether weights travel with the rows; both ends must agree. A later round's word (the source
    // may be ahead) says nothing of this round.
    void check(std::uint64_t seen) const {
        if ((seen ^ arrival_.word) == 1)
            throw ContractViolation("rank " + std::to_string(source_) + (seen & 1 ? " sends" : " does not send") +
                                    " topk_weights in combine and this rank does" + (seen & 1 ? " not" : "") +
                                    "; pass them on all ranks or on none");
    }

    Fabric& fabric_;
    const Completion completion_;
    const int source_;
    const RowArea area_;
    const Arrival arrival_;
    const std::size_t meta_bytes_;
    const char* stage_;
};

}  // namespace hal::ep
