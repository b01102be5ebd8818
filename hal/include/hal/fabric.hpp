// SPDX-License-Identifier: Apache-2.0
// What a kernel may do to the world. Dispatch and combine are templates over a Fabric, so the same kernel source runs on
// shared memory, on an emulated UDMA engine, on a transport written in Python, and under the ordering explorer, whose
// fabric turns every call below into schedulable deliveries.
//
// A Fabric is one rank's end of a communicator plus ONE symmetric window (the buffer of one ExpertParallel). Offsets are
// bytes from the window's start and mean the same on every rank. One thread drives one Fabric at a time.
//
//   int rank() const;                       int world_size() const;
//   int queues() const;                     queues per peer; a queue index is < queues()
//
//   // Own window. Kernels announce what they touch, so a checker sees every access. The pointers are plain memory.
//   const std::byte* read(std::size_t offset, std::size_t nbytes);
//   std::byte*       write(std::size_t offset, std::size_t nbytes);
//
//   // Puts never block on the peer. `src` must stay unchanged until quiet(source). peer == rank() is allowed and is
//   // complete on return. `src` is any readable address of this process (a transport that needs registered memory stages
//   // it). A put of 0 bytes is a no-op, also as a strong operation.
//   void put(int queue, int peer, std::size_t dst_offset, const void* src, std::size_t nbytes, Order order);
//
//   // Slots are 64-bit words in the window: `slot_offset` is 8-byte aligned, and slots of different publishers never share
//   // a 64-byte line. Strong signals take effect after every earlier relaxed/strong operation of this (peer, queue).
//   void signal(int queue, int peer, std::size_t slot_offset, std::uint64_t value, SignalOp op, Order order);
//
//   // Acquire. Returns the value seen, >= at_least. `source` is the rank whose signal is awaited (named in PeerTimeout),
//   // `stage` a static string for the message. Bounded by the fabric's own timeout; throws hal::PeerTimeoutError.
//   std::uint64_t wait(std::size_t slot_offset, std::uint64_t at_least, int source, int queue, const char* stage);
//
//   // peer < 0 means all peers on that queue.
//   void quiet(int queue, int peer, QuietScope scope);
//
// What read() after wait() may see is the contract of docs/contract.md, section "Ordering".
#pragma once
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "hal/ordering.hpp"

namespace hal {

// Thrown by Fabric::wait; becomes hal.errors.PeerTimeout in Python.
struct PeerTimeoutError : std::runtime_error {
    int rank;
    std::string stage;
    int queue;
    std::uint64_t expected, seen;
    double seconds;
    std::string reason;
    PeerTimeoutError(int rank_, std::string stage_, int queue_, std::uint64_t expected_, std::uint64_t seen_,
                     double seconds_, std::string reason_)
        : std::runtime_error("peer timeout"), rank(rank_), stage(std::move(stage_)), queue(queue_), expected(expected_),
          seen(seen_), seconds(seconds_), reason(std::move(reason_)) {}
};

// Thrown by kernels when ranks disagree or input breaks the contract; becomes hal.errors.ContractError.
struct ContractViolation : std::runtime_error {
    using std::runtime_error::runtime_error;
};

}  // namespace hal
