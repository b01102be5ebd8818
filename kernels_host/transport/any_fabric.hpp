// SPDX-License-Identifier: Apache-2.0
// A Fabric (hal/fabric.hpp) over one window of any Transport: a kernel compiled for it runs on a transport that was
// written after the kernel was, in Python too.
#pragma once
#include <memory>
#include <utility>

#include "transport/transport.hpp"

namespace hal {

class AnyFabric {
  public:
    // `memory` is this rank's part of the window; `keep` holds it alive.
    AnyFabric(Transport& transport, int window, std::byte* memory, std::size_t nbytes, double timeout,
              std::shared_ptr<void> keep)
        : transport_(&transport), window_(window), memory_(memory), nbytes_(nbytes), timeout_(timeout),
          keep_(std::move(keep)) {}

    int rank() const { return transport_->rank(); }
    int world_size() const { return transport_->world_size(); }
    int queues() const { return transport_->queues(); }
    std::size_t size() const { return nbytes_; }

    const std::byte* read(std::size_t offset, std::size_t) { return memory_ + offset; }
    std::byte* write(std::size_t offset, std::size_t) { return memory_ + offset; }

    void put(int queue, int peer, std::size_t dst_offset, const void* src, std::size_t nbytes, Order order) {
        if (nbytes != 0) transport_->put(window_, queue, peer, dst_offset, src, nbytes, order);
    }
    void signal(int queue, int peer, std::size_t slot_offset, std::uint64_t value, SignalOp op, Order order) {
        transport_->signal(window_, queue, peer, slot_offset, value, op, order);
    }
    std::uint64_t wait(std::size_t slot_offset, std::uint64_t at_least, int source, int queue, const char* stage) {
        transport_->require_usable();
        return transport_->wait(window_, slot_offset, at_least, source, queue, stage, timeout_);
    }
    void quiet(int queue, int peer, QuietScope scope) { transport_->quiet(queue, peer, scope); }

  private:
    Transport* transport_;
    int window_;
    std::byte* memory_;
    std::size_t nbytes_;
    double timeout_;
    std::shared_ptr<void> keep_;
};

}  // namespace hal
