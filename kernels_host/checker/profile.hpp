// SPDX-License-Identifier: Apache-2.0
// An ordering profile (hal/ordering.py) as the checker uses it. Everything that decides which delivery may happen before
// which is here; the machines only ask.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

#include "hal/ordering.hpp"

namespace hal::checker {

enum class Effect : std::uint8_t { put = 0, signal = 1 };

struct Profile {
    std::string name;
    bool precedes[3][2][3] = {};  // [order of the earlier][effect of the later][order of the later]
    bool origin_scope = false;    // precedence holds over all peers and queues of the issuing thread
    bool at_issue = false;        // operations take effect when they are issued
    bool source_read_at_issue = false;
    bool quiet_source_is_remote = false;
    bool none_is_relaxed = false;
    bool weak_is_strong = false;
    bool bundled_is_strong = false;
    bool build_strong_put = false;  // strong words that HAL makes from quiet(remote) and a relaxed one
    bool build_strong_signal = false;
    bool one_submitter = false;
    std::size_t max_put_bytes = 0;  // 0 = no limit

    Order put_order(Order o) const { return o == Order::none && none_is_relaxed ? Order::relaxed : o; }

    Order signal_order(Order o, bool bundled) const {
        if (bundled ? bundled_is_strong : weak_is_strong) return Order::strong;
        return put_order(o);
    }

    // Whether an operation of order `earlier` is complete before a later one has that effect; both of one (peer, queue),
    // or of one thread where the scope is the origin. Orders are those of put_order and signal_order.
    bool must_precede(Order earlier, Effect effect, Order later) const {
        return precedes[static_cast<int>(earlier)][static_cast<int>(effect)][static_cast<int>(later)];
    }
};

}  // namespace hal::checker
