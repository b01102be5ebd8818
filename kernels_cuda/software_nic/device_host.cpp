// SPDX-License-Identifier: Apache-2.0
// A stand-in for GPU memory: memfd mappings. "Device memory" is what hal_swnic_host_allocate returns; everything else
// cannot be exported, as NCCL's own signals cannot. Copies run later, when completion is polled, one at a time, so that
// there is a real time between submitting a copy and its bytes being visible.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>

#include "device.hpp"

namespace hal::swnic {
namespace {

struct HostMemory {
    std::mutex mutex;
    std::map<Address, Exported> allocations;
};

HostMemory& host_memory() {
    static HostMemory memory;
    return memory;
}

class HostLane final : public Lane {
  public:
    std::size_t submit(std::span<const Copy> copies) override {
        for (const Copy& copy : copies) queue_.push_back({copy, &copy == &copies.back()});
        return copies.size();
    }

    std::uint64_t completed() override {
        if (!queue_.empty()) {
            const Queued& next = queue_.front();
            std::memcpy(reinterpret_cast<void*>(next.copy.dst), reinterpret_cast<const void*>(next.copy.src),
                        next.copy.bytes);
            if (next.last) ++completed_;
            queue_.pop_front();
        }
        return completed_;
    }

    std::byte* take_bounce(std::size_t bytes) override { return static_cast<std::byte*>(std::malloc(bytes)); }
    void give_bounce(std::byte* bounce) override { std::free(bounce); }

  private:
    struct Queued {
        Copy copy;
        bool last;  // of its ticket
    };
    std::deque<Queued> queue_;
    std::uint64_t completed_ = 0;
};

class HostDevice final : public Device {
  public:
    const char* name() const override { return "host stand-in"; }
    DeviceId id() const override { return {}; }
    void bind_thread() override {}
    std::unique_ptr<Lane> make_lane(std::size_t) override { return std::make_unique<HostLane>(); }

    std::optional<Exported> export_allocation(Address address) override {
        auto& memory = host_memory();
        std::lock_guard lock(memory.mutex);
        auto next = memory.allocations.upper_bound(address);
        if (next == memory.allocations.begin()) return std::nullopt;
        const Exported& found = std::prev(next)->second;
        if (address >= found.base + found.bytes) return std::nullopt;
        int fd = fcntl(found.fd, F_DUPFD_CLOEXEC, 0);
        if (fd < 0) throw DeviceError("cannot duplicate a memory descriptor");
        return Exported{fd, found.base, found.bytes};
    }

    Address import_allocation(int fd, std::size_t bytes) override {
        void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (base == MAP_FAILED) throw DeviceError("cannot map a peer's memory");
        return reinterpret_cast<Address>(base);
    }

    void unmap(Address base, std::size_t bytes) override { munmap(reinterpret_cast<void*>(base), bytes); }

    void write64(Address word, std::uint64_t value) override {
        std::atomic_ref(*reinterpret_cast<std::uint64_t*>(word)).store(value, std::memory_order_release);
    }

    void add64(Address word, std::uint64_t value) override {
        std::atomic_ref(*reinterpret_cast<std::uint64_t*>(word)).fetch_add(value, std::memory_order_acq_rel);
    }
};

}  // namespace

std::shared_ptr<Device> host_device() {
    static const auto device = std::make_shared<HostDevice>();
    return device;
}

}  // namespace hal::swnic

// Zeroed "device memory" of the stand-in, whole pages; nullptr when there is none.
extern "C" __attribute__((visibility("default"))) void* hal_swnic_host_allocate(std::size_t bytes) {
    const std::size_t page = 4096;
    bytes = (bytes + page - 1) / page * page;
    int fd = memfd_create("hal-swnic-memory", MFD_CLOEXEC);
    if (fd < 0) return nullptr;
    void* base = ftruncate(fd, static_cast<off_t>(bytes)) == 0
                     ? mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0)
                     : MAP_FAILED;
    if (base == MAP_FAILED) {
        close(fd);
        return nullptr;
    }
    auto& memory = hal::swnic::host_memory();
    std::lock_guard lock(memory.mutex);
    auto address = reinterpret_cast<hal::swnic::Address>(base);
    memory.allocations[address] = {fd, address, bytes};
    return base;
}

extern "C" __attribute__((visibility("default"))) void hal_swnic_host_free(void* base) {
    auto& memory = hal::swnic::host_memory();
    std::lock_guard lock(memory.mutex);
    auto found = memory.allocations.find(reinterpret_cast<hal::swnic::Address>(base));
    if (found == memory.allocations.end()) return;
    munmap(base, found->second.bytes);
    close(found->second.fd);
    memory.allocations.erase(found);
}
