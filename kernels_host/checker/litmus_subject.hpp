// SPDX-License-Identifier: Apache-2.0
// A litmus program as a subject of the schedule searches and of the happens-before pass. The exhaustive search of litmus
// programs (litmus_search.hpp) is a second, independent implementation of the same rules; tests hold one against the other.
#pragma once
#include <deque>

#include "checker/litmus_program.hpp"
#include "checker/subject.hpp"

namespace hal::checker {

class LitmusSubject : public Subject {
  public:
    LitmusSubject(const LitmusSource& source, const Profile& profile, const Faults& faults = {});
    WorldConfig start() override;
    std::string judge(const World& world) override;
    std::vector<std::uint8_t> outcome(const World& world) override;

  private:
    void run_thread(int thread, class CheckFabric& fabric);

    const Compiled compiled_;
    const Faults faults_;
    std::vector<std::vector<Instruction>> threads_;
    std::vector<std::uint64_t> registers_;
    std::deque<std::vector<std::uint64_t>> constants_;  // sources of puts of a value; their addresses must stay
};

}  // namespace hal::checker
