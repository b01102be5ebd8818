// SPDX-License-Identifier: Apache-2.0
#include "flow.hpp"

#include <signal.h>
#include <unistd.h>

#include <algorithm>

#include "log.hpp"

namespace hal::swnic {
namespace {

constexpr std::size_t largest_batch = 128;

bool continues(const Copy& first, const Copy& next) {
    return first.dst + first.bytes == next.dst && first.src + first.bytes == next.src &&
           first.src_host == next.src_host && first.dst_host == next.dst_host && first.same_device == next.same_device;
}

}  // namespace

Flow::Flow(FlowId id, FaultPolicy policy, std::unique_ptr<Lane> lane, std::size_t credits, Publish publish)
    : id_(id), policy_(std::move(policy)), lane_(std::move(lane)), credits_(credits), publish_(std::move(publish)) {
    if (auto limit = policy_.faults().credits) credits_ = std::min<std::size_t>(credits_, limit);
}

Flow::~Flow() {
    for (Live& live : live_)
        if (live.bounce) lane_->give_bounce(live.bounce);
}

void Flow::note_posted(const Operation& operation) {
    ++counters_.posted;
    if (operation.copy.bytes) ++(operation.get ? counters_.gets : counters_.puts);
    if (operation.signal) ++counters_.signals;
    counters_.bytes += operation.copy.bytes;
}

void Flow::post(Operation operation) {
    if (refused_) {
        ++counters_.ended;
        ++counters_.failed;
        operation.request->state.store(*refused_, std::memory_order_release);
        return;
    }
    waiting_.push_back(std::move(operation));
    counters_.most_waiting = std::max<std::uint64_t>(counters_.most_waiting, waiting_.size() + live_.size());
}

bool Flow::advance(Nanos now) {
    if (abandoned_) return clear_abandoned();
    bool moved = admit(now);
    moved |= start_due(now);
    moved |= reap(now);
    moved |= publish_ready(now);
    moved |= complete_ready(now);
    retire();
    return moved;
}

// Operations beyond the credits stay posted; NCCL sees no completion and stops posting: back-pressure without spinning.
bool Flow::admit(Nanos now) {
    bool moved = false;
    while (!waiting_.empty() && live_.size() < credits_) {
        Live& live = live_.emplace_back();
        live.operation = std::move(waiting_.front());
        waiting_.pop_front();
        live.number = next_number_++;
        live.plan = policy_.plan(live.number, live.operation.copy.bytes, now);
        live.undelivered = live.plan.pieces.size();
        live.published = !live.operation.signal;
        moved = true;
        switch (live.plan.outcome) {
            case Outcome::kill:
                kill(getpid(), SIGKILL);
                [[fallthrough]];
            case Outcome::error:
                warn("flow %d>%d queue %d: operation %llu fails, as the fault policy says", id_.src, id_.dst, id_.queue,
                     static_cast<unsigned long long>(live.number));
                error_ = true;
                complete(live, RequestState::failed);
                live_.pop_back();  // earlier operations go on; later ones end with this one, as a queue pair's do
                ++counters_.ended;
                ++counters_.failed;
                refuse_new(RequestState::failed);
                return true;
            case Outcome::drop:
                live.undelivered = 1;  // a piece that nobody will deliver
                continue;
            case Outcome::deliver:
                break;
        }
        if (live.undelivered == 0) {
            live.delivered_at = now;
            ++counters_.delivered;
        }
        if (policy_.faults().source_early && !live.operation.get && live.undelivered)
            due_.push({now + live.plan.read_hold, next_order_++, &live, whole_source});
        else
            schedule(live);
    }
    return moved;
}

void Flow::schedule(Live& live) {
    counters_.pieces += live.plan.pieces.size();
    for (std::size_t i = 0; i < live.plan.pieces.size(); ++i)
        due_.push({live.plan.pieces[i].due, next_order_++, &live, i});
}

// Reads the source into a bounce buffer; the pieces are scheduled when it is there. False: no room, deliver directly.
bool Flow::snapshot(Live& live) {
    Copy copy = live.operation.copy;
    live.bounce = lane_->take_bounce(copy.bytes);
    if (!live.bounce) return false;
    copy.dst = reinterpret_cast<Address>(live.bounce);
    copy.dst_host = true;
    copy.same_device = false;
    if (lane_->submit({&copy, 1}) == 0) {
        lane_->give_bounce(live.bounce);
        live.bounce = nullptr;
        return false;
    }
    in_flight_.push_back({++tickets_, {{&live, true}}});
    return true;
}

Copy Flow::piece_copy(const Due& due) const {
    Copy copy = due.live->operation.copy;
    const Piece& piece = due.live->plan.pieces[due.piece];
    if (due.live->bounce) {
        copy.src = reinterpret_cast<Address>(due.live->bounce);
        copy.src_host = true;
        copy.same_device = false;
    }
    copy.src += piece.offset;
    copy.dst += piece.offset;
    copy.bytes = piece.bytes;
    return copy;
}

bool Flow::start_due(Nanos now) {
    std::vector<Due> batch;
    bool moved = false;
    while (!due_.empty() && due_.top().due <= now && batch.size() < largest_batch) {
        const Due next = due_.top();
        due_.pop();
        moved = true;
        if (next.piece == whole_source) {
            if (!snapshot(*next.live)) schedule(*next.live);
        } else {
            batch.push_back(next);
        }
    }
    if (!batch.empty()) submit(batch);
    return moved;
}

// One ticket for the batch; neighbours that continue each other at both ends become one copy.
void Flow::submit(const std::vector<Due>& batch) {
    std::vector<Copy> copies;
    std::vector<std::size_t> ends;  // index into batch, one past the last piece of each copy
    for (std::size_t i = 0; i < batch.size(); ++i) {
        Copy copy = piece_copy(batch[i]);
        if (!copies.empty() && continues(copies.back(), copy)) {
            copies.back().bytes += copy.bytes;
            ends.back() = i + 1;
        } else {
            copies.push_back(copy);
            ends.push_back(i + 1);
        }
    }
    std::size_t taken = lane_->submit(copies);
    std::size_t pieces = taken ? ends[taken - 1] : 0;
    counters_.copies += taken;
    if (taken) {
        Ticket ticket{++tickets_, {}};
        for (std::size_t i = 0; i < pieces; ++i) ticket.parts.push_back({batch[i].live, false});
        in_flight_.push_back(std::move(ticket));
    }
    for (std::size_t i = pieces; i < batch.size(); ++i) due_.push(batch[i]);
}

bool Flow::reap(Nanos now) {
    if (in_flight_.empty()) return false;
    std::uint64_t completed = lane_->completed();
    bool moved = false;
    for (; !in_flight_.empty() && in_flight_.front().number <= completed; in_flight_.pop_front()) {
        moved = true;
        for (const Part& part : in_flight_.front().parts) {
            if (part.snapshot) {
                complete(*part.live, RequestState::done);  // the source may be reused: that is all that "done" says
                const Nanos late = std::max<Nanos>(now - part.live->plan.start, 0);
                for (Piece& piece : part.live->plan.pieces)
                    if (piece.due < never - late) piece.due += late;
                schedule(*part.live);
            } else if (--part.live->undelivered == 0) {
                part.live->delivered_at = now;
                ++counters_.delivered;
            }
        }
    }
    return moved;
}

bool Flow::publish_ready(Nanos now) {
    bool moved = false, all_before = true;
    for (Live& live : live_) {
        if (!live.published && live.plan.outcome == Outcome::deliver) {
            const Signal& signal = *live.operation.signal;
            const FlowFaults& faults = policy_.faults();
            bool free = faults.early_signal || (faults.va_unordered && !signal.on_strict_memory);
            bool in_turn = live.delivered() && (all_before || !signal.strong);
            Nanos held_since = std::max(live.delivered_at, live.plan.not_before);  // `never` while stalled for ever
            bool ready = free || (in_turn && now - held_since >= live.plan.publish_hold);
            if (ready && publish_(live.operation.peer, signal.entry)) {
                live.published = moved = true;
                ++counters_.published;
            }
        }
        all_before = all_before && live.delivered() && live.published;
    }
    return moved;
}

// An operation with a signal completes when that is on its way, so that NCCL's queue credit covers it.
bool Flow::complete_ready(Nanos now) {
    bool moved = false;
    for (Live& live : live_) {
        if (live.completed || !live.delivered() || !live.published) continue;
        if (now - live.delivered_at < live.plan.complete_hold) continue;
        complete(live, RequestState::done);
        moved = true;
    }
    return moved;
}

void Flow::complete(Live& live, RequestState state) {
    if (live.completed) return;
    live.completed = true;
    // Release: whoever sees the request done may reuse the source.
    live.operation.request->state.store(state, std::memory_order_release);
    live.operation.request = nullptr;
}

void Flow::retire() {
    while (!live_.empty() && live_.front().ended()) {
        Live& live = live_.front();
        if (live.bounce) lane_->give_bounce(live.bounce);
        counters_.busy_ns += static_cast<std::uint64_t>(live.delivered_at - live.operation.posted);
        ++counters_.ended;
        live_.pop_front();
    }
}

void Flow::refuse_new(RequestState state) {
    refused_ = state;
    for (Operation& operation : waiting_) operation.request->state.store(state, std::memory_order_release);
    counters_.ended += waiting_.size();
    counters_.failed += waiting_.size();
    waiting_.clear();
}

void Flow::break_down(RequestState state) {
    if (abandoned_) return;
    abandoned_ = true;
    due_ = {};
    counters_.failed += live_.size();
    for (Live& live : live_) complete(live, state);
    refuse_new(state);
}

// Copies under way still read and write this memory: its regions stay until the lane has ended them.
bool Flow::clear_abandoned() {
    std::uint64_t completed = lane_->completed();
    while (!in_flight_.empty() && in_flight_.front().number <= completed) in_flight_.pop_front();
    if (!in_flight_.empty()) return true;
    for (Live& live : live_)
        if (live.bounce) lane_->give_bounce(live.bounce);
    counters_.ended += live_.size();
    live_.clear();
    return true;
}

std::string Flow::state_text() const {
    auto get = [](const std::atomic<std::uint64_t>& value) {
        return std::to_string(value.load(std::memory_order_relaxed));
    };
    return "flow " + std::to_string(id_.src) + ">" + std::to_string(id_.dst) + " queue " + std::to_string(id_.queue) +
           ": posted " + get(counters_.posted) + ", delivered " + get(counters_.delivered) + ", published " +
           get(counters_.published) + " of " + get(counters_.signals) + " signals, ended " + get(counters_.ended) +
           ", failed " + get(counters_.failed);
}

}  // namespace hal::swnic
