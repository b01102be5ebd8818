// SPDX-License-Identifier: Apache-2.0
// Which addresses of this process are windows, whoever mapped them.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace hal::cuda::emulation {

// A window as one rank maps it: member m's part at begin + m * stride, and nobody's memory in between.
struct Region {
    const std::byte* begin = nullptr;
    std::size_t span = 0, stride = 0, bytes = 0;
    int members = 0, first = 0;  // of the LSA team, and its first rank
    int device = 0;              // of the rank that maps it
    // Whatever unmaps it at its end: a running kernel may look at any window of its device, also at one that is given up
    // meanwhile.
    std::shared_ptr<const void> mapping = nullptr;
    std::uint64_t number = 0;  // grows from one to the next; given by add_region

    bool holds(const void* p) const {
        return static_cast<std::size_t>(static_cast<const std::byte*>(p) - begin) < span;
    }
    // Whether [p, p + n) lies in one member's part.
    bool is_memory(const void* p, std::size_t n) const {
        const auto offset = static_cast<std::size_t>(static_cast<const std::byte*>(p) - begin);
        return offset / stride < static_cast<std::size_t>(members) && offset % stride + n <= bytes;
    }
    std::string describe(const void* p) const;
};

using Regions = std::vector<Region>;
// Sorted by address; a snapshot, since windows come and go while kernels of other ranks run.
std::shared_ptr<const Regions> regions();
void add_region(const Region& region);
void remove_region(const std::byte* begin);

}  // namespace hal::cuda::emulation
