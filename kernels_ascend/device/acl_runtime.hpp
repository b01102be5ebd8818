// SPDX-License-Identifier: Apache-2.0
// A real NPU as a Runtime: AscendCL memory and streams. Never run on an NPU.
#pragma once
#include "acl/acl.h"
#include "launch/runtime.hpp"

namespace hal::ascend {

class AclRuntime : public Runtime {
  public:
    // `seconds` bounds every synchronize(): the kernels' own limit and a margin, since stream waits have none.
    AclRuntime(aclrtStream stream, double seconds)
        : stream_(stream), milliseconds_(std::int32_t(seconds * 1000) + 5000) {}
    void set_stream(aclrtStream stream) { stream_ = stream; }

    std::uint64_t allocate(std::size_t bytes) override;
    void free(std::uint64_t address) override;
    void write(std::uint64_t device, const void* host, std::size_t bytes) override;
    void read(void* host, std::uint64_t device, std::size_t bytes) override;
    void launch(Kernel kernel, std::uint64_t args, int cores) override;
    void synchronize() override;
    std::uint64_t cycles_per_second() const override {
        return 50'000'000;
    }  // GetSystemCycle; to be measured first of all

  private:
    aclrtStream stream_;
    std::int32_t milliseconds_;
};

// Throws with the library's own words unless `code` is success.
void check_acl(aclError code, const char* what);

}  // namespace hal::ascend
