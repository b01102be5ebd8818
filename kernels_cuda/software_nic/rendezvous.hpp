// SPDX-License-Identifier: Apache-2.0
// How ranks find each other: abstract unix sockets named in NCCL's 128-byte handle, a full mesh of them, and descriptors
// passed over it. Sockets and memfds have no name in any file system, so nothing is left behind when a rank is killed.
#pragma once
#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "clock.hpp"

namespace hal::swnic {

// A descriptor that closes itself.
class Fd {
  public:
    Fd() = default;
    explicit Fd(int fd) : fd_(fd) {}
    Fd(Fd&& other) noexcept : fd_(other.release()) {}
    Fd& operator=(Fd&& other) noexcept;
    ~Fd();
    int get() const { return fd_; }
    int release();

  private:
    int fd_ = -1;
};

// Fits NCCL's handle; copied between processes as bytes.
struct Handle {
    std::uint64_t magic;
    std::uint64_t token;  // the other side must repeat it: the name alone admits nobody
    char name[64];        // of the abstract socket, without its leading zero byte
};

class Listener {
  public:
    explicit Listener(int type);  // SOCK_SEQPACKET or SOCK_STREAM
    const Handle& handle() const { return handle_; }
    int fd() const { return fd_.get(); }

  private:
    Fd fd_;
    Handle handle_{};
};

// A connected socket, or an empty Fd when the listener cannot take it now (try again).
Fd connect_to(const Handle& handle, int type);

struct Message {
    std::vector<std::byte> bytes;
    Fd fd;  // what came with it, if anything
};

class Mesh {
  public:
    // Collective and blocking; throws std::runtime_error naming the rank that did not come.
    Mesh(const Listener& listener, std::span<const Handle> handles, int rank, double seconds);

    // Every rank's bytes and descriptor, by rank (the own one without descriptor). All ranks call it in the same order.
    std::vector<Message> exchange(std::span<const std::byte> mine, int fd, double seconds, const char* what);

    // Ranks whose process or socket has ended since the last call. Never blocks, reads nothing.
    std::vector<int> departed();
    pid_t pid(int rank) const { return peers_[static_cast<std::size_t>(rank)].pid; }

  private:
    struct Peer {
        Fd socket, process;
        pid_t pid = 0;
        bool gone = false;
    };
    void adopt(int rank, Fd socket);
    int rank_;
    std::vector<Peer> peers_;
};

}  // namespace hal::swnic
