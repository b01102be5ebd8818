// SPDX-License-Identifier: Apache-2.0
// One rank's communicator and its symmetric windows. Every rank of a machine maps every rank's part of each window; a
// kernel has the addresses of its LSA team's parts only, which lie at equal distances. An emulated NIC reaches all of them
// (Window::of_rank).
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "transport/shm_segment.hpp"

namespace hal::cuda::emulation {

struct Communicator;

// A symmetric window as one rank maps it.
class Window {
  public:
    // `segments[r]`: rank r's memory.
    Window(const Communicator& comm, std::vector<int> descriptors, std::size_t bytes);
    ~Window();
    Window(const Window&) = delete;
    Window& operator=(const Window&) = delete;

    // Gives up the peers' parts; this rank's stays, since arrays view it.
    void keep_own_part(int rank);

    // Any rank's part, for the NIC.
    std::byte* of_rank(int rank) const { return parts_[static_cast<std::size_t>(rank)]; }
    std::size_t bytes() const { return bytes_; }
    // LSA rank 0's part as kernels address it, and how much further on the next one lies.
    std::byte* peers() const { return base_; }
    std::size_t stride() const { return stride_; }
    // The addresses that kernels could reach by a wrong rank or offset, parts included: [begin, begin + span).
    std::size_t span() const { return span_; }

  private:
    std::shared_ptr<const void> mapping_;
    std::byte* base_ = nullptr;
    std::size_t bytes_, stride_ = 0, span_ = 0;
    std::vector<std::byte*> parts_;
    std::vector<std::unique_ptr<ShmSegment>> others_;  // of ranks outside the team
};

struct Communicator {
    int world = 1, rank = 0, nodes = 1, device = 0;
    std::vector<int> links;
    double seconds = 30.0;
    std::vector<std::shared_ptr<Window>> windows;
    // Emulated GIN (gin.hpp), where it was asked for, and its counters. Before the windows go.
    std::vector<std::uint64_t> gin_state;
    std::shared_ptr<class Gin> gin;

    int lsa_size() const { return world / nodes; }
    int lsa_rank() const { return rank % lsa_size(); }
    int lsa_first() const { return rank - lsa_rank(); }
    // Collective: a window of equally many bytes on every rank. Throws std::runtime_error with the reason.
    std::shared_ptr<Window> create(std::size_t bytes);
    void destroy(Window* window);
    // Windows that were not destroyed are still viewed by arrays: what these see goes with the process.
    void leave_windows();
    // The window with this handle, which is its address; nullptr when there is none.
    std::shared_ptr<Window> find(std::uint64_t handle);

  private:
    std::mutex mutex_;  // of `windows`: kernels look them up
};

}  // namespace hal::cuda::emulation
