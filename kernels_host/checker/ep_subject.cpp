// SPDX-License-Identifier: Apache-2.0
#include "checker/ep_subject.hpp"

#include <cstring>
#include <deque>

#include "checker/check_fabric.hpp"
#include "ep/kernels.hpp"
#include "hal/buffer_layout.hpp"

namespace hal::checker {
namespace {

template <class T>
void keep(std::vector<std::byte>& out, const std::vector<T>& v) {
    const auto* p = reinterpret_cast<const std::byte*>(v.data());
    out.insert(out.end(), p, p + v.size() * sizeof(T));
}

}  // namespace

EpSubject::EpSubject(EpScenario scenario, const Profile& profile, std::size_t max_bytes)
    : scenario_(std::move(scenario)), profile_(profile), window_bytes_(buffer_layout(scenario_.shape).total),
      max_bytes_(max_bytes) {
    // What is right is what one rank after the other, every operation at once, gives; tests hold that against the
    // reference (hal/reference.py).
    Profile sc;
    sc.at_issue = sc.source_read_at_issue = sc.origin_scope = sc.none_is_relaxed = true;
    EpSubject yardstick(*this, sc);
    yardstick.track_ = false;
    const RunReport r = run(yardstick, {});
    if (r.failed()) throw std::invalid_argument("the scenario fails under sc: " + r.failure);
    if (!r.stopped) expected_ = yardstick.outputs_;
}

EpSubject::EpSubject(const EpSubject& other, const Profile& profile)
    : scenario_(other.scenario_), profile_(profile), window_bytes_(other.window_bytes_), max_bytes_(other.max_bytes_) {}

WorldConfig EpSubject::start() {
    outputs_.assign(std::size_t(scenario_.shape.ranks), {});
    ended_.assign(std::size_t(scenario_.shape.ranks), false);
    WorldConfig c;
    c.profile = profile_;
    c.ranks = scenario_.shape.ranks;
    c.queues = scenario_.queues;
    c.window_bytes = window_bytes_;
    c.piece_bytes = scenario_.piece_bytes;
    c.faults = faults_;
    c.mutation = mutation_;
    c.track = track_;
    c.least_waits = least_waits_;
    c.max_bytes = max_bytes_;
    for (int r = 0; r < c.ranks; ++r) c.thread_rank.push_back(r);
    c.body = [this](int thread, CheckFabric& fabric) { run_rank(thread, fabric); };
    return c;
}

namespace {

// One rank's calls. Inputs are overwritten as soon as the interface allows it, so a late source read is seen.
class RankRun {
  public:
    RankRun(const EpScenario& s, CheckFabric& f, std::vector<std::byte>& out)
        : s_(s), f_(f), out_(out), kernels_(f, s.shape, ep::Element::float32), rank_(f.rank()),
          tokens_(s.tokens[std::size_t(rank_)]), width_(std::size_t(s.shape.row_bytes) / 4) {}

    void all() {
        std::shared_ptr<ep::State> first;
        for (int r = 0; r < s_.rounds; r += s_.in_flight) {
            const int n = std::min(s_.in_flight, s_.rounds - r);
            std::vector<Batch> batches(static_cast<std::size_t>(n));
            for (int i = 0; i < n; ++i) {
                dispatch(batches[std::size_t(i)], r + i, s_.reuse_handle ? first.get() : nullptr);
                if (!first) first = batches[std::size_t(i)].round.state;
            }
            for (Batch& b : batches) combines(b);
        }
    }

  private:
    struct Batch {
        ep::DispatchRound round;
        std::vector<float> x, rows, weights;
        std::vector<std::int32_t> idx, per_expert;
        std::vector<std::int64_t> offsets;
    };

    // Without completion entries sources are free only when the round has been received.
    bool free_after_send() const { return s_.shape.completion != Completion::strong_signal_no_cqe; }

    void dispatch(Batch& b, int number, const ep::State* reused) {
        const EpShape& sh = s_.shape;
        const std::size_t k = std::size_t(sh.top_k);
        b.x.resize(std::size_t(tokens_) * width_);
        for (std::size_t i = 0; i < b.x.size(); ++i) b.x[i] = float(1 + number * 1000 + rank_ * 100) + float(i);
        std::vector<float> weights(std::size_t(tokens_) * k);
        for (std::size_t i = 0; i < weights.size(); ++i)
            weights[i] = 0.5F + float(i + std::size_t(number) + std::size_t(rank_));
        std::vector<std::int32_t> ids = s_.topk_idx[std::size_t(rank_)];
        for (std::int32_t& id : ids)
            if (id >= 0) id = (id + number) % sh.num_experts;
        const ep::DispatchInput in{reinterpret_cast<const std::byte*>(b.x.data()),
                                   tokens_,
                                   reused ? nullptr : ids.data(),
                                   false,
                                   weights.data(),
                                   nullptr};
        b.round = kernels_.dispatch_send(std::uint32_t(number % sh.num_buffers), in, reused);
        std::fill(weights.begin(), weights.end(), -1.0F);
        if (free_after_send()) std::fill(b.x.begin(), b.x.end(), -1.0F);
        const std::size_t rows = std::size_t(kernels_.rows(b.round)), each = sh.layout == Layout::rank ? k : 1;
        b.idx.assign(rows * each, 77);
        b.weights.assign(rows * each, 77.0F);
        b.per_expert.assign(std::size_t(local_experts(sh)), 77);
        b.offsets.assign(std::size_t(local_experts(sh)) + 1, 77);
        kernels_.dispatch_recv(b.round, {nullptr, b.idx.data(), b.weights.data(), b.per_expert.data(),
                                         sh.layout == Layout::expert ? b.offsets.data() : nullptr});
        std::fill(b.x.begin(), b.x.end(), -3.0F);
        // The expert: this rank's own multiple of each row, so a row that went astray shows.
        b.rows.resize(rows * width_);
        if (rows)
            std::memcpy(b.rows.data(), f_.read(kernels_.received_x(b.round), rows * width_ * 4), rows * width_ * 4);
        keep(out_, b.rows);
        keep(out_, b.idx);
        keep(out_, b.weights);
        keep(out_, b.per_expert);
    }

    struct Combine {
        ep::CombineRound round;
        std::vector<float> back, weights;
    };

    void combines(Batch& b) {
        std::deque<Combine> open;
        for (int c = 0; c < s_.combines; ++c) {
            send(open.emplace_back(), b, c);
            if (!s_.halves || int(open.size()) == s_.shape.num_buffers) {
                receive(open.front());
                open.pop_front();
            }
        }
        for (; !open.empty(); open.pop_front()) receive(open.front());
    }

    void send(Combine& c, const Batch& b, int again) {
        c.back.resize(b.rows.size());
        for (std::size_t i = 0; i < c.back.size(); ++i) c.back[i] = b.rows[i] * float(rank_ + 2) + float(again);
        c.weights = b.weights;
        const bool kept = !s_.halves;  // as the engine's whole combine
        c.round = kernels_.combine_send({reinterpret_cast<const std::byte*>(c.back.data()),
                                         s_.weights_back ? c.weights.data() : nullptr, s_.weights_back, false, kept},
                                        b.round.state);
        if (!free_after_send()) return;
        std::fill(c.weights.begin(), c.weights.end(), -1.0F);
        if (!kept) std::fill(c.back.begin(), c.back.end(), -1.0F);
    }

    void receive(Combine& c) {
        std::vector<float> y(std::size_t(tokens_) * width_, 77.0F),
            weights(std::size_t(tokens_) * std::size_t(s_.shape.top_k), 77.0F);
        kernels_.combine_recv(c.round, nullptr, 0, {y.data(), s_.weights_back ? weights.data() : nullptr});
        std::fill(c.back.begin(), c.back.end(), -2.0F);
        keep(out_, y);
        if (s_.weights_back) keep(out_, weights);
    }

    const EpScenario& s_;
    CheckFabric& f_;
    std::vector<std::byte>& out_;
    ep::Kernels<CheckFabric> kernels_;
    const int rank_;
    const std::int32_t tokens_;
    const std::size_t width_;
};

}  // namespace

void EpSubject::run_rank(int rank, CheckFabric& fabric) {
    RankRun(scenario_, fabric, outputs_[std::size_t(rank)]).all();
    ended_[std::size_t(rank)] = true;
}

std::string EpSubject::judge(const World&) {
    if (expected_.empty()) return "";
    for (std::size_t r = 0; r < outputs_.size(); ++r) {
        if (!ended_[r] || outputs_[r] == expected_[r]) continue;
        std::size_t at = 0;
        while (at < outputs_[r].size() && at < expected_[r].size() && outputs_[r][at] == expected_[r][at]) ++at;
        return "rank " + std::to_string(r) + "'s results differ from the right ones from byte " + std::to_string(at) +
               " on";
    }
    return "";
}

std::vector<std::uint8_t> EpSubject::outcome(const World& world) {
    if (!world.all_ended()) return {};
    std::uint64_t h = 0xcbf29ce484222325u;
    for (const auto& o : outputs_)
        for (const std::byte b : o) h = (h ^ std::uint64_t(b)) * 0x100000001b3u;
    std::vector<std::uint8_t> out(8);
    std::memcpy(out.data(), &h, 8);
    return out;
}

}  // namespace hal::checker
