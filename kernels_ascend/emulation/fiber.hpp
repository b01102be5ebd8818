// SPDX-License-Identifier: Apache-2.0
// A core's thread of control, switched by hand: one thread runs all cores of a device, or of every device under the
// deterministic scheduler.
#pragma once
#include <ucontext.h>

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>

namespace hal::udma {

class Fiber {
  public:
    explicit Fiber(std::function<void()> body);
    void resume();        // runs until the body yields or ends; rethrows what ended it
    static void yield();  // back to whoever resumed
    static Fiber* current();

    bool done = false;
    bool waiting = false;            // yielded because what it waits for has not come
    std::uint64_t seen_version = 0;  // of the world, when it last looked

  private:
    static void entry(unsigned high, unsigned low);
    std::function<void()> body_;
    std::unique_ptr<char[]> stack_;
    ucontext_t own_{}, resumer_{};
    std::exception_ptr error_;
};

}  // namespace hal::udma
