// SPDX-License-Identifier: Apache-2.0
// One page of shared memory that each rank writes about itself and all its peers read: whether it is alive and well, what
// it is waiting for, and a bell by which a peer's signal wakes it.
#pragma once
#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

namespace hal {

// A short text that one rank writes and others may read meanwhile. A torn read gives a mixed text, never a fault; it is
// used in messages only.
class SharedText {
  public:
    void store(const std::string& text) {
        for (std::size_t w = 0; w < words_.size(); ++w) {
            std::uint64_t word = 0;
            if (w * 8 < text.size())
                std::memcpy(&word, text.data() + w * 8, std::min<std::size_t>(8, text.size() - w * 8));
            words_[w].store(word, std::memory_order_relaxed);
        }
    }
    std::string load() const {
        std::string text(words_.size() * 8, '\0');
        for (std::size_t w = 0; w < words_.size(); ++w) {
            const std::uint64_t word = words_[w].load(std::memory_order_relaxed);
            std::memcpy(text.data() + w * 8, &word, 8);
        }
        return text.substr(0, text.find('\0'));
    }

  private:
    std::array<std::atomic<std::uint64_t>, 32> words_;
};

enum class RankState : std::uint32_t { running = 0, closed = 1, failed = 2 };

inline constexpr int kNotWaiting = -2, kWaitingForAny = -1;

// The views of who is left (hal/members.hpp), kept in rank 0's block: its memory outlives it, since every rank maps it.
// Whoever first writes a view decides it, so a decision needs nobody's answer and stands whoever dies next.
struct ViewBoard {
    std::array<std::atomic<std::uint64_t>, 64> lost;        // of view v; 0 = not decided. View 0 has no entry
    std::array<std::atomic<std::int32_t>, 64> by_plus_one;  // who decided it; for messages
};

struct ControlBlock {
    // Written last (release) when a rank ends well or badly; `fault_rank` and `reason` are valid once it is `failed`.
    std::atomic<RankState> state;
    std::atomic<std::int32_t> fault_rank;
    SharedText reason;

    // What this rank waits for: a rank, kWaitingForAny or kNotWaiting. A timed-out rank follows these to the root.
    // Stored one higher than kNotWaiting so that zeroed memory says "not waiting".
    alignas(64) std::atomic<std::int32_t> waiting_for_plus_2;
    SharedText stage;

    // A waiter that gave up spinning counts itself in `sleepers`, looks once more at its slot and sleeps on `bell`. A
    // signaller changes the slot, then looks at `sleepers`. All four are sequentially consistent, so at least one sees
    // the other, and no wake-up is lost.
    alignas(64) std::atomic<std::uint32_t> bell;
    std::atomic<std::uint32_t> sleepers;

    alignas(64) ViewBoard views;  // rank 0's is in use

    int waiting_for() const { return waiting_for_plus_2.load(std::memory_order_acquire) - 2; }
    void set_waiting_for(int rank) { waiting_for_plus_2.store(rank + 2, std::memory_order_release); }
};
static_assert(sizeof(ControlBlock) <= 4096);
static_assert(std::atomic<std::uint64_t>::is_always_lock_free, "shared between processes");

}  // namespace hal
