// SPDX-License-Identifier: Apache-2.0
// Settings, all from environment variables HAL_SWNIC_*; the table in config.cpp is the one place that names them.
#pragma once
#include <cstdint>
#include <stdexcept>
#include <string>

#include "device.hpp"

namespace hal::swnic {

struct ConfigError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

enum class PeerLoss { error, drop };

struct Config {
    bool host_device = false;
    std::uint64_t seed = 0;
    std::string faults;
    unsigned queue_depth = 512;
    CopyRoute copy = CopyRoute::automatic;
    bool signal_shadow = true;
    PeerLoss peer_loss = PeerLoss::error;
    double timeout = 60;
    double watchdog = 10;
    double spin_us = 100;
    std::string stats_path;

    // Reads the environment; throws ConfigError naming the variable, its value and what is allowed.
    static Config from_environment();
    // One line, enough to replay a run.
    std::string describe() const;
};

// The table of variables with the values in force, one a line: `NAME=value  # meaning (default)`.
std::string settings_table();

// "20us" and the like; throws ConfigError.
std::int64_t parse_time(const std::string& text);
std::uint64_t parse_size(const std::string& text);

}  // namespace hal::swnic
