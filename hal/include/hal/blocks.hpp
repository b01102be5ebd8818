// SPDX-License-Identifier: Apache-2.0
// Completion `flag_in_block`: a record is cut into 512-byte blocks of 480 bytes of data and a 32-byte flag, whose first 8
// bytes hold the round's word. The receiver polls the flags and copies the data out.
#pragma once
#include <cstdint>

#include "hal/ordering.hpp"

namespace hal {

HAL_FN constexpr std::int64_t block_bytes() { return 512; }
HAL_FN constexpr std::int64_t block_data() { return 480; }
HAL_FN std::int64_t blocks_of(std::int64_t record_bytes) { return (record_bytes + block_data() - 1) / block_data(); }

}  // namespace hal
