// SPDX-License-Identifier: Apache-2.0
#include "faults.hpp"

#include <algorithm>
#include <charconv>

#include "config.hpp"

namespace hal::swnic {
namespace {

constexpr std::size_t tear = 32;  // a put may become visible in pieces of this many bytes, in any order

// What a random choice is about: one independent sequence for each.
enum : std::uint64_t {
    draw_jitter = 1,
    draw_publish,
    draw_complete,
    draw_read,
    draw_cut = 1 << 8,
    draw_order = 1 << 24
};

std::uint64_t mix(std::uint64_t x) {  // splitmix64
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

std::string_view trim(std::string_view text) {
    auto first = text.find_first_not_of(" \t\n");
    if (first == std::string_view::npos) return {};
    return text.substr(first, text.find_last_not_of(" \t\n") - first + 1);
}

template <class F>
void each_part(std::string_view text, char separator, F visit) {
    while (true) {
        auto end = text.find(separator);
        if (auto part = trim(text.substr(0, end)); !part.empty()) visit(part);
        if (end == std::string_view::npos) return;
        text.remove_prefix(end + 1);
    }
}

std::uint64_t whole(std::string_view text) {
    std::uint64_t value = 0;
    auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc{} || end != text.data() + text.size())
        throw ConfigError("'" + std::string(text) + "' is no whole number");
    return value;
}

bool matches(std::string_view selector, int value) {
    selector = trim(selector);
    return selector.empty() || selector == "*" || whole(selector) == static_cast<std::uint64_t>(value);
}

bool selected(std::string_view selector, FlowId flow) {
    auto arrow = selector.find('>');
    if (arrow == std::string_view::npos)
        throw ConfigError("HAL_SWNIC_FAULTS, '" + std::string(selector) +
                          "': selects no flow; write SRC>DST or SRC>DST/QUEUE");
    auto target = selector.substr(arrow + 1);
    auto slash = target.find('/');
    auto queue = slash == std::string_view::npos ? std::string_view{} : target.substr(slash + 1);
    return matches(selector.substr(0, arrow), flow.src) && matches(target.substr(0, slash), flow.dst) &&
           matches(queue, flow.queue);
}

std::uint64_t at_operation(std::string_view value) {
    if (value.empty() || value[0] != '@') throw ConfigError("give the operation's number as @K");
    return whole(value.substr(1));
}

void set_stall(FlowFaults& faults, std::string_view value) {
    auto at = value.find('@');
    auto time = trim(value.substr(0, at));
    faults.stall = time == "forever" ? never : parse_time(std::string(time));
    faults.stall_at = at == std::string_view::npos ? 0 : whole(trim(value.substr(at + 1)));
}

void set_fault(FlowFaults& faults, std::string_view part) {
    auto equals = part.find('=');
    auto name = trim(part.substr(0, equals));
    auto value = equals == std::string_view::npos ? std::string_view{} : trim(part.substr(equals + 1));
    std::string text(value);
    if (name == "delay")
        faults.delay = parse_time(text);
    else if (name == "jitter")
        faults.jitter = parse_time(text);
    else if (name == "reorder")
        faults.reorder = parse_time(text);
    else if (name == "publish")
        faults.publish = parse_time(text);
    else if (name == "complete")
        faults.complete = parse_time(text);
    else if (name == "read")
        faults.read = parse_time(text);
    else if (name == "split")
        faults.split = std::max<std::uint64_t>(parse_size(text), tear);
    else if (name == "rate")
        faults.rate = std::max<std::uint64_t>(parse_size(text), 1);
    else if (name == "ops")
        faults.ops = std::max<std::uint64_t>(whole(value), 1);
    else if (name == "credits")
        faults.credits = std::max<std::uint64_t>(whole(value), 1);
    else if (name == "stall")
        set_stall(faults, value);
    else if (name == "drop")
        faults.drop_at = at_operation(value);
    else if (name == "error")
        faults.error_at = at_operation(value);
    else if (name == "kill")
        faults.kill_at = at_operation(value);
    else if (name == "source_early" && value.empty())
        faults.source_early = true;
    else if (name == "va_unordered" && value.empty())
        faults.va_unordered = true;
    else if (name == "early_signal" && value.empty())
        faults.early_signal = true;
    else
        throw ConfigError(
            "no such fault; there are delay, jitter, reorder, split, publish, complete, source_early, read, rate, ops, "
            "stall, drop, error, kill, credits, va_unordered, early_signal");
}

}  // namespace

FlowFaults parse_faults(std::string_view text, FlowId flow) {
    FlowFaults faults;
    each_part(text, ';', [&](std::string_view rule) {
        auto colon = rule.find(':');
        bool mine = colon == std::string_view::npos || selected(rule.substr(0, colon), flow);
        FlowFaults elsewhere;  // rules for other flows are read all the same: a mistake in them is refused everywhere
        auto list = colon == std::string_view::npos ? rule : rule.substr(colon + 1);
        each_part(list, ',', [&](std::string_view part) {
            try {
                set_fault(mine ? faults : elsewhere, part);
            } catch (const ConfigError& error) {
                throw ConfigError("HAL_SWNIC_FAULTS, '" + std::string(part) + "': " + error.what());
            }
        });
    });
    return faults;
}

FaultPolicy::FaultPolicy(FlowFaults faults, std::uint64_t seed, FlowId flow)
    : faults_(faults),
      key_(mix(mix(mix(mix(seed) ^ static_cast<std::uint64_t>(flow.src)) ^ static_cast<std::uint64_t>(flow.dst)) ^
               static_cast<std::uint64_t>(flow.queue))) {}

std::uint64_t FaultPolicy::draw(std::uint64_t operation, std::uint64_t what) const {
    return mix(mix(key_ ^ operation) ^ what);
}

Nanos FaultPolicy::draw_time(std::uint64_t operation, std::uint64_t what, Nanos limit) const {
    return limit == 0 ? 0 : static_cast<Nanos>(draw(operation, what) % static_cast<std::uint64_t>(limit));
}

void FaultPolicy::cut(std::uint64_t operation, std::size_t bytes, std::vector<Piece>& pieces) const {
    if (faults_.split == 0) {
        pieces.push_back({0, bytes, 0});
        return;
    }
    for (std::size_t offset = 0; offset < bytes;) {
        std::size_t length = tear * (1 + draw(operation, draw_cut + pieces.size()) % (faults_.split / tear));
        length = std::min(length, bytes - offset);
        pieces.push_back({offset, length, 0});
        offset += length;
    }
    std::reverse(pieces.begin(), pieces.end());  // the last byte first: a changed last word proves nothing
}

Nanos FaultPolicy::start(std::uint64_t operation, std::size_t bytes, Nanos now) {
    Nanos start = std::max(now + faults_.delay + draw_time(operation, draw_jitter, faults_.jitter), last_start_);
    if (faults_.rate || faults_.ops) {
        start = std::max(start, wire_free_);
        wire_free_ =
            start +
            (faults_.rate ? static_cast<Nanos>(1e9 * static_cast<double>(bytes) / static_cast<double>(faults_.rate))
                          : 0) +
            (faults_.ops ? 1'000'000'000 / static_cast<Nanos>(faults_.ops) : 0);
    }
    return last_start_ = start;
}

Plan FaultPolicy::plan(std::uint64_t operation, std::size_t bytes, Nanos now) {
    Plan plan;
    if (faults_.kill_at && operation >= *faults_.kill_at)
        plan.outcome = Outcome::kill;
    else if (faults_.error_at && operation >= *faults_.error_at)
        plan.outcome = Outcome::error;
    else if (faults_.drop_at && operation == *faults_.drop_at)
        plan.outcome = Outcome::drop;
    if (plan.outcome != Outcome::deliver) return plan;

    Nanos begin = plan.not_before = start(operation, bytes, now);
    plan.publish_hold = draw_time(operation, draw_publish, faults_.publish);
    plan.complete_hold = draw_time(operation, draw_complete, faults_.complete);
    if (faults_.source_early) plan.read_hold = draw_time(operation, draw_read, faults_.read);
    plan.start = begin + plan.read_hold;
    if (bytes) cut(operation, bytes, plan.pieces);
    for (std::size_t i = 0; i < plan.pieces.size(); ++i)
        plan.pieces[i].due = plan.start + draw_time(operation, draw_order + i, faults_.reorder);

    if (faults_.stall && operation >= faults_.stall_at) {
        bool first = operation == faults_.stall_at;
        if (first) stalled_until_ = faults_.stall == never ? never : begin + faults_.stall;
        plan.not_before = std::max(begin, stalled_until_);
        for (std::size_t i = first ? plan.pieces.size() / 2 : 0; i < plan.pieces.size(); ++i)
            plan.pieces[i].due = std::max(plan.pieces[i].due, stalled_until_);
    }
    return plan;
}

}  // namespace hal::swnic
