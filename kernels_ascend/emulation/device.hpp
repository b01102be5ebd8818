// SPDX-License-Identifier: Apache-2.0
// One PE: its heap mapping, its engine, and the launches on its stream. Stand-alone it runs a launch at once, its cores as
// fibers of the calling thread; inside a World everything is queued for the scheduler.
#pragma once
#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <unordered_map>

#include "emulation/core.hpp"
#include "emulation/engine.hpp"
#include "emulation/fiber.hpp"

namespace hal::udma {

class World;

struct Launch {
    std::function<void()> kernel;  // one core's work
    int blocks;
    std::vector<std::unique_ptr<Core>> cores;
    std::vector<std::unique_ptr<Fiber>> fibers;
    std::uint64_t id = 0;
    int arrived = 0;  // SyncAll
    std::uint64_t generation = 0;
    bool finished() const;
};

class Device {
  public:
    Device(int pe, std::vector<Heap> heaps, EngineConfig config, World* world = nullptr);
    Device(const Device&) = delete;
    Device& operator=(const Device&) = delete;

    int pe() const { return pe_; }
    int pes() const { return int(heaps_.size()); }
    bool lazy() const { return engine.config.lazy; }
    const std::vector<Heap>& heaps() const { return heaps_; }
    // One more symmetric window: its address on every PE. Gives its index.
    int add_window(const std::vector<Region>& regions);
    void remove_window(int index);
    std::uint64_t to_remote(std::uint64_t local_address, int pe) const;  // symmetric address -> the target's copy

    void launch(std::function<void()> kernel, int blocks);
    Launch* active() { return stream_.empty() ? nullptr : stream_.front().get(); }
    void start_front();
    void retire_front() { stream_.pop_front(); }
    std::uint64_t launch_id() const { return stream_.empty() ? 0 : stream_.front()->id; }

    void store_register(std::uint64_t value, void* address);  // st_dev: the only store that a doorbell notices
    void sync_all(Core& core);
    std::uint64_t cycles();  // 50 per microsecond
    void pause();
    void point();
    void changed();
    bool coin();

    Core& script_core(int block);  // a core driven from outside of any kernel

  private:
    const int pe_;
    std::vector<Heap> heaps_;

  public:
    Engine engine;
    std::function<void(Launch&)> idle;  // called while every core waits
    std::function<void(int)> landed;    // called when bytes reached that PE
    // Which signals each queue carried since it last had none (Mutation::drop_empty_signal).
    std::unordered_map<const Queue*, bool> carried;

  private:
    void run(Launch& launch);
    World* world_;
    std::deque<std::unique_ptr<Launch>> stream_;
    std::uint64_t launches_ = 0;
    std::unordered_map<void*, std::pair<Queue*, bool>> registers_;
    std::vector<std::unique_ptr<Core>> script_cores_;
};

}  // namespace hal::udma
