// SPDX-License-Identifier: Apache-2.0
// What a thread knows at one moment. Copies are cheap: rows are shared until one of them changes.
#pragma once
#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <vector>

namespace hal::checker {

// Bytes that clocks and histories of this thread hold now, so that a pass can stop before the machine's memory does.
inline thread_local std::size_t kept_bytes = 0;

template <class T>
struct Counting {
    using value_type = T;
    Counting() = default;
    template <class U>
    Counting(const Counting<U>&) {}
    T* allocate(std::size_t n) {
        T* p = std::allocator<T>().allocate(n);
        kept_bytes += n * sizeof(T);
        return p;
    }
    void deallocate(T* p, std::size_t n) {
        kept_bytes -= n * sizeof(T);
        std::allocator<T>().deallocate(p, n);
    }
    template <class U>
    bool operator==(const Counting<U>&) const {
        return true;
    }
};

template <class T>
using Kept = std::vector<T, Counting<T>>;

// Counts of operations known to be done, of one origin thread. For each (peer, queue): by order NONE, RELAXED, STRONG,
// first complete at the target, then source no longer read.
using Counts = Kept<std::uint32_t>;
using Row = std::shared_ptr<const Counts>;

struct Clock {
    Kept<std::uint32_t> times;   // of every thread
    Kept<Row> rows;              // of every origin thread; null = nothing known
    Kept<std::uint32_t> single;  // operations known complete though not all before them are (weak signals), sorted

    explicit Clock(std::size_t threads) : times(threads), rows(threads) {}

    void join_row(std::size_t thread, const Row& other) {
        Row& own = rows[thread];
        if (!other || own == other) return;
        if (!own) {
            own = other;
            return;
        }
        bool larger = false;
        for (std::size_t i = 0; i < own->size() && !larger; ++i) larger = (*other)[i] > (*own)[i];
        if (!larger) return;
        auto merged = std::make_shared<Counts>(*own);
        for (std::size_t i = 0; i < merged->size(); ++i) (*merged)[i] = std::max((*merged)[i], (*other)[i]);
        own = std::move(merged);
    }

    void join(const Clock& o) {
        for (std::size_t i = 0; i < times.size(); ++i) times[i] = std::max(times[i], o.times[i]);
        for (std::size_t i = 0; i < rows.size(); ++i) join_row(i, o.rows[i]);
        for (const std::uint32_t op : o.single) add_single(op);
    }

    bool same(const Clock& o) const {
        const auto equal = [](const Row& a, const Row& b) { return a == b || (a && b && *a == *b); };
        return times == o.times && single == o.single && std::equal(rows.begin(), rows.end(), o.rows.begin(), equal);
    }

    void add_single(std::uint32_t op) {
        const auto at = std::lower_bound(single.begin(), single.end(), op);
        if (at == single.end() || *at != op) single.insert(at, op);
    }
    bool has_single(std::uint32_t op) const { return std::binary_search(single.begin(), single.end(), op); }
};

}  // namespace hal::checker
