// SPDX-License-Identifier: Apache-2.0
// The part of the CUDA driver interface that the NIC uses, found in libcuda.so.1 at run time, so that the plug-in
// compiles and loads anywhere. Our own declarations: types by their size, names as the driver exports them.
// tests/test_software_nic_abi.py compares them with cuda.h where that is present.
#pragma once
#include <cstddef>
#include <cstdint>

namespace hal::swnic::cuda {

using Status = int;  // 0 is success
using Pointer = std::uint64_t;
using DeviceOrdinal = int;
using Context = struct ContextTag*;
using Stream = struct StreamTag*;
using AllocationHandle = std::uint64_t;
struct Uuid {
    char bytes[16];
};
struct Location {
    int type;
    int id;
};
struct AccessDescription {
    Location location;
    int flags;
};
inline constexpr int location_device = 1;
inline constexpr int access_read_write = 3;
inline constexpr int handle_posix_fd = 1;
inline constexpr unsigned stream_non_blocking = 1;
inline constexpr unsigned host_alloc_portable = 1;
inline constexpr unsigned write_value_default = 0;

// X(name in the driver, argument types…)
#define HAL_SWNIC_CUDA_FUNCTIONS(X)                                                         \
    X(cuInit, unsigned)                                                                     \
    X(cuGetErrorName, Status, const char**)                                                 \
    X(cuCtxGetCurrent, Context*)                                                            \
    X(cuCtxSetCurrent, Context)                                                             \
    X(cuCtxGetDevice, DeviceOrdinal*)                                                       \
    X(cuCtxGetStreamPriorityRange, int*, int*)                                              \
    X(cuDeviceGetUuid_v2, Uuid*, DeviceOrdinal)                                             \
    X(cuStreamCreateWithPriority, Stream*, unsigned, int)                                   \
    X(cuStreamSynchronize, Stream)                                                          \
    X(cuStreamQuery, Stream)                                                                \
    X(cuStreamWriteValue64_v2, Stream, Pointer, std::uint64_t, unsigned)                    \
    X(cuMemcpyAsync, Pointer, Pointer, std::size_t, Stream)                                 \
    X(cuMemcpyHtoDAsync_v2, Pointer, const void*, std::size_t, Stream)                      \
    X(cuMemcpyDtoHAsync_v2, void*, Pointer, std::size_t, Stream)                            \
    X(cuMemHostAlloc, void**, std::size_t, unsigned)                                        \
    X(cuMemHostGetDevicePointer_v2, Pointer*, void*, unsigned)                              \
    X(cuMemGetAddressRange_v2, Pointer*, std::size_t*, Pointer)                             \
    X(cuMemRetainAllocationHandle, AllocationHandle*, void*)                                \
    X(cuMemExportToShareableHandle, void*, AllocationHandle, int, unsigned long long)       \
    X(cuMemImportFromShareableHandle, AllocationHandle*, void*, int)                        \
    X(cuMemAddressReserve, Pointer*, std::size_t, std::size_t, Pointer, unsigned long long) \
    X(cuMemAddressFree, Pointer, std::size_t)                                               \
    X(cuMemMap, Pointer, std::size_t, std::size_t, AllocationHandle, unsigned long long)    \
    X(cuMemUnmap, Pointer, std::size_t)                                                     \
    X(cuMemSetAccess, Pointer, std::size_t, const AccessDescription*, std::size_t)          \
    X(cuMemRelease, AllocationHandle)

struct Driver {
#define HAL_SWNIC_DECLARE(name, ...) Status (*name)(__VA_ARGS__);
    HAL_SWNIC_CUDA_FUNCTIONS(HAL_SWNIC_DECLARE)
#undef HAL_SWNIC_DECLARE
};

// Loads and initialises the driver once; throws DeviceError saying what is missing.
const Driver& driver();

}  // namespace hal::swnic::cuda
