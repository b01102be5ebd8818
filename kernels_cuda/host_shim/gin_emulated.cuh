// SPDX-License-Identifier: Apache-2.0
// The requests of gin.cuh, given to the emulated network card of this rank. A twin of src/gin_nccl.cuh.
#pragma once
#include "emulation/gin.hpp"

namespace hal::cuda::gin {

class Requests {
  public:
    // The sharing is a promise about other threads that only makes a real card's posts cheaper.
    Requests(const hal_cuda_gin& gin, int queue, Sharing)
        : gin_(*reinterpret_cast<emulation::Gin*>(gin.comm)), queue_(queue), queues_(gin.queues) {}

    void put(int peer, Place to, Place from, std::uint64_t bytes, bool more) const {
        release();
        gin_.nic().put(queue_, peer, at(to, peer, bytes), here(from, bytes), bytes, std::nullopt, more);
    }
    template <class Target>
    void put(int peer, Place to, Place from, std::uint64_t bytes, Target target, std::uint64_t add, bool strong,
             bool more) const {
        release();
        gin_.nic().put(queue_, peer, at(to, peer, bytes), here(from, bytes), bytes,
                       signal_of(peer, target, add, strong), more);
    }
    template <class T>
    void put_value(int peer, Place to, T value, bool more) const {
        release();
        gin_.nic().put_value(queue_, peer, at(to, peer, sizeof(T)), emulation::to_word(value), sizeof(T), std::nullopt,
                             more);
    }
    template <class T, class Target>
    void put_value(int peer, Place to, T value, Target target, std::uint64_t add, bool more) const {
        release();
        gin_.nic().put_value(queue_, peer, at(to, peer, sizeof(T)), emulation::to_word(value), sizeof(T),
                             signal_of(peer, target, add, false), more);
    }
    template <class Target>
    void signal(int peer, Target target, std::uint64_t add, bool strong) const {
        release();
        if (!strong && has(emulation::NetworkMutation::weak_signal_adds_twice)) add *= 2;
        const bool astray = strong && has(emulation::NetworkMutation::signal_on_other_queue);
        gin_.nic().signal(astray ? (queue_ + 1) % queues_ : queue_, peer, signal_of(peer, target, add, strong));
    }
    void get(int peer, Place from, Place to, std::uint64_t bytes) const {
        release();
        gin_.nic().get(queue_, peer, at(from, peer, bytes), here(to, bytes), bytes);
    }
    std::uint64_t read(Signal signal) const { return load_acquire(gin_.signal(gin_.rank(), queue_, signal.index)); }

    template <class Watch>
    bool flush(std::uint32_t*, Watch watch) const {
        __syncwarp();
        if (has(emulation::NetworkMutation::flush_does_nothing)) return true;
        bool ok = true;
        if ((threadIdx.x & 31) == 0) {
            const std::uint64_t before = gin_.nic().now();
            auto waits_for = [&] { return gin_.nic().unread(queue_, before); };
            ok = watch(
                [&] {
                    if (waits_for() < 0) return true;
                    __nanosleep(0);
                    return false;
                },
                waits_for);
        }
        return __shfl_sync(0xffffffffu, static_cast<int>(ok), 0) != 0;
    }

  private:
    // Whatever the card reads or raises comes after this thread's earlier stores, as NCCL's posts see to it.
    static void release() { __threadfence_system(); }
    emulation::Nic::Span at(Place place, int peer, std::uint64_t bytes) const {
        std::string trouble;
        auto span = gin_.find(place.window, peer, place.offset, bytes, trouble);
        if (!trouble.empty()) emulation::running->block->trap(trouble);
        return span;
    }
    emulation::Nic::Span here(Place place, std::uint64_t bytes) const { return at(place, gin_.rank(), bytes); }
    emulation::Nic::Signal signal_of(int peer, Word word, std::uint64_t add, bool strong) const {
        if (word.offset % sizeof(std::uint64_t) != 0)
            emulation::running->block->trap("a signal at byte " + std::to_string(word.offset) +
                                            " of a window: it must be aligned to 8 bytes");
        return {at(word, peer, sizeof(std::uint64_t)), add, checked(strong)};
    }
    emulation::Nic::Signal signal_of(int peer, Signal signal, std::uint64_t add, bool strong) const {
        if (signal.index < 0 || signal.index >= gin_.signals())
            emulation::running->block->trap("indexed signal " + std::to_string(signal.index) + ", of " +
                                            std::to_string(gin_.signals()));
        return {gin_.signal_span(peer, queue_, signal.index), add, checked(strong)};
    }
    bool checked(bool strong) const {
        if (strong && !gin_.strong()) emulation::running->block->trap("a strong signal on a card that has none");
        return strong && !has(emulation::NetworkMutation::strong_signal_is_weak);
    }
    static bool has(emulation::NetworkMutation defect) {
        return emulation::network_mutation.load(std::memory_order_relaxed) == defect;
    }
    emulation::Gin& gin_;
    int queue_, queues_;
};

}  // namespace hal::cuda::gin
