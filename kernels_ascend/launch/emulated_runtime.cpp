// SPDX-License-Identifier: Apache-2.0
#include "launch/emulated_runtime.hpp"

#include <cstdlib>
#include <cstring>
#include <new>

#include "kernels/entry.h"

namespace hal::ascend {

void WorldClock::synchronize(int) {
    std::unique_lock lock(mutex_);
    const std::uint64_t turn = turn_;
    if (++waiting_ == world_.size()) {
        error_ = nullptr;
        try {
            world_.run();
        } catch (...) {
            error_ = std::current_exception();
        }
        waiting_ = 0;
        ++turn_;
        changed_.notify_all();
    } else {
        changed_.wait(lock, [&] { return turn_ != turn; });
    }
    if (error_) std::rethrow_exception(error_);
}

std::uint64_t EmulatedRuntime::allocate(std::size_t bytes) {
    void* memory = std::aligned_alloc(512, (bytes + 511) / 512 * 512);
    if (!memory) throw std::bad_alloc();
    std::memset(memory, 0, bytes);
    return reinterpret_cast<std::uint64_t>(memory);
}
void EmulatedRuntime::free(std::uint64_t address) { std::free(reinterpret_cast<void*>(address)); }
void EmulatedRuntime::write(std::uint64_t device, const void* host, std::size_t bytes) {
    std::memcpy(reinterpret_cast<void*>(device), host, bytes);
}
void EmulatedRuntime::read(void* host, std::uint64_t device, std::size_t bytes) {
    std::memcpy(host, reinterpret_cast<const void*>(device), bytes);
}

void EmulatedRuntime::launch(Kernel kernel, std::uint64_t args, int cores) {
    static constexpr void (*kernels[])(GM_ADDR) = {hal_dispatch_send, hal_dispatch_recv, hal_combine_send, hal_combine_recv, hal_primitive};
    device_.launch([entry = kernels[int(kernel)], args] { entry(reinterpret_cast<GM_ADDR>(args)); }, cores);
}
void EmulatedRuntime::synchronize() {
    if (clock_) clock_->synchronize(device_.pe());
}

}  // namespace hal::ascend
