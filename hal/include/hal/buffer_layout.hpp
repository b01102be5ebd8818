// SPDX-License-Identifier: Apache-2.0
// Where everything lies in an ExpertParallel's symmetric window: the one formula behind `buffer_bytes` and `hal size`.
// Offsets are bytes from the window's start and the same on every rank.
//
//   signals   8-byte slots, signal_stride apart
//   headers   counts of each source, two rounds deep
//   counts    schedule latency: each source's counts to this rank, for each receive slot
//   receive   num_buffers slots of rows in their final place
//   rail      hierarchical: rows from other nodes waiting to be forwarded, for each receive slot
//   gather    hierarchical: rows of this node waiting to be summed for other nodes' homes, num_buffers deep
//   home      combined rows coming back, num_buffers deep
#pragma once
#include <cstdint>

#include "hal/blocks.hpp"
#include "hal/shape.hpp"

namespace hal {

// `rows` rows in separate planes (payload, then what travels beside it), and blocks when completion is flag_in_block.
struct RowArea {
    std::uint64_t offset, rows;
    std::uint64_t x_bytes, meta_bytes, block_row_bytes;  // of one row

    HAL_FN std::uint64_t x(std::uint64_t row) const { return offset + row * x_bytes; }
    HAL_FN std::uint64_t meta(std::uint64_t row) const { return offset + plane(rows * x_bytes) + row * meta_bytes; }
    HAL_FN std::uint64_t blocks(std::uint64_t row) const {
        return offset + plane(rows * x_bytes) + plane(rows * meta_bytes) + row * block_row_bytes;
    }
    HAL_FN std::uint64_t bytes() const {
        return plane(rows * x_bytes) + plane(rows * meta_bytes) + rows * block_row_bytes;
    }
    HAL_FN static std::uint64_t plane(std::uint64_t n) {
        return std::uint64_t(align_up(std::int64_t(n), block_bytes()));
    }
};

HAL_FN RowArea row_area(const EpShape& s, std::int64_t rows, std::int64_t x_bytes, std::int64_t meta) {
    const std::int64_t blocks =
        s.completion == Completion::flag_in_block ? blocks_of(x_bytes + meta) * block_bytes() : 0;
    return {0, std::uint64_t(rows), std::uint64_t(x_bytes), std::uint64_t(meta), std::uint64_t(blocks)};
}

// Signal slots. Each has one publisher, so none is ever written by two ranks. Those from `counts` to `home` exist for each
// slot of the areas that they speak of and for each of two queues, so rounds in flight never share one.
enum class Sig : std::uint8_t {
    ready,   // [2][ranks]: opens a dispatch round
    counts,  // [ranks]: schedule latency, source's counts are here
    rows,    // [ranks]: source's rows are in their final place
    rail,    // [ranks]: source's rows are in the rail area
    exit,    // [ranks]: that rank has received the round; no source is still read
    gather,  // [ranks]: a node member's rows are in the gather area
    home,    // [ranks]: rows are back home
    credit,  // [ranks]: the last combine round that rank has finished
    agreed,  // [ranks]: how many rounds that rank holds all rows of; at the own index: how many have ended here
    end,
};

struct BufferLayout {
    EpShape shape;
    std::uint64_t headers, header_bytes;
    std::uint64_t counts, counts_bytes;
    RowArea receive, rail, gather, home;
    std::uint64_t total;

    HAL_FN static std::uint64_t slots_before(const EpShape& s, Sig kind) {
        const std::uint64_t r = std::uint64_t(s.ranks), b = std::uint64_t(s.num_buffers);
        const std::uint64_t staged = 2 * b * r, agreed = s.agreed ? r : 0,
                            n[] = {2 * r, staged, staged, staged, staged, staged, staged, r, agreed};
        std::uint64_t sum = 0;
        for (int i = 0; i < int(kind); ++i) sum += n[i];
        return sum;
    }
    HAL_FN std::uint64_t signal(Sig kind, std::uint64_t index) const {
        return (slots_before(shape, kind) + index) * std::uint64_t(shape.signal_stride);
    }
    HAL_FN std::uint64_t ready(std::uint64_t epoch, int source) const {
        return signal(Sig::ready, (epoch & 1) * std::uint64_t(shape.ranks) + std::uint64_t(source));
    }
    HAL_FN std::uint64_t staged(Sig kind, std::uint64_t slot, int source, int queue) const {
        return signal(kind, (slot * std::uint64_t(shape.ranks) + std::uint64_t(source)) * 2 + std::uint64_t(queue));
    }
    HAL_FN std::uint64_t header(std::uint64_t epoch, int source) const {
        return headers + ((epoch & 1) * std::uint64_t(shape.ranks) + std::uint64_t(source)) * header_bytes;
    }
    HAL_FN std::uint64_t count_message(std::uint64_t slot, int source) const {
        return counts + (slot * std::uint64_t(shape.ranks) + std::uint64_t(source)) * counts_bytes;
    }
    HAL_FN static RowArea nth(RowArea a, std::uint64_t slot) {
        a.offset += slot * a.bytes();
        return a;
    }
};

HAL_FN BufferLayout buffer_layout(const EpShape& s) {
    BufferLayout l{};
    l.shape = s;
    const std::uint64_t ranks = std::uint64_t(s.ranks), depth = std::uint64_t(s.num_buffers);
    std::uint64_t at = RowArea::plane(BufferLayout::slots_before(s, Sig::end) * std::uint64_t(s.signal_stride));
    const bool latency = s.schedule == Schedule::latency, two_level = is_hierarchical(s);

    l.headers = at;
    l.header_bytes = latency ? 0 : std::uint64_t(align_up(4 * header_ints(s), 64));
    at += RowArea::plane(2 * ranks * l.header_bytes);
    l.counts = at;
    l.counts_bytes = latency ? std::uint64_t(align_up(4 * (1 + groups(s)), 64)) : 0;
    at += RowArea::plane(depth * ranks * l.counts_bytes);

    const std::int64_t back = 4 * return_weights(s),
                       gather_rows = two_level ? (s.nodes - 1) * direct_return_rows(s) : 0;
    l.receive = row_area(s, receive_rows(s), s.row_bytes, meta_bytes(s));
    l.rail = row_area(s, other_nodes_rows(s), s.row_bytes, meta_bytes(s));
    l.gather = row_area(s, gather_rows, s.combine_row_bytes, back);
    l.home = row_area(s, direct_return_rows(s) + other_nodes_rows(s), s.combine_row_bytes, back);
    RowArea* areas[] = {&l.receive, &l.rail, &l.gather, &l.home};
    for (RowArea* a : areas) {
        a->offset = at;
        at += depth * a->bytes();
    }
    l.total = at;
    return l;
}

// The breakdown that `hal size` prints. Bytes of part `i`, which adds up to `total`; names in the order of the comment above.
HAL_FN constexpr int buffer_parts() { return 7; }
HAL_FN const char* buffer_part_name(int i) {
    constexpr const char* names[] = {"signals", "headers", "counts", "receive", "rail", "gather", "home"};
    return names[i];
}
HAL_FN std::uint64_t buffer_part_bytes(const BufferLayout& l, int i) {
    const std::uint64_t start[] = {
        0, l.headers, l.counts, l.receive.offset, l.rail.offset, l.gather.offset, l.home.offset, l.total};
    return start[i + 1] - start[i];
}

}  // namespace hal
