// SPDX-License-Identifier: Apache-2.0
#include "emulation/device.hpp"

#include <cstring>

#include "emulation/block.hpp"
#include "emulation/options.hpp"
#include "emulation/shared.hpp"

namespace hal::cuda::emulation {

// --- streams -------------------------------------------------------------------------------------------------------

void Stream::start() {
    // Detached: a destroyed stream first does what it has, and a process may end before that.
    std::thread([self = shared_from_this()] { self->serve(); }).detach();
}

std::uint64_t Stream::add(Work work) {
    const std::lock_guard lock(mutex_);
    if (ended_) return 0;
    work_.push_back(std::move(work));
    changed_.notify_all();
    return ++added_;
}

std::uint64_t Stream::last() {
    const std::lock_guard lock(mutex_);
    return added_;
}

std::string Stream::wait(std::uint64_t number) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return done_ >= number; });
    return failure_;
}

std::string Stream::failure() {
    const std::lock_guard lock(mutex_);
    return failure_;
}

bool Stream::idle() {
    const std::lock_guard lock(mutex_);
    return done_ == added_;
}

void Stream::close() {
    const std::lock_guard lock(mutex_);
    closing_ = true;
    changed_.notify_all();
}

std::shared_ptr<Capture> Stream::capture() {
    const std::lock_guard lock(mutex_);
    return capture_;
}

void Stream::set_capture(std::shared_ptr<Capture> capture) {
    const std::lock_guard lock(mutex_);
    capture_ = std::move(capture);
}

void Stream::serve() {
    std::unique_lock lock(mutex_);
    for (;;) {
        changed_.wait(lock, [&] { return !work_.empty() || closing_; });
        if (work_.empty()) {
            ended_ = true;
            return;
        }
        {
            const Work work = std::move(work_.front());
            work_.pop_front();
            const bool skip = !failure_.empty();
            lock.unlock();
            std::string failed = skip ? std::string() : work();
            lock.lock();
            if (!failed.empty() && failure_.empty()) failure_ = std::move(failed);
        }
        ++done_;
        changed_.notify_all();
    }
}

// --- blocks on threads ---------------------------------------------------------------------------------------------

namespace {

// Nothing is in a block's shared memory at its start, so it holds neither zeros nor what an earlier block left.
void poison_shared() { std::memset(shared_begin, 0xA5, static_cast<std::size_t>(shared_end - shared_begin)); }

// Threads that run blocks; as many as ever ran at once, since blocks wait for one another.
class Workers {
  public:
    static Workers& instance() {
        static auto* workers = new Workers;  // never destroyed: its threads end with the process
        return *workers;
    }
    void give(std::function<void()> job) {
        const std::lock_guard lock(mutex_);
        jobs_.push_back(std::move(job));
        if (idle_ < jobs_.size())
            std::thread([this] { serve(); }).detach();
        else
            changed_.notify_one();
    }

  private:
    void serve() {
        std::unique_lock lock(mutex_);
        for (;;) {
            ++idle_;
            changed_.wait(lock, [&] { return !jobs_.empty(); });
            --idle_;
            const auto job = std::move(jobs_.front());
            jobs_.pop_front();
            lock.unlock();
            job();
            lock.lock();
        }
    }
    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<std::function<void()>> jobs_;
    std::size_t idle_ = 0;
};

std::atomic<std::uint64_t> launches{0};

}  // namespace

std::string run_launch(unsigned blocks, unsigned threads, std::size_t shared_bytes, const char* what, int device,
                       const std::function<void()>& kernel) {
    Grid grid;
    grid.blocks = blocks, grid.threads = threads, grid.shared_bytes = shared_bytes, grid.what = what;
    grid.kernel = kernel, grid.device = device;
    Random mix(options().seed ^ static_cast<std::uint64_t>(device) << 40 ^ launches.fetch_add(1));
    grid.seed = mix.next();
    std::mutex mutex;
    std::condition_variable ended;
    unsigned left = blocks - 1;
    auto run = [&grid](unsigned index) {
        poison_shared();
        Block(grid, index).run();
    };
    for (unsigned index = 1; index < blocks; ++index)
        Workers::instance().give([&, index] {
            run(index);
            const std::lock_guard lock(mutex);
            if (--left == 0) ended.notify_one();
        });
    run(0);
    std::unique_lock lock(mutex);
    ended.wait(lock, [&] { return left == 0; });
    // The end of a launch makes its stores visible.
    grid.gpu_visible.stores.take([](const Store&) { return true; }, [](const Store& store) { store.apply(); });
    return grid.failed() ? grid.failure() : std::string();
}

}  // namespace hal::cuda::emulation
