// SPDX-License-Identifier: Apache-2.0
// The part of NCCL's plug-in interfaces that this NIC implements: network v11 and RMA v14, as NCCL 2.30.7 loads them.
// Our own declarations; the names are ours, the layout is NCCL's. The sizes and offsets below are checked at compile
// time, and tests/test_software_nic_abi.py compares every one of them with NCCL's own headers where those are present.
#pragma once
#include <cstddef>
#include <cstdint>

namespace hal::swnic::abi {

enum Result : int {
    success = 0,
    unhandled_cuda_error = 1,
    system_error = 2,
    internal_error = 3,
    invalid_argument = 4,
    invalid_usage = 5,
    remote_error = 6,
};

enum LogLevel : int { log_warn = 2, log_info = 3 };
inline constexpr unsigned long log_init = 0x1;
inline constexpr unsigned long log_net = 0x10;
using Logger = void (*)(LogLevel level, unsigned long subsystems, const char* file, int line, const char* format, ...);
using ProfilerCallback = Result (*)(void** event, int type, void* parent, std::int64_t plugin_id, void* extra);

inline constexpr std::size_t handle_bytes = 128;
inline constexpr int max_requests = 32;  // outstanding requests of one network communicator, and per maxRecvs for RMA
inline constexpr int ptr_host = 0x1;
inline constexpr int ptr_cuda = 0x2;
inline constexpr std::uint64_t mr_force_strict_order = 1u << 0;
inline constexpr std::uint64_t mr_signal_never_reset = 1u << 1;
inline constexpr std::uint32_t signal_inc = 0x1;
inline constexpr std::uint32_t signal_add = 0x2;
inline constexpr std::int16_t id_undefined = -1;

enum NetDeviceType : int { net_device_host = 0, net_device_gin_proxy = 2 };

template <int max_devices>
struct VirtualDevice {
    int count;
    int devices[max_devices];
};

struct NetPropertiesV11 {
    char* name;
    char* pci_path;  // nullptr: attached to the first CPU
    std::uint64_t guid;
    int ptr_support;
    int reg_is_global;
    int force_flush;
    int speed;  // Mbit/s
    int port;
    float latency;
    int max_comms;
    int max_recvs;
    NetDeviceType device_type;
    int device_version;
    VirtualDevice<4> virtual_device;
    std::size_t max_p2p_bytes;
    std::size_t max_coll_bytes;
    int max_multi_request;
};

struct NetPropertiesV12 {
    char* name;
    char* pci_path;
    std::uint64_t guid;
    int ptr_support;
    int reg_is_global;
    int force_flush;
    int speed;
    int port;
    float latency;
    int max_comms;
    int max_recvs;  // the GIN proxy posts at most 32 * max_recvs requests to each (context, peer)
    NetDeviceType device_type;
    int device_version;
    VirtualDevice<8> virtual_device;
    std::size_t max_p2p_bytes;
    std::size_t max_coll_bytes;
    int max_multi_request;
    std::int16_t rail_id;
    std::int16_t plane_id;
};

struct NetConfigV11 {
    int traffic_class;
};

struct NetPluginV11 {
    const char* name;
    Result (*init)(void** ctx, std::uint64_t comm_id, NetConfigV11* config, Logger logger, ProfilerCallback profiler);
    Result (*devices)(int* count);
    Result (*get_properties)(int device, NetPropertiesV11* properties);
    Result (*listen)(void* ctx, int device, void* handle, void** listen_comm);
    Result (*connect)(void* ctx, int device, void* handle, void** send_comm, void** device_handle);
    Result (*accept)(void* listen_comm, void** recv_comm, void** device_handle);
    Result (*reg_mr)(void* comm, void* data, std::size_t size, int type, void** mr);
    Result (*reg_mr_dma_buf)(void* comm, void* data, std::size_t size, int type, std::uint64_t offset, int fd,
                             void** mr);
    Result (*dereg_mr)(void* comm, void* mr);
    Result (*isend)(void* send_comm, void* data, std::size_t size, int tag, void* mr, void* profile, void** request);
    Result (*irecv)(void* recv_comm, int n, void** data, std::size_t* sizes, int* tags, void** mrs, void** profiles,
                    void** request);
    Result (*iflush)(void* recv_comm, int n, void** data, int* sizes, void** mrs, void** request);
    Result (*test)(void* request, int* done, int* sizes);
    Result (*close_send)(void* send_comm);
    Result (*close_recv)(void* recv_comm);
    Result (*close_listen)(void* listen_comm);
    Result (*get_device_mr)(void* comm, void* mr, void** device_mr);
    Result (*irecv_consumed)(void* recv_comm, int n, void* request);
    Result (*make_virtual_device)(int* device, VirtualDevice<4>* members);
    Result (*finalize)(void* ctx);
    Result (*set_attributes)(void* ctx, void* attributes);
};

struct RmaConfigV14 {
    int contexts;
    int traffic_class;
    int rank_stride;  // a context reaches the ranks whose distance from this one is a multiple of it (the rail)
};

struct RmaPluginV14 {
    const char* name;
    Result (*init)(void** ctx, std::uint64_t comm_id, Logger logger);
    Result (*devices)(int* count);
    Result (*get_properties)(int device, NetPropertiesV12* properties);
    Result (*listen)(void* ctx, int device, void* handle, void** listen_comm);
    Result (*connect)(void* ctx, void* handles[], int nranks, int rank, void* listen_comm, void** coll_comm);
    Result (*create_context)(void* coll_comm, RmaConfigV14* config, void** rma_ctx);
    Result (*reg_mr)(void* coll_comm, void* data, std::size_t size, int type, std::uint64_t flags, void** mr);
    Result (*reg_mr_dma_buf)(void* coll_comm, void* data, std::size_t size, int type, std::uint64_t offset, int fd,
                             std::uint64_t flags, void** mr);
    Result (*dereg_mr)(void* coll_comm, void* mr);
    Result (*destroy_context)(void* rma_ctx);
    Result (*close_coll)(void* coll_comm);
    Result (*close_listen)(void* listen_comm);
    Result (*iput)(void* rma_ctx, int context, std::uint64_t src_off, void* src_mr, std::size_t size,
                   std::uint64_t dst_off, void* dst_mr, std::uint32_t rank, void** request);
    Result (*iput_signal)(void* rma_ctx, int context, std::uint64_t src_off, void* src_mr, std::size_t size,
                          std::uint64_t dst_off, void* dst_mr, std::uint32_t rank, std::uint64_t signal_off,
                          void* signal_mr, std::uint64_t signal_value, std::uint32_t signal_op, bool strong,
                          void** request);
    Result (*iget)(void* rma_ctx, int context, std::uint64_t remote_off, void* remote_mr, std::size_t size,
                   std::uint64_t local_off, void* local_mr, std::uint32_t rank, void** request);
    Result (*iflush)(void* rma_ctx, int context, void* mr, std::uint32_t rank, void** request);
    Result (*test)(void* coll_comm, void* request, int* done);
    Result (*progress)(void* rma_ctx);
    Result (*query_last_error)(void* rma_ctx, bool* has_error);
    Result (*finalize)(void* ctx);
};

static_assert(sizeof(NetPropertiesV11) == 112 && offsetof(NetPropertiesV11, max_p2p_bytes) == 88);
static_assert(sizeof(NetPropertiesV12) == 128 && offsetof(NetPropertiesV12, max_p2p_bytes) == 104);
static_assert(offsetof(NetPropertiesV12, rail_id) == 124 && offsetof(NetPropertiesV12, plane_id) == 126);
static_assert(sizeof(NetPluginV11) == 22 * sizeof(void*) && sizeof(RmaPluginV14) == 21 * sizeof(void*));
static_assert(sizeof(RmaConfigV14) == 12 && sizeof(NetConfigV11) == 4);

}  // namespace hal::swnic::abi
