// SPDX-License-Identifier: Apache-2.0
#include "checker/masking_subject.hpp"

#include <algorithm>
#include <cstring>
#include <deque>
#include <memory>

#include "checker/check_fabric.hpp"
#include "ep/kernels.hpp"
#include "hal/buffer_layout.hpp"

namespace hal::checker {
namespace {

constexpr std::uint64_t line = 64;  // bytes between words of different publishers

// One view's stretch of the window.
class ViewFabric {
  public:
    ViewFabric(CheckFabric& fabric, std::uint64_t base, std::uint64_t bytes, const Members& members)
        : f_(&fabric), base_(base), bytes_(bytes), members_(members) {}

    int rank() const { return f_->rank(); }
    int world_size() const { return f_->world_size(); }
    int queues() const { return f_->queues(); }
    std::size_t size() const { return bytes_; }
    const std::byte* read(std::size_t offset, std::size_t nbytes) { return f_->read(base_ + offset, nbytes); }
    std::byte* write(std::size_t offset, std::size_t nbytes) { return f_->write(base_ + offset, nbytes); }
    void put(int queue, int peer, std::size_t dst, const void* src, std::size_t nbytes, Order order) {
        f_->put(queue, peer, base_ + dst, src, nbytes, order);
    }
    void signal(int queue, int peer, std::size_t slot, std::uint64_t value, SignalOp op, Order order) {
        f_->signal(queue, peer, base_ + slot, value, op, order);
    }
    std::uint64_t wait(std::size_t slot, std::uint64_t at_least, int source, int queue, const char* stage) {
        return f_->wait(base_ + slot, at_least, source, queue, stage, members_.view + 1);
    }
    void quiet(int queue, int peer, QuietScope scope) { f_->quiet(queue, peer, scope); }
    std::uint64_t base() const { return base_; }

  private:
    CheckFabric* f_;
    std::uint64_t base_, bytes_;
    Members members_;
};

struct View {
    View(CheckFabric& f, std::uint64_t base, std::uint64_t bytes, const EpShape& shape, const Members& m)
        : members(m), fabric(f, base, bytes, m), kernels(fabric, shape, ep::Element::float32, m) {}
    const Members members;
    ViewFabric fabric;
    ep::Kernels<ViewFabric> kernels;
};

struct Masked {};  // the others left this rank out

template <class T>
void keep(std::vector<std::byte>& out, const std::vector<T>& v) {
    const auto* p = reinterpret_cast<const std::byte*>(v.data());
    out.insert(out.end(), p, p + v.size() * sizeof(T));
}

class RankRun {
  public:
    RankRun(const EpScenario& s, CheckFabric& f, std::uint64_t view_bytes, std::uint64_t most_views,
            std::vector<std::byte>& out)
        : s_(s), f_(f), view_bytes_(view_bytes), most_views_(most_views), out_(out), rank_(f.rank()),
          tokens_(s.tokens[std::size_t(rank_)]), width_(std::size_t(s.shape.row_bytes) / 4) {
        enter(Members{});
    }

    void all() {
        for (int r = 0; r < s_.rounds; r += s_.in_flight) {
            const int n = std::min(s_.in_flight, s_.rounds - r);
            std::deque<Operation> dispatches(static_cast<std::size_t>(n));
            for (int i = 0; i < n; ++i) {
                prepare(dispatches[std::size_t(i)], r + i);
                begin(dispatches[std::size_t(i)]);
            }
            for (Operation& d : dispatches) end(d);
            for (Operation& d : dispatches) {
                Operation c = combine_of(d);
                begin(c);
                end(c);
            }
        }
    }

  private:
    struct Operation {
        bool dispatches = true;
        int number = 0;
        View* view = nullptr;  // in which it was sent last
        ep::DispatchRound dispatch;
        ep::CombineRound combine;
        std::shared_ptr<ep::State> state;
        std::vector<float> x, weights, rows, row_weights;
        std::vector<std::int32_t> ids, idx, per_expert;
        std::vector<std::int64_t> offsets;
        std::vector<float> y;
    };

    void prepare(Operation& o, int number) const {
        const EpShape& sh = s_.shape;
        o.number = number;
        o.x.resize(std::size_t(tokens_) * width_);
        for (std::size_t i = 0; i < o.x.size(); ++i) o.x[i] = float(1 + number * 1000 + rank_ * 100) + float(i);
        o.weights.resize(std::size_t(tokens_) * std::size_t(sh.top_k));
        for (std::size_t i = 0; i < o.weights.size(); ++i)
            o.weights[i] = 0.5F + float(i + std::size_t(number) + std::size_t(rank_));
        o.ids = s_.topk_idx[std::size_t(rank_)];
        for (std::int32_t& id : o.ids)
            if (id >= 0) id = (id + number) % sh.num_experts;
    }

    Operation combine_of(const Operation& d) const {
        Operation c;
        c.dispatches = false;
        c.number = d.number;
        c.state = d.dispatch.state;
        c.rows.resize(d.rows.size());
        for (std::size_t i = 0; i < c.rows.size(); ++i) c.rows[i] = d.rows[i] * float(rank_ + 2);
        return c;
    }

    // --- one operation in one view

    void send(Operation& o) {
        ep::Kernels<ViewFabric>& k = view_->kernels;
        if (!o.dispatches) {
            o.combine = k.combine_send({reinterpret_cast<const std::byte*>(o.rows.data()), nullptr, false, false, true},
                                       o.state);
            return;
        }
        const ep::DispatchInput in{
            reinterpret_cast<const std::byte*>(o.x.data()), tokens_, o.ids.data(), false, o.weights.data(), nullptr};
        o.dispatch = k.dispatch_send(std::uint32_t(o.number % s_.shape.num_buffers), in, nullptr);
    }

    void make_room(Operation& o) {
        const EpShape& sh = s_.shape;
        if (!o.dispatches) return o.y.assign(std::size_t(tokens_) * width_, 77.0F);
        const std::size_t rows = std::size_t(view_->kernels.rows(o.dispatch)),
                          each = sh.layout == Layout::rank ? std::size_t(sh.top_k) : 1;
        o.idx.assign(rows * each, 77);
        o.row_weights.assign(rows * each, 77.0F);
        o.per_expert.assign(std::size_t(local_experts(sh)), 77);
        o.offsets.assign(std::size_t(local_experts(sh)) + 1, 77);
    }

    void receive(Operation& o) {
        ep::Kernels<ViewFabric>& k = view_->kernels;
        if (!o.dispatches) return k.combine_recv(o.combine, nullptr, 0, {o.y.data(), nullptr});
        k.dispatch_recv(o.dispatch, {nullptr, o.idx.data(), o.row_weights.data(), o.per_expert.data(),
                                     s_.shape.layout == Layout::expert ? o.offsets.data() : nullptr});
    }

    void hand_out(Operation& o, View& view) {
        const std::vector<std::int64_t> header{!o.dispatches, o.number, std::int64_t(view.members.lost)};
        if (!o.dispatches) {
            keep(out_, header);
            return keep(out_, o.y);
        }
        const std::size_t rows = std::size_t(view.kernels.rows(o.dispatch));
        o.rows.resize(rows * width_);
        if (rows)
            std::memcpy(o.rows.data(), view.fabric.read(view.kernels.received_x(o.dispatch), rows * width_ * 4),
                        rows * width_ * 4);
        keep(out_, header);  // a rank that stops before here has not ended the call
        keep(out_, o.rows);
        keep(out_, o.idx);
        keep(out_, o.row_weights);
        keep(out_, o.per_expert);
    }

    // --- operations over views: MaskingEngine

    void begin(Operation& o) {
        open_.push_back(&o);
        for (;;) {
            std::optional<PeerTimeoutError> error;
            try {
                send_all();
                return;
            } catch (const PeerTimeoutError& e) {
                error = e;
            }
            renew(*error);
        }
    }

    void end(Operation& o) {
        for (;;) {
            std::optional<PeerTimeoutError> error;
            View* view = nullptr;
            bool room = false;
            try {
                send_all();
                view = view_;
                make_room(o);
                room = true;
                receive(o);
                ++ended_;
            } catch (const PeerTimeoutError& e) {
                error = e;
            }
            if (error && room && has_ended_elsewhere()) {
                view->kernels.end_round();
                ++ended_;
            } else if (error) {
                const std::uint64_t ended = renew(*error);
                if (ended == ended_ || !room) continue;
                ended_ = ended;
            }
            open_.erase(std::find(open_.begin(), open_.end(), &o));
            return hand_out(o, *view);
        }
    }

    void send_all() {
        if (newest(view_->members).view > view_->members.view) renew(PeerTimeoutError(-1, "", 0, 0, 0, 0.0, ""));
        for (Operation* o : open_)
            if (o->view != view_) {
                send(*o);
                o->view = view_;
            }
    }

    std::uint64_t renew(PeerTimeoutError error) {
        Members tried = view_->members;
        std::uint64_t ended = ended_;
        for (;;) {
            const Members m = leave_out(tried, error);
            ended = std::max(ended, ended_on(m.lost & ~tried.lost));
            std::optional<PeerTimeoutError> again;
            try {
                ended = meet(m, ended);
            } catch (const PeerTimeoutError& e) {
                again = e;
            }
            if (!again) {
                ended_before_ = ended;
                enter(m);
                return ended;
            }
            tried = m;
            error = *again;
        }
    }

    Members newest(Members from) {
        while (from.view + 1 < most_views_) {
            const std::uint64_t lost = f_.compare_and_set(from.view + 1, 0, 0);
            if (!lost) break;
            from = {from.view + 1, lost};
        }
        return from;
    }

    Members leave_out(const Members& tried, const PeerTimeoutError& error) {
        Members now = newest(tried);
        if (now.view == tried.view) {
            std::uint64_t lost = now.lost;
            for (int r = 0; r < s_.shape.ranks; ++r)
                if (r == error.rank || f_.gone(r)) lost |= rank_bit(r);
            lost &= ~rank_bit(rank_);
            if (lost == now.lost) throw error;
            f_.compare_and_set(now.view + 1, 0, lost);
            now = newest(tried);
        }
        if (is_lost(now, rank_)) throw Masked{};
        return now;
    }

    std::uint64_t word(int rank) const {
        return view_->fabric.base() + view_->kernels.layout().signal(Sig::agreed, std::uint64_t(rank));
    }

    bool has_ended_elsewhere() {
        for (int r = 0; r < s_.shape.ranks; ++r)
            if (r != rank_ && !is_lost(view_->members, r) && f_.peer_word(r, word(r)) > ended_ - ended_before_)
                return true;
        return false;
    }

    std::uint64_t ended_on(std::uint64_t lost) const {
        std::uint64_t most = 0;
        for (int r = 0; r < s_.shape.ranks; ++r)
            if ((lost & rank_bit(r)) && f_.gone(r)) most = std::max(most, ended_before_ + f_.last_word(r, word(r)));
        return most;
    }

    // Those that are left tell each other how many rounds have ended.
    std::uint64_t meet(const Members& m, std::uint64_t ended) {
        const std::uint64_t ranks = std::uint64_t(s_.shape.ranks);
        const auto message = [&](int r) {
            return most_views_ * view_bytes_ + (m.view * ranks + std::uint64_t(r)) * line;
        };
        for (int r = 0; r < s_.shape.ranks; ++r)
            if (r != rank_ && !is_lost(m, r)) f_.signal(0, r, message(rank_), ended + 1, SignalOp::set, Order::strong);
        for (int r = 0; r < s_.shape.ranks; ++r)
            if (r != rank_ && !is_lost(m, r))
                ended = std::max(ended, f_.wait(message(r), 1, r, 0, "agreement after a lost rank", m.view + 1) - 1);
        return ended;
    }

    void enter(const Members& m) {
        views_.push_back(std::make_unique<View>(f_, m.view * view_bytes_, view_bytes_, s_.shape, m));
        view_ = views_.back().get();
    }

    const EpScenario& s_;
    CheckFabric& f_;
    const std::uint64_t view_bytes_, most_views_;
    std::vector<std::byte>& out_;
    const int rank_;
    const std::int32_t tokens_;
    const std::size_t width_;
    std::vector<std::unique_ptr<View>> views_;
    View* view_ = nullptr;
    std::vector<Operation*> open_;
    std::uint64_t ended_ = 0, ended_before_ = 0;
};

}  // namespace

MaskingSubject::MaskingSubject(EpScenario scenario, const Profile& profile)
    : scenario_(std::move(scenario)), profile_(profile), most_views_(std::uint64_t(scenario_.shape.ranks)) {
    view_bytes_ =
        std::max(buffer_layout(scenario_.shape).total, buffer_layout(shape_in_view(scenario_.shape, {1, 1})).total);
}

WorldConfig MaskingSubject::start() {
    const std::size_t ranks = std::size_t(scenario_.shape.ranks);
    outputs_.assign(ranks, {});
    ends_.assign(ranks, "stopped");
    calls_.assign(ranks, 0);
    WorldConfig c;
    c.profile = profile_;
    c.ranks = int(ranks);
    c.queues = scenario_.queues;
    const std::uint64_t meetings = most_views_ * view_bytes_;
    c.views = meetings + most_views_ * ranks * line;
    c.most_views = most_views_;
    c.window_bytes = c.views + 8 * most_views_ + line;
    c.piece_bytes = scenario_.piece_bytes;
    c.faults = faults_;
    c.mutation = mutation_;
    c.track = track_;
    for (int r = 0; r < c.ranks; ++r) c.thread_rank.push_back(r);
    c.body = [this](int thread, CheckFabric& fabric) { run_rank(thread, fabric); };
    return c;
}

std::vector<std::uint8_t> MaskingSubject::outcome(const World& world) {
    for (std::size_t r = 0; r < calls_.size(); ++r) calls_[r] = world.calls_of(int(r));
    return {};
}

void MaskingSubject::run_rank(int rank, CheckFabric& fabric) {
    try {
        RankRun(scenario_, fabric, view_bytes_, most_views_, outputs_[std::size_t(rank)]).all();
        ends_[std::size_t(rank)] = "went on";
    } catch (const Masked&) {
        ends_[std::size_t(rank)] = "masked";
    }
}

}  // namespace hal::checker
