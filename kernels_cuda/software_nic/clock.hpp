// SPDX-License-Identifier: Apache-2.0
// CLOCK_MONOTONIC in nanoseconds: one clock for all processes of the machine, so heartbeats can be compared.
#pragma once
#include <cstdint>
#include <ctime>
#include <limits>

namespace hal::swnic {

using Nanos = std::int64_t;
inline constexpr Nanos never = std::numeric_limits<Nanos>::max();

inline Nanos now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return Nanos{t.tv_sec} * 1'000'000'000 + t.tv_nsec;
}

}  // namespace hal::swnic
