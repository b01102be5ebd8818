// SPDX-License-Identifier: Apache-2.0
// The network v11 interface, which NCCL needs beside RMA when ranks seem to be on different hosts: its host collectives
// go over unix sockets, host memory only. Correct and plain; nothing is measured on it.
//
// A message is its length and its bytes. Requests of one communicator move in order, inside NCCL's polling of test().
#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <deque>
#include <exception>
#include <memory>

#include "log.hpp"
#include "nccl_abi.hpp"
#include "rendezvous.hpp"

namespace hal::swnic {
namespace {

struct Communicator;

struct Transfer {
    Communicator* communicator;
    std::byte* data;
    std::uint64_t bytes;  // a receive: room, until the length has arrived
    std::uint64_t header, header_done = 0, done = 0;
};

struct Communicator {
    Fd socket;
    bool sends;
    std::deque<std::unique_ptr<Transfer>> active;    // in order; the first one moves
    std::deque<std::unique_ptr<Transfer>> finished;  // not asked for yet
};

struct MovedAway {};  // the peer has closed

// How many bytes moved now; 0 when the socket would block.
std::size_t move_some(Communicator& c, std::byte* data, std::size_t bytes) {
    for (;;) {
        ssize_t n = c.sends ? send(c.socket.get(), data, bytes, MSG_DONTWAIT | MSG_NOSIGNAL)
                            : recv(c.socket.get(), data, bytes, MSG_DONTWAIT);
        if (n > 0) return static_cast<std::size_t>(n);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return 0;
        throw MovedAway{};
    }
}

// Moves `transfer` on; true when all of it is through.
bool advance(Communicator& c, Transfer& transfer) {
    while (transfer.header_done < sizeof transfer.header) {
        auto n = move_some(c, reinterpret_cast<std::byte*>(&transfer.header) + transfer.header_done,
                           sizeof transfer.header - transfer.header_done);
        if (n == 0) return false;
        transfer.header_done += n;
        if (transfer.header_done == sizeof transfer.header && !c.sends) {
            if (transfer.header > transfer.bytes) {
                warn("a message of %llu bytes came for a receive of %llu", (unsigned long long)transfer.header,
                     (unsigned long long)transfer.bytes);
                throw MovedAway{};
            }
            transfer.bytes = transfer.header;
        }
    }
    while (transfer.done < transfer.bytes) {
        auto n = move_some(c, transfer.data + transfer.done, transfer.bytes - transfer.done);
        if (n == 0) return false;
        transfer.done += n;
    }
    return true;
}

abi::Result init(void** ctx, std::uint64_t, abi::NetConfigV11*, abi::Logger logger, abi::ProfilerCallback) {
    set_logger(logger);
    *ctx = nullptr;
    return abi::success;
}

abi::Result devices(int* count) {
    *count = 1;
    return abi::success;
}

abi::Result get_properties(int device, abi::NetPropertiesV11* properties) {
    static char name[] = "hal-swnic";
    *properties = {};
    properties->name = name;
    properties->guid = 1;
    properties->ptr_support = abi::ptr_host;
    properties->speed = 100000;
    properties->max_comms = 1 << 16;
    properties->max_recvs = 1;
    properties->device_type = abi::net_device_host;
    properties->virtual_device.count = 1;
    properties->virtual_device.devices[0] = device;
    properties->max_p2p_bytes = std::size_t{1} << 30;
    properties->max_coll_bytes = std::size_t{1} << 30;
    properties->max_multi_request = 1;
    return abi::success;
}

abi::Result listen(void*, int, void* handle, void** listen_comm) {
    try {
        auto listener = std::make_unique<Listener>(SOCK_STREAM);
        std::memset(handle, 0, abi::handle_bytes);
        std::memcpy(handle, &listener->handle(), sizeof(Handle));
        *listen_comm = listener.release();
        return abi::success;
    } catch (const std::exception& error) {
        warn("net listen: %s", error.what());
        return abi::system_error;
    }
}

abi::Result connect(void*, int, void* handle, void** send_comm, void**) {
    *send_comm = nullptr;
    try {
        Handle where;
        std::memcpy(&where, handle, sizeof where);
        Fd socket = connect_to(where, SOCK_STREAM);
        if (socket.get() >= 0) *send_comm = new Communicator{std::move(socket), true, {}, {}};
        return abi::success;
    } catch (const std::exception& error) {
        warn("net connect: %s", error.what());
        return abi::remote_error;
    }
}

abi::Result accept(void* listen_comm, void** recv_comm, void**) {
    *recv_comm = nullptr;
    int fd = accept4(static_cast<Listener*>(listen_comm)->fd(), nullptr, nullptr, SOCK_CLOEXEC);
    if (fd < 0) return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR ? abi::success : abi::system_error;
    *recv_comm = new Communicator{Fd(fd), false, {}, {}};
    return abi::success;
}

abi::Result reg_mr(void*, void*, std::size_t, int type, void** mr) {
    *mr = nullptr;
    return type == abi::ptr_host ? abi::success : abi::invalid_usage;
}

abi::Result reg_mr_dma_buf(void*, void*, std::size_t, int, std::uint64_t, int, void**) { return abi::invalid_usage; }
abi::Result dereg_mr(void*, void*) { return abi::success; }

abi::Result start(void* comm, void* data, std::size_t bytes, void** request) {
    auto& c = *static_cast<Communicator*>(comm);
    *request = nullptr;  // NCCL tries again
    if (c.active.size() + c.finished.size() >= abi::max_requests) return abi::success;
    c.active.push_back(std::make_unique<Transfer>(Transfer{&c, static_cast<std::byte*>(data), bytes, bytes}));
    *request = c.active.back().get();
    return abi::success;
}

abi::Result isend(void* comm, void* data, std::size_t size, int, void*, void*, void** request) {
    return start(comm, data, size, request);
}

abi::Result irecv(void* comm, int n, void** data, std::size_t* sizes, int*, void**, void**, void** request) {
    return n == 1 ? start(comm, data[0], sizes[0], request) : abi::internal_error;
}

abi::Result iflush(void*, int, void**, int*, void**, void** request) {
    *request = nullptr;  // nothing is received into device memory
    return abi::success;
}

abi::Result test(void* request, int* done, int* sizes) {
    auto* transfer = static_cast<Transfer*>(request);
    Communicator& c = *transfer->communicator;
    *done = 0;
    try {
        while (!c.active.empty() && advance(c, *c.active.front())) {
            c.finished.push_back(std::move(c.active.front()));
            c.active.pop_front();
        }
    } catch (MovedAway) {
        warn("the peer of a host collective has gone");
        return abi::remote_error;
    }
    for (auto one = c.finished.begin(); one != c.finished.end(); ++one) {
        if (one->get() != transfer) continue;
        *done = 1;
        if (sizes) *sizes = static_cast<int>(transfer->bytes);
        c.finished.erase(one);
        break;
    }
    return abi::success;
}

abi::Result close_comm(void* comm) {
    delete static_cast<Communicator*>(comm);
    return abi::success;
}

abi::Result close_listen(void* listen_comm) {
    delete static_cast<Listener*>(listen_comm);
    return abi::success;
}

abi::Result finalize(void*) { return abi::success; }

}  // namespace
}  // namespace hal::swnic

using namespace hal::swnic;

extern "C" {
__attribute__((visibility("default"))) abi::NetPluginV11 ncclNetPlugin_v11 = {
    "hal-swnic",
    init,
    devices,
    get_properties,
    hal::swnic::listen,
    hal::swnic::connect,
    hal::swnic::accept,
    reg_mr,
    reg_mr_dma_buf,
    dereg_mr,
    isend,
    irecv,
    iflush,
    test,
    close_comm,
    close_comm,
    close_listen,
    nullptr,  // no device-side memory handles
    nullptr,  // no device-side receives
    nullptr,  // no virtual devices
    finalize,
    nullptr,  // no attributes
};
}
