// SPDX-License-Identifier: Apache-2.0
#include "emulation/world.hpp"

#include <algorithm>

namespace hal::udma {

namespace {

// How often simulated time may leap past every deadline before a wait counts as a hang.
constexpr int kTimeJumps = 64;

std::uint64_t queue_key(int pe, const Queue& queue) {
    return (std::uint64_t(pe) << 40) | (std::uint64_t(queue.target) << 16) | queue.qp;
}

}  // namespace

std::string Choice::text() const {
    if (block >= 0) return "PE " + std::to_string(pe) + " core " + std::to_string(block);
    static constexpr const char* kinds[] = {"take", "land", "report"};
    return "PE " + std::to_string(pe) + " -> " + std::to_string(step.queue->target) + " QP " +
           std::to_string(step.queue->qp) + " " + kinds[int(step.kind)] + " " + std::to_string(step.operation);
}

World::World(int pes, std::uint64_t heap_bytes, EngineConfig config, Strategy strategy)
    : state_(mix(config.seed)), seed_(config.seed), strategy_(strategy) {
    config.lazy = true;
    if (strategy_ == Strategy::mixed) strategy_ = static_cast<Strategy>(1 + config.seed % 5);
    std::vector<Heap> regions;
    for (int pe = 0; pe < pes; ++pe) {
        heaps_.push_back(std::make_unique<Pages>(heap_bytes));
        regions.push_back({{{heaps_.back()->as<std::byte>(), heap_bytes}}});
    }
    for (int pe = 0; pe < pes; ++pe) devices_.push_back(std::make_unique<Device>(pe, regions, config, this));
}

World::~World() = default;

std::uint64_t World::random() { return state_ = mix(state_); }

bool World::coin() { return random() & 1; }

std::uint64_t World::version() const {
    std::uint64_t sum = 0;
    for (const auto& device : devices_) sum += device->engine.version;
    return sum;
}

void World::prepare() {
    for (auto& device : devices_) {
        while (Launch* launch = device->active()) {
            if (launch->fibers.empty()) device->start_front();
            if (!launch->finished()) break;
            device->retire_front();
        }
    }
}

const std::vector<Choice>& World::enabled() {
    prepare();
    choices_.clear();
    const std::uint64_t now = version();
    std::vector<Step> steps;
    for (auto& device : devices_) {
        if (Launch* launch = device->active()) {
            for (int block = 0; block < launch->blocks; ++block) {
                const Fiber& fiber = *launch->fibers[block];
                if (fiber.done || (fiber.waiting && fiber.seen_version == now)) continue;
                choices_.push_back({device->pe(), block, {}, mix((std::uint64_t(device->pe()) << 20) + block + 1)});
            }
        }
        steps.clear();
        device->engine.steps(steps);
        for (const Step& step : steps) {
            const std::uint64_t key = queue_key(device->pe(), *step.queue);
            const std::uint64_t who =
                step.kind == StepKind::take ? 0 : step.operation * 2 + (step.kind == StepKind::report);
            choices_.push_back({device->pe(), -1, step, mix(key ^ mix(who))});
        }
    }
    return choices_;
}

void World::take(std::size_t index) {
    const Choice choice = choices_.at(index);
    Device& device = *devices_[choice.pe];
    if (choice.block < 0) return engine_step(device, choice.step);
    Launch& launch = *device.active();
    Fiber& fiber = *launch.fibers[choice.block];
    fiber.waiting = false;
    CoreScope scope(*launch.cores[choice.block]);
    fiber.resume();
}

void World::engine_step(Device& device, const Step& step) {
    Queue& queue = *step.queue;
    const auto record = [&](const Operation& op, std::uint32_t landed) {
        const bool notifies = op.request.opcode == Opcode::write_notify;
        recent_.push_back({step.kind, device.pe(), queue.target, queue.qp, op.id, op.request.bytes, op.request.odr,
                           notifies, landed, op.chunks});
        if (recent_.size() > kRecent) recent_.pop_front();
    };
    // A finished operation leaves its queue within the step, so what is known of it is noted before; a new one comes.
    if (step.kind != StepKind::take)
        for (const Operation& op : queue.in_flight)
            if (op.id == step.operation) record(op, op.landed + (step.kind == StepKind::land ? 1 : 0));
    const std::uint32_t taken = queue.taken;
    device.engine.take(step);
    if (queue.taken != taken && !queue.in_flight.empty()) record(queue.in_flight.back(), 0);
}

bool World::idle() {
    prepare();
    for (const auto& device : devices_)
        if (device->active()) return false;
    return true;
}

std::size_t World::pick(const std::vector<Choice>& choices) {
    if (strategy_ == Strategy::uniform) return random() % choices.size();
    const bool change = random() % 64 == 0;  // a change point: priorities alone would never revisit a decision
    if (change) return random() % choices.size();
    const std::uint64_t starved =
        mix(seed_ ^ 0x5157) % (std::uint64_t(size()) * size() * devices_[0]->engine.config.qp_num);
    const auto rank = [&](const Choice& c) {
        std::uint64_t priority = mix(c.entity ^ seed_) >> 8;
        const bool core = c.block >= 0;
        if (strategy_ == Strategy::cores_first && core) priority |= 1ull << 60;
        if (strategy_ == Strategy::engines_first && !core) priority |= 1ull << 60;
        if (strategy_ == Strategy::starve_queue && !core) {
            const std::uint64_t qps = devices_[0]->engine.config.qp_num;
            const std::uint64_t index = (std::uint64_t(c.pe) * size() + c.step.queue->target) * qps + c.step.queue->qp;
            priority = index == starved ? 0 : priority | (1ull << 60);
        }
        return priority;
    };
    std::size_t best = 0;
    std::uint64_t best_rank = rank(choices[0]);
    for (std::size_t i = 1; i < choices.size(); ++i)
        if (const auto r = rank(choices[i]); r > best_rank) best = i, best_rank = r;
    return best;
}

void World::step() {
    const auto& choices = enabled();
    if (choices.empty()) {
        // Only waits are left. Let their own time limits end them, once for each nested wait.
        if (++time_jumps_ > kTimeJumps) throw Hang("every core waits and nothing is in flight");
        cycles_ += 1ull << 48;
        ++devices_[0]->engine.version;
        return;
    }
    take(pick(choices));
    if (++steps_ > most_steps) throw Hang("no end after " + std::to_string(steps_) + " steps");
}

std::uint64_t World::run() {
    const std::uint64_t before = steps_;
    while (!idle()) step();
    time_jumps_ = 0;
    return steps_ - before;
}

int World::run_until_done(const std::vector<bool>& wanted) {
    for (;; step()) {
        prepare();
        for (const auto& device : devices_)
            if (wanted[std::size_t(device->pe())] && !device->active()) return device->pe();
    }
}

void World::advance_engines() {
    std::vector<Choice> engines;
    for (const Choice& c : enabled())
        if (c.block < 0) engines.push_back(c);
    if (engines.empty()) throw Hang("a wait that nothing in flight will end");
    const Choice choice = engines[pick(engines)];
    engine_step(*devices_[choice.pe], choice.step);
}

void World::settle() {
    for (;;) {
        std::vector<Choice> engines;
        for (const Choice& c : enabled())
            if (c.block < 0) engines.push_back(c);
        if (engines.empty()) return;
        const Choice choice = engines[pick(engines)];
        engine_step(*devices_[choice.pe], choice.step);
    }
}

std::vector<std::string> World::warnings() const {
    std::vector<std::string> all;
    for (const auto& device : devices_)
        for (const auto& text : device->engine.warnings)
            all.push_back("PE " + std::to_string(device->pe()) + ": " + text);
    return all;
}

}  // namespace hal::udma
