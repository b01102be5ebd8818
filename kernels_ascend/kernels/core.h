// SPDX-License-Identifier: Apache-2.0
// What every phase of a kernel shares on one core: the launch's arguments, the layouts, scratch, bounded waits, barriers
// that carry failures, and the control signals. Each peer is served by one core, so each queue has one submitter.
#pragma once
#include "args.h"
#include "limits.h"
#include "memory.h"

namespace hal::ascend {

inline constexpr std::uint32_t kTileBytes = 32 * 1024;
inline constexpr std::uint32_t kIdTile = 4096;  // expert ids held at a time
inline constexpr std::int32_t kMaxTopK = kLargestTopK;

// A signal slot's offset and the word awaited there or sent to it, on two queues.
struct Arrival {
    std::uint64_t slot[2];
    std::uint64_t word;
    std::uint64_t source_word;  // offset of the staged value
};

class Core {
  public:
    HAL_AICORE explicit Core(GM_ADDR args) : a(from_global<EpArgs>(args)), s(a.shape) {
        l = buffer_layout(s);
        st = stage_layout(l);
        me = a.rank;
        node = node_of(s, me);
        block = std::int32_t(AscendC::GetBlockIdx());
        blocks = std::int32_t(AscendC::GetBlockNum());
        pipe_.InitBuffer(tile_buffer_, kTileBytes);
        pipe_.InitBuffer(id_buffer_, kIdTile * 8);
        pipe_.InitBuffer(counter_buffer_, std::uint32_t(4 * (header_ints(s) + local_experts(s))));
        pipe_.InitBuffer(small_buffer_, 1024);
        pipe_.InitBuffer(signal_buffer_, 64);
        tile = tile_buffer_.Get<std::uint8_t>();
        counters = counter_buffer_.Get<std::int32_t>();
        small = small_buffer_.Get<std::int32_t>();
    }

    HAL_AICORE bool mine(std::int32_t peer) const { return peer % blocks == block; }
    HAL_AICORE std::uint64_t at(std::uint64_t offset) const { return a.window + offset; }
    // Peers in the order in which this rank serves them: each rank starts at another one, so none is everyone's first.
    HAL_AICORE std::int32_t peer(std::int32_t i) const { return (me + i) % s.ranks; }
    HAL_AICORE bool near(std::int32_t rank) const { return !is_hierarchical(s) || node_of(s, rank) == node; }
    HAL_AICORE std::int32_t first_near() const { return is_hierarchical(s) ? node * node_destinations(s) : 0; }
    HAL_AICORE std::int32_t end_near() const {
        return first_near() + (is_hierarchical(s) ? node_destinations(s) : destinations(s));
    }
    HAL_AICORE std::int32_t used_qps() const { return used_queues(a.queues); }
    HAL_AICORE std::int32_t raw_qp(std::int32_t queue) const { return a.queues + queue; }

    // This core's share of n items.
    HAL_AICORE std::int64_t share_begin(std::int64_t n) const { return n * block / blocks; }
    HAL_AICORE std::int64_t share_end(std::int64_t n) const { return n * (block + 1) / blocks; }

    // ---- failures and barriers ----

    HAL_AICORE void fail(Failure kind, std::int32_t rank, std::int32_t queue, Stage stage, std::uint64_t expected,
                         std::uint64_t seen) {
        if (failed_) return;
        failed_ = true;
        const auto status = global<std::uint32_t>(status_address(block));
        status.SetValue(1, phase_);
        status.SetValue(2, std::uint32_t(rank));
        status.SetValue(3, std::uint32_t(queue));
        status.SetValue(4, std::uint32_t(stage));
        global<std::uint64_t>(status_address(block)).SetValue(3, expected);
        global<std::uint64_t>(status_address(block)).SetValue(4, seen);
        status.SetValue(0, std::uint32_t(kind));
        dcci_cacheline(reinterpret_cast<__gm__ void*>(status_address(block)));
    }
    HAL_AICORE bool failed() const { return failed_; }

    // All cores arrive; false, on every core alike, if any had failed before.
    HAL_AICORE bool sync() {
        AscendC::PipeBarrier<PIPE_ALL>();
        AscendC::SyncAll<true>();
        ++phase_;
        bool good = true;
        for (std::int32_t b = 0; b < blocks; ++b) {
            dcci_cacheline(reinterpret_cast<__gm__ void*>(status_address(b)));
            const auto status = global<std::uint32_t>(status_address(b));
            // A core ahead of this one may fail in the next phase already: that is for the next barrier.
            good = good && (status.GetValue(0) == 0 || status.GetValue(1) >= phase_);
        }
        return good;
    }

    // ---- waits ----

    // Until the word at `slot` of the own window is at least `at_least`: read past the cache each turn, bounded. Gives
    // what was seen; a smaller value means that the time was up, which the next barrier reports.
    HAL_AICORE std::uint64_t wait(std::uint64_t slot, std::uint64_t at_least, std::int32_t source, std::int32_t queue,
                                  Stage stage) {
        const std::uint64_t address = at(slot);
        std::uint64_t seen = read_word<std::uint64_t>(address);
        const std::uint64_t start = std::uint64_t(AscendC::GetSystemCycle());
        while (seen < at_least) {
            if (failed_) return seen;
            if (std::uint64_t(AscendC::GetSystemCycle()) - start > a.timeout_cycles) {
                fail(Failure::timeout, source, queue, stage, at_least, seen);
                return seen;
            }
            hal_pause(reinterpret_cast<const __gm__ void*>(address), at_least, source, queue, std::int32_t(stage));
            seen = read_word<std::uint64_t>(address);
        }
        return seen;
    }

    // Rows of a leg: the word of this round on each queue that signals.
    HAL_AICORE void wait_arrival(const Arrival& arrival, std::int32_t source, Stage stage) {
        if (s.completion == Completion::flag_in_block) return;
        const std::int32_t signals = s.completion == Completion::strong_last ? 1 : used_qps();
        for (std::int32_t q = 0; q < signals; ++q) {
            const std::uint64_t bound = hal_signal_value(arrival.word & ~std::uint64_t{1});
            check_word(wait(hal_poll_offset(arrival.slot[q], kSlotStride), bound, source, q, stage), arrival.word,
                       source, stage);
        }
    }
    // The lowest bit says whether weights travel with the rows; both ends must agree.
    HAL_AICORE void check_word(std::uint64_t seen, std::uint64_t word, std::int32_t source, Stage stage) {
        if ((seen ^ word) == 1) fail(Failure::weights, source, 0, stage, word, seen);
    }

    // ---- control messages: queue 0, a completion entry each ----

    HAL_AICORE std::uint64_t word_offset(Word kind, std::uint64_t round) const {
        return st.words +
               (std::uint64_t(kind) * std::uint64_t(s.num_buffers) + round % std::uint64_t(s.num_buffers)) * 64;
    }
    // The engine reads the value when it gets there, so it is stored once, before a barrier, and stays until quiet.
    HAL_AICORE void stage_word(Word kind, std::uint64_t round, std::uint64_t value) {
        write_word<std::uint64_t>(at(word_offset(kind, round)), value);
    }
    HAL_AICORE void put_control(std::int32_t peer, std::uint64_t dst, std::uint64_t src, std::uint32_t bytes) {
        aclshmemx_udma_qp_put_nbi<std::uint8_t, PIPE_MTE3, kRowLastOfBatch>(
            reinterpret_cast<Gm>(at(dst)), reinterpret_cast<Gm>(at(src)), signal_scratch<std::uint8_t>(), bytes, peer,
            0U, EVENT_ID5);
    }
    HAL_AICORE void signal(std::int32_t peer, std::int32_t queue, std::uint64_t slot, std::uint64_t source_word) {
        aclshmemx_udma_qp_put_nbi<std::uint64_t, PIPE_MTE3, kStrong>(
            reinterpret_cast<__gm__ std::uint64_t*>(at(slot)), reinterpret_cast<__gm__ std::uint64_t*>(at(source_word)),
            signal_scratch<std::uint64_t>(), 1U, peer, std::uint32_t(queue), EVENT_ID5);
        ++signals;
    }

    // Everything this core posted with completion entries has arrived; its sources are free.
    HAL_AICORE void quiet_own_peers() {
        for (std::int32_t p = 0; p < s.ranks; ++p) {
            if (p == me || !mine(p)) continue;
            for (std::int32_t q = 0; q < used_qps(); ++q) aclshmemx_udma_qp_quiet(p, std::uint32_t(q));
        }
    }

    template <class T>
    HAL_AICORE AscendC::LocalTensor<T> id_tile() const {
        return id_buffer_.Get<T>();
    }

    // Adds this launch's counters to the core's line.
    HAL_AICORE void finish() {
        const auto counter = global<std::uint64_t>(status_address(block) + 64);
        const std::uint64_t values[5] = {data_bytes, flag_bytes, signals * 8, rows, signals};
        for (std::uint32_t i = 0; i < 5; ++i) counter.SetValue(i, counter.GetValue(i) + values[i]);
        dcci_cacheline(reinterpret_cast<__gm__ void*>(status_address(block) + 64));
    }

    const EpArgs a;
    const EpShape s;
    BufferLayout l;
    StageLayout st;
    std::int32_t me, node, block, blocks;
    Bytes tile;
    AscendC::LocalTensor<std::int32_t> counters;  // one for each destination, then one for each node
    AscendC::LocalTensor<std::int32_t> small;     // 256 words
    std::uint64_t data_bytes = 0, flag_bytes = 0, rows = 0, signals = 0;
    AscendC::TPipe pipe_;

  private:
    template <class T>
    HAL_AICORE __ubuf__ T* signal_scratch() const {
        return reinterpret_cast<__ubuf__ T*>(signal_buffer_.Get<std::uint8_t>().GetPhyAddr());
    }
    HAL_AICORE std::uint64_t status_address(std::int32_t b) const {
        return a.status + std::uint64_t(b) * sizeof(Status);
    }

    AscendC::TBuf<AscendC::TPosition::VECCALC> tile_buffer_, id_buffer_, counter_buffer_, small_buffer_;
    AscendC::TBuf<AscendC::TPosition::VECOUT> signal_buffer_;
    bool failed_ = false;
    std::uint32_t phase_ = 0;
};

}  // namespace hal::ascend
