// SPDX-License-Identifier: Apache-2.0
// The one place that names the toolchain. The include path decides: with bisheng, kernel_operator.h and shmem.h are the
// SDK's and hal_hooks.h is device/'s; with the host compiler all three are host_shim/'s.
#pragma once
#include "hal/buffer_layout.hpp"
#include "hal/credit.hpp"
#include "hal/epoch.hpp"
#include "hal/placement.hpp"
#include "hal/queues.hpp"
#include "hal_hooks.h"
#include "kernel_operator.h"
#include "shmem.h"

#define HAL_AICORE __aicore__ inline

namespace hal::ascend {

using Gm = __gm__ std::uint8_t*;

inline constexpr std::uint32_t kSlotStride = 512;  // a signal slot never shares a line of the L2 cache
static_assert(kSlotStride == 512 && block_bytes() == 512 && block_data() == 480);

// Order and completion entry of every request, stated: the library's default has no order at all.
inline constexpr aclshmemx_udma_op_config_t kRow{0U, 0U, 0U, ACLSHMEMX_UDMA_ODR_RO};
inline constexpr aclshmemx_udma_op_config_t kRowLastOfBatch{1U, 0U, 0U, ACLSHMEMX_UDMA_ODR_RO};
inline constexpr aclshmemx_udma_op_config_t kStrong{1U, 0U, 0U, ACLSHMEMX_UDMA_ODR_SO};

}  // namespace hal::ascend
