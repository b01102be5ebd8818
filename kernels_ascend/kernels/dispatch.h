// SPDX-License-Identifier: Apache-2.0
// Dispatch on vector cores: every row goes straight to its final place at the ranks that own its experts.
//
//   send   offer a receive slot and say this rank's counts to every peer; with all peers' counts every final row follows
//          by prefix sums; write the rows, then say that they are there
//   recv   [hierarchical: forward what crossed from other nodes]; wait for every source; quiet what was sent; hand out
//          ids and weights
//
// What makes reuse of memory safe is stated in kernels_host/ep/dispatch.hpp, whose messages these are.
#pragma once
#include "channel.h"
#include "routing.h"

namespace hal::ascend {

template <Completion C>
class Dispatch {
  public:
    HAL_AICORE explicit Dispatch(Core& core) : c_(core), s_(core.s), own_(core), other_(core), sender_(core) {}

    HAL_AICORE void send() {
        c_.quiet_own_peers();  // what an earlier launch staged is read no more
        if (!c_.sync()) return;
        stage_tokens();
        if (c_.block == 0) stage_words();
        if (!c_.sync()) return;
        if (!c_.a.reuse && c_.block == 0) count();
        if (!c_.sync()) return;
        if (C == Completion::strong_signal_no_cqe) check_room();
        if (!c_.sync()) return;  // refused before anything is sent
        announce();
        wait_ready();
        if (!c_.sync()) return;
        agree();
        if (!c_.sync()) return;
        if (!c_.a.reuse) place();
        if (!c_.sync()) return;
        send_rows();
        note_raw_heads(c_, 0, c_.a.epoch);
    }

    HAL_AICORE void recv() {
        if (is_hierarchical(s_) && !forward()) return;
        if (s_.schedule == Schedule::latency) receive_counts();
        if (s_.schedule != Schedule::latency) own_.load_owner(c_.me);
        for (std::int32_t i = 1; i < s_.ranks; ++i) receive_rows_of(c_.peer(i));
        if (!c_.sync()) return;
        // Inbound first, then outbound: quiet only reclaims, the peers' signals are what this rank needs.
        c_.quiet_own_peers();
        if (s_.schedule == Schedule::latency) own_fixed();
        hand_out();
        if (c_.block == 0 && C == Completion::strong_signal_no_cqe) c_.stage_word(Word::exit, c_.a.epoch, c_.a.epoch);
        if (!c_.sync()) return;
        count_experts();
        if (C == Completion::strong_signal_no_cqe) exit();
    }

  private:
    HAL_AICORE RowArea receive_area(std::uint64_t slot) const { return BufferLayout::nth(c_.l.receive, slot); }
    HAL_AICORE RowArea tokens_area() const { return BufferLayout::nth(c_.st.tokens, c_.a.epoch % c_.st.depth); }
    HAL_AICORE std::uint32_t meta() const { return std::uint32_t(meta_bytes(s_)); }
    HAL_AICORE std::uint32_t offered(std::int32_t peer) const {
        return ready_of(read_word<std::uint64_t>(c_.a.offered + 8 * std::uint64_t(peer))).slot;
    }
    // `slot`: the receive slot, of whoever is signalled.
    HAL_AICORE Arrival arrival(Sig kind, std::uint64_t slot, std::int32_t publisher) const {
        return {{c_.l.staged(kind, slot, publisher, 0), c_.l.staged(kind, slot, publisher, 1)},
                rows_word(c_.a.epoch, false),
                c_.word_offset(Word::rows, c_.a.epoch)};
    }

    // One record for each token: scales, global ids, weights. Every copy of the token's row carries the same record.
    HAL_AICORE void stage_tokens() {
        const std::int32_t k = s_.top_k, scales = s_.scale_dim, record = std::int32_t(meta() / 4);
        const std::int64_t begin = c_.share_begin(c_.a.tokens), end = c_.share_end(c_.a.tokens);
        Ids ids(c_, c_.a.reuse ? c_.a.route.ids : c_.a.topk_idx, c_.a.tokens, !c_.a.reuse && c_.a.int64_ids);
        const auto words = c_.tile.template ReinterpretCast<std::int32_t>();
        const auto given = words[4096];  // a token's weights or scales as loaded
        for (std::int64_t t = begin; t < end; ++t) {
            for (std::int32_t i = 0; i < record; ++i) words.SetValue(std::uint32_t(i), 0);
            for (std::int32_t from = 0; from < scales; from += 2048) {
                const std::int32_t n = std::int32_t(smaller(2048, scales - from));
                load(given, c_.a.scales + 4 * (std::uint64_t(t) * std::uint64_t(scales) + std::uint64_t(from)),
                     std::uint32_t(n));
                for (std::int32_t i = 0; i < n; ++i)
                    words.SetValue(std::uint32_t(from + i), given.GetValue(std::uint32_t(i)));
            }
            for (std::int32_t j = 0; j < k; ++j) {
                const std::int64_t id = ids.at(std::int32_t(t), j);
                if (id < -1 || id >= s_.num_experts)
                    c_.fail(Failure::expert_id, std::int32_t(t), 0, Stage::end, std::uint64_t(s_.num_experts),
                            std::uint64_t(id));
                words.SetValue(std::uint32_t(scales + j), std::int32_t(id));
            }
            stage_weights(std::uint64_t(t), words, given);
            save_record(std::uint64_t(t), words, record);
        }
    }
    HAL_AICORE void stage_weights(std::uint64_t t, const AscendC::LocalTensor<std::int32_t>& words,
                                  const AscendC::LocalTensor<std::int32_t>& given) {
        const std::uint32_t k = std::uint32_t(s_.top_k), at = std::uint32_t(s_.scale_dim) + k;
        if (c_.a.topk_weights) load(given, c_.a.topk_weights + 4 * t * k, k);
        for (std::uint32_t j = 0; j < k; ++j)
            words.SetValue(at + j, c_.a.topk_weights ? given.GetValue(j) : 0x3f800000);  // 1.0
        for (std::uint32_t j = 0; j < k; ++j) given.SetValue(j, words.GetValue(at + j));
        save(c_.a.weights.home + 4 * t * k, given, k);
        if (c_.a.reuse) return;
        for (std::uint32_t j = 0; j < k; ++j) given.SetValue(j, words.GetValue(std::uint32_t(s_.scale_dim) + j));
        save(c_.a.route.ids + 4 * t * k, given, k);
    }
    HAL_AICORE void save_record(std::uint64_t t, const AscendC::LocalTensor<std::int32_t>& words, std::int32_t record) {
        const RowArea area = tokens_area();
        save(c_.at(area.meta(t)), words, std::uint32_t(record));
        const std::uint64_t x = c_.a.x + t * area.x_bytes;
        if constexpr (C == Completion::flag_in_block)
            pack_blocks(c_, area.blocks(t), x, std::uint32_t(area.x_bytes), c_.at(area.meta(t)), meta(),
                        rows_word(c_.a.epoch, false));
        else
            copy(c_.tile, c_.at(area.x(t)), x, area.x_bytes);
    }

    HAL_AICORE Ready own_ready() const { return {c_.a.epoch, c_.a.slot, c_.a.reuse != 0, c_.a.tag}; }

    HAL_AICORE void stage_words() {
        c_.stage_word(Word::ready, c_.a.epoch, ready_word(own_ready()));
        c_.stage_word(Word::rows, c_.a.epoch, hal_signal_value(rows_word(c_.a.epoch, false)));
        c_.stage_word(Word::counts, c_.a.epoch, c_.a.epoch);
    }

    // Rows to each destination, and tokens that cross to each node: this rank's header, in its own place in the window.
    HAL_AICORE void count() {
        const std::int32_t n = std::int32_t(header_ints(s_));
        for (std::int32_t i = 0; i < n; ++i) c_.counters.SetValue(std::uint32_t(i), 0);
        Ids ids(c_, c_.a.route.ids, c_.a.tokens);
        Stop stops[kMaxTopK];
        for (std::int32_t t = 0; t < c_.a.tokens; ++t) {
            const std::int32_t count = stops_of(c_, ids, t, 0, destinations(s_), stops);
            for (std::int32_t i = 0; i < count; ++i) {
                for (std::int32_t other = 0; other < i; ++other)
                    if (stops[other].destination == stops[i].destination)
                        c_.fail(Failure::duplicate_expert, t, 0, Stage::end, 0,
                                std::uint64_t(ids.at(t, stops[i].position)));
                increment(stops[i].destination);
                if (is_hierarchical(s_) && first_to_node(stops, i)) increment(destinations(s_) + node_at(stops[i]));
            }
        }
        save(s_.schedule == Schedule::latency ? c_.a.route.counts : c_.at(c_.l.header(c_.a.epoch, c_.me)), c_.counters,
             std::uint32_t(n));
    }
    HAL_AICORE void increment(std::int32_t i) {
        c_.counters.SetValue(std::uint32_t(i), c_.counters.GetValue(std::uint32_t(i)) + 1);
    }
    HAL_AICORE std::int32_t node_at(const Stop& stop) const { return node_of(s_, owner_of(s_, stop.destination)); }
    // Is stops[i] the token's first on a node other than this one?
    HAL_AICORE bool first_to_node(const Stop (&stops)[kMaxTopK], std::int32_t i) const {
        const std::int32_t node = node_at(stops[i]);
        bool first = node != c_.node;
        for (std::int32_t other = 0; other < i; ++other) first = first && node_at(stops[other]) != node;
        return first;
    }

    // This rank's own counts, wherever they lie by now.
    HAL_AICORE std::uint64_t own_counts() const {
        if (s_.schedule == Schedule::latency) return c_.a.route.counts;
        if (c_.a.reuse) return c_.a.route.counts + std::uint64_t(c_.me) * c_.l.header_bytes;
        return c_.at(c_.l.header(c_.a.epoch, c_.me));
    }

    HAL_AICORE void check_room() {
        load(c_.counters, own_counts(), std::uint32_t(header_ints(s_)));
        for (std::int32_t p = 0; p < s_.ranks; ++p) {
            if (!c_.mine(p)) continue;
            std::int64_t rows = -1;
            if (c_.near(p)) {
                rows = 0;
                for (std::int32_t g = 0; g < groups(s_); ++g)
                    rows += c_.counters.GetValue(std::uint32_t(p * groups(s_) + g));
            } else if (rail_of(s_, c_.me, node_of(s_, p)) == p) {
                rows = c_.counters.GetValue(std::uint32_t(destinations(s_) + node_of(s_, p)));
            }
            require_room(c_, p, rows, 1, true);
        }
    }

    // Counts are said before any row goes: relaxed puts covered by the ready word's strong signal.
    HAL_AICORE void announce() {
        const bool counts = !c_.a.reuse && s_.schedule != Schedule::latency;
        for (std::int32_t i = 1; i < s_.ranks; ++i) {
            const std::int32_t p = c_.peer(i);
            if (!c_.mine(p)) continue;
            const std::uint64_t header = c_.l.header(c_.a.epoch, c_.me);
            if (counts) c_.put_control(p, header, header, std::uint32_t(4 * header_ints(s_)));
            c_.signal(p, 0, c_.l.ready(c_.a.epoch, c_.me), c_.word_offset(Word::ready, c_.a.epoch));
        }
    }

    HAL_AICORE void wait_ready() {
        for (std::int32_t p = 0; p < s_.ranks; ++p) {
            if (!c_.mine(p)) continue;
            std::uint64_t word = ready_word(own_ready());
            if (p != c_.me)
                word = c_.wait(c_.l.ready(c_.a.epoch, p), ready_word({c_.a.epoch, 0, false, 0}), p, 0,
                               Stage::dispatch_ready);
            write_word<std::uint64_t>(c_.a.offered + 8 * std::uint64_t(p), word);
        }
    }

    // All words are awaited before any is judged, so that every rank leaves a round in which some disagree.
    HAL_AICORE void agree() {
        const Ready own = own_ready();
        for (std::int32_t p = 0; p < s_.ranks; ++p) {
            const Ready other = ready_of(read_word<std::uint64_t>(c_.a.offered + 8 * std::uint64_t(p)));
            if (other.reuse != own.reuse) c_.fail(Failure::reuse, p, 0, Stage::end, own.reuse, other.reuse);
            if (other.tag != own.tag) c_.fail(Failure::tag, p, 0, Stage::end, own.tag, other.tag);
        }
    }

    // All sources' counts are here. They are kept with the handle, and this rank's number of rows is said to the host.
    HAL_AICORE void place() {
        if (s_.schedule == Schedule::latency) {
            if (c_.block == 0) write_word<std::int64_t>(c_.a.route.rows, fixed_place(s_, groups(s_), 0));
            return;
        }
        if (c_.block == 0)
            copy(c_.tile, c_.a.route.counts, c_.at(c_.l.header(c_.a.epoch, 0)),
                 std::uint64_t(s_.ranks) * c_.l.header_bytes);
        if (c_.block != 0) return;
        own_.load_owner(c_.me);
        write_word<std::int64_t>(c_.a.route.rows, own_.start(groups(s_)));
    }

    // Schedule latency: what the receiver must know afterwards, how many rows came and where they go back to.
    HAL_AICORE void send_counts(std::int32_t p) {
        load(c_.counters, c_.a.route.counts, std::uint32_t(header_ints(s_)));
        const std::uint32_t g = std::uint32_t(groups(s_));
        std::int32_t back = 0;
        for (std::int32_t d = 0; d < p * groups(s_); ++d) back += c_.counters.GetValue(std::uint32_t(d));
        const auto message = c_.tile.template ReinterpretCast<std::int32_t>();
        message.SetValue(0, back);
        for (std::uint32_t i = 0; i < g; ++i) message.SetValue(1 + i, c_.counters.GetValue(std::uint32_t(p) * g + i));
        const std::uint64_t at = c_.l.count_message(offered(p), c_.me);
        if (p == c_.me) return save(c_.at(at), message, 1 + g);
        const std::uint64_t staged =
            c_.st.counts + (c_.a.epoch % c_.st.depth * std::uint64_t(s_.ranks) + std::uint64_t(p)) * c_.l.counts_bytes;
        save(c_.at(staged), message, 1 + g);
        c_.put_control(p, at, staged, 4 * (1 + g));
        c_.signal(p, 0, count_signal(offered(p), c_.me), c_.word_offset(Word::counts, c_.a.epoch));
    }
    HAL_AICORE std::uint64_t count_signal(std::uint64_t slot, std::int32_t source) const {
        return c_.l.staged(Sig::counts, slot, source, 0);
    }

    HAL_AICORE void send_rows() {
        if (is_hierarchical(s_))  // the longest way first
            for (std::int32_t i = 1; i < s_.nodes; ++i) cross((c_.node + i) % s_.nodes);
        for (std::int32_t i = 0; i < s_.ranks; ++i) {
            const std::int32_t p = c_.peer(i);
            if (!c_.mine(p) || !c_.near(p)) continue;
            if (s_.schedule == Schedule::latency && !c_.a.reuse) send_counts(p);
            send_to(p);
        }
        for (std::int32_t i = 1; i < s_.ranks; ++i) {
            const std::int32_t p = c_.peer(i);
            if (!c_.mine(p)) continue;
            if (c_.near(p))
                sender_.publish(p, arrival(Sig::rows, offered(p), c_.me));
            else if (rail_of(s_, c_.me, node_of(s_, p)) == p)
                sender_.publish(p, arrival(Sig::rail, offered(p), c_.me));
        }
    }

    // First row at `p` for this source's rows to each of its groups, in `counters`.
    HAL_AICORE void load_places(std::int32_t p, std::int32_t source) {
        const bool fixed = s_.schedule == Schedule::latency;
        if (!fixed) other_.load_owner(p);
        for (std::int32_t g = 0; g < groups(s_); ++g)
            c_.counters.SetValue(std::uint32_t(g),
                                 std::int32_t(fixed ? fixed_place(s_, g, source) : other_.place(source, g)));
    }

    // Walks `ids` and sends or copies each row to p; staged(token) is its source.
    template <class Staged>
    HAL_AICORE void rows_to(std::int32_t p, Ids& ids, const RowArea& target, const Staged& staged) {
        const std::int32_t first = p * groups(s_);
        Stop stops[kMaxTopK];
        for (std::int32_t t = 0; t < ids.tokens(); ++t) {
            const std::int32_t n = stops_of(c_, ids, t, first, first + groups(s_), stops);
            for (std::int32_t i = 0; i < n; ++i) {
                const std::uint32_t g = std::uint32_t(stops[i].destination - first);
                const std::uint64_t row = std::uint64_t(c_.counters.GetValue(g));
                c_.counters.SetValue(g, std::int32_t(row) + 1);
                staged(t, row, target);
            }
        }
    }

    HAL_AICORE void send_to(std::int32_t p) {
        const RowArea area = tokens_area(), target = receive_area(offered(p));
        load_places(p, c_.me);
        Ids ids(c_, c_.a.route.ids, c_.a.tokens);
        if (p == c_.me) {
            rows_to(p, ids, target, [&](std::int32_t t, std::uint64_t row, const RowArea& to) {
                local_row(c_, to, row, c_.a.x + std::uint64_t(t) * to.x_bytes, c_.at(area.meta(std::uint64_t(t))),
                          meta());
            });
            return;
        }
        sender_.open(p, target);
        rows_to(p, ids, target, [&](std::int32_t t, std::uint64_t row, const RowArea&) {
            sender_.row(row, source_of(area, std::uint64_t(t), meta()));
        });
        sender_.close(arrival(Sig::rows, offered(p), c_.me));
    }

    // Each token crosses to a node once, however many of its ranks own its experts.
    HAL_AICORE void cross(std::int32_t node) {
        const std::int32_t rail = rail_of(s_, c_.me, node), first = node * node_destinations(s_);
        if (!c_.mine(rail)) return;
        const RowArea area = tokens_area();
        Ids ids(c_, c_.a.route.ids, c_.a.tokens);
        Stop stops[kMaxTopK];
        std::uint64_t row = std::uint64_t(rail_base(s_, c_.node, node));
        sender_.open(rail, BufferLayout::nth(c_.l.rail, offered(rail)));
        for (std::int32_t t = 0; t < c_.a.tokens; ++t)
            if (stops_of(c_, ids, t, first, first + node_destinations(s_), stops) > 0)
                sender_.row(row++, source_of(area, std::uint64_t(t), meta()));
        sender_.close(arrival(Sig::rail, offered(rail), c_.me));
    }

    // What crossed from other nodes goes to its owners on this node, into the same places as with schedule direct.
    HAL_AICORE bool forward() {
        for (std::int32_t i = 1; i < s_.nodes; ++i) {
            const std::int32_t node = (c_.node + s_.nodes - i) % s_.nodes;
            if (c_.mine(rail_of(s_, c_.me, node))) receive_rail(node);
        }
        if (!c_.sync()) return false;
        for (std::int32_t i = 1; i < s_.nodes; ++i) {
            const std::int32_t node = (c_.node + s_.nodes - i) % s_.nodes;
            for (std::int32_t p = c_.node * node_ranks(s_); p < (c_.node + 1) * node_ranks(s_); ++p)
                if (c_.mine(p)) forward_to(node, p);
        }
        for (std::int32_t i = 1; i < s_.nodes; ++i) {
            const std::int32_t source = rail_of(s_, c_.me, (c_.node + s_.nodes - i) % s_.nodes);
            for (std::int32_t p = c_.node * node_ranks(s_); p < (c_.node + 1) * node_ranks(s_); ++p)
                if (p != c_.me && c_.mine(p)) sender_.publish(p, arrival(Sig::rows, offered(p), source));
        }
        note_raw_heads(c_, 0, c_.a.epoch);
        return c_.sync();
    }

    HAL_AICORE std::uint64_t forward_ids(std::int32_t node) const {
        return c_.a.route.forward_ids + 4 * std::uint64_t(rail_base(s_, node, c_.node)) * std::uint64_t(s_.top_k);
    }

    HAL_AICORE void receive_rail(std::int32_t node) {
        const std::int32_t source = rail_of(s_, c_.me, node), count = crossed_from(c_, source);
        const std::uint64_t base = std::uint64_t(rail_base(s_, node, c_.node));
        const RowArea rail = BufferLayout::nth(c_.l.rail, c_.a.slot);
        const Arrival from = arrival(Sig::rail, c_.a.slot, source);
        c_.wait_arrival(from, source, Stage::dispatch_rail);
        if (C == Completion::flag_in_block)
            unpack_rows(c_, rail, base, std::uint64_t(count), meta(), from.word, source, Stage::dispatch_rail);
        const std::uint64_t k4 = 4 * std::uint64_t(s_.top_k), scales = 4 * std::uint64_t(s_.scale_dim);
        for (std::uint64_t n = 0; n < std::uint64_t(count); ++n) {
            const std::uint64_t record = c_.at(rail.meta(base + n)) + scales;
            copy(c_.tile, c_.a.route.forward_ids + (base + n) * k4, record, k4);
            copy(c_.tile, c_.a.weights.forward + (base + n) * k4, record + k4, k4);
        }
    }

    HAL_AICORE void forward_to(std::int32_t node, std::int32_t p) {
        const std::int32_t source = rail_of(s_, c_.me, node);
        const RowArea rail = BufferLayout::nth(c_.l.rail, c_.a.slot), target = receive_area(offered(p));
        const std::uint64_t base = std::uint64_t(rail_base(s_, node, c_.node));
        load_places(p, source);
        Ids ids(c_, forward_ids(node), crossed_from(c_, source));
        if (p == c_.me) {
            rows_to(p, ids, target, [&](std::int32_t t, std::uint64_t row, const RowArea& to) {
                const std::uint64_t from = base + std::uint64_t(t);
                local_row(c_, to, row, c_.at(rail.x(from)), c_.at(rail.meta(from)), meta());
            });
            return;
        }
        require_room(c_, p, other_.rows_of(source), 1, true);
        if (c_.failed()) return;
        sender_.open(p, target);
        rows_to(p, ids, target, [&](std::int32_t t, std::uint64_t row, const RowArea&) {
            sender_.row(row, source_of(rail, base + std::uint64_t(t), meta()));
        });
        sender_.close(arrival(Sig::rows, offered(p), source));
    }

    HAL_AICORE void receive_counts() {
        if (c_.a.known) return;
        for (std::int32_t source = 0; source < s_.ranks; ++source) {
            if (!c_.mine(source)) continue;
            if (source != c_.me)
                c_.wait(count_signal(c_.a.slot, source), c_.a.epoch, source, 0, Stage::dispatch_counts);
            copy(c_.tile, c_.a.route.messages + std::uint64_t(source) * c_.l.counts_bytes,
                 c_.at(c_.l.count_message(c_.a.slot, source)), 4 * std::uint64_t(1 + groups(s_)));
        }
    }

    HAL_AICORE void receive_rows_of(std::int32_t source) {
        const std::int32_t from = deliverer_of(s_, source, c_.me);
        if (from == c_.me || !c_.mine(source)) return;
        const Arrival in = arrival(Sig::rows, c_.a.slot, source);
        c_.wait_arrival(in, from, Stage::dispatch_rows);
        if (C != Completion::flag_in_block) return;
        ReceivedFrom received(c_, own_, source);
        for (std::int32_t g = 0; g < groups(s_); ++g) {
            const Received r = received.next();
            unpack_rows(c_, receive_area(c_.a.slot), std::uint64_t(r.place), std::uint64_t(r.count), meta(), in.word,
                        from, Stage::dispatch_rows);
        }
    }

    // Rows that this slot's last use filled and this one does not are cleared.
    HAL_AICORE void own_fixed() {
        const RowArea area = receive_area(c_.a.slot);
        for (std::int32_t source = 0; source < s_.ranks; ++source) {
            if (!c_.mine(source)) continue;
            ReceivedFrom received(c_, own_, source);
            for (std::int32_t g = 0; g < groups(s_); ++g) {
                const Received r = received.next();
                const std::uint64_t dirty =
                    c_.a.dirty +
                    4 * ((c_.a.slot * std::uint64_t(s_.ranks) + std::uint64_t(source)) * std::uint64_t(groups(s_)) +
                         std::uint64_t(g));
                const std::int64_t before = read_word<std::int32_t>(dirty);
                clear_rows(area, r.place + r.count, r.place + before);
                write_word<std::int32_t>(dirty, std::int32_t(r.count));
            }
        }
    }
    HAL_AICORE void clear_rows(const RowArea& area, std::int64_t from, std::int64_t until) {
        if (until > from)
            clear(c_.tile, c_.at(area.x(std::uint64_t(from))), std::uint64_t(until - from) * area.x_bytes);
    }

    // Ids, weights and scales of this core's sources, and the gaps behind the last source.
    HAL_AICORE void hand_out() {
        const RowArea area = receive_area(c_.a.slot);
        const bool fixed = s_.schedule == Schedule::latency;
        for (std::int32_t source = 0; source < s_.ranks; ++source) {
            if (!c_.mine(source)) continue;
            ReceivedFrom received(c_, own_, source);
            for (std::int32_t g = 0; g < groups(s_); ++g) {
                const Received r = received.next();
                for (std::int64_t n = 0; n < r.count; ++n) hand_out_row(area, r.place + n, g);
                if (fixed)
                    pad(r.place + r.count, r.place + s_.max_tokens);
                else if (source == s_.ranks - 1) {
                    clear_rows(area, r.place + r.count, own_.start(g + 1));
                    pad(r.place + r.count, own_.start(g + 1));
                }
            }
        }
        if (c_.block == 0 && c_.a.out_offsets)
            for (std::int32_t g = 0; g <= groups(s_); ++g)
                write_word<std::int64_t>(c_.a.out_offsets + 8 * std::uint64_t(g),
                                         fixed ? fixed_place(s_, g, 0) : own_.start(g));
    }

    HAL_AICORE void hand_out_row(const RowArea& area, std::int64_t row, std::int32_t group) {
        const std::uint32_t k = std::uint32_t(s_.top_k), scales = std::uint32_t(s_.scale_dim);
        const std::uint64_t r = std::uint64_t(row);
        const auto record = c_.tile.template ReinterpretCast<std::int32_t>(), idx = record[4096],
                   weights = record[5120];
        if (scales) copy(c_.tile, c_.a.out_scales + 4 * r * scales, c_.at(area.meta(r)), 4 * std::uint64_t(scales));
        load(record, c_.at(area.meta(r)) + 4 * scales, 2 * k);
        const std::int32_t first = c_.me * local_experts(s_);
        for (std::uint32_t j = 0; j < k; ++j) {
            const std::int32_t local = record.GetValue(j) - first;
            const bool here = record.GetValue(j) >= first && local < local_experts(s_);
            if (s_.layout == Layout::rank) {
                idx.SetValue(j, here ? local : -1);
                weights.SetValue(j, here ? record.GetValue(k + j) : 0);
            } else if (local == group) {
                idx.SetValue(0, group);
                weights.SetValue(0, record.GetValue(k + j));
            }
        }
        const std::uint32_t n = s_.layout == Layout::rank ? k : 1;
        save(c_.a.out_idx + 4 * r * n, idx, n);
        save(c_.a.out_weights + 4 * r * n, weights, n);
    }

    HAL_AICORE void pad(std::int64_t from, std::int64_t until) {
        const std::uint32_t k = s_.layout == Layout::rank ? std::uint32_t(s_.top_k) : 1;
        const auto idx = c_.tile.template ReinterpretCast<std::int32_t>();
        for (std::int64_t row = from; row < until; ++row) {
            AscendC::Duplicate(idx, std::int32_t{-1}, k);
            save(c_.a.out_idx + 4 * std::uint64_t(row) * k, idx, k);
        }
        if (until <= from) return;
        clear(c_.tile, c_.a.out_weights + 4 * std::uint64_t(from) * k, 4 * std::uint64_t(until - from) * k);
        const std::uint64_t scales = std::uint64_t(s_.scale_dim);
        if (scales)
            clear(c_.tile, c_.a.out_scales + 4 * std::uint64_t(from) * scales,
                  4 * std::uint64_t(until - from) * scales);
    }

    // Actual rows (layout expert) or assignments (layout rank) of each local expert; one core, from what was handed out.
    HAL_AICORE void count_experts() {
        if (c_.block != 0) return;
        const std::int32_t n = local_experts(s_);
        for (std::int32_t e = 0; e < n; ++e) c_.counters.SetValue(std::uint32_t(e), 0);
        for (std::int32_t source = 0; source < s_.ranks; ++source) {
            ReceivedFrom received(c_, own_, source);
            for (std::int32_t g = 0; g < groups(s_); ++g) {
                const Received r = received.next();
                if (s_.layout == Layout::expert) {
                    c_.counters.SetValue(std::uint32_t(g),
                                         c_.counters.GetValue(std::uint32_t(g)) + std::int32_t(r.count));
                    continue;
                }
                Ids ids(c_, c_.a.out_idx + 4 * std::uint64_t(r.place) * std::uint64_t(s_.top_k), std::int32_t(r.count));
                for (std::int32_t t = 0; t < ids.tokens(); ++t)
                    for (std::int32_t j = 0; j < s_.top_k; ++j)
                        if (const std::int64_t e = ids.at(t, j); e >= 0) increment(std::int32_t(e));
            }
        }
        save(c_.a.out_tokens_per_expert, c_.counters, std::uint32_t(n));
    }

    // Without completion entries nothing local says when sources and ring are free: everyone's word that all arrived does.
    HAL_AICORE void exit() {
        for (std::int32_t i = 1; i < s_.ranks; ++i)
            if (c_.mine(c_.peer(i)))
                c_.signal(c_.peer(i), 0, c_.l.staged(Sig::exit, offered(c_.peer(i)), c_.me, 0),
                          c_.word_offset(Word::exit, c_.a.epoch));
        for (std::int32_t i = 1; i < s_.ranks; ++i) {
            const std::int32_t p = c_.peer(i);
            if (!c_.mine(p)) continue;
            c_.wait(c_.l.staged(Sig::exit, c_.a.slot, p, 0), c_.a.epoch, p, 0, Stage::dispatch_exit);
            if (!c_.failed()) reclaim_raw(c_, 0, c_.a.epoch, p);
        }
        c_.sync();
    }

    Core& c_;
    const EpShape& s_;
    Columns own_, other_;
    RowSender<C> sender_;
};

}  // namespace hal::ascend
