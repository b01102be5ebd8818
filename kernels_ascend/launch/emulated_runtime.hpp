// SPDX-License-Identifier: Apache-2.0
// The emulated device as a Runtime: memory is the process's, a launch runs the kernel's cores as fibers of the caller's
// thread (in a World: when every PE waits for its stream, under the world's scheduler).
#pragma once
#include <condition_variable>
#include <exception>
#include <mutex>
#include <vector>

#include "emulation/world.hpp"
#include "launch/runtime.hpp"

namespace hal::ascend {

// Lets one thread for each PE share a World and still give the same run every time: the world moves only while every
// thread that takes part waits for its stream, and then only until the first stream is done. That one goes on alone.
class WorldClock {
  public:
    explicit WorldClock(udma::World& world) : world_(world), waiting_(std::size_t(world.size())) {}
    void enter();  // a thread begins to take part
    void leave();  // and ends
    void synchronize(int pe);

  private:
    void advance();
    udma::World& world_;
    std::mutex mutex_;
    std::condition_variable changed_;
    int taking_part_ = 0, waiters_ = 0;
    std::vector<bool> waiting_;
    std::exception_ptr error_;
};

class EmulatedRuntime : public Runtime {
  public:
    explicit EmulatedRuntime(udma::Device& device, WorldClock* clock = nullptr) : device_(device), clock_(clock) {}
    std::uint64_t allocate(std::size_t bytes) override;
    void free(std::uint64_t address) override;
    void write(std::uint64_t device, const void* host, std::size_t bytes) override;
    void read(void* host, std::uint64_t device, std::size_t bytes) override;
    void launch(Kernel kernel, std::uint64_t args, int cores) override;
    void synchronize() override;
    std::uint64_t cycles_per_second() const override { return 50'000'000; }

  protected:
    udma::Device& device_;

  private:
    WorldClock* clock_;
};

}  // namespace hal::ascend
