// SPDX-License-Identifier: Apache-2.0
// The aclshmem device names that HAL's kernels use, for the host compiler: our own declarations with the documented names,
// signatures and compile-time rules, over the emulated library (emulation/submit.hpp).
#pragma once
#include "emulation/submit.hpp"
#include "kernel_operator.h"

#define ACLSHMEM_DEVICE inline

// ---- host side: declared so that device/*.cpp is checked by the host compiler; nothing here defines it ----

enum aclshmem_data_op_engine_type_t {
    ACLSHMEM_DATA_OP_MTE = 1,
    ACLSHMEM_DATA_OP_SDMA = 2,
    ACLSHMEM_DATA_OP_ROCE = 4,
    ACLSHMEM_DATA_OP_UDMA = 8
};
enum aclshmemx_bootstrap_t {
    ACLSHMEMX_INIT_WITH_DEFAULT = 1,
    ACLSHMEMX_INIT_WITH_MPI = 2,
    ACLSHMEMX_INIT_WITH_UNIQUEID = 8
};
struct aclshmemx_uniqueid_t {
    char internal[512];
};
struct aclshmemx_option_attr_t {
    std::uint32_t version;
    aclshmem_data_op_engine_type_t data_op_engine_type;
    std::uint32_t shm_init_timeout, shm_create_timeout, control_operation_timeout;
    std::int32_t sockFd;
};
struct aclshmemx_init_attr_t {
    int my_pe, n_pes;
    char ip_port[64];
    std::uint64_t local_mem_size;
    aclshmemx_option_attr_t option_attr;
    void* comm_args;
    std::uint64_t instance_id;
};
extern "C" {
int aclshmemx_get_uniqueid(aclshmemx_uniqueid_t* uid);
int aclshmemx_set_attr_uniqueid_args(int my_pe, int n_pes, std::int64_t local_mem_size, aclshmemx_uniqueid_t* uid,
                                     aclshmemx_init_attr_t* attr);
int aclshmemx_init_attr(aclshmemx_bootstrap_t flags, aclshmemx_init_attr_t* attr);
int aclshmemx_set_qp_num(aclshmem_data_op_engine_type_t engine, std::uint32_t qp_num);
std::int32_t aclshmemx_set_conf_store_tls(bool enable, const char* info, std::uint32_t length);
void* aclshmem_malloc(std::size_t bytes);
void aclshmem_free(void* address);
int aclshmem_finalize(void);
}

// ---- device side ----

inline constexpr std::uint32_t ACLSHMEMX_UDMA_ODR_NO = 0, ACLSHMEMX_UDMA_ODR_RO = 5, ACLSHMEMX_UDMA_ODR_SO = 6;
inline constexpr std::uint32_t ACLSHMEM_MAX_QP_NUM = hal::udma::kMaxQueues;

struct aclshmemx_udma_op_config_t {
    std::uint32_t cqe, se, fence, odr;
};
inline constexpr aclshmemx_udma_op_config_t ACLSHMEMX_UDMA_OP_CONFIG_DEFAULT{1, 0, 0, ACLSHMEMX_UDMA_ODR_NO};

struct aclshmemx_submit_state_t {
    std::uint32_t pending_count, reserved;
};
struct aclshmemx_defer_t {
    aclshmemx_submit_state_t* state;
};
struct aclshmemx_submit_t {
    aclshmemx_submit_state_t* state;
};

ACLSHMEM_DEVICE int aclshmem_my_pe() { return hal_shim::core().device.pe(); }
ACLSHMEM_DEVICE int aclshmem_n_pes() { return hal_shim::core().device.pes(); }
ACLSHMEM_DEVICE void* aclshmem_ptr(void* symmetric, int pe) {
    return reinterpret_cast<void*>(hal_shim::core().device.to_remote(reinterpret_cast<std::uint64_t>(symmetric), pe));
}

namespace hal_shim {
template <class T, pipe_t WQE_PIPE>
hal::udma::Post put_post(const aclshmemx_udma_op_config_t& c, hal::udma::Action action, T* dst, T* src, T* buf,
                         std::uint32_t elem_size, int pe, std::uint32_t qp, std::uint32_t sync_id) {
    hal::udma::Post p;
    p.config = {c.cqe, c.se, c.fence, c.odr};
    p.pipe = pipe(WQE_PIPE);
    p.action = action;
    p.dst = reinterpret_cast<std::uint64_t>(dst);
    p.src = reinterpret_cast<std::uint64_t>(src);
    p.bytes = std::uint64_t{elem_size} * sizeof(T);
    p.pe = pe;
    p.qp = qp;
    p.scratch = buf;
    p.sync_id = sync_id;
    return p;
}
}  // namespace hal_shim

template <typename T, pipe_t WQE_PIPE = PIPE_MTE3,
          const aclshmemx_udma_op_config_t& CONFIG = ACLSHMEMX_UDMA_OP_CONFIG_DEFAULT>
ACLSHMEM_DEVICE void aclshmemx_udma_qp_put_nbi(__gm__ T* dst, __gm__ T* src, __ubuf__ T* buf, std::uint32_t elem_size,
                                               int pe, std::uint32_t qp_idx, std::uint32_t sync_id = 0) {
    static_assert(CONFIG.cqe <= 1 && CONFIG.fence <= 1 && CONFIG.odr <= 7 && CONFIG.se == 0, "illegal configuration");
    static_assert(CONFIG.cqe != 0, "an immediate request needs a completion entry");
    hal::udma::post(hal_shim::core(), hal_shim::put_post<T, WQE_PIPE>(CONFIG, hal::udma::Action::immediate, dst, src,
                                                                      buf, elem_size, pe, qp_idx, sync_id));
}

template <typename T, pipe_t WQE_PIPE = PIPE_MTE3,
          const aclshmemx_udma_op_config_t& CONFIG = ACLSHMEMX_UDMA_OP_CONFIG_DEFAULT>
ACLSHMEM_DEVICE void aclshmemx_udma_qp_put_nbi(__gm__ T* dst, __gm__ T* src, __ubuf__ T* buf, std::uint32_t elem_size,
                                               int pe, std::uint32_t qp_idx, std::uint32_t sync_id,
                                               aclshmemx_defer_t action) {
    static_assert(CONFIG.fence <= 1 && CONFIG.odr <= 7 && CONFIG.se == 0, "illegal configuration");
    static_assert(CONFIG.cqe == 0, "a deferred request has no completion entry");
    static_assert(WQE_PIPE == PIPE_MTE3, "batches are published by MTE3");
    auto p = hal_shim::put_post<T, WQE_PIPE>(CONFIG, hal::udma::Action::defer, dst, src, buf, elem_size, pe, qp_idx,
                                             sync_id);
    p.pending_count = &action.state->pending_count;
    hal::udma::post(hal_shim::core(), p);
}

template <typename T, pipe_t WQE_PIPE = PIPE_MTE3,
          const aclshmemx_udma_op_config_t& CONFIG = ACLSHMEMX_UDMA_OP_CONFIG_DEFAULT>
ACLSHMEM_DEVICE void aclshmemx_udma_qp_put_nbi(__gm__ T* dst, __gm__ T* src, __ubuf__ T* buf, std::uint32_t elem_size,
                                               int pe, std::uint32_t qp_idx, std::uint32_t sync_id,
                                               aclshmemx_submit_t action) {
    static_assert(CONFIG.fence <= 1 && CONFIG.odr <= 7 && CONFIG.se == 0, "illegal configuration");
    static_assert(CONFIG.cqe != 0, "a submitted request needs a completion entry");
    static_assert(WQE_PIPE == PIPE_MTE3, "batches are published by MTE3");
    auto p = hal_shim::put_post<T, WQE_PIPE>(CONFIG, hal::udma::Action::submit, dst, src, buf, elem_size, pe, qp_idx,
                                             sync_id);
    p.pending_count = &action.state->pending_count;
    hal::udma::post(hal_shim::core(), p);
}

ACLSHMEM_DEVICE void aclshmemx_udma_qp_quiet(int pe, std::uint32_t qp_idx) {
    hal::udma::quiet(hal_shim::core(), pe, qp_idx);
}

// Adds to a remote word (two blocks, scalar unit, completion entry); QP 0, like every atomic of the library.
template <typename T>
ACLSHMEM_DEVICE void aclshmemx_udma_atomic_add(__gm__ T* dst, T value, int pe) {
    static_assert(sizeof(T) == 8);
    hal::udma::Post p;
    p.config = {1, 0, 0, ACLSHMEMX_UDMA_ODR_NO};
    p.pipe = hal::udma::Pipe::scalar;
    p.opcode = hal::udma::Opcode::fetch_add;
    p.dst = reinterpret_cast<std::uint64_t>(dst);
    p.operand = value;
    p.pe = pe;
    hal::udma::post(hal_shim::core(), p);
}
