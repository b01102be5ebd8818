// SPDX-License-Identifier: Apache-2.0
// Emulated GIN of one communicator: its card, its signals, and where windows lie.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "emulation/nic.hpp"
#include "emulation/world.hpp"

namespace hal::cuda::emulation {

// ncclGinType_t ends well below it.
constexpr int kEmulatedGin = 100;

// Defects of GIN below the kernels, one at a time (tests/cuda_hosts_mutations.py).
enum class NetworkMutation : int {
    none,
    strong_signal_is_weak,   // it covers nothing that was put before
    flush_does_nothing,      // quiet("source") returns at once
    signal_on_other_queue,   // strong signals are posted to the next queue
    weak_signal_adds_twice,  // room in a ring is given back before its cells were taken
    count,
};
extern std::atomic<NetworkMutation> network_mutation;

class Gin {
  public:
    // Collective. `rail`: only ranks with this one's place in their team are reached.
    Gin(Communicator& comm, int queues, int signals, bool strong, bool rail);

    Nic& nic() { return nic_; }
    int rank() const { return comm_.rank; }
    int signals() const { return signals_; }
    bool strong() const { return strong_; }
    // Bytes of `peer`'s part of a window, or why there are none such.
    Nic::Span find(std::uint64_t window, int peer, std::uint64_t offset, std::uint64_t bytes,
                   std::string& trouble) const;
    std::uint64_t* signal(int peer, int queue, int index) const;
    Nic::Span signal_span(int peer, int queue, int index) const;

  private:
    Communicator& comm_;
    const int signals_;
    const bool strong_, rail_;
    std::shared_ptr<Window> memory_;  // of the indexed signals, [queue][index]
    Nic nic_;
};

}  // namespace hal::cuda::emulation
