// SPDX-License-Identifier: Apache-2.0
// Launches, and errors as words.
#pragma once
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <string>

namespace hal::cuda {

int fail(const std::string& text);
int check(cudaError_t status, const char* what);

constexpr std::size_t kSharedLimit = 227 * 1024;

template <class Kernel, class... Args>
int launch(Kernel kernel, int blocks, int threads, std::size_t shared, std::uint64_t stream, const char* what,
           const Args&... args) {
    if (shared > kSharedLimit)
        return fail(std::string(what) + ": the routing tables need " + std::to_string(shared) + " bytes of shared memory, a block has " +
                    std::to_string(kSharedLimit) + "; lower max_tokens x ranks, or use more blocks");
    if (shared > 48 * 1024) {
        const cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared));
        if (status != cudaSuccess) return check(status, what);
    }
    kernel<<<blocks, threads, shared, reinterpret_cast<cudaStream_t>(stream)>>>(args...);
    return check(cudaGetLastError(), what);
}

}  // namespace hal::cuda
