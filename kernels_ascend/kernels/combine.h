// SPDX-License-Identifier: Apache-2.0
// Combine on vector cores: rows go back to their home in the order in which they were sent, and are summed there in a
// fixed order.
//
//   send   wait until the home has finished the round that used this staging before; write the rows; say so
//   recv   [hierarchical, stage 1: sum what this node owes to other nodes' homes; stage 2: send one row for each token];
//          wait for every rank; quiet what was sent; sum; give the credit back
#pragma once
#include "channel.h"
#include "reduce.h"
#include "routing.h"

namespace hal::ascend {

template <Completion C, class T>
class Combine {
  public:
    HAL_AICORE explicit Combine(Core& core) : c_(core), s_(core.s), own_(core), sender_(core), reducer_(core) {
        core.pipe_.InitBuffer(row_buffer_, std::uint32_t(4 * destinations(s_)));
        next_row_ = row_buffer_.Get<std::int32_t>();
    }

    HAL_AICORE void send() {
        c_.quiet_own_peers();  // what an earlier launch staged is read no more
        if (!c_.sync()) return;
        if (s_.schedule != Schedule::latency) own_.load_owner(c_.me);
        if (C == Completion::strong_signal_no_cqe) check_room();
        stage_rows();
        if (c_.block == 0) stage_words();
        if (!c_.sync()) return;
        for (std::int32_t i = 0; i < s_.ranks; ++i) {
            const std::int32_t p = c_.peer(i);
            if (!c_.mine(p) || !c_.near(p)) continue;
            wait_credit(p);
            if (c_.failed()) break;
            if (is_hierarchical(s_)) send_leg(p, true);
            send_leg(p, false);
        }
        for (std::int32_t i = 1; i < s_.ranks && !c_.failed(); ++i) {
            const std::int32_t p = c_.peer(i);
            if (!c_.mine(p) || !c_.near(p)) continue;
            if (is_hierarchical(s_)) sender_.publish(p, arrival(Sig::gather, c_.me));
            sender_.publish(p, arrival(Sig::home, c_.me));
        }
        note_raw_heads(c_, 1, c_.a.epoch);
    }

    HAL_AICORE void recv() {
        if (is_hierarchical(s_) && !send_partials()) return;
        for (std::int32_t i = 1; i < s_.ranks; ++i) {
            const std::int32_t p = c_.peer(i);
            const bool sends = c_.near(p) || rail_of(s_, c_.me, node_of(s_, p)) == p;
            if (sends && c_.mine(p)) receive_from(p);
        }
        if (!c_.sync()) return;
        c_.quiet_own_peers();  // inbound first, then outbound
        sum_home();
        if (c_.block == 0) c_.stage_word(Word::credit, 0, c_.a.finished);
        if (!c_.sync()) return;
        finish();
    }

  private:
    HAL_AICORE std::uint64_t stage() const { return ring_slot(c_.a.epoch, std::uint64_t(s_.num_buffers)); }
    HAL_AICORE RowArea home_area() const { return BufferLayout::nth(c_.l.home, stage()); }
    HAL_AICORE RowArea gather_area() const { return BufferLayout::nth(c_.l.gather, stage()); }
    HAL_AICORE RowArea returned_area() const { return BufferLayout::nth(c_.st.returned, c_.a.epoch % c_.st.depth); }
    HAL_AICORE RowArea partial_area() const { return BufferLayout::nth(c_.st.partial, c_.a.epoch % c_.st.depth); }
    HAL_AICORE std::uint64_t word() const { return rows_word(c_.a.epoch, c_.a.returns_weights != 0); }
    HAL_AICORE Arrival arrival(Sig kind, std::int32_t publisher) const {
        return {{c_.l.staged(kind, stage(), publisher, 0), c_.l.staged(kind, stage(), publisher, 1)},
                word(),
                c_.word_offset(Word::home, c_.a.epoch)};
    }
    // Weights of a row that comes from one rank: layout rank's rows carry all k positions, layout expert's their own.
    HAL_AICORE std::uint32_t row_weights() const { return s_.layout == Layout::rank ? std::uint32_t(s_.top_k) : 1; }
    HAL_AICORE std::uint32_t meta() const { return c_.a.returns_weights ? 4 * row_weights() : 0; }
    HAL_AICORE std::uint32_t partial_meta() const { return c_.a.returns_weights ? 4 * std::uint32_t(s_.top_k) : 0; }
    HAL_AICORE std::int64_t received_rows() const { return read_word<std::int64_t>(c_.a.route.rows); }

    HAL_AICORE void stage_words() { c_.stage_word(Word::home, c_.a.epoch, hal_signal_value(word())); }

    // The caller's rows, registered: x and weights, or blocks.
    HAL_AICORE void stage_rows() {
        const RowArea area = returned_area();
        const std::int64_t rows = received_rows();
        for (std::int64_t n = c_.share_begin(rows); n < c_.share_end(rows); ++n) {
            const std::uint64_t r = std::uint64_t(n), x = c_.a.x + r * area.x_bytes,
                                weights = c_.a.topk_weights + r * meta();
            if constexpr (C == Completion::flag_in_block) {
                pack_blocks(c_, area.blocks(r), x, std::uint32_t(area.x_bytes), weights, meta(), word());
            } else {
                copy(c_.tile, c_.at(area.x(r)), x, area.x_bytes);
                if (meta()) copy(c_.tile, c_.at(area.meta(r)), weights, meta());
            }
        }
    }

    HAL_AICORE void check_room() {
        for (std::int32_t p = 0; p < s_.ranks; ++p) {
            if (!c_.mine(p) || !c_.near(p)) continue;
            std::int64_t rows = rows_for(p);
            for (std::int32_t i = 0; is_hierarchical(s_) && i < s_.nodes - 1; ++i)
                rows += rows_for(rail_of(s_, p, other_node(i, c_.node)));
            require_room(c_, p, rows, 2, meta() != 0);
        }
    }
    HAL_AICORE std::int64_t rows_for(std::int32_t home) {
        std::int64_t rows = 0;
        ReceivedFrom received(c_, own_, home);
        for (std::int32_t g = 0; g < groups(s_); ++g) rows += received.next().count;
        return rows;
    }

    // The staging's last user was round n - depth; its home must have summed it.
    HAL_AICORE void wait_credit(std::int32_t p) {
        const std::uint64_t credit = wanted_credit(c_.a.epoch, std::uint64_t(s_.num_buffers));
        if (credit && p != c_.me)
            c_.wait(c_.l.signal(Sig::credit, std::uint64_t(p)), credit, p, 0, Stage::combine_credit);
    }

    // Rows of the tokens whose home is p, or (gather) of other nodes' tokens whose partial sums p computes.
    HAL_AICORE void send_leg(std::int32_t p, bool gather) {
        const RowArea area = gather ? gather_area() : home_area();
        if (p != c_.me) sender_.open(p, area);
        if (!gather)
            send_rows_of(p, p, area);
        else
            for (std::int32_t i = 0; i < s_.nodes - 1; ++i)
                send_rows_of(p, rail_of(s_, p, other_node(i, c_.node)), area);
        if (p != c_.me) sender_.close(arrival(gather ? Sig::gather : Sig::home, c_.me));
    }
    HAL_AICORE void send_rows_of(std::int32_t p, std::int32_t home, const RowArea& area) {
        ReceivedFrom received(c_, own_, home);
        for (std::int32_t g = 0; g < groups(s_); ++g) {
            const Received r = received.next();
            for (std::int64_t n = 0; n < r.count; ++n) {
                const std::uint64_t from = std::uint64_t(r.place + n), to = std::uint64_t(r.back + n);
                if (p == c_.me)
                    local_row(c_, area, to, c_.a.x + from * area.x_bytes, c_.a.topk_weights + from * meta(), meta());
                else
                    sender_.row(to, source_of(returned_area(), from, meta()));
            }
        }
    }

    // ---- hierarchical, stages 1 and 2 ----

    HAL_AICORE bool send_partials() {
        own_.load_owner(c_.me);
        const std::int32_t first = c_.node * node_ranks(s_);
        for (std::int32_t p = first; p < first + node_ranks(s_); ++p)
            if (p != c_.me && c_.mine(p)) receive_gather(p);
        if (!c_.sync()) return false;
        for (std::int32_t i = 1; i < s_.nodes; ++i) sum_partials((c_.node + i) % s_.nodes);
        if (!c_.sync()) return false;
        for (std::int32_t i = 1; i < s_.nodes; ++i) {
            const std::int32_t node = (c_.node + i) % s_.nodes, home = rail_of(s_, c_.me, node);
            if (c_.mine(home)) send_partial(node, home);
        }
        for (std::int32_t i = 1; i < s_.nodes; ++i) {
            const std::int32_t home = rail_of(s_, c_.me, (c_.node + i) % s_.nodes);
            if (c_.mine(home) && !c_.failed()) sender_.publish(home, arrival(Sig::home, c_.me));
        }
        note_raw_heads(c_, 1, c_.a.epoch);
        return c_.sync();
    }

    // First row in the gather area of `home`'s rows to this node, in `next_row`, for each of the node's destinations.
    HAL_AICORE void load_gather_rows(std::int32_t home) {
        load_next_rows(home, gather_base(s_, node_of(s_, home), c_.node));
    }
    HAL_AICORE void load_next_rows(std::int32_t home, std::int64_t base) {
        const std::int32_t first = c_.first_near(), n = c_.end_near() - first;
        const std::uint64_t counts = s_.schedule == Schedule::latency
                                         ? c_.a.route.counts
                                         : c_.a.route.counts + std::uint64_t(home) * c_.l.header_bytes;
        load(next_row_, counts + 4 * std::uint64_t(first), std::uint32_t(n));
        std::int64_t row = base;
        for (std::int32_t i = 0; i < n; ++i) {
            const std::int32_t count = next_row_.GetValue(std::uint32_t(i));
            next_row_.SetValue(std::uint32_t(i), std::int32_t(row));
            row += count;
        }
    }
    HAL_AICORE std::int32_t take_row(std::int32_t destination) {
        const std::uint32_t i = std::uint32_t(destination - c_.first_near());
        const std::int32_t row = next_row_.GetValue(i);
        next_row_.SetValue(i, row + 1);
        return row;
    }

    HAL_AICORE void receive_gather(std::int32_t p) {
        const Arrival in = arrival(Sig::gather, p);
        c_.wait_arrival(in, p, Stage::combine_gather);
        if (C != Completion::flag_in_block) return;
        for (std::int32_t i = 0; i < s_.nodes - 1; ++i) {
            const std::int32_t home = rail_of(s_, c_.me, other_node(i, c_.node)), g = groups(s_);
            const std::int64_t base =
                gather_base(s_, node_of(s_, home), c_.node) + rows_between(c_, home, c_.first_near(), p * g);
            unpack_rows(c_, gather_area(), std::uint64_t(base),
                        std::uint64_t(rows_between(c_, home, p * g, (p + 1) * g)), meta(), in.word, p,
                        Stage::combine_gather);
        }
    }

    HAL_AICORE std::uint64_t forward_ids(std::int32_t node) const {
        return c_.a.route.forward_ids + 4 * std::uint64_t(rail_base(s_, node, c_.node)) * std::uint64_t(s_.top_k);
    }

    // Stage 1: one sum for each token that crossed from `node`, rounded for the wire.
    HAL_AICORE void sum_partials(std::int32_t node) {
        const std::int32_t home = rail_of(s_, c_.me, node), tokens = crossed_from(c_, home);
        const std::uint64_t base = std::uint64_t(rail_base(s_, node, c_.node)), k = std::uint64_t(s_.top_k);
        const RowArea area = partial_area();
        Ids ids(c_, forward_ids(node), tokens);
        load_gather_rows(home);
        Stop stops[kMaxTopK];
        for (std::int32_t t = 0; t < tokens; ++t) {
            const std::int32_t n = stops_of(c_, ids, t, c_.first_near(), c_.end_near(), stops);
            const bool here = t % c_.blocks == c_.block;  // all cores count, each sums its own
            Terms terms;
            const std::uint64_t row = base + std::uint64_t(t), weights = c_.a.weights.forward + 4 * row * k;
            if (here && partial_meta()) clear(c_.tile, c_.at(area.meta(row)), partial_meta());
            for (std::int32_t i = 0; i < n; ++i) {
                const std::uint64_t from = std::uint64_t(take_row(stops[i].destination));
                if (!here) continue;
                terms.add(c_.at(gather_area().x(from)), c_.a.weighted ? weight_at(weights, stops[i].position) : 1.0F);
                if (partial_meta())
                    copy_weights(ids, t, stops[i], c_.at(gather_area().meta(from)), c_.at(area.meta(row)));
            }
            const std::uint64_t no_bias[2] = {0, 0};
            if (!here) continue;
            reducer_.sum(terms, c_.a.weighted != 0, no_bias, area.x_bytes, c_.at(area.x(row)));
            if constexpr (C == Completion::flag_in_block)
                pack_blocks(c_, area.blocks(row), c_.at(area.x(row)), std::uint32_t(area.x_bytes),
                            c_.at(area.meta(row)), partial_meta(), word());
        }
    }

    HAL_AICORE void send_partial(std::int32_t node, std::int32_t home) {
        const std::int32_t tokens = crossed_from(c_, home);
        const std::uint64_t base = std::uint64_t(rail_base(s_, node, c_.node)),
                            to = std::uint64_t(partial_base(s_, c_.node, node));
        wait_credit(home);  // send() waited for this node's homes only
        require_room(c_, home, tokens, 1, partial_meta() != 0);
        if (c_.failed()) return;
        sender_.open(home, home_area());
        for (std::int32_t t = 0; t < tokens; ++t)
            sender_.row(to + std::uint64_t(t), source_of(partial_area(), base + std::uint64_t(t), partial_meta()));
        sender_.close(arrival(Sig::home, c_.me));
    }

    // ---- the home ----

    HAL_AICORE void receive_from(std::int32_t p) {
        const Arrival in = arrival(Sig::home, p);
        c_.wait_arrival(in, p, Stage::combine_rows);
        if (C != Completion::flag_in_block) return;
        const std::int32_t first = c_.first_near(), g = groups(s_);
        if (!c_.near(p)) {
            const std::int32_t node = node_of(s_, p);
            const std::int32_t crossed =
                read_word<std::int32_t>(c_.a.route.counts + std::uint64_t(c_.me) * c_.l.header_bytes +
                                        4 * std::uint64_t(destinations(s_) + node));
            return unpack_rows(c_, home_area(), std::uint64_t(partial_base(s_, node, c_.node)), std::uint64_t(crossed),
                               partial_meta(), in.word, p, Stage::combine_rows);
        }
        const std::int32_t me = s_.schedule == Schedule::latency ? 0 : c_.me;  // where the own header lies in `counts`
        unpack_rows(c_, home_area(), std::uint64_t(rows_between(c_, me, first, p * g)),
                    std::uint64_t(rows_between(c_, me, p * g, (p + 1) * g)), meta(), in.word, p, Stage::combine_rows);
    }

    // Every term of every token, nodes ascending; within this node, and without nodes, in the routing's own order.
    HAL_AICORE void sum_home() {
        const RowArea area = home_area();
        Ids ids(c_, c_.a.route.ids, c_.a.tokens);
        load_next_rows(c_.me, 0);
        for (std::int32_t n = 0; is_hierarchical(s_) && n < s_.nodes; ++n) c_.small.SetValue(128 + std::uint32_t(n), 0);
        for (std::int32_t t = 0; t < c_.a.tokens; ++t) sum_token(ids, t, area, t % c_.blocks == c_.block);
    }

    HAL_AICORE void sum_token(Ids& ids, std::int32_t t, const RowArea& area, bool here) {
        const std::uint64_t k4 = 4 * std::uint64_t(s_.top_k), row_bytes = area.x_bytes, at = std::uint64_t(t);
        const std::uint64_t out_weights = c_.a.returns_weights ? c_.a.out_weights + at * k4 : 0;
        Terms terms;
        Stop stops[kMaxTopK];
        if (here && out_weights) clear(c_.tile, out_weights, k4);
        for (std::int32_t node = 0; node < s_.nodes; ++node) {
            if (is_hierarchical(s_) && node != c_.node) {
                add_partial(ids, t, node, area, here, terms, out_weights, stops);
                continue;
            }
            const std::int32_t n = stops_of(c_, ids, t, c_.first_near(), c_.end_near(), stops);
            terms.inner_begin = terms.count;
            for (std::int32_t i = 0; i < n; ++i) {
                const std::uint64_t row = std::uint64_t(take_row(stops[i].destination));
                if (!here) continue;
                terms.add(c_.at(area.x(row)),
                          c_.a.weighted ? weight_at(c_.a.weights.home + at * k4, stops[i].position) : 1.0F);
                if (out_weights) copy_weights(ids, t, stops[i], c_.at(area.meta(row)), out_weights);
            }
            terms.inner_end = terms.count;
            if (!is_hierarchical(s_)) break;
        }
        if (!here) return;
        if (!is_hierarchical(s_)) terms.inner_begin = terms.inner_end = 0;  // one flat sum
        const std::uint64_t bias[2] = {c_.a.bias[0] ? c_.a.bias[0] + at * row_bytes : 0,
                                       c_.a.bias[1] ? c_.a.bias[1] + at * row_bytes : 0};
        reducer_.sum(terms, c_.a.weighted != 0, bias, row_bytes, c_.a.out_y + at * row_bytes);
    }

    // Another node's partial sum, already weighted and rounded. Its rows lie in the order of the tokens that crossed.
    HAL_AICORE void add_partial(Ids& ids, std::int32_t t, std::int32_t node, const RowArea& area, bool here,
                                Terms& terms, std::uint64_t out_weights, Stop (&stops)[kMaxTopK]) {
        const std::int32_t first = node * node_destinations(s_);
        const std::int32_t n = stops_of(c_, ids, t, first, first + node_destinations(s_), stops);
        if (n == 0) return;
        const std::uint32_t counter = 128 + std::uint32_t(node);
        const std::int32_t nth = c_.small.GetValue(counter);
        c_.small.SetValue(counter, nth + 1);
        if (!here) return;
        const std::uint64_t row = std::uint64_t(partial_base(s_, node, c_.node) + nth);
        terms.add(c_.at(area.x(row)), 1.0F);
        for (std::int32_t i = 0; out_weights && i < n; ++i)
            copy_weights(ids, t, stops[i], c_.at(area.meta(row)), out_weights, true);
    }

    HAL_AICORE float weight_at(std::uint64_t weights, std::int32_t position) {
        return read_word<float>(weights + 4 * std::uint64_t(position));
    }

    // Weights that came back with a row, each to its position. `whole`: the row carries all k positions.
    HAL_AICORE void copy_weights(Ids& ids, std::int32_t t, const Stop& stop, std::uint64_t from, std::uint64_t to,
                                 bool whole = false) {
        if (s_.layout == Layout::expert)
            return copy(c_.tile, to + 4 * std::uint64_t(stop.position),
                        from + (whole ? 4 * std::uint64_t(stop.position) : 0), 4);
        for (std::int32_t j = 0; j < s_.top_k; ++j) {
            const std::int64_t id = ids.at(t, j);
            if (id >= 0 && destination_of(s_, std::int32_t(id)) == stop.destination)
                copy(c_.tile, to + 4 * std::uint64_t(j), from + 4 * std::uint64_t(j), 4);
        }
    }

    // The credit says "this round and all before", so a round that is received early waits for its turn.
    HAL_AICORE void finish() {
        if (c_.a.finished == c_.a.finished_before) return;
        for (std::int32_t i = 1; i < s_.ranks; ++i)
            if (c_.mine(c_.peer(i)))
                c_.signal(c_.peer(i), 0, c_.l.signal(Sig::credit, std::uint64_t(c_.me)),
                          c_.word_offset(Word::credit, 0));
        if (C != Completion::strong_signal_no_cqe) return;
        // Without completion entries, everyone's credit is what says that sources and ring are free.
        for (std::int32_t i = 1; i < s_.ranks; ++i) {
            const std::int32_t p = c_.peer(i);
            if (!c_.mine(p)) continue;
            c_.wait(c_.l.signal(Sig::credit, std::uint64_t(p)), c_.a.finished, p, 0, Stage::combine_exit);
            if (!c_.failed()) reclaim_raw(c_, 1, c_.a.finished, p);
        }
        c_.sync();
    }

    Core& c_;
    const EpShape& s_;
    Columns own_;
    RowSender<C> sender_;
    Reducer<T> reducer_;
    AscendC::TBuf<AscendC::TPosition::VECCALC> row_buffer_;
    AscendC::LocalTensor<std::int32_t> next_row_;
};

}  // namespace hal::ascend
