// SPDX-License-Identifier: Apache-2.0
// Exhaustive search of a litmus program: depth first, every state once (128-bit fingerprints), sleep sets.
#pragma once
#include <cstdint>
#include <vector>

#include "checker/litmus_machine.hpp"

namespace hal::checker {

struct LitmusLimits {
    std::uint64_t max_states = 20'000'000;
    double max_seconds = 60.0;
    bool sleep_sets = true;
};

// Registers, then memory, then 1 for a deadlock.
using Outcome = std::vector<std::uint8_t>;

struct LitmusVerdict {
    bool bad = false;           // a final state satisfies the program's condition
    bool deadlock = false;      // some schedule never ends
    bool exhaustive = true;     // every state was visited
    std::vector<int> schedule;  // transitions to the first bad state
    std::vector<Outcome> outcomes;
    std::uint64_t states = 0, transitions = 0;
    double seconds = 0, cpu_seconds = 0;
};

LitmusVerdict search(const Compiled& program, const LitmusLimits& limits);

}  // namespace hal::checker
