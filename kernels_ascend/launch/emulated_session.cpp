// SPDX-License-Identifier: Apache-2.0
#include "launch/emulated_session.hpp"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "launch/ep_host.hpp"

namespace hal::ascend {

namespace {

// How long the cores sleep at most before they look again, and how often they look for dead peers.
constexpr long kNapNanoseconds = 1'000'000;
constexpr auto kLookInterval = std::chrono::milliseconds(5);

std::unique_ptr<udma::Device> make_device(const ShmTransport& transport, const SessionOptions& options) {
    udma::EngineConfig config;
    // Completion without entries has two queues of its own: the public interface's counters never meet them.
    config.qp_num = std::uint32_t(options.queues) + 2;
    config.sq_depth = options.sq_depth;
    config.cq_depth = options.cq_depth;
    return std::make_unique<udma::Device>(transport.rank(),
                                          std::vector<udma::Heap>(std::size_t(transport.world_size())), config);
}

}  // namespace

EmulatedSession::EmulatedSession(ShmTransport& transport, SessionOptions options)
    : EmulatedSession(transport, options, make_device(transport, options)) {}

EmulatedSession::EmulatedSession(ShmTransport& transport, SessionOptions options, std::unique_ptr<udma::Device> device)
    : EmulatedRuntime(*device), transport_(transport), options_(options), emulated_(std::move(device)) {
    held_.push_back(transport_.window(0));  // the control pages
    emulated_->idle = [this](udma::Launch& launch) { idle(launch); };
    emulated_->landed = [this](int pe) {
        for (int p = pe < 0 ? 0 : pe; p < (pe < 0 ? transport_.world_size() : pe + 1); ++p)
            if (p != transport_.rank()) transport_.ring(p);
    };
}

EmulatedSession::~EmulatedSession() = default;

ControlBlock& EmulatedSession::control(int rank) {
    return *reinterpret_cast<ControlBlock*>(held_[0]->segments[std::size_t(rank)]->data());
}

std::uint64_t EmulatedSession::attach(int window) {
    auto held = transport_.window(window);
    std::vector<udma::Region> regions;
    for (const auto& segment : held->segments) regions.push_back({segment->data(), held->nbytes});
    windows_.emplace_back(window, emulated_->add_window(regions));
    held_.push_back(held);
    return reinterpret_cast<std::uint64_t>(held->segments[std::size_t(transport_.rank())]->data());
}

void EmulatedSession::detach(int window) {
    const auto held = transport_.window(window);
    std::erase(held_, held);
    for (const auto& [id, index] : windows_)
        if (id == window) emulated_->remove_window(index);
    std::erase_if(windows_, [&](const auto& w) { return w.first == window; });
}

// Every core waits: say for whom, sleep until a peer's signal rings, and see now and then whether a peer is dead.
void EmulatedSession::idle(udma::Launch& launch) {
    const udma::Core::Awaited* awaited = nullptr;
    for (const auto& core : launch.cores)
        if (core->awaited.address && (!awaited || core->awaited.source >= 0)) awaited = &core->awaited;
    if (!awaited) return;
    ControlBlock& own = control(transport_.rank());
    Announcement announcement(own, awaited->source < 0 ? kWaitingForAny : awaited->source,
                              wait_stage_name(awaited->stage));
    const std::uint32_t bell = own.bell.load(std::memory_order_seq_cst);
    own.sleepers.fetch_add(1, std::memory_order_seq_cst);
    bool come = false;
    for (const auto& core : launch.cores)
        if (core->awaited.address)
            come = come || __atomic_load_n(reinterpret_cast<const std::uint64_t*>(core->awaited.address),
                                           __ATOMIC_SEQ_CST) >= core->awaited.at_least;
    if (!come) {
        const timespec nap{0, kNapNanoseconds};
        syscall(SYS_futex, &own.bell, FUTEX_WAIT, bell, &nap, nullptr, 0);
    }
    own.sleepers.fetch_sub(1, std::memory_order_seq_cst);
    announcement.end();
    const auto now = std::chrono::steady_clock::now();
    if (come || now < next_look_) return;
    next_look_ = now + kLookInterval;
    for (const auto& core : launch.cores) {
        const auto& waits = core->awaited;
        if (!waits.address) continue;
        const auto fault = transport_.find_fault(waits.source);
        const std::uint64_t seen =
            __atomic_load_n(reinterpret_cast<const std::uint64_t*>(waits.address), __ATOMIC_SEQ_CST);
        if (!fault || seen >= waits.at_least) continue;  // it may have signalled before it ended
        mark_failed(fault->first, fault->second);
        throw PeerTimeoutError(fault->first, wait_stage_name(waits.stage), waits.queue, waits.at_least, seen, 0.0,
                               fault->second);
    }
}

void EmulatedSession::launch(Kernel kernel, std::uint64_t args, int cores) {
    transport_.require_usable();
    EmulatedRuntime::launch(kernel, args, cores);
}

std::pair<int, std::string> EmulatedSession::root_of_stall(int rank) { return transport_.root_of_stall(rank); }

void EmulatedSession::mark_failed(int rank, const std::string& reason) {
    transport_.set_failed();
    transport_.publish_failed(rank, reason);
}

std::uint64_t EmulatedSession::run(PrimitiveArgs args) {
    args.queues = options_.queues;
    launch(Kernel::primitive, reinterpret_cast<std::uint64_t>(&args), 1);
    return args.value;
}

void EmulatedSession::put(std::uint64_t dst, std::uint64_t src, std::uint64_t bytes, int peer, int queue, Order order) {
    PrimitiveArgs a{};
    a.kind = Primitive::put;
    a.peer = peer, a.queue = queue, a.order = std::uint32_t(order);
    a.dst = dst, a.src = src, a.bytes = bytes;
    run(a);
}

void EmulatedSession::signal(std::uint64_t slot, std::uint64_t value_at, int peer, std::uint64_t value, SignalOp op,
                             int queue, Order order) {
    PrimitiveArgs a{};
    a.kind = op == SignalOp::add ? Primitive::signal_add : Primitive::signal_set;
    a.peer = peer, a.queue = queue, a.order = std::uint32_t(order);
    a.dst = slot, a.src = value_at, a.bytes = 8, a.value = value;
    run(a);
    if (peer == transport_.rank()) transport_.ring(peer);
}

std::uint64_t EmulatedSession::wait(std::uint64_t slot, std::uint64_t at_least, int source, double timeout) {
    PrimitiveArgs a{};
    a.kind = Primitive::wait;
    a.dst = slot, a.at_least = at_least, a.source = source;
    a.timeout_cycles = std::uint64_t(timeout * double(cycles_per_second()));
    const std::uint64_t seen = run(a);
    if (seen >= at_least) return seen;
    const auto [root, reason] = root_of_stall(source);
    mark_failed(root, reason);
    throw PeerTimeoutError(root, "wait", 0, at_least, seen, timeout, reason);
}

void EmulatedSession::quiet(int queue, int peer) {
    PrimitiveArgs a{};
    a.kind = Primitive::quiet;
    a.queue = queue, a.peer = peer;
    run(a);
}

}  // namespace hal::ascend
