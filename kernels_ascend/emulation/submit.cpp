// SPDX-License-Identifier: Apache-2.0
#include "emulation/submit.hpp"

#include <algorithm>
#include <utility>

namespace hal::udma {

namespace {

constexpr std::uint64_t kMostPolls = 1'000'000;
constexpr int kCopyEvent = 1000;  // the library's own MTE3 -> scalar flag; no kernel uses this number

bool mutated(const Core& core, Mutation which) { return core.device.engine.config.mutation == which; }

void check_config(const Post& p) {
    const OpConfig& c = p.config;
    const bool atomic = p.opcode == Opcode::fetch_add || p.opcode == Opcode::compare_swap;
    if (c.cqe > 1 || c.fence > 1 || c.odr > 7)
        throw Fault(27, "a field of the request's configuration is out of range");
    if (c.se != 0) throw Fault(27, "se is not supported");
    if (p.action == Action::defer && c.cqe) throw Fault(27, "a deferred request may not ask for a completion entry");
    if (p.action == Action::submit && !c.cqe) throw Fault(27, "a submitted request must ask for a completion entry");
    if (p.action == Action::immediate && !c.cqe)
        throw Fault(27, "an immediate request must ask for a completion entry");
    if (p.action != Action::immediate && p.pipe != Pipe::mte3) throw Fault(27, "batches are published by MTE3 only");
    if (atomic && p.pipe != Pipe::scalar) throw Fault(27, "atomics are published by the scalar unit only");
    if (p.bytes > kLargestRequest) throw Fault(6, std::to_string(p.bytes) + " bytes in one request; at most 256 MiB");
}

void claim(Core& core, Queue& queue) {
    const auto launch = core.device.launch_id();
    if (queue.claim_launch == launch && queue.claim_block != core.block)
        throw Fault(5, "cores " + std::to_string(queue.claim_block) + " and " + std::to_string(core.block) +
                           " both post; one submitter for each queue; " + queue.where());
    queue.claim_launch = launch;
    queue.claim_block = core.block;
}

void check_batch(Core& core, const Post& p) {
    const Batch now{p.pe, p.qp, p.sync_id, static_cast<std::uint8_t>(p.opcode), p.scratch};
    const auto [it, fresh] = core.batches.try_emplace(p.pending_count, now);
    const Batch& open = it->second;
    if (fresh) return;
    if (*p.pending_count == 0) {
        it->second = now;
        return;
    }
    if (open.pe != now.pe || open.qp != now.qp || open.opcode != now.opcode || open.scratch != now.scratch ||
        open.sync_id != now.sync_id)
        throw Fault(22, "one batch mixes queues, kinds, scratch or event");
}

Request to_request(Core& core, const Post& p, std::uint32_t odr) {
    Request r;
    r.opcode = p.opcode;
    r.odr = static_cast<std::uint8_t>(odr);
    r.fence = p.config.fence;
    r.cqe = p.config.cqe;
    r.bytes = static_cast<std::uint32_t>(p.bytes);
    const bool read = p.opcode == Opcode::read;
    r.remote = core.device.to_remote(read ? p.src : p.dst, p.pe);
    r.local = read ? p.dst : p.src;
    if (p.signal_address) r.notify_address = core.device.to_remote(p.signal_address, p.pe);
    r.operand = p.operand;
    r.compare = p.compare;
    return r;
}

// Scratch -> ring, in one copy or two at the ring's end, each span rung for itself (rule 24).
void publish(Core& core, Queue& queue, const Block* staged, std::uint32_t blocks) {
    const std::uint32_t depth = core.device.engine.config.sq_depth;
    while (blocks) {
        const std::uint32_t at = queue.head % depth;
        const std::uint32_t span = std::min(blocks, depth - at);
        core.copy(Pipe::mte3, {reinterpret_cast<std::byte*>(queue.sq + at), reinterpret_cast<const std::byte*>(staged),
                               1, span * 64, 0, 0});
        core.set_flag(kCopyEvent, 0, Pipe::mte3);
        if (!mutated(core, Mutation::ring_before_copy)) core.wait_flag(kCopyEvent, 0, Pipe::mte3, Pipe::scalar);
        queue.head += span;
        core.device.store_register(queue.head, &queue.doorbell_register);
        staged += span, blocks -= span;
    }
}

}  // namespace

bool poll_completion(Core& core, Queue& queue) {
    const std::uint32_t depth = core.device.engine.config.cq_depth;
    const Block entry = queue.cq[queue.cq_tail & (depth - 1)];
    const bool phase = (queue.cq_tail / depth) & 1;
    const bool owner = entry.word[0] & kOwnerBit;
    if (owner == phase) return false;
    const auto substatus = (entry.word[0] >> 16) & 0xff, status = (entry.word[0] >> 24) & 0xff;
    if ((status || substatus) && !mutated(core, Mutation::ignore_cqe_status))
        throw Fault(46, "completion status " + std::to_string(status) + ", substatus " + std::to_string(substatus) +
                            "; " + queue.where());
    const auto index = static_cast<std::uint32_t>((entry.word[0] >> 32) & 0xffff);
    std::uint32_t tail = (queue.tail & ~0xffffu) | index;
    if (std::int32_t(tail - queue.tail) < 0) tail += 0x10000;
    queue.tail = tail;
    ++queue.cq_tail;
    return true;
}

void quiet(Core& core, int pe, std::uint32_t qp) {
    Queue& queue = core.device.engine.queue(pe, qp);
    ++core.device.engine.counters.quiets;
    if (mutated(core, Mutation::early_source_reuse)) return;
    if (mutated(core, Mutation::signal_before_quiet) && qp == 1) return;
    const std::uint32_t before = queue.cq_tail;
    for (std::uint64_t polls = 0; queue.cq_tail != queue.cqe_cnt;) {
        if (poll_completion(core, queue)) continue;
        if (++polls > kMostPolls)
            throw Fault(67, "no completion entry after " + std::to_string(polls) + " polls; " + queue.where());
        core.pause();
    }
    if (queue.cq_tail != before) core.device.store_register(queue.cq_tail & 0xffffff, &queue.cq_doorbell_register);
}

void wait_for_credit(Core& core, Queue& queue, std::uint32_t blocks) {
    const std::uint32_t depth = core.device.engine.config.sq_depth;
    const auto room = [&] { return queue.head + blocks - queue.tail + kCreditGuard < depth; };
    for (std::uint64_t polls = 0; !room();) {
        if (queue.cqe_cnt == queue.cq_tail)
            throw Fault(17, "no room for " + std::to_string(blocks) +
                                " blocks and no completion entry is expected, so none will come; " + queue.where());
        if (poll_completion(core, queue)) {
            core.device.store_register(queue.cq_tail & 0xffffff, &queue.cq_doorbell_register);
            continue;
        }
        if (++polls > kMostPolls)
            throw Fault(67, "no room after " + std::to_string(polls) + " polls; " + queue.where());
        core.pause();
    }
}

void store_block(Core& core, Queue& queue, std::uint32_t index, const Block& block) {
    claim(core, queue);
    const std::uint32_t depth = core.device.engine.config.sq_depth;
    Block* slot = queue.sq + index % depth;
    for (int i = 0; i < 8; ++i) core.store(&slot->word[i], block.word[i]);
}

void flush_blocks(Core& core, Queue& queue, std::uint32_t first, std::uint32_t end) {
    const std::uint32_t depth = core.device.engine.config.sq_depth;
    if (mutated(core, Mutation::no_flush)) return;
    for (std::uint32_t index = first; index != end; ++index) {
        if (mutated(core, Mutation::flush_first_span_only) && index % depth < first % depth) return;
        core.flush_line(queue.sq + index % depth);
    }
}

void post(Core& core, const Post& original) {
    Post p = original;
    Queue* queue = &core.device.engine.queue(p.pe, p.qp);
    check_config(p);
    const bool signal = p.config.odr == std::uint32_t(Odr::strong) && p.bytes == 8;
    if (mutated(core, Mutation::default_no) && p.config.odr == std::uint32_t(Odr::relax)) p.config.odr = 0;
    if (mutated(core, Mutation::strong_on_other_queue) && signal) {
        p.qp = (p.qp + 1) % core.device.engine.config.qp_num;
        queue = &core.device.engine.queue(p.pe, p.qp);
    }
    if (mutated(core, Mutation::drop_empty_signal)) {
        const bool carried = std::exchange(core.device.carried[queue], !signal);
        if (signal && !carried) return;
    }
    claim(core, *queue);
    const std::uint32_t blocks = blocks_of(p.opcode);
    Block built[2];
    encode(to_request(core, p, p.config.odr), built);

    if (p.pipe == Pipe::scalar) {
        wait_for_credit(core, *queue, blocks);
        for (std::uint32_t i = 0; i < blocks; ++i) store_block(core, *queue, queue->head + i, built[i]);
        flush_blocks(core, *queue, queue->head, queue->head + blocks);
        queue->head += blocks;
        ++queue->cqe_cnt;
        core.device.store_register(queue->head, &queue->doorbell_register);
        return;
    }

    std::uint32_t alone = 0;
    std::uint32_t& pending = p.pending_count ? *p.pending_count : alone;
    if (p.action != Action::immediate) check_batch(core, p);
    const std::uint64_t needed = 64ull * (pending + blocks);
    if (core.scratch_behind(p.scratch) < needed)
        throw Fault(23, "the descriptor scratch holds " + std::to_string(core.scratch_behind(p.scratch)) + " bytes; " +
                            std::to_string(needed) + " needed");
    if (pending + blocks >= core.device.engine.config.sq_depth)
        throw Fault(23, "a batch of " + std::to_string(pending + blocks) + " does not fit a ring of " +
                            std::to_string(core.device.engine.config.sq_depth));
    auto* staged = static_cast<Block*>(p.scratch);
    std::memcpy(staged + pending, built, blocks * 64);
    pending += blocks;
    if (p.action == Action::defer) return;  // nothing but scratch was touched (rule 20)
    const std::uint32_t batch = pending;
    wait_for_credit(core, *queue, batch);
    ++queue->cqe_cnt;
    publish(core, *queue, staged, batch);
    pending = 0;
}

}  // namespace hal::udma
