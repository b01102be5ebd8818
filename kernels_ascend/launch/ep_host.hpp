// SPDX-License-Identifier: Apache-2.0
// The host side of one ExpertParallel on one rank: arguments, handles, launches, and what the cores report. The kernels do
// the work; nothing here looks at a row. Same operations as kernels_host/ep/kernels.hpp.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "hal/credit.hpp"
#include "hal/epoch.hpp"
#include "kernels/args.h"
#include "launch/runtime.hpp"

namespace hal::ascend {

// A handle's routing and one dispatch's weights, in device memory.
struct Route {
    std::uint64_t epoch = 0;
    std::int32_t tokens = 0;
    std::shared_ptr<DeviceMemory> memory;
    RouteMemory at{};
    bool known = false;  // schedule latency: the sources' counts are here
};
struct State {
    std::shared_ptr<Route> route;
    std::shared_ptr<DeviceMemory> memory;
    WeightMemory at{};
    std::int32_t tokens() const { return route->tokens; }
};

struct DispatchRound {
    std::uint64_t epoch = 0;
    std::uint32_t slot = 0;
    std::shared_ptr<State> state;
    std::shared_ptr<DeviceMemory> offered;
    bool received = false;
};
struct CombineRound {
    std::uint64_t epoch = 0;
    std::shared_ptr<State> state;
    bool weighted = false, returns_weights = false, received = false;
};

struct DispatchInput {
    std::uint64_t x = 0;
    std::int32_t tokens = 0;
    std::uint64_t topk_idx = 0;
    bool idx_is_int64 = false;
    std::uint64_t topk_weights = 0, scales = 0;
};
struct DispatchOutput {
    std::uint64_t scales, topk_idx, topk_weights, tokens_per_expert, expert_offsets;
};

struct Traffic {
    std::uint64_t data_bytes = 0, flag_bytes = 0, signal_bytes = 0, rows = 0, signals = 0;
};

// Bytes of symmetric memory: the window that all backends share, then the staging that UDMA needs.
std::uint64_t window_bytes(const EpShape& shape);
std::uint64_t staging_bytes(const EpShape& shape);
// Throws CapacityViolation if a full round of the completion without completion entries does not fit the rings.
void require_ring(const EpShape& shape, std::uint32_t sq_depth);

// Name of a wait, as PeerTimeout gives it.
const char* wait_stage_name(std::int32_t stage);

class EpHost {
  public:
    // `window`: address of this rank's part, zeroed. `queues` for rows; completion strong_signal_no_cqe uses the two
    // QPs behind them.
    EpHost(std::shared_ptr<Runtime> runtime, const EpShape& shape, int rank, int queues, int element,
           std::uint64_t window, double timeout, int cores);

    DispatchRound dispatch_send(std::uint32_t slot, const DispatchInput& in, const State* reused);
    std::int64_t rows(const DispatchRound& round);
    std::uint64_t received_x(const DispatchRound& round) const;
    void dispatch_recv(DispatchRound& round, const DispatchOutput& out);
    CombineRound combine_send(std::uint64_t x, std::shared_ptr<State> state, std::uint64_t topk_weights,
                              bool returns_weights, bool weighted);
    void combine_recv(CombineRound& round, std::uint64_t bias0, std::uint64_t bias1, std::uint64_t y,
                      std::uint64_t topk_weights);
    const Traffic& traffic() const { return traffic_; }

  private:
    EpArgs arguments(std::uint64_t epoch) const;
    std::shared_ptr<State> new_state(const DispatchInput& in, const State* reused, std::uint64_t epoch);
    void launch(Kernel kernel, const EpArgs& args);
    void finish();
    void finish_or_take_back(std::uint64_t& epoch);
    void raise(const Status& status) const;

    std::shared_ptr<Runtime> runtime_;
    const EpShape shape_;
    const BufferLayout layout_;
    const int rank_, queues_, element_, cores_;
    const std::uint64_t window_;
    const double timeout_;
    DeviceMemory status_, raw_heads_, dirty_;
    std::uint64_t dispatch_epoch_ = 0, combine_epoch_ = 0;
    FinishedRounds finished_;
    Traffic traffic_;
    bool refused_ = false;
    std::vector<std::unique_ptr<DeviceMemory>> launched_;  // arguments in use
};

}  // namespace hal::ascend
