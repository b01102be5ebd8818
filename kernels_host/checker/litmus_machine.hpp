// SPDX-License-Identifier: Apache-2.0
// The states of a litmus program and their transitions. A transition is a number: thread t is t, unit u is 8 + u; sets of
// transitions are 64-bit masks.
#pragma once
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "checker/litmus_program.hpp"

namespace hal::checker {

struct LitmusState {
    std::uint64_t issued = 0, done = 0;  // units
    std::uint8_t pc[max_threads] = {};
    std::uint8_t registers[max_registers] = {};
    std::uint8_t barriers = 0;
    std::uint8_t latches[max_latches] = {};
    std::uint8_t memory[max_words] = {};
};
static_assert(sizeof(LitmusState) == 144 && std::has_unique_object_representations_v<LitmusState>);

struct Fingerprint {
    std::uint64_t a = 0, b = 0;
    bool operator==(const Fingerprint&) const = default;
};

class LitmusMachine {
  public:
    explicit LitmusMachine(const Compiled& program) : p_(program) {
        // Memory is last, so short programs hash only what they use.
        const std::size_t used =
            offsetof(LitmusState, memory) + static_cast<std::size_t>(p_.source.ranks * p_.source.words);
        hashed_words_ = (used + 7) / 8;
    }

    const Compiled& program() const { return p_; }

    std::uint64_t enabled(const LitmusState& s) const {
        std::uint64_t out = 0;
        for (std::size_t t = 0; t < p_.threads.size(); ++t)
            if (thread_enabled(s, static_cast<int>(t))) out |= std::uint64_t{1} << t;
        for (std::uint64_t left = s.issued & ~s.done; left; left &= left - 1) {
            const int u = std::countr_zero(left);
            if (!(p_.units[u].after & ~s.done)) out |= std::uint64_t{1} << (max_threads + u);
        }
        return out;
    }

    void execute(LitmusState& s, int transition) const {
        if (transition < max_threads) {
            step(s, p_.threads[transition][s.pc[transition]++]);
        } else {
            deliver(s, transition - max_threads);
        }
    }

    Touch touch(const LitmusState& s, int transition) const {
        if (transition >= max_threads) return p_.unit_touch[transition - max_threads];
        return p_.threads[transition][s.pc[transition]].touch;
    }

    bool finished(const LitmusState& s) const {
        for (std::size_t t = 0; t < p_.threads.size(); ++t)
            if (s.pc[t] < p_.threads[t].size()) return false;
        return s.issued == s.done;
    }

    Fingerprint fingerprint(const LitmusState& s) const {
        std::uint64_t w[sizeof(LitmusState) / 8];
        std::memcpy(w, &s, sizeof(s));
        std::uint64_t a = 0x9e3779b97f4a7c15u, b = 0xd1b54a32d192ed03u;
        for (std::size_t i = 0; i < hashed_words_; ++i) {
            a = std::rotl(a ^ w[i], 29) * 0xff51afd7ed558ccdu;
            b = std::rotl(b + w[i], 31) * 0xc4ceb9fe1a85ec53u;
        }
        a ^= a >> 32;
        b ^= b >> 29;
        return {a * 0x9fb21c651e98df25u, (b * 0x9fb21c651e98df25u) | 1};  // b == 0 marks an empty cell
    }

    bool bad(const LitmusState& s, bool deadlock) const;

  private:
    bool thread_enabled(const LitmusState& s, int t) const {
        if (s.pc[t] >= p_.threads[t].size()) return false;
        const Step& step = p_.threads[t][s.pc[t]];
        if (step.blocked_by & s.issued & ~s.done) return false;
        if (step.in.what == Do::wait) return s.memory[p_.word(step.in.rank, step.in.dst)] >= step.in.at_least;
        if (step.in.what == Do::pass) return s.barriers >= step.barrier * p_.source.barrier_threads;
        return true;
    }

    void step(LitmusState& s, const Step& step) const {
        const Instruction& in = step.in;
        const int own = p_.word(in.rank, in.dst);
        switch (in.what) {
            case Do::put:
            case Do::signal:
                issue(s, step);
                break;
            case Do::write:
                s.memory[own] =
                    in.value_register >= 0 ? s.registers[in.value_register] : static_cast<std::uint8_t>(in.value);
                break;
            case Do::read:
                s.registers[in.reg] = s.memory[own];
                break;
            case Do::arrive:
                ++s.barriers;
                break;
            case Do::wait:
            case Do::quiet:
            case Do::pass:
                break;
        }
    }

    void issue(LitmusState& s, const Step& step) const {
        const Instruction& in = step.in;
        if (step.latch >= 0 && in.src >= 0) {
            for (int k = 0; k < in.count; ++k) s.latches[step.latch + k] = s.memory[p_.word(in.rank, in.src + k)];
        } else if (step.latch >= 0) {
            s.latches[step.latch] = s.registers[in.value_register];
        }
        s.issued |= step.units;
        // A put to oneself is complete on return; so is everything where operations take effect at issue.
        if (p_.profile.at_issue || in.peer == in.rank)
            for (std::uint64_t left = step.units; left; left &= left - 1) deliver(s, std::countr_zero(left));
    }

    void deliver(LitmusState& s, int u) const {
        const Unit& unit = p_.units[u];
        s.done |= std::uint64_t{1} << u;
        if (unit.kind == UnitKind::source_read) {
            const Instruction& in = p_.source.code[unit.instruction];
            for (int k = 0; k < in.count; ++k) s.latches[unit.latch + k] = s.memory[p_.word(in.rank, in.src + k)];
            return;
        }
        const auto value = unit.latch >= 0 ? s.latches[unit.latch] : static_cast<std::uint8_t>(unit.value);
        if (unit.kind == UnitKind::signal && unit.op == SignalOp::add) {
            s.memory[unit.word] = static_cast<std::uint8_t>(s.memory[unit.word] + value);
        } else {
            s.memory[unit.word] = value;
        }
    }

    const Compiled& p_;
    std::size_t hashed_words_;
};

}  // namespace hal::checker
