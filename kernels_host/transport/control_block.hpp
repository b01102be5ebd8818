// SPDX-License-Identifier: Apache-2.0
// One page of shared memory that each rank writes about itself and all its peers read: whether it is alive and well, what
// it is waiting for, and a bell by which a peer's signal wakes it.
#pragma once
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
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

inline constexpr int kWaitingForAny = -1;

// The views of who is left (hal/members.hpp), kept in rank 0's block: its memory outlives it, since every rank maps it.
// Whoever first writes a view decides it, so a decision needs nobody's answer and stands whoever dies next.
struct ViewBoard {
    std::array<std::atomic<std::uint64_t>, 64> lost;        // of view v; 0 = not decided. View 0 has no entry
    std::array<std::atomic<std::int32_t>, 64> by_plus_one;  // who decided it; for messages
};

// One thread's wait. Zeroed memory says "none".
struct Wait {
    std::atomic<std::int32_t> source_plus_2;  // whom it waits for, a rank or kWaitingForAny; 0 = nobody waits here
    std::atomic<std::uint64_t> since;         // by the machine's steady clock
    SharedText stage;
};

struct ControlBlock {
    // Written last (release) when a rank ends well or badly; `fault_rank` and `reason` are valid once it is `failed`.
    std::atomic<RankState> state;
    std::atomic<std::int32_t> fault_rank;
    SharedText reason;

    // What this rank's threads wait for. A timed-out rank follows these to the root. A thread that finds no place waits
    // unseen; beside so many others it makes no difference to who is at the root.
    alignas(64) std::array<Wait, 8> waits;

    // A waiter that gave up spinning counts itself in `sleepers`, looks once more at its slot and sleeps on `bell`. A
    // signaller changes the slot, then looks at `sleepers`. All four are sequentially consistent, so at least one sees
    // the other, and no wake-up is lost.
    alignas(64) std::atomic<std::uint32_t> bell;
    std::atomic<std::uint32_t> sleepers;

    alignas(64) ViewBoard views;  // rank 0's is in use

    bool waits_for_nobody() const {
        return std::all_of(waits.begin(), waits.end(),
                           [](const Wait& wait) { return wait.source_plus_2.load(std::memory_order_acquire) == 0; });
    }
};
static_assert(sizeof(ControlBlock) <= 4096);

// Says, for as long as it lives, what one thread of the block's owner waits for: a rank or kWaitingForAny.
class Announcement {
  public:
    Announcement(ControlBlock& own, int source, const std::string& stage) {
        for (Wait& wait : own.waits) {
            std::int32_t free = 0;
            if (!wait.source_plus_2.compare_exchange_strong(free, kTaken, std::memory_order_acquire)) continue;
            wait.since.store(static_cast<std::uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count()),
                             std::memory_order_relaxed);
            wait.stage.store(stage);
            wait.source_plus_2.store(source + 2, std::memory_order_release);
            wait_ = &wait;
            return;
        }
    }
    ~Announcement() { end(); }
    Announcement(const Announcement&) = delete;
    Announcement& operator=(const Announcement&) = delete;

    void end() {
        if (wait_) wait_->source_plus_2.store(0, std::memory_order_release);
        wait_ = nullptr;
    }

  private:
    static constexpr std::int32_t kTaken = kWaitingForAny + 2;  // while it is written
    Wait* wait_ = nullptr;
};

static_assert(std::atomic<std::uint64_t>::is_always_lock_free, "shared between processes");

}  // namespace hal
