// SPDX-License-Identifier: Apache-2.0
// Declarations of the kernels, for the launch files.
#pragma once
#include "kernel_operator.h"

extern "C" {
__global__ __aicore__ void hal_dispatch_send(GM_ADDR args);
__global__ __aicore__ void hal_dispatch_recv(GM_ADDR args);
__global__ __aicore__ void hal_combine_send(GM_ADDR args);
__global__ __aicore__ void hal_combine_recv(GM_ADDR args);
__global__ __aicore__ void hal_primitive(GM_ADDR args);
}
