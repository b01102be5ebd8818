// SPDX-License-Identifier: Apache-2.0
// A core's thread of control, switched by hand: one thread runs all cores of a device, or of every device under the
// deterministic scheduler.
#pragma once
#include <cstdint>
#include <exception>
#include <functional>

#include "fiber/fiber.hpp"

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
    std::exception_ptr error_;
    hal::Fiber fiber_;
};

}  // namespace hal::udma
