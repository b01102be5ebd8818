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

Managed* lend(const hal_cuda_view& view, std::uint64_t base, std::int64_t rows, int device, std::int64_t* lease) {
    auto* leased = static_cast<Leased*>(std::malloc(sizeof(Leased)));
    if (leased == nullptr) return nullptr;
    leased->shape[0] = view.rows < 0 ? rows : view.rows, leased->shape[1] = view.columns;
    leased->strides[0] = view.dims == 2 ? view.columns : 1, leased->strides[1] = 1;
    leased->lease = lease;
    leased->managed.tensor = Tensor{reinterpret_cast<void*>(base + view.offset),
                                    {hal::cuda::kDlpackDevice, device},
                                    view.dims,
                                    {static_cast<std::uint8_t>(view.code), static_cast<std::uint8_t>(view.bits), 1},
                                    leased->shape,
                                    leased->strides,
                                    0};
    leased->managed.context = leased;
    leased->managed.deleter = end;
    __atomic_add_fetch(lease, 1, __ATOMIC_ACQ_REL);
    return &leased->managed;
}

// A new reference to a tensor, or nullptr with an exception set. The lease ends with it, or here.
void* tensor(const hal_cuda_python& python, Managed* managed) {
    if (managed == nullptr) return python.no_memory();
    void* capsule = python.capsule(managed, "dltensor", nullptr);
    void* made = capsule == nullptr ? nullptr : python.call(python.from_dlpack, capsule, nullptr);
    if (made == nullptr) end(managed);
    if (capsule != nullptr) python.release(capsule);
    return made;
}

}  // namespace

extern "C" std::int64_t* hal_cuda_leases(int count) {
    return static_cast<std::int64_t*>(std::calloc(static_cast<std::size_t>(count), sizeof(std::int64_t)));
}

extern "C" void* hal_cuda_tensors(const hal_cuda_python* python, const hal_cuda_view* views, int count,
                                  std::uint64_t base, std::int64_t rows, int device, std::int64_t* lease) {
    void* tensors = python->tuple(count);
    for (int i = 0; i < count && tensors != nullptr; ++i) {
        void* item = python->none;
        if (views[i].dims == 0)
            python->hold(item);
        else
            item = tensor(*python, lend(views[i], base, rows, device, lease));
        if (item != nullptr) {
            python->set_item(tensors, i, item);  // takes the reference
        } else {
            python->release(tensors);  // and with it those that were made
            tensors = nullptr;
        }
    }
    return tensors;
}
