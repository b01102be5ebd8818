// SPDX-License-Identifier: Apache-2.0
#include "emulation/block.hpp"

#include <sched.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <thread>
#include <utility>

#include "emulation/options.hpp"

namespace hal::cuda::emulation {

thread_local Thread* running = nullptr;

namespace {

constexpr std::byte kPoison{0xA5};
constexpr const char* kWarpWords[] = {"__syncwarp",      "__shfl_sync",   "__shfl_up_sync",   "__shfl_down_sync",
                                      "__shfl_xor_sync", "__ballot_sync", "__match_any_sync", "__reduce_add_sync"};
constexpr const char* kBlockWords[] = {"__syncthreads", "__syncthreads_and", "__syncthreads_or", "__syncthreads_count"};

std::string at(Site site) {
    const char* slash = std::strrchr(site.file, '/');
    return std::string(slash != nullptr ? slash + 1 : site.file) + ":" + std::to_string(site.line);
}

std::string hex(unsigned mask) {
    char text[16];
    std::snprintf(text, sizeof text, "0x%08x", mask);
    return text;
}

std::uint64_t now() { return static_cast<std::uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count()); }

}  // namespace

void Grid::fail(const std::string& text) {
    const std::lock_guard lock(mutex_);
    if (failed_.load(std::memory_order_relaxed)) return;
    failure_ = what + ": " + text;
    failed_.store(true, std::memory_order_release);
}

Block::Block(Grid& grid, unsigned index)
    : grid_(grid), index_(index), random_(grid.seed ^ (index + 1) * 0x9e3779b97f4a7c15ull),
      shared_(grid.shared_bytes + 2 * kGuard, kPoison), threads_(grid.threads), warps_((grid.threads + 31) / 32),
      regions_(emulation::regions()), keeps_back_(options().adversary), is_late_(random_.below(8) == 0),
      loads_early_(keeps_back_ && random_.below(2) == 0) {}

void Block::start() {
    for (unsigned i = 0; i < grid_.threads; ++i) {
        Thread& thread = threads_[i];
        thread.block = this, thread.thread = i;
        warps_[i >> 5].ready |= 1u << (i & 31);
        thread.fiber = std::make_unique<hal::Fiber>([this, &thread] {
            try {
                if (!abandoning_) {
                    grid_.kernel();
                    end(thread);
                }
            } catch (const Abandoned&) {
            } catch (const std::exception& error) {
                abandoning_ = true;
                grid_.fail(name(thread) + ": " + error.what());
            }
            thread.state = Thread::ended;
        });
    }
}

void Block::run() {
    start();
    while (ended_ < grid_.threads && !abandoning_) {
        const auto first = static_cast<unsigned>(random_.below(warps_.size()));
        for (unsigned i = 0; i < warps_.size() && !abandoning_; ++i) {
            Warp& warp = warps_[(first + i) % warps_.size()];
            // Lanes of a warp run in an order of the seed's choice: nothing may depend on it.
            const auto turn = static_cast<unsigned>(random_.next() & 31);
            while (warp.ready != 0 && !abandoning_)
                resume(warp, (std::countr_zero(std::rotr(warp.ready, static_cast<int>(turn))) + turn) & 31);
        }
        const bool stuck = std::none_of(warps_.begin(), warps_.end(), [](const Warp& w) { return w.ready != 0; });
        if (stuck && ended_ < grid_.threads && !abandoning_) idle();
    }
    for (Thread& thread : threads_) {  // unwind
        if (thread.state == Thread::ended) continue;
        running = &thread;
        thread.fiber->resume();
    }
    running = nullptr;
    let_out(true);
    if (!grid_.failed()) check_guards();
}

void Block::resume(Warp& warp, unsigned lane) {
    Thread& thread = threads_[static_cast<std::size_t>(&warp - warps_.data()) * 32 + lane];
    warp.ready &= ~(1u << lane);
    running = &thread;
    thread.fiber->resume();
}

void Block::wait(Thread& thread) {
    thread.fiber->yield();
    if (abandoning_) throw Abandoned{};
    thread.state = Thread::ready;
}

void Block::trap(const std::string& text) {
    abandoning_ = true;
    grid_.fail(text);
    throw Abandoned{};
}

void Block::end(Thread& thread) {
    thread.state = Thread::ended;
    ++ended_;
    warps_[thread.warp()].ended |= 1u << thread.lane();
    if (arrived_ > 0)
        trap(name(thread) + " has ended while " + name(threads_[first_]) + " waits in " +
             kBlockWords[static_cast<int>(meeting_)] + " at " + at(meeting_site_) +
             ": every thread of a block must come to a barrier");
}

// --- barriers ------------------------------------------------------------------------------------------------------

int Block::meet(Thread& thread, BlockWord word, int value, Site site) {
    if (arrived_ == 0) {
        meeting_ = word, meeting_site_ = site, first_ = thread.thread, true_ = 0;
    } else if (word != meeting_ || !(site == meeting_site_)) {
        trap("divergent barrier: " + name(threads_[first_]) + " is in " + kBlockWords[static_cast<int>(meeting_)] +
             " at " + at(meeting_site_) + ", " + name(thread) + " in " + kBlockWords[static_cast<int>(word)] + " at " +
             at(site));
    }
    if (ended_ > 0)
        trap("a barrier that not every thread comes to: " + name(thread) + " is in " +
             kBlockWords[static_cast<int>(word)] + " at " + at(site) + ", and " + std::to_string(ended_) +
             " threads have ended");
    true_ += value != 0;
    if (++arrived_ == grid_.threads) {
        finish_meeting();
        return meeting_result_;
    }
    thread.state = Thread::in_block, thread.site = site;
    wait(thread);
    return meeting_result_;
}

void Block::finish_meeting() {
    const int all = static_cast<int>(grid_.threads);
    meeting_result_ = meeting_ == BlockWord::all ? true_ == all : meeting_ == BlockWord::any ? true_ > 0 : true_;
    arrived_ = 0;
    if (mutation.load(std::memory_order_relaxed) != Mutation::barrier_without_order) {
        ++meetings_;
        std::uint32_t fresh = 0;
        for (const Thread& thread : threads_) fresh = std::max(fresh, thread.fresh);
        for (Thread& thread : threads_) thread.fresh = fresh;
    }
    for (Thread& thread : threads_)
        if (thread.state == Thread::in_block) warps_[thread.warp()].ready |= 1u << thread.lane();
}

// --- collectives of a warp -----------------------------------------------------------------------------------------

std::uint64_t Block::exchange(Thread& thread, WarpWord word, unsigned mask, std::uint64_t value, int argument,
                              Site site) {
    Warp& warp = warps_[thread.warp()];
    Thread* lanes = &threads_[thread.warp() * 32];
    const unsigned own = 1u << thread.lane();
    const unsigned present = static_cast<unsigned>(std::min<std::size_t>(32, grid_.threads - thread.warp() * 32));
    const unsigned exist = present == 32 ? 0xffffffffu : (1u << present) - 1u;
    const std::string_view name_of = kWarpWords[static_cast<int>(word)];
    if ((mask & own) == 0)
        trap(name(thread) + " calls " + std::string(name_of) + " at " + at(site) + " with mask " + hex(mask) +
             ", which does not name its own lane");
    if ((mask & (warp.ended | ~exist)) != 0)
        trap(name(thread) + " calls " + std::string(name_of) + " at " + at(site) + " with mask " + hex(mask) +
             ": lanes " + hex(mask & (warp.ended | ~exist)) + " have ended or do not exist");
    thread.word = word, thread.mask = mask, thread.value = value, thread.argument = argument, thread.site = site;
    warp.waiting |= own;
    if (complete(warp, lanes, thread)) {
        finish_exchange(warp, lanes, word, mask);
        warp.ready &= ~own;
        return thread.result;
    }
    thread.state = Thread::in_warp;
    wait(thread);
    return thread.result;
}

// Whether all lanes that `last` waits for wait with it. One that waits elsewhere may still come.
bool Block::complete(const Warp& warp, const Thread* lanes, const Thread& last) const {
    if ((warp.waiting & last.mask) != last.mask) return false;
    for (unsigned left = last.mask; left != 0; left &= left - 1) {
        const Thread& lane = lanes[std::countr_zero(left)];
        if (lane.mask != last.mask || lane.word != last.word || !(lane.site == last.site)) return false;
    }
    return true;
}

void Block::finish_exchange(Warp& warp, Thread* lanes, WarpWord word, unsigned mask) {
    if (word == WarpWord::sync) order_warp(warp, lanes, mask);
    std::uint64_t folded = 0;
    for (unsigned left = mask; left != 0; left &= left - 1) {
        const int l = std::countr_zero(left);
        if (word == WarpWord::ballot && lanes[l].value != 0) folded |= 1ull << l;
        if (word == WarpWord::add) folded += lanes[l].value;
    }
    for (unsigned left = mask; left != 0; left &= left - 1) {
        const int l = std::countr_zero(left);
        Thread& lane = lanes[l];
        int source = l;
        if (word == WarpWord::shfl) source = lane.argument;
        if (word == WarpWord::shfl_up) source = l < lane.argument ? l : l - lane.argument;
        if (word == WarpWord::shfl_down) source = l + lane.argument > 31 ? l : l + lane.argument;
        if (word == WarpWord::shfl_xor) source = (l ^ lane.argument) & 31;
        if (word <= WarpWord::shfl_xor && (mask >> source & 1u) == 0)
            trap(name(lane) + " reads lane " + std::to_string(source) + " in " + kWarpWords[static_cast<int>(word)] +
                 " at " + at(lane.site) + ", which mask " + hex(mask) + " does not name");
        if (word <= WarpWord::shfl_xor) lane.result = lanes[source].value;
        if (word == WarpWord::ballot) lane.result = folded;
        if (word == WarpWord::add) lane.result = static_cast<std::uint32_t>(folded);
        if (word != WarpWord::match) continue;
        lane.result = 0;
        for (unsigned other = mask; other != 0; other &= other - 1)
            if (lanes[std::countr_zero(other)].value == lane.value) lane.result |= 1ull << std::countr_zero(other);
    }
    warp.waiting &= ~mask;
    warp.ready |= mask;
}

// --- waits ---------------------------------------------------------------------------------------------------------

void Block::poll(Thread& thread) {
    thread.state = Thread::polling;
    warps_[thread.warp()].polling |= 1u << thread.lane();
    wait(thread);
}

// Every thread waits: those that look at memory look again, after other blocks and ranks had the processor.
void Block::idle() {
    if (grid_.failed()) {
        abandoning_ = true;
        return;
    }
    let_out(false);
    // While a block waits, what it waits for has not come: the moment from which an early load is most likely wrong.
    if (loads_early_ && (early_.number() == 0 || random_.below(64) == 0)) early_.take(*regions_, grid_.device);
    unsigned polling = 0;
    for (Warp& warp : warps_) {
        polling |= warp.polling;
        warp.ready = std::exchange(warp.polling, 0u);
    }
    if (polling == 0) {
        abandoning_ = true;
        grid_.fail("block " + std::to_string(index_) + " can never go on: " + who_waits());
        return;
    }
    if (progress_) {
        progress_ = false, idle_turns_ = 0;
        return;
    }
    if (++idle_turns_ < 16) {
        sched_yield();
        return;
    }
    if (idle_turns_ == 16) idle_since_ = now();
    if (static_cast<double>(now() - idle_since_) * 1e-9 > options().limit_seconds) {
        abandoning_ = true;
        char seconds[32];
        std::snprintf(seconds, sizeof seconds, "%g", options().limit_seconds);
        grid_.fail("block " + std::to_string(index_) + " has only looked at memory for " + seconds +
                   " s: a wait without a time limit? (HAL_CUDA_EMULATOR_LIMIT sets the seconds) " + who_waits());
        return;
    }
    std::this_thread::sleep_for(std::chrono::microseconds(std::min(idle_turns_, 100)));
}

void Block::check_guards() {
    const auto touched = [&](std::size_t from) {
        return std::any_of(shared_.begin() + static_cast<std::ptrdiff_t>(from),
                           shared_.begin() + static_cast<std::ptrdiff_t>(from + kGuard),
                           [](std::byte b) { return b != kPoison; });
    };
    if (touched(0) || touched(kGuard + grid_.shared_bytes))
        grid_.fail("block " + std::to_string(index_) + " wrote outside of its " + std::to_string(grid_.shared_bytes) +
                   " bytes of dynamic shared memory");
}

// --- memory --------------------------------------------------------------------------------------------------------

bool Block::is_window(const void* p, std::size_t bytes) {
    if (last_region_ == nullptr || !last_region_->holds(p)) {
        const auto after = std::upper_bound(regions_->begin(), regions_->end(), p, [](const void* at, const Region& r) {
            return static_cast<const std::byte*>(at) < r.begin;
        });
        if (after == regions_->begin() || !std::prev(after)->holds(p)) return false;
        last_region_ = &*std::prev(after);
    }
    if (!last_region_->is_memory(p, bytes))
        trap(name(*running) + " accesses " + std::to_string(bytes) +
             " bytes outside of a window: " + last_region_->describe(p));
    return true;
}

// How long a store is kept back while its block waits: words that others look at go soon and overtake the data that
// was stored before them. Most launches keep data for a short while, some for long.
void Block::keep(const Thread& thread, void* p, const void* value, std::size_t bytes, bool atomic) {
    Store store;
    store.to = static_cast<std::byte*>(p), store.bytes = static_cast<std::uint8_t>(bytes);
    std::memcpy(store.value, value, bytes);
    store.block = index_, store.thread = thread.thread, store.meetings = meetings_, store.clock = thread.clock;
    const std::uint64_t most = atomic ? 2'000 : is_late_ ? 3'000'000 : 300'000;
    store.due = now() + random_.below(most);
    own_.add(store);
    if (atomic && random_.below(2) == 0) own_.flush(p, bytes);
}

// Whether a store happens before what `thread` does now: by the order of its own program, by a barrier of the block, or
// by __syncwarp. Other collectives of a warp promise no order of memory.
bool Block::covers(const Thread& thread, const Store& store) const {
    if (store.thread == thread.thread || store.meetings < meetings_) return true;
    if (store.thread >> 5 != thread.warp()) return false;
    return store.clock <= warps_[thread.warp()].known[thread.lane()][store.thread & 31];
}

void Block::order_warp(Warp& warp, Thread* lanes, unsigned mask) {
    std::uint32_t joined[32] = {}, fresh = 0;
    for (unsigned left = mask; left != 0; left &= left - 1) {
        const int l = std::countr_zero(left);
        for (int j = 0; j < 32; ++j) joined[j] = std::max(joined[j], warp.known[l][j]);
    }
    for (unsigned left = mask; left != 0; left &= left - 1) {
        const int l = std::countr_zero(left);
        joined[l] = std::max(joined[l], lanes[l].clock++);
        fresh = std::max(fresh, lanes[l].fresh);
    }
    for (unsigned left = mask; left != 0; left &= left - 1) {
        std::copy(joined, joined + 32, warp.known[std::countr_zero(left)]);
        lanes[std::countr_zero(left)].fresh = fresh;
    }
}

void Block::fence(Thread& thread, bool system) {
    const Mutation defect = mutation.load(std::memory_order_relaxed);
    if (system && defect == Mutation::fence_does_nothing) return;
    if (!system && defect == Mutation::gpu_fence_does_nothing) return;
    fence_covered(thread, system && defect != Mutation::fence_at_gpu_scope);
}

void Block::before_release(Thread& thread, const void* p, std::size_t bytes) {
    if (mutation.load(std::memory_order_relaxed) != Mutation::release_is_relaxed) fence_covered(thread, true);
    own_.flush(p, bytes);
}

void Block::fence_covered(Thread& thread, bool system) {
    GpuVisible& visible = grid_.gpu_visible;
    thread.fresh = early_.number();  // loads after a fence are not executed before it
    if (std::exchange(looked_, false)) acquired_ = visible.number.load(std::memory_order_acquire);
    const auto covered = [&](const Store& store) { return covers(thread, store); };
    if (system) {
        own_.take(covered, [](const Store& store) { store.apply(); });
        if (visible.size.load(std::memory_order_acquire) != 0) {
            const std::lock_guard lock(visible.mutex);
            // This block's own are covered as before: a fence at GPU scope took nothing from their order.
            visible.stores.take(
                [&](const Store& store) {
                    return store.number <= acquired_ || (store.block == index_ && covered(store));
                },
                [](const Store& store) { store.apply(); });
            visible.size.store(visible.stores.size(), std::memory_order_release);
        }
    } else if (!own_.empty()) {
        const std::lock_guard lock(visible.mutex);
        own_.take(covered, [&](Store store) {
            store.number = visible.number.load(std::memory_order_relaxed) + 1;
            visible.stores.add(store);
            visible.number.store(store.number, std::memory_order_release);
        });
        visible.size.store(visible.stores.size(), std::memory_order_release);
    }
    std::atomic_thread_fence(std::memory_order_seq_cst);
}

void Block::overlay_gpu_visible(const void* p, void* value, std::size_t bytes) {
    const std::lock_guard lock(grid_.gpu_visible.mutex);
    grid_.gpu_visible.stores.overlay(p, value, bytes);
}

void Block::saw(Thread& thread, const void* p, std::size_t bytes, bool acquires) {
    early_.know(p, bytes);
    if (acquires && mutation.load(std::memory_order_relaxed) != Mutation::acquire_is_relaxed) {
        thread.fresh = early_.number();
        acquired_ = grid_.gpu_visible.number.load(std::memory_order_acquire);
    } else {
        looked_ = true;
    }
}

// Stores become visible by themselves while their block waits, and at its end.
void Block::let_out(bool all) {
    GpuVisible& visible = grid_.gpu_visible;
    if (own_.empty() && visible.size.load(std::memory_order_acquire) == 0) return;
    if (all && is_late_ && !grid_.failed()) std::this_thread::sleep_for(std::chrono::microseconds(random_.below(1000)));
    const std::uint64_t time = now();
    own_.take([&](const Store& store) { return all || store.due <= time; }, [](const Store& store) { store.apply(); });
    const std::lock_guard lock(visible.mutex);
    visible.stores.take([&](const Store& store) { return store.due <= time; },
                        [](const Store& store) { store.apply(); });
    visible.size.store(visible.stores.size(), std::memory_order_release);
}

// --- words for messages --------------------------------------------------------------------------------------------

std::string Block::name(const Thread& thread) const {
    return "thread " + std::to_string(thread.thread) + " of block " + std::to_string(index_);
}

std::string Block::who_waits() const {
    std::string text;
    int named = 0;
    const Thread* before = nullptr;
    for (const Thread& thread : threads_) {
        if (thread.state != Thread::in_warp && thread.state != Thread::in_block && thread.state != Thread::polling)
            continue;
        if (before != nullptr && before->state == thread.state && before->site == thread.site &&
            before->mask == thread.mask && before->warp() == thread.warp())
            continue;  // like its neighbour
        before = &thread;
        if (++named > 8) return text + ", ...";
        if (!text.empty()) text += ", ";
        text += "thread " + std::to_string(thread.thread);
        if (thread.state == Thread::polling)
            text += " looks at memory";
        else if (thread.state == Thread::in_block)
            text += std::string(" is in ") + kBlockWords[static_cast<int>(meeting_)] + " at " + at(thread.site);
        else {
            text += std::string(" is in ") + kWarpWords[static_cast<int>(thread.word)] + " with mask " +
                    hex(thread.mask) + " at " + at(thread.site);
            if (const unsigned ended = thread.mask & warps_[thread.warp()].ended)
                text += ": lanes " + hex(ended) + " have ended or do not exist";
        }
    }
    return text;
}

}  // namespace hal::cuda::emulation
