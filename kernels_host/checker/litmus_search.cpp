// SPDX-License-Identifier: Apache-2.0
#include "checker/litmus_search.hpp"

#include <chrono>
#include <ctime>
#include <set>

namespace hal::checker {

bool LitmusMachine::bad(const LitmusState& s, bool deadlock) const {
    int stack[64];
    int top = 0;
    for (const ConditionOp& op : p_.source.bad) {
        switch (op.kind) {
            case ConditionOp::number:
                stack[top++] = op.value;
                continue;
            case ConditionOp::reg:
                stack[top++] = s.registers[op.value];
                continue;
            case ConditionOp::memory:
                stack[top++] = s.memory[op.value];
                continue;
            case ConditionOp::deadlock:
                stack[top++] = deadlock;
                continue;
            default:
                break;
        }
        const int right = stack[--top], left = stack[--top];
        bool value = false;
        switch (op.kind) {
            case ConditionOp::eq:
                value = left == right;
                break;
            case ConditionOp::ne:
                value = left != right;
                break;
            case ConditionOp::lt:
                value = left < right;
                break;
            case ConditionOp::le:
                value = left <= right;
                break;
            case ConditionOp::gt:
                value = left > right;
                break;
            case ConditionOp::ge:
                value = left >= right;
                break;
            case ConditionOp::both:
                value = left && right;
                break;
            default:
                value = left || right;
                break;
        }
        stack[top++] = value;
    }
    return top > 0 && stack[0];
}

namespace {

// Fingerprint -> the transitions that were asleep when the state was last expanded.
class Visited {
  public:
    Visited() : cells_(1 << 12) {}

    std::uint64_t* find(Fingerprint f) {
        if (size_ * 2 >= cells_.size()) grow();
        Cell* cell = probe(f);
        return cell->key.b ? &cell->sleep : nullptr;
    }

    void insert(Fingerprint f, std::uint64_t sleep) {
        *probe(f) = {f, sleep};
        ++size_;
    }

  private:
    struct Cell {
        Fingerprint key;
        std::uint64_t sleep = 0;
    };

    Cell* probe(Fingerprint f) {
        const std::size_t mask = cells_.size() - 1;
        std::size_t at = f.a & mask;
        while (cells_[at].key.b && !(cells_[at].key == f)) at = (at + 1) & mask;
        return &cells_[at];
    }

    void grow() {
        std::vector<Cell> old(cells_.size() * 2);
        old.swap(cells_);
        for (const Cell& c : old)
            if (c.key.b) *probe(c.key) = c;
    }

    std::vector<Cell> cells_;
    std::size_t size_ = 0;
};

class Search {
  public:
    Search(const Compiled& program, const LitmusLimits& limits) : machine_(program), limits_(limits) {}

    LitmusVerdict run() {
        const auto start = std::chrono::steady_clock::now();
        const auto elapsed = [&] {
            return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
        };
        const double cpu = cpu_now();
        enter(LitmusState{}, 0, -1);
        while (!stack_.empty()) {
            Frame& top = stack_.back();
            if (!top.todo) {
                stack_.pop_back();
                continue;
            }
            if ((++verdict_.transitions & 0xffff) == 0 && elapsed() > limits_.max_seconds) verdict_.exhaustive = false;
            if (!verdict_.exhaustive) break;
            const int t = std::countr_zero(top.todo);
            top.todo &= top.todo - 1;
            LitmusState next = top.state;
            machine_.execute(next, t);
            const std::uint64_t asleep = limits_.sleep_sets ? still_asleep(top, t) : 0;
            top.sleep |= std::uint64_t{1} << t;
            enter(next, asleep, t);
        }
        verdict_.seconds = elapsed();
        verdict_.cpu_seconds = cpu_now() - cpu;
        verdict_.outcomes.assign(outcomes_.begin(), outcomes_.end());
        return std::move(verdict_);
    }

  private:
    struct Frame {
        LitmusState state;
        std::uint64_t todo, sleep;
        int by;
    };

    static double cpu_now() {
        timespec t{};
        clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
        return double(t.tv_sec) + 1e-9 * double(t.tv_nsec);
    }

    // Transitions that need not be tried after t, because another order of the same independent steps was tried.
    std::uint64_t still_asleep(const Frame& f, int t) const {
        std::uint64_t out = 0;
        const Touch touch = machine_.touch(f.state, t);
        for (std::uint64_t left = f.sleep; left; left &= left - 1) {
            const int other = std::countr_zero(left);
            if (machine_.touch(f.state, other).independent(touch)) out |= std::uint64_t{1} << other;
        }
        return out;
    }

    void enter(const LitmusState& s, std::uint64_t sleep, int by) {
        const std::uint64_t enabled = machine_.enabled(s);
        if (!enabled) {
            finish(s, by);
            return;
        }
        const Fingerprint f = machine_.fingerprint(s);
        std::uint64_t todo = enabled & ~sleep;
        if (std::uint64_t* before = visited_.find(f)) {
            // Only what was asleep at every earlier visit is still open (Godefroid, state matching with sleep sets).
            todo = *before & ~sleep & enabled;
            sleep |= enabled & ~*before;
            *before &= sleep;
        } else {
            if (++verdict_.states > limits_.max_states) {
                verdict_.exhaustive = false;
                return;
            }
            visited_.insert(f, sleep);
        }
        if (todo) stack_.push_back({s, todo, sleep, by});
    }

    void finish(const LitmusState& s, int by) {
        const bool deadlock = !machine_.finished(s);
        verdict_.deadlock |= deadlock;
        const auto& source = machine_.program().source;
        Outcome o(s.registers, s.registers + source.registers);
        o.insert(o.end(), s.memory, s.memory + source.ranks * source.words);
        o.push_back(deadlock);
        outcomes_.insert(std::move(o));
        if (verdict_.bad || !machine_.bad(s, deadlock)) return;
        verdict_.bad = true;
        for (const Frame& f : stack_)
            if (f.by >= 0) verdict_.schedule.push_back(f.by);
        verdict_.schedule.push_back(by);
    }

    LitmusMachine machine_;
    LitmusLimits limits_;
    LitmusVerdict verdict_;
    Visited visited_;
    std::vector<Frame> stack_;
    std::set<Outcome> outcomes_;
};

}  // namespace

LitmusVerdict search(const Compiled& program, const LitmusLimits& limits) { return Search(program, limits).run(); }

}  // namespace hal::checker
