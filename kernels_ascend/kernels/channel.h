// SPDX-License-Identifier: Apache-2.0
// Rows to one peer at a time, and the proof that they arrived, under each completion protocol (docs/completion_protocols.md).
// Every leg of dispatch and combine goes through these, so a protocol is stated once.
#pragma once
#include <type_traits>

#include "raw_wqe.h"

namespace hal::ascend {

// A row where its source is staged: payload, what travels beside it, and its blocks with completion flag_in_block.
struct Source {
    std::uint64_t x, meta, blocks;
    std::uint32_t x_bytes, meta_bytes, block_bytes;
};

HAL_AICORE Source source_of(const RowArea& area, std::uint64_t row, std::uint32_t meta_bytes) {
    const std::uint32_t record_blocks =
        std::uint32_t(blocks_of(std::int64_t(area.x_bytes) + meta_bytes) * block_bytes());
    return {area.x(row), area.meta(row), area.blocks(row), std::uint32_t(area.x_bytes), meta_bytes, record_blocks};
}

// Rows to a peer go to two queues 3:1 by their place in route order.
class RouteOrder {
  public:
    HAL_AICORE std::int32_t next(std::int32_t queues) { return queue_of(n_++, queues); }

  private:
    std::int64_t n_ = 0;
};

// Requests of one queue, deferred in scratch and submitted 128 at a time; the last of each batch has a completion entry.
class Batch {
  public:
    HAL_AICORE void init(Core& core) {
        core.pipe_.InitBuffer(buffer_, 128 * 64);
        scratch_ = reinterpret_cast<__ubuf__ std::uint8_t*>(buffer_.Get<std::uint8_t>().GetPhyAddr());
        state_ = {};
    }
    // One request is held back, since only the next call tells whether it is the last.
    HAL_AICORE void add(Core& core, std::int32_t peer, std::int32_t qp, std::uint64_t dst, std::uint64_t src,
                        std::uint32_t bytes) {
        post_held(core, peer, qp);
        held_ = true;
        dst_ = dst, src_ = src, bytes_ = bytes;
    }
    template <bool LAST_IS_STRONG>
    HAL_AICORE void close(Core& core, std::int32_t peer, std::int32_t qp) {
        if (!held_) return;
        held_ = false;
        if constexpr (LAST_IS_STRONG)
            submit<kStrong>(core, peer, qp);
        else
            submit<kRowLastOfBatch>(core, peer, qp);
    }

  private:
    HAL_AICORE void post_held(Core& core, std::int32_t peer, std::int32_t qp) {
        if (!held_) return;
        if (state_.pending_count + 1 >= hal_submit_batch()) return submit<kRowLastOfBatch>(core, peer, qp);
        aclshmemx_udma_qp_put_nbi<std::uint8_t, PIPE_MTE3, kRow>(
            reinterpret_cast<Gm>(core.at(dst_)), reinterpret_cast<Gm>(core.at(src_)), scratch_, bytes_, peer,
            std::uint32_t(qp), EVENT_ID6, aclshmemx_defer_t{&state_});
    }
    template <const aclshmemx_udma_op_config_t& CONFIG>
    HAL_AICORE void submit(Core& core, std::int32_t peer, std::int32_t qp) {
        aclshmemx_udma_qp_put_nbi<std::uint8_t, PIPE_MTE3, CONFIG>(
            reinterpret_cast<Gm>(core.at(dst_)), reinterpret_cast<Gm>(core.at(src_)), scratch_, bytes_, peer,
            std::uint32_t(qp), EVENT_ID6, aclshmemx_submit_t{&state_});
    }

    AscendC::TBuf<AscendC::TPosition::VECOUT> buffer_;
    __ubuf__ std::uint8_t* scratch_ = nullptr;
    aclshmemx_submit_state_t state_{};
    bool held_ = false;
    std::uint64_t dst_ = 0, src_ = 0;
    std::uint32_t bytes_ = 0;
};

template <Completion C>
class RowSender {
  public:
    HAL_AICORE explicit RowSender(Core& core) : core_(core) {
        if constexpr (C != Completion::strong_signal_no_cqe)
            for (std::int32_t q = 0; q < core.used_qps(); ++q) batch_[q].init(core);
    }

    // Rows follow, then close(). Legs to different peers do not overlap.
    HAL_AICORE void open(std::int32_t peer, const RowArea& target) {
        peer_ = peer;
        target_ = target;
        order_ = {};
        if constexpr (C == Completion::strong_signal_no_cqe)
            for (std::int32_t q = 0; q < core_.used_qps(); ++q) raw_[q] = RawQueue(peer, core_.raw_qp(q));
    }

    HAL_AICORE void row(std::uint64_t row, const Source& source) {
        const std::int32_t q = order_.next(core_.used_qps());
        ++core_.rows;
        if constexpr (C == Completion::flag_in_block) {
            put(q, target_.blocks(row), source.blocks, source.block_bytes);
            const std::uint32_t flags = source.block_bytes / 512 * 32;
            core_.flag_bytes += flags;
            core_.data_bytes += source.block_bytes - flags;
            return;
        }
        if (source.meta_bytes) put(q, target_.meta(row), source.meta, source.meta_bytes);
        put(q, target_.x(row), source.x, source.x_bytes);
        core_.data_bytes += source.x_bytes + source.meta_bytes;
    }

    // After the last row. Empty legs signal too: the peer cannot tell "nothing" from "not yet".
    HAL_AICORE void close(const Arrival& arrival) {
        for (std::int32_t q = 0; q < core_.used_qps(); ++q) {
            if constexpr (C == Completion::strong_signal) {
                batch_[q].template close<false>(core_, peer_, q);
                // A strong signal says nothing of the other queue, so each gets its own.
                core_.signal(peer_, q, arrival.slot[q], arrival.source_word);
            } else if constexpr (C == Completion::strong_signal_no_cqe) {
                raw_[q].write(core_.at(arrival.slot[q]), core_.at(arrival.source_word), 8);
                raw_[q].mark_strong(raw_[q].last());
                raw_[q].ring();
                ++core_.signals;
            } else if constexpr (C == Completion::strong_last) {
                batch_[q].template close<true>(core_, peer_, q);
            } else {
                batch_[q].template close<false>(core_, peer_, q);  // each block's flag says it
            }
        }
    }

    // strong_last, after every leg was closed: one word for both queues, so both must be quiet first. It goes by the
    // copy unit, which knows nothing of the queues.
    HAL_AICORE void publish(std::int32_t peer, const Arrival& arrival) {
        if constexpr (C == Completion::strong_last) {
            for (std::int32_t q = 0; q < core_.used_qps(); ++q) aclshmemx_udma_qp_quiet(peer, std::uint32_t(q));
            const auto word = core_.small.ReinterpretCast<std::uint64_t>();
            word.SetValue(0, read_word<std::uint64_t>(core_.at(arrival.source_word)));
            const auto target = aclshmem_ptr(reinterpret_cast<__gm__ void*>(core_.at(arrival.slot[0])), peer);
            save(reinterpret_cast<std::uint64_t>(target), word, 1);
            ++core_.signals;
        }
    }

  private:
    HAL_AICORE void put(std::int32_t q, std::uint64_t dst, std::uint64_t src, std::uint32_t bytes) {
        if constexpr (C == Completion::strong_signal_no_cqe)
            raw_[q].write(core_.at(dst), core_.at(src), bytes);
        else
            batch_[q].add(core_, peer_, q, dst, src, bytes);
    }

    Core& core_;
    std::int32_t peer_ = 0;
    RowArea target_{};
    RouteOrder order_;
    struct None {};
    std::conditional_t<C == Completion::strong_signal_no_cqe, None, Batch> batch_[2];
    std::conditional_t<C == Completion::strong_signal_no_cqe, RawQueue, None> raw_[2];
};

// A row that does not leave this rank.
HAL_AICORE void local_row(Core& core, const RowArea& area, std::uint64_t row, std::uint64_t x, std::uint64_t meta,
                          std::uint32_t meta_bytes) {
    copy(core.tile, core.at(area.x(row)), x, area.x_bytes);
    if (meta_bytes) copy(core.tile, core.at(area.meta(row)), meta, meta_bytes);
}

// flag_in_block: a record (payload, then meta) cut into blocks at `blocks`, each with the round's word in its flag. The
// last 8 bytes of a block hold it too: the receiver looks there, and a block arrives whole or not at all.
HAL_AICORE void pack_blocks(Core& core, std::uint64_t blocks, std::uint64_t x, std::uint32_t x_bytes,
                            std::uint64_t meta, std::uint32_t meta_bytes, std::uint64_t word) {
    const auto block = core.tile.ReinterpretCast<std::uint64_t>();
    const std::uint32_t bytes = x_bytes + meta_bytes, data = std::uint32_t(block_data());
    for (std::uint32_t from = 0; from < bytes; from += data, blocks += 512) {
        const std::uint32_t until = std::uint32_t(smaller(bytes, from + data));
        AscendC::Duplicate(block, std::uint64_t{0}, 60);
        const std::uint32_t in_x = from < x_bytes ? std::uint32_t(smaller(until, x_bytes)) - from : 0;
        if (in_x) load(core.tile, x + from, in_x);
        // The meta part starts at a multiple of 16 bytes, scratch copies at one of 32: it goes through a spare place.
        if (until > from + in_x) {
            const std::uint32_t start = from + in_x - x_bytes, n = until - from - in_x;
            const auto spare = core.tile[1024];
            load(spare, meta + start, n);
            for (std::uint32_t i = 0; i < n; ++i) core.tile.SetValue(in_x + i, spare.GetValue(i));
        }
        for (std::uint32_t i = 60; i < 64; ++i) block.SetValue(i, word);
        save(core.at(blocks), core.tile, 512);
    }
}

// The receiving end of flag_in_block: waits for each block of the rows [first, first + n) and moves its data to the planes.
HAL_AICORE void unpack_rows(Core& core, const RowArea& area, std::uint64_t first, std::uint64_t n,
                            std::uint32_t meta_bytes, std::uint64_t word, std::int32_t source, Stage stage) {
    const std::uint32_t x_bytes = std::uint32_t(area.x_bytes), bytes = x_bytes + meta_bytes,
                        data = std::uint32_t(block_data());
    for (std::uint64_t row = first; row < first + n; ++row) {
        std::uint64_t block = area.blocks(row);
        for (std::uint32_t from = 0; from < bytes; from += data, block += 512) {
            core.check_word(core.wait(block + 504, hal_signal_value(word & ~std::uint64_t{1}), source, 0, stage), word,
                            source, stage);
            if (core.failed()) return;
            const std::uint32_t until = std::uint32_t(smaller(bytes, from + data));
            const std::uint32_t in_x = from < x_bytes ? std::uint32_t(smaller(until, x_bytes)) - from : 0;
            if (in_x) copy(core.tile, core.at(area.x(row)) + from, core.at(block), in_x);
            if (until > from + in_x)
                copy(core.tile, core.at(area.meta(row)) + (from + in_x - x_bytes), core.at(block) + in_x,
                     until - from - in_x);
        }
    }
}

// ---- without completion entries: room before, reclaim after ----

HAL_AICORE std::uint64_t raw_head_address(const Core& core, std::int32_t operation, std::uint64_t round,
                                          std::int32_t peer, std::int32_t q) {
    const std::uint64_t stage =
        std::uint64_t(operation) * std::uint64_t(core.s.num_buffers) + round % std::uint64_t(core.s.num_buffers);
    return core.a.raw_heads + ((stage * std::uint64_t(core.s.ranks) + std::uint64_t(peer)) * 2 + std::uint64_t(q)) * 4;
}

// Would `rows` more rows to `peer`, in `legs` legs, fit its rings?
HAL_AICORE void require_room(Core& core, std::int32_t peer, std::int64_t rows, std::int32_t legs, bool meta) {
    if (core.s.completion != Completion::strong_signal_no_cqe || rows < 0 || peer == core.me) return;
    const std::int32_t queues = core.used_qps();
    for (std::int32_t q = 0; q < queues; ++q) {
        const RawQueue queue(peer, core.raw_qp(q));
        // Each leg starts its 3:1 split anew, so up to one row more for each.
        const std::int64_t own = queues == 1 ? rows : q == 0 ? rows - rows / 4 + legs : rows / 4 + legs;
        const std::int64_t needed = own * (meta ? 2 : 1) + legs;
        if (!queue.fits(std::uint32_t(needed)))
            core.fail(Failure::ring, peer, core.raw_qp(q), Stage::end, std::uint64_t(needed), queue.room());
    }
}

// Remembers where this round's requests end.
HAL_AICORE void note_raw_heads(Core& core, std::int32_t operation, std::uint64_t round) {
    if (core.s.completion != Completion::strong_signal_no_cqe) return;
    for (std::int32_t p = 0; p < core.s.ranks; ++p) {
        if (p == core.me || !core.mine(p)) continue;
        for (std::int32_t q = 0; q < core.used_qps(); ++q)
            write_word<std::uint32_t>(raw_head_address(core, operation, round, p, q),
                                      RawQueue(p, core.raw_qp(q)).head());
    }
}

HAL_AICORE void reclaim_raw(Core& core, std::int32_t operation, std::uint64_t round, std::int32_t peer) {
    for (std::int32_t q = 0; q < core.used_qps(); ++q)
        RawQueue(peer, core.raw_qp(q))
            .reclaim(read_word<std::uint32_t>(raw_head_address(core, operation, round, peer, q)));
}

}  // namespace hal::ascend
