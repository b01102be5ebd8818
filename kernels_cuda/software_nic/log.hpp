// SPDX-License-Identifier: Apache-2.0
// Messages go to the logger that NCCL hands to init(). NCCL prints nothing unless NCCL_DEBUG is set, so warnings (a dead
// peer, a refused setting, the watchdog) then go to stderr too: a person must see them.
#pragma once
#include "nccl_abi.hpp"

namespace hal::swnic {

void set_logger(abi::Logger logger);
[[gnu::format(printf, 1, 2)]] void warn(const char* format, ...);
[[gnu::format(printf, 1, 2)]] void info(const char* format, ...);

}  // namespace hal::swnic
