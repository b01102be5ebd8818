// SPDX-License-Identifier: Apache-2.0
// What the emulator reports. A Fault names the rule of docs/ascend.md that was broken; a Hang is a wait that nothing in
// flight can ever end.
#pragma once
#include <stdexcept>
#include <string>

namespace hal::udma {

struct Fault : std::runtime_error {
    int rule;
    Fault(int rule_, const std::string& text)
        : std::runtime_error("rule " + std::to_string(rule_) + ": " + text), rule(rule_) {}
};

struct Hang : std::runtime_error {
    using std::runtime_error::runtime_error;
};

}  // namespace hal::udma
