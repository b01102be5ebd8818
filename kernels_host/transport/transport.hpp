// SPDX-License-Identifier: Apache-2.0
// What moves bytes for the host backend: symmetric windows, queues and the four ordering words of docs/contract.md.
// ShmTransport is the built-in one; a stranger's may be written in Python (bind_transport.cpp has the trampoline).
// Kernels never see this class: they are templates over a Fabric, which is ShmFabric (all calls inline) or AnyFabric
// (any Transport, one virtual call each).
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "hal/fabric.hpp"

namespace hal {

// A call on a communicator that can only be closed; becomes hal.errors.HalError.
struct UnusableError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// Thrown on a rank that the others have masked; becomes hal.errors.RankMasked.
struct MaskedError : std::runtime_error {
    int rank, by;
    MaskedError(int rank_, int by_) : std::runtime_error("this rank is masked"), rank(rank_), by(by_) {}
};

// A window is named by the id that the transport's `allocate` returned. All offsets are bytes.
class Transport {
  public:
    Transport(int rank, int world_size, int queues) : rank_(rank), world_size_(world_size), queues_(queues) {
        if (world_size < 1 || rank < 0 || rank >= world_size || queues < 1)
            throw ContractViolation("a transport needs 0 <= rank < world_size and queues >= 1, not rank " +
                                    std::to_string(rank) + ", world_size " + std::to_string(world_size) + ", queues " +
                                    std::to_string(queues));
    }
    Transport(const Transport&) = delete;
    Transport& operator=(const Transport&) = delete;
    virtual ~Transport() = default;

    int rank() const { return rank_; }
    int world_size() const { return world_size_; }
    int queues() const { return queues_; }

    // The words, as in hal/fabric.hpp, with the window named.
    virtual void put(int window, int queue, int peer, std::size_t dst_offset, const void* src, std::size_t nbytes,
                     Order order) = 0;
    virtual void signal(int window, int queue, int peer, std::size_t slot_offset, std::uint64_t value, SignalOp op,
                        Order order) = 0;
    // `source` < 0: any rank may signal. `timeout` in seconds.
    virtual std::uint64_t wait(int window, std::size_t slot_offset, std::uint64_t at_least, int source, int queue,
                               const std::string& stage, double timeout) = 0;
    virtual void quiet(int queue, int peer, QuietScope scope) = 0;

    // After a PeerTimeout the communicator can only be closed.
    bool failed() const { return failed_.load(std::memory_order_acquire); }
    void set_failed() { failed_.store(true, std::memory_order_release); }
    void require_usable() const {
        if (failed()) throw UnusableError("this communicator met a PeerTimeout and can only be closed; connect again");
    }

  private:
    int rank_, world_size_, queues_;
    std::atomic<bool> failed_{false};
};

// Called now and then by long waits, so that Ctrl-C works; may throw. Set once by the extension module.
extern void (*check_interrupts)();

}  // namespace hal
