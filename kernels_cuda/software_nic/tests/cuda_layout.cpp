// SPDX-License-Identifier: Apache-2.0
// Compiled, never run, against the toolkit's cuda.h (tests/test_software_nic_abi.py): our declarations of the driver's
// functions take as many arguments of the same sizes, and our constants have its values. cuda.h renames the versioned
// functions to the names that we load, so each is found under the very name in HAL_SWNIC_CUDA_FUNCTIONS.
#include <cuda.h>

#include <type_traits>

#include "cuda_abi.hpp"

namespace ours = hal::swnic::cuda;

template <class Ours, class Theirs>
struct SameCall : std::false_type {};
template <class R, class... A, class S, class... B>
struct SameCall<R (*)(A...), S (*)(B...)> {
    static constexpr bool value = [] {
        if constexpr (sizeof...(A) == sizeof...(B))
            return ((sizeof(A) == sizeof(B)) && ...) && sizeof(R) == sizeof(S);
        else
            return false;
    }();
};

#define SAME(name, ...) static_assert(SameCall<decltype(ours::Driver::name), decltype(&::name)>::value, #name);
HAL_SWNIC_CUDA_FUNCTIONS(SAME)

static_assert(sizeof(ours::Uuid) == sizeof(CUuuid) && sizeof(ours::AccessDescription) == sizeof(CUmemAccessDesc));
static_assert(offsetof(ours::AccessDescription, flags) == offsetof(CUmemAccessDesc, flags));
static_assert(offsetof(ours::Location, id) == offsetof(CUmemLocation, id));
static_assert(ours::location_device == CU_MEM_LOCATION_TYPE_DEVICE);
static_assert(ours::access_read_write == CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
static_assert(ours::handle_posix_fd == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
static_assert(ours::stream_non_blocking == CU_STREAM_NON_BLOCKING);
static_assert(ours::host_alloc_portable == CU_MEMHOSTALLOC_PORTABLE);
static_assert(ours::write_value_default == CU_STREAM_WRITE_VALUE_DEFAULT);
