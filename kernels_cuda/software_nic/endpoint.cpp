// SPDX-License-Identifier: Apache-2.0
#include "endpoint.hpp"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <stdexcept>

#include "log.hpp"

namespace hal::swnic {
namespace {

constexpr Nanos check_every = 1'000'000;  // ns between looks at the peers' sockets
constexpr int largest_drain = 256;        // signals of one source applied in one round
constexpr std::size_t bounce_bytes = 16u << 20;
constexpr double drain_seconds = 2;  // for what is still held or stalled when queues are destroyed

struct Joining {
    std::uint32_t version, nranks;
    DeviceId device;
};
constexpr std::uint32_t protocol_version = 1;

struct RegionNotice {
    std::uint32_t id;
    std::uint32_t host;
    std::uint64_t bytes, flags;
    std::uint64_t process, allocation, allocation_bytes, offset;  // allocation 0: not reachable by peers
    DeviceId device;
    char error[256];
};

template <class T>
T read_as(const Message& message, const char* what) {
    T value;
    if (message.bytes.size() != sizeof value) throw std::runtime_error(std::string(what) + ": unexpected message");
    std::memcpy(&value, message.bytes.data(), sizeof value);
    return value;
}

template <class T>
std::span<const std::byte> bytes_of(const T& value) {
    return std::as_bytes(std::span(&value, 1));
}

}  // namespace

// ---- QueueSet

QueueSet::QueueSet(Endpoint& endpoint_, int count_, int stride_) : endpoint(endpoint_), count(count_), stride(stride_) {
    const Config& config = endpoint.config_;
    int first = endpoint.take_queue_numbers(count);
    for (int queue = 0; queue < count; ++queue)
        for (int peer = 0; peer < endpoint.nranks_; ++peer) {
            if (!reaches(peer)) {
                flows.push_back(nullptr);
                continue;
            }
            FlowId id{endpoint.rank_, peer, first + queue};
            FlowFaults faults = parse_faults(config.faults, id);
            flows.push_back(std::make_unique<Flow>(
                id, FaultPolicy(faults, config.seed, id),
                endpoint.device_->make_lane(faults.source_early ? bounce_bytes : 0), config.queue_depth,
                [&e = endpoint](int target, const SignalEntry& entry) { return e.publish(target, entry); }));
        }
}

bool QueueSet::reaches(int peer) const {
    return (peer - endpoint.rank_ + endpoint.nranks_) % endpoint.nranks_ % stride == 0;
}

Flow* QueueSet::flow(int queue, int peer) const {
    return flows[static_cast<std::size_t>(queue * endpoint.nranks_ + peer)].get();
}

Request* QueueSet::post(Operation operation) {
    std::lock_guard lock(mutex_);
    if (free_.empty()) {
        requests_.emplace_back().owner = this;
        free_.push_back(&requests_.back());
    }
    Request* request = free_.back();
    free_.pop_back();
    request->state.store(RequestState::pending, std::memory_order_relaxed);
    operation.request = request;
    operation.posted = now_ns();
    posted_.push_back(std::move(operation));
    posted_count_.store(posted_.size(), std::memory_order_release);
    return request;
}

void QueueSet::give_back(Request* request) {
    std::lock_guard lock(mutex_);
    free_.push_back(request);
}

bool QueueSet::take_posted(std::vector<Operation>& into) {
    if (posted_count_.load(std::memory_order_acquire) == 0) return false;
    std::lock_guard lock(mutex_);
    into.swap(posted_);
    for (Operation& operation : into) flow(operation.queue, operation.peer)->note_posted(operation);
    posted_count_.store(0, std::memory_order_release);
    return true;
}

bool QueueSet::drained() const {
    if (posted_count_.load(std::memory_order_acquire)) return false;
    return std::all_of(flows.begin(), flows.end(), [](const auto& flow) { return !flow || flow->idle(); });
}

void Totals::add(const FlowCounters& flow) {
    puts += flow.puts, gets += flow.gets, signals += flow.signals, bytes += flow.bytes, pieces += flow.pieces;
    copies += flow.copies, ended += flow.ended, failed += flow.failed, busy_ns += flow.busy_ns;
    most_waiting = std::max<std::uint64_t>(most_waiting, flow.most_waiting);
}

// ---- Endpoint: joining and leaving

Endpoint::Endpoint(const Listener& listener, std::span<const Handle> handles, int rank)
    : config_(Config::from_environment()), device_(config_.host_device ? host_device() : cuda_device(config_.copy)),
      rank_(rank), nranks_(static_cast<int>(handles.size())), mesh_(listener, handles, rank, config_.timeout),
      lost_(handles.size(), false) {
    Fd memory;
    if (rank_ == 0) memory = Fd(SharedRings::create(nranks_));
    Joining mine{protocol_version, static_cast<std::uint32_t>(nranks_), device_->id()};
    auto joined = mesh_.exchange(bytes_of(mine), memory.get(), config_.timeout, "joining");
    for (std::size_t peer = 0; peer < joined.size(); ++peer) {
        auto theirs = read_as<Joining>(joined[peer], "joining");
        if (theirs.version != mine.version || theirs.nranks != mine.nranks)
            throw std::runtime_error("rank " + std::to_string(peer) + " has plug-in protocol " +
                                     std::to_string(theirs.version) + " and " + std::to_string(theirs.nranks) +
                                     " ranks, this one " + std::to_string(mine.version) + " and " +
                                     std::to_string(mine.nranks) + "; use one build of the plug-in on all ranks");
    }
    if (rank_ != 0) memory = std::move(joined[0].fd);
    rings_ = std::make_unique<SharedRings>(memory.get(), nranks_);
    rings_->cell(rank_).state.store(RankState::live);
    info("software NIC: rank %d of %d on %s, %s", rank_, nranks_, device_->name(), config_.describe().c_str());
    wire_ = std::thread([this] { wire(); });
    if (config_.watchdog > 0) watch_ = std::thread([this] { watch(); });
}

Endpoint::~Endpoint() {
    drain([this] {
        std::lock_guard lock(tables_);
        return std::all_of(sets_.begin(), sets_.end(), [](const auto& set) { return set->drained(); });
    });
    // Closed before the socket goes: the others must not take a clean end for a death.
    rings_->cell(rank_).state.store(RankState::closed, std::memory_order_release);
    {
        std::lock_guard lock(watch_mutex_);
        stop_.store(true);
    }
    watch_wakes_.notify_all();
    if (watch_.joinable()) watch_.join();
    if (wire_.joinable()) wire_.join();
    write_stats();
}

void Endpoint::drain(const std::function<bool()>& empty) const {
    Nanos deadline = now_ns() + static_cast<Nanos>(std::min(drain_seconds, config_.timeout) * 1e9);
    while (!empty() && now_ns() < deadline) usleep(200);
}

// ---- Endpoint: regions

std::shared_ptr<MemoryRegion> Endpoint::register_memory(Address base, std::size_t bytes, bool host,
                                                        std::uint64_t flags) {
    std::lock_guard one_at_a_time(collective_);
    auto region = std::make_shared<MemoryRegion>();
    region->id = next_region_++;
    region->base = base, region->bytes = bytes, region->host = host;
    region->strict_order = flags & abi::mr_force_strict_order;
    region->signals = flags & abi::mr_signal_never_reset;
    region->never_reset = region->signals && !host && config_.signal_shadow;
    if (region->never_reset) region->shadow.assign(bytes / sizeof(std::uint64_t), 0);  // NCCL zeroes its signals

    RegionNotice mine{};
    mine.id = region->id, mine.host = host, mine.bytes = bytes, mine.flags = flags;
    mine.process = process_nonce(), mine.device = device_->id();
    try {
        if (!host) region->allocation = export_shared(*device_, base);
    } catch (const std::exception& error) {
        // Told to all, so that every rank fails now instead of waiting for this one.
        std::strncpy(mine.error, error.what(), sizeof mine.error - 1);
    }
    if (auto& allocation = region->allocation) {
        mine.allocation = allocation->id, mine.allocation_bytes = allocation->bytes;
        mine.offset = base - allocation->base;
    }
    {
        // In the table before any peer can know of it: a peer may signal as soon as it has the notice.
        std::lock_guard lock(tables_);
        regions_[region->id] = region;
    }
    try {
        auto messages = mesh_.exchange(bytes_of(mine), region->allocation ? region->allocation->fd.get() : -1,
                                       config_.timeout, "registering memory");
        import_peers(*region, messages);
    } catch (...) {
        deregister(region->id);
        throw;
    }
    return region;
}

void Endpoint::import_peers(MemoryRegion& region, std::vector<Message>& messages) {
    region.peers.resize(messages.size());
    for (std::size_t peer = 0; peer < messages.size(); ++peer) {
        auto notice = read_as<RegionNotice>(messages[peer], "registering memory");
        auto name = "memory region " + std::to_string(region.id) + ": rank " + std::to_string(peer);
        if (notice.error[0]) throw std::runtime_error(name + " cannot export it: " + notice.error);
        if (notice.id != region.id || notice.bytes != region.bytes ||
            notice.host != static_cast<std::uint32_t>(region.host))
            throw std::runtime_error(name + " registered number " + std::to_string(notice.id) + " with " +
                                     std::to_string(notice.bytes) + " bytes, this rank " +
                                     std::to_string(region.bytes) +
                                     "; all ranks must register the same sizes in the same order");
        PeerRegion& there = region.peers[peer];
        if (static_cast<int>(peer) == rank_) {
            there.base = region.base;
        } else if (notice.allocation) {
            there.mapping = import_shared(device_, notice.process, notice.allocation, messages[peer].fd.get(),
                                          notice.allocation_bytes);
            there.base = there.mapping->base + notice.offset;
            there.same_device = notice.device == device_->id();
        }
    }
}

void Endpoint::deregister(std::uint32_t region) {
    std::lock_guard lock(tables_);
    regions_.erase(region);
}

std::shared_ptr<MemoryRegion> Endpoint::find_region(std::uint32_t id) {
    std::lock_guard lock(tables_);
    auto found = regions_.find(id);
    return found == regions_.end() ? nullptr : found->second;
}

// ---- Endpoint: queues

int Endpoint::take_queue_numbers(int count) {
    std::lock_guard lock(tables_);
    int first = next_queue_;
    next_queue_ += count;
    return first;
}

QueueSet* Endpoint::create_queues(int count, int stride) {
    auto set = std::make_shared<QueueSet>(*this, count, stride);
    std::lock_guard lock(tables_);
    sets_.push_back(set);
    ++tables_version_;
    return set.get();
}

void Endpoint::destroy_queues(QueueSet* set) {
    // What was posted is still delivered: a completed request promised only that its source was read.
    drain([set] { return set->drained(); });
    std::uint64_t version;
    {
        std::lock_guard lock(tables_);
        auto found = std::find_if(sets_.begin(), sets_.end(), [set](const auto& one) { return one.get() == set; });
        if (found == sets_.end()) return;
        for (const auto& flow : set->flows)
            if (flow) retired_.add(flow->counters());
        sets_.erase(found);
        version = ++tables_version_;
    }
    // What was still held must not start once this returns: its memory may then be freed.
    drain([&] { return served_version_.load(std::memory_order_acquire) >= version; });
}

// ---- Endpoint: the wire thread

void Endpoint::wire() {
    pthread_setname_np(pthread_self(), "hal-swnic wire");
    try {
        device_->bind_thread();
    } catch (const std::exception& error) {
        fail_all(error.what());
    }
    const Nanos spin = static_cast<Nanos>(config_.spin_us * 1e3);
    Nanos next_check = 0, idle_since = now_ns();
    while (!stop_.load(std::memory_order_acquire)) {
        Nanos now = now_ns();
        rings_->cell(rank_).heartbeat.store(now, std::memory_order_relaxed);
        if (now >= next_check) {
            notice_departures();
            next_check = now + check_every;
        }
        bool moved = false;
        try {
            doing_.store("moving data", std::memory_order_relaxed);
            moved = serve(now);
            doing_.store("applying signals", std::memory_order_relaxed);
            moved |= apply_signals();
            doing_.store("polling", std::memory_order_relaxed);
        } catch (const std::exception& error) {
            fail_all(error.what());
        }
        if (moved) {
            progress_.fetch_add(1, std::memory_order_relaxed);
            idle_since = now;
        } else if (copying_ || now - idle_since < spin) {
            std::this_thread::yield();
        } else {
            std::this_thread::sleep_for(std::chrono::microseconds(20));
        }
    }
}

// The device refuses: nothing can be delivered any more, and everybody who asks is told so.
void Endpoint::fail_all(const char* why) {
    if (!device_failed_) warn("rank %d: the software NIC stops delivering: %s", rank_, why);
    device_failed_ = true;
    for (auto& set : served_)
        for (int peer = 0; peer < nranks_; ++peer) break_flows(*set, peer, RequestState::failed);
    usleep(1000);
}

void Endpoint::take_queues() {
    std::vector<std::shared_ptr<QueueSet>> before;
    std::uint64_t version;
    {
        std::lock_guard lock(tables_);
        before.swap(served_);
        served_ = sets_;
        version = tables_version_.load();
    }
    for (auto& set : served_)
        for (int peer = 0; peer < nranks_; ++peer)
            if (device_failed_ || lost_[static_cast<std::size_t>(peer)])
                break_flows(*set, peer, device_failed_ ? RequestState::failed : lost_state());
    before.clear();  // outside the lock: a queue that ends may wait for its copies
    served_version_.store(version, std::memory_order_release);
}

bool Endpoint::serve(Nanos now) {
    if (tables_version_.load() != served_version_.load()) take_queues();
    bool moved = false;
    std::uint64_t pending = 0;
    copying_ = false;
    for (auto& set : served_) {
        scratch_.clear();
        if (set->take_posted(scratch_)) {
            moved = true;
            for (Operation& operation : scratch_)
                set->flow(operation.queue, operation.peer)->post(std::move(operation));
        }
        for (auto& flow : set->flows) {
            if (!flow || flow->idle()) continue;
            moved |= flow->advance(now);
            copying_ |= flow->copying();
            if (flow->error()) set->failed.store(true, std::memory_order_release);
            pending += flow->pending();
        }
    }
    pending_.store(pending, std::memory_order_relaxed);
    return moved;
}

bool Endpoint::publish(int peer, const SignalEntry& entry) {
    if (rings_->ring(rank_, peer).push(entry)) return true;
    // Nobody drains a closed rank's ring any more; its signals concern nobody.
    return rings_->cell(peer).state.load(std::memory_order_acquire) == RankState::closed;
}

// In ring order: a signal must not pass an earlier one of its source. Neighbours on one word are one addition.
bool Endpoint::apply_signals() {
    bool moved = false;
    for (int source = 0; source < nranks_; ++source) {
        auto& ring = rings_->ring(source, rank_);
        for (int n = 0; n < largest_drain && ring.front(); ++n) {
            SignalEntry sum = *ring.front();
            ring.pop();
            for (; ring.front() && ring.front()->mr == sum.mr && ring.front()->offset == sum.offset; ring.pop())
                sum.add += ring.front()->add;
            auto region = find_region(sum.mr);
            if (region && sum.offset + sizeof(std::uint64_t) <= region->bytes) {
                apply(*region, sum);
                applied_.fetch_add(1, std::memory_order_relaxed);
            } else {
                orphaned_.fetch_add(1, std::memory_order_relaxed);  // the region is gone: its owner stopped caring
            }
            moved = true;
        }
    }
    return moved;
}

void Endpoint::apply(MemoryRegion& region, const SignalEntry& entry) {
    Address word = region.base + entry.offset;
    if (region.host) {
        std::atomic_ref(*reinterpret_cast<std::uint64_t*>(word)).fetch_add(entry.add, std::memory_order_acq_rel);
    } else if (region.never_reset) {
        device_->write64(word, region.shadow[entry.offset / sizeof(std::uint64_t)] += entry.add);
    } else {
        device_->add64(word, entry.add);
    }
}

void Endpoint::notice_departures() {
    for (int peer : mesh_.departed()) {
        if (rings_->cell(peer).state.load(std::memory_order_acquire) == RankState::closed) continue;
        warn("rank %d: rank %d (pid %d) has died; its operations %s", rank_, peer, static_cast<int>(mesh_.pid(peer)),
             config_.peer_loss == PeerLoss::drop ? "are dropped and the others go on" : "fail");
        lost_[static_cast<std::size_t>(peer)] = true;
        for (auto& set : served_) break_flows(*set, peer, lost_state());
    }
}

RequestState Endpoint::lost_state() const {
    return config_.peer_loss == PeerLoss::drop ? RequestState::done : RequestState::failed;
}

void Endpoint::break_flows(QueueSet& set, int peer, RequestState state) {
    if (state == RequestState::failed && set.reaches(peer)) set.failed.store(true, std::memory_order_release);
    for (int queue = 0; queue < set.count; ++queue)
        if (Flow* flow = set.flow(queue, peer)) flow->break_down(state);
}

// ---- Endpoint: what it tells

void Endpoint::watch() {
    std::unique_lock lock(watch_mutex_);
    std::uint64_t seen = 0;
    Nanos since = now_ns();
    bool told = false;
    while (!stop_.load()) {
        watch_wakes_.wait_for(lock, std::chrono::milliseconds(50));
        std::uint64_t progress = progress_.load();
        if (progress != seen || pending_.load() == 0) {
            seen = progress, since = now_ns(), told = false;
        } else if (!told && now_ns() - since > static_cast<Nanos>(config_.watchdog * 1e9)) {
            told = true;  // once for each stall
            std::string text = dump();
            warn("%s", text.c_str());
        }
    }
}

std::string Endpoint::dump() {
    std::string text = "software NIC watchdog: rank " + std::to_string(rank_) + " of " + std::to_string(nranks_) +
                       " has made no progress for " + std::to_string(config_.watchdog) + " s while " + doing_.load() +
                       "; " + config_.describe();
    std::lock_guard lock(tables_);
    for (auto& set : sets_)
        for (auto& flow : set->flows)
            if (flow && flow->pending()) text += "\n  " + flow->state_text();
    for (int peer = 0; peer < nranks_; ++peer) {
        auto& cell = rings_->cell(peer);
        text += "\n  rank " + std::to_string(peer) + ": wire thread seen " +
                std::to_string((now_ns() - cell.heartbeat.load()) / 1'000'000) + " ms ago, " +
                std::to_string(rings_->ring(rank_, peer).waiting()) + " signals to it and " +
                std::to_string(rings_->ring(peer, rank_).waiting()) + " from it not applied" +
                (cell.state.load() == RankState::closed ? ", closed" : "");
    }
    for (auto& [id, region] : regions_)
        text += "\n  region " + std::to_string(id) + ": " + std::to_string(region->bytes) + " bytes" +
                (region->host         ? ", host"
                 : region->allocation ? ", exported"
                                      : ", not exported") +
                (region->strict_order ? ", strict order" : "") + (region->never_reset ? ", shadow" : "");
    return text;
}

void Endpoint::write_stats() {
    Totals all = retired_;
    for (auto& set : sets_)
        for (auto& flow : set->flows)
            if (flow) all.add(flow->counters());
    char line[640];
    std::snprintf(line, sizeof line,
                  "{\"rank\": %d, \"nranks\": %d, \"seed\": %llu, \"puts\": %llu, \"gets\": %llu, \"signals\": %llu, "
                  "\"bytes\": %llu, \"pieces\": %llu, \"copies\": %llu, \"ended\": %llu, \"failed\": %llu, "
                  "\"most_waiting\": %llu, \"us_per_op\": %.2f, \"signals_applied\": %llu, \"signals_orphaned\": %llu}",
                  rank_, nranks_, (unsigned long long)config_.seed, (unsigned long long)all.puts,
                  (unsigned long long)all.gets, (unsigned long long)all.signals, (unsigned long long)all.bytes,
                  (unsigned long long)all.pieces, (unsigned long long)all.copies, (unsigned long long)all.ended,
                  (unsigned long long)all.failed, (unsigned long long)all.most_waiting,
                  all.ended ? static_cast<double>(all.busy_ns) / 1e3 / static_cast<double>(all.ended) : 0.0,
                  (unsigned long long)applied_.load(), (unsigned long long)orphaned_.load());
    info("software NIC closes: %s; %s", line, config_.describe().c_str());
    if (config_.stats_path.empty()) return;
    if (std::FILE* file = std::fopen(config_.stats_path.c_str(), "a")) {
        std::fprintf(file, "%s\n", line);
        std::fclose(file);
    } else {
        warn("cannot write statistics to %s", config_.stats_path.c_str());
    }
}

}  // namespace hal::swnic
