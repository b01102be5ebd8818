// SPDX-License-Identifier: Apache-2.0
// One rank's end of a connection (NCCL's collComm): the mesh, the rings, the regions, the queues, and the wire thread that
// alone issues copies and applies signals. NCCL's own threads only append operations and read request states.
#pragma once
#include <atomic>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "config.hpp"
#include "device.hpp"
#include "flow.hpp"
#include "memory.hpp"
#include "rendezvous.hpp"
#include "rings.hpp"

namespace hal::swnic {

// The queues made by one createContext, each with a Flow to every rank that it reaches.
class QueueSet {
  public:
    QueueSet(class Endpoint& endpoint, int count, int stride);

    bool reaches(int peer) const;
    Flow* flow(int queue, int peer) const;
    // From NCCL's threads; the lock is held for a push or a swap only, so several threads may post.
    Request* post(Operation operation);
    void give_back(Request* request);
    bool take_posted(std::vector<Operation>& into);
    // Nothing posted that has not ended. From any thread.
    bool drained() const;

    Endpoint& endpoint;
    const int count, stride;
    std::vector<std::unique_ptr<Flow>> flows;  // [queue][peer], null where not reached; the wire thread's
    std::atomic<bool> failed{false};

  private:
    std::mutex mutex_;
    std::vector<Operation> posted_;
    std::atomic<std::size_t> posted_count_{0};
    std::deque<Request> requests_;
    std::vector<Request*> free_;
};

struct Totals {
    std::uint64_t puts = 0, gets = 0, signals = 0, bytes = 0, pieces = 0, copies = 0, ended = 0, failed = 0,
                  busy_ns = 0, most_waiting = 0;
    void add(const FlowCounters& flow);
};

class Endpoint {
  public:
    // Collective and blocking; throws std::runtime_error saying who is missing.
    Endpoint(const Listener& listener, std::span<const Handle> handles, int rank);
    ~Endpoint();
    Endpoint(const Endpoint&) = delete;
    Endpoint& operator=(const Endpoint&) = delete;

    // Collective; throws when ranks disagree, naming them and both values.
    std::shared_ptr<MemoryRegion> register_memory(Address base, std::size_t bytes, bool host, std::uint64_t flags);
    void deregister(std::uint32_t region);
    QueueSet* create_queues(int count, int stride);
    void destroy_queues(QueueSet* set);

    int rank() const { return rank_; }
    int nranks() const { return nranks_; }
    const Config& config() const { return config_; }

  private:
    friend class QueueSet;
    void wire();
    void take_queues();
    bool serve(Nanos now);
    bool apply_signals();
    void apply(MemoryRegion& region, const SignalEntry& entry);
    bool publish(int peer, const SignalEntry& entry);
    void notice_departures();
    RequestState lost_state() const;
    void break_flows(QueueSet& set, int peer, RequestState state);
    void fail_all(const char* why);
    void import_peers(MemoryRegion& region, std::vector<Message>& messages);
    void drain(const std::function<bool()>& empty) const;
    std::shared_ptr<MemoryRegion> find_region(std::uint32_t id);
    void watch();
    std::string dump();
    void write_stats();
    int take_queue_numbers(int count);

    const Config config_;
    const std::shared_ptr<Device> device_;
    const int rank_, nranks_;
    Mesh mesh_;
    std::unique_ptr<SharedRings> rings_;

    std::mutex collective_;  // one registration at a time; held while waiting for the other ranks
    std::uint32_t next_region_ = 0;

    std::mutex tables_;  // never held while waiting or calling the device
    std::map<std::uint32_t, std::shared_ptr<MemoryRegion>> regions_;
    std::vector<std::shared_ptr<QueueSet>> sets_;
    int next_queue_ = 0;
    std::atomic<std::uint64_t> tables_version_{1};
    Totals retired_;  // of destroyed queues

    // The wire thread's own.
    std::vector<std::shared_ptr<QueueSet>> served_;
    std::atomic<std::uint64_t> served_version_{0};
    std::vector<Operation> scratch_;
    std::vector<bool> lost_;
    bool copying_ = false, device_failed_ = false;

    std::atomic<bool> stop_{false};
    std::atomic<std::uint64_t> progress_{0}, pending_{0}, applied_{0}, orphaned_{0};
    std::atomic<const char*> doing_{"starting"};
    std::condition_variable watch_wakes_;
    std::mutex watch_mutex_;
    std::thread wire_, watch_;
};

}  // namespace hal::swnic
