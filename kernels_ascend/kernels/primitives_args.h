// SPDX-License-Identifier: Apache-2.0
// What one launch of the primitives kernel is told.
#pragma once
#include <cstdint>

namespace hal::ascend {

enum class Primitive : std::uint32_t { put, signal_set, signal_add, quiet, wait };

struct PrimitiveArgs {
    Primitive kind;
    std::int32_t peer, queue;
    std::uint32_t order;  // of hal::Order
    std::uint64_t dst, src, bytes;
    std::uint64_t value, at_least, timeout_cycles;  // wait gives what it saw in `value`
    std::int32_t source, queues;
};

}  // namespace hal::ascend
