// SPDX-License-Identifier: Apache-2.0
// What the emulated GPU looks like, from HAL_CUDA_EMULATOR_* variables (docs/cuda.md), read once.
#pragma once
#include <cstdint>
#include <string>

namespace hal::cuda::emulation {

struct Options {
    int multiprocessors = 3;       // HAL_CUDA_EMULATOR_BLOCKS: launches have at most so many blocks
    std::uint64_t seed = 1;        // HAL_CUDA_EMULATOR_SEED
    bool adversary = true;         // HAL_CUDA_EMULATOR_ADVERSARY=0: stores are visible at once
    std::string gin = "full";      // HAL_CUDA_EMULATOR_GIN: what the network cards reach, full, rail or none
    double limit_seconds = 300.0;  // HAL_CUDA_EMULATOR_LIMIT: of a block that only looks at memory
};

Options& options();

}  // namespace hal::cuda::emulation
