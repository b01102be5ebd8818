// SPDX-License-Identifier: Apache-2.0
// AscendCL and aclshmem's host side for one PE, over an emulated device, so that libhal_ascend's C interface, and the Python
// above it, run without an NPU. Device memory is the process's.
#include <cstdlib>
#include <cstring>
#include <memory>

#include "acl/acl.h"
#include "device/launch.h"
#include "emulation/device.hpp"
#include "kernels/entry.h"
#include "shmem.h"

namespace {
std::unique_ptr<hal::udma::Device> device;
std::uint32_t queues = 1;
}  // namespace

extern "C" {
aclError aclrtSetDevice(std::int32_t) { return 0; }
aclError aclrtMalloc(void** address, std::size_t bytes, aclrtMemMallocPolicy) {
    *address = std::aligned_alloc(512, (bytes + 511) / 512 * 512);
    return *address ? 0 : 1;
}
aclError aclrtFree(void* address) { return std::free(address), 0; }
aclError aclrtMemset(void* address, std::size_t, std::int32_t value, std::size_t bytes) {
    return std::memset(address, value, bytes), 0;
}
aclError aclrtMemcpy(void* dst, std::size_t, const void* src, std::size_t bytes, aclrtMemcpyKind) {
    return std::memcpy(dst, src, bytes), 0;
}
aclError aclrtSynchronizeStreamWithTimeout(aclrtStream, std::int32_t) { return 0; }
const char* aclGetRecentErrMsg(void) { return "out of memory"; }
int aclshmemx_get_uniqueid(aclshmemx_uniqueid_t* uid) { return std::memset(uid, 7, sizeof *uid), 0; }
int aclshmemx_set_attr_uniqueid_args(int, int, std::int64_t, aclshmemx_uniqueid_t* uid, aclshmemx_init_attr_t*) {
    return uid->internal[5] == 7 ? 0 : 1;
}
int aclshmemx_set_qp_num(aclshmem_data_op_engine_type_t, std::uint32_t n) {
    if (device) return 1;  // frozen
    return queues = n, 0;
}
std::int32_t aclshmemx_set_conf_store_tls(bool, const char*, std::uint32_t) { return 0; }
int aclshmemx_init_attr(aclshmemx_bootstrap_t, aclshmemx_init_attr_t*) {
    hal::udma::EngineConfig config;
    config.qp_num = queues;
    device = std::make_unique<hal::udma::Device>(0, std::vector<hal::udma::Heap>(1), config);
    return 0;
}
void* aclshmem_malloc(std::size_t bytes) {
    void* memory = std::aligned_alloc(512, (bytes + 511) / 512 * 512);
    if (memory) device->add_window({{static_cast<std::byte*>(memory), bytes}});
    return memory;
}
void aclshmem_free(void* address) { std::free(address); }
int aclshmem_finalize(void) { return device.reset(), 0; }
}

namespace hal::ascend {
void launch_on_device(Kernel kernel, void*, std::uint8_t* args, int cores) {
    static constexpr void (*kernels[])(GM_ADDR) = {hal_dispatch_send, hal_dispatch_recv, hal_combine_send,
                                                   hal_combine_recv, hal_primitive};
    device->launch([=] { kernels[int(kernel)](args); }, cores);
}
}  // namespace hal::ascend
