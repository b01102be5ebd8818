// SPDX-License-Identifier: Apache-2.0
#include "device/c_abi.h"

#include <cstring>
#include <memory>
#include <string>

#include "device/acl_runtime.hpp"
#include "kernels/primitives_args.h"
#include "launch/ep_host.hpp"
#include "shmem.h"

namespace {

using namespace hal::ascend;

thread_local hal_ascend_error_t last_error;
std::shared_ptr<AclRuntime> runtime;  // one session for each process, as the library wants it

template <std::size_t N>
void put_text(char (&out)[N], const std::string& text) {
    std::strncpy(out, text.c_str(), N - 1);
    out[N - 1] = '\0';
}

template <class Work>
int guarded(const Work& work) {
    last_error = {};
    try {
        work();
        return HAL_ASCEND_OK;
    } catch (const hal::PeerTimeoutError& e) {
        put_text(last_error.text, e.reason);
        put_text(last_error.stage, e.stage);
        last_error.rank = e.rank, last_error.queue = e.queue;
        last_error.expected = std::int64_t(e.expected), last_error.seen = std::int64_t(e.seen);
        return HAL_ASCEND_TIMEOUT;
    } catch (const CapacityViolation& e) {
        put_text(last_error.text, e.what_);
        put_text(last_error.fix, e.fix);
        last_error.expected = e.needed, last_error.seen = e.given;
        return HAL_ASCEND_CAPACITY;
    } catch (const hal::ContractViolation& e) {
        put_text(last_error.text, e.what());
        return HAL_ASCEND_CONTRACT;
    } catch (const std::exception& e) {
        put_text(last_error.text, e.what());
        return HAL_ASCEND_FAILED;
    }
}

void check_shmem(int code, const char* what) {
    if (code != 0) throw std::runtime_error(std::string(what) + " failed with " + std::to_string(code));
}

AclRuntime& session(void* stream) {
    if (!runtime) throw std::runtime_error("hal_ascend_init was not called");
    if (stream) runtime->set_stream(stream);
    return *runtime;
}

hal::EpShape shape_of(const std::int32_t* v) {
    hal::EpShape s;
    s.ranks = v[0], s.nodes = v[1], s.num_experts = v[2], s.top_k = v[3], s.max_tokens = v[4], s.alignment = v[5];
    s.num_buffers = v[6], s.scale_dim = v[7], s.row_bytes = v[8], s.combine_row_bytes = v[9], s.signal_stride = v[10];
    s.layout = hal::Layout(v[11]), s.schedule = hal::Schedule(v[12]), s.completion = hal::Completion(v[13]);
    return s;
}

#if defined(HAL_RAW_QUEUE_BINDING)
constexpr bool kHasRawQueues = true;
#else
constexpr bool kHasRawQueues = false;
#endif
constexpr std::uint32_t kDeviceRing = 32768;  // blocks

}  // namespace

const hal_ascend_error_t* hal_ascend_error(void) { return &last_error; }

int hal_ascend_unique_id(void* uid, std::size_t bytes) {
    return guarded([&] {
        if (bytes < sizeof(aclshmemx_uniqueid_t))
            throw std::runtime_error("the unique id needs " + std::to_string(sizeof(aclshmemx_uniqueid_t)) + " bytes");
        check_shmem(aclshmemx_get_uniqueid(static_cast<aclshmemx_uniqueid_t*>(uid)), "aclshmemx_get_uniqueid");
    });
}

int hal_ascend_init(int device, int rank, int ranks, const void* uid, std::size_t uid_bytes, std::uint64_t heap_bytes,
                    std::uint32_t queues, double timeout) {
    return guarded([&] {
        check_acl(aclrtSetDevice(device), "aclrtSetDevice");
        check_shmem(aclshmemx_set_conf_store_tls(false, nullptr, 0), "aclshmemx_set_conf_store_tls");
        // Frozen by the first initialisation: two more for hand-written descriptors, on every rank alike.
        check_shmem(aclshmemx_set_qp_num(ACLSHMEM_DATA_OP_UDMA, queues + 2), "aclshmemx_set_qp_num");
        aclshmemx_uniqueid_t id{};
        std::memcpy(&id, uid, uid_bytes < sizeof id ? uid_bytes : sizeof id);
        aclshmemx_init_attr_t attr{};
        check_shmem(aclshmemx_set_attr_uniqueid_args(rank, ranks, std::int64_t(heap_bytes), &id, &attr),
                    "aclshmemx_set_attr_uniqueid_args");
        attr.option_attr.data_op_engine_type =
            static_cast<decltype(attr.option_attr.data_op_engine_type)>(ACLSHMEM_DATA_OP_MTE | ACLSHMEM_DATA_OP_UDMA);
        check_shmem(aclshmemx_init_attr(ACLSHMEMX_INIT_WITH_UNIQUEID, &attr), "aclshmemx_init_attr");
        runtime = std::make_shared<AclRuntime>(nullptr, timeout);
    });
}

int hal_ascend_finalize(void) {
    return guarded([] {
        runtime.reset();
        check_shmem(aclshmem_finalize(), "aclshmem_finalize");
    });
}

int hal_ascend_allocate(std::uint64_t bytes, std::uint64_t* address) {
    return guarded([&] {
        session(nullptr);
        void* memory = aclshmem_malloc(bytes);
        if (!memory)
            throw CapacityViolation("symmetric memory (bytes)", std::int64_t(bytes), 0,
                                    "raise the heap size, or use smaller windows");
        check_acl(aclrtMemset(memory, bytes, 0, bytes), "aclrtMemset");
        *address = reinterpret_cast<std::uint64_t>(memory);
    });
}
int hal_ascend_free(std::uint64_t address) {
    return guarded([&] { aclshmem_free(reinterpret_cast<void*>(address)); });
}
int hal_ascend_write(std::uint64_t device, const void* host, std::uint64_t bytes) {
    return guarded([&] { session(nullptr).write(device, host, bytes); });
}
int hal_ascend_read(void* host, std::uint64_t device, std::uint64_t bytes) {
    return guarded([&] { session(nullptr).read(host, device, bytes); });
}

int hal_ascend_primitive(std::uint32_t kind, std::uint64_t dst, std::uint64_t src, std::uint64_t bytes, int peer,
                         int queue, std::uint32_t order, std::uint64_t value, std::uint64_t at_least, double timeout,
                         std::uint64_t* seen, void* stream) {
    return guarded([&] {
        AclRuntime& device = session(stream);
        PrimitiveArgs a{};
        a.kind = Primitive(kind);
        a.dst = dst, a.src = src, a.bytes = bytes, a.peer = peer, a.queue = queue, a.order = order, a.value = value,
        a.at_least = at_least;
        a.timeout_cycles = std::uint64_t(timeout * double(device.cycles_per_second()));
        const DeviceMemory args(runtime, sizeof a);
        device.write(args.address(), &a, sizeof a);
        device.launch(Kernel::primitive, args.address(), 1);
        device.synchronize();
        device.read(&a, args.address(), sizeof a);
        if (seen) *seen = a.value;
    });
}

int hal_ascend_ep_bytes(const std::int32_t* shape, std::uint64_t* bytes) {
    return guarded([&] { *bytes = window_bytes(shape_of(shape)) + staging_bytes(shape_of(shape)); });
}

int hal_ascend_ep_create(const std::int32_t* shape, int rank, std::uint64_t window, double timeout, void** ep) {
    return guarded([&] {
        const hal::EpShape s = shape_of(shape);
        session(nullptr);
        if (s.completion == hal::Completion::strong_signal_no_cqe && !kHasRawQueues)
            throw hal::ContractViolation(
                "completion strong_signal_no_cqe writes descriptors by hand, and this build has no binding to the "
                "SDK's "
                "queues; use strong_signal, or build with HAL_RAW_QUEUE_BINDING");
        require_ring(s, kDeviceRing);
        *ep = new EpHost(runtime, s, rank, shape[16], shape[14], window, timeout, shape[15]);
    });
}
void hal_ascend_ep_destroy(void* ep) { delete static_cast<EpHost*>(ep); }

int hal_ascend_dispatch_send(void* ep, std::uint32_t slot, std::uint64_t x, std::int32_t tokens, std::uint64_t idx,
                             int int64, std::uint64_t weights, std::uint64_t scales, void* reused_round, void* stream,
                             void** round) {
    return guarded([&] {
        session(stream);
        const State* reused = reused_round ? static_cast<DispatchRound*>(reused_round)->state.get() : nullptr;
        *round = new DispatchRound(
            static_cast<EpHost*>(ep)->dispatch_send(slot, {x, tokens, idx, int64 != 0, weights, scales}, reused));
    });
}
int hal_ascend_rows(void* ep, void* round, std::int64_t* rows, std::uint64_t* received_x) {
    return guarded([&] {
        *rows = static_cast<EpHost*>(ep)->rows(*static_cast<DispatchRound*>(round));
        *received_x = static_cast<EpHost*>(ep)->received_x(*static_cast<DispatchRound*>(round));
    });
}
int hal_ascend_dispatch_recv(void* ep, void* round, const std::uint64_t* o, void* stream) {
    return guarded([&] {
        session(stream);
        static_cast<EpHost*>(ep)->dispatch_recv(*static_cast<DispatchRound*>(round), {o[0], o[1], o[2], o[3], o[4]});
    });
}
void hal_ascend_round_free(void* round) { delete static_cast<DispatchRound*>(round); }

int hal_ascend_combine_send(void* ep, std::uint64_t x, void* dispatch_round, std::uint64_t weights, int returns_weights,
                            int weighted, void* stream, void** round) {
    return guarded([&] {
        session(stream);
        auto state = static_cast<DispatchRound*>(dispatch_round)->state;
        *round = new CombineRound(
            static_cast<EpHost*>(ep)->combine_send(x, std::move(state), weights, returns_weights != 0, weighted != 0));
    });
}
int hal_ascend_combine_recv(void* ep, void* round, std::uint64_t bias0, std::uint64_t bias1, std::uint64_t y,
                            std::uint64_t weights, void* stream) {
    return guarded([&] {
        session(stream);
        static_cast<EpHost*>(ep)->combine_recv(*static_cast<CombineRound*>(round), bias0, bias1, y, weights);
    });
}
void hal_ascend_combine_free(void* round) { delete static_cast<CombineRound*>(round); }
