// SPDX-License-Identifier: Apache-2.0
// Stores into windows that are not visible yet. A GPU promises nothing of when, or in which order, plain and relaxed stores
// become visible to others; only a fence or a release forces out the stores that happen before it. Here each block keeps
// its stores back for a while, so that a protocol which lacks a fence delivers wrong data.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <unordered_set>
#include <vector>

#include "emulation/regions.hpp"

namespace hal::cuda::emulation {

// One store of at most 16 bytes, aligned to its size, and who made it when: what decides which fences cover it.
struct Store {
    std::byte* to = nullptr;
    std::byte value[16] = {};
    std::uint8_t bytes = 0;
    unsigned block = 0, thread = 0;
    std::uint32_t meetings = 0;  // barriers of the block before it
    std::uint32_t clock = 0;     // of its thread, which each __syncwarp advances
    std::uint64_t due = 0;       // nanoseconds: visible then at the latest, if its block waits
    std::uint64_t number = 0;    // among those that a fence at GPU scope covered

    void apply() const;
};

// Stores in no order, at most one for each 4-byte word, so that one location's stores are never reordered.
class StoreBuffer {
  public:
    bool empty() const { return stores_.empty(); }
    std::size_t size() const { return stores_.size(); }
    // Makes older stores to the same words visible first.
    void add(const Store& store);
    // Puts what is kept back of [p, p + bytes) over `value`, which was read from memory.
    void overlay(const void* p, void* value, std::size_t bytes) const;
    // Makes visible what touches [p, p + bytes).
    void flush(const void* p, std::size_t bytes);
    // Takes out the stores for which `wanted` holds, and gives each to `to`.
    template <class Wanted, class To>
    void take(Wanted wanted, To to) {
        for (std::size_t at = stores_.size(); at-- > 0;) {
            if (!wanted(stores_[at])) continue;
            const Store store = stores_[at];
            remove(at);  // the last store takes its place, which was looked at already
            to(store);
        }
    }

  private:
    static std::uintptr_t word(const void* p) { return reinterpret_cast<std::uintptr_t>(p) >> 2; }
    static std::uintptr_t end_word(const void* p, std::size_t bytes) {
        return (reinterpret_cast<std::uintptr_t>(p) + bytes + 3) >> 2;
    }
    void remove(std::size_t index);
    std::size_t find(std::uintptr_t word) const;  // place in the table, or its size
    void enter(std::uintptr_t word, std::uint32_t index);
    void leave(std::uintptr_t word);
    void grow();

    struct Slot {
        std::uintptr_t word = 0;  // 0: free
        std::uint32_t index = 0;
    };
    std::vector<Store> stores_;
    std::vector<Slot> table_;  // words to stores; open addressing, at most half full
    std::size_t used_ = 0;
};

// What windows held at one moment. A GPU may execute a load as early as the last acquire before it, so a plain load may give
// what was there then.
class EarlyLoads {
  public:
    // Of the windows that a device can address, those small enough to be copied at every launch: what is larger, such as a
    // session's outbox, is always seen as it is.
    void take(const std::vector<Region>& regions, int device);
    // How often it was taken: a thread that acquired since then sees nothing of it.
    std::uint32_t number() const { return number_; }
    // A word that this block stored, or saw by an atomic load, cannot be seen older than that.
    void know(const void* p, std::size_t bytes);
    void look_back(const void* p, void* value, std::size_t bytes) const;

  private:
    struct Part {
        const std::byte* begin;
        std::vector<std::byte> held;
    };
    std::vector<Part> parts_;
    std::unordered_set<std::uintptr_t> known_;
    std::uint32_t number_ = 0;
};

// What fences at GPU scope covered: visible to this GPU, and kept back from others until a fence at system scope.
struct GpuVisible {
    std::mutex mutex;
    StoreBuffer stores;
    std::atomic<std::size_t> size{0};
    std::atomic<std::uint64_t> number{0};  // of the latest store
};

// Defects below the kernels, one at a time (tests/cuda_mutations.py).
enum class Mutation : int {
    none,
    fence_does_nothing,      // __threadfence_system
    fence_at_gpu_scope,      // __threadfence_system acts as __threadfence
    gpu_fence_does_nothing,  // __threadfence
    release_is_relaxed,      // st.release, red.release
    acquire_is_relaxed,      // ld.acquire
    barrier_without_order,   // __syncthreads brings threads together and orders nothing
    copies_unawaited,        // mbarrier.try_wait says that a bulk copy has arrived
    count,
};
extern std::atomic<Mutation> mutation;

}  // namespace hal::cuda::emulation
