// SPDX-License-Identifier: Apache-2.0
#include "checker/happens_before.hpp"

#include <algorithm>
#include <chrono>
#include <functional>
#include <map>
#include <set>

#include "checker/clock.hpp"

namespace hal::checker {
namespace {

constexpr std::uint32_t none = 0xffffffff;

// Who accessed bytes: a thread at a time, or an operation (its delivery, or its source read).
struct Actor {
    std::uint32_t operation = none;
    std::uint16_t thread = 0;
    std::uint32_t time = 0;
    bool source = false;
    What what = What::write;
    bool by_operation() const { return operation != none; }
};

struct Segment {
    std::uint64_t end;
    Actor write;
    bool written = false;
    Kept<Actor> reads, adds;
};
using Memory = std::map<std::uint64_t, Segment, std::less<>, Counting<std::pair<const std::uint64_t, Segment>>>;

// A signal that came after a wait which it could have satisfied: what it proves, and the signals that it comes after.
struct LateSignal {
    Clock known;
    std::set<std::uint32_t> after;
};
using Late = std::map<std::uint32_t, std::map<std::uint32_t, LateSignal>>;  // by the wait's place in the log

class Pass {
  public:
    Pass(const World& world, Late& late, const RaceLimits& limits)
        : w_(world), profile_(world.config().profile), ops_(world.operations()), late_(late), limits_(limits),
          threads_(world.config().thread_rank.size()),
          channels_(std::size_t(world.config().ranks * world.config().queues)), clock_(threads_), time_(threads_, 0),
          issued_(threads_, Counts(channels_ * 6)), known_(ops_.size()), memory_(std::size_t(world.config().ranks)),
          slots_(std::size_t(world.config().ranks)) {
        for (auto& c : clock_) c = std::make_shared<Clock>(threads_);
        for (const Event& e : world.log()) {
            if (e.what == What::source_read || e.what == What::deliver) ++known_[e.operation].to_come;
            if (e.what == What::wait) slots_[std::size_t(e.rank)].try_emplace(e.begin);
        }
    }

    // False: a signal was found that could have satisfied an earlier wait; `late` knows it now, and the pass starts over.
    bool run() {
        for (std::uint32_t i = 0; i < w_.log().size(); ++i) {
            if (i % 256 == 0 && kept_bytes > limits_.max_bytes) return true;
            const Event& e = w_.log()[i];
            judged_ = i + 1;
            ++time_[e.thread];
            switch (e.what) {
                case What::read:
                    access(e, local(e), false, false);
                    break;
                case What::write:
                    access(e, local(e), true, false);
                    forget_slots(e);
                    break;
                case What::issue:
                    issue(e);
                    break;
                case What::source_read:
                    source_read(e);
                    break;
                case What::deliver:
                    deliver(e);
                    break;
                case What::wait:
                    wait(i, e);
                    break;
                case What::quiet:
                    quiet(e);
                    break;
                case What::arrive:
                    arrived_.push_back(snapshot(e.thread));
                    break;
                case What::pass:
                    pass(e);
                    break;
                case What::end:
                    break;
            }
        }
        return !again_;
    }

    std::vector<Race> races() && { return std::move(races_); }
    std::uint64_t judged() const { return judged_; }

  private:
    // Knowledge of a thread at one moment: the shared clock, and its own time.
    struct Moment {
        std::shared_ptr<const Clock> clock;
        std::uint16_t thread = 0;
        std::uint32_t time = 0;
    };
    // What observing an operation's effect proves: its issue's knowledge, and the earlier operations it came after.
    struct Known {
        Moment issue;
        std::uint32_t index = 0;       // among the operations of its order on its channel
        std::uint32_t covers[3] = {};  // of its own channel, by order: how many earlier operations it comes after
        Row covers_all;                // of every channel, where the scope is the origin
        bool with_call = false;        // took effect with the call that issued it
        bool issued = false;
        std::uint32_t to_come = 0;  // deliveries and source read; after the last, nothing asks what its issue knew
    };
    // A delivered operation that wrote or added to a slot, and what seeing that proves.
    struct Raised {
        std::uint32_t operation;
        std::uint64_t value;
        std::shared_ptr<const Clock> proves;
    };
    struct OldWait {
        std::uint32_t index;  // in the log
        std::uint16_t thread;
        std::uint32_t time;
        Kept<std::uint32_t> open;  // signals that could have satisfied it
    };
    // A word that some wait looks at.
    struct Slot {
        std::uint64_t base = 0;  // what the signals that were dropped from `raised` made of it
        Kept<Raised> raised;
        Kept<OldWait> waits;
    };
    using Slots = std::map<std::uint64_t, Slot>;

    Moment snapshot(std::uint16_t t) const { return {clock_[t], t, time_[t]}; }
    Clock& own(std::uint16_t t) {
        if (clock_[t].use_count() > 1) clock_[t] = std::make_shared<Clock>(*clock_[t]);
        return *clock_[t];
    }
    std::size_t cell(const Operation& op, bool source) const {
        return (std::size_t(op.peer * w_.config().queues + op.queue)) * 6 + (source ? 3 : 0) + std::size_t(op.order);
    }

    static std::uint64_t raise(std::uint64_t base, bool adds, std::uint64_t value) {
        return adds ? base + value : std::max(base, value);
    }

    bool knows_time(const Moment& m, std::uint16_t thread, std::uint32_t time) const {
        return m.thread == thread ? m.time >= time : m.clock->times[thread] >= time;
    }
    bool counts_it(const Row& row, const Operation& op, std::uint32_t index, bool source) const {
        if (!row) return false;
        return (*row)[cell(op, false)] > index || (source && (*row)[cell(op, true)] > index);
    }
    bool knows_operation(const Moment& m, std::uint32_t id, bool source) const {
        const Operation& op = ops_[id];
        if (known_[id].with_call) return knows_time(m, op.thread, known_[id].issue.time);
        return m.clock->has_single(id) || counts_it(m.clock->rows[op.thread], op, known_[id].index, source);
    }
    // As knows_operation, of what seeing an operation proves.
    bool proves(const Clock& c, std::uint32_t id) const {
        const Operation& op = ops_[id];
        if (known_[id].with_call) return c.times[op.thread] >= known_[id].issue.time;
        return c.has_single(id) || counts_it(c.rows[op.thread], op, known_[id].index, false);
    }
    // Does the operation `later`, which has not taken effect yet, take effect only after `id`?
    bool after_operation(std::uint32_t later, std::uint32_t id, bool source) const {
        const Known& k = known_[later];
        if (ops_[later].bundled_with == std::int32_t(id)) return true;
        const Operation &a = ops_[id], &b = ops_[later];
        if (a.thread == b.thread && !known_[id].with_call) {
            if (a.peer == b.peer && a.queue == b.queue && k.covers[int(a.order)] > known_[id].index) return true;
            if (counts_it(k.covers_all, a, known_[id].index, source)) return true;
        }
        return knows_operation(k.issue, id, source);
    }
    bool ordered(const Actor& first, const Actor& second, const Moment& now) const {
        if (second.by_operation()) {
            if (!first.by_operation()) return knows_time(known_[second.operation].issue, first.thread, first.time);
            if (first.operation == second.operation) return true;
            return after_operation(second.operation, first.operation, first.source);
        }
        if (!first.by_operation()) return knows_time(now, first.thread, first.time);
        return knows_operation(now, first.operation, first.source);
    }

    Actor local(const Event& e) const { return {none, e.thread, time_[e.thread], false, e.what}; }

    void issue(const Event& e) {
        const Operation& op = ops_[e.operation];
        Known& k = known_[e.operation];
        k.issue = snapshot(e.thread);
        k.issued = true;
        k.with_call = profile_.at_issue || op.peer == op.rank;
        Counts& counts = issued_[e.thread];
        k.index = counts[cell(op, false)];
        const Effect effect = op.is_signal ? Effect::signal : Effect::put;
        const std::size_t here = std::size_t(op.peer * w_.config().queues + op.queue) * 6;
        for (int c = 0; c < 3; ++c)
            if (profile_.must_precede(Order(c), effect, op.order)) k.covers[c] = counts[here + std::size_t(c)];
        if (profile_.origin_scope && op.order == Order::strong) {
            auto all = std::make_shared<Counts>(counts.size());
            for (std::size_t at = 0; at < counts.size(); at += 6)
                for (int c = 0; c < 3; ++c)
                    if (profile_.must_precede(Order(c), effect, op.order))
                        (*all)[at + std::size_t(c)] = counts[at + std::size_t(c)];
            k.covers_all = std::move(all);
        }
        ++counts[cell(op, false)];
        ++counts[cell(op, true)];
    }

    void source_read(const Event& e) {
        Actor a{e.operation, e.thread, 0, true, What::source_read};
        touch(e.rank, e.begin, e.end, a, false, false, snapshot(e.thread));
        came(e.operation);
    }

    void came(std::uint32_t id) {
        Known& k = known_[id];
        if (--k.to_come > 0) return;
        k.issue.clock.reset();
        k.covers_all.reset();
    }

    void deliver(const Event& e) {
        const Operation& op = ops_[e.operation];
        const bool adds = op.is_signal && op.op == SignalOp::add;
        // What takes effect with the call is the thread's own access.
        Actor a{known_[e.operation].with_call ? none : e.operation, e.thread, time_[e.thread], false, What::deliver};
        touch(op.peer, e.begin, e.end, a, true, adds, snapshot(e.thread));
        if (e.end - e.begin >= 8) raise_slot(e, op);
        came(e.operation);
    }

    void raise_slot(const Event& e, const Operation& op) {
        auto& slots = slots_[std::size_t(op.peer)];
        const auto it = slots.find(e.begin);
        if (it == slots.end()) return;
        Slot& slot = it->second;
        auto seen = std::make_shared<Clock>(threads_);
        observe(*seen, e.operation);
        slot.raised.push_back({e.operation, op.is_signal ? op.value : e.value, seen});
        // Could it have satisfied a wait that is over? Later waits of a thread know all that earlier ones knew.
        for (std::size_t i = slot.waits.size(); i-- > 0;) {
            const OldWait& old = slot.waits[i];
            if (knows_time(known_[e.operation].issue, old.thread, old.time)) break;
            come_late(old.index, old.open, e.operation, *seen);
        }
    }

    // A signal that comes after all those that the wait had to choose from brings nothing new; any other does, and the
    // pass starts over with it.
    void come_late(std::uint32_t index, const Kept<std::uint32_t>& open, std::uint32_t id, const Clock& seen) {
        LateSignal found{seen, {}};
        for (const std::uint32_t s : open)
            if (s == id || proves(seen, s)) found.after.insert(s);
        if (found.after.size() == open.size()) return;
        for (const auto& [other, signal] : late_[index])
            if (other != id && known_[other].issued && proves(seen, other)) found.after.insert(other);
        LateSignal& known = late_[index].try_emplace(id, LateSignal{Clock(threads_), {}}).first->second;
        if (known.after == found.after && known.known.same(found.known)) return;
        known = std::move(found);
        again_ = true;
    }

    bool adds(std::uint32_t id) const { return ops_[id].is_signal && ops_[id].op == SignalOp::add; }

    // One of the signals from which a wait's value can be made up.
    struct Choice {
        std::uint32_t id;
        std::uint64_t value;
        Clock known;
        std::set<std::uint32_t> after;
    };

    // Can the value be reached by those choices alone that say less than `x` (and by what they come after)?
    template <class Says>
    bool reached_without(const std::vector<Choice>& choices, std::uint64_t base, std::uint64_t wanted, const Says& says,
                         std::uint32_t x) const {
        std::set<std::uint32_t> in;
        for (const Choice& c : choices)
            if (says(c) < x) in.insert(c.id);
        for (bool again = true; again;) {
            again = false;
            for (const Choice& c : choices)
                if (in.contains(c.id) && !std::includes(in.begin(), in.end(), c.after.begin(), c.after.end()))
                    again = in.erase(c.id) > 0;
        }
        for (const Choice& c : choices)
            if (in.contains(c.id)) base = adds(c.id) ? base + c.value : std::max(base, c.value);
        return base >= wanted;
    }

    // What every way of reaching the value says: the largest x without which it cannot be reached.
    template <class Says>
    std::uint32_t learned(const std::vector<Choice>& choices, std::uint64_t base, std::uint64_t wanted,
                          const Says& says) const {
        // Some choice is needed; if all say the same, that is known.
        const std::uint32_t one = says(choices.front());
        if (std::all_of(choices.begin(), choices.end(), [&](const Choice& c) { return says(c) == one; })) return one;
        std::set<std::uint32_t, std::greater<>> levels;
        for (const Choice& c : choices) levels.insert(says(c));
        for (const std::uint32_t x : levels)
            if (x > 0 && !reached_without(choices, base, wanted, says, x)) return x;
        return 0;
    }

    void wait(std::uint32_t index, const Event& e) {
        Slot& slot = slots_[std::size_t(e.rank)].at(e.begin);
        std::uint64_t base = slot.base;
        std::vector<Choice> choices;
        Kept<std::uint32_t> open;
        const Moment now = snapshot(e.thread);
        for (const Raised& r : slot.raised) {
            const std::uint32_t id = r.operation;
            if (knows_operation(now, id, false)) {
                base = raise(base, adds(id), r.value);
            } else if (adds(id) || r.value >= e.value) {
                choices.push_back({id, r.value, *r.proves, {}});
                open.push_back(id);
            }
        }
        if (base >= e.value) {
            open.clear();
        } else {
            complete_choices(index, e, choices);
            learn(own(e.thread), choices, base, e.value);
            reduce(own(e.thread));
        }
        prune(slot, e.thread);
        slot.waits.push_back({index, e.thread, time_[e.thread], std::move(open)});
    }

    void complete_choices(std::uint32_t index, const Event& e, std::vector<Choice>& choices) {
        for (Choice& c : choices) {
            for (const Choice& other : choices)
                if (other.id != c.id && proves(c.known, other.id)) c.after.insert(other.id);
        }
        const auto it = late_.find(index);
        if (it == late_.end()) return;
        for (const auto& [id, signal] : it->second)
            choices.push_back({id, ops_[id].is_signal ? ops_[id].value : e.value, signal.known, signal.after});
    }

    void learn(Clock& clock, const std::vector<Choice>& choices, std::uint64_t base, std::uint64_t wanted) const {
        if (choices.empty()) return;  // the thread's own write satisfied it
        if (choices.size() == 1) {
            clock.join(choices.front().known);
            return;
        }
        Clock common(threads_);
        for (std::size_t t = 0; t < threads_; ++t) {
            common.times[t] = learned(choices, base, wanted, [t](const Choice& c) { return c.known.times[t]; });
            const Row& first = choices.front().known.rows[t];
            if (std::all_of(choices.begin(), choices.end(),
                            [&](const Choice& c) { return c.known.rows[t] == first; })) {
                common.rows[t] = first;
                continue;
            }
            auto row = std::make_shared<Counts>(channels_ * 6);
            for (std::size_t i = 0; i < row->size(); ++i)
                (*row)[i] = learned(choices, base, wanted,
                                    [t, i](const Choice& c) { return c.known.rows[t] ? (*c.known.rows[t])[i] : 0; });
            common.rows[t] = std::move(row);
        }
        std::set<std::uint32_t> single;
        for (const Choice& c : choices) single.insert(c.known.single.begin(), c.known.single.end());
        for (const std::uint32_t id : single) {
            const auto says = [&](const Choice& c) -> std::uint32_t {
                return c.known.has_single(id) ||
                       counts_it(c.known.rows[ops_[id].thread], ops_[id], known_[id].index, false);
            };
            if (learned(choices, base, wanted, says)) common.add_single(id);
        }
        clock.join(common);
    }

    // The first signals of a slot, once known to the only thread that waits there, matter only by the value that they made.
    void prune(Slot& slot, std::uint16_t t) {
        if (threads_ != std::size_t(w_.config().ranks)) return;
        const Moment now = snapshot(t);
        auto it = slot.raised.begin();
        for (; it != slot.raised.end() && knows_operation(now, it->operation, false); ++it)
            slot.base = raise(slot.base, adds(it->operation), it->value);
        slot.raised.erase(slot.raised.begin(), it);
    }

    void observe(Clock& clock, std::uint32_t id) const {
        const Operation& op = ops_[id];
        const Known& k = known_[id];
        clock.join(*k.issue.clock);
        clock.times[op.thread] = std::max(clock.times[op.thread], k.issue.time);
        if (k.covers_all) clock.join_row(op.thread, k.covers_all);
        if (k.with_call) return;
        raise_row(clock, op, k);
        if (op.bundled_with >= 0) clock.add_single(std::uint32_t(op.bundled_with));
        if (!counts_it(clock.rows[op.thread], op, k.index, false)) clock.add_single(id);
        reduce(clock);
    }

    // Single operations that follow on the counted ones of their channel and order are counted. Their places there ascend
    // with their numbers, so one walk finds them all.
    void reduce(Clock& clock) const {
        std::shared_ptr<Counts> open;  // the row being raised
        std::size_t of = threads_;
        const auto counted = [&](std::uint32_t id) {
            const Operation& op = ops_[id];
            Row& row = clock.rows[op.thread];
            const std::uint32_t count = row ? (*row)[cell(op, false)] : 0;
            if (count != known_[id].index) return count > known_[id].index;
            if (of != op.thread || row != open) {
                open = row ? std::make_shared<Counts>(*row) : std::make_shared<Counts>(channels_ * 6);
                of = op.thread;
                row = open;
            }
            ++(*open)[cell(op, false)];
            return true;
        };
        clock.single.erase(std::remove_if(clock.single.begin(), clock.single.end(), counted), clock.single.end());
    }

    // What a (peer, queue)'s operation proves of the earlier ones there.
    void raise_row(Clock& clock, const Operation& op, const Known& k) const {
        const std::size_t here = std::size_t(op.peer * w_.config().queues + op.queue) * 6;
        Row& row = clock.rows[op.thread];
        bool more = false;
        for (int c = 0; c < 3; ++c) more |= k.covers[c] > (row ? (*row)[here + std::size_t(c)] : 0);
        // A strong operation's own completion is the next count of its order.
        const bool whole = k.covers[int(op.order)] == k.index;
        if (!more && !whole) return;
        auto copy = row ? std::make_shared<Counts>(*row) : std::make_shared<Counts>(channels_ * 6);
        for (int c = 0; c < 3; ++c) {
            auto& cell = (*copy)[here + std::size_t(c)];
            cell = std::max(cell, k.covers[c] + (whole && c == int(op.order) ? 1 : 0));
        }
        row = std::move(copy);
    }

    void quiet(const Event& e) {
        const Counts& counts = issued_[e.thread];
        auto row = std::make_shared<Counts>(counts.size());
        for (int p = 0; p < w_.config().ranks; ++p)
            for (int q = 0; q < w_.config().queues; ++q) {
                if ((e.peer >= 0 && e.peer != p) || (e.queue >= 0 && e.queue != q)) continue;
                const std::size_t at = std::size_t(p * w_.config().queues + q) * 6;
                for (std::size_t i = e.value ? 0 : 3; i < 6; ++i) (*row)[at + i] = counts[at + i];
            }
        own(e.thread).join_row(e.thread, row);
    }

    void pass(const Event& e) {
        Clock& clock = own(e.thread);
        for (std::size_t i = 0; i < std::size_t(e.value) && i < arrived_.size(); ++i) {
            clock.join(*arrived_[i].clock);
            clock.times[arrived_[i].thread] = std::max(clock.times[arrived_[i].thread], arrived_[i].time);
        }
    }

    // A local write starts a slot's history anew.
    void forget_slots(const Event& e) {
        auto& slots = slots_[std::size_t(e.rank)];
        for (auto it = slots.lower_bound(e.begin >= 7 ? e.begin - 7 : 0); it != slots.end() && it->first < e.end; ++it)
            it->second = {};
    }

    // --- bytes

    void access(const Event& e, const Actor& a, bool writes, bool adds) {
        touch(e.rank, e.begin, e.end, a, writes, adds, snapshot(e.thread));
    }

    void split(Memory& m, std::uint64_t at) {
        auto it = m.upper_bound(at);
        if (it == m.begin()) return;
        --it;
        if (it->first == at || it->second.end <= at) return;
        Segment right = it->second;
        it->second.end = at;
        m.emplace_hint(std::next(it), at, std::move(right));
    }

    void touch(int rank, std::uint64_t begin, std::uint64_t end, const Actor& a, bool writes, bool adds,
               const Moment& now) {
        auto& m = memory_[std::size_t(rank)];
        split(m, begin);
        split(m, end);
        std::uint64_t at = begin;
        auto it = m.lower_bound(begin);
        while (at < end) {
            if (it == m.end() || it->first > at) {
                const std::uint64_t until = it == m.end() ? end : std::min(end, it->first);
                it = m.emplace_hint(it, at, Segment{until, {}, false, {}, {}});
            }
            check(rank, it->first, it->second, a, writes, adds, now);
            at = it->second.end;
            ++it;
        }
    }

    void check(int rank, std::uint64_t begin, Segment& s, const Actor& a, bool writes, bool adds, const Moment& now) {
        const auto against = [&](const Actor& first) {
            if (!ordered(first, a, now)) race(rank, begin, s.end, first, a);
        };
        if (s.written) against(s.write);
        if (!adds)
            for (const Actor& x : s.adds) against(x);
        if (!writes) {
            remember(s.reads, a);
            return;
        }
        for (const Actor& r : s.reads) against(r);
        if (adds) {
            s.adds.push_back(a);
            return;
        }
        s.reads.clear();
        s.adds.clear();
        s.write = a;
        s.written = true;
    }

    static void remember(Kept<Actor>& reads, const Actor& a) {
        for (Actor& r : reads)
            if (!a.by_operation() && !r.by_operation() && r.thread == a.thread) {
                r.time = a.time;
                return;
            }
        reads.push_back(a);
    }

    std::string describe(const Actor& a, int rank) const {
        if (a.by_operation()) return (a.source ? "the source read of " : "") + w_.name(a.operation);
        return std::string(a.what == What::read    ? "a read"
                           : a.what == What::write ? "a write"
                                                   : "a delivery with the call") +
               " by rank " + std::to_string(w_.rank_of(a.thread)) +
               (w_.rank_of(a.thread) == rank ? " of its own window" : "");
    }

    void race(int rank, std::uint64_t begin, std::uint64_t end, const Actor& first, const Actor& second) {
        if (races_.size() >= limits_.max_races) return;
        Race r{rank, begin, end, describe(first, rank), describe(second, rank)};
        for (Race& known : races_)
            if (known.rank == rank && known.first == r.first && known.second == r.second) {
                known.begin = std::min(known.begin, begin);
                known.end = std::max(known.end, end);
                return;
            }
        races_.push_back(std::move(r));
    }

    const World& w_;
    const Profile& profile_;
    const std::deque<Operation>& ops_;
    Late& late_;
    const RaceLimits limits_;
    const std::size_t threads_, channels_;
    std::vector<std::shared_ptr<Clock>> clock_;
    std::vector<std::uint32_t> time_;
    std::vector<Counts> issued_;
    Kept<Known> known_;
    std::vector<Memory> memory_;
    std::vector<Slots> slots_;
    std::vector<Moment> arrived_;
    std::vector<Race> races_;
    bool again_ = false;
    std::uint64_t judged_ = 0;
};

}  // namespace

std::string Race::text() const {
    return "race on bytes " + std::to_string(begin) + " ... " + std::to_string(end) + " of rank " +
           std::to_string(rank) + "'s window: " + first + " and " + second + " are not ordered";
}

RaceVerdict find_races(const World& world, const RaceLimits& limits) {
    const auto start = std::chrono::steady_clock::now();
    RaceVerdict v;
    v.events = world.log().size();
    Late late;
    for (v.passes = 1;; ++v.passes) {
        Pass pass(world, late, limits);
        v.settled = pass.run();
        if (!v.settled && v.passes < limits.max_passes) continue;
        v.judged = pass.judged();
        v.races = std::move(pass).races();
        break;
    }
    v.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    return v;
}

}  // namespace hal::checker
