// SPDX-License-Identifier: Apache-2.0
#include "rendezvous.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <stdexcept>

namespace hal::swnic {
namespace {

constexpr std::uint64_t magic = 0x31'43'49'4e'57'53'4c'48;  // "HLSWNIC1"
constexpr std::size_t largest_message = 4096;

struct Hello {
    std::uint64_t magic, token;
    int rank;
};

socklen_t address_of(const Handle& handle, sockaddr_un& address) {
    address = {};
    address.sun_family = AF_UNIX;
    std::size_t length = strnlen(handle.name, sizeof handle.name);
    std::memcpy(address.sun_path + 1, handle.name, length);  // a leading zero byte: the abstract namespace
    return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + length);
}

bool wait_readable(int fd, Nanos deadline) {
    for (;;) {
        Nanos left = deadline - now_ns();
        if (left <= 0) return false;
        pollfd one{fd, POLLIN, 0};
        int ready = poll(&one, 1, static_cast<int>(left / 1'000'000 + 1));
        if (ready > 0) return true;
        if (ready < 0 && errno != EINTR) return false;
    }
}

void send_message(int socket, std::span<const std::byte> bytes, int fd) {
    iovec part{const_cast<std::byte*>(bytes.data()), bytes.size()};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    if (fd >= 0) {
        message.msg_control = control;
        message.msg_controllen = sizeof control;
        cmsghdr* header = CMSG_FIRSTHDR(&message);
        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN(sizeof(int));
        std::memcpy(CMSG_DATA(header), &fd, sizeof fd);
    }
    while (sendmsg(socket, &message, MSG_NOSIGNAL) < 0)
        if (errno != EINTR) throw std::runtime_error(std::string("cannot send: ") + std::strerror(errno));
}

Message receive_message(int socket) {
    Message received;
    received.bytes.resize(largest_message);
    iovec part{received.bytes.data(), received.bytes.size()};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    ssize_t n;
    do n = recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
    while (n < 0 && errno == EINTR);
    if (n <= 0) throw std::runtime_error("the connection is closed");
    received.bytes.resize(static_cast<std::size_t>(n));
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    if (header && header->cmsg_type == SCM_RIGHTS) {
        int fd;
        std::memcpy(&fd, CMSG_DATA(header), sizeof fd);
        received.fd = Fd(fd);
    }
    return received;
}

}  // namespace

Fd& Fd::operator=(Fd&& other) noexcept {
    if (this != &other) {
        if (fd_ >= 0) close(fd_);
        fd_ = other.release();
    }
    return *this;
}

Fd::~Fd() {
    if (fd_ >= 0) close(fd_);
}

int Fd::release() {
    int fd = fd_;
    fd_ = -1;
    return fd;
}

Listener::Listener(int type) : fd_(socket(AF_UNIX, type | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)) {
    std::uint64_t random[2];
    if (fd_.get() < 0 || getrandom(random, sizeof random, 0) != sizeof random)
        throw std::runtime_error("cannot make a unix socket");
    handle_.magic = magic;
    handle_.token = random[0];
    std::snprintf(handle_.name, sizeof handle_.name, "hal-swnic-%d-%016llx", getpid(),
                  static_cast<unsigned long long>(random[1]));
    sockaddr_un address;
    socklen_t length = address_of(handle_, address);
    if (bind(fd_.get(), reinterpret_cast<sockaddr*>(&address), length) != 0 || ::listen(fd_.get(), 1024) != 0)
        throw std::runtime_error("cannot listen on a unix socket");
}

Fd connect_to(const Handle& handle, int type) {
    if (handle.magic != magic)
        throw std::runtime_error("the handle is not of this plug-in: is it the same build on all ranks?");
    Fd fd(socket(AF_UNIX, type | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    sockaddr_un address;
    socklen_t length = address_of(handle, address);
    if (fd.get() < 0) throw std::runtime_error("cannot make a unix socket");
    if (connect(fd.get(), reinterpret_cast<sockaddr*>(&address), length) == 0) return fd;
    if (errno == EAGAIN || errno == EINTR) return Fd();
    throw std::runtime_error("cannot reach socket " + std::string(handle.name) + ": " + std::strerror(errno) +
                             "; all ranks must share one machine and one network namespace");
}

void Mesh::adopt(int rank, Fd socket) {
    Peer& peer = peers_[static_cast<std::size_t>(rank)];
    // Exchanges block on purpose; only accepting had to be non-blocking.
    fcntl(socket.get(), F_SETFL, fcntl(socket.get(), F_GETFL) & ~O_NONBLOCK);
    ucred credentials{};
    socklen_t length = sizeof credentials;
    getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &credentials, &length);
    peer.socket = std::move(socket);
    peer.pid = credentials.pid;
    // A process that forked keeps its sockets open in the child; the process descriptor tells the truth.
    if (peer.pid > 0 && peer.pid != getpid()) peer.process = Fd(static_cast<int>(syscall(SYS_pidfd_open, peer.pid, 0)));
}

Mesh::Mesh(const Listener& listener, std::span<const Handle> handles, int rank, double seconds)
    : rank_(rank), peers_(handles.size()) {
    Nanos deadline = now_ns() + static_cast<Nanos>(seconds * 1e9);
    for (int peer = 0; peer < rank; ++peer) {
        const Handle& handle = handles[static_cast<std::size_t>(peer)];
        Fd socket;
        while ((socket = connect_to(handle, SOCK_SEQPACKET)).get() < 0) {
            if (now_ns() > deadline) throw std::runtime_error("rank " + std::to_string(peer) + " does not accept");
            usleep(1000);
        }
        Hello hello{magic, handle.token, rank};
        send_message(socket.get(), std::as_bytes(std::span(&hello, 1)), -1);
        adopt(peer, std::move(socket));
    }
    for (std::size_t missing = handles.size() - static_cast<std::size_t>(rank) - 1; missing > 0;) {
        if (!wait_readable(listener.fd(), deadline)) {
            std::string absent;
            for (std::size_t peer = static_cast<std::size_t>(rank) + 1; peer < handles.size(); ++peer)
                if (peers_[peer].socket.get() < 0) absent += " " + std::to_string(peer);
            throw std::runtime_error("no connection from rank" + absent + " within " + std::to_string(seconds) + " s");
        }
        Fd socket(accept4(listener.fd(), nullptr, nullptr, SOCK_CLOEXEC));
        if (socket.get() < 0 || !wait_readable(socket.get(), deadline)) continue;
        Message first = receive_message(socket.get());
        Hello hello{};
        if (first.bytes.size() != sizeof hello) continue;
        std::memcpy(&hello, first.bytes.data(), sizeof hello);
        bool known = hello.magic == magic && hello.token == listener.handle().token && hello.rank > rank &&
                     hello.rank < static_cast<int>(handles.size());
        if (!known || peers_[static_cast<std::size_t>(hello.rank)].socket.get() >= 0) continue;
        adopt(hello.rank, std::move(socket));
        --missing;
    }
}

std::vector<Message> Mesh::exchange(std::span<const std::byte> mine, int fd, double seconds, const char* what) {
    if (mine.size() > largest_message) throw std::runtime_error("message too large");
    Nanos deadline = now_ns() + static_cast<Nanos>(seconds * 1e9);
    std::vector<Message> all(peers_.size());
    auto fail = [&](std::size_t peer, const std::string& reason) {
        throw std::runtime_error(std::string(what) + ": rank " + std::to_string(peer) + " (pid " +
                                 std::to_string(peers_[peer].pid) + "): " + reason);
    };
    for (std::size_t peer = 0; peer < peers_.size(); ++peer) {
        if (static_cast<int>(peer) == rank_) {
            all[peer].bytes.assign(mine.begin(), mine.end());
            continue;
        }
        try {
            send_message(peers_[peer].socket.get(), mine, fd);
        } catch (const std::runtime_error& error) {
            fail(peer, error.what());
        }
    }
    for (std::size_t peer = 0; peer < peers_.size(); ++peer) {
        if (static_cast<int>(peer) == rank_) continue;
        if (!wait_readable(peers_[peer].socket.get(), deadline))
            fail(peer, "no answer within " + std::to_string(seconds) + " s");
        try {
            all[peer] = receive_message(peers_[peer].socket.get());
        } catch (const std::runtime_error& error) {
            fail(peer, error.what());
        }
    }
    return all;
}

std::vector<int> Mesh::departed() {
    std::vector<pollfd> watched;
    std::vector<int> ranks, gone;
    for (std::size_t rank = 0; rank < peers_.size(); ++rank) {
        Peer& peer = peers_[rank];
        if (peer.gone) continue;
        if (peer.socket.get() >= 0)
            watched.push_back({peer.socket.get(), POLLRDHUP, 0}), ranks.push_back(static_cast<int>(rank));
        if (peer.process.get() >= 0)
            watched.push_back({peer.process.get(), POLLIN, 0}), ranks.push_back(static_cast<int>(rank));
    }
    if (watched.empty() || poll(watched.data(), watched.size(), 0) <= 0) return gone;
    for (std::size_t i = 0; i < watched.size(); ++i) {
        Peer& peer = peers_[static_cast<std::size_t>(ranks[i])];
        if (!watched[i].revents || peer.gone) continue;
        peer.gone = true;
        gone.push_back(ranks[i]);
    }
    return gone;
}

}  // namespace hal::swnic
