// SPDX-License-Identifier: Apache-2.0
#include "emulation/nic.hpp"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>

#include "../software_nic/clock.hpp"

namespace hal::cuda::emulation {
namespace {

constexpr std::size_t kBounce = 16u << 20;

swnic::Address address(const std::byte* at) { return reinterpret_cast<swnic::Address>(at); }

// The flow holds regions only to keep memory mapped.
std::shared_ptr<swnic::MemoryRegion> hold(const std::shared_ptr<const void>& keep) {
    return {std::const_pointer_cast<void>(keep), nullptr};
}

// The signal's word travels as its address: source and target are mapped here.
bool raise(int, const swnic::SignalEntry& entry) {
    // Release: whoever sees it sees the data that the flow delivered before.
    __atomic_fetch_add(reinterpret_cast<std::uint64_t*>(entry.offset), entry.add, __ATOMIC_RELEASE);
    return true;
}

}  // namespace

Nic::Nic(int world, int rank, int queues)
    : world_(world), rank_(rank), held_(static_cast<std::size_t>(world * queues)),
      open_(static_cast<std::size_t>(queues)) {
    swnic::Config config = swnic::Config::from_environment();
    if (std::getenv("HAL_SWNIC_FAULTS") == nullptr) config.faults = kDefaultFaults;
    for (int queue = 0; queue < queues; ++queue)
        for (int peer = 0; peer < world; ++peer) {
            const swnic::FlowId id{rank, peer, queue};
            const swnic::FlowFaults faults = swnic::parse_faults(config.faults, id);
            flows_.push_back(std::make_unique<swnic::Flow>(id, swnic::FaultPolicy(faults, config.seed, id),
                                                           swnic::host_device()->make_lane(kBounce), config.queue_depth,
                                                           raise));
        }
    thread_ = std::thread([this] { serve(); });
}

void Nic::stop(double seconds) {
    if (!thread_.joinable()) return;
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
    while (!idle() && std::chrono::steady_clock::now() < deadline)
        std::this_thread::sleep_for(std::chrono::microseconds(200));
    {
        const std::lock_guard lock(mutex_);
        stop_.store(true);
    }
    changed_.notify_all();
    thread_.join();
}

bool Nic::idle() const {
    return std::all_of(flows_.begin(), flows_.end(), [](const auto& flow) { return flow->idle(); });
}

void Nic::put(int queue, int peer, Span to, Span from, std::size_t bytes, std::optional<Signal> signal, bool more) {
    swnic::Operation operation{};
    operation.copy = {address(to.at), address(from.at), bytes, true, true, false};
    operation.source = hold(from.keep), operation.target = hold(to.keep);
    post(queue, peer, std::move(operation), std::move(signal), nullptr, more);
}

void Nic::put_value(int queue, int peer, Span to, std::uint64_t value, std::size_t bytes, std::optional<Signal> signal,
                    bool more) {
    swnic::Operation operation{};
    operation.copy = {address(to.at), 0, bytes, true, true, false};
    operation.target = hold(to.keep);
    post(queue, peer, std::move(operation), std::move(signal), &value, more);
}

void Nic::signal(int queue, int peer, Signal signal) { post(queue, peer, {}, std::move(signal), nullptr, false); }

void Nic::get(int queue, int peer, Span from, Span to, std::size_t bytes) {
    swnic::Operation operation{};
    operation.copy = {address(to.at), address(from.at), bytes, true, true, false};
    operation.source = hold(from.keep), operation.target = hold(to.keep), operation.get = true;
    post(queue, peer, std::move(operation), std::nullopt, nullptr, false);
}

void Nic::post(int queue, int peer, swnic::Operation operation, std::optional<Signal> signal,
               const std::uint64_t* value, bool more) {
    operation.queue = queue, operation.peer = peer;
    if (signal) {
        const swnic::SignalEntry entry{address(signal->word.at), signal->add, 0, static_cast<std::uint32_t>(rank_)};
        operation.signal = swnic::Signal{entry, signal->strong, true};
        // One holder for the put's window and the signal's.
        using Both = std::pair<std::shared_ptr<const void>, std::shared_ptr<const void>>;
        operation.target = hold(std::make_shared<Both>(operation.target, signal->word.keep));
    }
    const std::lock_guard lock(mutex_);
    auto& open = open_[static_cast<std::size_t>(queue)];
    while (!open.empty() && open.front().request.state.load() == swnic::RequestState::done) open.pop_front();
    Posted& posted = open.emplace_back();
    posted.number = next_++, posted.peer = peer;
    if (value != nullptr) {
        posted.value = *value;
        operation.copy.src = reinterpret_cast<swnic::Address>(&posted.value);
    }
    operation.request = &posted.request;
    operation.posted = swnic::now_ns();
    auto& held = held_[index(queue, peer)];
    held.push_back(std::move(operation));
    if (more) return;
    for (swnic::Operation& one : held) {
        flows_[index(queue, peer)]->note_posted(one);
        posted_.push_back(std::move(one));
    }
    held.clear();
    changed_.notify_all();
}

std::uint64_t Nic::now() {
    const std::lock_guard lock(mutex_);
    return next_;
}

int Nic::unread(int queue, std::uint64_t below) {
    const std::lock_guard lock(mutex_);
    auto& open = open_[static_cast<std::size_t>(queue)];
    for (auto it = open.begin(); it != open.end() && it->number < below;) {
        if (it->request.state.load(std::memory_order_acquire) != swnic::RequestState::done) return it->peer;
        it = open.erase(it);
    }
    return -1;
}

void Nic::serve() {
    std::vector<swnic::Operation> taken;
    auto pause = std::chrono::microseconds(0);
    while (!stop_.load()) {
        taken.clear();
        {
            std::unique_lock lock(mutex_);
            // Spurious wake-ups and the time limit are harmless: the loop looks at everything again.
            if (posted_.empty() && !stop_.load()) {
                if (idle())
                    changed_.wait(lock, [&] { return stop_.load() || !posted_.empty(); });
                else if (pause.count() > 0)
                    changed_.wait_for(lock, pause, [&] { return stop_.load() || !posted_.empty(); });
            }
            taken.swap(posted_);
        }
        for (swnic::Operation& operation : taken)
            flows_[index(operation.queue, operation.peer)]->post(std::move(operation));
        bool moved = !taken.empty();
        for (auto& flow : flows_)
            if (!flow->idle()) moved |= flow->advance(swnic::now_ns());
        pause = moved ? std::chrono::microseconds(0)
                      : std::min(pause + std::chrono::microseconds(10), std::chrono::microseconds(200));
    }
}

}  // namespace hal::cuda::emulation
