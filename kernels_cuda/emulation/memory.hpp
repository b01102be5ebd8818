// SPDX-License-Identifier: Apache-2.0
// What a kernel's accesses of memory do. Windows are told by their addresses; other memory is accessed at once.
#pragma once
#include <atomic>
#include <cstdint>
#include <cstring>

#include "emulation/block.hpp"

namespace hal::cuda::emulation {

template <class T>
T read(const T* p) {
    T value;
    if constexpr (sizeof(T) <= 8 && (sizeof(T) & (sizeof(T) - 1)) == 0)
        __atomic_load(p, &value, __ATOMIC_ACQUIRE);
    else
        std::memcpy(&value, p, sizeof value);
    return value;
}
template <class T>
void write(T* p, T value) {
    if constexpr (sizeof(T) <= 8 && (sizeof(T) & (sizeof(T) - 1)) == 0)
        __atomic_store(p, &value, __ATOMIC_RELEASE);
    else
        std::memcpy(p, &value, sizeof value);
}

// Accesses of a range of addresses, counted for tests of how often a kernel reads its input or writes rows.
struct Counted {
    std::atomic<std::uintptr_t> begin{0}, bytes{0};
    std::atomic<std::uint64_t> accesses{0};
    void note(const void* p) {
        const std::uintptr_t offset = reinterpret_cast<std::uintptr_t>(p) - begin.load(std::memory_order_relaxed);
        if (offset < bytes.load(std::memory_order_relaxed)) accesses.fetch_add(1, std::memory_order_relaxed);
    }
    // How many there were of the range before.
    std::uint64_t restart(std::uint64_t from, std::uint64_t length) {
        bytes = 0;
        const std::uint64_t before = accesses.exchange(0);
        begin = from, bytes = length;
        return before;
    }
};
inline Counted counted_loads, counted_stores;

// A plain load.
template <class T>
T load(const T* p) {
    Block& block = *running->block;
    counted_loads.note(p);
    block.check(p, sizeof(T));
    T value = read(p);
    block.see(*running, p, &value, sizeof value);
    return value;
}
// A warp's copies into shared memory, one after the other. Each is done when it begins, or when somebody waits for it.
struct Arrival {
    void begin(void* to, const void* from, int vectors) {
        if (begun_ != ended_)
            running->block->trap("a copy into shared memory began before the one before it had arrived");
        to_ = static_cast<std::byte*>(to), from_ = static_cast<const std::byte*>(from), vectors_ = vectors;
        ++begun_;
        if (running->block->at_random()) arrive();
    }
    void await(unsigned parity) {
        if (mutation.load(std::memory_order_relaxed) == Mutation::copies_unawaited && running->lane() != 31) return;
        if (begun_ % 2 == parity) running->block->trap("a wait for a copy into shared memory that has not begun");
        arrive();
    }

  private:
    struct alignas(16) Vector {
        std::uint64_t words[2];
    };
    void arrive() {
        if (begun_ == ended_) return;
        for (int i = 0; i < vectors_; ++i) {
            const Vector v = load(reinterpret_cast<const Vector*>(from_) + i);
            std::memcpy(to_ + static_cast<std::ptrdiff_t>(i) * 16, &v, sizeof v);
        }
        ended_ = begun_;
    }
    std::byte* to_ = nullptr;
    const std::byte* from_ = nullptr;
    int vectors_ = 0;
    unsigned begun_ = 0, ended_ = 0;
};

// A plain store, or (`atomic`) a relaxed one of a single word.
template <class T>
void store(T* p, T value, bool atomic) {
    static_assert(sizeof(T) <= 16);
    counted_stores.note(p);
    Block& block = *running->block;
    const bool window = block.is_window(p, sizeof(T));
    if (window) block.wrote(p, sizeof(T));
    if (window && block.keeps_back())
        block.keep(*running, p, &value, sizeof value, atomic);
    else
        write(p, value);
}
// A load of a single word that others write meanwhile. `acquires`: what they released comes with it.
template <class T>
T look(const T* p, bool acquires) {
    Block& block = *running->block;
    const T value = block.look(*running, p, [&block](const T* at) {
        block.check(at, sizeof(T));
        T seen = read(at);
        block.overlay(at, &seen, sizeof seen);
        return seen;
    });
    block.saw(*running, p, sizeof(T), acquires);
    return value;
}
// A word written at once, after what is to be visible before it.
template <class T, class Do>
void release(T* p, Do&& write_word) {
    Block& block = *running->block;
    block.check(p, sizeof(T));
    block.wrote(p, sizeof(T));
    block.before_release(*running, p, sizeof(T));
    write_word();
}

}  // namespace hal::cuda::emulation
