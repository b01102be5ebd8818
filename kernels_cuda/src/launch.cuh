// SPDX-License-Identifier: Apache-2.0
// Launches on the right device, and errors as words.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

#include "machine.cuh"

namespace hal::cuda {

int fail(const std::string& text);
int check(cudaError_t status, const char* what);

// Makes `device` current, and the caller's device again afterwards.
class OnDevice {
  public:
    explicit OnDevice(int device) {
        cudaGetDevice(&before_);
        if (before_ != device) cudaSetDevice(device), changed_ = true;
    }
    ~OnDevice() {
        if (changed_) cudaSetDevice(before_);
    }
    OnDevice(const OnDevice&) = delete;
    OnDevice& operator=(const OnDevice&) = delete;

  private:
    int before_ = 0;
    bool changed_ = false;
};

constexpr std::size_t kSharedLimit =
    226 * 1024;  // of the 227 KB that a block can have; the kernels' own variables take some

// Dynamic shared memory for a kernel, on the current device.
template <class Kernel>
int give_shared(Kernel kernel, std::size_t shared, const char* what) {
    if (shared > kSharedLimit)
        return fail(std::string(what) + ": the routing tables need " + std::to_string(shared) +
                    " bytes of shared memory, a block has " + std::to_string(kSharedLimit) +
                    "; lower max_tokens, or give the kernel more blocks");
    if (shared <= 48 * 1024) return 0;
    return check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared)),
                 what);
}

template <class Kernel, class... Args>
int launch(Kernel kernel, int device, int blocks, int threads, std::size_t shared, std::uint64_t stream,
           const char* what, const Args&... args) {
    const OnDevice here(device);
    if (const int failed = give_shared(kernel, shared, what)) return failed;
    return check(start_kernel(kernel, what, blocks, threads, shared, reinterpret_cast<cudaStream_t>(stream), args...),
                 what);
}

// The same for a kernel whose first words are await_earlier_launch(): its blocks may be placed while the kernel before it in
// the stream still runs.
template <class Kernel, class... Args>
int launch_early(Kernel kernel, int device, int blocks, int threads, std::size_t shared, std::uint64_t stream,
                 const char* what, const Args&... args) {
    const OnDevice here(device);
    if (const int failed = give_shared(kernel, shared, what)) return failed;
    return check(start_kernel_early(kernel, device, what, blocks, threads, shared,
                                    reinterpret_cast<cudaStream_t>(stream), args...),
                 what);
}

}  // namespace hal::cuda
