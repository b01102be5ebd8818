// SPDX-License-Identifier: Apache-2.0
// The Fabric (hal/fabric.hpp) of one thread of a checked world: every call becomes schedulable deliveries.
#pragma once
#include "checker/world.hpp"

namespace hal::checker {

class CheckFabric {
  public:
    CheckFabric(World& world, int thread) : w_(world), thread_(thread), rank_(world.rank_of(thread)) {}

    int rank() const { return rank_; }
    int world_size() const { return w_.config_.ranks; }
    int queues() const { return w_.config_.queues; }
    std::size_t size() const { return w_.config_.window_bytes; }

    const std::byte* read(std::size_t offset, std::size_t nbytes);
    std::byte* write(std::size_t offset, std::size_t nbytes);
    void put(int queue, int peer, std::size_t dst_offset, const void* src, std::size_t nbytes, Order order);
    void signal(int queue, int peer, std::size_t slot_offset, std::uint64_t value, SignalOp op, Order order);
    // `later_view`: a view that ends the wait, by PeerTimeoutError, once it is decided (WorldConfig::views); 0 = none.
    std::uint64_t wait(std::size_t slot_offset, std::uint64_t at_least, int source, int queue, const char* stage,
                       std::uint64_t later_view = 0);
    void quiet(int queue, int peer, QuietScope scope);

    // Beyond the Fabric, for litmus programs: a put with its own signal, and a barrier's two halves.
    void put_with_signal(int queue, int peer, std::size_t dst_offset, const void* src, std::size_t nbytes, Order order,
                         std::size_t slot_offset, std::uint64_t value, SignalOp op, Order signal_order);
    void arrive();
    void pass(int count);

    // For views: sets a word of WorldConfig::views to `desired` if it is `expected`, in one step; returns what it was.
    std::uint64_t compare_and_set(std::uint64_t view, std::uint64_t expected, std::uint64_t desired);
    bool gone(int rank) const { return w_.gone(rank); }
    // A word of another rank's window, in one step; and of one that is gone.
    std::uint64_t peer_word(int rank, std::size_t offset);
    std::uint64_t last_word(int rank, std::size_t offset) const { return w_.slot(rank, offset); }

  private:
    // The call as it is made; false if the mutation removes it.
    bool mutate(Call& call);
    std::uint32_t send(int queue, int peer, std::size_t dst, const void* src, std::size_t nbytes, Order order,
                       Order acts);
    std::uint32_t raise(int queue, int peer, std::size_t slot, std::uint64_t value, SignalOp op, Order order,
                        Order acts, std::int32_t bundled_with);
    void before_issue(int peer, int queue, std::uint64_t begin, std::uint64_t bytes, bool builds_strong,
                      Access::Kind access);
    void look_at_source(const void* src, std::size_t nbytes);
    void range(std::size_t offset, std::size_t nbytes, const char* what) const;
    std::int64_t own_offset(const void* src) const;

    World& w_;
    const int thread_, rank_;
};

}  // namespace hal::checker
