// SPDX-License-Identifier: Apache-2.0
#include "memory.hpp"

#include <sys/random.h>

#include <map>
#include <mutex>

namespace hal::swnic {
namespace {

// Weak: an allocation is forgotten with its last region. Keys hold the device, whose address is its identity here.
struct Registry {
    std::mutex mutex;
    std::uint64_t next_id = 1;
    std::map<std::pair<Device*, Address>, std::weak_ptr<LocalAllocation>> exported;
    std::map<std::tuple<Device*, std::uint64_t, std::uint64_t>, std::weak_ptr<RemoteMapping>> imported;
};

Registry& registry() {
    static Registry instance;
    return instance;
}

}  // namespace

RemoteMapping::~RemoteMapping() { device->unmap(base, bytes); }

std::uint64_t process_nonce() {
    static const std::uint64_t nonce = [] {
        std::uint64_t value = 0;
        return getrandom(&value, sizeof value, 0) == sizeof value ? value : throw DeviceError("no random numbers");
    }();
    return nonce;
}

std::shared_ptr<LocalAllocation> export_shared(Device& device, Address address) {
    auto exported = device.export_allocation(address);
    if (!exported) return nullptr;
    Fd fd(exported->fd);
    auto& r = registry();
    std::lock_guard lock(r.mutex);
    auto& slot = r.exported[{&device, exported->base}];
    auto known = slot.lock();
    if (known && known->bytes == exported->bytes) return known;
    auto made =
        std::make_shared<LocalAllocation>(LocalAllocation{r.next_id++, exported->base, exported->bytes, std::move(fd)});
    slot = made;
    return made;
}

std::shared_ptr<RemoteMapping> import_shared(const std::shared_ptr<Device>& device, std::uint64_t process,
                                             std::uint64_t allocation, int fd, std::size_t bytes) {
    auto& r = registry();
    std::lock_guard lock(r.mutex);
    auto& slot = r.imported[{device.get(), process, allocation}];
    if (auto known = slot.lock()) return known;
    auto made = std::shared_ptr<RemoteMapping>(new RemoteMapping{device, device->import_allocation(fd, bytes), bytes});
    slot = made;
    return made;
}

}  // namespace hal::swnic
