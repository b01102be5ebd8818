// SPDX-License-Identifier: Apache-2.0
#include "checker/check_fabric.hpp"

#include <cstring>

namespace hal::checker {

void CheckFabric::range(std::size_t offset, std::size_t nbytes, const char* what) const {
    if (offset + nbytes <= size()) return;
    throw ContractViolation(std::string(what) + " of bytes " + std::to_string(offset) + " ... " +
                            std::to_string(offset + nbytes) + " is past the window's end at " + std::to_string(size()));
}

const std::byte* CheckFabric::read(std::size_t offset, std::size_t nbytes) {
    range(offset, nbytes, "read");
    World::Pending p;
    p.kind = World::Pending::read;
    p.rank = rank_;
    p.begin = offset;
    p.end = offset + nbytes;
    if (nbytes) w_.call(thread_, p);
    return w_.window(rank_) + offset;
}

std::byte* CheckFabric::write(std::size_t offset, std::size_t nbytes) {
    range(offset, nbytes, "write");
    World::Pending p;
    p.kind = World::Pending::write;
    p.rank = rank_;
    p.begin = offset;
    p.end = offset + nbytes;
    if (nbytes) w_.call(thread_, p);
    return w_.window(rank_) + offset;
}

bool CheckFabric::mutate(Call& call) {
    call.thread = std::uint16_t(thread_);
    call.number = w_.call_counts_[std::size_t(thread_)]++;
    if (w_.config_.track) w_.calls_.push_back(call);
    const auto& m = w_.config_.mutation;
    if (!m || m->thread != thread_ || m->number != call.number) return true;
    switch (m->kind) {
        case Mutation::weaken:
            call.order = call.order == Order::strong ? Order::relaxed : Order::none;
            return true;
        case Mutation::remove:
            return false;
        case Mutation::to_source:
            call.remote = false;
            return true;
        case Mutation::value_up:
            ++call.value;
            return true;
        case Mutation::value_down:
            --call.value;
            return true;
        case Mutation::offset_up:
            call.offset += call.primitive == Primitive::put ? 16 : 64;
            return true;
        case Mutation::other_queue:
            call.queue = (call.queue + 1) % queues();
            return true;
    }
    return true;
}

// What may block or touch memory before an operation is on its queue.
void CheckFabric::before_issue(int peer, int queue, std::uint64_t begin, std::uint64_t bytes, bool builds_strong,
                               Access::Kind access) {
    if (builds_strong) {  // quiet(remote) of the (peer, queue); the operation itself is then relaxed
        World::Pending p;
        p.kind = World::Pending::quiet;
        p.rank = rank_;
        p.peer = peer;
        p.queue = queue;
        p.stage = "strong operation built from quiet";
        w_.call(thread_, p);
    }
    if (w_.config_.faults.ring_entries && peer != rank_) {
        World::Pending p;
        p.kind = World::Pending::credit;
        p.rank = rank_;
        p.peer = peer;
        p.queue = queue;
        p.stage = "queue credit";
        w_.call(thread_, p);
    }
    if (w_.config_.profile.at_issue || peer == rank_) {
        World::Pending p;  // takes effect with the call
        p.kind = World::Pending::write_at;
        p.rank = peer;
        p.begin = begin;
        p.end = begin + bytes;
        p.access = access;
        w_.call(thread_, p);
    }
}

std::int64_t CheckFabric::own_offset(const void* src) const {
    const auto* p = static_cast<const std::byte*>(src);
    const std::byte* base = w_.window(rank_);
    return p >= base && p < base + size() ? p - base : -1;
}

// Where the source is read by the call itself, that is a read of the own window like any other.
void CheckFabric::look_at_source(const void* src, std::size_t nbytes) {
    const Profile& p = w_.config_.profile;
    const std::int64_t at = own_offset(src);
    if (at >= 0 && (p.source_read_at_issue || p.at_issue)) read(std::size_t(at), nbytes);
}

std::uint32_t CheckFabric::send(int queue, int peer, std::size_t dst, const void* src, std::size_t nbytes, Order order,
                                Order acts) {
    Operation op{};
    op.thread = std::uint16_t(thread_);
    op.rank = rank_;
    op.peer = peer;
    op.queue = queue;
    op.is_signal = false;
    op.asked = order;
    op.order = acts;
    op.dst = dst;
    op.bytes = nbytes;
    op.src_offset = own_offset(src);
    return w_.issue(op, src);
}

std::uint32_t CheckFabric::raise(int queue, int peer, std::size_t slot, std::uint64_t value, SignalOp kind, Order order,
                                 Order acts, std::int32_t bundled_with) {
    Operation op{};
    op.thread = std::uint16_t(thread_);
    op.rank = rank_;
    op.peer = peer;
    op.queue = queue;
    op.is_signal = true;
    op.asked = order;
    op.order = acts;
    op.op = kind;
    op.dst = slot;
    op.bytes = 8;
    op.value = value;
    op.bundled_with = bundled_with;
    return w_.issue(op, nullptr);
}

void CheckFabric::put(int queue, int peer, std::size_t dst, const void* src, std::size_t nbytes, Order order) {
    if (nbytes == 0) return;
    Call call{Primitive::put, 0, 0, order, true, peer, queue, dst, nbytes, 0, ""};
    if (!mutate(call)) return;
    range(call.offset, nbytes, "put");
    const Profile& p = w_.config_.profile;
    if (p.max_put_bytes && nbytes > p.max_put_bytes)
        throw ContractViolation("put of " + std::to_string(nbytes) + " bytes; " + p.name + " moves at most " +
                                std::to_string(p.max_put_bytes));
    const bool built = call.order == Order::strong && p.build_strong_put;
    before_issue(peer, call.queue, call.offset, nbytes, built, Access::write);
    look_at_source(src, nbytes);
    send(call.queue, peer, call.offset, src, nbytes, call.order, built ? Order::relaxed : p.put_order(call.order));
}

void CheckFabric::signal(int queue, int peer, std::size_t slot, std::uint64_t value, SignalOp op, Order order) {
    Call call{Primitive::signal, 0, 0, order, true, peer, queue, slot, 8, value, ""};
    if (!mutate(call)) return;
    range(call.offset, 8, "signal");
    const Profile& p = w_.config_.profile;
    const Order acts = p.signal_order(call.order, false);
    const bool built = acts == Order::strong && p.build_strong_signal;
    before_issue(peer, call.queue, call.offset, 8, built, op == SignalOp::add ? Access::add : Access::set);
    raise(call.queue, peer, call.offset, call.value, op, call.order, built ? Order::relaxed : acts, -1);
}

void CheckFabric::put_with_signal(int queue, int peer, std::size_t dst, const void* src, std::size_t nbytes,
                                  Order order, std::size_t slot, std::uint64_t value, SignalOp op, Order signal_order) {
    const Profile& p = w_.config_.profile;
    const Order acts = p.signal_order(signal_order, true);
    const bool built_put = order == Order::strong && p.build_strong_put;
    const bool built_signal = acts == Order::strong && p.build_strong_signal;
    before_issue(peer, queue, dst, nbytes, built_put || built_signal, Access::write);
    look_at_source(src, nbytes);
    const std::uint32_t payload =
        send(queue, peer, dst, src, nbytes, order, built_put ? Order::relaxed : p.put_order(order));
    if (p.at_issue || peer == rank_)
        before_issue(peer, queue, slot, 8, false, op == SignalOp::add ? Access::add : Access::set);
    raise(queue, peer, slot, value, op, signal_order, built_signal ? Order::relaxed : acts, std::int32_t(payload));
}

std::uint64_t CheckFabric::wait(std::size_t slot, std::uint64_t at_least, int source, int queue, const char* stage,
                                std::uint64_t later_view) {
    Call call{Primitive::wait, 0, 0, Order::relaxed, true, source, queue, slot, 8, at_least, stage};
    const bool waits = mutate(call);
    range(call.offset, 8, "wait");
    World::Pending p;
    p.kind = World::Pending::wait;
    p.rank = rank_;
    p.begin = call.offset;
    p.end = call.offset + 8;
    p.at_least = waits ? call.value : 0;
    p.source = source;
    p.queue = queue;
    p.stage = stage;
    p.later_view = later_view;
    w_.call(thread_, p);
    if (later_view && w_.slot(rank_, call.offset) < p.at_least)
        throw PeerTimeoutError(-1, stage, queue, at_least, w_.slot(rank_, call.offset), 0.0, "a later view");
    return w_.seen(rank_, call.offset, p.at_least);
}

std::uint64_t CheckFabric::peer_word(int rank, std::size_t offset) {
    World::Pending p;
    p.kind = World::Pending::read;
    p.rank = rank;
    p.begin = offset;
    p.end = offset + 8;
    w_.call(thread_, p);
    return w_.slot(rank, offset);
}

std::uint64_t CheckFabric::compare_and_set(std::uint64_t view, std::uint64_t expected, std::uint64_t desired) {
    World::Pending p;
    p.kind = World::Pending::write_at;
    p.rank = 0;
    p.begin = w_.config_.views + 8 * view;
    p.end = p.begin + 8;
    p.access = Access::write;
    w_.call(thread_, p);
    const std::uint64_t seen = w_.slot(0, p.begin);
    if (seen != expected) return seen;
    std::memcpy(w_.window(0) + p.begin, &desired, 8);
    w_.views_changed();
    return seen;
}

void CheckFabric::quiet(int queue, int peer, QuietScope scope) {
    Call call{Primitive::quiet, 0, 0, Order::relaxed, scope == QuietScope::remote, peer, queue, 0, 0, 0, "quiet"};
    if (!mutate(call)) return;
    World::Pending p;
    p.kind = World::Pending::quiet;
    p.rank = rank_;
    p.queue = call.queue;
    p.peer = peer;
    p.remote = call.remote || w_.config_.profile.quiet_source_is_remote;
    p.stage = "quiet";
    w_.call(thread_, p);
}

void CheckFabric::arrive() {
    World::Pending p;
    p.kind = World::Pending::arrive;
    w_.call(thread_, p);
}

void CheckFabric::pass(int count) {
    World::Pending p;
    p.kind = World::Pending::pass;
    p.at_least = std::uint64_t(count);
    p.stage = "barrier";
    w_.call(thread_, p);
}

}  // namespace hal::checker
