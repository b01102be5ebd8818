// SPDX-License-Identifier: Apache-2.0
// One run, one pass over its log, one verdict: two accesses of the same bytes, one of them a write, that no rule of the
// profile and no signal orders. Vector clocks for threads; for each (thread, peer, queue) how many of its operations are
// known to be complete. A signal orders a wait only if the awaited value could not have been reached without it.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "checker/world.hpp"

namespace hal::checker {

struct Race {
    int rank = 0;  // whose memory
    std::uint64_t begin = 0, end = 0;
    std::string first, second;
    std::string text() const;
};

struct RaceLimits {
    std::size_t max_races = 20;
    std::size_t max_bytes = std::size_t{1} << 30;  // of clocks and access histories
    int max_passes = 100;
};

struct RaceVerdict {
    std::vector<Race> races;   // at most `max_races`
    std::uint64_t events = 0;  // in the log
    std::uint64_t judged = 0;  // of them, until `max_bytes` was reached
    int passes = 1;            // more than one where a later signal could have satisfied an earlier wait
    bool settled = true;       // false: after `max_passes` passes there were still new such signals
    double seconds = 0;
};

RaceVerdict find_races(const World& world, const RaceLimits& limits = {});

}  // namespace hal::checker
