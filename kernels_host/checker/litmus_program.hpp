// SPDX-License-Identifier: Apache-2.0
// A litmus program compiled for one profile: instructions of each thread, and the deliveries ("units") of each operation
// with the units that must be done before. All sets are 64-bit masks, so a state is a few machine words.
#pragma once
#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "checker/profile.hpp"

namespace hal::checker {

constexpr int max_threads = 8;
constexpr int max_units = 56;  // with the threads they fill a 64-bit set of transitions
constexpr int max_words = 64;
constexpr int max_registers = 24;
constexpr int max_latches = 31;

enum class Do : std::uint8_t { put, signal, wait, quiet, write, read, arrive, pass };

// As the program states it; words are offsets in a rank's memory.
struct Instruction {
    Do what;
    int rank = 0, thread = 0;
    int peer = -1, queue = -1;  // quiet: -1 = all
    Order order = Order::relaxed;
    int dst = 0, count = 1;
    int value = 0, value_register = -1, src = -1;
    int slot = -1, signal_value = 0;
    SignalOp signal_op = SignalOp::add;
    Order signal_order = Order::relaxed;
    bool remote = true;  // quiet
    int at_least = 0, reg = -1;
    std::string text;
};

enum class UnitKind : std::uint8_t { source_read, write, signal };

// One delivery of an operation: its source read, one word of its write, or its signal.
struct Unit {
    UnitKind kind;
    int instruction;  // index in Compiled::code
    int word = 0;     // memory word written or signalled
    int latch = -1;   // where the value comes from; -1 = `value`
    int value = 0;
    SignalOp op = SignalOp::add;
    std::uint64_t after = 0;  // units that must be done before
};

// What a transition touches, for independence: plain reads, plain writes, and additions, which commute.
struct Touch {
    std::uint64_t reads = 0, writes = 0, adds = 0;
    bool independent(const Touch& o) const {
        return !(writes & (o.reads | o.writes | o.adds)) && !(o.writes & (reads | adds)) && !(adds & o.reads) &&
               !(o.adds & reads);
    }
};

// Postfix condition over the final state.
struct ConditionOp {
    enum Kind : std::uint8_t { number, reg, memory, deadlock, eq, ne, lt, le, gt, ge, both, either } kind;
    int value = 0;
};

struct LitmusSource {
    int ranks = 0, words = 0, registers = 0, threads = 0, barrier_threads = 0;
    std::vector<Instruction> code;  // by thread, in program order
    std::vector<ConditionOp> bad;
};

struct Step {
    Instruction in;
    std::uint64_t units = 0;       // issued by it
    std::uint64_t blocked_by = 0;  // quiet, built strong words: of these, the issued ones must be done
    int latch = -1;                // first latch filled when it issues
    int barrier = 0;               // arrive, pass: which barrier, counted from 1
    Touch touch;
};

struct Compiled {
    Profile profile;
    LitmusSource source;
    std::vector<std::vector<Step>> threads;
    std::vector<Unit> units;
    std::vector<Touch> unit_touch;
    int latches = 0;
    std::string contract_error;         // the profile refuses the program (two submitters)
    std::vector<std::string> warnings;  // legal but undefined by the contract (overlapping relaxed puts)
    int word(int rank, int offset) const { return rank * source.words + offset; }
};

// Throws std::invalid_argument for a program beyond the limits above.
Compiled compile(const LitmusSource& source, const Profile& profile);

}  // namespace hal::checker
