// SPDX-License-Identifier: Apache-2.0
#include "checker/world.hpp"

#include <cxxabi.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <new>

#include "checker/check_fabric.hpp"

namespace hal::checker {
namespace {

// The C++ runtime keeps the exceptions being handled in one list for each operating-system thread. A fiber may yield
// inside a catch block, so each has its own list.
struct ExceptionState {
    void* caught = nullptr;
    unsigned uncaught = 0;
    void exchange() {
        auto* globals = reinterpret_cast<ExceptionState*>(abi::__cxa_get_globals());
        std::swap(*this, *globals);
    }
};

std::uint64_t hash_bytes(const std::byte* p, std::size_t n) {
    std::uint64_t h = 0xcbf29ce484222325u;
    for (; n >= 8; p += 8, n -= 8) {
        std::uint64_t w;
        std::memcpy(&w, p, 8);
        h = (h ^ w) * 0x9fb21c651e98df25u;
        h ^= h >> 31;
    }
    for (; n; ++p, --n) h = (h ^ std::uint64_t(*p)) * 0x100000001b3u;
    return h;
}

constexpr std::uint32_t no_step = 0xffffffff;

Entity thread_entity(int t) { return {std::uint16_t(t), 0, Entity::thread}; }

}  // namespace

struct World::Thread {
    std::unique_ptr<Fiber> fiber;
    ExceptionState exceptions;
    Pending pending;
    bool ended = false, ready = false, timed_out = false, stalled = false;
    std::uint32_t calls = 0, last_step = no_step;
    int names = -1;  // timed out: whom its error names
};

// The moving part of an operation.
struct World::Flight {
    const std::byte* src = nullptr;
    std::vector<std::byte> data;
    std::uint64_t source_hash = 0;
    std::uint8_t pieces = 1, pieces_left = 1;
    bool source_done = false, complete = false, blocked = false, never = false, unreported = false, error = false;
    std::uint32_t group = 0;
    std::uint32_t issue_step = no_step, source_step = no_step;
    std::vector<std::uint32_t> write_steps;
};

// Operations whose order the profile speaks of: one (thread, peer, queue), or one thread.
struct World::Group {
    std::tuple<int, int, int> key;
    std::uint32_t next = 0;
    std::vector<std::uint32_t> by_order[3];  // in issue order; those before `head` are complete
    std::size_t head[3] = {0, 0, 0};
    std::vector<std::uint32_t> blocked;
};

const std::size_t World::operation_bytes = sizeof(Operation) + sizeof(Flight) + 2 * sizeof(std::uint32_t);

World::World(WorldConfig config, Priority priority) : config_(std::move(config)), priority_(std::move(priority)) {
    for (int r = 0; r < config_.ranks; ++r) windows_.emplace_back(config_.window_bytes);
    const std::size_t n = config_.thread_rank.size();
    by_thread_.resize(n);
    call_counts_.resize(n);
    outstanding_.resize(std::size_t(config_.ranks * config_.ranks * config_.queues));
    for (std::size_t t = 0; t < n; ++t) threads_.push_back(std::make_unique<Thread>());
    for (std::size_t t = 0; t < n; ++t) {
        threads_[t]->fiber = std::make_unique<Fiber>([this, t] {
            CheckFabric fabric(*this, int(t));
            try {
                config_.body(int(t), fabric);
            } catch (const Abandoned&) {
            } catch (const PeerTimeoutError& e) {
                timed_out_.push_back({std::uint32_t(t), e.rank});
                if (!config_.faults.any())
                    report({Problem::exception, rank_of(int(t)),
                            "PeerTimeout of rank " + std::to_string(e.rank) + " in " + e.stage});
            } catch (const ContractViolation& e) {
                report({Problem::contract, rank_of(int(t)), e.what()});
            } catch (const std::exception& e) {
                report({Problem::exception, rank_of(int(t)), e.what()});
            }
        });
        make_ready(thread_entity(int(t)));
        threads_[t]->ready = true;
    }
}

World::~World() {
    abandoning_ = true;
    for (auto& t : threads_) {
        if (t->ended || t->calls == 0) continue;
        t->exceptions.exchange();
        while (!t->fiber->finished()) t->fiber->resume();
        t->exceptions.exchange();
    }
}

bool World::is_ready(Entity e) const { return ready_.contains({priority_(*this, e), e}); }

void World::set_priority(Entity e, std::uint64_t priority) {
    for (auto it = ready_.begin(); it != ready_.end(); ++it)
        if (std::get<1>(*it) == e) {
            ready_.erase(it);
            ready_.insert({priority, e});
            return;
        }
}

void World::make_ready(Entity e) { ready_.insert({priority_(*this, e), e}); }
void World::take(Entity e) { ready_.erase({priority_(*this, e), e}); }

// --- threads

void World::call(int thread, const Pending& pending) {
    Thread& t = *threads_[std::size_t(thread)];
    if (abandoning_) throw Abandoned{};
    t.pending = pending;
    t.fiber->yield();
    if (abandoning_) throw Abandoned{};
    if (t.timed_out) {
        t.timed_out = false;
        const std::uint64_t seen = pending.kind == Pending::wait ? slot(pending.rank, pending.begin) : 0;
        throw PeerTimeoutError(t.names, pending.stage, pending.queue, pending.at_least, seen, 0.0, "no answer");
    }
}

std::uint64_t World::slot(int rank, std::uint64_t offset) const {
    std::uint64_t v;
    std::memcpy(&v, windows_[std::size_t(rank)].data() + offset, 8);
    return v;
}

// What a wait returns.
std::uint64_t World::seen(int rank, std::uint64_t offset, std::uint64_t at_least) const {
    std::uint64_t value = slot(rank, offset);
    if (const auto it = history_.find({rank, offset}); it != history_.end())
        for (const std::uint64_t v : it->second)
            if (v >= at_least) value = std::min(value, v);
    return value;
}

World::Outstanding World::outstanding(int rank, int peer, int queue) const {
    Outstanding sum;
    for (int p = peer < 0 ? 0 : peer; p < (peer < 0 ? config_.ranks : peer + 1); ++p)
        for (int q = queue < 0 ? 0 : queue; q < (queue < 0 ? config_.queues : queue + 1); ++q) {
            const Outstanding& o = outstanding_[std::size_t((rank * config_.ranks + p) * config_.queues + q)];
            sum.reads += o.reads;
            sum.writes += o.writes;
        }
    return sum;
}

World::Outstanding& World::outstanding_of(const Operation& op) {
    return outstanding_[std::size_t((op.rank * config_.ranks + op.peer) * config_.queues + op.queue)];
}

bool World::quiet_reached(const Pending& p) const {
    const Outstanding o = outstanding(p.rank, p.peer, p.queue);
    return p.remote ? o.writes == 0 : o.reads == 0;
}

bool World::enabled(const Thread& t) const {
    if (t.stalled) return false;
    const Pending& p = t.pending;
    switch (p.kind) {
        case Pending::wait:
            return slot(p.rank, p.begin) >= p.at_least || (p.later_view && newest_view() >= p.later_view);
        case Pending::quiet:
            return quiet_reached(p);
        case Pending::credit:
            return outstanding(p.rank, p.peer, p.queue).writes < config_.faults.ring_entries;
        case Pending::pass:
            return arrived_ >= int(p.at_least);
        default:
            return true;
    }
}

void World::recheck(int thread) {
    Thread& t = *threads_[std::size_t(thread)];
    if (t.ended) return;
    const bool now = enabled(t);
    if (now == t.ready) return;
    t.ready = now;
    if (now)
        make_ready(thread_entity(thread));
    else
        take(thread_entity(thread));
}

void World::run_thread(Entity e) {
    Thread& t = *threads_[e.owner];
    const Pending p = t.pending;
    const int rank = rank_of(e.owner);
    take(e);
    t.ready = false;
    info_.what = What::end;
    Event event{What::end, e.owner, rank};
    event.begin = p.begin;
    event.end = p.end;
    event.value = p.at_least;
    event.stage = p.stage;
    event.peer = p.peer;
    event.queue = p.queue;
    switch (p.kind) {
        case Pending::read:
            event.what = What::read;
            break;
        case Pending::write:
            event.what = What::write;
            break;
        case Pending::wait:
            event.what = What::wait;
            event.peer = p.source;
            break;
        case Pending::quiet:
            event.what = What::quiet;
            event.value = p.remote;
            break;
        case Pending::arrive:
            event.what = What::arrive;
            ++arrived_;
            arrive_steps_.push_back(step_);
            break;
        case Pending::pass:
            event.what = What::pass;
            break;
        default:
            break;
    }
    if (event.what != What::end) add_event(event);
    info_.what = event.what;
    info_.value = p.at_least;
    if (config_.track) enabling_steps(e);
    t.last_step = step_;
    ++t.calls;
    t.exceptions.exchange();
    t.fiber->resume();
    t.exceptions.exchange();
    if (t.fiber->finished()) {
        t.ended = true;
        ++ended_;
    } else {
        for (const auto& [stopped, calls] : config_.faults.stalled)
            if (stopped == rank && t.calls == calls) t.stalled = true;
        recheck(e.owner);
    }
    if (p.kind == Pending::write) {
        touched(rank, p.begin, p.end);
        // A slot that is written by hand starts its history anew.
        history_.erase(history_.lower_bound({rank, p.begin}), history_.lower_bound({rank, p.end}));
    }
    if (p.kind == Pending::arrive)
        for (std::size_t i = 0; i < threads_.size(); ++i) recheck(int(i));
}

// Memory changed: threads of that rank that wait on it may go on (or no longer).
void World::touched(int rank, std::uint64_t begin, std::uint64_t end) {
    for (std::size_t i = 0; i < threads_.size(); ++i) {
        if (rank_of(int(i)) != rank) continue;
        const Pending& p = threads_[i]->pending;
        if (p.kind == Pending::wait && p.begin < end && begin < p.end) recheck(int(i));
        if (config_.thread_rank.size() == std::size_t(config_.ranks)) break;  // one thread for each rank
    }
}

// --- operations

World::Group& World::group_of(const Operation& op) {
    const std::tuple<int, int, int> key = config_.profile.origin_scope ? std::tuple{int(op.thread), -1, -1}
                                                                       : std::tuple{int(op.thread), op.peer, op.queue};
    const std::size_t index = config_.profile.origin_scope
                                  ? std::size_t(op.thread)
                                  : std::size_t((int(op.thread) * config_.ranks + op.peer) * config_.queues + op.queue);
    if (groups_.size() <= index) groups_.resize(index + 1);
    groups_[index].key = key;
    return groups_[index];
}

bool World::lost(const Operation& op) const {
    const auto& f = config_.faults;
    const OperationName name{op.thread, op.number};
    return (f.lost && *f.lost == name) || (f.error_completion && *f.error_completion == name);
}

std::uint32_t World::issue(Operation op, const void* src) {
    const auto id = std::uint32_t(operations_.size());
    op.number = std::uint32_t(by_thread_[op.thread].size());
    by_thread_[op.thread].push_back(id);
    Group& g = group_of(op);
    op.sequence = g.next++;
    Flight f;
    f.group = std::uint32_t(&g - groups_.data());
    f.src = static_cast<const std::byte*>(src);
    f.issue_step = step_;
    f.never = lost(op);
    f.unreported = config_.faults.lost_completion == OperationName{op.thread, op.number};
    if (src) f.source_hash = hash_bytes(f.src, op.bytes);
    if (config_.piece_bytes && op.bytes > config_.piece_bytes && !op.is_signal)
        f.pieces = f.pieces_left =
            std::uint8_t(std::min<std::size_t>((op.bytes + config_.piece_bytes - 1) / config_.piece_bytes, 8));
    g.by_order[int(op.order)].push_back(id);
    operations_.push_back(op);
    flights_.push_back(std::move(f));
    Event event{What::issue, op.thread, op.rank, id};
    add_event(event);

    const bool now = config_.profile.at_issue || op.peer == op.rank;
    const bool reads_later = src && !now && !config_.profile.source_read_at_issue;
    Outstanding& o = outstanding_of(op);
    ++o.writes;
    if (reads_later) {
        ++o.reads;
        make_ready({op.thread, op.number, Entity::source_read});
        return id;
    }
    Flight& flight = flights_[id];
    flight.source_done = true;
    if (src) flight.data.assign(flight.src, flight.src + op.bytes);
    if (now) {
        flight.never = false;
        deliver_bytes(id, 0, op.bytes);
        flight.pieces_left = 0;
        if (config_.track) flight.write_steps.push_back(step_);
        complete(id);
    } else if (may_deliver(id)) {
        for (int k = 0; k < flight.pieces; ++k)
            if (!flight.never) make_ready({op.thread, op.number, std::uint8_t(Entity::piece + k)});
    } else {
        flight.blocked = true;
        groups_[flight.group].blocked.push_back(id);
    }
    return id;
}

bool World::may_deliver(std::uint32_t id) const {
    const Operation& op = operations_[id];
    const Flight& f = flights_[id];
    if (!f.source_done) return false;
    if (op.bundled_with >= 0 && !flights_[std::size_t(op.bundled_with)].complete) return false;
    const Effect effect = op.is_signal ? Effect::signal : Effect::put;
    const Group& g = groups_[f.group];
    for (int c = 0; c < 3; ++c) {
        if (!config_.profile.must_precede(Order(c), effect, op.order)) continue;
        if (g.head[c] < g.by_order[c].size() && operations_[g.by_order[c][g.head[c]]].sequence < op.sequence)
            return false;
    }
    return true;
}

void World::recheck_group(Group& g) {
    for (std::size_t i = 0; i < g.blocked.size();) {
        const std::uint32_t id = g.blocked[i];
        if (!may_deliver(id)) {
            ++i;
            continue;
        }
        g.blocked.erase(g.blocked.begin() + std::ptrdiff_t(i));
        Flight& f = flights_[id];
        f.blocked = false;
        for (int k = 0; k < f.pieces; ++k)
            if (!f.never) make_ready({operations_[id].thread, operations_[id].number, std::uint8_t(Entity::piece + k)});
    }
}

void World::read_source(std::uint32_t id) {
    const Operation& op = operations_[id];
    Flight& f = flights_[id];
    take({op.thread, op.number, Entity::source_read});
    f.data.assign(f.src, f.src + op.bytes);
    f.source_done = true;
    if (hash_bytes(f.data.data(), op.bytes) != f.source_hash && op.src_offset < 0)
        report({Problem::source_changed, op.rank,
                "the source of " + name(id) + " changed before the transport had read it"});
    if (op.src_offset >= 0) {
        Event e{What::source_read,
                op.thread,
                op.rank,
                id,
                std::uint64_t(op.src_offset),
                std::uint64_t(op.src_offset) + op.bytes};
        add_event(e);
    }
    info_.what = What::source_read;
    if (config_.track) enabling_steps(info_.entity);
    f.source_step = step_;
    --outstanding_of(op).reads;
    Group& g = groups_[f.group];
    f.blocked = true;
    g.blocked.insert(std::upper_bound(g.blocked.begin(), g.blocked.end(), id), id);
    recheck_group(g);
    for (std::size_t i = 0; i < threads_.size(); ++i)
        if (rank_of(int(i)) == op.rank && threads_[i]->pending.kind == Pending::quiet) recheck(int(i));
}

void World::deliver_bytes(std::uint32_t id, std::size_t from, std::size_t bytes) {
    const Operation& op = operations_[id];
    std::byte* target = windows_[std::size_t(op.peer)].data() + op.dst;
    if (op.is_signal) {
        const std::uint64_t value = (op.op == SignalOp::add ? slot(op.peer, op.dst) : 0) + op.value;
        std::memcpy(target, &value, 8);
        if (config_.least_waits) history_[{op.peer, op.dst}].push_back(value);
    } else {
        std::memcpy(target + from, flights_[id].data.data() + from, bytes);
    }
    Event e{What::deliver, op.thread, op.rank, id, op.dst + from, op.dst + from + bytes};
    if (bytes >= 8) {  // what a wait on this word would see
        e.value = slot(op.peer, op.dst + from);
        info_.stores = true;
        info_.op = op.is_signal ? op.op : SignalOp::set;
        info_.value = op.is_signal ? op.value : e.value;
    }
    add_event(e);
    touched(op.peer, op.dst + from, op.dst + from + bytes);
}

void World::deliver(Entity e) {
    const std::uint32_t id = find(e);
    const Operation& op = operations_[id];
    Flight& f = flights_[id];
    take(e);
    const std::size_t step = f.pieces > 1 ? (op.bytes + f.pieces - 1) / f.pieces : op.bytes;
    const std::size_t from = std::size_t(e.unit - Entity::piece) * step;
    info_.what = What::deliver;
    if (config_.track) {
        enabling_steps(e);
        f.write_steps.push_back(step_);
    }
    deliver_bytes(id, from, std::min(step, op.bytes - from));
    if (--f.pieces_left == 0) complete(id);
}

void World::complete(std::uint32_t id) {
    const Operation op = operations_[id];
    Flight& f = flights_[id];
    f.complete = true;
    std::vector<std::byte>().swap(f.data);
    Group& g = groups_[f.group];
    auto& list = g.by_order[int(op.order)];
    auto& head = g.head[int(op.order)];
    while (head < list.size() && flights_[list[head]].complete) ++head;
    if (!f.unreported) --outstanding_of(op).writes;
    recheck_group(g);
    for (std::size_t i = 0; i < threads_.size(); ++i) {
        if (rank_of(int(i)) != op.rank) continue;
        const auto kind = threads_[i]->pending.kind;
        if (kind == Pending::quiet || kind == Pending::credit) recheck(int(i));
        if (config_.thread_rank.size() == std::size_t(config_.ranks)) break;
    }
}

// --- steps

const StepInfo& World::execute(Entity e) {
    info_.entity = e;
    info_.enabled_by.clear();
    info_.stores = false;
    info_.value = 0;
    if (config_.track) info_.accesses = footprint(e);
    if (e.unit == Entity::thread)
        run_thread(e);
    else if (e.unit == Entity::source_read)
        read_source(find(e));
    else
        deliver(e);
    ++step_;
    return info_;
}

std::vector<Access> World::footprint(Entity e) const {
    if (e.unit == Entity::thread) {
        const Pending& p = threads_[e.owner]->pending;
        switch (p.kind) {
            case Pending::read:
                return {{Access::read, p.rank, p.begin, p.end}};
            case Pending::write:
                return {{Access::write, p.rank, p.begin, p.end}};
            case Pending::write_at:
                return {{p.access, p.rank, p.begin, p.end}};
            case Pending::wait: {
                std::vector<Access> all{
                    {config_.least_waits ? Access::least_wait : Access::wait, p.rank, p.begin, p.end}};
                if (p.later_view)
                    all.push_back({Access::read, 0, config_.views, config_.views + 8 * config_.most_views});
                return all;
            }
            default:
                return {};
        }
    }
    const Operation& op = operations_[find(e)];
    if (e.unit == Entity::source_read) {
        if (op.src_offset < 0) return {};
        return {{Access::read, op.rank, std::uint64_t(op.src_offset), std::uint64_t(op.src_offset) + op.bytes}};
    }
    const Flight& f = flights_[find(e)];
    const std::size_t step = f.pieces > 1 ? (op.bytes + f.pieces - 1) / f.pieces : op.bytes;
    const std::uint64_t from = op.dst + std::uint64_t(e.unit - Entity::piece) * step;
    const Access::Kind kind = !op.is_signal ? Access::write : op.op == SignalOp::add ? Access::add : Access::set;
    return {{kind, op.peer, from, std::min(from + step, op.dst + op.bytes)}};
}

// Steps that this one could not have run without, for the happens-before relation of a schedule.
void World::enabling_steps(Entity e) {
    auto& out = info_.enabled_by;
    const auto add_writes = [&](const Flight& f) { out.insert(out.end(), f.write_steps.begin(), f.write_steps.end()); };
    if (e.unit == Entity::thread) {
        const Thread& t = *threads_[e.owner];
        if (t.last_step != no_step) out.push_back(t.last_step);
        const Pending& p = t.pending;
        if (p.kind == Pending::pass) out.insert(out.end(), arrive_steps_.begin(), arrive_steps_.end());
        if (p.kind != Pending::quiet && p.kind != Pending::credit) return;
        for (std::size_t i = 0; i < operations_.size(); ++i) {
            const Operation& op = operations_[i];
            if (op.rank != p.rank || (p.peer >= 0 && op.peer != p.peer) || (p.queue >= 0 && op.queue != p.queue))
                continue;
            if (flights_[i].source_step != no_step) out.push_back(flights_[i].source_step);
            if (p.remote) add_writes(flights_[i]);
        }
        return;
    }
    const std::uint32_t id = find(e);
    const Operation& op = operations_[id];
    const Flight& f = flights_[id];
    out.push_back(f.issue_step);
    if (e.unit == Entity::source_read) return;
    if (f.source_step != no_step) out.push_back(f.source_step);
    if (op.bundled_with >= 0) add_writes(flights_[std::size_t(op.bundled_with)]);
    const Effect effect = op.is_signal ? Effect::signal : Effect::put;
    for (int c = 0; c < 3; ++c) {
        if (!config_.profile.must_precede(Order(c), effect, op.order)) continue;
        for (const std::uint32_t other : groups_[f.group].by_order[c]) {
            if (operations_[other].sequence >= op.sequence) break;
            add_writes(flights_[other]);
        }
    }
}

std::vector<World::PrivateSource> World::private_sources(int thread) const {
    std::vector<PrivateSource> out;
    for (const std::uint32_t id : by_thread_[std::size_t(thread)])
        if (flights_[id].source_step != no_step && operations_[id].src_offset < 0)
            out.push_back({id, flights_[id].source_step});
    return out;
}

bool World::source_unchanged(std::uint32_t id) const {
    return hash_bytes(flights_[id].src, operations_[id].bytes) == flights_[id].source_hash;
}

// Without views each error names the rank that was awaited. With them it names the rank at the end of the chain of waits,
// as the shared-memory transport does: the others would mask one that is only waiting itself.
int World::root_of(int source) const {
    int root = source;
    for (std::size_t hops = 0; config_.views && hops < threads_.size(); ++hops) {
        const Thread& t = *threads_[std::size_t(root)];
        if (t.ended || t.stalled || t.pending.kind != Pending::wait) break;
        root = t.pending.source;
    }
    return root;
}

std::uint64_t World::newest_view() const {
    std::uint64_t view = 0;
    while (view + 1 < config_.most_views && slot(0, config_.views + 8 * (view + 1))) ++view;
    return view;
}

void World::views_changed() {
    for (std::size_t i = 0; i < threads_.size(); ++i)
        if (threads_[i]->pending.kind == Pending::wait) recheck(int(i));
}

bool World::gone(int thread) const {
    const Thread& t = *threads_[std::size_t(thread)];
    return (t.ended && !config_.faults.idle_at_end) || (t.stalled && config_.faults.resume == Faults::never);
}

std::uint32_t World::calls_of(int thread) const { return threads_[std::size_t(thread)]->calls; }

void World::wake_stalled() {
    for (std::size_t i = 0; i < threads_.size(); ++i) {
        threads_[i]->stalled = false;
        recheck(int(i));
    }
}

bool World::stir() {
    if (!config_.faults.any() || stopped_ || all_ended()) return false;
    const bool timed_out = time_out_waiting();
    const Faults::Resume resume = config_.faults.resume;
    const bool wakes = resume != Faults::never && !noticed_ && (resume == Faults::noticed || !timed_out);
    if (wakes) {
        noticed_ = true;
        wake_stalled();
    }
    return timed_out || wakes;
}

bool World::time_out_waiting() {
    bool any = false;
    for (auto& t : threads_) {
        const Pending& p = t->pending;
        t->names = p.kind == Pending::wait ? root_of(p.source) : p.peer;
    }
    for (std::size_t i = 0; i < threads_.size(); ++i) {
        Thread& t = *threads_[i];
        if (t.ended || t.stalled || t.ready) continue;
        t.timed_out = true;
        t.exceptions.exchange();
        t.fiber->resume();
        t.exceptions.exchange();
        any = true;
        if (t.fiber->finished()) {
            t.ended = true;
            ++ended_;
        } else {
            recheck(int(i));
        }
    }
    return any;
}

bool World::hangs() const {
    return std::any_of(threads_.begin(), threads_.end(), [](const auto& t) { return !t->ended && !t->stalled; });
}

std::string World::waiting_text() const {
    std::string out;
    for (std::size_t i = 0; i < threads_.size(); ++i) {
        const Thread& t = *threads_[i];
        if (t.ended) continue;
        const Pending& p = t.pending;
        out += (out.empty() ? "rank " : "; rank ") + std::to_string(rank_of(int(i)));
        if (p.kind == Pending::wait)
            out += " waits for rank " + std::to_string(p.source) + " in '" + p.stage + "': expected " +
                   std::to_string(p.at_least) + ", seen " + std::to_string(slot(p.rank, p.begin));
        else if (p.kind == Pending::quiet || p.kind == Pending::credit)
            out += std::string(" waits in '") + p.stage + "' on queue " + std::to_string(p.queue);
        else
            out += " does not run";
    }
    return out;
}

std::string World::name(std::uint32_t id) const {
    const Operation& op = operations_[id];
    static const char* orders[] = {"none", "relaxed", "strong"};
    return std::string(op.is_signal ? "signal" : "put") + " " + std::to_string(op.thread) + "." +
           std::to_string(op.number) + " (" + orders[int(op.asked)] + ", rank " + std::to_string(op.rank) + " to " +
           std::to_string(op.peer) + ", queue " + std::to_string(op.queue) + ", bytes " + std::to_string(op.dst) +
           " ... " + std::to_string(op.dst + op.bytes) + ")";
}

}  // namespace hal::checker
