// SPDX-License-Identifier: Apache-2.0
#include "config.hpp"

#include <charconv>
#include <cmath>
#include <cstdlib>
#include <string_view>

#include "faults.hpp"

namespace hal::swnic {
namespace {

struct Setting {
    const char* name;
    const char* fallback;
    const char* meaning;
};

constexpr Setting settings[] = {
    {"HAL_SWNIC_DEVICE", "cuda", "cuda, or host: shared memory as a stand-in for a GPU, for tests"},
    {"HAL_SWNIC_SEED", "0", "seed of every random choice; the same on all ranks"},
    {"HAL_SWNIC_FAULTS", "", "what goes wrong, see the fault table; empty: nothing"},
    {"HAL_SWNIC_QUEUE_DEPTH", "512",
     "requests in flight to each (queue, peer): a power of two, 32 to 4096; 32 starves credits"},
    {"HAL_SWNIC_COPY", "auto", "auto: peer copies between GPUs, staged through the host on one GPU; peer; stage"},
    {"HAL_SWNIC_SIGNAL", "auto", "auto: shadow counters where NCCL never resets a signal; rmw: always read first"},
    {"HAL_SWNIC_PEER_LOSS", "error", "a dead peer's operations: error (NCCL stops), or drop (the others go on)"},
    {"HAL_SWNIC_TIMEOUT", "60", "seconds for joining, registering and closing"},
    {"HAL_SWNIC_WATCHDOG", "10", "seconds without progress before the state is dumped to stderr; 0: never"},
    {"HAL_SWNIC_SPIN", "100", "microseconds that the idle wire thread polls before it sleeps"},
    {"HAL_SWNIC_STATS", "", "file to which each closed connection adds a line of JSON"},
};

std::string value_of(const Setting& setting) {
    const char* value = std::getenv(setting.name);
    return value ? value : setting.fallback;
}

std::string get(std::string_view name) {
    for (const Setting& setting : settings)
        if (name == setting.name) return value_of(setting);
    throw ConfigError("no such setting: " + std::string(name));
}

[[noreturn]] void refuse(const std::string& name, const std::string& value, const std::string& allowed) {
    throw ConfigError(name + "=" + value + " is not understood; give " + allowed);
}

double number(const char* name, double low, double high) {
    std::string text = get(name);
    double value = 0;
    auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc{} || end != text.data() + text.size() || !(value >= low && value <= high))
        refuse(name, text, "a number from " + std::to_string(low) + " to " + std::to_string(high));
    return value;
}

template <class T>
T choose(const char* name, std::initializer_list<std::pair<std::string_view, T>> choices) {
    std::string text = get(name), allowed;
    for (auto& [word, value] : choices) {
        if (text == word) return value;
        allowed += (allowed.empty() ? "" : ", ") + std::string(word);
    }
    refuse(name, text, "one of " + allowed);
}

std::uint64_t integer(const char* name) {
    std::string text = get(name);
    std::uint64_t value = 0;
    auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc{} || end != text.data() + text.size()) refuse(name, text, "a whole number");
    return value;
}

double split_unit(const std::string& text, std::string& unit) {
    double value = 0;
    auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc{} || value < 0) throw ConfigError("'" + text + "' is no number");
    unit.assign(end, text.data() + text.size());
    return value;
}

}  // namespace

std::int64_t parse_time(const std::string& text) {
    std::string unit;
    double value = split_unit(text, unit);
    double scale = unit == "ns" ? 1 : unit == "us" ? 1e3 : unit == "ms" ? 1e6 : unit == "s" ? 1e9 : 0;
    if (scale == 0 || value * scale > 1e18)
        throw ConfigError("'" + text + "' is no time; give ns, us, ms or s, as 20us");
    return std::llround(value * scale);
}

std::uint64_t parse_size(const std::string& text) {
    std::string unit;
    double value = split_unit(text, unit);
    double scale = unit.empty() ? 1 : unit == "K" ? 1024. : unit == "M" ? 1048576. : unit == "G" ? 1073741824. : 0;
    if (scale == 0 || value * scale > 1e18) throw ConfigError("'" + text + "' is no size; give 64, 4K, 16M or 2G");
    return static_cast<std::uint64_t>(std::llround(value * scale));
}

Config Config::from_environment() {
    Config c;
    c.host_device = choose<bool>("HAL_SWNIC_DEVICE", {{"cuda", false}, {"host", true}});
    c.seed = integer("HAL_SWNIC_SEED");
    c.faults = get("HAL_SWNIC_FAULTS");
    auto depth = integer("HAL_SWNIC_QUEUE_DEPTH");
    if (depth < 32 || depth > 4096 || (depth & (depth - 1)))
        refuse("HAL_SWNIC_QUEUE_DEPTH", std::to_string(depth), "a power of two from 32 to 4096");
    c.queue_depth = static_cast<unsigned>(depth);
    c.copy = choose<CopyRoute>(
        "HAL_SWNIC_COPY", {{"auto", CopyRoute::automatic}, {"peer", CopyRoute::peer}, {"stage", CopyRoute::stage}});
    c.signal_shadow = choose<bool>("HAL_SWNIC_SIGNAL", {{"auto", true}, {"rmw", false}});
    c.peer_loss = choose<PeerLoss>("HAL_SWNIC_PEER_LOSS", {{"error", PeerLoss::error}, {"drop", PeerLoss::drop}});
    c.timeout = number("HAL_SWNIC_TIMEOUT", 0.1, 3600);
    c.watchdog = number("HAL_SWNIC_WATCHDOG", 0, 3600);
    c.spin_us = number("HAL_SWNIC_SPIN", 0, 1e6);
    c.stats_path = get("HAL_SWNIC_STATS");
    parse_faults(c.faults, {0, 0, 0});  // refuse a bad text now, not at the first put
    return c;
}

std::string Config::describe() const {
    std::string line = "device=" + std::string(host_device ? "host" : "cuda") + " seed=" + std::to_string(seed) +
                       " queue_depth=" + std::to_string(queue_depth) + " faults='" + faults + "'";
    return line +
           (faults.find("early_signal") == std::string::npos ? "" : " (BREAKS THE ORDERING CONTRACT ON PURPOSE)");
}

std::string settings_table() {
    std::string table;
    for (const Setting& setting : settings)
        table += std::string(setting.name) + "=" + value_of(setting) + "  # " + setting.meaning + " (default '" +
                 setting.fallback + "')\n";
    return table;
}

}  // namespace hal::swnic
