// SPDX-License-Identifier: Apache-2.0
#include "emulation/device.hpp"

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "emulation/world.hpp"

namespace hal::udma {

namespace {
thread_local Core* current_core = nullptr;
}  // namespace

Core& Core::current() {
    if (!current_core) throw std::logic_error("no core is running on this thread");
    return *current_core;
}

CoreScope::CoreScope(Core& core) : previous_(current_core) { current_core = &core; }
CoreScope::~CoreScope() { current_core = previous_; }

bool Launch::finished() const {
    return std::all_of(fibers.begin(), fibers.end(), [](const auto& f) { return f->done; });
}

Device::Device(int pe, std::vector<Heap> heaps, EngineConfig config, World* world)
    : pe_(pe), heaps_(std::move(heaps)), engine(pe, heaps_, config), world_(world) {
    for (auto& queue : engine.queues()) {
        registers_[&queue->doorbell_register] = {queue.get(), false};
        registers_[&queue->cq_doorbell_register] = {queue.get(), true};
    }
}

std::uint64_t Device::to_remote(std::uint64_t address, int pe) const {
    const auto& own = heaps_[pe_].windows;
    for (std::size_t i = 0; i < own.size(); ++i)
        if (own[i].holds(address, 1))
            return reinterpret_cast<std::uint64_t>(heaps_[pe].windows[i].base) +
                   (address - reinterpret_cast<std::uint64_t>(own[i].base));
    throw Fault(4, "not a symmetric address of PE " + std::to_string(pe_));
}

int Device::add_window(const std::vector<Region>& regions) {
    for (std::size_t pe = 0; pe < heaps_.size(); ++pe) heaps_[pe].windows.push_back(regions.at(pe));
    return int(heaps_[0].windows.size()) - 1;
}

void Device::remove_window(int index) {
    for (Heap& heap : heaps_) heap.windows.at(std::size_t(index)) = {};
}

void Device::launch(std::function<void()> kernel, int blocks) {
    auto launch = std::make_unique<Launch>();
    launch->kernel = std::move(kernel);
    launch->blocks = blocks;
    launch->id = ++launches_;
    stream_.push_back(std::move(launch));
    if (world_) return;
    start_front();
    try {
        run(*stream_.front());
    } catch (...) {
        stream_.clear();
        throw;
    }
    retire_front();
}

void Device::start_front() {
    Launch& launch = *stream_.front();
    for (int block = 0; block < launch.blocks; ++block) {
        launch.cores.push_back(std::make_unique<Core>(*this, block, launch.blocks));
        Core* core = launch.cores.back().get();
        launch.fibers.push_back(std::make_unique<Fiber>([core, kernel = launch.kernel] {
            kernel();
            core->pipe_barrier(Pipe::all);
            core->flush_all();
            core->device.changed();
        }));
    }
}

// The cores take turns on this thread; when all of them wait, others get the processor.
void Device::run(Launch& launch) {
    int idle_turns = 0;
    while (!launch.finished()) {
        bool all_wait = true;
        for (int block = 0; block < launch.blocks; ++block) {
            Fiber& fiber = *launch.fibers[block];
            if (fiber.done) continue;
            fiber.waiting = false;
            CoreScope scope(*launch.cores[block]);
            fiber.resume();
            all_wait = all_wait && (fiber.waiting || fiber.done);
        }
        idle_turns = all_wait ? idle_turns + 1 : 0;
        if (!all_wait) continue;
        if (idle_turns < 64)
            sched_yield();
        else if (idle)
            idle(launch);
        else
            std::this_thread::sleep_for(std::chrono::microseconds(std::min(idle_turns, 200)));
    }
}

void Device::pause() {
    Fiber* fiber = Fiber::current();
    if (fiber) {
        fiber->waiting = true;
        if (world_) fiber->seen_version = world_->version();
        Fiber::yield();
    } else if (world_) {
        world_->advance_engines();
    } else {
        throw Hang("a wait on PE " + std::to_string(pe_) + " that nothing will end");
    }
}

void Device::point() {
    if (world_ && Fiber::current()) Fiber::yield();
}

void Device::changed() { ++engine.version; }

bool Device::coin() { return world_ && world_->coin(); }

std::uint64_t Device::cycles() {
    if (world_) return world_->cycles();
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    return static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(now).count()) / 20;
}

void Device::store_register(std::uint64_t value, void* address) {
    const auto it = registers_.find(address);
    if (it == registers_.end()) throw Fault(11, "a device store to an address that is no register");
    auto [queue, completion] = it->second;
    if (completion)
        engine.ring_completion(*queue, static_cast<std::uint32_t>(value));
    else
        engine.ring(*queue, static_cast<std::uint32_t>(value));
    if (landed && !completion) landed(queue->target);
    point();
}

void Device::sync_all(Core& core) {
    core.pipe_barrier(Pipe::all);
    Launch& launch = *stream_.front();
    const std::uint64_t generation = launch.generation;
    if (++launch.arrived == launch.blocks) {
        launch.arrived = 0;
        ++launch.generation;
        changed();
        return;
    }
    while (launch.generation == generation) pause();
}

Core& Device::script_core(int block) {
    while (int(script_cores_.size()) <= block)
        script_cores_.push_back(std::make_unique<Core>(*this, int(script_cores_.size()), 1));
    return *script_cores_[block];
}

}  // namespace hal::udma
