// SPDX-License-Identifier: Apache-2.0
// The AscendCL names that device/acl_runtime.cpp uses, declared so that the host compiler checks it. Nothing defines them.
#pragma once
#include <cstddef>
#include <cstdint>

using aclError = int;
using aclrtStream = void*;
inline constexpr aclError ACL_SUCCESS = 0;
enum aclrtMemcpyKind {
    ACL_MEMCPY_HOST_TO_HOST,
    ACL_MEMCPY_HOST_TO_DEVICE,
    ACL_MEMCPY_DEVICE_TO_HOST,
    ACL_MEMCPY_DEVICE_TO_DEVICE
};
enum aclrtMemMallocPolicy { ACL_MEM_MALLOC_HUGE_FIRST };

extern "C" {
aclError aclInit(const char* config);
aclError aclrtSetDevice(std::int32_t device);
aclError aclrtMalloc(void** address, std::size_t bytes, aclrtMemMallocPolicy policy);
aclError aclrtFree(void* address);
aclError aclrtMemset(void* address, std::size_t most, std::int32_t value, std::size_t bytes);
aclError aclrtMemcpy(void* dst, std::size_t most, const void* src, std::size_t bytes, aclrtMemcpyKind kind);
aclError aclrtSynchronizeStreamWithTimeout(aclrtStream stream, std::int32_t milliseconds);
const char* aclGetRecentErrMsg(void);
}
