// SPDX-License-Identifier: Apache-2.0
// The part of CUDA's language and runtime that HAL's kernels use, for g++: kernels run on the emulated GPU of
// kernels_cuda/emulation. Written from the public documentation; none of it is NVIDIA's text.
#pragma once
#include "emulation/device.hpp"
#include "emulation/language.hpp"
#include "emulation/runtime_api.hpp"
