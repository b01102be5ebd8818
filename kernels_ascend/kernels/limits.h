// SPDX-License-Identifier: Apache-2.0
// What the kernels hold in scratch at most; the host refuses more before it launches.
#pragma once
#include <cstdint>

namespace hal::ascend {

inline constexpr std::int32_t kLargestTopK = 128;
inline constexpr std::int64_t kColumnBytes = 96 * 1024;  // two tables of [ranks][groups] counts
inline constexpr std::int64_t kRingGuard = 10;           // blocks of a send ring that stay spare

}  // namespace hal::ascend
