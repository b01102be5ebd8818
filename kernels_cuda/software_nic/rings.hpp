// SPDX-License-Identifier: Apache-2.0
// The memory that all ranks of a connection share, one memfd: a cell of liveness for each rank, and for each (source,
// target) a ring of signals. The source's wire thread pushes, the target's pops and applies: signals lie in memory that
// only the target can reach, and several sources may add to one word.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "clock.hpp"

namespace hal::swnic {

struct SignalEntry {
    std::uint64_t offset;  // in the memory region
    std::uint64_t add;
    std::uint32_t mr;  // number of the region: the order of registration, the same on all ranks
    std::uint32_t source;
};

enum class RankState : std::uint32_t { joining = 0, live = 1, closed = 2 };

struct alignas(64) RankCell {
    std::atomic<RankState> state;
    std::atomic<Nanos> heartbeat;  // of the rank's wire thread
};

class alignas(64) SignalRing {
  public:
    static constexpr std::uint64_t capacity = 1024;

    bool push(const SignalEntry& entry) {
        auto tail = tail_.load(std::memory_order_relaxed);
        if (tail - head_.load(std::memory_order_acquire) == capacity) return false;
        entries_[tail % capacity] = entry;
        // Release: the target may raise the signal only after the data that it covers, which was completed before this.
        tail_.store(tail + 1, std::memory_order_release);
        return true;
    }

    // The oldest entry, or nullptr.
    const SignalEntry* front() const {
        auto head = head_.load(std::memory_order_relaxed);
        return head == tail_.load(std::memory_order_acquire) ? nullptr : &entries_[head % capacity];
    }
    void pop() { head_.store(head_.load(std::memory_order_relaxed) + 1, std::memory_order_release); }

    std::uint64_t waiting() const {
        return tail_.load(std::memory_order_relaxed) - head_.load(std::memory_order_relaxed);
    }

  private:
    alignas(64) std::atomic<std::uint64_t> head_;
    alignas(64) std::atomic<std::uint64_t> tail_;
    alignas(64) SignalEntry entries_[capacity];
};

// A mapping of the shared memory; starts as zeros, which is the empty state of everything in it.
class SharedRings {
  public:
    static int create(int nranks);  // a memfd, owned by the caller
    SharedRings(int fd, int nranks);
    ~SharedRings();
    SharedRings(const SharedRings&) = delete;
    SharedRings& operator=(const SharedRings&) = delete;

    RankCell& cell(int rank) { return cells_[rank]; }
    SignalRing& ring(int src, int dst) { return rings_[static_cast<std::size_t>(src) * nranks_ + dst]; }

  private:
    std::size_t nranks_;
    void* base_;
    RankCell* cells_;
    SignalRing* rings_;
};

}  // namespace hal::swnic
