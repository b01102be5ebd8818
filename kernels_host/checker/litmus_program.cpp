// SPDX-License-Identifier: Apache-2.0
#include "checker/litmus_program.hpp"

#include <bit>
#include <map>
#include <stdexcept>
#include <tuple>

namespace hal::checker {
namespace {

std::uint64_t bit(int i) { return std::uint64_t{1} << i; }

struct Issued {
    int thread, rank, peer, queue;
    Order put_order = Order::relaxed, signal_order = Order::relaxed;
    std::uint64_t write_units = 0, signal_units = 0, read_units = 0;
    std::uint64_t all() const { return write_units | signal_units | read_units; }
};

class Compiler {
  public:
    Compiler(const LitmusSource& source, const Profile& profile) {
        out_.profile = profile;
        out_.source = source;
        out_.threads.resize(source.threads);
    }

    Compiled run() {
        if (out_.source.ranks * out_.source.words > max_words) throw std::invalid_argument("too many words");
        for (std::size_t i = 0; i < out_.source.code.size(); ++i) add(static_cast<int>(i));
        // Which operations a quiet waits for is known only when all are compiled.
        for (auto& thread : out_.threads)
            for (Step& step : thread) block(step);
        submitters();
        overlaps();
        return std::move(out_);
    }

  private:
    const Profile& profile() const { return out_.profile; }

    int unit(Unit u, Touch touch) {
        if (out_.units.size() >= max_units) throw std::invalid_argument("too many deliveries; at most 56");
        out_.units.push_back(u);
        out_.unit_touch.push_back(touch);
        return static_cast<int>(out_.units.size()) - 1;
    }

    void add(int index) {
        const Instruction& in = out_.source.code[index];
        Step step;
        step.in = in;
        const int own = out_.word(in.rank, in.dst);
        switch (in.what) {
            case Do::put:
            case Do::signal:
                issue(index, step);
                break;
            case Do::wait:
            case Do::read:
                step.touch.reads = bit(own);
                break;
            case Do::write:
                step.touch.writes = bit(own);
                break;
            case Do::arrive:
                step.barrier = ++arrivals_[in.thread];
                break;
            case Do::pass:
                step.barrier = arrivals_[in.thread];
                break;
            case Do::quiet:
                break;
        }
        out_.threads[in.thread].push_back(step);
    }

    void issue(int index, Step& step) {
        const Instruction& in = step.in;
        Issued op{in.thread, in.rank, in.peer, in.queue};
        const bool is_put = in.what == Do::put;
        const bool built = is_put
                               ? (in.order == Order::strong && profile().build_strong_put) ||
                                     (in.slot >= 0 && in.signal_order == Order::strong && profile().build_strong_signal)
                               : in.order == Order::strong && profile().build_strong_signal;
        op.put_order = profile().put_order(in.order);
        op.signal_order =
            is_put ? profile().signal_order(in.signal_order, true) : profile().signal_order(in.order, false);
        if (built) {
            built_.push_back({in.thread, static_cast<int>(out_.threads[in.thread].size())});
            // The quiet before it has done what the strong order would do.
            if (op.put_order == Order::strong) op.put_order = Order::relaxed;
            if (op.signal_order == Order::strong) op.signal_order = Order::relaxed;
        }
        if (is_put) payload(index, step, op);
        if (!is_put || in.slot >= 0) raise(index, op, is_put);
        step.units = op.all();
        if (out_.latches > max_latches) throw std::invalid_argument("too many values in flight; at most 31");
        // What takes effect with the call is touched by the call.
        if (profile().at_issue || in.peer == in.rank)
            for (std::uint64_t left = step.units; left; left &= left - 1) {
                const Touch& t = out_.unit_touch[std::countr_zero(left)];
                step.touch.reads |= t.reads;
                step.touch.writes |= t.writes;
                step.touch.adds |= t.adds;
            }
        issued_.push_back(op);
    }

    void payload(int index, Step& step, Issued& op) {
        const Instruction& in = step.in;
        std::uint64_t after = 0;
        if (in.src >= 0) {
            step.latch = out_.latches;
            out_.latches += in.count;
            Touch touch;
            for (int k = 0; k < in.count; ++k) touch.reads |= bit(out_.word(in.rank, in.src + k));
            if (profile().source_read_at_issue || profile().at_issue) {
                step.touch.reads |= touch.reads;
            } else {
                Unit u{UnitKind::source_read, index};
                u.latch = step.latch;
                op.read_units = bit(unit(u, touch));
                after = op.read_units;
            }
        } else if (in.value_register >= 0) {
            step.latch = out_.latches++;
        }
        after |= before(op, Effect::put, op.put_order);
        for (int k = 0; k < in.count; ++k) {
            Unit u{UnitKind::write, index};
            u.word = out_.word(in.peer, in.dst + k);
            u.value = in.value;
            u.latch = step.latch < 0 ? -1 : step.latch + (in.src >= 0 ? k : 0);
            u.after = after;
            op.write_units |= bit(unit(u, Touch{0, bit(u.word), 0}));
        }
    }

    void raise(int index, Issued& op, bool bundled) {
        const Instruction& in = out_.source.code[index];
        Unit u{UnitKind::signal, index};
        u.word = out_.word(in.peer, in.slot);
        u.value = in.signal_value;
        u.op = in.signal_op;
        u.after = before(op, Effect::signal, op.signal_order);
        if (bundled) u.after |= op.write_units;  // a put's own signal always follows its payload
        Touch touch;
        (u.op == SignalOp::add ? touch.adds : touch.writes) = bit(u.word);
        op.signal_units = bit(unit(u, touch));
    }

    std::uint64_t before(const Issued& later, Effect effect, Order order) const {
        std::uint64_t units = 0;
        for (const Issued& e : issued_) {
            if (e.thread != later.thread) continue;  // two threads' posts on a queue are unordered: the weaker model
            if (!profile().origin_scope && (e.peer != later.peer || e.queue != later.queue)) continue;
            if (profile().must_precede(e.put_order, effect, order)) units |= e.write_units;
            if (profile().must_precede(e.signal_order, effect, order)) units |= e.signal_units;
        }
        return units;
    }

    void block(Step& step) {
        const Instruction& in = step.in;
        if (in.what == Do::quiet) {
            const bool remote = in.remote || profile().quiet_source_is_remote;
            for (const Issued& e : issued_) {
                if (e.rank != in.rank || (in.peer >= 0 && e.peer != in.peer)) continue;
                if (in.queue >= 0 && e.queue != in.queue) continue;
                step.blocked_by |= remote ? e.all() : e.read_units;
            }
            return;
        }
        for (auto [thread, position] : built_) {
            if (&out_.threads[thread][position] != &step) continue;
            for (const Issued& e : issued_)
                if (e.rank == in.rank && e.peer == in.peer && e.queue == in.queue) step.blocked_by |= e.all();
            step.blocked_by &= ~step.units;
        }
    }

    void submitters() {
        std::map<std::tuple<int, int, int>, int> owner;
        for (const Issued& e : issued_) {
            auto [it, fresh] = owner.try_emplace({e.rank, e.peer, e.queue}, e.thread);
            if (!fresh && it->second != e.thread && profile().one_submitter)
                out_.contract_error = "two threads of rank " + std::to_string(e.rank) + " post on queue " +
                                      std::to_string(e.queue) + " to rank " + std::to_string(e.peer);
        }
    }

    // Overlapping puts that the contract (not only this profile) leaves unordered have an undefined result.
    void overlaps() {
        const auto& code = out_.source.code;
        for (std::size_t a = 0; a < code.size(); ++a)
            for (std::size_t b = a + 1; b < code.size(); ++b) {
                if (code[a].what != Do::put || code[b].what != Do::put || code[a].thread != code[b].thread) continue;
                if (code[a].peer != code[b].peer || code[b].order == Order::strong) continue;
                if (code[a].dst + code[a].count <= code[b].dst || code[b].dst + code[b].count <= code[a].dst) continue;
                bool separated = false;
                for (std::size_t k = a + 1; k < b; ++k) {
                    const Instruction& in = code[k];
                    separated |= in.thread == code[a].thread &&
                                 (in.what == Do::wait || in.what == Do::pass || (in.what == Do::quiet && in.remote) ||
                                  (in.what == Do::signal && in.order == Order::strong));
                }
                if (!separated) out_.warnings.push_back(code[a].text + " and " + code[b].text + " overlap, unordered");
            }
    }

    Compiled out_;
    std::vector<Issued> issued_;
    std::vector<std::pair<int, int>> built_;
    std::map<int, int> arrivals_;
};

}  // namespace

Compiled compile(const LitmusSource& source, const Profile& profile) { return Compiler(source, profile).run(); }

}  // namespace hal::checker
