// SPDX-License-Identifier: Apache-2.0
#include "emulation/order.hpp"

#include <algorithm>
#include <cstring>
#include <functional>

namespace hal::cuda::emulation {

std::atomic<Mutation> mutation{Mutation::none};

// A word is never seen torn.
void Store::apply() const {
    switch (bytes) {
        case 8: {
            std::uint64_t word;
            std::memcpy(&word, value, 8);
            __atomic_store_n(reinterpret_cast<std::uint64_t*>(to), word, __ATOMIC_RELEASE);
            return;
        }
        case 4: {
            std::uint32_t word;
            std::memcpy(&word, value, 4);
            __atomic_store_n(reinterpret_cast<std::uint32_t*>(to), word, __ATOMIC_RELEASE);
            return;
        }
        default:
            std::memcpy(to, value, bytes);
    }
}

void StoreBuffer::add(const Store& store) {
    flush(store.to, store.bytes);
    stores_.push_back(store);
    for (auto w = word(store.to); w < end_word(store.to, store.bytes); ++w)
        enter(w, static_cast<std::uint32_t>(stores_.size() - 1));
}

void StoreBuffer::overlay(const void* p, void* value, std::size_t bytes) const {
    if (stores_.empty()) return;
    const auto* begin = static_cast<const std::byte*>(p);
    for (auto w = word(p); w < end_word(p, bytes); ++w) {
        const std::size_t place = find(w);
        if (place == table_.size()) continue;
        const Store& store = stores_[table_[place].index];
        // The part of this word that both touch.
        const auto* at = reinterpret_cast<const std::byte*>(w << 2);
        const std::byte* from = std::max({begin, static_cast<const std::byte*>(store.to), at});
        const std::byte* to = std::min({begin + bytes, static_cast<const std::byte*>(store.to) + store.bytes, at + 4});
        if (from < to)
            std::memcpy(static_cast<std::byte*>(value) + (from - begin), store.value + (from - store.to),
                        static_cast<std::size_t>(to - from));
    }
}

void StoreBuffer::flush(const void* p, std::size_t bytes) {
    if (stores_.empty()) return;
    for (auto w = word(p); w < end_word(p, bytes); ++w) {
        const std::size_t place = find(w);
        if (place == table_.size()) continue;
        const std::uint32_t index = table_[place].index;
        stores_[index].apply();
        remove(index);
    }
}

void StoreBuffer::remove(std::size_t index) {
    const Store& gone = stores_[index];
    for (auto w = word(gone.to); w < end_word(gone.to, gone.bytes); ++w) leave(w);
    if (index + 1 < stores_.size()) {
        const Store& moved = stores_[index] = stores_.back();
        for (auto w = word(moved.to); w < end_word(moved.to, moved.bytes); ++w)
            table_[find(w)].index = static_cast<std::uint32_t>(index);
    }
    stores_.pop_back();
}

// --- loads ---------------------------------------------------------------------------------------------------------

void EarlyLoads::take(const std::vector<Region>& regions, int device) {
    constexpr std::size_t kEach = 1 << 20, kAll = 8 << 20;
    parts_.clear();
    known_.clear();
    ++number_;
    std::vector<const Region*> newest;  // first: windows that a failed run left behind may be many
    for (const Region& region : regions)
        if (region.device == device && static_cast<std::size_t>(region.members) * region.bytes <= kEach)
            newest.push_back(&region);
    std::ranges::sort(newest, std::greater<>(), &Region::number);
    std::size_t left = kAll;
    for (const Region* region : newest) {
        const std::size_t bytes = static_cast<std::size_t>(region->members) * region->bytes;
        if (bytes > left) return;
        left -= bytes;
        for (int member = 0; member < region->members; ++member) {
            const std::byte* begin = region->begin + static_cast<std::size_t>(member) * region->stride;
            parts_.push_back({begin, {begin, begin + region->bytes}});
        }
    }
}

void EarlyLoads::know(const void* p, std::size_t bytes) {
    if (parts_.empty()) return;
    const auto at = reinterpret_cast<std::uintptr_t>(p);
    for (std::uintptr_t w = at >> 2; w < (at + bytes + 3) >> 2; ++w) known_.insert(w);
}

void EarlyLoads::look_back(const void* p, void* value, std::size_t bytes) const {
    const auto* from = static_cast<const std::byte*>(p);
    for (const Part& part : parts_) {
        if (from < part.begin || from + bytes > part.begin + part.held.size()) continue;
        const auto at = reinterpret_cast<std::uintptr_t>(p);
        for (std::uintptr_t w = at >> 2; w < (at + bytes + 3) >> 2; ++w)
            if (known_.contains(w)) return;
        std::memcpy(value, part.held.data() + (from - part.begin), bytes);
        return;
    }
}

// --- the table -----------------------------------------------------------------------------------------------------

namespace {
std::size_t hash(std::uintptr_t word) { return static_cast<std::size_t>(word * 0x9e3779b97f4a7c15ull >> 20); }
}  // namespace

std::size_t StoreBuffer::find(std::uintptr_t word) const {
    if (table_.empty()) return 0;
    const std::size_t mask = table_.size() - 1;
    for (std::size_t at = hash(word) & mask;; at = (at + 1) & mask) {
        if (table_[at].word == word) return at;
        if (table_[at].word == 0) return table_.size();
    }
}

void StoreBuffer::enter(std::uintptr_t word, std::uint32_t index) {
    if (2 * (used_ + 1) > table_.size()) grow();
    const std::size_t mask = table_.size() - 1;
    std::size_t at = hash(word) & mask;
    while (table_[at].word != 0) at = (at + 1) & mask;
    table_[at] = {word, index};
    ++used_;
}

void StoreBuffer::leave(std::uintptr_t word) {
    const std::size_t mask = table_.size() - 1;
    std::size_t hole = find(word);
    // What a longer search stepped over the hole for moves into it.
    for (std::size_t at = (hole + 1) & mask; table_[at].word != 0; at = (at + 1) & mask) {
        const std::size_t home = hash(table_[at].word) & mask;
        if (((at - home) & mask) < ((at - hole) & mask)) continue;
        table_[hole] = table_[at];
        hole = at;
    }
    table_[hole] = {};
    --used_;
}

void StoreBuffer::grow() {
    std::vector<Slot> old(std::max<std::size_t>(64, 2 * table_.size()));
    old.swap(table_);
    used_ = 0;
    for (const Slot& slot : old)
        if (slot.word != 0) enter(slot.word, slot.index);
}

}  // namespace hal::cuda::emulation
