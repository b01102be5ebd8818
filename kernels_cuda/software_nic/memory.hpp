// SPDX-License-Identifier: Apache-2.0
// Memory regions. What is exported and imported is the allocation, once for each process however many regions,
// contexts or connections lie in it: importing costs a mapping of the whole allocation.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "device.hpp"
#include "rendezvous.hpp"

namespace hal::swnic {

// This process's own allocation, exported; the descriptor lives as long as a region uses it.
struct LocalAllocation {
    std::uint64_t id;  // unique in this process, never used again
    Address base;
    std::size_t bytes;
    Fd fd;
};

// A peer's allocation in this process's address space.
struct RemoteMapping {
    std::shared_ptr<Device> device;
    Address base;
    std::size_t bytes;
    ~RemoteMapping();
};

// Random number of this process: with an allocation's id it names the allocation machine-wide.
std::uint64_t process_nonce();

// nullptr when the memory cannot be exported.
std::shared_ptr<LocalAllocation> export_shared(Device& device, Address address);
std::shared_ptr<RemoteMapping> import_shared(const std::shared_ptr<Device>& device, std::uint64_t process,
                                             std::uint64_t allocation, int fd, std::size_t bytes);

struct PeerRegion {
    Address base = 0;  // in this process; 0: not reachable from here
    bool same_device = true;
    std::shared_ptr<RemoteMapping> mapping;
};

// A region registered by all ranks together. Addresses differ, sizes are equal.
struct MemoryRegion {
    std::uint32_t id;
    Address base;
    std::size_t bytes;
    bool host;          // ordinary memory of the process: a source, or a signal's word
    bool strict_order;  // signals on it never pass data
    bool signals;       // NCCL's own signals; else a window, whose words may be signals too
    bool never_reset;   // only signals write it: the target may keep a shadow
    std::shared_ptr<LocalAllocation> allocation;
    std::vector<PeerRegion> peers;
    std::vector<std::uint64_t> shadow;  // of never_reset words; the wire thread's
};

}  // namespace hal::swnic
