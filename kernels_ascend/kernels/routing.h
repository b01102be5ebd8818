// SPDX-License-Identifier: Apache-2.0
// Tokens' expert ids in order, and where rows of one owner or of one source lie. No lists are kept: both ends walk the same
// ids and count, so they number rows alike (hal/placement.hpp states the sums).
#pragma once
#include "core.h"

namespace hal::ascend {

// Expert ids of tokens, a tile at a time. `wide` ids are 64-bit in memory.
class Ids {
  public:
    HAL_AICORE Ids(Core& core, std::uint64_t address, std::int32_t tokens, bool wide = false)
        : core_(core), address_(address), tokens_(tokens), k_(core.s.top_k), wide_(wide) {}
    HAL_AICORE std::int32_t tokens() const { return tokens_; }

    HAL_AICORE std::int64_t at(std::int32_t token, std::int32_t j) {
        if (token < first_ || token >= end_) fetch(token);
        const std::uint32_t i = std::uint32_t((token - first_) * k_ + j);
        return wide_ ? core_.id_tile<std::int64_t>().GetValue(i) : core_.id_tile<std::int32_t>().GetValue(i);
    }

  private:
    HAL_AICORE void fetch(std::int32_t token) {
        first_ = token;
        end_ = std::int32_t(smaller(tokens_, token + std::int32_t(kIdTile) / k_));
        const std::uint32_t n = std::uint32_t((end_ - first_) * k_);
        const std::uint64_t from = address_ + std::uint64_t(first_) * std::uint64_t(k_) * (wide_ ? 8 : 4);
        if (wide_)
            load(core_.id_tile<std::int64_t>(), from, n);
        else
            load(core_.id_tile<std::int32_t>(), from, n);
    }

    Core& core_;
    const std::uint64_t address_;
    const std::int32_t tokens_, k_;
    const bool wide_;
    std::int32_t first_ = 0, end_ = 0;
};

// One row of one token.
struct Stop {
    std::int32_t destination, position;
};

// The stops of a token among destinations [first, end), in the order in which combine sums them: layout rank by ascending
// rank, layout expert by top-k position. Gives how many.
HAL_AICORE std::int32_t stops_of(Core& core, Ids& ids, std::int32_t token, std::int32_t first, std::int32_t end,
                                 Stop (&stops)[kMaxTopK]) {
    std::int32_t n = 0;
    const bool by_rank = core.s.layout == Layout::rank;
    for (std::int32_t j = 0; j < core.s.top_k; ++j) {
        const std::int64_t id = ids.at(token, j);
        if (id < 0) continue;
        const std::int32_t d = destination_of(core.s, std::int32_t(id));
        if (d < first || d >= end) continue;
        std::int32_t at = n;
        bool known = false;
        for (std::int32_t i = 0; by_rank && i < n; ++i) known = known || stops[i].destination == d;
        if (known) continue;
        while (by_rank && at > 0 && stops[at - 1].destination > d) {
            stops[at] = stops[at - 1];
            --at;
        }
        stops[at] = {d, j};
        ++n;
    }
    return n;
}

// What every source sends to one owner's groups: [ranks][groups] counts, and where the groups start.
class Columns {
  public:
    HAL_AICORE explicit Columns(Core& core) : core_(core) {
        const std::uint32_t g = std::uint32_t(groups(core.s));
        // Each source's row starts on a 32-byte boundary of scratch, as copies want it.
        stride_ = (g + 7) / 8 * 8;
        core.pipe_.InitBuffer(counts_buffer_, std::uint32_t(core.s.ranks) * stride_ * 4);
        core.pipe_.InitBuffer(start_buffer_, (g + 1) * 8);
        counts_ = counts_buffer_.Get<std::int32_t>();
        starts_ = start_buffer_.Get<std::int64_t>();
    }

    HAL_AICORE void load_owner(std::int32_t owner) {
        const EpShape& s = core_.s;
        const std::int32_t g = groups(s);
        for (std::int32_t source = 0; source < s.ranks; ++source)
            load(counts_[std::uint32_t(source) * stride_],
                 core_.a.route.counts + std::uint64_t(source) * core_.l.header_bytes + 4 * std::uint64_t(owner * g),
                 std::uint32_t(g));
        std::int64_t start = 0;
        for (std::int32_t i = 0; i < g; ++i) {
            starts_.SetValue(std::uint32_t(i), start);
            const std::int64_t rows = before(s.ranks, i);
            start += s.layout == Layout::rank ? rows : align_up(rows, s.alignment);
        }
        starts_.SetValue(std::uint32_t(g), start);
    }

    HAL_AICORE std::int32_t count(std::int32_t source, std::int32_t group) const {
        return counts_.GetValue(std::uint32_t(source) * stride_ + std::uint32_t(group));
    }
    HAL_AICORE std::int64_t before(std::int32_t source, std::int32_t group) const {
        std::int64_t sum = 0;
        for (std::int32_t r = 0; r < source; ++r) sum += count(r, group);
        return sum;
    }
    HAL_AICORE std::int64_t start(std::int32_t group) const { return starts_.GetValue(std::uint32_t(group)); }
    HAL_AICORE std::int64_t place(std::int32_t source, std::int32_t group) const {
        return start(group) + before(source, group);
    }
    HAL_AICORE std::int64_t rows_of(std::int32_t source) const {
        std::int64_t sum = 0;
        for (std::int32_t g = 0; g < groups(core_.s); ++g) sum += count(source, g);
        return sum;
    }

  private:
    Core& core_;
    std::uint32_t stride_;
    AscendC::TBuf<AscendC::TPosition::VECCALC> counts_buffer_, start_buffer_;
    AscendC::LocalTensor<std::int32_t> counts_;
    AscendC::LocalTensor<std::int64_t> starts_;
};

// Sum of `home`'s rows to destinations [first, until), from its header.
HAL_AICORE std::int64_t rows_between(Core& core, std::int32_t home, std::int32_t first, std::int32_t until) {
    std::int64_t sum = 0;
    for (std::int32_t d = first; d < until; d += 256) {
        const std::int32_t n = std::int32_t(smaller(256, until - d));
        load(core.small, core.a.route.counts + std::uint64_t(home) * core.l.header_bytes + 4 * std::uint64_t(d),
             std::uint32_t(n));
        for (std::int32_t i = 0; i < n; ++i) sum += core.small.GetValue(std::uint32_t(i));
    }
    return sum;
}

// Tokens of `source` that cross to this node.
HAL_AICORE std::int32_t crossed_from(Core& core, std::int32_t source) {
    return read_word<std::int32_t>(core.a.route.counts + std::uint64_t(source) * core.l.header_bytes +
                                   4 * std::uint64_t(destinations(core.s) + core.node));
}

// Rows that this rank received from one source for one group, and where combine returns them.
struct Received {
    std::int64_t place, count, back;
};

// For one source, group by group in ascending order.
class ReceivedFrom {
  public:
    HAL_AICORE ReceivedFrom(Core& core, const Columns& own, std::int32_t source)
        : core_(core), own_(own), source_(source) {
        const EpShape& s = core.s;
        if (s.schedule == Schedule::latency) {
            back_ = read_word<std::int32_t>(message(0));
            return;
        }
        const bool near = core.near(source);
        // Rows from other nodes go back through this node's gather area, after those of lower nodes.
        back_ = near ? 0 : gather_base(s, node_of(s, source), core.node);
        back_ += rows_between(core, source, core.first_near(), core.me * groups(s));
    }
    HAL_AICORE Received next() {
        const std::int32_t g = group_++;
        const bool fixed = core_.s.schedule == Schedule::latency;
        Received r;
        r.place = fixed ? fixed_place(core_.s, g, source_) : own_.place(source_, g);
        r.count = fixed ? read_word<std::int32_t>(message(1 + g)) : own_.count(source_, g);
        r.back = back_;
        back_ += r.count;
        return r;
    }

  private:
    HAL_AICORE std::uint64_t message(std::int32_t i) const {
        return core_.a.route.messages + std::uint64_t(source_) * core_.l.counts_bytes + 4 * std::uint64_t(i);
    }
    Core& core_;
    const Columns& own_;
    const std::int32_t source_;
    std::int32_t group_ = 0;
    std::int64_t back_;
};

}  // namespace hal::ascend
