// SPDX-License-Identifier: Apache-2.0
// The shipped dispatch and combine kernels (kernels_host/ep), unmodified, as a subject: every rank runs them on a fiber.
#pragma once
#include <cstdint>
#include <vector>

#include "checker/subject.hpp"
#include "hal/shape.hpp"

namespace hal::checker {

// What every rank does: rounds of dispatch and combine on float32 rows.
struct EpScenario {
    EpShape shape;
    int queues = 2;
    int rounds = 1;
    int in_flight = 1;                 // dispatches before the first combine
    int combines = 1;                  // of each dispatch, one after the other
    bool halves = false;               // a combine is received only when the next was sent (of one dispatch)
    bool reuse_handle = false;         // rounds after the first reuse its handle
    bool weights_back = false;         // combine carries weights home
    std::vector<std::int32_t> tokens;  // of each rank
    std::vector<std::vector<std::int32_t>> topk_idx;  // of each rank: [tokens, k], global ids, -1 = none; moved on by
                                                      // one expert in each round that does not reuse a handle
    std::size_t piece_bytes = 0;
};

class EpSubject : public Subject {
  public:
    // A run that would remember more than `max_bytes` stops there, and its results are not judged.
    EpSubject(EpScenario scenario, const Profile& profile, std::size_t max_bytes = std::size_t{1} << 30);

    WorldConfig start() override;
    std::string judge(const World& world) override;
    std::vector<std::uint8_t> outcome(const World& world) override;

    // For the runs that follow.
    void set_faults(const Faults& faults) { faults_ = faults; }
    void set_mutation(std::optional<Mutation> mutation) { mutation_ = mutation; }
    void set_track(bool track) { track_ = track; }
    void set_least_waits(bool least) { least_waits_ = least; }

    // Rank r's outputs of the last run, one round after the other, as bytes.
    const std::vector<std::byte>& output(int rank) const { return outputs_[std::size_t(rank)]; }
    // Whether rank r returned from its kernels.
    bool ended(int rank) const { return ended_[std::size_t(rank)]; }
    const EpScenario& scenario() const { return scenario_; }

  private:
    EpSubject(const EpSubject& other, const Profile& profile);  // the yardstick: no expected outputs yet
    void run_rank(int rank, class CheckFabric& fabric);

    const EpScenario scenario_;
    const Profile profile_;
    std::size_t window_bytes_, max_bytes_;
    Faults faults_;
    std::optional<Mutation> mutation_;
    bool track_ = true, least_waits_ = false;
    std::vector<std::vector<std::byte>> outputs_, expected_;
    std::vector<bool> ended_;
};

}  // namespace hal::checker
