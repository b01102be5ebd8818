// SPDX-License-Identifier: Apache-2.0
// Compiled against the SDK only: every number that host_shim/ states must be the SDK's. A difference stops the build here,
// before it could become a wrong order on the wire. (`make -C kernels_ascend/device probe`; never run by HAL's own CI, which
// has no SDK.) The host build compiles it against the shim, so it cannot rot.
#include <type_traits>

#include "kernel_operator.h"
#include "shmem.h"

static_assert(ACLSHMEMX_UDMA_ODR_NO == 0 && ACLSHMEMX_UDMA_ODR_RO == 5 && ACLSHMEMX_UDMA_ODR_SO == 6, "order codes");
static_assert(ACLSHMEM_MAX_QP_NUM == 32, "queues to each peer");
static_assert(ACLSHMEM_DATA_OP_UDMA == 8, "engine type");
static_assert(sizeof(aclshmemx_submit_state_t) == 8, "submit state");
static_assert(std::is_same_v<decltype(aclshmemx_submit_state_t::pending_count), uint32_t>, "pending_count");

// Field order of the request configuration: {cqe, se, fence, odr}.
inline constexpr aclshmemx_udma_op_config_t kProbe{1U, 0U, 0U, ACLSHMEMX_UDMA_ODR_SO};
static_assert(kProbe.cqe == 1 && kProbe.se == 0 && kProbe.fence == 0 && kProbe.odr == ACLSHMEMX_UDMA_ODR_SO,
              "field order");
static_assert(ACLSHMEMX_UDMA_OP_CONFIG_DEFAULT.odr == ACLSHMEMX_UDMA_ODR_NO, "the default has no order");

// The three forms of a put, by signature.
template <class T>
using PutNbi = void (*)(__gm__ T*, __gm__ T*, __ubuf__ T*, uint32_t, int, uint32_t, uint32_t);
template <class T>
using PutDefer = void (*)(__gm__ T*, __gm__ T*, __ubuf__ T*, uint32_t, int, uint32_t, uint32_t, aclshmemx_defer_t);
template <class T>
using PutSubmit = void (*)(__gm__ T*, __gm__ T*, __ubuf__ T*, uint32_t, int, uint32_t, uint32_t, aclshmemx_submit_t);
inline constexpr aclshmemx_udma_op_config_t kDeferred{0U, 0U, 0U, ACLSHMEMX_UDMA_ODR_RO};

void hal_abi_probe() {
    [[maybe_unused]] PutNbi<uint64_t> now = &aclshmemx_udma_qp_put_nbi<uint64_t, PIPE_MTE3, kProbe>;
    [[maybe_unused]] PutDefer<uint8_t> defer = &aclshmemx_udma_qp_put_nbi<uint8_t, PIPE_MTE3, kDeferred>;
    [[maybe_unused]] PutSubmit<uint8_t> submit = &aclshmemx_udma_qp_put_nbi<uint8_t, PIPE_MTE3, kProbe>;
    [[maybe_unused]] void (*quiet)(int, uint32_t) = &aclshmemx_udma_qp_quiet;
}
