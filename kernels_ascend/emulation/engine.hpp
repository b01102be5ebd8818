// SPDX-License-Identifier: Apache-2.0
// The engine of one PE: takes descriptors that a doorbell covers, moves bytes, writes completion entries. It knows nothing
// of cores or kernels. `lazy` engines do nothing by themselves: a scheduler picks one of steps() and calls take().
#pragma once
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "emulation/config.hpp"
#include "emulation/fault.hpp"
#include "emulation/wqe.hpp"

namespace hal::udma {

struct Region {
    std::byte* base = nullptr;
    std::uint64_t bytes = 0;
    bool holds(std::uint64_t address, std::uint64_t n) const {
        const auto first = reinterpret_cast<std::uint64_t>(base);
        return address >= first && n <= bytes && address - first <= bytes - n;
    }
};

// One PE's symmetric memory: windows that lie at the same index on every PE.
struct Heap {
    std::vector<Region> windows;
    bool holds(std::uint64_t address, std::uint64_t n) const {
        for (const Region& w : windows)
            if (w.holds(address, n)) return true;
        return false;
    }
};

// Zeroed pages, touched only when used: rings are large and mostly empty.
class Pages {
  public:
    explicit Pages(std::size_t bytes);
    ~Pages();
    Pages(const Pages&) = delete;
    Pages& operator=(const Pages&) = delete;
    template <class T>
    T* as() const {
        return static_cast<T*>(data_);
    }

  private:
    void* data_;
    std::size_t bytes_;
};

// A descriptor that the engine has taken and not finished.
struct Operation {
    std::uint64_t id;
    std::uint32_t first_block, end_block;
    Request request;
    std::uint32_t chunks, landed = 0;
    bool notified = false, complete = false, reported = false;
    std::uint8_t status = 0;
    std::uint64_t source_hash = 0;
    bool ordered() const { return request.odr != static_cast<std::uint8_t>(Odr::no); }
    bool strong() const { return request.odr == static_cast<std::uint8_t>(Odr::strong); }
};

struct Counters {
    std::uint64_t requests = 0, completions = 0, doorbells = 0, quiets = 0, bytes = 0;
};

struct Queue {
    Queue(int target, std::uint32_t qp, const EngineConfig& config);
    int target;
    std::uint32_t qp;
    Pages sq_pages, cq_pages;
    Block *sq, *cq;
    // What software keeps: free-running indices, in blocks (SQ) and entries (CQ).
    std::uint32_t head, tail, cqe_cnt, cq_tail;
    // Where the two device registers are mapped, and what they latched: only a device store reaches the latch (rule 11).
    std::uint64_t doorbell_register = 0, cq_doorbell_register = 0;
    std::uint32_t doorbell, cq_doorbell;
    // The engine's own.
    std::uint32_t taken, cqes_written;
    // Of the first request that failed: nothing behind it takes effect, and every entry behind it says so.
    std::uint8_t error = 0;
    std::uint32_t error_block = 0;
    std::uint8_t error_before(const Operation& op) const {
        return error && std::int32_t(op.first_block - error_block) > 0 ? error : 0;
    }
    std::deque<Operation> in_flight;
    // Who posted last (rule 5).
    std::uint64_t claim_launch = ~0ull;
    int claim_block = -1;
    std::string where() const;
};

enum class StepKind : std::uint8_t { take, land, report };

struct Step {
    StepKind kind;
    Queue* queue;
    std::uint64_t operation;  // id, or the index of the next block for `take`
};

enum class Injected : std::uint8_t { status, drop_completion };

class Engine {
  public:
    Engine(int pe, const std::vector<Heap>& heaps, EngineConfig config);

    Queue& queue(int target, std::uint32_t qp);
    const std::vector<std::unique_ptr<Queue>>& queues() const { return queues_; }
    void ring(Queue& queue, std::uint32_t head);
    void ring_completion(Queue& queue, std::uint32_t tail) { queue.cq_doorbell = tail; }

    void steps(std::vector<Step>& out);
    void take(const Step& step);
    void drain();

    // The nth request (from 0) taken on this queue from now on fails or never reports.
    void inject(int target, std::uint32_t qp, Injected what, std::uint32_t nth);

    std::vector<std::string> warnings;  // what the detectors of rules 36 and 48 saw
    std::uint64_t version = 0;          // rises with every effect
    Counters counters;
    EngineConfig config;

  private:
    struct Injection {
        Queue* queue;
        Injected what;
        std::uint32_t countdown;
    };
    void fetch(Queue& queue);
    bool may_start(const Queue& queue, const Operation& op) const;
    bool may_report(const Queue& queue, const Operation& op) const;
    void land(Queue& queue, Operation& op);
    void land_chunk(const Operation& op, std::uint32_t chunk);
    void finish(Queue& queue, Operation& op);
    void report(Queue& queue, Operation& op);
    void validate(Queue& queue, Operation& op);
    std::uint64_t source_hash(const Operation& op) const;
    void retire(Queue& queue);

    int pe_;
    const std::vector<Heap>& heaps_;  // the device's
    std::vector<std::unique_ptr<Queue>> queues_;
    std::vector<Injection> injections_;
    std::uint64_t next_id_ = 1;
};

// Copies as the engine does: every aligned 512-byte block lands with its last 8 bytes last, released (a whole block is the
// unit that may not tear when chunk_bytes is 0 or a multiple of 512).
void release_copy(std::byte* dst, const std::byte* src, std::uint64_t bytes);

std::uint64_t mix(std::uint64_t x);

}  // namespace hal::udma
