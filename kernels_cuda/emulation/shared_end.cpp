// SPDX-License-Identifier: Apache-2.0
// Linked right after the kernels; see shared_begin.cpp.
#include "emulation/shared.hpp"

namespace hal::cuda::emulation {
alignas(64) thread_local char shared_end[64];
}
