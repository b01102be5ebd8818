// SPDX-License-Identifier: Apache-2.0
// What a run is made of: entities that can be scheduled, what a step touches, and the log that verdicts are read from.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "hal/ordering.hpp"

namespace hal::checker {

// Something that the scheduler can choose: a thread of a rank, or one delivery of an operation. The same in every run,
// since an operation is named by its place in its thread's program order.
struct Entity {
    enum Unit : std::uint8_t { thread = 0, source_read = 1, piece = 2 };  // piece k of the write is 2 + k
    std::uint16_t owner = 0;                                              // thread
    std::uint32_t operation = 0;
    std::uint8_t unit = thread;
    auto operator<=>(const Entity&) const = default;
};

struct Access {
    // add and set are signals. A wait returns the value that it sees; a least_wait the least value of the slot's history
    // that satisfies it, so signals beyond the necessary ones do not matter to it.
    enum Kind : std::uint8_t { read, write, add, set, wait, least_wait } kind;
    int rank;
    std::uint64_t begin, end;
    bool looks() const { return kind == read || kind == wait || kind == least_wait; }
    bool signals() const { return kind == add || kind == set; }
    bool overlaps(const Access& o) const { return rank == o.rank && begin < o.end && o.begin < end; }
    bool conflicts(const Access& o) const {
        if (!overlaps(o) || (looks() && o.looks()) || (kind == add && o.kind == add)) return false;
        return !(kind == least_wait && o.signals()) && !(o.kind == least_wait && signals());
    }
};

enum class What : std::uint8_t { read, write, issue, source_read, deliver, wait, quiet, arrive, pass, end };

// One entry of the log.
struct Event {
    What what;
    std::uint16_t thread;         // that acts, or whose operation is delivered
    std::int32_t rank;            // of the thread
    std::uint32_t operation = 0;  // index in World::operations(): issue, source_read, deliver
    std::uint64_t begin = 0,
                  end = 0;    // bytes touched (read, write, wait, deliver: at the target; source_read: at home)
    std::uint64_t value = 0;  // wait: at_least; pass: barrier number; quiet: 1 = remote
    std::int32_t peer = -1, queue = -1;  // quiet
    const char* stage = nullptr;         // wait
};

// An operation as it was issued, after mutation and after what the profile makes of its order.
struct Operation {
    std::uint16_t thread;
    std::uint32_t number;  // in the thread's program order
    std::int32_t rank, peer, queue;
    bool is_signal;
    Order asked, order;  // by the program; as it acts
    SignalOp op = SignalOp::add;
    std::uint64_t dst, bytes, value = 0;
    std::int64_t src_offset = -1;    // in the own window, if the source lies there
    std::uint32_t sequence = 0;      // in its scope group
    std::int32_t bundled_with = -1;  // a put's own signal: the put
};

}  // namespace hal::checker
