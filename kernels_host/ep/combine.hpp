// SPDX-License-Identifier: Apache-2.0
// Combine: rows go back to their home in the order in which they were sent, and are summed there in a fixed order
// (docs/contract.md, section 2).
//
//   send   wait until the home has finished the round that used this staging before; write the rows; say so
//   recv   [hierarchical: sum what this node owes to other nodes' homes, send one row for each token];
//          wait for every rank; sum; give the credit back
#pragma once
#include <cstring>
#include <string>
#include <vector>

#include "ep/agreement.hpp"
#include "ep/reduce.hpp"
#include "ep/rounds.hpp"
#include "ep/rows.hpp"
#include "hal/credit.hpp"
#include "hal/epoch.hpp"
#include "hal/placement.hpp"

namespace hal::ep {

struct CombineInput {
    const std::byte* x = nullptr;         // [rows, combine_row_bytes]
    const float* topk_weights = nullptr;  // as dispatch gave them; read with returns_weights only
    bool returns_weights = false;         // carry them back
    bool weighted = false;                // layout expert
    bool kept = false;                    // x stays unchanged until the round is received
};

struct CombineOutput {
    void* y = nullptr;              // [tokens, combine_row_bytes]
    float* topk_weights = nullptr;  // [tokens, k]
};

template <class Fabric>
class Combine {
  public:
    // `by_node`: sums are made node by node, whichever way rows travel.
    Combine(Fabric& fabric, const BufferLayout& layout, Element element, bool by_node, const Members& members,
            Agreement<Fabric>& agreement)
        : f_(fabric), l_(layout), s_(layout.shape), element_(element), by_node_(by_node), members_(members),
          agreement_(agreement), me_(fabric.rank()), node_(node_of(s_, me_)), partial_(std::size_t(s_.num_buffers)),
          partial_weights_(std::size_t(s_.num_buffers)),
          node_sums_(by_node && !is_hierarchical(s_) ? std::size_t(s_.nodes) * row_bytes() : 0) {}

    CombineRound send(const CombineInput& in, std::shared_ptr<State> state) {
        const std::uint64_t depth = std::uint64_t(s_.num_buffers);
        if (epoch_ + 1 > finished_.all_until + depth)
            throw ContractViolation("combine " + std::to_string(finished_.all_until + 1) +
                                    " was sent and not received, and " + std::to_string(depth) +
                                    " may be in flight; receive it first, or raise num_buffers");
        // Weights travel with their rows, so with weights a rank's own rows go through the staging too.
        const std::byte* kept_x = in.kept && !in.returns_weights ? in.x : nullptr;
        CombineRound round{++epoch_, std::move(state), in.weighted, in.returns_weights, kept_x, false};
        for (int i = 1; i < near_ranks(); ++i) {
            const int p = near(i);
            if (is_lost(members_, p)) continue;
            // The staging's last user was round n - depth; its home must have summed it.
            const std::uint64_t credit = wanted_credit(round.epoch, depth);
            if (credit) f_.wait(l_.signal(Sig::credit, std::uint64_t(p)), credit, p, 0, "combine credit");
            if (is_hierarchical(s_)) send_gather(round, in, p);
            send_home(round, in, p);
        }
        if (is_hierarchical(s_)) send_gather(round, in, me_);
        if (!round.kept_x) send_home(round, in, me_);
        if (s_.completion != Completion::strong_signal_no_cqe) quiet_sources();
        return round;
    }

    void recv(CombineRound& round, const void* const* bias, int bias_count, const CombineOutput& out) {
        if (is_hierarchical(s_)) send_partials(round);
        for (int i = 1; i < s_.ranks; ++i) {
            const int p = (me_ + i) % s_.ranks;
            if (is_lost(members_, p)) continue;
            if (!is_near(p) && rail_of(s_, me_, node_of(s_, p)) != p) continue;
            const std::size_t weights = is_near(p) ? row_weights() : std::size_t(s_.top_k);
            RowReader<Fabric> reader(f_, s_.completion, p, home_area(round), arrival(Sig::home, round, p),
                                     round.returns_weights ? 4 * weights : 0, "combine rows");
            reader.wait();
            take_home(round, reader, p);
        }
        agreement_.say();
        sum_home(round, bias, bias_count, out);
        finish(round);
        agreement_.await("combine agreement");
    }

  private:
    bool is_near(int rank) const { return !is_hierarchical(s_) || node_of(s_, rank) == node_; }
    int near_ranks() const { return is_hierarchical(s_) ? node_ranks(s_) : s_.ranks; }
    // This rank's direct peers, each rank starting at another one.
    int near(int i) const {
        return is_hierarchical(s_) ? node_ * node_ranks(s_) + (me_ + i) % node_ranks(s_) : (me_ + i) % s_.ranks;
    }
    int first_near() const { return is_hierarchical(s_) ? node_ * node_destinations(s_) : 0; }
    int end_near() const { return is_hierarchical(s_) ? (node_ + 1) * node_destinations(s_) : destinations(s_); }
    // Weights of a row that comes from one rank: layout rank's rows carry all k positions, layout expert's their own.
    std::size_t row_weights() const { return s_.layout == Layout::rank ? std::size_t(s_.top_k) : 1; }
    std::size_t row_bytes() const { return std::size_t(s_.combine_row_bytes); }

    std::uint64_t stage(const CombineRound& r) const { return ring_slot(r.epoch, std::uint64_t(s_.num_buffers)); }
    RowArea home_area(const CombineRound& r) const { return BufferLayout::nth(l_.home, stage(r)); }
    RowArea gather_area(const CombineRound& r) const { return BufferLayout::nth(l_.gather, stage(r)); }
    Arrival arrival(Sig kind, const CombineRound& r, int publisher) const {
        return {{l_.staged(kind, stage(r), publisher, 0), l_.staged(kind, stage(r), publisher, 1)},
                rows_word(r.epoch, r.returns_weights)};
    }
    const Received& received(const Route& route, int home, int group) const {
        return route.received[std::size_t(home * groups(s_) + group)];
    }

    // A row of this rank's x, with its weights if they are carried back.
    Record record(const CombineRound& round, const CombineInput& in, std::int64_t row) const {
        const std::size_t r = std::size_t(row), n = row_weights();
        return {in.x + r * row_bytes(), row_bytes(), round.returns_weights ? in.topk_weights + r * n : nullptr,
                round.returns_weights ? 4 * n : 0};
    }

    // Rows of the tokens whose home is p.
    void send_home(const CombineRound& round, const CombineInput& in, int p) {
        send_leg(round, in, p, Sig::home, home_area(round), {p});
    }
    // Rows of the tokens of other nodes whose partial sums p computes.
    void send_gather(const CombineRound& round, const CombineInput& in, int p) {
        std::vector<int> homes;
        for (int i = 0; i < s_.nodes - 1; ++i) homes.push_back(rail_of(s_, p, other_node(i, node_)));
        send_leg(round, in, p, Sig::gather, gather_area(round), homes);
    }

    void send_leg(const CombineRound& round, const CombineInput& in, int p, Sig kind, const RowArea& area,
                  const std::vector<int>& homes) {
        const Route& route = *round.state->route;
        std::int64_t total = 0;
        for (const int home : homes)
            for (int g = 0; g < groups(s_); ++g) total += received(route, home, g).count;
        RowWriter<Fabric> writer(f_, s_.completion, p, area, arrival(kind, round, me_), total);
        for (const int home : homes)
            for (int g = 0; g < groups(s_); ++g) {
                const Received& r = received(route, home, g);
                const std::int64_t back = is_hierarchical(s_) ? r.back : r.flat_back;
                for (std::int64_t n = 0; n < r.count; ++n) {
                    const Record record_n = record(round, in, r.place + n);
                    if (p == me_)
                        local_row(f_, area, std::uint64_t(back + n), record_n);
                    else
                        writer.row(std::uint64_t(back + n), record_n);
                }
            }
        if (p != me_) writer.complete();
    }

    // Hierarchical: this rank sums, for its rails on other nodes, what its node's ranks computed.
    void send_partials(const CombineRound& round) {
        const Route& route = *round.state->route;
        for (int i = 1; i < node_ranks(s_); ++i) {
            const int p = near(i);
            RowReader<Fabric> reader(f_, s_.completion, p, gather_area(round), arrival(Sig::gather, round, p),
                                     round.returns_weights ? 4 * row_weights() : 0, "combine gather rows");
            reader.wait();
            for (const Forward& fwd : route.forwards)
                for (int d = p * groups(s_); d < (p + 1) * groups(s_); ++d)
                    reader.take(std::uint64_t(fwd.gather[std::size_t(d)]), std::uint64_t(fwd.routing.rows_to(d)));
        }
        std::size_t tokens = 0, first = 0;
        for (const Forward& fwd : route.forwards) tokens += std::size_t(fwd.routing.tokens);
        partial_[stage(round)].resize(tokens * row_bytes());
        partial_weights_[stage(round)].assign(round.returns_weights ? tokens * std::size_t(s_.top_k) : 0, 0.0F);
        for (int i = 1; i < s_.nodes; ++i) first += send_partial(round, (node_ + i) % s_.nodes, first);
        if (s_.completion != Completion::strong_signal_no_cqe) quiet_sources();
    }

    // One row for each token that crossed from `node`. They are built from `first` on; returns how many.
    std::size_t send_partial(const CombineRound& round, int node, std::size_t first) {
        const std::size_t index = std::size_t(other_index(node, node_)), k = std::size_t(s_.top_k);
        const Forward& fwd = round.state->route->forwards[index];
        const int home = rail_of(s_, me_, node);
        // send() waited for this node's homes only; this one may still be summing the staging's last round.
        const std::uint64_t credit = wanted_credit(round.epoch, std::uint64_t(s_.num_buffers));
        if (credit) f_.wait(l_.signal(Sig::credit, std::uint64_t(home)), credit, home, 0, "combine credit");
        RowWriter<Fabric> writer(f_, s_.completion, home, home_area(round), arrival(Sig::home, round, me_),
                                 fwd.routing.tokens);
        for (std::int32_t t = 0; t < fwd.routing.tokens; ++t) {
            std::byte* y = partial_[stage(round)].data() + (first + std::size_t(t)) * row_bytes();
            terms_.clear();
            const float* weights = round.weighted ? round.state->forward_weights[index].data() : nullptr;
            add_terms(fwd.routing, t, 0, destinations(s_), weights, [&](const Stop& stop) {
                return staged_row(gather_area(round), fwd.gather[std::size_t(stop.destination)] + stop.nth);
            });
            sum(round.weighted, 0, 0, nullptr, 0, y);
            Record record{y, row_bytes(), nullptr, 0};
            if (round.returns_weights) {
                float* w = partial_weights_[stage(round)].data() + (first + std::size_t(t)) * k;
                copy_weights(fwd.routing, t, 0, destinations(s_), gather_area(round), w,
                             [&](const Stop& stop) { return fwd.gather[std::size_t(stop.destination)] + stop.nth; });
                record.meta = w;
                record.meta_bytes = 4 * k;
            }
            writer.row(std::uint64_t(partial_base(s_, node_, node) + t), record);
        }
        writer.complete();
        return std::size_t(fwd.routing.tokens);
    }

    void take_home(const CombineRound& round, RowReader<Fabric>& reader, int p) {
        const Route& route = *round.state->route;
        const int node = node_of(s_, p), first = p * groups(s_);
        if (!is_near(p)) {
            reader.take(std::uint64_t(partial_base(s_, node, node_)),
                        route.crossing[std::size_t(other_index(node, node_))].size());
            return;
        }
        for (int d = first; d < first + groups(s_); ++d)
            reader.take(std::uint64_t(route.home.row_of({d, 0, 0}, first_near())),
                        std::uint64_t(route.home.rows_to(d)));
    }

    // Every term of every token, nodes ascending; within this node, and without nodes, in the routing's own order.
    void sum_home(const CombineRound& round, const void* const* bias, int bias_count, const CombineOutput& out) {
        const Route& route = *round.state->route;
        const RowArea area = home_area(round);
        const float* weights = round.weighted ? round.state->weights.data() : nullptr;
        std::vector<std::size_t> crossed(route.crossing.size(), 0);  // how many tokens of each node's list are behind
        const auto near_row = [&](const Stop& stop) { return route.home.row_of(stop, first_near()); };
        const auto near_x = [&](const Stop& stop) -> const void* {
            if (!round.kept_x || owner_of(s_, stop.destination) != me_) return staged_row(area, near_row(stop));
            const std::int64_t row = received(route, me_, stop.destination % groups(s_)).place + stop.nth;
            return round.kept_x + std::size_t(row) * row_bytes();
        };
        for (std::int32_t t = 0; t < route.home.tokens; ++t) {
            terms_.clear();
            int inner_begin = 0, inner_end = 0;
            if (out.topk_weights) {
                float* returned = out.topk_weights + std::int64_t(t) * s_.top_k;
                std::fill_n(returned, s_.top_k, 0.0F);
                copy_weights(route.home, t, first_near(), end_near(), area, returned, near_row);
            }
            const int nodes = by_node_ ? s_.nodes : 1, node_width = destinations(s_) / nodes;
            for (int node = 0; node < nodes; ++node) {
                const int first = node * node_width;
                if (nodes == 1 || node == node_) {
                    inner_begin = int(terms_.rows.size());
                    add_terms(route.home, t, first, first + node_width, weights, near_x);
                    inner_end = int(terms_.rows.size());
                } else if (!is_hierarchical(s_)) {
                    sum_node_here(round, t, node, weights, near_x);
                } else {
                    const std::size_t index = std::size_t(other_index(node, node_));
                    std::size_t& n = crossed[index];
                    if (n == route.crossing[index].size() || route.crossing[index][n] != t) continue;
                    add_partial(route, t, node, std::uint64_t(partial_base(s_, node, node_)) + n++, area, out);
                }
            }
            if (nodes == 1) inner_begin = inner_end = 0;  // one flat sum
            const void* biases[2] = {};
            for (int b = 0; b < bias_count; ++b)
                biases[b] = static_cast<const std::byte*>(bias[b]) + std::size_t(t) * row_bytes();
            sum(round.weighted, inner_begin, inner_end, biases, bias_count,
                static_cast<std::byte*>(out.y) + std::size_t(t) * row_bytes());
        }
    }

    // Rows of another node that came the direct way: the partial sum that the node would have sent, rounded as it would be.
    template <class RowOf>
    void sum_node_here(const CombineRound& round, std::int32_t t, int node, const float* weights, const RowOf& x) {
        Terms home;
        std::swap(home, terms_);
        add_terms(round.state->route->home, t, node * node_destinations(s_), (node + 1) * node_destinations(s_),
                  weights, x);
        const bool any = !terms_.rows.empty();
        std::byte* y = node_sums_.data() + std::size_t(node) * row_bytes();
        if (any) sum(round.weighted, 0, 0, nullptr, 0, y);
        std::swap(home, terms_);
        if (!any) return;
        terms_.rows.push_back(y);
        terms_.weights.push_back(1.0F);
    }

    // Another node's partial sum, already weighted and rounded.
    void add_partial(const Route& route, std::int32_t t, int node, std::uint64_t row, const RowArea& area,
                     const CombineOutput& out) {
        terms_.rows.push_back(staged_row(area, std::int64_t(row)));
        terms_.weights.push_back(1.0F);
        if (!out.topk_weights) return;
        const std::size_t k = std::size_t(s_.top_k), at = std::size_t(t) * k;
        const auto* w = reinterpret_cast<const float*>(f_.read(area.meta(row), 4 * k));
        for (std::size_t j = 0; j < k; ++j) {
            const std::int32_t id = route.home.ids[at + j];
            if (id >= 0 && node_of(s_, owner_of(s_, destination_of(s_, id))) == node) out.topk_weights[at + j] = w[j];
        }
    }

    // A row that never comes: its expert's rank was lost after the dispatch.
    bool gone(const Stop& stop) const { return is_lost(members_, owner_of(s_, stop.destination)); }

    const void* staged_row(const RowArea& area, std::int64_t row) {
        return f_.read(area.x(std::uint64_t(row)), area.x_bytes);
    }

    // Terms of token t from destinations [first, end); x(stop) is the row itself. `weights` [tokens, k] or null.
    template <class RowOf>
    void add_terms(const Routing& routing, std::int32_t t, int first, int end, const float* weights, const RowOf& x) {
        for (std::int32_t i = routing.first_stop[std::size_t(t)]; i < routing.first_stop[std::size_t(t) + 1]; ++i) {
            const Stop& stop = routing.stops[std::size_t(i)];
            if (stop.destination < first || stop.destination >= end || gone(stop)) continue;
            terms_.rows.push_back(x(stop));
            terms_.weights.push_back(weights ? weights[std::int64_t(t) * s_.top_k + stop.position] : 1.0F);
        }
    }

    // Weights that came back with token t's rows, each to its position.
    template <class Row>
    void copy_weights(const Routing& routing, std::int32_t t, int first, int end, const RowArea& area, float* out,
                      const Row& row) {
        const std::int32_t* ids = routing.ids.data() + std::int64_t(t) * s_.top_k;
        for (std::int32_t i = routing.first_stop[std::size_t(t)]; i < routing.first_stop[std::size_t(t) + 1]; ++i) {
            const Stop& stop = routing.stops[std::size_t(i)];
            if (stop.destination < first || stop.destination >= end || gone(stop)) continue;
            const auto* w =
                reinterpret_cast<const float*>(f_.read(area.meta(std::uint64_t(row(stop))), 4 * row_weights()));
            if (s_.layout == Layout::expert) {
                out[stop.position] = w[0];
                continue;
            }
            for (std::int32_t j = 0; j < s_.top_k; ++j)
                if (ids[j] >= 0 && destination_of(s_, ids[j]) == stop.destination) out[j] = w[j];
        }
    }

    void sum(bool weighted, int inner_begin, int inner_end, const void* const* bias, int bias_count, void* y) const {
        sum_rows(element_,
                 {terms_.rows.data(), weighted ? terms_.weights.data() : nullptr, int(terms_.rows.size()), inner_begin,
                  inner_end, bias, bias_count},
                 row_bytes() / element_bytes(element_), y);
    }

    // The credit says "this round and all before", so a round that is received early waits for its turn.
    void finish(CombineRound& round) {
        round.received = true;
        const std::uint64_t before = finished_.all_until;
        finished_.finish(round.epoch);
        if (finished_.all_until == before) return;
        for (int i = 1; i < s_.ranks; ++i)
            if (const int p = (me_ + i) % s_.ranks; !is_lost(members_, p))
                f_.signal(0, p, l_.signal(Sig::credit, std::uint64_t(me_)), finished_.all_until, SignalOp::set,
                          Order::strong);
        if (s_.completion != Completion::strong_signal_no_cqe) return;
        // Without completion entries, everyone's credit is what says that this rank's sources are read no more.
        for (int i = 1; i < s_.ranks; ++i) {
            const int p = (me_ + i) % s_.ranks;
            if (is_lost(members_, p)) continue;
            f_.wait(l_.signal(Sig::credit, std::uint64_t(p)), finished_.all_until, p, 0, "combine exit");
        }
    }

    void quiet_sources() {
        for (int q = 0; q < used_queues(f_.queues()); ++q) f_.quiet(q, -1, QuietScope::source);
    }

    struct Terms {
        std::vector<const void*> rows;
        std::vector<float> weights;
        void clear() {
            rows.clear();
            weights.clear();
        }
    };

    Fabric& f_;
    const BufferLayout l_;
    const EpShape s_;
    const Element element_;
    const bool by_node_;
    const Members members_;
    Agreement<Fabric>& agreement_;
    const int me_, node_;
    std::uint64_t epoch_ = 0;
    FinishedRounds finished_;
    Terms terms_;  // of the token being summed
    // Partial sums on their way, for each round in flight.
    std::vector<std::vector<std::byte>> partial_;
    std::vector<std::vector<float>> partial_weights_;
    std::vector<std::byte> node_sums_;  // of the token being summed, where rows came the direct way: [nodes] rows
};

}  // namespace hal::ep
