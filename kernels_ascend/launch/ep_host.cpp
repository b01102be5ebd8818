// SPDX-License-Identifier: Apache-2.0
#include "launch/ep_host.hpp"

#include <algorithm>
#include <string>

#include "kernels/limits.h"

namespace hal::ascend {

namespace {

const char* stage_name(std::int32_t stage) {
    static constexpr const char* names[] = {
        "dispatch ready", "dispatch counts",     "dispatch rows", "dispatch rail rows", "dispatch exit",
        "combine credit", "combine gather rows", "combine rows",  "combine exit",       "wait"};
    return names[stage >= 0 && stage < std::int32_t(Stage::end) ? stage : std::int32_t(Stage::end)];
}

std::uint64_t next(std::uint64_t& at, std::uint64_t bytes) {
    const std::uint64_t here = at;
    at += std::uint64_t(align_up(std::int64_t(bytes), 64));
    return here;
}

}  // namespace

const char* wait_stage_name(std::int32_t stage) { return stage_name(stage); }

std::uint64_t window_bytes(const EpShape& shape) { return buffer_layout(shape).total; }
std::uint64_t staging_bytes(const EpShape& shape) {
    const BufferLayout l = buffer_layout(shape);
    return stage_layout(l).total - l.total;
}

void require_ring(const EpShape& s, std::uint32_t sq_depth) {
    if (s.completion != Completion::strong_signal_no_cqe) return;
    // The fullest queue of one round: three quarters of the rows to one peer, two requests each, and the signals.
    const std::int64_t to_owner = std::int64_t(s.max_tokens) * smaller(s.top_k, groups(s));
    const std::int64_t legs = is_hierarchical(s) ? s.nodes + 1 : 1;
    const std::int64_t rows = to_owner * legs, needed = 2 * (rows - rows / 4 + legs) + legs;
    const std::int64_t given = std::int64_t(sq_depth) - kRingGuard - 1;
    if (needed > given)
        throw CapacityViolation(
            "send ring blocks for one full round of completion strong_signal_no_cqe", needed, given,
            "lower max_tokens, or use completion strong_signal, which reclaims the ring as it goes");
}

EpHost::EpHost(std::shared_ptr<Runtime> runtime, const EpShape& shape, int rank, int queues, int element,
               std::uint64_t window, double timeout, int cores)
    : runtime_(std::move(runtime)), shape_(shape), layout_(buffer_layout(shape)), rank_(rank), queues_(queues),
      element_(element), cores_(cores), window_(window), timeout_(timeout),
      status_(runtime_, sizeof(Status) * std::size_t(cores)),
      raw_heads_(runtime_, std::size_t(2 * shape.num_buffers * shape.ranks * 2) * 4),
      dirty_(runtime_, std::size_t(shape.num_buffers * shape.ranks * groups(shape)) * 4) {
    const auto refuse = [](const std::string& why) { throw ContractViolation(why); };
    if (shape.num_experts % shape.ranks) refuse("experts do not divide by ranks");
    if (shape.nodes < 1 || shape.ranks % shape.nodes) refuse("ranks do not divide by nodes");
    if (shape.num_buffers < 1 || shape.num_buffers > std::int32_t(ready_slots())) refuse("num_buffers must be 1 to 64");
    if (shape.top_k > kLargestTopK)
        throw CapacityViolation("top_k on Ascend", shape.top_k, kLargestTopK, "lower top_k");
    const std::int64_t columns = std::int64_t(shape.ranks) * align_up(groups(shape), 8) * 4 * 2;
    if (columns > kColumnBytes)
        throw CapacityViolation("scratch (UB) bytes for the ranks' counts", columns, kColumnBytes,
                                "use fewer ranks or layout rank");
}

EpArgs EpHost::arguments(std::uint64_t epoch) const {
    EpArgs a{};
    a.shape = shape_;
    a.rank = rank_;
    a.queues = queues_;
    a.window = window_;
    a.timeout_cycles = std::uint64_t(timeout_ * double(runtime_->cycles_per_second()));
    a.epoch = epoch;
    a.element = element_;
    a.raw_heads = raw_heads_.address();
    a.dirty = dirty_.address();
    a.status = status_.address();
    return a;
}

std::shared_ptr<State> EpHost::new_state(const DispatchInput& in, const State* reused, std::uint64_t epoch) {
    auto state = std::make_shared<State>();
    const std::uint64_t k4 = 4 * std::uint64_t(shape_.top_k), others = std::uint64_t(other_nodes_rows(shape_));
    std::uint64_t bytes = 0;
    state->at.home = next(bytes, std::uint64_t(in.tokens) * k4);
    state->at.forward = next(bytes, others * k4);
    state->memory = std::make_shared<DeviceMemory>(runtime_, bytes + 64);
    state->at.home += state->memory->address();
    state->at.forward += state->memory->address();
    if (reused) {
        state->route = reused->route;
        return state;
    }
    auto route = std::make_shared<Route>();
    route->epoch = epoch;
    route->tokens = in.tokens;
    bytes = 0;
    RouteMemory& at = route->at;
    at.ids = next(bytes, std::uint64_t(in.tokens) * k4);
    at.counts = next(
        bytes, std::max(layout_.header_bytes * std::uint64_t(shape_.ranks), 4 * std::uint64_t(header_ints(shape_))));
    at.messages = next(bytes, layout_.counts_bytes * std::uint64_t(shape_.ranks));
    at.forward_ids = next(bytes, others * k4);
    at.rows = next(bytes, 8);
    route->memory = std::make_shared<DeviceMemory>(runtime_, bytes + 64);
    for (std::uint64_t* p : {&at.ids, &at.counts, &at.messages, &at.forward_ids, &at.rows})
        *p += route->memory->address();
    state->route = std::move(route);
    return state;
}

void EpHost::launch(Kernel kernel, const EpArgs& args) {
    launched_.push_back(std::make_unique<DeviceMemory>(runtime_, sizeof(EpArgs)));
    runtime_->write(launched_.back()->address(), &args, sizeof args);
    runtime_->launch(kernel, launched_.back()->address(), cores_);
}

// Waits for what was launched, and turns what the cores found into an error.
void EpHost::finish() {
    runtime_->synchronize();
    launched_.clear();
    std::vector<Status> status(static_cast<std::size_t>(cores_));
    runtime_->read(status.data(), status_.address(), sizeof(Status) * status.size());
    const std::vector<Status> clean(status.size(), Status{});
    runtime_->write(status_.address(), clean.data(), sizeof(Status) * clean.size());
    for (const Status& s : status) {
        traffic_.data_bytes += s.data_bytes, traffic_.flag_bytes += s.flag_bytes,
            traffic_.signal_bytes += s.signal_bytes;
        traffic_.rows += s.rows, traffic_.signals += s.signals;
    }
    refused_ = false;
    for (const Status& s : status)
        refused_ = refused_ || s.failure == Failure::expert_id || s.failure == Failure::duplicate_expert ||
                   s.failure == Failure::ring;
    // What ranks disagree about explains a timeout, not the reverse.
    for (const Status& s : status)
        if (s.failure != Failure::none && s.failure != Failure::timeout) raise(s);
    for (const Status& s : status)
        if (s.failure == Failure::timeout) raise(s);
}

// A round that was refused before anything was sent has not happened.
void EpHost::finish_or_take_back(std::uint64_t& epoch) {
    try {
        finish();
    } catch (...) {
        if (refused_) --epoch;
        throw;
    }
}

void EpHost::raise(const Status& s) const {
    const std::string rank = "rank " + std::to_string(s.rank);
    switch (s.failure) {
        case Failure::none:
            return;
        case Failure::timeout: {
            const auto [root, reason] = runtime_->root_of_stall(s.rank);
            runtime_->mark_failed(root, reason);
            throw PeerTimeoutError(root, stage_name(s.stage), s.queue, s.expected, s.seen, timeout_, reason);
        }
        case Failure::reuse:
            throw ContractViolation(rank +
                                    (s.seen ? " reuses a handle and this rank exchanges counts"
                                            : " exchanges counts and this rank reuses a handle") +
                                    "; pass a handle on all ranks or on none");
        case Failure::tag:
            throw ContractViolation(rank + " reuses the handle of another dispatch than this rank (" +
                                    std::to_string(s.seen) + " and " + std::to_string(s.expected) +
                                    "); pass handles of the same dispatch on all ranks");
        case Failure::weights:
            throw ContractViolation(rank + (s.seen & 1 ? " sends" : " does not send") +
                                    " topk_weights in combine and this rank does" + (s.seen & 1 ? " not" : "") +
                                    "; pass them on all ranks or on none");
        case Failure::expert_id:
            throw ContractViolation("topk_idx holds expert " + std::to_string(std::int64_t(s.seen)) + " in token " +
                                    std::to_string(s.rank) + "; ids are -1 ... " + std::to_string(s.expected - 1));
        case Failure::duplicate_expert:
            throw ContractViolation("topk_idx names expert " + std::to_string(s.seen) + " twice in token " +
                                    std::to_string(s.rank));
        case Failure::ring:
            throw CapacityViolation("send ring blocks to " + rank + " on QP " + std::to_string(s.queue),
                                    std::int64_t(s.expected), std::int64_t(s.seen),
                                    "receive earlier rounds first, or use completion strong_signal");
    }
}

DispatchRound EpHost::dispatch_send(std::uint32_t slot, const DispatchInput& in, const State* reused) {
    if (slot >= std::uint32_t(shape_.num_buffers))
        throw ContractViolation("receive slot " + std::to_string(slot) + " of " + std::to_string(shape_.num_buffers));
    DispatchRound round;
    round.epoch = ++dispatch_epoch_;
    round.slot = slot;
    round.state = new_state(in, reused, round.epoch);
    round.offered = std::make_shared<DeviceMemory>(runtime_, std::size_t(shape_.ranks) * 8);
    EpArgs a = arguments(round.epoch);
    a.slot = slot;
    a.reuse = reused != nullptr;
    a.tag = reused ? ready_tag(round.state->route->epoch) : 0;
    a.tokens = in.tokens;
    a.int64_ids = in.idx_is_int64;
    a.route = round.state->route->at;
    a.weights = round.state->at;
    a.offered = round.offered->address();
    a.x = in.x, a.topk_idx = in.topk_idx, a.topk_weights = in.topk_weights, a.scales = in.scales;
    launch(Kernel::dispatch_send, a);
    finish_or_take_back(dispatch_epoch_);  // the caller may change its input now
    return round;
}

std::int64_t EpHost::rows(const DispatchRound& round) {
    std::int64_t rows = 0;
    runtime_->read(&rows, round.state->route->at.rows, 8);
    return rows;
}

std::uint64_t EpHost::received_x(const DispatchRound& round) const {
    return BufferLayout::nth(layout_.receive, round.slot).x(0);
}

void EpHost::dispatch_recv(DispatchRound& round, const DispatchOutput& out) {
    EpArgs a = arguments(round.epoch);
    a.slot = round.slot;
    a.tokens = round.state->route->tokens;
    a.route = round.state->route->at;
    a.weights = round.state->at;
    a.known = round.state->route->known;
    a.offered = round.offered->address();
    a.out_scales = out.scales, a.out_idx = out.topk_idx, a.out_weights = out.topk_weights;
    a.out_tokens_per_expert = out.tokens_per_expert, a.out_offsets = out.expert_offsets;
    launch(Kernel::dispatch_recv, a);
    finish();
    round.state->route->known = true;
    round.received = true;
}

CombineRound EpHost::combine_send(std::uint64_t x, std::shared_ptr<State> state, std::uint64_t topk_weights,
                                  bool returns_weights, bool weighted) {
    const std::uint64_t depth = std::uint64_t(shape_.num_buffers);
    if (combine_epoch_ + 1 > finished_.all_until + depth)
        throw ContractViolation("combine " + std::to_string(finished_.all_until + 1) +
                                " was sent and not received, and " + std::to_string(depth) +
                                " may be in flight; receive it first, or raise num_buffers");
    CombineRound round{++combine_epoch_, std::move(state), weighted, returns_weights, false};
    EpArgs a = arguments(round.epoch);
    a.route = round.state->route->at;
    a.weights = round.state->at;
    a.tokens = round.state->route->tokens;
    a.weighted = weighted, a.returns_weights = round.returns_weights;
    a.x = x, a.topk_weights = topk_weights;
    launch(Kernel::combine_send, a);
    finish_or_take_back(combine_epoch_);
    return round;
}

void EpHost::combine_recv(CombineRound& round, std::uint64_t bias0, std::uint64_t bias1, std::uint64_t y,
                          std::uint64_t topk_weights) {
    EpArgs a = arguments(round.epoch);
    a.route = round.state->route->at;
    a.weights = round.state->at;
    a.tokens = round.state->route->tokens;
    a.weighted = round.weighted, a.returns_weights = round.returns_weights;
    a.bias[0] = bias0, a.bias[1] = bias1;
    a.out_y = y, a.out_weights = topk_weights;
    a.finished_before = finished_.all_until;
    finished_.finish(round.epoch);
    a.finished = finished_.all_until;
    launch(Kernel::combine_recv, a);
    finish();
    round.received = true;
}

}  // namespace hal::ascend
