// SPDX-License-Identifier: Apache-2.0
// The Fabric (hal/fabric.hpp) of shared memory: a kernel that is instantiated for it has every call inlined.
#pragma once
#include <cstring>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "transport/shm_transport.hpp"

namespace hal {

class ShmFabric {
  public:
    // `timeout` in seconds bounds every wait. The window stays mapped while the fabric lives. With `members` a wait that
    // fails leaves the communicator usable, and one ends when a later view is decided.
    ShmFabric(ShmTransport& transport, int window, double timeout, std::optional<Members> members = std::nullopt)
        : transport_(&transport), window_(transport.window(window)), timeout_(timeout), members_(members) {
        for (const auto& segment : window_->segments) bases_.push_back(segment ? segment->data() : nullptr);
        own_ = bases_[static_cast<std::size_t>(transport.rank())];
    }

    int rank() const { return transport_->rank(); }
    int world_size() const { return transport_->world_size(); }
    int queues() const { return transport_->queues(); }
    std::size_t size() const { return window_->nbytes; }

    const std::byte* read(std::size_t offset, std::size_t) { return own_ + offset; }
    std::byte* write(std::size_t offset, std::size_t) { return own_ + offset; }

    void put(int, int peer, std::size_t dst_offset, const void* src, std::size_t nbytes, Order order) {
        if (nbytes != 0) shm_put(base(peer) + dst_offset, src, nbytes, order);
    }
    void signal(int, int peer, std::size_t slot_offset, std::uint64_t value, SignalOp op, Order) {
        shm_signal(base(peer) + slot_offset, value, op);
        transport_->ring(peer);
    }
    std::uint64_t wait(std::size_t slot_offset, std::uint64_t at_least, int source, int queue, const char* stage) {
        return transport_->await(own_ + slot_offset, at_least, source, queue, stage, timeout_,
                                 members_ ? &*members_ : nullptr);
    }
    void quiet(int, int, QuietScope scope) {
        // A memcpy has read its source when it returns; visibility at the target needs the fence.
        if (scope == QuietScope::remote) std::atomic_thread_fence(std::memory_order_seq_cst);
    }

  private:
    std::byte* base(int peer) const { return bases_[static_cast<std::size_t>(peer)]; }

    ShmTransport* transport_;
    std::shared_ptr<ShmWindow> window_;
    std::vector<std::byte*> bases_;
    std::byte* own_;
    double timeout_;
    std::optional<Members> members_;
};

}  // namespace hal
