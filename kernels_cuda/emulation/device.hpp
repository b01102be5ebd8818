// SPDX-License-Identifier: Apache-2.0
// The emulated GPU's streams, memory and launches. Each stream has an operating-system thread that does what was given to
// it in order and asynchronously, so that a missing synchronisation shows; each block of a launch has another.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace hal::cuda::emulation {

using Work = std::function<std::string()>;  // gives why it failed, or nothing

// What a stream is given while it is captured: kept in order and not done, until the graph made of it is launched.
struct Capture {
    enum class Mode { global, thread_local_only, relaxed };  // whose unsafe calls are refused meanwhile
    explicit Capture(Mode m) : mode(m) {}
    const Mode mode;
    const std::thread::id thread = std::this_thread::get_id();  // which began it
    std::vector<Work> work;
    std::atomic<bool> invalid = false;  // something was asked for that no graph can hold
    std::atomic<bool> ended = false;
};

// Work in order. Once something failed nothing more is done, and every call says why.
class Stream : public std::enable_shared_from_this<Stream> {
  public:
    explicit Stream(int device) : device_(device) {}
    void start();

    int device() const { return device_; }
    // Gives its number; 0 = the stream was closed and has ended.
    std::uint64_t add(Work work);
    std::uint64_t last();  // number of what was added last
    // Until what has this number, and all before it, was done; gives why one of them failed.
    std::string wait(std::uint64_t number);
    std::string failure();
    bool idle();
    void close();  // does what it has, then ends

    // The capture that is on, or null; begun and ended by the one thread that uses the stream then.
    std::shared_ptr<Capture> capture();
    void set_capture(std::shared_ptr<Capture> capture);

  private:
    void serve();
    int device_;
    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<Work> work_;
    std::shared_ptr<Capture> capture_;
    std::uint64_t added_ = 0, done_ = 0;
    bool closing_ = false, ended_ = false;
    std::string failure_;
};

// Runs a launch to its end on this thread and others; gives why it failed.
std::string run_launch(unsigned blocks, unsigned threads, std::size_t shared_bytes, const char* what, int device,
                       const std::function<void()>& kernel);

}  // namespace hal::cuda::emulation
