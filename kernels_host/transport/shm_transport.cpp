// SPDX-License-Identifier: Apache-2.0
#include "transport/shm_transport.hpp"

#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <climits>

namespace hal {

void (*check_interrupts)() = [] {};

namespace {

using Clock = std::chrono::steady_clock;

// How long a waiter sleeps before it looks for dead peers: what "at once" means.
constexpr auto kFaultInterval = std::chrono::milliseconds(5);
// With masking, a longer turn than this counts as this long: a rank that was itself stopped does not accuse the others of it.
constexpr double kLongestTurn = 0.1;
constexpr int kInterruptTurns = 10;  // fault intervals between two looks for Ctrl-C

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

void futex_wait(std::atomic<std::uint32_t>& word, std::uint32_t expected, std::chrono::nanoseconds limit) {
    const timespec ts{static_cast<time_t>(limit.count() / 1'000'000'000),
                      static_cast<long>(limit.count() % 1'000'000'000)};
    syscall(SYS_futex, &word, FUTEX_WAIT, expected, &ts, nullptr, 0);
}

// Spinning helps only while every rank has a core of its own.
int spins_for(int world_size) {
    cpu_set_t cores;
    const int count = sched_getaffinity(0, sizeof cores, &cores) == 0 ? CPU_COUNT(&cores) : 1;
    return world_size <= count ? 500 : 20;
}

std::string rank_name(int rank) { return "rank " + std::to_string(rank); }

}  // namespace

ShmTransport::ShmTransport(int rank, int world_size, int queues, std::vector<int> links)
    : Transport(rank, world_size, queues), links_(std::move(links)), spins_(spins_for(world_size)) {
    if (links_.size() != static_cast<std::size_t>(world_size))
        throw ContractViolation("a shared-memory transport needs one link for each of " + std::to_string(world_size) +
                                " ranks, not " + std::to_string(links_.size()));
}

int ShmTransport::map(const std::vector<int>& fds, std::size_t nbytes) {
    if (fds.size() != static_cast<std::size_t>(world_size()))
        throw ContractViolation("a window needs one segment for each rank");
    auto window = std::make_shared<ShmWindow>();
    window->nbytes = nbytes;
    for (const int fd : fds) window->segments.push_back(fd < 0 ? nullptr : std::make_shared<ShmSegment>(fd, nbytes));
    if (windows_.empty()) {
        if (nbytes < sizeof(ControlBlock)) throw ContractViolation("the control window is too small");
        for (const auto& segment : window->segments)
            controls_.push_back(reinterpret_cast<ControlBlock*>(segment->data()));
    }
    windows_.push_back(std::move(window));
    return static_cast<int>(windows_.size()) - 1;
}

void ShmTransport::unmap(int id) {
    window(id);
    if (id == 0) throw ContractViolation("the control window lives as long as its transport");
    windows_[static_cast<std::size_t>(id)].reset();
}

std::shared_ptr<ShmWindow> ShmTransport::window(int id) const {
    if (id < 0 || static_cast<std::size_t>(id) >= windows_.size() || !windows_[static_cast<std::size_t>(id)])
        throw ContractViolation("window " + std::to_string(id) + " does not exist or was freed");
    return windows_[static_cast<std::size_t>(id)];
}

namespace {

std::byte* checked(const ShmWindow& window, int peer, std::size_t offset, std::size_t nbytes) {
    if (peer < 0 || static_cast<std::size_t>(peer) >= window.segments.size())
        throw ContractViolation("there is no rank " + std::to_string(peer) + " among " +
                                std::to_string(window.segments.size()));
    if (nbytes > window.nbytes || offset > window.nbytes - nbytes)
        throw ContractViolation("bytes " + std::to_string(offset) + " to " + std::to_string(offset + nbytes) +
                                " are not within a window of " + std::to_string(window.nbytes) + " bytes");
    const auto& segment = window.segments[static_cast<std::size_t>(peer)];
    if (!segment) throw ContractViolation("rank " + std::to_string(peer) + " was lost before this window was made");
    return segment->data() + offset;
}

std::byte* checked_slot(const ShmWindow& window, int peer, std::size_t offset) {
    if (offset % 8 != 0) throw ContractViolation("a slot must be 8-byte aligned, not at " + std::to_string(offset));
    return checked(window, peer, offset, 8);
}

}  // namespace

void ShmTransport::put(int id, int, int peer, std::size_t dst_offset, const void* src, std::size_t nbytes,
                       Order order) {
    require_usable();
    std::byte* target = checked(*window(id), peer, dst_offset, nbytes);
    if (nbytes != 0) shm_put(target, src, nbytes, order);
}

void ShmTransport::signal(int id, int, int peer, std::size_t slot_offset, std::uint64_t value, SignalOp op, Order) {
    require_usable();
    shm_signal(checked_slot(*window(id), peer, slot_offset), value, op);
    ring(peer);
}

std::uint64_t ShmTransport::wait(int id, std::size_t slot_offset, std::uint64_t at_least, int source, int queue,
                                 const std::string& stage, double timeout) {
    const auto held = window(id);  // another thread may free the window meanwhile
    const std::byte* slot = checked_slot(*held, rank(), slot_offset);
    if (!masking_) return await(slot, at_least, source, queue, stage.c_str(), timeout, nullptr);
    // Here a rank that is lost matters only if it is the one that is waited for.
    const auto start = Clock::now();
    while (true) {
        const Members members = newest_view();
        require_member(members);
        const std::uint64_t seen = shm_load(slot);
        if (source >= 0 && is_lost(members, source) && seen < at_least)
            throw PeerTimeoutError(source, stage, queue, at_least, seen, seconds_since(start), "it is masked");
        try {
            return await(slot, at_least, source, queue, stage.c_str(), timeout - seconds_since(start), &members);
        } catch (const PeerTimeoutError&) {
            const Members later = newest_view();
            if (later.view == members.view || source < 0 || is_lost(later, source)) throw;
        }
    }
}

void ShmTransport::quiet(int, int, QuietScope scope) {
    require_usable();
    if (scope == QuietScope::remote) std::atomic_thread_fence(std::memory_order_seq_cst);
}

void ShmTransport::wake(ControlBlock& block) {
    block.bell.fetch_add(1, std::memory_order_seq_cst);
    syscall(SYS_futex, &block.bell, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void ShmTransport::publish(RankState state, int fault_rank, const std::string& reason) {
    if (controls_.empty() || own().state.load(std::memory_order_relaxed) != RankState::running) return;
    own().fault_rank.store(fault_rank, std::memory_order_relaxed);
    own().reason.store(reason);
    own().state.store(state, std::memory_order_release);
    for (ControlBlock* block : controls_) wake(*block);  // sleepers look for faults when they wake
}

void ShmTransport::publish_closed() { publish(RankState::closed, rank(), ""); }

void ShmTransport::publish_failed(int fault_rank, const std::string& reason) {
    publish(RankState::failed, fault_rank, reason);
}

// A rank publishes its end before it closes its links, so they are looked at before its state is.
std::vector<bool> ShmTransport::gone_links() const {
    std::vector<pollfd> polls;
    for (const int link : links_) polls.push_back({link, POLLRDHUP, 0});  // poll skips negative descriptors
    std::vector<bool> gone(links_.size());
    if (poll(polls.data(), polls.size(), 0) < 0) return gone;
    for (std::size_t p = 0; p < polls.size(); ++p) gone[p] = (polls[p].revents & (POLLRDHUP | POLLHUP | POLLERR)) != 0;
    return gone;
}

std::optional<std::pair<int, std::string>> ShmTransport::find_fault(int source, const Members* members) {
    const std::vector<bool> gone_links_now = gone_links();
    std::optional<std::pair<int, std::string>> dead;
    for (int peer = 0; peer < world_size(); ++peer) {
        if (peer == rank() || (members && is_lost(*members, peer))) continue;
        const ControlBlock& block = *controls_[static_cast<std::size_t>(peer)];
        const bool gone = gone_links_now[static_cast<std::size_t>(peer)];
        const RankState state = block.state.load(std::memory_order_acquire);
        if (state == RankState::failed) {
            const int root = members ? peer : block.fault_rank.load(std::memory_order_relaxed);
            if (root == rank()) return {{peer, "gave up on this rank: " + block.reason.load()}};
            return {{root, block.reason.load()}};
        }
        if (state == RankState::running && gone && !dead) dead = {{peer, "its process died"}};
        if (state == RankState::closed && peer == source) return {{peer, "closed its communicator"}};
    }
    return dead;
}

// When nobody in particular was awaited: the ranks that wait for nobody are the ones that could have signalled.
std::pair<int, std::string> ShmTransport::root_among_all() const {
    int root = -1;
    std::string busy;
    for (int peer = 0; peer < world_size(); ++peer) {
        const ControlBlock& block = *controls_[static_cast<std::size_t>(peer)];
        if (peer == rank() || !block.waits_for_nobody()) continue;
        if (root < 0) root = peer;
        busy += (busy.empty() ? "" : ", ") + rank_name(peer);
    }
    if (root < 0) return {rank(), "no signal: every rank waits"};
    return {root, "no signal (not waiting themselves: " + busy + ")"};
}

// The rank at the end of the chain of waits that begins at `from`, which waits for no other, and the chain in words. Nothing
// if the chain only comes back to `visited`, which `circle` then says. Of several threads' waits the one that has lasted
// longest is followed first: the others may be about to end.
std::optional<std::pair<int, std::string>> ShmTransport::end_of_chain(int from, std::set<int>& visited,
                                                                      const std::string& through,
                                                                      std::string& circle) const {
    visited.insert(from);
    struct Link {
        std::uint64_t since;
        int next;
        std::string stage;
    };
    std::vector<Link> links;
    for (const Wait& wait : controls_[static_cast<std::size_t>(from)]->waits)
        if (const int next = wait.source_plus_2.load(std::memory_order_acquire) - 2; next >= 0)
            links.push_back({wait.since.load(std::memory_order_relaxed), next, wait.stage.load()});
    if (links.empty()) return {{from, through}};
    std::sort(links.begin(), links.end(), [](const Link& a, const Link& b) { return a.since < b.since; });
    for (const Link& link : links) {
        const std::string so_far = through + (through.empty() ? "" : ", ") + rank_name(from) + " waits for " +
                                   rank_name(link.next) + " in stage '" + link.stage + "'";
        if (visited.count(link.next) != 0) {
            if (circle.empty()) circle = so_far;
        } else if (auto end = end_of_chain(link.next, visited, so_far, circle)) {
            return end;
        }
    }
    return std::nullopt;
}

std::pair<int, std::string> ShmTransport::root_of_stall(int source, const Members* members) const {
    if (source < 0) {
        auto root = root_among_all();
        if (members && is_lost(*members, root.first)) root = {source, "no answer"};
        return root;
    }
    std::set<int> visited{rank()};
    std::string circle;
    const auto end = end_of_chain(source, visited, "", circle);
    if (!end) return {source, "no answer: the ranks wait for each other (" + circle + ")"};
    if (end->second.empty() || (members && is_lost(*members, end->first))) return {source, "no answer"};
    return {end->first, "no answer: " + end->second};
}

// --- masking

Members ShmTransport::newest_view() const {
    Members members;
    const auto& lost = views().lost;
    while (members.view + 1 < lost.size()) {
        const std::uint64_t next = lost[members.view + 1].load(std::memory_order_acquire);
        if (next == 0) break;
        members = {members.view + 1, next};
    }
    return members;
}

void ShmTransport::require_member(const Members& view) {
    if (!is_lost(view, rank())) return;
    set_failed();
    std::uint64_t first = view.view;  // the view that left this rank out
    while (first > 1 && (views().lost[first - 1].load(std::memory_order_acquire) & rank_bit(rank()))) --first;
    throw MaskedError(rank(), views().by_plus_one[first].load(std::memory_order_acquire) - 1);
}

std::uint64_t ShmTransport::ended_ranks() const {
    const std::vector<bool> gone = gone_links();
    std::uint64_t ended = 0;
    for (int peer = 0; peer < world_size(); ++peer) {
        if (peer == rank()) continue;
        const RankState state = controls_[static_cast<std::size_t>(peer)]->state.load(std::memory_order_acquire);
        if (gone[static_cast<std::size_t>(peer)] || state != RankState::running) ended |= rank_bit(peer);
    }
    return ended;
}

Members ShmTransport::leave_out(std::uint64_t view, int suspect) {
    Members now = newest_view();
    if (now.view <= view) {
        std::uint64_t lost = now.lost | ended_ranks();
        if (suspect >= 0) lost |= rank_bit(suspect);
        lost &= ~rank_bit(rank());
        if (lost != now.lost) {
            std::uint64_t undecided = 0;
            if (views().lost[now.view + 1].compare_exchange_strong(undecided, lost, std::memory_order_seq_cst))
                views().by_plus_one[now.view + 1].store(rank() + 1, std::memory_order_release);
            for (ControlBlock* block : controls_) wake(*block);  // waits of the old view end
        }
        now = newest_view();
    }
    require_member(now);
    return now;
}

std::uint64_t ShmTransport::peer_word(int id, int peer, std::size_t offset) const {
    return shm_load(checked_slot(*window(id), peer, offset));
}

std::uint64_t ShmTransport::await_sleeping(const std::byte* slot, std::uint64_t at_least, int source, int queue,
                                           const char* stage, double timeout, const Members* members) {
    require_usable();
    // Says what this thread waits for, and counts it as a sleeper, for as long as it is in here.
    const Announcement announcement(own(), source < 0 ? kWaitingForAny : source, stage);
    struct Sleeper {
        std::atomic<std::uint32_t>& count;
        explicit Sleeper(std::atomic<std::uint32_t>& c) : count(c) { count.fetch_add(1, std::memory_order_seq_cst); }
        ~Sleeper() { count.fetch_sub(1, std::memory_order_seq_cst); }
    } sleeper(own().sleepers);

    const auto start = Clock::now();
    auto before = start;
    double waited = 0;
    const auto fail = [&](std::pair<int, std::string> fault) -> PeerTimeoutError {
        check_interrupts();  // a Ctrl-C for all ranks is no peer's fault
        if (!members) {
            set_failed();
            publish_failed(fault.first, fault.second);
        }
        return {fault.first, stage, queue, at_least, shm_load(slot), seconds_since(start), fault.second};
    };
    auto next_fault_check = start + std::chrono::milliseconds(1);
    const double limit_given = timeout;
    std::optional<int> suspect;
    int looks = 0;
    for (unsigned turn = 0;; ++turn) {
        // The clock is read before the slot: a thread that was not run for long gives up only after a look at what came.
        const auto now = Clock::now();
        const std::uint32_t bell = own().bell.load(std::memory_order_seq_cst);
        std::uint64_t seen = shm_load(slot);
        if (seen >= at_least) return seen;

        if (now >= next_fault_check) {
            next_fault_check = now + kFaultInterval;
            const Members latest = members ? newest_view() : Members{};
            auto fault = find_fault(source, members);
            seen = shm_load(slot);  // it may have signalled before it ended
            if (seen >= at_least) return seen;
            if (members && latest.view > members->view) {
                require_member(latest);
                const std::uint64_t newly = latest.lost & ~members->lost;
                fault = {std::countr_zero(newly), "the others go on without it"};
            }
            if (fault) throw fail(*fault);
        }
        const double turn_seconds = std::chrono::duration<double>(now - before).count();
        waited += members ? std::min(turn_seconds, kLongestTurn) : turn_seconds;
        before = now;
        double left = timeout - waited;
        if (left <= 0) {
            // In this order: a relay whose own time was up just now publishes its fault before it stops to wait.
            const auto root = root_of_stall(source, members);
            if (!members || root.first == suspect || ++looks > world_size())
                throw fail(find_fault(source, members).value_or(root));
            suspect = root.first;
            timeout = waited + second_look(limit_given);
            left = timeout - waited;
        }
        if (turn % kInterruptTurns == kInterruptTurns - 1) check_interrupts();
        const auto limit =
            std::min(std::chrono::duration<double>(left), std::chrono::duration<double>(next_fault_check - now));
        futex_wait(own().bell, bell, std::chrono::duration_cast<std::chrono::nanoseconds>(limit));
    }
}

}  // namespace hal
