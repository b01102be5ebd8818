// SPDX-License-Identifier: Apache-2.0
// Fabrics whose ranks are threads of one process, for tests. `lazy` ones keep every put back until the contract forces
// it (a strong operation of its queue, or quiet), and deliver relaxed ones in a shuffled order: a kernel that relies on
// more than the contract fails on them.
#pragma once
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "hal/fabric.hpp"

namespace hal::ep {

// The windows of all ranks.
struct ThreadWorld {
    ThreadWorld(int ranks_, int queues_, std::size_t nbytes_, double timeout_, bool lazy_)
        : ranks(ranks_), queues(queues_), nbytes(nbytes_), timeout(timeout_), lazy(lazy_) {
        for (int r = 0; r < ranks; ++r)
            windows.emplace_back(static_cast<std::byte*>(::operator new(nbytes, std::align_val_t(4096))));
        for (auto& w : windows) std::memset(w.get(), 0, nbytes);
    }
    struct Free {
        void operator()(std::byte* p) const { ::operator delete(p, std::align_val_t(4096)); }
    };
    const int ranks, queues;
    const std::size_t nbytes;
    double timeout;  // seconds; bounds every wait that begins from now on
    const bool lazy;
    std::vector<std::unique_ptr<std::byte, Free>> windows;
};

class ThreadFabric {
  public:
    ThreadFabric(std::shared_ptr<ThreadWorld> world, int rank)
        : world_(std::move(world)), rank_(rank), random_(std::uint32_t(rank)),
          pending_(std::size_t(world_->ranks * world_->queues)) {}

    int rank() const { return rank_; }
    int world_size() const { return world_->ranks; }
    int queues() const { return world_->queues; }
    std::size_t size() const { return world_->nbytes; }

    const std::byte* read(std::size_t offset, std::size_t nbytes) { return at(rank_, offset, nbytes); }
    std::byte* write(std::size_t offset, std::size_t nbytes) { return at(rank_, offset, nbytes); }

    void put(int queue, int peer, std::size_t dst, const void* src, std::size_t nbytes, Order order) {
        if (nbytes == 0) return;
        const Operation op{at(peer, dst, nbytes), src, nbytes, 0, SignalOp::set};
        if (!world_->lazy || peer == rank_) return deliver(op);
        if (order == Order::strong) flush(queue, peer);
        queue_of(queue, peer).push_back(op);
    }
    void signal(int queue, int peer, std::size_t slot, std::uint64_t value, SignalOp kind, Order order) {
        if (world_->lazy && order == Order::strong) flush(queue, peer);
        deliver({at(peer, slot, 8), nullptr, 8, value, kind});
    }
    std::uint64_t wait(std::size_t slot, std::uint64_t at_least, int source, int queue, const char* stage) {
        const auto start = std::chrono::steady_clock::now();
        auto word = std::atomic_ref<std::uint64_t>(*reinterpret_cast<std::uint64_t*>(at(rank_, slot, 8)));
        for (;;) {
            // Before the word is read: a thread that was not run for long gives up only after a look at what came.
            const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - start;
            const std::uint64_t seen = word.load(std::memory_order_acquire);
            if (seen >= at_least) return seen;
            std::this_thread::yield();
            if (waited.count() > world_->timeout)
                throw PeerTimeoutError(source, stage, queue, at_least, seen, waited.count(), "no answer");
        }
    }
    // Quiet at the source lets the source go and promises nothing of the target, so a lazy fabric keeps a copy back.
    void quiet(int queue, int peer, QuietScope scope) {
        for (int p = 0; p < world_->ranks; ++p) {
            if (peer >= 0 && p != peer) continue;
            if (scope == QuietScope::remote)
                flush(queue, p);
            else
                for (Operation& op : queue_of(queue, p)) op.release_source();
        }
    }

  private:
    struct Operation {
        std::byte* target;
        const void* source;  // null: a signal
        std::size_t nbytes;
        std::uint64_t value;
        SignalOp kind;
        std::vector<std::byte> copy = {};

        void release_source() {
            if (!copy.empty()) return;
            const auto* bytes = static_cast<const std::byte*>(source);
            copy.assign(bytes, bytes + nbytes);
            source = copy.data();
        }
    };
    std::byte* at(int rank, std::size_t offset, std::size_t nbytes) const {
        if (offset + nbytes > world_->nbytes) throw ContractViolation("access past the window's end");
        return world_->windows[std::size_t(rank)].get() + offset;
    }
    std::vector<Operation>& queue_of(int queue, int peer) {
        return pending_[std::size_t(queue * world_->ranks + peer)];
    }
    void flush(int queue, int peer) {
        std::vector<Operation>& ops = queue_of(queue, peer);
        // Queues are independent, so now and then another one than the first is late enough to be overtaken.
        if (world_->lazy && queue > 0 && random_() % 8 == 0)
            std::this_thread::sleep_for(std::chrono::microseconds(200));
        std::shuffle(ops.begin(), ops.end(), random_);
        for (const Operation& op : ops) deliver(op);
        ops.clear();
    }
    static void deliver(const Operation& op) {
        if (op.source) {
            std::memcpy(op.target, op.source, op.nbytes);
            return;
        }
        auto word = std::atomic_ref<std::uint64_t>(*reinterpret_cast<std::uint64_t*>(op.target));
        if (op.kind == SignalOp::set)
            word.store(op.value, std::memory_order_release);
        else
            word.fetch_add(op.value, std::memory_order_release);
    }

    std::shared_ptr<ThreadWorld> world_;
    const int rank_;
    std::mt19937 random_;
    std::vector<std::vector<Operation>> pending_;
};

}  // namespace hal::ep
