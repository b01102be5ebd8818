// SPDX-License-Identifier: Apache-2.0
// Ranks on fibers, their windows, and every operation in flight. Nothing happens by itself: a search chooses one of the
// ready entities (a thread, or one delivery of an operation), and the world executes it. Runs are deterministic.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <new>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "checker/event.hpp"
#include "checker/profile.hpp"
#include "fiber/fiber.hpp"
#include "hal/fabric.hpp"

namespace hal::checker {

class CheckFabric;

// One weakened primitive: the `number`-th call of `thread` that sends or orders.
struct Mutation {
    enum Kind : std::uint8_t {
        weaken,     // strong to relaxed, relaxed to none
        remove,     // the call does nothing
        to_source,  // quiet remote to quiet source
        value_up,
        value_down,  // a signal's value, a wait's threshold
        offset_up,   // destination, 16 bytes further for a put, 64 for a signal or wait
        other_queue,
    } kind;
    std::uint16_t thread;
    std::uint32_t number;
};

// An operation by its thread and its place among that thread's operations.
struct OperationName {
    std::uint16_t thread;
    std::uint32_t number;
    bool operator==(const OperationName&) const = default;
};

struct Faults {
    std::optional<OperationName> lost;                   // never arrives
    std::optional<OperationName> lost_completion;        // arrives; its completion is never reported
    std::optional<OperationName> error_completion;       // does not arrive, and says so
    std::vector<std::pair<int, std::uint32_t>> stalled;  // (rank, calls after which it stops)
    enum Resume : std::uint8_t {
        never,
        noticed,
        last
    } resume = never;                // a stopped rank goes on: when the others' time
                                     // was up, or when they have ended
    bool idle_at_end = false;        // a rank that has ended is still there, and answers nobody
    std::uint32_t ring_entries = 0;  // operations in flight on one (peer, queue); 0 = no limit
    bool any() const { return lost || lost_completion || error_completion || !stalled.empty(); }
};

struct WorldConfig {
    Profile profile;
    int ranks = 1, queues = 1;
    std::size_t window_bytes = 0;
    std::vector<int> thread_rank;  // rank of each thread
    std::function<void(int thread, CheckFabric&)> body;
    std::size_t piece_bytes = 0;  // puts are delivered in pieces of at most this many bytes; 0 = whole
    Faults faults;
    std::optional<Mutation> mutation;
    bool track = true;  // step numbers of operations, for partial-order reduction
    bool log = false;
    bool least_waits = false;                      // see Access::least_wait
    std::size_t max_bytes = std::size_t{1} << 30;  // of the log and the operations; see full()
    // Words in rank 0's window that say, view by view, who is left (kernels_host/checker/masking_subject.hpp); 0 = none.
    // A wait of an earlier view ends when a later one is decided, and a time limit names the end of the chain of waits.
    std::uint64_t views = 0, most_views = 0;
};

enum class Primitive : std::uint8_t { put, signal, wait, quiet };

// A call that can be mutated, as the unmutated program makes it.
struct Call {
    Primitive primitive;
    std::uint16_t thread;
    std::uint32_t number;
    Order order = Order::relaxed;
    bool remote = true;  // quiet
    int peer = -1, queue = -1;
    std::uint64_t offset = 0, bytes = 0, value = 0;
    const char* stage = "";
};

struct Problem {
    enum Kind : std::uint8_t { hang, source_changed, exception, contract } kind;
    int rank;
    std::string text;
};

// A thread that ended with PeerTimeout, and the rank that it names (-1 = none).
struct TimedOut {
    std::uint32_t thread;
    int names;
};

// What one executed entity did.
struct StepInfo {
    Entity entity;
    What what = What::end;
    std::vector<Access> accesses;
    std::vector<std::uint32_t> enabled_by;  // steps without which this one could not run
    std::uint64_t value = 0;                // added or stored at the start of a write; wait: the threshold
    SignalOp op = SignalOp::set;
    bool stores = false;  // `value` is what the first eight bytes of the write added or became
};

// Zeroed memory whose pages exist once they are written: most of a large window never is.
class ZeroedWindow {
  public:
    explicit ZeroedWindow(std::size_t bytes) : all_(std::calloc(bytes + align, 1)) {
        if (!all_) throw std::bad_alloc();
    }
    std::byte* data() const {
        const auto at = reinterpret_cast<std::uintptr_t>(all_.get());
        return reinterpret_cast<std::byte*>((at + align - 1) / align * align);
    }

  private:
    static constexpr std::size_t align = 64;
    struct Free {
        void operator()(void* p) const { std::free(p); }
    };
    std::unique_ptr<void, Free> all_;
};

class World {
  public:
    using Priority = std::function<std::uint64_t(const World&, Entity)>;

    World(WorldConfig config, Priority priority);
    ~World();
    World(const World&) = delete;
    World& operator=(const World&) = delete;

    bool nothing_ready() const { return ready_.empty(); }
    Entity best() const { return std::get<1>(*ready_.rbegin()); }
    bool is_ready(Entity e) const;
    const std::set<std::tuple<std::uint64_t, Entity>>& ready() const { return ready_; }
    void set_priority(Entity e, std::uint64_t priority);

    // What the entity would touch if it ran now; it must be ready.
    std::vector<Access> footprint(Entity e) const;
    const StepInfo& execute(Entity e);
    std::uint32_t steps() const { return step_; }
    // The run remembers as much as it may: whoever runs it stops it, and says so.
    bool full() const { return log_.size() * sizeof(Event) + operations_.size() * operation_bytes > config_.max_bytes; }
    void stop() { stopped_ = true; }
    bool stopped() const { return stopped_; }

    // With nothing ready: true if every thread has ended. Else each waiting thread gets its PeerTimeout (once), which may
    // make something ready again.
    bool all_ended() const { return ended_ == threads_.size(); }
    bool hangs() const;  // some thread that no fault has stopped has not ended
    bool time_out_waiting();
    // After nothing was ready: what faults still bring about (time limits, stopped ranks that go on). False: nothing.
    bool stir();
    // A rank that has ended, or stopped and never goes on.
    bool gone(int thread) const;
    std::uint64_t newest_view() const;
    std::uint32_t calls_of(int thread) const;
    std::string waiting_text() const;

    const std::deque<Event>& log() const { return log_; }
    const std::deque<Operation>& operations() const { return operations_; }
    const std::vector<Problem>& problems() const { return problems_; }
    const std::vector<Call>& calls() const { return calls_; }
    const std::vector<TimedOut>& timed_out() const { return timed_out_; }
    const WorldConfig& config() const { return config_; }
    int rank_of(int thread) const { return config_.thread_rank[std::size_t(thread)]; }
    std::byte* window(int rank) const { return windows_[std::size_t(rank)].data(); }
    void report(Problem p) { problems_.push_back(std::move(p)); }
    std::string name(std::uint32_t operation) const;

    // Operations of a thread whose source, in memory that only this rank knows, was read at `step`: is it as it was then?
    struct PrivateSource {
        std::uint32_t operation, read_step;
    };
    std::vector<PrivateSource> private_sources(int thread) const;
    bool source_unchanged(std::uint32_t operation) const;

  private:
    friend class CheckFabric;
    struct Thread;
    static const std::size_t operation_bytes;  // an operation and its flight
    struct Flight;
    struct Group;
    struct Outstanding {
        std::uint32_t reads = 0, writes = 0;
    };
    struct Pending {
        enum Kind : std::uint8_t { start, read, write, write_at, wait, quiet, credit, arrive, pass } kind = start;
        int rank = 0;  // of the memory touched
        std::uint64_t begin = 0, end = 0, at_least = 0;
        int source = -1, queue = -1, peer = -1, thread_scope = -1;
        bool remote = true;
        Access::Kind access = Access::write;  // write_at
        const char* stage = "";
        std::uint64_t later_view = 0;  // wait: the view that ends it; 0 = none
    };

    // Called on a fiber.
    void call(int thread, const Pending& pending);
    std::uint32_t issue(Operation op, const void* src);
    Outstanding outstanding(int rank, int peer, int queue) const;

    bool enabled(const Thread& t) const;
    int root_of(int source) const;
    void wake_stalled();
    void views_changed();
    bool quiet_reached(const Pending& p) const;
    bool may_deliver(std::uint32_t operation) const;
    void recheck(int thread);
    void recheck_group(Group& group);
    void make_ready(Entity e);
    void take(Entity e);
    void run_thread(Entity e);
    void read_source(std::uint32_t operation);
    void deliver(Entity e);
    void deliver_bytes(std::uint32_t operation, std::size_t from, std::size_t bytes);
    void complete(std::uint32_t operation);
    void touched(int rank, std::uint64_t begin, std::uint64_t end);
    void enabling_steps(Entity e);
    std::uint64_t slot(int rank, std::uint64_t offset) const;
    std::uint64_t seen(int rank, std::uint64_t offset, std::uint64_t at_least) const;
    Group& group_of(const Operation& op);
    std::uint32_t find(Entity e) const { return by_thread_[e.owner][e.operation]; }
    bool lost(const Operation& op) const;
    void add_event(const Event& e) {
        if (config_.log) log_.push_back(e);
    }
    Outstanding& outstanding_of(const Operation& op);

    WorldConfig config_;
    Priority priority_;
    std::vector<ZeroedWindow> windows_;
    std::vector<std::unique_ptr<Thread>> threads_;
    // Millions in a large run: a deque never holds them twice while it grows.
    std::deque<Operation> operations_;
    std::deque<Flight> flights_;
    std::vector<std::vector<std::uint32_t>> by_thread_;  // [thread][number]: operation
    std::vector<Group> groups_;
    std::vector<Outstanding> outstanding_;  // [rank][peer][queue]
    std::set<std::tuple<std::uint64_t, Entity>> ready_;
    std::deque<Event> log_;
    std::vector<Problem> problems_;
    std::vector<Call> calls_;
    std::vector<std::uint32_t> call_counts_;  // [thread]
    std::vector<TimedOut> timed_out_;
    StepInfo info_;
    std::uint32_t step_ = 0;
    std::size_t ended_ = 0;
    int arrived_ = 0;
    std::vector<std::uint32_t> arrive_steps_;
    std::map<std::pair<int, std::uint64_t>, std::vector<std::uint64_t>> history_;  // (rank, slot): values; least_waits
    bool abandoning_ = false, stopped_ = false, noticed_ = false;
};

}  // namespace hal::checker
