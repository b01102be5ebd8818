// SPDX-License-Identifier: Apache-2.0
#include "emulation/fiber.hpp"

#include <utility>

namespace hal::udma {

namespace {
constexpr std::size_t kStackBytes = 256 * 1024;
thread_local Fiber* running = nullptr;
}  // namespace

Fiber* Fiber::current() { return running; }

Fiber::Fiber(std::function<void()> body) : body_(std::move(body)), stack_(new char[kStackBytes]) {
    getcontext(&own_);
    own_.uc_stack.ss_sp = stack_.get();
    own_.uc_stack.ss_size = kStackBytes;
    own_.uc_link = nullptr;
    const auto self = reinterpret_cast<std::uint64_t>(this);
    makecontext(&own_, reinterpret_cast<void (*)()>(&Fiber::entry), 2, unsigned(self >> 32), unsigned(self));
}

void Fiber::entry(unsigned high, unsigned low) {
    auto* self = reinterpret_cast<Fiber*>((std::uint64_t{high} << 32) | low);
    try {
        self->body_();
    } catch (...) {
        self->error_ = std::current_exception();
    }
    self->done = true;
    swapcontext(&self->own_, &self->resumer_);
}

void Fiber::resume() {
    Fiber* outer = running;
    running = this;
    swapcontext(&resumer_, &own_);
    running = outer;
    if (done && error_) std::rethrow_exception(std::exchange(error_, nullptr));
}

void Fiber::yield() {
    Fiber* self = running;
    swapcontext(&self->own_, &self->resumer_);
}

}  // namespace hal::udma
