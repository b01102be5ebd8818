// SPDX-License-Identifier: Apache-2.0
// Anonymous shared memory: a memfd has no name, so nothing is left behind whatever way its last user ends, and only a
// process that was handed the descriptor can map it.
#pragma once
#include <cstddef>
#include <memory>
#include <vector>

namespace hal {

// One mapped memfd; unmapped when the last view goes (arrays given to users hold it, so closing never pulls memory away).
class ShmSegment {
  public:
    // Makes a zeroed, sealed segment (its size can no longer change, so no peer can cause a SIGBUS); returns its
    // descriptor. Throws std::system_error when memory does not suffice.
    static int create(std::size_t nbytes);
    // Maps `fd`, which stays open and the caller's. Throws ContractViolation unless it holds `nbytes` and is sealed.
    ShmSegment(int fd, std::size_t nbytes);
    ~ShmSegment();
    ShmSegment(const ShmSegment&) = delete;
    ShmSegment& operator=(const ShmSegment&) = delete;

    std::byte* data() const { return data_; }
    std::size_t size() const { return nbytes_; }

  private:
    std::byte* data_ = nullptr;
    std::size_t nbytes_ = 0, mapped_ = 0;
};

// One symmetric window: every rank's segment, by rank; none for a rank that was lost before the window was made.
struct ShmWindow {
    std::vector<std::shared_ptr<ShmSegment>> segments;
    std::size_t nbytes = 0;
};

}  // namespace hal
