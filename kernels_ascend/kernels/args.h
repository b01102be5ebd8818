// SPDX-License-Identifier: Apache-2.0
// What one launch is told, and what each core says back. Plain data in global memory, written and read by the host.
#pragma once
#include <cstdint>

#include "hal/buffer_layout.hpp"

namespace hal::ascend {

// Where this rank keeps what its engine reads: UDMA reads registered memory only, so sources are staged behind the
// symmetric window of hal/buffer_layout.hpp. One staging suffices where completion entries say that it is free; without
// them there is one for each round in flight.
struct StageLayout {
    std::uint64_t words;   // signal values: [kinds][num_buffers], 64 bytes apart
    std::uint64_t counts;  // schedule latency: [depth][ranks][counts_bytes]
    RowArea tokens;        // dispatched rows by token, depth times
    RowArea returned;      // combined rows as received, depth times
    RowArea partial;       // hierarchical: sums for other nodes' homes, depth times
    std::uint64_t depth, total;
};

enum class Word : std::uint8_t { ready, counts, rows, exit, gather, home, credit, end };

HAL_FN StageLayout stage_layout(const BufferLayout& l) {
    const EpShape& s = l.shape;
    StageLayout st{};
    st.depth = s.completion == Completion::strong_signal_no_cqe ? std::uint64_t(s.num_buffers) : 1;
    std::uint64_t at = l.total;
    st.words = at;
    at += RowArea::plane(std::uint64_t(Word::end) * std::uint64_t(s.num_buffers) * 64);
    st.counts = at;
    at += RowArea::plane(st.depth * std::uint64_t(s.ranks) * l.counts_bytes);
    const std::int64_t back = 4 * return_weights(s);
    st.tokens = row_area(s, s.max_tokens, s.row_bytes, meta_bytes(s));
    st.returned = row_area(s, receive_rows(s), s.combine_row_bytes, back);
    st.partial = row_area(s, other_nodes_rows(s), s.combine_row_bytes, back);
    RowArea* areas[] = {&st.tokens, &st.returned, &st.partial};
    for (RowArea* a : areas) {
        a->offset = at;
        at += st.depth * a->bytes();
    }
    st.total = at;
    return st;
}

// A handle's routing, in this rank's private device memory.
struct RouteMemory {
    std::uint64_t ids;          // [max_tokens, k] int32, global
    std::uint64_t counts;       // [ranks][header_bytes]: every rank's header (not schedule latency)
    std::uint64_t messages;     // [ranks][counts_bytes] (schedule latency)
    std::uint64_t forward_ids;  // [other nodes][max_tokens, k]
    std::uint64_t rows;         // int64: rows received, gaps included
};

// A dispatch's weights, in private device memory.
struct WeightMemory {
    std::uint64_t home;     // [max_tokens, k]
    std::uint64_t forward;  // [other nodes][max_tokens, k]
};

struct EpArgs {
    EpShape shape;
    std::int32_t rank;
    std::int32_t queues;   // for rows; hand-written descriptors use the QPs behind them
    std::uint64_t window;  // address of this rank's window
    std::uint64_t timeout_cycles;
    std::uint64_t epoch;
    std::uint32_t slot;  // receive slot offered
    std::uint32_t reuse, tag;
    std::int32_t tokens;
    std::uint32_t int64_ids, weighted, returns_weights, known;
    std::int32_t element;                     // 0 bfloat16, 1 float16, 2 float32
    std::uint64_t finished_before, finished;  // combine rounds, for the credit
    RouteMemory route;
    WeightMemory weights;
    std::uint64_t offered;    // [ranks] ready words of this round
    std::uint64_t raw_heads;  // [2 operations][num_buffers][ranks][2] uint32
    std::uint64_t dirty;      // [num_buffers][ranks * groups] int32 (schedule latency)
    std::uint64_t status;     // [cores] Status
    // inputs
    std::uint64_t x, topk_idx, topk_weights, scales, bias[2];
    // outputs
    std::uint64_t out_scales, out_idx, out_weights, out_tokens_per_expert, out_offsets, out_y;
};

enum class Failure : std::uint32_t { none, timeout, reuse, tag, weights, expert_id, duplicate_expert, ring };

// Names of waits; the host's table is launch/ep_host.cpp's.
enum class Stage : std::int32_t {
    dispatch_ready,
    dispatch_counts,
    dispatch_rows,
    dispatch_rail,
    dispatch_exit,
    combine_credit,
    combine_gather,
    combine_rows,
    combine_exit,
    end
};

// One cache line of findings and one of counters for each core.
struct Status {
    Failure failure;
    std::uint32_t phase;  // how many barriers of the launch the core had passed
    std::int32_t rank, queue, stage, unused;
    std::uint64_t expected, seen;
    std::uint64_t padding[3];
    std::uint64_t data_bytes, flag_bytes, signal_bytes, rows, signals, more[3];
};
static_assert(sizeof(Status) == 128);

}  // namespace hal::ascend
