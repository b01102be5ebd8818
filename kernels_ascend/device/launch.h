// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <cstdint>

#include "launch/runtime.hpp"

namespace hal::ascend {

void launch_on_device(Kernel kernel, void* stream, std::uint8_t* args, int cores);

}  // namespace hal::ascend
