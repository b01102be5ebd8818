// SPDX-License-Identifier: Apache-2.0
// Compiled, never run, against NCCL's own headers (tests/test_software_nic_abi.py): every function and field that we
// declare lies where NCCL looks for it, and every constant has NCCL's value.
#include <type_traits>

#include "nccl_abi.hpp"
#include "nccl_rma.h"

namespace abi = hal::swnic::abi;

template <class T>
struct Size {
    static constexpr std::size_t value = sizeof(T);
};
template <>
struct Size<void> {
    static constexpr std::size_t value = 0;
};

// The same calling convention: as many arguments, each of the same size.
template <class Ours, class Theirs>
struct SameCall : std::false_type {};
template <class R, class... A, class S, class... B>
struct SameCall<R (*)(A...), S (*)(B...)> {
    static constexpr bool value = [] {
        if constexpr (sizeof...(A) == sizeof...(B))
            return ((sizeof(A) == sizeof(B)) && ...) && Size<R>::value == Size<S>::value;
        else
            return false;
    }();
};

#define FUNCTION(ours, our_name, theirs, their_name)                              \
    static_assert(offsetof(abi::ours, our_name) == offsetof(theirs, their_name)); \
    static_assert(SameCall<decltype(abi::ours::our_name), decltype(theirs::their_name)>::value, #their_name)
#define FIELD(ours, our_name, theirs, their_name)                                              \
    static_assert(offsetof(abi::ours, our_name) == offsetof(theirs, their_name), #their_name); \
    static_assert(sizeof(abi::ours::our_name) == sizeof(theirs::their_name), #their_name)

#define RMA(our_name, their_name) FUNCTION(RmaPluginV14, our_name, ncclRma_v14_t, their_name)
static_assert(sizeof(abi::RmaPluginV14) == sizeof(ncclRma_v14_t));
FIELD(RmaPluginV14, name, ncclRma_v14_t, name);
RMA(init, init);
RMA(devices, devices);
RMA(get_properties, getProperties);
RMA(listen, listen);
RMA(connect, connect);
RMA(create_context, createContext);
RMA(reg_mr, regMrSym);
RMA(reg_mr_dma_buf, regMrSymDmaBuf);
RMA(dereg_mr, deregMrSym);
RMA(destroy_context, destroyContext);
RMA(close_coll, closeColl);
RMA(close_listen, closeListen);
RMA(iput, iput);
RMA(iput_signal, iputSignal);
RMA(iget, iget);
RMA(iflush, iflush);
RMA(test, test);
RMA(progress, rmaProgress);
RMA(query_last_error, queryLastError);
RMA(finalize, finalize);

#define NET(our_name, their_name) FUNCTION(NetPluginV11, our_name, ncclNet_v11_t, their_name)
static_assert(sizeof(abi::NetPluginV11) == sizeof(ncclNet_v11_t));
FIELD(NetPluginV11, name, ncclNet_v11_t, name);
NET(init, init);
NET(devices, devices);
NET(get_properties, getProperties);
NET(listen, listen);
NET(connect, connect);
NET(accept, accept);
NET(reg_mr, regMr);
NET(reg_mr_dma_buf, regMrDmaBuf);
NET(dereg_mr, deregMr);
NET(isend, isend);
NET(irecv, irecv);
NET(iflush, iflush);
NET(test, test);
NET(close_send, closeSend);
NET(close_recv, closeRecv);
NET(close_listen, closeListen);
NET(get_device_mr, getDeviceMr);
NET(irecv_consumed, irecvConsumed);
NET(make_virtual_device, makeVDevice);
NET(finalize, finalize);
NET(set_attributes, setNetAttr);

#define PROPERTIES(ours, theirs)                           \
    static_assert(sizeof(abi::ours) == sizeof(theirs));    \
    FIELD(ours, name, theirs, name);                       \
    FIELD(ours, pci_path, theirs, pciPath);                \
    FIELD(ours, guid, theirs, guid);                       \
    FIELD(ours, ptr_support, theirs, ptrSupport);          \
    FIELD(ours, reg_is_global, theirs, regIsGlobal);       \
    FIELD(ours, force_flush, theirs, forceFlush);          \
    FIELD(ours, speed, theirs, speed);                     \
    FIELD(ours, port, theirs, port);                       \
    FIELD(ours, latency, theirs, latency);                 \
    FIELD(ours, max_comms, theirs, maxComms);              \
    FIELD(ours, max_recvs, theirs, maxRecvs);              \
    FIELD(ours, device_type, theirs, netDeviceType);       \
    FIELD(ours, device_version, theirs, netDeviceVersion); \
    FIELD(ours, virtual_device, theirs, vProps);           \
    FIELD(ours, max_p2p_bytes, theirs, maxP2pBytes);       \
    FIELD(ours, max_coll_bytes, theirs, maxCollBytes);     \
    FIELD(ours, max_multi_request, theirs, maxMultiRequestSize)
PROPERTIES(NetPropertiesV11, ncclNetProperties_v11_t);
PROPERTIES(NetPropertiesV12, ncclNetProperties_v12_t);
FIELD(NetPropertiesV12, rail_id, ncclNetProperties_v12_t, railId);
FIELD(NetPropertiesV12, plane_id, ncclNetProperties_v12_t, planeId);

static_assert(sizeof(abi::RmaConfigV14) == sizeof(ncclRmaConfig_v14_t));
FIELD(RmaConfigV14, contexts, ncclRmaConfig_v14_t, nContexts);
FIELD(RmaConfigV14, traffic_class, ncclRmaConfig_v14_t, trafficClass);
FIELD(RmaConfigV14, rank_stride, ncclRmaConfig_v14_t, rankStride);
static_assert(sizeof(abi::NetConfigV11) == sizeof(ncclNetCommConfig_v11_t));

static_assert(abi::success == ncclSuccess && abi::unhandled_cuda_error == ncclUnhandledCudaError);
static_assert(abi::system_error == ncclSystemError && abi::internal_error == ncclInternalError);
static_assert(abi::invalid_argument == ncclInvalidArgument && abi::invalid_usage == ncclInvalidUsage);
static_assert(abi::remote_error == ncclRemoteError && sizeof(abi::Result) == sizeof(ncclResult_t));
static_assert(static_cast<int>(abi::log_warn) == NCCL_LOG_WARN && static_cast<int>(abi::log_info) == NCCL_LOG_INFO);
static_assert(abi::log_init == NCCL_INIT && abi::log_net == NCCL_NET);
static_assert(abi::handle_bytes == NCCL_NET_HANDLE_MAXSIZE && abi::max_requests == NCCL_NET_MAX_REQUESTS);
static_assert(abi::ptr_host == NCCL_PTR_HOST && abi::ptr_cuda == NCCL_PTR_CUDA);
static_assert(abi::mr_force_strict_order == NCCL_NET_MR_FLAG_FORCE_SO);
static_assert(abi::mr_signal_never_reset == NCCL_NET_MR_FLAG_SIGNAL_NEVER_RESET);
static_assert(abi::signal_inc == NCCL_NET_SIGNAL_OP_INC && abi::signal_add == NCCL_NET_SIGNAL_OP_ADD);
static_assert(abi::id_undefined == NCCL_NET_ID_UNDEF);
static_assert(static_cast<int>(abi::net_device_host) == NCCL_NET_DEVICE_HOST);
static_assert(static_cast<int>(abi::net_device_gin_proxy) == NCCL_NET_DEVICE_GIN_PROXY);
