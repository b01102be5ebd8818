// SPDX-License-Identifier: Apache-2.0
#include "fiber/fiber.hpp"

#include <sys/mman.h>

#include <cstdint>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace hal {
namespace {

// Stacks are reused: a search makes millions of short runs, an emulated GPU starts hundreds of threads a launch. Each thread
// keeps a few at hand; the others are everybody's, since a stack is two of the 65530 mappings that a process may have, and
// an emulation has many threads that are idle most of the time.
class StackPool {
  public:
    ~StackPool() {
        for (void* s : free_) munmap(s, Fiber::stack_bytes);
    }
    void* take() {
        if (free_.empty()) return nullptr;
        void* s = free_.back();
        free_.pop_back();
        return s;
    }
    void give(void* s) { free_.push_back(s); }
    std::size_t size() const { return free_.size(); }

  private:
    std::vector<void*> free_;
};

constexpr std::size_t kAtHand = 16;
thread_local StackPool at_hand;

struct Common {
    std::mutex mutex;
    StackPool pool;
};
Common& common() {  // never destroyed: threads may end after it would be
    static auto& instance = *new Common;
    return instance;
}

void* take_stack() {
    if (void* s = at_hand.take()) return s;
    {
        const std::lock_guard lock(common().mutex);
        if (void* s = common().pool.take()) return s;
    }
    void* s = mmap(nullptr, Fiber::stack_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (s == MAP_FAILED) throw std::bad_alloc();
    mprotect(s, 4096, PROT_NONE);  // an overflow faults instead of writing elsewhere
    return s;
}

void give_stack(void* s) {
    if (at_hand.size() < kAtHand) {
        at_hand.give(s);
        return;
    }
    const std::lock_guard lock(common().mutex);
    common().pool.give(s);
}

}  // namespace

#if defined(__x86_64__)

// Saves the callee-saved registers on the running stack and continues on the other; no system call, unlike swapcontext.
extern "C" void hal_fiber_switch(void** save, void* load);
asm(R"(
.text
.globl hal_fiber_switch
.hidden hal_fiber_switch
.type hal_fiber_switch,@function
hal_fiber_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size hal_fiber_switch,.-hal_fiber_switch
.globl hal_fiber_start
.hidden hal_fiber_start
.type hal_fiber_start,@function
hal_fiber_start:
    movq %r12, %rdi
    callq *%r13
    ud2
.size hal_fiber_start,.-hal_fiber_start
)");
extern "C" void hal_fiber_start();

struct Fiber::Context {
    void* stack = take_stack();
    void* self = nullptr;
    void* other = nullptr;
    ~Context() { give_stack(stack); }
};

Fiber::Fiber(std::function<void()> body) : body_(std::move(body)), context_(std::make_unique<Context>()) {
    auto* top = reinterpret_cast<std::uintptr_t*>(static_cast<std::byte*>(context_->stack) + stack_bytes);
    void (*entry)(Fiber*) noexcept = &Fiber::enter;
    *--top = 0;  // keeps the stack 16-byte aligned at the call in hal_fiber_start
    *--top = 0;
    *--top = reinterpret_cast<std::uintptr_t>(&hal_fiber_start);
    *--top = 0;                                        // rbp
    *--top = 0;                                        // rbx
    *--top = reinterpret_cast<std::uintptr_t>(this);   // r12
    *--top = reinterpret_cast<std::uintptr_t>(entry);  // r13
    *--top = 0;                                        // r14
    *--top = 0;                                        // r15
    context_->self = top;
}

void Fiber::resume() { hal_fiber_switch(&context_->other, context_->self); }
void Fiber::yield() { hal_fiber_switch(&context_->self, context_->other); }

#else

struct Fiber::Context {
    void* stack = take_stack();
    ucontext_t self{}, other{};
    ~Context() { give_stack(stack); }
};

Fiber::Fiber(std::function<void()> body) : body_(std::move(body)), context_(std::make_unique<Context>()) {
    getcontext(&context_->self);
    context_->self.uc_stack.ss_sp = context_->stack;
    context_->self.uc_stack.ss_size = stack_bytes;
    const auto p = reinterpret_cast<std::uintptr_t>(this);
    void (*start)(unsigned, unsigned) = [](unsigned high, unsigned low) {
        Fiber::enter(reinterpret_cast<Fiber*>((std::uintptr_t(high) << 32) | low));
    };
    makecontext(&context_->self, reinterpret_cast<void (*)()>(start), 2, unsigned(p >> 32), unsigned(p));
}

void Fiber::resume() { swapcontext(&context_->other, &context_->self); }
void Fiber::yield() { swapcontext(&context_->self, &context_->other); }

#endif

Fiber::~Fiber() = default;

void Fiber::enter(Fiber* self) noexcept {
    self->body_();
    self->finished_ = true;
    self->yield();
}

}  // namespace hal
