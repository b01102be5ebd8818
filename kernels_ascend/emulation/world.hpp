// SPDX-License-Identifier: Apache-2.0
// Every PE of a run in one process, under one deterministic scheduler. What may happen next is a list of choices: a core
// takes a turn, an engine takes a descriptor, a request lands (a piece), a completion entry is written. A seed picks, or
// whoever drives the world from outside does (enabled() and take()).
#pragma once
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "emulation/device.hpp"

namespace hal::udma {

// While it lives, this core is Core::current() of the thread.
class CoreScope {
  public:
    explicit CoreScope(Core& core);
    ~CoreScope();
    CoreScope(const CoreScope&) = delete;
    CoreScope& operator=(const CoreScope&) = delete;

  private:
    Core* previous_;
};

struct Choice {
    int pe;
    int block;  // >= 0: this core takes a turn; -1: an engine step
    Step step;
    std::uint64_t entity;  // who acts, stable over the entity's life
    std::string text() const;
};

// What an engine did, for drawing the end of a run.
struct Event {
    StepKind kind;
    int pe, target;
    std::uint32_t qp;
    std::uint64_t operation;  // its number on this PE
    std::uint32_t bytes;
    std::uint8_t odr;
    bool notifies;                 // it raises a signal of its own
    std::uint32_t landed, pieces;  // after this step
};

// How a seed picks. `mixed` derives one of the others from the seed.
enum class Strategy : std::uint8_t { mixed, uniform, priorities, cores_first, engines_first, starve_queue };

class World {
  public:
    World(int pes, std::uint64_t heap_bytes, EngineConfig config, Strategy strategy = Strategy::mixed);
    ~World();

    Device& device(int pe) { return *devices_[pe]; }
    int size() const { return int(devices_.size()); }

    const std::vector<Choice>& enabled();
    void take(std::size_t index);
    bool idle();          // nothing is left to do
    std::uint64_t run();  // to the end; returns the number of steps; throws Fault or Hang
    int run_until_done(const std::vector<bool>& wanted);  // until one of these PEs has no launch left; gives it
    void advance_engines();                               // one engine step, for a wait outside of any kernel
    void settle();                                        // every engine step there is

    std::uint64_t version() const;
    std::uint64_t cycles() const { return cycles_; }
    bool coin();
    std::vector<std::string> warnings() const;
    // The last kRecent steps of all engines, oldest first.
    const std::deque<Event>& recent() const { return recent_; }
    std::uint64_t steps() const { return steps_; }
    std::uint64_t most_steps = 20'000'000;

  private:
    std::size_t pick(const std::vector<Choice>& choices);
    void prepare();
    void step();
    void engine_step(Device& device, const Step& step);
    std::uint64_t random();

    std::vector<std::unique_ptr<Pages>> heaps_;
    std::vector<std::unique_ptr<Device>> devices_;
    std::vector<Choice> choices_;
    static constexpr std::size_t kRecent = 400;
    std::deque<Event> recent_;
    std::uint64_t state_, seed_;
    Strategy strategy_;
    std::uint64_t cycles_ = 0;
    int time_jumps_ = 0;
    std::uint64_t steps_ = 0;
};

}  // namespace hal::udma
