// SPDX-License-Identifier: Apache-2.0
// One ordered stream of operations: a (queue, peer) pair. Only the wire thread touches it, but for the counters.
//
// The publication rule is the contract's: a strong signal is published only when every operation posted earlier on this
// flow has its data at the target and its signal published; a weak signal, when its own data is there; data is never
// ordered. Everything that a fault policy does is a hold on top of this.
#pragma once
#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <queue>
#include <string>
#include <vector>

#include "clock.hpp"
#include "device.hpp"
#include "faults.hpp"
#include "memory.hpp"
#include "rings.hpp"

namespace hal::swnic {

enum class RequestState : std::uint32_t { pending, done, failed };

struct Request {
    std::atomic<RequestState> state{RequestState::pending};
    class QueueSet* owner = nullptr;  // that it goes back to
};

struct Signal {
    SignalEntry entry;
    bool strong;
    bool on_strict_memory;
};

// What NCCL posted, addresses already resolved.
struct Operation {
    int queue, peer;
    Copy copy;                                     // bytes == 0: a signal alone
    std::shared_ptr<MemoryRegion> source, target;  // stay mapped until the operation has ended
    std::optional<Signal> signal;
    Request* request;
    Nanos posted;
    bool get = false;
};

struct FlowCounters {
    std::atomic<std::uint64_t> posted{0}, delivered{0}, published{0}, ended{0}, failed{0};
    std::atomic<std::uint64_t> puts{0}, gets{0}, signals{0}, bytes{0}, pieces{0}, copies{0};
    std::atomic<std::uint64_t> most_waiting{0}, busy_ns{0};
};

class Flow {
  public:
    // Hands a signal to the target's ring; false when the ring is full (try again).
    using Publish = std::function<bool(int peer, const SignalEntry&)>;

    Flow(FlowId id, FaultPolicy policy, std::unique_ptr<Lane> lane, std::size_t credits, Publish publish);

    ~Flow();
    Flow(const Flow&) = delete;
    Flow& operator=(const Flow&) = delete;

    // Counted before it is posted, so that idle() is never true in between.
    void note_posted(const Operation& operation);
    void post(Operation operation);
    // One round: start what is due, see what has ended, publish, complete. True when anything moved.
    bool advance(Nanos now);
    // The peer or the device is gone: everything posted, now and later, ends as `state`.
    void break_down(RequestState state);

    // From any thread.
    std::uint64_t pending() const { return counters_.posted.load() - counters_.ended.load(); }
    bool idle() const { return pending() == 0; }
    bool copying() const { return !in_flight_.empty(); }
    bool error() const { return error_; }
    const FlowId& id() const { return id_; }
    const FlowCounters& counters() const { return counters_; }
    std::string state_text() const;

  private:
    struct Live {
        Operation operation;
        std::uint64_t number;
        Plan plan;
        std::size_t undelivered;      // pieces
        std::byte* bounce = nullptr;  // the source's copy, while source_early holds it
        Nanos delivered_at = never;
        bool published = false, completed = false;

        bool delivered() const { return delivered_at != never; }
        bool ended() const { return delivered() && published && completed; }
    };
    static constexpr std::size_t whole_source = static_cast<std::size_t>(-1);
    struct Due {
        Nanos due;
        std::uint64_t order;  // ties keep the order of posting
        Live* live;
        std::size_t piece;  // or whole_source: to be read, for source_early
        bool operator>(const Due& other) const { return due != other.due ? due > other.due : order > other.order; }
    };
    struct Part {
        Live* live;
        bool snapshot;
    };
    struct Ticket {
        std::uint64_t number;
        std::vector<Part> parts;
    };

    bool admit(Nanos now);
    void schedule(Live& live);
    bool snapshot(Live& live);
    bool start_due(Nanos now);
    bool reap(Nanos now);
    bool publish_ready(Nanos now);
    bool complete_ready(Nanos now);
    void retire();
    void refuse_new(RequestState state);
    bool clear_abandoned();
    void submit(const std::vector<Due>& batch);
    void complete(Live& live, RequestState state);
    Copy piece_copy(const Due& due) const;

    FlowId id_;
    FaultPolicy policy_;
    std::unique_ptr<Lane> lane_;
    std::size_t credits_;
    Publish publish_;
    std::deque<Operation> waiting_;  // posted, beyond the credits
    std::deque<Live> live_;          // in order of posting; references stay valid
    std::priority_queue<Due, std::vector<Due>, std::greater<>> due_;
    std::deque<Ticket> in_flight_;
    std::uint64_t next_number_ = 0, next_order_ = 0, tickets_ = 0;
    std::optional<RequestState> refused_;  // how new operations end at once
    bool error_ = false, abandoned_ = false;
    FlowCounters counters_;
};

}  // namespace hal::swnic
