// SPDX-License-Identifier: Apache-2.0
#include "emulation/world.hpp"

#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <fstream>
#include <stdexcept>
#include <system_error>

#include "emulation/regions.hpp"

namespace hal::cuda::emulation {
namespace {

using Clock = std::chrono::steady_clock;

// Between the parts of two ranks lie so many bytes at least that belong to nobody.
constexpr std::size_t kGap = 1 << 16;

std::size_t round_up(std::size_t n, std::size_t to) { return (n + to - 1) / to * to; }

class Descriptors {
  public:
    explicit Descriptors(int count) : fds(static_cast<std::size_t>(count), -1) {}
    ~Descriptors() {
        for (const int fd : fds)
            if (fd >= 0) ::close(fd);
    }
    Descriptors(const Descriptors&) = delete;
    Descriptors& operator=(const Descriptors&) = delete;
    std::vector<int> fds;
};

std::size_t available_memory() {
    std::ifstream lines("/proc/meminfo");
    for (std::string word; lines >> word;) {
        std::size_t kib = 0;
        if (word == "MemAvailable:" && lines >> kib) return kib << 10;
    }
    return ~std::size_t{0};
}

// `descriptor` < 0: this rank has no memory, and says so instead of leaving the peers waiting.
void send_part(int link, std::uint64_t bytes, int descriptor) {
    std::uint64_t words[2] = {bytes, descriptor >= 0};
    iovec part{words, sizeof words};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    msghdr message{};
    message.msg_iov = &part, message.msg_iovlen = 1;
    if (descriptor >= 0) {
        message.msg_control = control, message.msg_controllen = sizeof control;
        cmsghdr* header = CMSG_FIRSTHDR(&message);
        header->cmsg_level = SOL_SOCKET, header->cmsg_type = SCM_RIGHTS, header->cmsg_len = CMSG_LEN(sizeof(int));
        std::memcpy(CMSG_DATA(header), &descriptor, sizeof descriptor);
    }
    // A lost peer is noticed by the read; a few bytes always fit the socket.
    (void)!sendmsg(link, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
}

int take_part(int link, int peer, std::uint64_t bytes, Clock::time_point deadline) {
    const std::string who = "rank " + std::to_string(peer);
    for (;;) {
        const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
        pollfd ready{link, POLLIN, 0};
        const int n = poll(&ready, 1, static_cast<int>(std::clamp<std::int64_t>(left, 0, 1 << 30)));
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) throw std::runtime_error(who + " did not come to the making of a window in time");
        break;
    }
    std::uint64_t words[2] = {};
    iovec part{words, sizeof words};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    msghdr message{};
    message.msg_iov = &part, message.msg_iovlen = 1, message.msg_control = control,
    message.msg_controllen = sizeof control;
    const ssize_t got = recvmsg(link, &message, MSG_CMSG_CLOEXEC | MSG_WAITALL);
    if (got != sizeof words) throw std::runtime_error(who + " is gone while a window was being made");
    int descriptor = -1;
    for (cmsghdr* h = CMSG_FIRSTHDR(&message); h != nullptr; h = CMSG_NXTHDR(&message, h))
        if (h->cmsg_level == SOL_SOCKET && h->cmsg_type == SCM_RIGHTS)
            std::memcpy(&descriptor, CMSG_DATA(h), sizeof descriptor);
    if (words[1] == 0)
        throw std::runtime_error(who + " has no memory for a window of " + std::to_string(words[0]) + " bytes");
    if (words[0] != bytes) {
        if (descriptor >= 0) ::close(descriptor);
        throw std::runtime_error("a window has the same size on every rank: " + std::to_string(bytes) +
                                 " bytes here, " + std::to_string(words[0]) + " on " + who);
    }
    return descriptor;
}

}  // namespace

// --- windows -------------------------------------------------------------------------------------------------------

Window::Window(const Communicator& comm, std::vector<int> descriptors, std::size_t bytes)
    : bytes_(bytes), parts_(static_cast<std::size_t>(comm.world)) {
    const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    const std::size_t mapped = round_up(bytes, page);
    stride_ = round_up(bytes + kGap, kGap);
    // Addresses for every rank of the world, of which those outside the team stay without memory.
    span_ = stride_ * static_cast<std::size_t>(comm.world);
    void* region = mmap(nullptr, span_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (region == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "addresses for a window");
    base_ = static_cast<std::byte*>(region);
    mapping_ = std::shared_ptr<const void>(region, [span = span_](void* at) { munmap(at, span); });
    for (int r = 0; r < comm.world; ++r) {
        const int member = r - comm.lsa_first();
        const int descriptor = descriptors[static_cast<std::size_t>(r)];
        if (member < 0 || member >= comm.lsa_size()) {
            others_.push_back(std::make_unique<ShmSegment>(descriptor, bytes));
            parts_[static_cast<std::size_t>(r)] = others_.back()->data();
            continue;
        }
        ShmSegment checked(descriptor, bytes);  // of the agreed size, and sealed
        std::byte* at = base_ + static_cast<std::size_t>(member) * stride_;
        if (mmap(at, mapped, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, descriptor, 0) == MAP_FAILED)
            throw std::system_error(errno, std::generic_category(), "a window");
        parts_[static_cast<std::size_t>(r)] = at;
    }
    add_region({base_, span_, stride_, bytes, comm.lsa_size(), comm.lsa_first(), comm.device, mapping_});
}

Window::~Window() { remove_region(base_); }

void Window::keep_own_part(int rank) {
    remove_region(base_);
    others_.clear();
    std::byte* own = of_rank(rank);
    const auto before = static_cast<std::size_t>(own - base_);
    const std::size_t end = before + stride_;  // a multiple of pages
    if (before > 0) munmap(base_, before);
    if (end < span_) munmap(base_ + end, span_ - end);
}

void Communicator::leave_windows() {
    gin.reset();  // its card writes windows
    const std::lock_guard lock(mutex_);
    for (auto& window : windows) {
        window->keep_own_part(rank);
        new std::shared_ptr<Window>(window);  // for ever
    }
    windows.clear();
}

std::shared_ptr<Window> Communicator::create(std::size_t bytes) {
    Descriptors parts(world);
    std::string trouble;
    const auto total = static_cast<std::size_t>(world) * bytes;
    if (total > available_memory()) {
        trouble = "symmetric memory for " + std::to_string(world) + " ranks needs " + std::to_string(total) +
                  " bytes, and this machine has " + std::to_string(available_memory());
    } else {
        parts.fds[static_cast<std::size_t>(rank)] = ShmSegment::create(bytes);
    }
    const int mine = parts.fds[static_cast<std::size_t>(rank)];
    for (int peer = 0; peer < world; ++peer)
        if (peer != rank) send_part(links[static_cast<std::size_t>(peer)], bytes, mine);
    if (!trouble.empty()) throw std::runtime_error(trouble);
    const auto deadline =
        Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
    for (int peer = 0; peer < world; ++peer)
        if (peer != rank)
            parts.fds[static_cast<std::size_t>(peer)] =
                take_part(links[static_cast<std::size_t>(peer)], peer, bytes, deadline);
    auto made = std::make_shared<Window>(*this, parts.fds, bytes);
    const std::lock_guard lock(mutex_);
    windows.push_back(made);
    return made;
}

std::shared_ptr<Window> Communicator::find(std::uint64_t handle) {
    const std::lock_guard lock(mutex_);
    for (const auto& window : windows)
        if (reinterpret_cast<std::uint64_t>(window.get()) == handle) return window;
    return nullptr;
}

void Communicator::destroy(Window* window) {
    const std::lock_guard lock(mutex_);
    std::erase_if(windows, [&](const auto& w) { return w.get() == window; });
}

}  // namespace hal::cuda::emulation
