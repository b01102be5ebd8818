// SPDX-License-Identifier: Apache-2.0
// Searches over schedules of a subject. Every result says what was covered.
#pragma once
#include <optional>
#include <set>

#include "checker/subject.hpp"

namespace hal::checker {

struct SearchLimits {
    std::uint64_t max_runs = 1'000'000;
    double max_seconds = 60;
    bool stop_at_failure = true;
};

struct SearchResult {
    bool exhaustive = false;  // within the stated bound, everything was run
    std::string bound;        // in words
    std::uint64_t runs = 0, steps = 0, longest = 0;
    double seconds = 0;
    RunReport failure;  // of the first failing run
    Schedule schedule;  // of that run, shrunk
    std::set<std::vector<std::uint8_t>> outcomes;
};

inline void remember_outcome(SearchResult& result, Subject& subject, const World& world) {
    auto o = subject.outcome(world);
    if (!o.empty()) result.outcomes.insert(std::move(o));
}

// Every schedule up to reordering of independent steps: source sets and sleep sets (Abdulla, Aronis, Jonsson, Sagonas,
// Optimal dynamic partial order reduction, POPL 2014, algorithm 1).
SearchResult explore_all(Subject& subject, const SearchLimits& limits);

// The eager schedule with every set of at most `bound` entities held back until nothing else can run.
SearchResult explore_delays(Subject& subject, int bound, const SearchLimits& limits);

// Probabilistic concurrency testing (Burckhardt, Kothari, Musuvathi, Nagarakatte, ASPLOS 2010): random priorities for
// threads and for every delivery, `depth` - 1 change points. Run i uses seed + i.
SearchResult explore_random(Subject& subject, std::uint64_t seed, std::uint64_t runs, int depth,
                            const SearchLimits& limits);

// A shorter schedule that fails with the same kind of failure: few held entities if that can be, else a shorter path.
Schedule shrink(Subject& subject, const Schedule& failing, const std::string& kind);

}  // namespace hal::checker
