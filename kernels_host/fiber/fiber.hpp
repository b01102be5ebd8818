// SPDX-License-Identifier: Apache-2.0
// A cooperative thread of control: a kernel runs on it unmodified and yields where its scheduler may choose. The checker's
// ranks, an emulated NPU's cores and an emulated GPU's threads are fibers.
#pragma once
#include <cstddef>
#include <functional>
#include <memory>

namespace hal {

// Thrown into a fiber that is given up before its end, so that its destructors run.
struct Abandoned {};

class Fiber {
  public:
    static constexpr std::size_t stack_bytes = 256 * 1024;

    explicit Fiber(std::function<void()> body);
    ~Fiber();
    Fiber(const Fiber&) = delete;
    Fiber& operator=(const Fiber&) = delete;

    // Runs until the next yield or the end. Exceptions of the body must not leave it.
    void resume();
    // Called on the fiber: back to whoever resumed it.
    void yield();
    bool finished() const { return finished_; }

  private:
    struct Context;
    static void enter(Fiber* self) noexcept;

    std::function<void()> body_;
    std::unique_ptr<Context> context_;
    bool finished_ = false;
};

}  // namespace hal
