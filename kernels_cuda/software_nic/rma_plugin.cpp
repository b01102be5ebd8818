// SPDX-License-Identifier: Apache-2.0
// The RMA v14 interface over an Endpoint. NCCL's GIN proxy calls the iput family from its progress thread: these only
// check, resolve addresses and append. Nothing here throws into NCCL.
#include <sys/socket.h>

#include <cstring>
#include <exception>
#include <string>

#include "endpoint.hpp"
#include "log.hpp"

namespace hal::swnic {
namespace {

struct MrHandle {
    std::shared_ptr<MemoryRegion> region;
};

template <class F>
abi::Result guarded(const char* what, F body) {
    try {
        return body();
    } catch (const ConfigError& error) {
        warn("%s: %s", what, error.what());
        return abi::invalid_usage;
    } catch (const std::exception& error) {
        warn("%s: %s", what, error.what());
        return abi::system_error;
    }
}

abi::Result refuse(const char* what, const std::string& why) {
    warn("%s: %s", what, why.c_str());
    return abi::invalid_argument;
}

abi::Result init(void** ctx, std::uint64_t, abi::Logger logger) {
    set_logger(logger);
    return guarded("init", [&] {
        Config::from_environment();  // a wrong setting is refused before anything is connected
        *ctx = nullptr;
        return abi::success;
    });
}

abi::Result devices(int* count) {
    *count = 1;
    return abi::success;
}

abi::Result get_properties(int device, abi::NetPropertiesV12* properties) {
    return guarded("getProperties", [&] {
        static char name[] = "hal-swnic";
        *properties = {};
        properties->name = name;
        properties->guid = 1;
        properties->ptr_support = abi::ptr_host | abi::ptr_cuda;
        properties->speed = 100000;
        properties->max_comms = 1 << 16;
        properties->max_recvs = static_cast<int>(Config::from_environment().queue_depth) / abi::max_requests;
        properties->device_type = abi::net_device_gin_proxy;
        properties->virtual_device.count = 1;
        properties->virtual_device.devices[0] = device;
        properties->max_p2p_bytes = std::size_t{1} << 30;
        properties->max_coll_bytes = std::size_t{1} << 30;
        properties->max_multi_request = 1;
        properties->rail_id = properties->plane_id = abi::id_undefined;
        return abi::success;
    });
}

abi::Result listen(void*, int, void* handle, void** listen_comm) {
    return guarded("listen", [&] {
        static_assert(sizeof(Handle) <= abi::handle_bytes);
        auto listener = std::make_unique<Listener>(SOCK_SEQPACKET);
        std::memset(handle, 0, abi::handle_bytes);
        std::memcpy(handle, &listener->handle(), sizeof(Handle));
        *listen_comm = listener.release();
        return abi::success;
    });
}

abi::Result connect(void*, void* handles[], int nranks, int rank, void* listen_comm, void** coll_comm) {
    return guarded("connect", [&] {
        std::vector<Handle> all(static_cast<std::size_t>(nranks));
        for (std::size_t i = 0; i < all.size(); ++i) std::memcpy(&all[i], handles[i], sizeof(Handle));
        *coll_comm = new Endpoint(*static_cast<Listener*>(listen_comm), all, rank);
        return abi::success;
    });
}

abi::Result create_context(void* coll_comm, abi::RmaConfigV14* config, void** rma_ctx) {
    return guarded("createContext", [&] {
        auto& endpoint = *static_cast<Endpoint*>(coll_comm);
        if (config->contexts < 1) return refuse("createContext", std::to_string(config->contexts) + " contexts");
        if (config->rank_stride < 1 || endpoint.nranks() % config->rank_stride)
            return refuse("createContext", "rank stride " + std::to_string(config->rank_stride) +
                                               " does not divide the " + std::to_string(endpoint.nranks()) + " ranks");
        *rma_ctx = endpoint.create_queues(config->contexts, config->rank_stride);
        return abi::success;
    });
}

abi::Result reg_mr(void* coll_comm, void* data, std::size_t size, int type, std::uint64_t flags, void** mr) {
    return guarded("regMrSym", [&] {
        if (type != abi::ptr_host && type != abi::ptr_cuda)
            return refuse("regMrSym", "memory type " + std::to_string(type));
        auto region = static_cast<Endpoint*>(coll_comm)->register_memory(reinterpret_cast<Address>(data), size,
                                                                         type == abi::ptr_host, flags);
        *mr = new MrHandle{std::move(region)};
        return abi::success;
    });
}

abi::Result reg_mr_dma_buf(void*, void*, std::size_t, int, std::uint64_t, int, std::uint64_t, void**) {
    return refuse("regMrSymDmaBuf", "this plug-in does not offer DMA-BUF; use regMrSym");
}

abi::Result dereg_mr(void* coll_comm, void* mr) {
    auto* handle = static_cast<MrHandle*>(mr);
    static_cast<Endpoint*>(coll_comm)->deregister(handle->region->id);
    delete handle;  // operations in flight keep the region itself
    return abi::success;
}

abi::Result destroy_context(void* rma_ctx) {
    auto* set = static_cast<QueueSet*>(rma_ctx);
    return guarded("destroyContext", [&] {
        set->endpoint.destroy_queues(set);
        return abi::success;
    });
}

abi::Result close_coll(void* coll_comm) {
    return guarded("closeColl", [&] {
        delete static_cast<Endpoint*>(coll_comm);
        return abi::success;
    });
}

abi::Result close_listen(void* listen_comm) {
    delete static_cast<Listener*>(listen_comm);
    return abi::success;
}

MemoryRegion& region_of(void* mr) { return *static_cast<MrHandle*>(mr)->region; }

bool inside(const MemoryRegion& region, std::uint64_t offset, std::size_t bytes) {
    return offset <= region.bytes && bytes <= region.bytes - offset;
}

// Why the operation cannot be posted, or nothing.
std::string objection(const QueueSet& set, int context, std::uint32_t peer, std::uint64_t here_off, void* here_mr,
                      std::size_t size, std::uint64_t there_off, void* there_mr) {
    auto range = [](std::uint64_t offset, std::size_t bytes, const MemoryRegion& region) {
        return "bytes " + std::to_string(offset) + " to " + std::to_string(offset + bytes) + " of region " +
               std::to_string(region.id) + ", which has " + std::to_string(region.bytes);
    };
    int nranks = set.endpoint.nranks();
    if (context < 0 || context >= set.count)
        return "context " + std::to_string(context) + " of " + std::to_string(set.count);
    if (peer >= static_cast<std::uint32_t>(nranks))
        return "rank " + std::to_string(peer) + " of " + std::to_string(nranks);
    if (!set.reaches(static_cast<int>(peer)))
        return "rank " + std::to_string(peer) + " is not reached by a context of rank stride " +
               std::to_string(set.stride);
    if (size == 0) return {};
    if (!here_mr || !there_mr) return "no memory region for " + std::to_string(size) + " bytes";
    if (!inside(region_of(here_mr), here_off, size)) return "local " + range(here_off, size, region_of(here_mr));
    if (!inside(region_of(there_mr), there_off, size)) return "remote " + range(there_off, size, region_of(there_mr));
    if (region_of(there_mr).peers[peer].base == 0)
        return "region " + std::to_string(region_of(there_mr).id) + " of rank " + std::to_string(peer) +
               " cannot be reached: its memory was not allocated for export (use ncclMemAlloc)";
    return {};
}

Operation put_operation(int context, std::uint32_t peer, std::uint64_t src_off, void* src_mr, std::size_t size,
                        std::uint64_t dst_off, void* dst_mr) {
    Operation operation{};
    operation.queue = context, operation.peer = static_cast<int>(peer);
    if (size == 0) return operation;
    operation.source = static_cast<MrHandle*>(src_mr)->region;
    operation.target = static_cast<MrHandle*>(dst_mr)->region;
    const PeerRegion& there = operation.target->peers[peer];
    operation.copy = {there.base + dst_off,   operation.source->base + src_off, size,
                      operation.source->host, operation.target->host,           there.same_device};
    return operation;
}

abi::Result post(QueueSet& set, Operation operation, void** request) {
    *request = set.post(std::move(operation));
    return abi::success;
}

abi::Result iput_signal(void* rma_ctx, int context, std::uint64_t src_off, void* src_mr, std::size_t size,
                        std::uint64_t dst_off, void* dst_mr, std::uint32_t rank, std::uint64_t signal_off,
                        void* signal_mr, std::uint64_t signal_value, std::uint32_t signal_op, bool strong,
                        void** request) {
    auto& set = *static_cast<QueueSet*>(rma_ctx);
    if (auto why = objection(set, context, rank, src_off, src_mr, size, dst_off, dst_mr); !why.empty())
        return refuse("iputSignal", why);
    if (signal_op != abi::signal_inc && signal_op != abi::signal_add)
        return refuse("iputSignal", "signal operation " + std::to_string(signal_op));
    auto& word = region_of(signal_mr);
    if (signal_off % sizeof(std::uint64_t) || !inside(word, signal_off, sizeof(std::uint64_t)))
        return refuse("iputSignal", "signal at byte " + std::to_string(signal_off) + " of region " +
                                        std::to_string(word.id) + ", which has " + std::to_string(word.bytes) +
                                        "; it must be inside, 8-byte aligned");
    Operation operation = put_operation(context, rank, src_off, src_mr, size, dst_off, dst_mr);
    std::uint64_t add = signal_op == abi::signal_inc ? 1 : signal_value;
    // A put's signal on a window's word comes from NCCL as an operation of its own after the put. A weak one must follow
    // that put, and nothing says which of the earlier operations it was: so it follows them all.
    if (size == 0 && !word.signals) strong = true;
    operation.signal =
        Signal{{signal_off, add, word.id, static_cast<std::uint32_t>(set.endpoint.rank())}, strong, word.strict_order};
    return post(set, std::move(operation), request);
}

abi::Result iput(void* rma_ctx, int context, std::uint64_t src_off, void* src_mr, std::size_t size,
                 std::uint64_t dst_off, void* dst_mr, std::uint32_t rank, void** request) {
    auto& set = *static_cast<QueueSet*>(rma_ctx);
    if (auto why = objection(set, context, rank, src_off, src_mr, size, dst_off, dst_mr); !why.empty())
        return refuse("iput", why);
    return post(set, put_operation(context, rank, src_off, src_mr, size, dst_off, dst_mr), request);
}

abi::Result iget(void* rma_ctx, int context, std::uint64_t remote_off, void* remote_mr, std::size_t size,
                 std::uint64_t local_off, void* local_mr, std::uint32_t rank, void** request) {
    auto& set = *static_cast<QueueSet*>(rma_ctx);
    if (auto why = objection(set, context, rank, local_off, local_mr, size, remote_off, remote_mr); !why.empty())
        return refuse("iget", why);
    Operation operation{};
    operation.queue = context, operation.peer = static_cast<int>(rank), operation.get = true;
    if (size) {
        operation.source = static_cast<MrHandle*>(remote_mr)->region;
        operation.target = static_cast<MrHandle*>(local_mr)->region;
        const PeerRegion& there = operation.source->peers[rank];
        operation.copy = {operation.target->base + local_off,
                          there.base + remote_off,
                          size,
                          operation.source->host,
                          operation.target->host,
                          there.same_device};
    }
    return post(set, std::move(operation), request);
}

// Makes completed gets visible; ours are, since a copy completes only when its bytes are there.
abi::Result iflush(void*, int, void*, std::uint32_t, void** request) {
    *request = nullptr;
    return abi::success;
}

abi::Result test(void*, void* request, int* done) {
    *done = 0;
    if (!request) {
        *done = 1;
        return abi::success;
    }
    auto* posted = static_cast<Request*>(request);
    RequestState state = posted->state.load(std::memory_order_acquire);
    if (state == RequestState::pending) return abi::success;
    if (state == RequestState::failed) return abi::remote_error;  // kept: who asks again gets the same answer
    posted->owner->give_back(posted);
    *done = 1;
    return abi::success;
}

abi::Result query_last_error(void* rma_ctx, bool* has_error) {
    *has_error = static_cast<QueueSet*>(rma_ctx)->failed.load(std::memory_order_acquire);
    return abi::success;
}

abi::Result finalize(void*) { return abi::success; }

}  // namespace
}  // namespace hal::swnic

using namespace hal::swnic;

extern "C" {
__attribute__((visibility("default"))) abi::RmaPluginV14 ncclRmaPlugin_v14 = {
    "hal-swnic",
    init,
    devices,
    get_properties,
    hal::swnic::listen,
    hal::swnic::connect,
    create_context,
    reg_mr,
    reg_mr_dma_buf,
    dereg_mr,
    destroy_context,
    close_coll,
    close_listen,
    iput,
    iput_signal,
    iget,
    iflush,
    test,
    nullptr,  // progress: the wire thread needs no help
    query_last_error,
    finalize,
};
}

// The settings in force, one a line; the text stays until the next call of the same thread.
extern "C" __attribute__((visibility("default"))) const char* hal_swnic_settings() {
    thread_local std::string text;
    text = settings_table();
    return text.c_str();
}
