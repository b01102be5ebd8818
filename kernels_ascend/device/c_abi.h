// SPDX-License-Identifier: Apache-2.0
// libhal_ascend.so: what backends/hal_ascend/aclshmem.py calls through ctypes, so one build serves every Python. Each call
// gives 0 or a kind of error; hal_ascend_error() then has its text, and for kind 1 its numbers.
#pragma once
#include <cstddef>
#include <cstdint>

extern "C" {

enum hal_ascend_kind {
    HAL_ASCEND_OK = 0,
    HAL_ASCEND_TIMEOUT = 1,
    HAL_ASCEND_CONTRACT = 2,
    HAL_ASCEND_CAPACITY = 3,
    HAL_ASCEND_FAILED = 4
};

struct hal_ascend_error_t {
    char text[512], stage[64], fix[256];
    std::int64_t rank, queue, expected, seen;  // capacity: needed in `expected`, given in `seen`
};
const hal_ascend_error_t* hal_ascend_error(void);

// Session: unique id of rank 0, QP count before initialisation and equal on all ranks.
int hal_ascend_unique_id(void* uid, std::size_t bytes);
int hal_ascend_init(int device, int rank, int ranks, const void* uid, std::size_t uid_bytes, std::uint64_t heap_bytes,
                    std::uint32_t queues, double timeout);
int hal_ascend_finalize(void);
int hal_ascend_allocate(std::uint64_t bytes, std::uint64_t* address);  // symmetric and zeroed
int hal_ascend_free(std::uint64_t address);
int hal_ascend_write(std::uint64_t device, const void* host, std::uint64_t bytes);
int hal_ascend_read(void* host, std::uint64_t device, std::uint64_t bytes);

// Words. `kind` and `order` as in kernels/primitives_args.h.
int hal_ascend_primitive(std::uint32_t kind, std::uint64_t dst, std::uint64_t src, std::uint64_t bytes, int peer,
                         int queue, std::uint32_t order, std::uint64_t value, std::uint64_t at_least, double timeout,
                         std::uint64_t* seen, void* stream);

// One ExpertParallel. `shape` is 17 int32: ranks, nodes, num_experts, top_k, max_tokens, alignment, num_buffers, scale_dim,
// row_bytes, combine_row_bytes, signal_stride, layout, schedule, completion, element, cores, queues.
int hal_ascend_ep_bytes(const std::int32_t* shape, std::uint64_t* bytes);
int hal_ascend_ep_create(const std::int32_t* shape, int rank, std::uint64_t window, double timeout, void** ep);
void hal_ascend_ep_destroy(void* ep);
int hal_ascend_dispatch_send(void* ep, std::uint32_t slot, std::uint64_t x, std::int32_t tokens, std::uint64_t idx,
                             int int64, std::uint64_t weights, std::uint64_t scales, void* reused_round, void* stream,
                             void** round);
int hal_ascend_rows(void* ep, void* round, std::int64_t* rows, std::uint64_t* received_x);
int hal_ascend_dispatch_recv(void* ep, void* round, const std::uint64_t* outputs,
                             void* stream);  // scales, idx, weights, counts, offsets
void hal_ascend_round_free(void* round);
int hal_ascend_combine_send(void* ep, std::uint64_t x, void* dispatch_round, std::uint64_t weights, int returns_weights,
                            int weighted, void* stream, void** round);
int hal_ascend_combine_recv(void* ep, void* round, std::uint64_t bias0, std::uint64_t bias1, std::uint64_t y,
                            std::uint64_t weights, void* stream);
void hal_ascend_combine_free(void* round);
}
