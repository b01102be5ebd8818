// SPDX-License-Identifier: Apache-2.0
// Shared memory between the ranks of one machine. Every rank maps every peer's part of each window, so a put is a memcpy
// and a signal an atomic add. How the descriptors get here is backends/hal_host/shm.py's business.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "hal/members.hpp"
#include "transport/control_block.hpp"
#include "transport/shm_segment.hpp"
#include "transport/transport.hpp"

namespace hal {

// Memory operations on mapped windows, shared by ShmTransport (windows by id) and ShmFabric (one window).
inline void shm_put(std::byte* target, const void* src, std::size_t nbytes, Order order) {
    // A strong put may not become visible before what was put before it.
    if (order == Order::strong) std::atomic_thread_fence(std::memory_order_release);
    if (nbytes == 8 && reinterpret_cast<std::uintptr_t>(target) % 8 == 0) {
        // An aligned word is never seen torn: protocols use an 8-byte strong put as a signal.
        std::uint64_t word;
        std::memcpy(&word, src, 8);
        std::atomic_ref<std::uint64_t>(*reinterpret_cast<std::uint64_t*>(target))
            .store(word, std::memory_order_relaxed);
        return;
    }
    std::memcpy(target, src, nbytes);
}

// Sequentially consistent, so release is included, and the bell's rule (control_block.hpp) holds. A relaxed signal asks
// for less; more is always allowed.
inline void shm_signal(std::byte* target, std::uint64_t value, SignalOp op) {
    std::atomic_ref<std::uint64_t> slot(*reinterpret_cast<std::uint64_t*>(target));
    if (op == SignalOp::add)
        slot.fetch_add(value, std::memory_order_seq_cst);
    else
        slot.store(value, std::memory_order_seq_cst);
}

inline std::uint64_t shm_load(const std::byte* slot) {
    auto* word = const_cast<std::uint64_t*>(reinterpret_cast<const std::uint64_t*>(slot));
    return std::atomic_ref<std::uint64_t>(*word).load(std::memory_order_acquire);
}

inline void cpu_pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// With masking, seconds after the time limit `timeout` at which a rank is blamed if it is to blame then as well: one whose own
// time was up just now, or to which an answer just came, is about to say so.
inline double second_look(double timeout) { return std::min(1.0, timeout / 4); }

class ShmTransport : public Transport {
  public:
    // `links[p]` is a connected socket to rank p (-1 for this rank), owned by the caller and kept open: its end of file
    // is how a peer's death is noticed.
    ShmTransport(int rank, int world_size, int queues, std::vector<int> links);

    // Windows. `fds[r]` is rank r's segment (-1: none, the rank is lost); descriptors stay the caller's. The first window mapped is the control window
    // (one ControlBlock for each rank); waits and signals need it.
    int map(const std::vector<int>& fds, std::size_t nbytes);
    void unmap(int window);
    std::shared_ptr<ShmWindow> window(int id) const;

    void put(int window, int queue, int peer, std::size_t dst_offset, const void* src, std::size_t nbytes,
             Order order) override;
    void signal(int window, int queue, int peer, std::size_t slot_offset, std::uint64_t value, SignalOp op,
                Order order) override;
    std::uint64_t wait(int window, std::size_t slot_offset, std::uint64_t at_least, int source, int queue,
                       const std::string& stage, double timeout) override;
    void quiet(int queue, int peer, QuietScope scope) override;

    // Wakes a peer that sleeps in a wait. One load when it does not.
    void ring(int peer) {
        ControlBlock& block = *controls_[static_cast<std::size_t>(peer)];
        if (block.sleepers.load(std::memory_order_seq_cst) != 0) wake(block);
    }
    // Spins briefly, then sleeps until the slot reaches `at_least`, a peer is found dead, or the time is up. With `members`,
    // lost ranks no longer count, a failed wait stays between this rank and its caller, and a later view ends the wait.
    std::uint64_t await(const std::byte* slot, std::uint64_t at_least, int source, int queue, const char* stage,
                        double timeout, const Members* members) {
        for (int spin = 0; spin < spins_; ++spin) {
            const std::uint64_t seen = shm_load(slot);
            if (seen >= at_least) return seen;
            cpu_pause();
        }
        return await_sleeping(slot, at_least, source, queue, stage, timeout, members);
    }

    // Tells the peers: this rank ended well, or badly and through whose fault. The first word stands.
    void publish_closed();
    void publish_failed(int fault_rank, const std::string& reason);

    // The dead, failed or (if it is `source`) closed rank that ends every wait now, if any; `members` as in await.
    std::optional<std::pair<int, std::string>> find_fault(int source, const Members* members = nullptr);
    // The rank at the end of the chain of waits that begins at `source`, and why; with `members`, of those that are left.
    std::pair<int, std::string> root_of_stall(int source, const Members* members = nullptr) const;

    // Masking (on_peer_loss = mask). Once switched on, the communicator's own waits survive a lost rank too.
    void mask_lost_ranks() { masking_ = true; }
    // The newest view that was decided.
    Members newest_view() const;
    // Who is left after `view` in which `suspect` (-1 = nobody in particular) did not answer: a later view if there is one,
    // else the one that this call decides, without the suspect and without all that have ended. The same view if nobody is
    // to blame. Throws MaskedError if this rank is the one that the others left out.
    Members leave_out(std::uint64_t view, int suspect);
    void require_member(const Members& view);
    // The word at `offset` of a peer's part of a window; a rank that has ended writes it no more.
    std::uint64_t peer_word(int window, int peer, std::size_t offset) const;
    bool has_ended(int peer) const { return (ended_ranks() & rank_bit(peer)) != 0; }
    // Says what the calling thread waits for, outside of await, until the result is destroyed.
    std::unique_ptr<Announcement> announce(int source, const std::string& stage) {
        return std::make_unique<Announcement>(own(), source, stage);
    }

  private:
    std::uint64_t await_sleeping(const std::byte* slot, std::uint64_t at_least, int source, int queue,
                                 const char* stage, double timeout, const Members* members);
    // Links whose other end is gone, by rank.
    std::vector<bool> gone_links() const;
    std::uint64_t ended_ranks() const;
    ViewBoard& views() const { return controls_[0]->views; }
    std::pair<int, std::string> root_among_all() const;
    std::optional<std::pair<int, std::string>> end_of_chain(int from, std::set<int>& visited,
                                                            const std::string& through, std::string& circle) const;
    void publish(RankState state, int fault_rank, const std::string& reason);
    static void wake(ControlBlock& block);
    ControlBlock& own() { return *controls_[static_cast<std::size_t>(rank())]; }

    std::vector<int> links_;
    int spins_;
    bool masking_ = false;
    std::vector<std::shared_ptr<ShmWindow>> windows_;
    std::vector<ControlBlock*> controls_;
};

}  // namespace hal
