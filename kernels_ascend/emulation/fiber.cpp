// SPDX-License-Identifier: Apache-2.0
#include "emulation/fiber.hpp"

#include <utility>

namespace hal::udma {

namespace {
thread_local Fiber* running = nullptr;
}  // namespace

Fiber* Fiber::current() { return running; }

Fiber::Fiber(std::function<void()> body)
    : fiber_([this, run = std::move(body)] {
          try {
              run();
          } catch (...) {
              error_ = std::current_exception();
          }
      }) {}

void Fiber::resume() {
    Fiber* outer = running;
    running = this;
    fiber_.resume();
    running = outer;
    done = fiber_.finished();
    if (done && error_) std::rethrow_exception(std::exchange(error_, nullptr));
}

void Fiber::yield() { running->fiber_.yield(); }

}  // namespace hal::udma
