// SPDX-License-Identifier: Apache-2.0
// What a kernel's accesses of memory do.
#pragma once
#include <cstdint>
#include <cstring>

#include "emulation/block.hpp"

namespace hal::cuda::emulation {

template <class T>
T read(const T* p) {
    if constexpr (sizeof(T) <= 8 && (sizeof(T) & (sizeof(T) - 1)) == 0) {
        T value;
        __atomic_load(p, &value, __ATOMIC_ACQUIRE);
        return value;
    } else {
        T value;
        std::memcpy(&value, p, sizeof value);
        return value;
    }
}
template <class T>
void write(T* p, T value) {
    if constexpr (sizeof(T) <= 8 && (sizeof(T) & (sizeof(T) - 1)) == 0)
        __atomic_store(p, &value, __ATOMIC_RELEASE);
    else
        std::memcpy(p, &value, sizeof value);
}

template <class T>
T load(const T* p) {
    return read(p);
}
template <class T>
void store(T* p, T value) {
    write(p, value);
}

}  // namespace hal::cuda::emulation
