// SPDX-License-Identifier: Apache-2.0
#include "launch/emulated_runtime.hpp"

#include <cstdlib>
#include <cstring>
#include <new>

#include "kernels/entry.h"

namespace hal::ascend {

void WorldClock::enter() {
    std::lock_guard lock(mutex_);
    ++taking_part_;
}

void WorldClock::leave() {
    std::lock_guard lock(mutex_);
    --taking_part_;
    if (waiters_ && waiters_ == taking_part_) advance();
}

// With everyone waiting: until one stream is done.
void WorldClock::advance() {
    try {
        if (!error_) waiting_[std::size_t(world_.run_until_done(waiting_))] = false;
    } catch (...) {
        error_ = std::current_exception();  // the run is over for all
    }
    --waiters_;
    changed_.notify_all();
}

void WorldClock::synchronize(int pe) {
    std::unique_lock lock(mutex_);
    const auto mine = std::size_t(pe);
    waiting_[mine] = true;
    if (++waiters_ == taking_part_) advance();
    changed_.wait(lock, [&] { return !waiting_[mine] || error_; });
    waiting_[mine] = false;
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
    static constexpr void (*kernels[])(GM_ADDR) = {hal_dispatch_send, hal_dispatch_recv, hal_combine_send,
                                                   hal_combine_recv, hal_primitive};
    device_.launch([entry = kernels[int(kernel)], args] { entry(reinterpret_cast<GM_ADDR>(args)); }, cores);
}
void EmulatedRuntime::synchronize() {
    if (clock_) clock_->synchronize(device_.pe());
}

}  // namespace hal::ascend
