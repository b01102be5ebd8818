// SPDX-License-Identifier: Apache-2.0
// Where an operating-system thread's `__shared__` variables of all kernels begin and end.
#pragma once
namespace hal::cuda::emulation {
extern thread_local char shared_begin[64], shared_end[64];
}
