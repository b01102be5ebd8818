// SPDX-License-Identifier: Apache-2.0
// What goes wrong, and when. Every fault is a function of (seed, source, target, queue, number of the operation), so a
// run is replayed from its seed and its fault text alone. The engine only asks for a Plan; it knows no fault by name.
//
// Text: rules separated by ';'. A rule is `[SRC>DST[/QUEUE]:] fault[=value][, fault…]`; '*' or nothing matches all, and
// a later rule overrides the fields that it sets. Times: 500ns, 20us, 3ms, 1s. Sizes: 64, 4K, 16M, 2G (bytes).
//
//   delay=T          data starts T later                          reorder=T   each piece waits its own 0..T: any order
//   jitter=T         plus 0..T, still in order                    split=N     cut in pieces of at most N bytes, last first
//   publish=T        0..T between the data and its signal         complete=T  0..T between source read and completion
//   source_early     complete when the source is read, deliver later: GIN's flush promises no more than this
//   read=T           with source_early: the source is read 0..T after the operation was posted
//   rate=N           bytes per second                             ops=N       operations per second
//   stall=T[@K]      from operation K on freeze for T, or `forever`; a split put freezes half-way
//   drop=@K          operation K never completes                  error=@K    operation K and later fail, as a broken QP
//   kill=@K          this process dies (SIGKILL) at operation K   credits=N   at most N operations in flight
//   va_unordered     signals on memory registered without strict ordering pass data
//   early_signal     NOT legal: signals before their data; the control that every ordering test must catch
#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "clock.hpp"

namespace hal::swnic {

struct FlowId {
    int src, dst, queue;
};

struct FlowFaults {
    Nanos delay = 0, jitter = 0, reorder = 0, publish = 0, complete = 0, read = 0;
    std::uint64_t split = 0, rate = 0, ops = 0, credits = 0;
    Nanos stall = 0;
    std::uint64_t stall_at = 0;
    std::optional<std::uint64_t> drop_at, error_at, kill_at;
    bool source_early = false, va_unordered = false, early_signal = false;
};

// Throws ConfigError (config.hpp) naming the word that it does not understand.
FlowFaults parse_faults(std::string_view text, FlowId flow);

struct Piece {
    std::size_t offset, bytes;
    Nanos due;
};

enum class Outcome { deliver, drop, error, kill };

struct Plan {
    Outcome outcome = Outcome::deliver;
    std::vector<Piece> pieces;  // covers every byte once
    Nanos publish_hold = 0, complete_hold = 0, read_hold = 0;
    Nanos start = 0;       // the pieces' holds begin here, or when the source was read, if that is later
    Nanos not_before = 0;  // of the operation's signal, whether or not it has data
};

class FaultPolicy {
  public:
    FaultPolicy(FlowFaults faults, std::uint64_t seed, FlowId flow);
    // Once for each operation of the flow, in the order in which they were posted.
    Plan plan(std::uint64_t operation, std::size_t bytes, Nanos now);
    const FlowFaults& faults() const { return faults_; }

  private:
    std::uint64_t draw(std::uint64_t operation, std::uint64_t what) const;
    Nanos draw_time(std::uint64_t operation, std::uint64_t what, Nanos limit) const;
    void cut(std::uint64_t operation, std::size_t bytes, std::vector<Piece>& pieces) const;
    Nanos start(std::uint64_t operation, std::size_t bytes, Nanos now);

    FlowFaults faults_;
    std::uint64_t key_;
    Nanos last_start_ = 0, wire_free_ = 0, stalled_until_ = 0;
};

}  // namespace hal::swnic
