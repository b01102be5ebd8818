// SPDX-License-Identifier: Apache-2.0
// One rank of `transport=udma_emulated`: an emulated device whose symmetric heap is the shared-memory transport's windows,
// so ranks may be threads or processes. The transport's control page says who waits for whom and who is dead.
#pragma once
#include <chrono>
#include <memory>
#include <vector>

#include "kernels/primitives_args.h"
#include "launch/emulated_runtime.hpp"
#include "transport/shm_transport.hpp"

namespace hal::ascend {

struct SessionOptions {
    int queues = 2;
    std::uint32_t sq_depth = 8192, cq_depth = 8192;
};

class EmulatedSession : public EmulatedRuntime {
  public:
    EmulatedSession(ShmTransport& transport, SessionOptions options);
    ~EmulatedSession() override;

    // A window of the transport becomes symmetric memory. Gives this rank's address.
    std::uint64_t attach(int window);
    void detach(int window);

    // One ordering word. Addresses are this rank's; `dst` is symmetric, `src` lies in symmetric memory.
    void put(std::uint64_t dst, std::uint64_t src, std::uint64_t bytes, int peer, int queue, Order order);
    void signal(std::uint64_t slot, std::uint64_t value_at, int peer, std::uint64_t value, SignalOp op, int queue,
                Order order);
    std::uint64_t wait(std::uint64_t slot, std::uint64_t at_least, int source, double timeout);
    void quiet(int queue, int peer);

    void launch(Kernel kernel, std::uint64_t args, int cores) override;  // UnusableError after a PeerTimeout
    std::pair<int, std::string> root_of_stall(int rank) override;
    void mark_failed(int rank, const std::string& reason) override;
    const udma::Counters& counters() const { return emulated_->engine.counters; }
    int queues() const { return options_.queues; }

  private:
    EmulatedSession(ShmTransport& transport, SessionOptions options, std::unique_ptr<udma::Device> device);
    std::uint64_t run(PrimitiveArgs args);
    void idle(udma::Launch& launch);
    ControlBlock& control(int rank);

    ShmTransport& transport_;
    const SessionOptions options_;
    std::unique_ptr<udma::Device> emulated_;
    std::vector<std::pair<int, int>> windows_;  // the transport's id, the device's index
    std::vector<std::shared_ptr<ShmWindow>> held_;
    std::chrono::steady_clock::time_point next_look_{};
};

}  // namespace hal::ascend
