// SPDX-License-Identifier: Apache-2.0
// The shipped kernels with on_peer_loss = mask as a subject, with ranks that stop at any step: every view has its own
// stretch of each rank's window, the views' words lie in rank 0's, and what the host engine does between views
// (backends/hal_host/views.py) is stated once more here, in the checker's terms. Python judges the results, by masks.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "checker/ep_subject.hpp"

namespace hal::checker {

class MaskingSubject : public Subject {
  public:
    // Of the scenario: shape (agreed), queues, rounds, in_flight, tokens, topk_idx, piece_bytes.
    MaskingSubject(EpScenario scenario, const Profile& profile);

    WorldConfig start() override;
    std::string judge(const World&) override { return ""; }
    std::vector<std::uint8_t> outcome(const World& world) override;

    void set_faults(const Faults& faults) { faults_ = faults; }
    void set_mutation(std::optional<Mutation> mutation) { mutation_ = mutation; }
    void set_track(bool track) { track_ = track; }
    // What rank r's calls gave, in the order in which they ended: for each an int64 header (0 = dispatch or 1 = combine,
    // round, masked ranks), then a dispatch's rows, ids, weights and counts, or a combine's sums.
    const std::vector<std::byte>& output(int rank) const { return outputs_[std::size_t(rank)]; }
    const std::string& end(int rank) const { return ends_[std::size_t(rank)]; }
    std::uint32_t calls(int rank) const { return calls_[std::size_t(rank)]; }

  private:
    void run_rank(int rank, class CheckFabric& fabric);

    const EpScenario scenario_;
    const Profile profile_;
    std::uint64_t view_bytes_, most_views_;
    Faults faults_;
    std::optional<Mutation> mutation_;
    bool track_ = false;  // keeps the calls, for mutation
    std::vector<std::vector<std::byte>> outputs_;
    std::vector<std::string> ends_;
    std::vector<std::uint32_t> calls_;
};

}  // namespace hal::checker
