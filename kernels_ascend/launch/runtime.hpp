// SPDX-License-Identifier: Apache-2.0
// What the host side of dispatch and combine needs of a device: memory, copies, launches in order, and a bounded wait for
// them. One small implementation for each toolchain: emulated_runtime.* and acl_runtime.*.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>

#include "hal/fabric.hpp"

namespace hal::ascend {

enum class Kernel { dispatch_send, dispatch_recv, combine_send, combine_recv, primitive };

class Runtime {
  public:
    virtual ~Runtime() = default;
    virtual std::uint64_t allocate(std::size_t bytes) = 0;  // zeroed
    virtual void free(std::uint64_t address) = 0;
    virtual void write(std::uint64_t device, const void* host, std::size_t bytes) = 0;
    virtual void read(void* host, std::uint64_t device, std::size_t bytes) = 0;
    // In order. `args` lies in device memory and stays there until synchronize().
    virtual void launch(Kernel kernel, std::uint64_t args, int cores) = 0;
    virtual void synchronize() = 0;
    virtual std::uint64_t cycles_per_second() const = 0;
    // A wait for `rank` came to its time limit: who is at fault, and why.
    virtual std::pair<int, std::string> root_of_stall(int rank) { return {rank, "no answer"}; }
    virtual void mark_failed(int, const std::string&) {}
};

// Device memory that goes when the last user does.
class DeviceMemory {
  public:
    DeviceMemory(std::shared_ptr<Runtime> runtime, std::size_t bytes)
        : runtime_(std::move(runtime)), address_(bytes ? runtime_->allocate(bytes) : 0) {}
    ~DeviceMemory() {
        if (address_) runtime_->free(address_);
    }
    DeviceMemory(const DeviceMemory&) = delete;
    DeviceMemory& operator=(const DeviceMemory&) = delete;
    std::uint64_t address() const { return address_; }

  private:
    std::shared_ptr<Runtime> runtime_;
    std::uint64_t address_;
};

// Becomes hal.errors.CapacityError.
struct CapacityViolation : std::runtime_error {
    std::string what_, fix;
    std::int64_t needed, given;
    CapacityViolation(std::string what, std::int64_t needed_, std::int64_t given_, std::string fix_)
        : std::runtime_error(what), what_(std::move(what)), fix(std::move(fix_)), needed(needed_), given(given_) {}
};

}  // namespace hal::ascend
