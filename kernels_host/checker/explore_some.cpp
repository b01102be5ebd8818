// SPDX-License-Identifier: Apache-2.0
// Bounded and random searches, and the shrinking of what they find.
#include <algorithm>
#include <chrono>
#include <map>
#include <random>

#include "checker/explore.hpp"

namespace hal::checker {
namespace {

class Clock {
  public:
    double seconds() const { return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count(); }

  private:
    std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

// Threads and deliveries of the eager run: what can be held back.
std::vector<Entity> entities_of(Subject& subject) {
    std::vector<Entity> out;
    run(subject, {}, false, [&](World& w) {
        for (std::size_t t = 0; t < w.config().thread_rank.size(); ++t)
            out.push_back({std::uint16_t(t), 0, Entity::thread});
        const bool reads = !w.config().profile.source_read_at_issue && !w.config().profile.at_issue;
        for (const Operation& op : w.operations()) {
            if (op.peer == op.rank || w.config().profile.at_issue) continue;
            out.push_back({op.thread, op.number, Entity::piece});
            if (reads && !op.is_signal) out.push_back({op.thread, op.number, Entity::source_read});
        }
    });
    return out;
}

void count(SearchResult& result, const RunReport& r) {
    ++result.runs;
    result.steps += r.steps;
    result.longest = std::max(result.longest, r.steps);
}

// Visits every subset of at most `bound` entities, smaller ones first; stops when `visit` returns false.
bool subsets(const std::vector<Entity>& all, int size, std::size_t from, std::vector<Entity>& chosen,
             const std::function<bool(const std::vector<Entity>&)>& visit) {
    if (size == 0) return visit(chosen);
    for (std::size_t i = from; i + std::size_t(size) <= all.size(); ++i) {
        chosen.push_back(all[i]);
        const bool go_on = subsets(all, size - 1, i + 1, chosen, visit);
        chosen.pop_back();
        if (!go_on) return false;
    }
    return true;
}

std::uint64_t mix(std::uint64_t x) {
    x ^= x >> 30;
    x *= 0xbf58476d1ce4e5b9u;
    x ^= x >> 27;
    x *= 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

}  // namespace

SearchResult explore_delays(Subject& subject, int bound, const SearchLimits& limits) {
    const Clock clock;
    SearchResult result;
    const std::vector<Entity> all = entities_of(subject);
    bool complete = true;
    for (int size = 0; size <= bound && complete; ++size) {
        std::vector<Entity> chosen;
        complete = subsets(all, size, 0, chosen, [&](const std::vector<Entity>& held) {
            if (result.runs >= limits.max_runs || clock.seconds() > limits.max_seconds) return false;
            const RunReport r =
                run(subject, {held, {}}, false, [&](World& w) { remember_outcome(result, subject, w); });
            count(result, r);
            if (!r.failed()) return true;
            if (!result.failure.failed()) {
                result.failure = r;
                result.schedule.held = held;
            }
            return !limits.stop_at_failure;
        });
    }
    result.exhaustive = complete;
    result.bound = "at most " + std::to_string(bound) + " of " + std::to_string(all.size()) + " entities delayed";
    result.seconds = clock.seconds();
    return result;
}

SearchResult explore_random(Subject& subject, std::uint64_t seed, std::uint64_t runs, int depth,
                            const SearchLimits& limits) {
    const Clock clock;
    SearchResult result;
    std::uint64_t length = 1000, stopped = 0;
    for (std::uint64_t i = 0; i < runs && clock.seconds() < limits.max_seconds; ++i) {
        std::mt19937_64 random(seed + i);
        const std::uint64_t salt = random();
        std::vector<std::uint64_t> changes;
        for (int d = 1; d < depth; ++d) changes.push_back(random() % std::max<std::uint64_t>(length, 1));
        std::map<Entity, std::uint64_t> lowered;
        const auto priority = [&](const World&, Entity e) {
            if (const auto it = lowered.find(e); it != lowered.end()) return it->second;
            const std::uint64_t id = (std::uint64_t(e.owner) << 40) | (std::uint64_t(e.operation) << 8) | e.unit;
            return mix(salt ^ (id + 1)) | (std::uint64_t{1} << 63);
        };
        World world(subject.start(), priority);
        std::vector<Entity> path;
        while (!world.nothing_ready() || world.stir()) {
            if (world.nothing_ready()) continue;
            if (world.full()) {
                world.stop();
                break;
            }
            const Entity e = world.best();
            const auto change = std::find(changes.begin(), changes.end(), world.steps());
            if (change != changes.end()) {
                const auto low = std::uint64_t(change - changes.begin()) + 1;
                *change = ~std::uint64_t{0};
                world.set_priority(e, low);
                lowered[e] = low;
                continue;
            }
            path.push_back(e);
            world.execute(e);
        }
        RunReport r = report(subject, world);
        length = world.steps();
        stopped += r.stopped;
        remember_outcome(result, subject, world);
        count(result, r);
        if (r.failed() && !result.failure.failed()) {
            result.failure = std::move(r);
            result.schedule.path = std::move(path);
            if (limits.stop_at_failure) break;
        }
    }
    result.bound = std::to_string(result.runs) + " random priority schedules, depth " + std::to_string(depth) +
                   ", seeds from " + std::to_string(seed);
    if (stopped) result.bound += ", " + std::to_string(stopped) + " of them stopped by the limit on memory";
    result.seconds = clock.seconds();
    return result;
}

Schedule shrink(Subject& subject, const Schedule& failing, const std::string& kind) {
    const auto fails = [&](const Schedule& s) { return run(subject, s).kind == kind; };
    if (fails({})) return {};
    // First: one or two entities held back explain most failures, and read best.
    const std::vector<Entity> all = entities_of(subject);
    std::optional<Schedule> found;
    const Clock clock;
    for (int size = 1; size <= 2 && !found; ++size) {
        std::vector<Entity> chosen;
        subsets(all, size, 0, chosen, [&](const std::vector<Entity>& held) {
            if (clock.seconds() > 10) return false;
            if (fails({held, {}})) found = Schedule{held, {}};
            return !found;
        });
    }
    if (found) return *found;
    if (failing.path.empty()) {
        Schedule s = failing;
        for (std::size_t i = 0; i < s.held.size();) {
            Schedule less = s;
            less.held.erase(less.held.begin() + std::ptrdiff_t(i));
            if (fails(less))
                s = less;
            else
                ++i;
        }
        return s;
    }
    // Else: drop choices from the path, in halving chunks; what follows is eager.
    Schedule s = failing;
    for (std::size_t chunk = std::max<std::size_t>(s.path.size() / 2, 1); chunk > 0 && clock.seconds() < 20; chunk /= 2)
        for (std::size_t i = 0; i < s.path.size();) {
            Schedule less = s;
            less.path.erase(less.path.begin() + std::ptrdiff_t(i),
                            less.path.begin() + std::ptrdiff_t(std::min(i + chunk, s.path.size())));
            if (!less.path.empty() && fails(less))
                s = less;
            else
                i += chunk;
        }
    return s;
}

}  // namespace hal::checker
