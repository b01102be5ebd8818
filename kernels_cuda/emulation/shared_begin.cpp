// SPDX-License-Identifier: Apache-2.0
// Linked right before the kernels: their `__shared__` variables, thread-local here, lie between this and shared_end.cpp.
#include "emulation/shared.hpp"

namespace hal::cuda::emulation {
alignas(64) thread_local char shared_begin[64];
}
