// SPDX-License-Identifier: Apache-2.0
#include "checker/subject.hpp"

#include <algorithm>
#include <sstream>
#include <stdexcept>

namespace hal::checker {
namespace {

constexpr std::uint64_t first_class = std::uint64_t{3} << 60, second_class = std::uint64_t{2} << 60,
                        held_class = 1 << 20;

// Earlier ones first: threads by index, deliveries by (number, thread), which is close to the order of issue and the same
// in every run.
std::uint64_t earlier_first(Entity e) {
    return (std::uint64_t{1} << 52) -
           ((std::uint64_t(e.operation) << 18) | (std::uint64_t(e.owner) << 4) | std::min<std::uint64_t>(e.unit, 15));
}

}  // namespace

World::Priority eager(std::vector<Entity> held) {
    return [held = std::move(held)](const World&, Entity e) {
        if (!held.empty() && std::find(held.begin(), held.end(), e) != held.end())
            return held_class + (earlier_first(e) >> 40);
        return (e.unit == Entity::thread ? second_class : first_class) + earlier_first(e);
    };
}

// Source reads last of all, so that a source that is changed too early is read too late.
World::Priority lazy() {
    return [](const World&, Entity e) {
        const std::uint64_t kind = e.unit == Entity::thread        ? first_class
                                   : e.unit == Entity::source_read ? held_class
                                                                   : second_class;
        return kind + (e.unit == Entity::source_read ? earlier_first(e) >> 4 : earlier_first(e));
    };
}

RunReport report(Subject& subject, World& world) {
    RunReport r;
    r.steps = world.steps();
    static const char* kinds[] = {"hang", "source changed", "exception", "contract"};
    if (!world.problems().empty()) {
        const Problem& p = world.problems().front();
        r.kind = kinds[p.kind];
        r.failure = "rank " + std::to_string(p.rank) + ": " + p.text;
    } else if (world.stopped()) {
        r.stopped = true;
    } else if (world.hangs()) {
        r.kind = "hang";
        r.failure = world.waiting_text();
    } else {
        r.failure = subject.judge(world);
        if (r.failed()) r.kind = "wrong data";
    }
    return r;
}

void run_on(World& world) {
    while (!world.nothing_ready()) {
        if (world.full()) return world.stop();
        world.execute(world.best());
    }
}

RunReport run(Subject& subject, const Schedule& schedule, bool log, const std::function<void(World&)>& look) {
    WorldConfig config = subject.start();
    config.log = config.log || log;
    World world(std::move(config), eager(schedule.held));
    for (const Entity e : schedule.path)
        if (world.is_ready(e)) world.execute(e);
    do {
        run_on(world);
    } while (world.stir());
    RunReport r = report(subject, world);
    if (look) look(world);
    return r;
}

std::string to_text(Entity e) {
    std::string s = std::to_string(e.owner);
    if (e.unit == Entity::thread) return s;
    s += "." + std::to_string(e.operation);
    if (e.unit == Entity::source_read) return s + "s";
    return s + "w" + (e.unit == Entity::piece ? "" : std::to_string(e.unit - Entity::piece));
}

namespace {

Entity entity_from(const std::string& text) {
    std::size_t at = 0;
    const auto number = [&] {
        std::size_t used = 0;
        const unsigned long v = std::stoul(text.substr(at), &used);
        at += used;
        return v;
    };
    try {
        Entity e;
        e.owner = std::uint16_t(number());
        if (at == text.size()) return e;
        if (text[at++] != '.') throw std::invalid_argument("");
        e.operation = std::uint32_t(number());
        const char unit = text.at(at++);
        e.unit = unit == 's' ? Entity::source_read : Entity::piece;
        if (unit != 's' && unit != 'w') throw std::invalid_argument("");
        if (at < text.size()) e.unit = std::uint8_t(Entity::piece + number());
        return e;
    } catch (const std::exception&) {
        throw std::invalid_argument("'" + text + "' is no entity; expected T (thread), T.Ns or T.Nw, as in 0.3w");
    }
}

}  // namespace

std::string to_text(const Schedule& schedule) {
    if (schedule.path.empty() && schedule.held.empty()) return "eager";
    std::string s = schedule.path.empty() ? "hold" : "path";
    for (const Entity e : schedule.path.empty() ? schedule.held : schedule.path) s += " " + to_text(e);
    return s;
}

Schedule schedule_from(const std::string& text) {
    std::istringstream in(text);
    std::string kind, item;
    in >> kind;
    Schedule s;
    if (kind != "eager" && kind != "hold" && kind != "path")
        throw std::invalid_argument("a schedule starts with eager, hold or path, not '" + kind + "'");
    while (in >> item) (kind == "hold" ? s.held : s.path).push_back(entity_from(item));
    return s;
}

}  // namespace hal::checker
