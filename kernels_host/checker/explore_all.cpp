// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <chrono>
#include <unordered_map>

#include "checker/explore.hpp"

namespace hal::checker {
namespace {

// A set of steps of one run.
class Steps {
  public:
    bool has(std::uint32_t i) const { return i / 64 < words_.size() && (words_[i / 64] >> (i % 64) & 1); }
    void add(std::uint32_t i) {
        if (words_.size() <= i / 64) words_.resize(i / 64 + 1);
        words_[i / 64] |= std::uint64_t{1} << (i % 64);
    }
    void add(const Steps& o) {
        if (words_.size() < o.words_.size()) words_.resize(o.words_.size());
        for (std::size_t i = 0; i < o.words_.size(); ++i) words_[i] |= o.words_[i];
    }

  private:
    std::vector<std::uint64_t> words_;
};

bool independent(const std::vector<Access>& a, const std::vector<Access>& b) {
    for (const Access& x : a)
        for (const Access& y : b)
            if (x.conflicts(y)) return false;
    return true;
}

struct Sleeper {
    Entity entity;
    std::vector<Access> touches;
};

struct Frame {
    StepInfo step;
    Steps before;  // steps that happen before this one
    std::vector<Entity> backtrack;
    std::vector<Sleeper> sleep;
};

class Explorer {
  public:
    Explorer(Subject& subject, const SearchLimits& limits) : subject_(subject), limits_(limits) {}

    SearchResult run() {
        const auto start = std::chrono::steady_clock::now();
        const auto seconds = [&] {
            return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
        };
        result_.exhaustive = true;
        do {
            one_run();
            if (too_long_) break;
            if (result_.failure.failed() && limits_.stop_at_failure) break;
            if (result_.runs >= limits_.max_runs || seconds() > limits_.max_seconds) {
                result_.exhaustive = !next();
                break;
            }
        } while (next());
        result_.bound = "all schedules, up to the order of independent steps";
        if (too_long_)
            result_.bound = "stopped by the limit on memory in a run, at step " + std::to_string(frames_.size());
        if (too_long_ || (result_.failure.failed() && limits_.stop_at_failure)) result_.exhaustive = false;
        result_.seconds = seconds();
        return std::move(result_);
    }

  private:
    void one_run() {
        World world(subject_.start(), lazy());
        for (std::size_t i = 0; i < frames_.size(); ++i) {
            const bool fresh = i + 1 == frames_.size() && fresh_;
            if (fresh && !world.is_ready(chosen_)) {  // the reversal was only a guess: without step i it waits
                std::erase(frames_[i].backtrack, chosen_);
                guessed_ = true;
                return;
            }
            const StepInfo& info = world.execute(fresh ? chosen_ : frames_[i].step.entity);
            if (fresh) enter(i, info, world);
        }
        fresh_ = true;
        bool asleep = false;
        while (!world.nothing_ready()) {
            // Each step keeps one bit for each step before it.
            if (frames_.size() * (sizeof(Frame) + frames_.size() / 8) > world.config().max_bytes) {
                too_long_ = true;
                return;
            }
            std::vector<Sleeper> sleep = frames_.empty() ? std::vector<Sleeper>{} : awake_less(frames_.back());
            const std::optional<Entity> e = choose(world, sleep);
            if (!e) {
                asleep = true;  // every continuation is one that was seen
                break;
            }
            frames_.push_back({});
            frames_.back().sleep = std::move(sleep);
            frames_.back().backtrack = {*e};
            const StepInfo& info = world.execute(*e);
            enter(frames_.size() - 1, info, world);
        }
        ++result_.runs;
        result_.steps += world.steps();
        result_.longest = std::max<std::uint64_t>(result_.longest, world.steps());
        if (!asleep) judge(world);
    }

    void judge(World& world) {
        RunReport r = report(subject_, world);
        remember_outcome(result_, subject_, world);
        if (!r.failed() || result_.failure.failed()) return;
        result_.failure = std::move(r);
        for (const Frame& f : frames_) result_.schedule.path.push_back(f.step.entity);
    }

    // Sleepers of the state after a frame's step.
    static std::vector<Sleeper> awake_less(const Frame& f) {
        std::vector<Sleeper> out;
        for (const Sleeper& s : f.sleep)
            if (s.entity != f.step.entity && independent(s.touches, f.step.accesses)) out.push_back(s);
        return out;
    }

    static bool sleeps(const std::vector<Sleeper>& sleep, Entity e) {
        return std::any_of(sleep.begin(), sleep.end(), [&](const Sleeper& s) { return s.entity == e; });
    }

    static std::optional<Entity> choose(const World& world, const std::vector<Sleeper>& sleep) {
        for (auto it = world.ready().rbegin(); it != world.ready().rend(); ++it)
            if (!sleeps(sleep, std::get<1>(*it))) return std::get<1>(*it);
        return std::nullopt;
    }

    // Step `n` was executed: what happens before it, and which earlier steps it races with.
    void enter(std::size_t n, const StepInfo& info, World& world) {
        Frame& f = frames_[n];
        f.step = info;
        f.before = {};
        for (const std::uint32_t i : info.enabled_by) include(f.before, i);
        if (!info.accesses.empty() && info.accesses.front().kind == Access::least_wait) need_signals(n);
        for (std::size_t i = n; i-- > 0;) {
            if (f.before.has(std::uint32_t(i)) || independent(frames_[i].step.accesses, info.accesses)) continue;
            if (reversible(i, n)) reverse(i, n);
            include(f.before, std::uint32_t(i));
        }
        if (info.entity.unit == Entity::thread) watch_sources(f, world);
    }

    // Accesses of memory that only the kernel knows are not announced. If a step changed the source of an operation whose
    // read it does not come after, the two can be swapped.
    static void watch_sources(const Frame& f, World& world) {
        for (const World::PrivateSource& s : world.private_sources(f.step.entity.owner))
            if (!f.before.has(s.read_step) && !world.source_unchanged(s.operation))
                world.report(
                    {Problem::source_changed, world.rank_of(f.step.entity.owner),
                     "the source of " + world.name(s.operation) + " is changed while nothing says that it was read"});
    }

    // A least_wait comes after the signals without which it could not have run, and after no others.
    void need_signals(std::size_t n) {
        const Access& slot = frames_[n].step.accesses.front();
        for (std::size_t i = n; i-- > 0;)
            for (const Access& a : frames_[i].step.accesses)
                if (a.signals() && a.overlaps(slot) && !frames_[n].before.has(std::uint32_t(i)) && !reversible(i, n))
                    include(frames_[n].before, std::uint32_t(i));
    }

    void include(Steps& set, std::uint32_t i) {
        set.add(i);
        set.add(frames_[i].before);
    }

    // Could step n have run without step i and all that follows from i? Only a wait depends on what came before it.
    bool reversible(std::size_t i, std::size_t n) const {
        const StepInfo& wait = frames_[n].step;
        if (wait.what != What::wait) return true;
        const Access& slot = wait.accesses.front();
        std::uint64_t value = 0;
        for (std::size_t k = 0; k < n; ++k) {
            const Frame& f = frames_[k];
            if (k == i || f.before.has(std::uint32_t(i))) continue;
            for (const Access& a : f.step.accesses) {
                if (!a.overlaps(slot) || a.looks()) continue;
                if (!f.step.stores || a.begin != slot.begin) return true;  // its value is not known here, so try
                value = f.step.op == SignalOp::add ? value + f.step.value : f.step.value;
            }
        }
        return value >= wait.value;
    }

    // At the state before step i some first step of "everything independent of i, then n" has to be tried as well.
    void reverse(std::size_t i, std::size_t n) {
        Frame& f = frames_[i];
        std::vector<std::size_t> v;
        for (std::size_t k = i + 1; k < n; ++k)
            if (!frames_[k].before.has(std::uint32_t(i))) v.push_back(k);
        v.push_back(n);
        std::vector<Entity> initials;
        for (std::size_t a = 0; a < v.size(); ++a) {
            const Steps& before = frames_[v[a]].before;
            const bool first = std::none_of(v.begin(), v.begin() + std::ptrdiff_t(a),
                                            [&](std::size_t b) { return before.has(std::uint32_t(b)); });
            if (first) initials.push_back(frames_[v[a]].step.entity);
        }
        for (const Entity e : initials)
            if (std::find(f.backtrack.begin(), f.backtrack.end(), e) != f.backtrack.end() || sleeps(f.sleep, e)) return;
        f.backtrack.push_back(initials.front());
    }

    // The next branch, deepest first; false when there is none.
    bool next() {
        while (!frames_.empty()) {
            Frame& f = frames_.back();
            if (!guessed_) f.sleep.push_back({f.step.entity, f.step.accesses});
            guessed_ = false;
            for (const Entity e : f.backtrack) {
                if (sleeps(f.sleep, e)) continue;
                chosen_ = e;
                return true;
            }
            frames_.pop_back();
        }
        return false;
    }

    Subject& subject_;
    SearchLimits limits_;
    SearchResult result_;
    std::vector<Frame> frames_;
    bool fresh_ = false;    // the last frame's step is still to be executed, as chosen_
    bool guessed_ = false;  // chosen_ could not run there
    bool too_long_ = false;
    Entity chosen_;
};

}  // namespace

SearchResult explore_all(Subject& subject, const SearchLimits& limits) { return Explorer(subject, limits).run(); }

}  // namespace hal::checker
