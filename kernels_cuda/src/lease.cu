// SPDX-License-Identifier: Apache-2.0
// Arrays over leased slots, handed to frameworks by DLPack; the last one to go ends the lease without Python.
#include <cstdint>
#include <cstdlib>

#include "hal_cuda.h"
#include "machine.cuh"

namespace {

// The DLPack ABI (version 0.8 and older, which every importer takes).
struct Device {
    std::int32_t type, id;
};
struct DataType {
    std::uint8_t code, bits;
    std::uint16_t lanes;
};
struct Tensor {
    void* data;
    Device device;
    std::int32_t dims;
    DataType type;
    std::int64_t *shape, *strides;
    std::uint64_t byte_offset;
};
struct Managed {
    Tensor tensor;
    void* context;
    void (*deleter)(Managed*);
};
struct Leased {
    Managed managed;
    std::int64_t shape[2], strides[2];
    std::int64_t* lease;
};

void end(Managed* managed) {
    auto* leased = static_cast<Leased*>(managed->context);
    __atomic_sub_fetch(leased->lease, 1, __ATOMIC_ACQ_REL);
    std::free(leased);
}

}  // namespace

extern "C" std::int64_t* hal_cuda_leases(int count) {
    return static_cast<std::int64_t*>(std::calloc(static_cast<std::size_t>(count), sizeof(std::int64_t)));
}

extern "C" void* hal_cuda_dlpack(std::uint64_t ptr, int device, int code, int bits, int dims, std::int64_t rows,
                                 std::int64_t columns, std::int64_t* lease) {
    auto* leased = static_cast<Leased*>(std::malloc(sizeof(Leased)));
    if (leased == nullptr) return nullptr;
    leased->shape[0] = rows, leased->shape[1] = columns;
    leased->strides[0] = dims == 2 ? columns : 1, leased->strides[1] = 1;
    leased->lease = lease;
    leased->managed.tensor = Tensor{reinterpret_cast<void*>(ptr),
                                    {hal::cuda::kDlpackDevice, device},
                                    dims,
                                    {static_cast<std::uint8_t>(code), static_cast<std::uint8_t>(bits), 1},
                                    leased->shape,
                                    leased->strides,
                                    0};
    leased->managed.context = leased;
    leased->managed.deleter = end;
    __atomic_add_fetch(lease, 1, __ATOMIC_ACQ_REL);
    return &leased->managed;
}
