// SPDX-License-Identifier: Apache-2.0
// Dispatch: every row goes straight to its final place at the ranks that own its experts (docs/contract.md, section 1).
//
//   send   offer a receive slot and say this rank's counts to every peer; with all peers' counts every final row follows
//          by prefix sums; write the rows, then say that they are there
//   recv   [hierarchical: forward what crossed from other nodes]; wait for every source; hand out ids and weights
//
// What makes reuse of memory safe: a receive slot (and the rail area and counts that go with it) is written only after
// its owner offered it in this round's ready word. Headers are two rounds deep: a rank sends header e + 2 after it got
// every peer's ready word of e + 1, which a peer sends after it has read all headers of e.
#pragma once
#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "ep/agreement.hpp"
#include "ep/rounds.hpp"
#include "ep/rows.hpp"
#include "hal/epoch.hpp"
#include "hal/placement.hpp"

namespace hal::ep {

struct DispatchInput {
    const std::byte* x = nullptr;  // [tokens, row_bytes]
    std::int32_t tokens = 0;
    const void* topk_idx = nullptr;  // [tokens, k]; null with a reused state
    bool idx_is_int64 = false;
    const float* topk_weights = nullptr;  // [tokens, k]; null = all ones
    const float* scales = nullptr;        // [tokens, scale_dim]
};

// Caller's memory for what is not left in the window. `rows` is DispatchRound's number of rows.
struct DispatchOutput {
    float* scales = nullptr;           // [rows, scale_dim]
    std::int32_t* topk_idx = nullptr;  // [rows, k] or [rows]
    float* topk_weights = nullptr;
    std::int32_t* tokens_per_expert = nullptr;  // [local experts]
    std::int64_t* expert_offsets = nullptr;     // [local experts + 1], layout expert
};

template <class Fabric>
class Dispatch {
  public:
    Dispatch(Fabric& fabric, const BufferLayout& layout, const Members& members, Agreement<Fabric>& agreement)
        : f_(fabric), l_(layout), s_(layout.shape), members_(members), agreement_(agreement), me_(fabric.rank()),
          node_(node_of(s_, me_)), meta_(std::size_t(s_.num_buffers)), header_(std::size_t(s_.num_buffers)),
          dirty_(std::size_t(s_.num_buffers)) {
        for (auto& d : dirty_) d.assign(std::size_t(s_.ranks * groups(s_)), 0);
    }

    // `slot` is a receive slot that nobody holds. With `reused` the routing is that state's, and counts stay at home
    // unless a rank was lost since they were exchanged: then all ranks exchange them again.
    DispatchRound send(std::uint32_t slot, const DispatchInput& in, const State* reused) {
        const bool reuse = reused && reused->route->view == members_.view;
        DispatchRound round{epoch_ + 1, slot, std::make_shared<State>(), {}, reuse, false};
        State& state = *round.state;
        state.route = reuse ? reused->route : new_route(in, reused, round.epoch);
        take_weights(state, in);
        pack_meta(slot, state, in);
        epoch_ = round.epoch;  // from here on peers see this round

        announce(round);
        wait_ready(round);
        if (!reuse && s_.schedule != Schedule::latency) place_rows(*state.route);
        if (!reuse && s_.schedule == Schedule::latency) send_counts(round);
        send_rows(round, in.x);
        if (s_.completion != Completion::strong_signal_no_cqe) quiet_sources();
        return round;
    }

    // Number of rows that recv will hand out.
    std::int64_t rows(const DispatchRound& round) const { return round.state->route->starts.back(); }

    void recv(DispatchRound& round, const DispatchOutput& out) {
        Route& route = *round.state->route;
        if (is_hierarchical(s_)) forward(round);
        if (s_.schedule == Schedule::latency && !route.known) receive_counts(round);
        route.known = true;
        const RowArea area = receive_area(round.slot);
        for (int i = 1; i < s_.ranks; ++i) {
            const int source = (me_ + i) % s_.ranks, from = deliverer_of(s_, source, me_);
            if (from == me_ || is_lost(members_, source)) continue;  // this rank forwarded them to itself, or none come
            RowReader<Fabric> reader(f_, s_.completion, from, area, arrival(Sig::rows, round.slot, source, round.epoch),
                                     std::size_t(meta_bytes(s_)), "dispatch rows");
            reader.wait();
            for (int g = 0; g < groups(s_); ++g) {
                const Received& r = received(route, source, g);
                reader.take(std::uint64_t(r.place), std::uint64_t(r.count));
            }
        }
        agreement_.say();
        clear_gaps(round);
        hand_out(round, out);
        if (s_.completion == Completion::strong_signal_no_cqe) exit(round);
        agreement_.await("dispatch agreement");
        round.received = true;
    }

    RowArea receive_area(std::uint32_t slot) const { return BufferLayout::nth(l_.receive, slot); }

  private:
    Received& received(Route& route, int source, int group) const {
        return route.received[std::size_t(source * groups(s_) + group)];
    }
    // `slot` is the receiver's.
    Arrival arrival(Sig kind, std::uint32_t slot, int publisher, std::uint64_t epoch) const {
        return {{l_.staged(kind, slot, publisher, 0), l_.staged(kind, slot, publisher, 1)}, rows_word(epoch, false)};
    }
    // Peers in the order in which this rank serves them: each rank starts at another one, so none is everyone's first.
    int peer(int i) const { return (me_ + i) % s_.ranks; }
    int neighbour(int i) const { return node_ * node_ranks(s_) + (me_ + i) % node_ranks(s_); }
    int first_destination(int node) const { return node * node_destinations(s_); }

    // The input's ids, or those of a handle that was made when more ranks were there. An expert of a lost rank is none.
    std::vector<std::int32_t> take_ids(const DispatchInput& in, const State* reused) const {
        const std::size_t n = std::size_t(in.tokens) * std::size_t(s_.top_k);
        std::vector<std::int32_t> ids(n);
        for (std::size_t i = 0; i < n; ++i) {
            const std::int64_t id = reused            ? reused->route->home.ids[i]
                                    : in.idx_is_int64 ? static_cast<const std::int64_t*>(in.topk_idx)[i]
                                                      : static_cast<const std::int32_t*>(in.topk_idx)[i];
            if (id < -1 || id >= s_.num_experts)
                throw ContractViolation("topk_idx holds expert " + std::to_string(id) + "; ids are -1 ... " +
                                        std::to_string(s_.num_experts - 1));
            const bool lost = id >= 0 && is_lost(members_, std::int32_t(id) / local_experts(s_));
            ids[i] = lost ? -1 : std::int32_t(id);
        }
        return ids;
    }

    std::shared_ptr<Route> new_route(const DispatchInput& in, const State* reused, std::uint64_t epoch) {
        std::vector<std::int32_t> ids = take_ids(in, reused);
        auto route = std::make_shared<Route>();
        route->epoch = epoch;
        route->view = members_.view;
        route->home = make_routing(s_, std::move(ids), in.tokens, 0, destinations(s_));
        route->place.resize(std::size_t(destinations(s_)));
        route->received.resize(std::size_t(s_.ranks * groups(s_)));
        route->starts.resize(std::size_t(groups(s_)) + 1);
        if (is_hierarchical(s_))
            for (int i = 0; i < s_.nodes - 1; ++i) {
                const int first = first_destination(other_node(i, node_));
                route->crossing.push_back(crossing(route->home, first, first + node_destinations(s_)));
            }
        if (s_.schedule == Schedule::latency) place_fixed(*route);
        return route;
    }

    void take_weights(State& state, const DispatchInput& in) const {
        const std::size_t n = std::size_t(state.route->home.tokens) * std::size_t(s_.top_k);
        if (in.topk_weights)
            state.weights.assign(in.topk_weights, in.topk_weights + n);
        else
            state.weights.assign(n, 1.0F);
    }

    // One record for each token: scales, global ids, weights. Every copy of the token's row carries the same record.
    void pack_meta(std::uint32_t slot, const State& state, const DispatchInput& in) {
        const Routing& home = state.route->home;
        const std::size_t bytes = std::size_t(meta_bytes(s_)), k = std::size_t(s_.top_k),
                          scales = std::size_t(s_.scale_dim);
        std::vector<std::byte>& meta = meta_[slot];
        meta.resize(std::size_t(home.tokens) * bytes);
        const std::vector<std::int32_t>& ids = home.ids;
        for (std::size_t t = 0; t < std::size_t(home.tokens); ++t) {
            std::byte* record = meta.data() + t * bytes;
            if (scales) std::memcpy(record, in.scales + t * scales, 4 * scales);
            std::memcpy(record + 4 * scales, ids.data() + t * k, 4 * k);
            std::memcpy(record + 4 * (scales + k), state.weights.data() + t * k, 4 * k);
        }
    }

    // Counts are said before any row goes: relaxed puts covered by the ready word's strong signal.
    void announce(const DispatchRound& round) {
        const Route& route = *round.state->route;
        const bool counts = !round.reuse && s_.schedule != Schedule::latency;
        std::vector<std::int32_t>& header = header_[round.slot];
        if (counts) {
            header = route.home.counts;
            if (is_hierarchical(s_))
                for (int node = 0; node < s_.nodes; ++node)
                    header.push_back(
                        node == node_ ? 0 : std::int32_t(route.crossing[std::size_t(other_index(node, node_))].size()));
            std::memcpy(f_.write(l_.header(round.epoch, me_), 4 * header.size()), header.data(), 4 * header.size());
        }
        for (int i = 1; i < s_.ranks; ++i) {
            if (is_lost(members_, peer(i))) continue;
            if (counts)
                f_.put(0, peer(i), l_.header(round.epoch, me_), header.data(), 4 * header.size(), Order::relaxed);
            f_.signal(0, peer(i), l_.ready(round.epoch, me_), ready_word(own_ready(round)), SignalOp::set,
                      Order::strong);
        }
    }

    Ready own_ready(const DispatchRound& round) const {
        return {round.epoch, round.slot, round.reuse, round.reuse ? ready_tag(round.state->route->epoch) : 0};
    }

    // All words are awaited before any is judged, so that every rank leaves a round in which some disagree.
    void wait_ready(DispatchRound& round) {
        std::vector<Ready> peers(std::size_t(s_.ranks), own_ready(round));
        for (int i = 1; i < s_.ranks; ++i)
            if (!is_lost(members_, peer(i)))
                peers[std::size_t(peer(i))] =
                    ready_of(f_.wait(l_.ready(round.epoch, peer(i)), ready_word({round.epoch, 0, false, 0}), peer(i), 0,
                                     "dispatch ready"));
        for (int p = 0; p < s_.ranks; ++p) {
            try {
                agree(own_ready(round), peers[std::size_t(p)], p);
            } catch (...) {
                quiet_sources();  // the slot, and with it the header's source, is free again
                throw;
            }
            round.offered.push_back(peers[std::size_t(p)].slot);
        }
    }

    static void agree(const Ready& own, const Ready& other, int rank) {
        if (other.reuse != own.reuse)
            throw ContractViolation("rank " + std::to_string(rank) +
                                    (other.reuse ? " reuses a handle and this rank exchanges counts"
                                                 : " exchanges counts and this rank reuses a handle") +
                                    "; pass a handle on all ranks or on none");
        if (other.tag != own.tag)
            throw ContractViolation("rank " + std::to_string(rank) +
                                    " reuses the handle of another dispatch than this rank (" +
                                    std::to_string(other.tag) + " and " + std::to_string(own.tag) +
                                    "); pass handles of the same dispatch on all ranks");
    }

    // All sources' counts are here: where everything lies, at every rank. A lost rank's are zero: a view begins in a
    // window of its own, which that rank cannot write to.
    void place_rows(Route& route) {
        const std::int64_t stride = std::int64_t(l_.header_bytes / 4);
        const std::size_t bytes = std::size_t(s_.ranks) * l_.header_bytes;
        const Counts c{reinterpret_cast<const std::int32_t*>(f_.read(l_.header(route.epoch, 0), bytes)), stride};
        std::vector<std::int64_t> starts(std::size_t(groups(s_)) + 1);
        for (int rank = 0; rank < s_.ranks; ++rank) {
            group_starts(s_, c, rank, starts.data());
            for (int g = 0; g < groups(s_); ++g) {
                const int d = rank * groups(s_) + g;
                route.place[std::size_t(d)] = starts[std::size_t(g)] + rows_before(c, me_, d);
            }
            if (rank == me_) route.starts = starts;
        }
        for (int source = 0; source < s_.ranks; ++source) {
            const bool near = !is_hierarchical(s_) || node_of(s_, source) == node_;
            // Rows from other nodes go back through this node's gather area, after those of lower nodes.
            std::int64_t back = near ? 0 : gather_base(s_, node_of(s_, source), node_);
            back += return_place(c, source, is_hierarchical(s_) ? first_destination(node_) : 0, me_ * groups(s_));
            std::int64_t flat_back = return_place(c, source, 0, me_ * groups(s_));
            for (int g = 0; g < groups(s_); ++g) {
                const int d = me_ * groups(s_) + g;
                const std::int64_t count = c.at(source, d);
                received(route, source, g) = {route.starts[std::size_t(g)] + rows_before(c, source, d), count, back,
                                              flat_back};
                back += count;
                flat_back += count;
            }
        }
        if (is_hierarchical(s_)) place_forwards(route, c);
    }

    void place_forwards(Route& route, const Counts& c) {
        route.forwards.resize(std::size_t(s_.nodes - 1));
        route.crossed.assign(std::size_t(s_.ranks), 0);
        for (int i = 0; i < s_.nodes - 1; ++i) {
            const int source = rail_of(s_, me_, other_node(i, node_));
            Forward& fwd = route.forwards[std::size_t(i)];
            fwd.place.assign(std::size_t(destinations(s_)), 0);
            fwd.gather.assign(std::size_t(destinations(s_)), 0);
            route.crossed[std::size_t(source)] = std::int32_t(c.at(source, destinations(s_) + node_));
            std::int64_t gather = gather_base(s_, node_of(s_, source), node_);
            for (int rank = node_ * node_ranks(s_); rank < (node_ + 1) * node_ranks(s_); ++rank) {
                std::vector<std::int64_t> starts(std::size_t(groups(s_)) + 1);
                group_starts(s_, c, rank, starts.data());
                for (int g = 0; g < groups(s_); ++g) {
                    const int d = rank * groups(s_) + g;
                    fwd.place[std::size_t(d)] = starts[std::size_t(g)] + rows_before(c, source, d);
                    fwd.gather[std::size_t(d)] = gather;
                    gather += c.at(source, d);
                }
            }
        }
    }

    // Schedule latency: every (group, source) has its own rows, so nobody needs anybody's counts to place a row.
    void place_fixed(Route& route) const {
        for (int d = 0; d < destinations(s_); ++d) route.place[std::size_t(d)] = fixed_place(s_, d % groups(s_), me_);
        for (int g = 0; g <= groups(s_); ++g) route.starts[std::size_t(g)] = fixed_place(s_, g, 0);
    }

    // What the receiver must know afterwards: how many rows came, and where they go back to.
    void send_counts(const DispatchRound& round) {
        const Route& route = *round.state->route;
        std::vector<std::int32_t>& messages = header_[round.slot];
        const std::size_t ints = 1 + std::size_t(groups(s_));
        messages.clear();
        std::int32_t back = 0;
        for (int rank = 0; rank < s_.ranks; ++rank) {
            messages.push_back(back);
            for (int g = 0; g < groups(s_); ++g) {
                messages.push_back(std::int32_t(route.home.rows_to(rank * groups(s_) + g)));
                back += messages.back();
            }
        }
        for (int i = 0; i < s_.ranks; ++i) {
            const int p = peer(i);
            if (is_lost(members_, p)) continue;
            const std::int32_t* message = messages.data() + std::size_t(p) * ints;
            const std::uint64_t slot = round.offered[std::size_t(p)], at = l_.count_message(slot, me_);
            if (p == me_) {
                std::memcpy(f_.write(at, 4 * ints), message, 4 * ints);
                continue;
            }
            f_.put(0, p, at, message, 4 * ints, Order::relaxed);
            f_.signal(0, p, l_.staged(Sig::counts, slot, me_, 0), round.epoch, SignalOp::set, Order::strong);
        }
    }

    void receive_counts(const DispatchRound& round) {
        Route& route = *round.state->route;
        const std::size_t ints = 1 + std::size_t(groups(s_));
        for (int source = 0; source < s_.ranks; ++source) {
            if (is_lost(members_, source)) {
                for (int g = 0; g < groups(s_); ++g) received(route, source, g) = {fixed_place(s_, g, source), 0, 0, 0};
                continue;
            }
            if (source != me_)
                f_.wait(l_.staged(Sig::counts, round.slot, source, 0), round.epoch, source, 0, "dispatch counts");
            std::vector<std::int32_t> message(ints);
            std::memcpy(message.data(), f_.read(l_.count_message(round.slot, source), 4 * ints), 4 * ints);
            std::int64_t back = message[0];
            for (int g = 0; g < groups(s_); ++g) {
                received(route, source, g) = {fixed_place(s_, g, source), message[std::size_t(g) + 1], back, back};
                back += message[std::size_t(g) + 1];
            }
        }
    }

    void send_rows(const DispatchRound& round, const std::byte* x) {
        const Route& route = *round.state->route;
        if (is_hierarchical(s_))  // the longest way first
            for (int i = 1; i < s_.nodes; ++i) cross(round, (node_ + i) % s_.nodes, x);
        for (int i = 1; i < node_ranks_served(); ++i) {
            const int p = is_hierarchical(s_) ? neighbour(i) : peer(i);
            if (is_lost(members_, p)) continue;
            const std::uint32_t slot = round.offered[std::size_t(p)];
            RowWriter<Fabric> writer(f_, s_.completion, p, receive_area(slot),
                                     arrival(Sig::rows, slot, me_, round.epoch), rows_to_rank(route.home, p));
            for_rows_to(route.home, p, [&](int d, std::int64_t n, std::int32_t t) {
                writer.row(std::uint64_t(route.place[std::size_t(d)] + n), record(round.slot, x, t));
            });
            writer.complete();
        }
        for_rows_to(route.home, me_, [&](int d, std::int64_t n, std::int32_t t) {
            local_row(f_, receive_area(round.slot), std::uint64_t(route.place[std::size_t(d)] + n),
                      record(round.slot, x, t));
        });
    }

    int node_ranks_served() const { return is_hierarchical(s_) ? node_ranks(s_) : s_.ranks; }

    std::int64_t rows_to_rank(const Routing& routing, int rank) const {
        std::int64_t sum = 0;
        for (int g = 0; g < groups(s_); ++g) sum += routing.rows_to(rank * groups(s_) + g);
        return sum;
    }

    // row(destination, n, token) for every row to `rank`, in route order.
    template <class Row>
    void for_rows_to(const Routing& routing, int rank, const Row& row) const {
        for (int d = rank * groups(s_); d < (rank + 1) * groups(s_); ++d) {
            const std::int32_t* tokens = routing.tokens_to(d);
            for (std::int64_t n = 0; n < routing.rows_to(d); ++n) row(d, n, tokens[n]);
        }
    }

    Record record(std::uint32_t slot, const std::byte* x, std::int32_t token) const {
        const std::size_t t = std::size_t(token), meta = std::size_t(meta_bytes(s_));
        return {x + t * std::size_t(s_.row_bytes), std::size_t(s_.row_bytes), meta_[slot].data() + t * meta, meta};
    }

    // Each token crosses to a node once, however many of its ranks own its experts.
    void cross(const DispatchRound& round, int node, const std::byte* x) {
        const std::vector<std::int32_t>& tokens = round.state->route->crossing[std::size_t(other_index(node, node_))];
        const int rail = rail_of(s_, me_, node);
        const std::int64_t base = rail_base(s_, node_, node);
        const std::uint32_t slot = round.offered[std::size_t(rail)];
        RowWriter<Fabric> writer(f_, s_.completion, rail, BufferLayout::nth(l_.rail, slot),
                                 arrival(Sig::rail, slot, me_, round.epoch), std::int64_t(tokens.size()));
        for (std::size_t i = 0; i < tokens.size(); ++i)
            writer.row(std::uint64_t(base) + i, record(round.slot, x, tokens[i]));
        writer.complete();
    }

    // What crossed from other nodes goes to its owners on this node, into the same places as with schedule direct.
    void forward(DispatchRound& round) {
        State& state = *round.state;
        state.forward_weights.resize(std::size_t(s_.nodes - 1));
        for (int i = 1; i < s_.nodes; ++i) {
            const int node = (node_ + s_.nodes - i) % s_.nodes;  // in the order in which they serve this node
            receive_rail(round, node);
            for (int p = 0; p < node_ranks(s_); ++p) forward_to(round, node, neighbour(p));
        }
        if (s_.completion != Completion::strong_signal_no_cqe) quiet_sources();  // the rail area is read no more
    }

    void receive_rail(DispatchRound& round, int node) {
        Route& route = *round.state->route;
        const int source = rail_of(s_, me_, node), index = other_index(node, node_);
        const std::size_t count = std::size_t(route.crossed[std::size_t(source)]), k = std::size_t(s_.top_k);
        const std::uint64_t base = std::uint64_t(rail_base(s_, node, node_));
        const RowArea rail = BufferLayout::nth(l_.rail, round.slot);
        RowReader<Fabric> reader(f_, s_.completion, source, rail, arrival(Sig::rail, round.slot, source, round.epoch),
                                 std::size_t(meta_bytes(s_)), "dispatch rail rows");
        reader.wait();
        reader.take(base, count);
        std::vector<std::int32_t> ids(count * k);
        std::vector<float>& weights = round.state->forward_weights[std::size_t(index)];
        weights.resize(count * k);
        for (std::size_t n = 0; n < count; ++n) {
            const std::byte* meta = f_.read(rail.meta(base + n), std::size_t(meta_bytes(s_))) + 4 * s_.scale_dim;
            std::memcpy(ids.data() + n * k, meta, 4 * k);
            std::memcpy(weights.data() + n * k, meta + 4 * k, 4 * k);
        }
        if (route.known) return;
        const int first = first_destination(node_);
        route.forwards[std::size_t(index)].routing =
            make_routing(s_, std::move(ids), std::int32_t(count), first, first + node_destinations(s_));
    }

    void forward_to(const DispatchRound& round, int node, int p) {
        const Route& route = *round.state->route;
        const int source = rail_of(s_, me_, node);
        const Forward& fwd = route.forwards[std::size_t(other_index(node, node_))];
        const RowArea rail = BufferLayout::nth(l_.rail, round.slot);
        const std::uint64_t base = std::uint64_t(rail_base(s_, node, node_));
        const auto staged = [&](std::int32_t n) {
            const std::uint64_t row = base + std::uint64_t(n);
            return Record{f_.read(rail.x(row), rail.x_bytes), rail.x_bytes, f_.read(rail.meta(row), rail.meta_bytes),
                          rail.meta_bytes};
        };
        if (p == me_) {
            for_rows_to(fwd.routing, p, [&](int d, std::int64_t n, std::int32_t t) {
                local_row(f_, receive_area(round.slot), std::uint64_t(fwd.place[std::size_t(d)] + n), staged(t));
            });
            return;
        }
        const std::uint32_t slot = round.offered[std::size_t(p)];
        RowWriter<Fabric> writer(f_, s_.completion, p, receive_area(slot),
                                 arrival(Sig::rows, slot, source, round.epoch), rows_to_rank(fwd.routing, p));
        for_rows_to(fwd.routing, p, [&](int d, std::int64_t n, std::int32_t t) {
            writer.row(std::uint64_t(fwd.place[std::size_t(d)] + n), staged(t));
        });
        writer.complete();
    }

    // Alignment gaps, and with schedule latency the rows that this slot's last use filled and this one does not.
    void clear_gaps(const DispatchRound& round) {
        Route& route = *round.state->route;
        for (int g = 0; g < groups(s_); ++g) {
            if (s_.schedule != Schedule::latency) {
                const Received& last = received(route, s_.ranks - 1, g);
                clear(round.slot, last.place + last.count, route.starts[std::size_t(g) + 1]);
                continue;
            }
            for (int source = 0; source < s_.ranks; ++source) {
                const Received& r = received(route, source, g);
                std::int64_t& dirty = dirty_[round.slot][std::size_t(source * groups(s_) + g)];
                clear(round.slot, r.place + r.count, r.place + dirty);
                dirty = r.count;
            }
        }
    }
    void clear(std::uint32_t slot, std::int64_t from, std::int64_t until) {
        if (until <= from) return;
        const RowArea area = receive_area(slot);
        const std::size_t bytes = std::size_t(until - from) * area.x_bytes;
        std::memset(f_.write(area.x(std::uint64_t(from)), bytes), 0, bytes);
    }

    void hand_out(const DispatchRound& round, const DispatchOutput& out) {
        Route& route = *round.state->route;
        std::int64_t done = 0;
        std::memset(out.tokens_per_expert, 0, 4 * std::size_t(local_experts(s_)));
        for (int g = 0; g < groups(s_); ++g)
            for (int source = 0; source < s_.ranks; ++source) {
                const Received& r = received(route, source, g);
                pad(out, done, r.place);
                if (r.count) hand_out_rows(round.slot, r, g, out);
                done = r.place + r.count;
            }
        pad(out, done, route.starts.back());
        if (out.expert_offsets) std::memcpy(out.expert_offsets, route.starts.data(), 8 * route.starts.size());
    }

    // The rows' records into the caller's planes, global ids as local ones.
    void hand_out_rows(std::uint32_t slot, const Received& r, int group, const DispatchOutput& out) {
        const std::size_t k = std::size_t(s_.top_k), scales = std::size_t(s_.scale_dim),
                          stride = std::size_t(meta_bytes(s_));
        const std::int32_t local_count = local_experts(s_), first = me_ * local_count;
        const std::byte* meta = f_.read(receive_area(slot).meta(std::uint64_t(r.place)), stride * std::size_t(r.count));
        if (s_.layout == Layout::expert) out.tokens_per_expert[group] += std::int32_t(r.count);
        for (std::size_t row = std::size_t(r.place); row < std::size_t(r.place + r.count); ++row, meta += stride) {
            const auto* ids = reinterpret_cast<const std::int32_t*>(meta) + scales;
            const auto* weights = reinterpret_cast<const float*>(ids + k);
            if (scales) std::memcpy(out.scales + row * scales, meta, 4 * scales);
            if (s_.layout == Layout::expert) {
                const std::int32_t* at = std::find(ids, ids + k, first + group);
                out.topk_idx[row] = group;
                out.topk_weights[row] = weights[at - ids];
                continue;
            }
            for (std::size_t j = 0; j < k; ++j) {
                const std::int32_t local = ids[j] - first;
                const bool mine = std::uint32_t(local) < std::uint32_t(local_count);
                out.topk_idx[row * k + j] = mine ? local : -1;
                out.topk_weights[row * k + j] = mine ? weights[j] : 0.0F;
                if (mine) ++out.tokens_per_expert[local];
            }
        }
    }

    void pad(const DispatchOutput& out, std::int64_t from, std::int64_t until) const {
        const std::int64_t k = s_.layout == Layout::rank ? s_.top_k : 1, scales = s_.scale_dim;
        if (until <= from) return;
        std::fill(out.topk_idx + from * k, out.topk_idx + until * k, -1);
        std::fill(out.topk_weights + from * k, out.topk_weights + until * k, 0.0F);
        if (scales) std::fill(out.scales + from * scales, out.scales + until * scales, 0.0F);
    }

    void quiet_sources() {
        for (int q = 0; q < used_queues(f_.queues()); ++q) f_.quiet(q, -1, QuietScope::source);
    }

    // Without completion entries nothing local says when sources are free: everyone's word that all arrived does.
    void exit(const DispatchRound& round) {
        for (int i = 1; i < s_.ranks; ++i)
            if (!is_lost(members_, peer(i)))
                f_.signal(0, peer(i), l_.staged(Sig::exit, round.offered[std::size_t(peer(i))], me_, 0), round.epoch,
                          SignalOp::set, Order::strong);
        for (int i = 1; i < s_.ranks; ++i)
            if (!is_lost(members_, peer(i)))
                f_.wait(l_.staged(Sig::exit, round.slot, peer(i), 0), round.epoch, peer(i), 0, "dispatch exit");
    }

    Fabric& f_;
    const BufferLayout l_;
    const EpShape s_;
    const Members members_;
    Agreement<Fabric>& agreement_;
    const int me_, node_;
    std::uint64_t epoch_ = 0;
    // Sources of puts, for each round in flight: they must not change before quiet or exit.
    std::vector<std::vector<std::byte>> meta_;
    std::vector<std::vector<std::int32_t>> header_;
    std::vector<std::vector<std::int64_t>> dirty_;  // [slot][ranks * groups]: rows filled by the slot's last use
};

}  // namespace hal::ep
