// SPDX-License-Identifier: Apache-2.0
#include "emulation/regions.hpp"

#include <algorithm>
#include <mutex>

namespace hal::cuda::emulation {
namespace {

struct All {
    std::mutex mutex;
    std::shared_ptr<const Regions> now = std::make_shared<Regions>();
    std::uint64_t added = 0;
    static All& instance() {
        static auto* all = new All;
        return *all;
    }
};

}  // namespace

std::string Region::describe(const void* p) const {
    const auto offset = static_cast<std::size_t>(static_cast<const std::byte*>(p) - begin);
    const std::size_t member = offset / stride, inside = offset % stride;
    const std::string part = "byte " + std::to_string(inside) + " of a window of " + std::to_string(bytes) + " bytes";
    if (member >= static_cast<std::size_t>(members))
        return part + " of LSA rank " + std::to_string(member) + ", in a team of " + std::to_string(members) +
               " (ranks " + std::to_string(first) + " to " + std::to_string(first + members - 1) +
               "): ranks of another team have no address here";
    return part + " of rank " + std::to_string(first + static_cast<int>(member));
}

std::shared_ptr<const Regions> regions() {
    All& all = All::instance();
    const std::lock_guard lock(all.mutex);
    return all.now;
}

void add_region(const Region& region) {
    All& all = All::instance();
    const std::lock_guard lock(all.mutex);
    auto next = std::make_shared<Regions>(*all.now);
    const auto at = std::upper_bound(next->begin(), next->end(), region,
                                     [](const Region& a, const Region& b) { return a.begin < b.begin; });
    next->insert(at, region)->number = ++all.added;
    all.now = std::move(next);
}

void remove_region(const std::byte* begin) {
    All& all = All::instance();
    const std::lock_guard lock(all.mutex);
    auto next = std::make_shared<Regions>(*all.now);
    std::erase_if(*next, [&](const Region& r) { return r.begin == begin; });
    all.now = std::move(next);
}

}  // namespace hal::cuda::emulation
