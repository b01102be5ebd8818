// SPDX-License-Identifier: Apache-2.0
// What the engine needs of the memory that it serves. Two implementations: the CUDA driver (device_cuda.cpp), and plain
// shared memory (device_host.cpp), on which the whole engine runs and is tested without a GPU.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>

namespace hal::swnic {

using Address = std::uintptr_t;
using DeviceId = std::array<std::uint8_t, 16>;  // a GPU's UUID: ordinals differ between processes

struct DeviceError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// One contiguous copy. `same_device` says that source and destination are memory of one GPU; the two host flags, that
// an end is this process's ordinary memory.
struct Copy {
    Address dst, src;
    std::size_t bytes;
    bool src_host, dst_host, same_device;
};

// An ordered lane of copies; each Flow owns one. Every submit takes some prefix of the copies (fewer when staging space
// is short), and is one ticket. Tickets complete in order, and a completed ticket's bytes are visible to the target.
class Lane {
  public:
    virtual ~Lane() = default;
    virtual std::size_t submit(std::span<const Copy> copies) = 0;
    virtual std::uint64_t completed() = 0;
    // Host memory that copies of this lane may use as an end, or nullptr when there is no room now.
    virtual std::byte* take_bounce(std::size_t bytes) = 0;
    virtual void give_bounce(std::byte* bounce) = 0;
};

struct Exported {
    int fd;             // owned by the caller
    Address base;       // of the whole allocation
    std::size_t bytes;  // of the whole allocation
};

class Device {
  public:
    virtual ~Device() = default;
    virtual const char* name() const = 0;
    virtual DeviceId id() const = 0;
    // Called first by every thread that uses the device.
    virtual void bind_thread() = 0;
    // `bounce_bytes`: what take_bounce may hand out at one time.
    virtual std::unique_ptr<Lane> make_lane(std::size_t bounce_bytes) = 0;
    // The allocation that holds `address`, as a descriptor that another process can import; nullopt when this memory
    // cannot be exported (NCCL allocates its own signals so).
    virtual std::optional<Exported> export_allocation(Address address) = 0;
    virtual Address import_allocation(int fd, std::size_t bytes) = 0;
    virtual void unmap(Address base, std::size_t bytes) = 0;
    // Writes to 8-byte words of this device, visible to it in the order of the calls. add64 reads the word first.
    virtual void write64(Address word, std::uint64_t value) = 0;
    virtual void add64(Address word, std::uint64_t value) = 0;
};

enum class CopyRoute { automatic, peer, stage };

// One for each process, or for each process and GPU (the calling thread's current one): mappings are shared through it.
std::shared_ptr<Device> host_device();
std::shared_ptr<Device> cuda_device(CopyRoute route);

}  // namespace hal::swnic
