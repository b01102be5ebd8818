// SPDX-License-Identifier: Apache-2.0
// Messages go through the logger that NCCL hands to init(), so NCCL_DEBUG filters them; without one, to stderr.
#pragma once
#include "nccl_abi.hpp"

namespace hal::swnic {

void set_logger(abi::Logger logger);
[[gnu::format(printf, 1, 2)]] void warn(const char* format, ...);
[[gnu::format(printf, 1, 2)]] void info(const char* format, ...);

}  // namespace hal::swnic
