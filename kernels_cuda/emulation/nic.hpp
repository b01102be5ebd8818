// SPDX-License-Identifier: Apache-2.0
// The network card of one emulated rank: it does what NCCL's GIN proxy would hand to the software NIC, with the software
// NIC's own flows and fault policy (kernels_cuda/software_nic), so there is one adversary and one language for it. A thread
// of its own reads sources, writes the peers' windows and raises signals, late and in any order that GIN allows.
//
// HAL_SWNIC_SEED and HAL_SWNIC_FAULTS choose what happens (docs/software_nic.md); where no faults are named, kDefaultFaults
// do. Give an empty text for a network without any.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "../software_nic/config.hpp"
#include "../software_nic/flow.hpp"

namespace hal::cuda::emulation {

class Nic {
  public:
    // Everything that the contract allows, in times that keep tests quick.
    static constexpr const char* kDefaultFaults =
        "reorder=250us,split=1K,publish=40us,source_early,read=40us,complete=20us";

    // Memory as this rank maps it; `keep` holds the mapping until the operation has ended.
    struct Span {
        std::byte* at;
        std::shared_ptr<const void> keep;
    };
    struct Signal {
        Span word;
        std::uint64_t add;
        bool strong;
    };

    // Throws swnic::ConfigError.
    Nic(int world, int rank, int queues);
    ~Nic() { stop(2); }
    // Waits so many seconds at most for what is still under way, as a real card would deliver it; then nothing moves.
    void stop(double seconds);
    Nic(const Nic&) = delete;
    Nic& operator=(const Nic&) = delete;

    // From any thread. `more`: the card is told with the next operation of this (queue, peer) that comes without it.
    void put(int queue, int peer, Span to, Span from, std::size_t bytes, std::optional<Signal> signal, bool more);
    void put_value(int queue, int peer, Span to, std::uint64_t value, std::size_t bytes, std::optional<Signal> signal,
                   bool more);
    void signal(int queue, int peer, Signal signal);
    void get(int queue, int peer, Span from, Span to, std::size_t bytes);

    // A number above that of every operation so far.
    std::uint64_t now();
    // The peer of an operation of `queue` below that number whose source has not been read, or which has not been told
    // to the card; -1 when there is none.
    int unread(int queue, std::uint64_t below);

  private:
    struct Posted {
        swnic::Request request;
        std::uint64_t number, value = 0;
        int peer;
    };
    void post(int queue, int peer, swnic::Operation operation, std::optional<Signal> signal, const std::uint64_t* value,
              bool more);
    void serve();
    bool idle() const;
    std::size_t index(int queue, int peer) const { return static_cast<std::size_t>(queue * world_ + peer); }

    const int world_, rank_;
    std::vector<std::unique_ptr<swnic::Flow>> flows_;  // [queue][peer]; the card's thread's
    std::mutex mutex_;
    std::condition_variable changed_;
    std::vector<swnic::Operation> posted_;             // told to the card, not yet taken
    std::vector<std::vector<swnic::Operation>> held_;  // [queue][peer] until one comes without `more`
    std::vector<std::list<Posted>> open_;              // [queue] in order of their numbers
    std::uint64_t next_ = 0;
    std::atomic<bool> stop_{false};
    std::thread thread_;
};

}  // namespace hal::cuda::emulation
