// SPDX-License-Identifier: Apache-2.0
// The twin of include/machine.cuh on an emulated GPU.
#pragma once
#include <cuda_runtime.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <thread>
#include <tuple>

namespace hal::cuda {

inline std::uint64_t load_acquire(const std::uint64_t* p) { return emulation::look(p, true); }
inline std::uint32_t load_acquire(const std::uint32_t* p) { return emulation::look(p, true); }
inline std::uint32_t load_acquire_gpu(const std::uint32_t* p) { return emulation::look(p, true); }
inline std::uint64_t load_relaxed(const std::uint64_t* p) { return emulation::look(p, false); }
inline void load_relaxed_gpu(const unsigned long long* p, unsigned long long& first, unsigned long long& second) {
    first = emulation::load(p), second = emulation::load(p + 1);
}
inline void store_relaxed(std::uint64_t* p, std::uint64_t v) { emulation::store(p, v, true); }
inline void store_relaxed(std::uint32_t* p, std::uint32_t v) { emulation::store(p, v, true); }
inline void store_release(std::uint64_t* p, std::uint64_t v) {
    emulation::release(p, [&] { emulation::write(p, v); });
}
inline void add_release(std::uint64_t* p, std::uint64_t v) {
    emulation::release(p, [&] { __atomic_fetch_add(p, v, __ATOMIC_RELEASE); });
}
inline void add_relaxed(std::uint64_t* p, std::uint64_t v) {  // overtakes whatever is kept back, but for its own word
    emulation::running->block->check(p, sizeof *p);
    emulation::running->block->flush(p, sizeof *p);
    __atomic_fetch_add(p, v, __ATOMIC_RELAXED);
}
inline std::uint64_t nanoseconds() {
    return static_cast<std::uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
}

template <class T>
void store_window(T* p, T v) {
    emulation::store(p, v, false);
}
template <class T>
T load_window(const T* p) {
    return emulation::load(p);
}

using Arrival = emulation::Arrival;
inline void begin_arrivals(Arrival* arrival) { *arrival = {}; }
inline void order_copies() {}
inline void copy_to_shared(uint4* to, const uint4* from, int vectors, Arrival* arrival) {
    if (emulation::running->lane() == 0) arrival->begin(to, from, vectors);
}
inline void await_arrival(Arrival* arrival, unsigned parity) { arrival->await(parity); }
inline bool copies_fly(int) { return true; }

template <class T>
T* dynamic_shared() {
    return static_cast<T*>(emulation::running->block->dynamic_shared());
}

constexpr int kWordThreads = 64;
constexpr std::int32_t kDlpackDevice = 1;  // CPU

template <class Kernel, class... Args>
cudaError_t start_kernel(Kernel kernel, const char* what, int blocks, int threads, std::size_t shared,
                         cudaStream_t stream, const Args&... args) {
    return emulation::launch(blocks, threads, shared, stream, what,
                             [kernel, copies = std::make_tuple(args...)] { std::apply(kernel, copies); });
}
template <class Kernel, class... Args>
cudaError_t start_kernel_early(Kernel kernel, int, const char* what, int blocks, int threads, std::size_t shared,
                               cudaStream_t stream, const Args&... args) {
    return start_kernel(kernel, what, blocks, threads, shared, stream, args...);
}
inline void await_earlier_launch() {}
inline void host_looks_again() { std::this_thread::sleep_for(std::chrono::microseconds(20)); }

}  // namespace hal::cuda
