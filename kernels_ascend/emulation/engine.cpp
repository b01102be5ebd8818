// SPDX-License-Identifier: Apache-2.0
#include "emulation/engine.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <new>

namespace hal::udma {

std::uint64_t mix(std::uint64_t x) {
    x += 0x9e3779b97f4a7c15ull;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

Pages::Pages(std::size_t bytes) : bytes_(bytes) {
    data_ = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (data_ == MAP_FAILED) throw std::bad_alloc();
}

Pages::~Pages() { munmap(data_, bytes_); }

namespace {

bool power_of_two(std::uint32_t n) { return n && !(n & (n - 1)); }

void release_word(std::byte* dst, const std::byte* src) {
    std::uint64_t value;
    std::memcpy(&value, src, 8);
    __atomic_store_n(reinterpret_cast<std::uint64_t*>(dst), value, __ATOMIC_RELEASE);
}

}  // namespace

void release_copy(std::byte* dst, const std::byte* src, std::uint64_t bytes) {
    while (bytes) {
        const auto at = reinterpret_cast<std::uint64_t>(dst);
        const std::uint64_t piece = std::min<std::uint64_t>(bytes, 512 - at % 512);
        const bool has_word = piece >= 8 && (at + piece) % 8 == 0;
        if (has_word) {
            std::memcpy(dst, src, piece - 8);
            release_word(dst + piece - 8, src + piece - 8);
        } else {
            std::memcpy(dst, src, piece);
        }
        dst += piece, src += piece, bytes -= piece;
    }
}

Queue::Queue(int target_, std::uint32_t qp_, const EngineConfig& config)
    : target(target_), qp(qp_), sq_pages(std::size_t{config.sq_depth} * 64),
      cq_pages(std::size_t{config.cq_depth} * 64), sq(sq_pages.as<Block>()), cq(cq_pages.as<Block>()) {
    head = tail = doorbell = taken = config.first_index;
    cqe_cnt = cq_tail = cqes_written = cq_doorbell = config.first_index;
    if (config.first_index == 0) return;
    // An entry is ready when its owner differs from the lap's phase: give each slot the owner that its last lap left.
    const bool phase = (config.first_index / config.cq_depth) & 1;
    const std::uint32_t written = config.first_index % config.cq_depth;
    for (std::uint32_t i = 0; i < config.cq_depth; ++i) cq[i].word[0] = (i < written) != phase ? kOwnerBit : 0;
}

std::string Queue::where() const {
    return "queue to PE " + std::to_string(target) + ", QP " + std::to_string(qp) + " (head " + std::to_string(head) +
           ", tail " + std::to_string(tail) + ", cqe_cnt " + std::to_string(cqe_cnt) + ", cq_tail " +
           std::to_string(cq_tail) + ")";
}

Engine::Engine(int pe, const std::vector<Heap>& heaps, EngineConfig config_) : config(config_), pe_(pe), heaps_(heaps) {
    if (config.qp_num < 1 || config.qp_num > kMaxQueues)
        throw Fault(2, "qp_num is " + std::to_string(config.qp_num) + "; it must be 1 to 32");
    if (!power_of_two(config.sq_depth) || !power_of_two(config.cq_depth))
        throw Fault(8, "ring depths must be powers of two: " + std::to_string(config.sq_depth) + " and " +
                           std::to_string(config.cq_depth));
    for (int target = 0; target < int(heaps_.size()); ++target)
        for (std::uint32_t qp = 0; qp < config.qp_num; ++qp)
            queues_.push_back(std::make_unique<Queue>(target, qp, config));
}

Queue& Engine::queue(int target, std::uint32_t qp) {
    if (!config.direct_mode) throw Fault(7, "relay mode has no QP interface; start the device in direct mode");
    if (target < 0 || target >= int(heaps_.size()))
        throw Fault(1, "PE " + std::to_string(target) + " of " + std::to_string(heaps_.size()));
    if (qp >= config.qp_num)
        throw Fault(2, "QP " + std::to_string(qp) + " of " + std::to_string(config.qp_num) +
                           "; set the number of QPs before initialisation");
    if (target == pe_) throw Fault(3, "PE " + std::to_string(pe_) + " posted to itself; copy on the device instead");
    return *queues_[std::size_t(target) * config.qp_num + qp];
}

void Engine::ring(Queue& queue, std::uint32_t head) {
    ++counters.doorbells;
    if (queue.in_flight.empty() ? head - queue.taken > config.sq_depth
                                : head - queue.in_flight.front().first_block > config.sq_depth)
        throw Fault(16, "a descriptor was written over one that is not complete; " + queue.where());
    queue.doorbell = head;
    ++version;
    if (!config.lazy) drain();
}

void Engine::validate(Queue& queue, Operation& op) {
    const Request& r = op.request;
    if (r.odr != 0 && r.odr != 5 && r.odr != 6)
        throw Fault(15, "order code " + std::to_string(r.odr) +
                            " is reserved (a relaxed code that was not cleared?); " + queue.where());
    const bool data = r.opcode == Opcode::write || r.opcode == Opcode::read || r.opcode == Opcode::write_notify;
    if (!data && r.opcode != Opcode::fetch_add && r.opcode != Opcode::compare_swap)
        throw Fault(13, "the engine read a block that holds no descriptor (opcode " + std::to_string(int(r.opcode)) +
                            ", index " + std::to_string(op.first_block) + "): was it flushed and copied before the " +
                            "doorbell? " + queue.where());
    if (r.bytes > kLargestRequest) throw Fault(6, std::to_string(r.bytes) + " bytes in one request; at most 256 MiB");
    const std::uint64_t remote_bytes = data ? r.bytes : 8;
    if (!heaps_[queue.target].holds(r.remote, remote_bytes)) op.status = 2;  // remote access error
    if (r.bytes && !heaps_[pe_].holds(r.local, r.bytes)) op.status = 1;      // local access error
    if (r.opcode == Opcode::write_notify && !heaps_[queue.target].holds(r.notify_address, 8)) op.status = 2;
    if (!data && r.bytes == 0 && r.local) op.status = 1;
}

void Engine::fetch(Queue& queue) {
    const std::uint32_t mask = config.sq_depth - 1;
    const Block first = queue.sq[queue.taken & mask];
    const std::uint32_t blocks = blocks_of(opcode_of(first));
    if (opcode_of(first) != Opcode::none && queue.doorbell - queue.taken < blocks) return;  // half covered: wait
    Operation op{};
    op.id = next_id_++;
    op.first_block = queue.taken;
    op.end_block = queue.taken + (opcode_of(first) == Opcode::none ? 1 : blocks);
    op.request = decode(first, queue.sq[(queue.taken + 1) & mask]);
    validate(queue, op);
    const bool chunked = config.chunk_bytes && op.request.bytes > config.chunk_bytes;
    op.chunks = chunked ? (op.request.bytes + config.chunk_bytes - 1) / config.chunk_bytes : 1;
    if (config.lazy) op.source_hash = source_hash(op);
    for (auto& injection : injections_) {
        if (injection.queue != &queue || injection.countdown == ~0u) continue;
        if (injection.countdown-- != 0) continue;
        if (injection.what == Injected::status)
            op.status = 9;
        else
            op.reported = true;
    }
    for (const auto& other : queue.in_flight) {
        const bool both_relaxed = !other.complete && !other.strong() && !op.strong();
        const bool overlap = other.request.remote < op.request.remote + op.request.bytes &&
                             op.request.remote < other.request.remote + other.request.bytes;
        if (both_relaxed && overlap && other.request.opcode == Opcode::write && op.request.opcode == Opcode::write)
            warnings.push_back("rule 36: two unordered writes overlap; " + queue.where());
    }
    queue.taken = op.end_block;
    ++counters.requests;
    counters.bytes += op.request.bytes;
    queue.in_flight.push_back(std::move(op));
}

std::uint64_t Engine::source_hash(const Operation& op) const {
    if (op.status || op.request.opcode == Opcode::read || !op.request.bytes) return 0;
    if (op.request.opcode != Opcode::write && op.request.opcode != Opcode::write_notify) return 0;
    std::uint64_t h = 1469598103934665603ull;
    const auto* p = reinterpret_cast<const std::uint8_t*>(op.request.local);
    for (std::uint32_t i = 0; i < op.request.bytes; ++i) h = (h ^ p[i]) * 1099511628211ull;
    return h;
}

// Strong requests wait for every earlier relaxed or strong one; no-order ones are outside of it (rules 29, 30). A later
// relaxed request waits for nothing (rule 33).
bool Engine::may_start(const Queue& queue, const Operation& op) const {
    for (const auto& earlier : queue.in_flight) {
        if (earlier.id == op.id) return true;
        if (earlier.complete) continue;
        if (op.strong() && earlier.ordered()) return false;
        const auto code = earlier.request.opcode;
        const bool reads = code == Opcode::read || code == Opcode::fetch_add || code == Opcode::compare_swap;
        if (op.request.fence && reads) return false;
    }
    return true;
}

bool Engine::may_report(const Queue& queue, const Operation& op) const {
    for (const auto& earlier : queue.in_flight) {
        if (earlier.id == op.id) return true;
        const bool covers = op.ordered() ? earlier.ordered() : config.quiet_covers_no;
        if (covers && (!earlier.complete || (earlier.request.cqe && !earlier.reported))) return false;
    }
    return true;
}

void Engine::land_chunk(const Operation& op, std::uint32_t chunk) {
    const Request& r = op.request;
    const std::uint64_t size = config.chunk_bytes ? config.chunk_bytes : r.bytes;
    const std::uint64_t offset = op.chunks == 1 ? 0 : chunk * size;
    const std::uint64_t bytes = op.chunks == 1 ? r.bytes : std::min<std::uint64_t>(size, r.bytes - offset);
    auto* local = reinterpret_cast<std::byte*>(r.local);
    auto* remote = reinterpret_cast<std::byte*>(r.remote);
    if (r.opcode == Opcode::read)
        release_copy(local + offset, remote + offset, bytes);
    else
        release_copy(remote + offset, local + offset, bytes);
}

void Engine::land(Queue& queue, Operation& op) {
    ++version;
    const Request& r = op.request;
    auto* target = reinterpret_cast<std::uint64_t*>(r.remote);
    if (op.status == 0) op.status = queue.error_before(op);
    if (op.status) return finish(queue, op);
    if (r.opcode == Opcode::fetch_add) {
        const auto old = __atomic_fetch_add(target, r.operand, __ATOMIC_ACQ_REL);
        if (r.local) *reinterpret_cast<std::uint64_t*>(r.local) = old;
        return finish(queue, op);
    }
    if (r.opcode == Opcode::compare_swap) {
        std::uint64_t expected = r.compare;
        __atomic_compare_exchange_n(target, &expected, r.operand, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
        if (r.local) *reinterpret_cast<std::uint64_t*>(r.local) = expected;
        return finish(queue, op);
    }
    // Pieces land in an order of their own for each request: rising, falling, or strided.
    std::uint32_t chunk = 0;
    if (op.chunks > 1) {
        const std::uint64_t start = mix(config.seed ^ (op.id * 3)) % op.chunks;
        const bool falling = mix(config.seed ^ (op.id * 7)) & 1;
        const std::uint64_t step = falling ? op.chunks - op.landed : op.landed;
        chunk = static_cast<std::uint32_t>((start + step) % op.chunks);
    }
    if (op.landed < op.chunks) {
        land_chunk(op, chunk);
        if (++op.landed < op.chunks) return;
        if (r.opcode == Opcode::write_notify && config.lazy) return;  // the notification is a step of its own
    }
    if (r.opcode == Opcode::write_notify) {
        __atomic_store_n(reinterpret_cast<std::uint64_t*>(r.notify_address), r.operand, __ATOMIC_RELEASE);
        op.notified = true;
    }
    finish(queue, op);
}

void Engine::finish(Queue& queue, Operation& op) {
    op.complete = true;
    if (op.status && !queue.error) queue.error = op.status, queue.error_block = op.first_block;
    if (config.lazy && source_hash(op) != op.source_hash)
        warnings.push_back("rule 48: a source changed before its request completed; " + queue.where());
}

void Engine::report(Queue& queue, Operation& op) {
    ++version;
    const std::uint32_t lag = (queue.cqes_written - queue.cq_doorbell) & 0xffffff;
    if (lag >= config.cq_depth)
        throw Fault(47, "the completion ring ran over: its doorbell lags " + std::to_string(lag) + " entries; " +
                            queue.where());
    const bool phase = (queue.cqes_written / config.cq_depth) & 1;
    if (op.status == 0) op.status = queue.error_before(op);
    Block& slot = queue.cq[queue.cqes_written & (config.cq_depth - 1)];
    slot = completion_entry(!phase, op.status, op.status ? 1 : 0, op.end_block);
    ++queue.cqes_written;
    ++counters.completions;
    op.reported = true;
}

void Engine::retire(Queue& queue) {
    while (!queue.in_flight.empty()) {
        const Operation& op = queue.in_flight.front();
        if (!op.complete || (op.request.cqe && !op.reported)) return;
        queue.in_flight.pop_front();
    }
}

void Engine::steps(std::vector<Step>& out) {
    for (auto& queue : queues_) {
        if (queue->doorbell != queue->taken) {
            const auto code = opcode_of(queue->sq[queue->taken & (config.sq_depth - 1)]);
            if (code == Opcode::none || queue->doorbell - queue->taken >= blocks_of(code))
                out.push_back({StepKind::take, queue.get(), queue->taken});
        }
        for (auto& op : queue->in_flight) {
            if (!op.complete && may_start(*queue, op)) out.push_back({StepKind::land, queue.get(), op.id});
            if (op.complete && op.request.cqe && !op.reported && may_report(*queue, op))
                out.push_back({StepKind::report, queue.get(), op.id});
        }
    }
}

void Engine::take(const Step& step) {
    Queue& queue = *step.queue;
    if (step.kind == StepKind::take) return fetch(queue);
    for (auto& op : queue.in_flight) {
        if (op.id != step.operation) continue;
        if (step.kind == StepKind::land)
            land(queue, op);
        else
            report(queue, op);
        break;
    }
    retire(queue);
}

// The undisturbed engine: everything at once and in order, which is one of the orders the rules allow.
void Engine::drain() {
    for (auto& entry : queues_) {
        Queue& queue = *entry;
        while (queue.doorbell != queue.taken) {
            const auto before = queue.taken;
            fetch(queue);
            if (queue.taken == before) break;
            Operation& op = queue.in_flight.back();
            while (!op.complete) land(queue, op);
            if (op.request.cqe && !op.reported) report(queue, op);
            retire(queue);
        }
    }
}

void Engine::inject(int target, std::uint32_t qp, Injected what, std::uint32_t nth) {
    injections_.push_back({&queue(target, qp), what, nth});
}

}  // namespace hal::udma
