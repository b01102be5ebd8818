// SPDX-License-Identifier: Apache-2.0
// Which queue carries a row. Rows to one peer are split 3:1 over two queues by their place in route order, never by token,
// so that both ends and every run agree.
#pragma once
#include <cstdint>

#include "hal/ordering.hpp"

namespace hal {

HAL_FN constexpr std::int32_t used_queues(std::int32_t queues) { return queues < 2 ? queues : 2; }
HAL_FN std::int32_t queue_of(std::int64_t n, std::int32_t queues) { return queues > 1 && (n & 3) == 3 ? 1 : 0; }

// Index of the last of `total` rows on `queue`, or -1 if the queue stays empty.
HAL_FN std::int64_t last_on_queue(std::int64_t total, std::int32_t queue, std::int32_t queues) {
    for (std::int64_t n = total - 1; n >= 0 && n >= total - 4; --n)
        if (queue_of(n, queues) == queue) return n;
    return -1;
}

}  // namespace hal
