// SPDX-License-Identifier: Apache-2.0
// One block of an emulated launch: its threads are fibers of the operating-system thread that runs it. A thread runs until
// it waits for others (a barrier, a warp's collective) or looks again at memory that has not changed.
#pragma once
#include <atomic>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "emulation/order.hpp"
#include "emulation/random.hpp"
#include "emulation/regions.hpp"
#include "fiber/fiber.hpp"

namespace hal::cuda::emulation {

class Block;

// A place in a source.
struct Site {
    const char* file = "";
    int line = 0;
    bool operator==(const Site& other) const { return line == other.line && std::strcmp(file, other.file) == 0; }
};
enum class BlockWord : std::uint8_t { sync, all, any, count };
enum class WarpWord : std::uint8_t { sync, shfl, shfl_up, shfl_down, shfl_xor, ballot, match, add };

// A CUDA thread.
struct Thread {
    enum State : std::uint8_t { ready, polling, in_warp, in_block, ended };
    Block* block = nullptr;
    unsigned thread = 0;
    State state = ready;
    std::unique_ptr<hal::Fiber> fiber;
    // What it waits at.
    WarpWord word{};
    unsigned mask = 0;
    int argument = 0;
    Site site;
    std::uint64_t value = 0, result = 0;
    std::uint32_t clock = 1;
    std::uint32_t fresh =
        0;  // EarlyLoads up to this number were before an acquire that happens before what it does now
    // What it looked at last, and saw.
    const void* polled = nullptr;
    std::uint64_t seen = 0;

    unsigned lane() const { return thread & 31; }
    unsigned warp() const { return thread >> 5; }
};

// The thread that runs now on this operating-system thread.
extern thread_local Thread* running;

// A launch. The first block to fail says why, and ends the others.
struct Grid {
    unsigned blocks = 1, threads = 1;
    std::size_t shared_bytes = 0;
    std::string what;
    std::function<void()> kernel;
    std::uint64_t seed = 0;
    int device = 0;
    GpuVisible gpu_visible;

    void fail(const std::string& text);
    bool failed() const { return failed_.load(std::memory_order_acquire); }
    std::string failure() const { return failure_; }

  private:
    std::mutex mutex_;
    std::atomic<bool> failed_{false};
    std::string failure_;
};

class Block {
  public:
    Block(Grid& grid, unsigned index);
    // Runs the block to its end. `shared` of this operating-system thread was poisoned before.
    void run();

    unsigned index() const { return index_; }
    unsigned threads() const { return grid_.threads; }
    unsigned blocks() const { return grid_.blocks; }
    void* dynamic_shared() { return shared_.data() + kGuard; }

    // __syncthreads and its kin. Ends the launch when threads meet at different places, or one has ended.
    int meet(Thread& thread, BlockWord word, int value, Site site);
    // A collective of the lanes in `mask`.
    std::uint64_t exchange(Thread& thread, WarpWord word, unsigned mask, std::uint64_t value, int argument, Site site);
    // The thread sees nothing new: others go first.
    void poll(Thread& thread);
    // A thread that looks at `p` a second time and sees the same gives way to others first.
    template <class T, class Load>
    T look(Thread& thread, const T* p, Load load) {
        T value = load(p);
        std::uint64_t word = 0;
        std::memcpy(&word, &value, sizeof value);
        if (thread.polled == p && thread.seen == word) {
            poll(thread);
            value = load(p);
            std::memcpy(&word, &value, sizeof value);
        }
        if (thread.polled == p && thread.seen != word) progress_ = true;
        thread.polled = p, thread.seen = word;
        return value;
    }
    [[noreturn]] void trap(const std::string& text);

    // --- memory (order.hpp) ---
    // Whether p lies in a window. Ends the launch when it lies beside one, or in one of a rank without an address here.
    bool is_window(const void* p, std::size_t bytes);
    void check(const void* p, std::size_t bytes) { is_window(p, bytes); }
    bool keeps_back() const { return keeps_back_; }
    bool at_random() { return random_.below(2) != 0; }
    void keep(const Thread& thread, void* p, const void* value, std::size_t bytes, bool atomic);
    // What a plain load of this thread gives, where memory holds `value`.
    void see(const Thread& thread, const void* p, void* value, std::size_t bytes) {
        if (thread.fresh < early_.number() && random_.below(4) != 0) early_.look_back(p, value, bytes);
        overlay(p, value, bytes);
    }
    void overlay(const void* p, void* value, std::size_t bytes) {
        if (grid_.gpu_visible.size.load(std::memory_order_acquire) != 0) overlay_gpu_visible(p, value, bytes);
        own_.overlay(p, value, bytes);
    }
    void fence(Thread& thread, bool system);
    void before_release(Thread& thread, const void* p, std::size_t bytes);
    // Makes this block's stores to these words visible, since what follows acts on memory itself.
    void flush(const void* p, std::size_t bytes) { own_.flush(p, bytes); }
    // A word that others write was looked at, or acted on by an atomic: what a fence of another block of this GPU covered
    // before it wrote there comes with it.
    void saw(Thread& thread, const void* p, std::size_t bytes, bool acquires);
    void wrote(const void* p, std::size_t bytes) { early_.know(p, bytes); }

  private:
    struct Warp {
        unsigned ready = 0, polling = 0, waiting = 0, ended = 0;
        // Which stores of lane j happen before what lane i does next: those with a clock up to known[i][j].
        std::uint32_t known[32][32] = {};
    };

    bool covers(const Thread& thread, const Store& store) const;
    void fence_covered(Thread& thread, bool system);
    void overlay_gpu_visible(const void* p, void* value, std::size_t bytes);
    void order_warp(Warp& warp, Thread* lanes, unsigned mask);
    void let_out(bool all);

    static constexpr std::size_t kGuard = 256;  // poisoned bytes on both sides of dynamic shared memory
    void start();
    void resume(Warp& warp, unsigned lane);
    void wait(Thread& thread);
    void finish_meeting();
    void finish_exchange(Warp& warp, Thread* lanes, WarpWord word, unsigned mask);
    bool complete(const Warp& warp, const Thread* lanes, const Thread& last) const;
    void idle();
    void end(Thread& thread);
    void check_guards();
    std::string name(const Thread& thread) const;
    std::string who_waits() const;

    Grid& grid_;
    unsigned index_;
    Random random_;
    std::vector<std::byte> shared_;
    std::vector<Thread> threads_;
    std::vector<Warp> warps_;
    unsigned ended_ = 0;
    bool abandoning_ = false, progress_ = false;
    int idle_turns_ = 0;
    std::uint64_t idle_since_ = 0;
    // The barrier.
    unsigned arrived_ = 0, first_ = 0;
    BlockWord meeting_{};
    Site meeting_site_;
    int true_ = 0, meeting_result_ = 0;
    // Memory.
    std::shared_ptr<const Regions> regions_;
    const Region* last_region_ = nullptr;
    bool keeps_back_, is_late_, loads_early_;
    EarlyLoads early_;
    StoreBuffer own_;
    std::uint32_t meetings_ = 1;  // barriers so far, and one
    std::uint64_t acquired_ =
        0;                 // what is visible on this GPU up to this number happens before this block's next fence
    bool looked_ = false;  // a word was read without acquiring since the last fence
};

}  // namespace hal::cuda::emulation
