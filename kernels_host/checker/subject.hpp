// SPDX-License-Identifier: Apache-2.0
// What is being checked, and one run of it.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "checker/world.hpp"

namespace hal::checker {

// A program that can be run again and again from its start.
class Subject {
  public:
    virtual ~Subject() = default;
    // A fresh run: outputs are cleared.
    virtual WorldConfig start() = 0;
    // After a run in which every thread ended: empty, or what is wrong with the data.
    virtual std::string judge(const World& world) = 0;
    // The outputs of the last run, for outcome sets.
    virtual std::vector<std::uint8_t> outcome(const World& world) = 0;
};

// How a run is scheduled: by the eager scheduler (every delivery at once, in order of issue; then the threads) with some
// entities held back until nothing else can run, or along a path of explicit choices, after which it goes on eagerly.
struct Schedule {
    std::vector<Entity> held;
    std::vector<Entity> path;
};

struct RunReport {
    std::string failure;  // empty = right
    std::string kind;     // hang, wrong data, source changed, exception, contract
    std::uint64_t steps = 0;
    bool stopped = false;  // the world was full before the end; nothing is said of results
    bool failed() const { return !failure.empty(); }
};

World::Priority eager(std::vector<Entity> held);
World::Priority lazy();  // threads first, deliveries only when every thread waits

// What a finished (or stuck) world amounts to.
RunReport report(Subject& subject, World& world);

// The best of the ready entities, again and again, until none is ready or the world is full (and then stopped).
void run_on(World& world);

// Runs to the end; `look` sees the world before it is gone.
RunReport run(Subject& subject, const Schedule& schedule, bool log = false,
              const std::function<void(World&)>& look = {});

// "eager", "hold 0.3w 1", "path 0,0.1w,..." and back. Entities: T = thread, T.N = operation N of thread T: s = its source
// read, w = its write, wK = piece K of its write.
std::string to_text(const Schedule& schedule);
Schedule schedule_from(const std::string& text);
std::string to_text(Entity e);

}  // namespace hal::checker
