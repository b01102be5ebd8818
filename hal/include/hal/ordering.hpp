// SPDX-License-Identifier: Apache-2.0
// The ordering words, shared by every kernel. Their promises are stated in docs/contract.md and hal/ordering.py; the
// numeric values are shared with Python and must not change.
#pragma once
#include <cstdint>

// Functions that CUDA and Ascend C device code may call as well.
#if defined(__CUDACC__)
#define HAL_FN __host__ __device__ inline
#elif defined(__CCE_AICORE__) || defined(__DAV_C310__)
#define HAL_FN __aicore__ inline
#else
#define HAL_FN inline
#endif

namespace hal {

enum class Order : std::uint8_t { none = 0, relaxed = 1, strong = 2 };
enum class SignalOp : std::uint8_t { add = 0, set = 1 };
enum class QuietScope : std::uint8_t { source = 0, remote = 1 };

}  // namespace hal
