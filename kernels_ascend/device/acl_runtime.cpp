// SPDX-License-Identifier: Apache-2.0
#include "device/acl_runtime.hpp"

#include <string>

#include "device/launch.h"

namespace hal::ascend {

void check_acl(aclError code, const char* what) {
    if (code == ACL_SUCCESS) return;
    const char* text = aclGetRecentErrMsg();
    throw std::runtime_error(std::string(what) + " failed with " + std::to_string(code) +
                             (text ? std::string(": ") + text : ""));
}

std::uint64_t AclRuntime::allocate(std::size_t bytes) {
    void* address = nullptr;
    check_acl(aclrtMalloc(&address, bytes, ACL_MEM_MALLOC_HUGE_FIRST), "aclrtMalloc");
    check_acl(aclrtMemset(address, bytes, 0, bytes), "aclrtMemset");
    return reinterpret_cast<std::uint64_t>(address);
}
void AclRuntime::free(std::uint64_t address) { aclrtFree(reinterpret_cast<void*>(address)); }
void AclRuntime::write(std::uint64_t device, const void* host, std::size_t bytes) {
    check_acl(aclrtMemcpy(reinterpret_cast<void*>(device), bytes, host, bytes, ACL_MEMCPY_HOST_TO_DEVICE),
              "aclrtMemcpy");
}
void AclRuntime::read(void* host, std::uint64_t device, std::size_t bytes) {
    check_acl(aclrtMemcpy(host, bytes, reinterpret_cast<const void*>(device), bytes, ACL_MEMCPY_DEVICE_TO_HOST),
              "aclrtMemcpy");
}
void AclRuntime::launch(Kernel kernel, std::uint64_t args, int cores) {
    launch_on_device(kernel, stream_, reinterpret_cast<std::uint8_t*>(args), cores);
}
void AclRuntime::synchronize() {
    check_acl(aclrtSynchronizeStreamWithTimeout(stream_, milliseconds_), "aclrtSynchronizeStreamWithTimeout");
}

}  // namespace hal::ascend
