// SPDX-License-Identifier: Apache-2.0
#include "emulation/options.hpp"

#include <cstdlib>

namespace hal::cuda::emulation {
namespace {

const char* given(const char* name) {
    const char* text = std::getenv(name);
    return text != nullptr && *text != '\0' ? text : nullptr;
}

Options read() {
    Options o;
    if (const char* text = given("HAL_CUDA_EMULATOR_BLOCKS")) o.multiprocessors = std::atoi(text);
    if (const char* text = given("HAL_CUDA_EMULATOR_SEED")) o.seed = std::strtoull(text, nullptr, 0);
    if (const char* text = given("HAL_CUDA_EMULATOR_ADVERSARY")) o.adversary = std::atoi(text) != 0;
    if (const char* text = given("HAL_CUDA_EMULATOR_GIN")) o.gin = text;
    if (const char* text = given("HAL_CUDA_EMULATOR_LIMIT")) o.limit_seconds = std::atof(text);
    return o;
}

}  // namespace

Options& options() {
    static Options read_once = read();
    return read_once;
}

}  // namespace hal::cuda::emulation
