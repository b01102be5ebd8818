/* SPDX-License-Identifier: Apache-2.0
 *
 * The plain C interface of the CUDA backend: NCCL runtime, dispatch and combine, and the ordering words on LSA pointers.
 * Every function returns 0, or -1 with the reason in hal_cuda_last_error() of the same thread. Structures are plain data
 * that a caller fills once and reuses; backends/hal_cuda/native.py mirrors them.
 */
#ifndef HAL_CUDA_H
#define HAL_CUDA_H
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define HAL_CUDA_ABI 2

/* What a kernel that could not go on leaves in pinned memory; the first to fail writes it. */
enum { HAL_CUDA_OK = 0, HAL_CUDA_TIMEOUT = 1, HAL_CUDA_BAD_INPUT = 2, HAL_CUDA_MIXED_HANDLES = 3 };
enum {
    HAL_CUDA_STAGE_NONE = 0,
    HAL_CUDA_STAGE_PREVIOUS_ROUND, /* dispatch: the peer's rows of the round before */
    HAL_CUDA_STAGE_HEADER,         /* dispatch: the peer's counts and receive slot */
    HAL_CUDA_STAGE_GRID,           /* this GPU's own blocks */
    HAL_CUDA_STAGE_ROWS,           /* dispatch: the peer's rows */
    HAL_CUDA_STAGE_READY,          /* combine: the peer's rows to read, or its staging to write */
    HAL_CUDA_STAGE_COMBINE_ROWS,   /* combine: a row that the peer pushes */
    HAL_CUDA_STAGE_DONE,           /* combine: the peer has read this rank's rows */
    HAL_CUDA_STAGE_WAIT,           /* Session.wait */
    HAL_CUDA_STAGE_BARRIER,        /* Session.barrier */
};
enum { HAL_CUDA_BAD_ID = 1, HAL_CUDA_BAD_DUPLICATE = 2 }; /* hal_cuda_error.detail of BAD_INPUT */

typedef struct hal_cuda_error {
    uint32_t claimed;
    int32_t kind, rank, stage, queue, detail; /* detail of TIMEOUT: 1 = that rank failed, 2 = it closed */
    int32_t token, expert;                    /* BAD_INPUT: where, and the id found there */
    uint64_t expected, seen;
} hal_cuda_error;

/* What ends this rank's waits. Its kernels set `failed` to 1 when a wait of theirs fails; its host sets the rest when it
 * notices how peers leave, `closed` before `any_closed`. */
enum { HAL_CUDA_CLOSED_RANKS = 64 }; /* ranks beyond these that closed are noticed at the time limit */
typedef struct hal_cuda_abort_words {
    uint32_t failed;     /* 1: a wait of this rank; 2 + r: rank r failed or died. Ends every wait */
    uint32_t any_closed; /* 1: look at `closed` */
    uint64_t closed;     /* bit r: rank r closed, having done all it was asked to: ends the waits for it */
} hal_cuda_abort_words;

/* One ExpertParallel on one rank. Offsets are bytes from the window's start, and in a slot from the slot's start. */
typedef struct hal_cuda_ep {
    int32_t device, unused;
    uint64_t peers; /* rank 0's window as this device addresses it; rank r's is r * peer_stride further on */
    uint64_t peer_stride;
    uint64_t state;   /* this rank's counters (struct State), device memory, zeroed at the start */
    uint64_t scratch; /* this rank's own: bits of the directory, then counts by block and expert */
    uint64_t error;   /* hal_cuda_error in pinned memory, device address */
    uint64_t abort;   /* this rank's abort words (hal_cuda_abort_words), device memory that only this rank writes */
    uint64_t timeout_ns;
    uint64_t off_header, off_arrive, off_dispatch_flags, off_ready, off_done, off_combine_flags;
    uint64_t off_slots, slot_bytes;
    uint64_t slot_scales, slot_idx, slot_weights, slot_counts, slot_offsets, slot_meta, slot_back, slot_own;
    uint64_t slot_tallies; /* fixed slots: [R] x (1 + L) words of the sources, and one of this rank's own */
    int32_t world, rank, experts, local_experts, topk, max_tokens, scale_dim;
    int32_t row_bytes, combine_row_bytes, combine_type; /* 0 bfloat16, 1 float16, 2 float32 */
    int32_t expert_layout, fixed_slots, alignment, slots, slot_rows;
    uint32_t owner_inverse; /* (2^32 - 1) / local_experts + 1 */
    int32_t keep_source;    /* dispatch keeps where each row came from: needed by a combine that pushes */
} hal_cuda_ep;

enum { HAL_CUDA_SEND = 1, HAL_CUDA_RECV = 2 };

/* One dispatch. Handle arrays live as long as the handle: pos [T, R] rows at each rank (layout rank) or [T, k] rows
 * (layout expert), -1 = none; idx and weights [T, k]; source: layout rank [rows] int32 source token; layout expert
 * [R * max_tokens, k] rows, as many weights, then [R * max_tokens] source tokens; counts [R] int32 rows from each rank,
 * then the total, the rows with padding, the round, and (fixed slots, layout expert) [L, R] rows of each expert and rank;
 * expert_counts [L] and expert_offsets [L + 1] as the caller gets them, who may overwrite its own. */
typedef struct hal_cuda_dispatch_args {
    uint64_t x, topk_idx, topk_weights, scales;
    uint64_t pos, idx, weights, source, counts, expert_counts, expert_offsets;
    uint64_t host_word; /* pinned: sequence << 32 | rows, written as soon as the rows are known; 0 = not wanted */
    uint32_t sequence;
    int32_t tokens, idx_is_64, cached;
    int32_t slot;      /* where the caller's arrays lie */
    int32_t next_slot; /* fixed slots: offered to the peers for the next round as this one begins; -1 = none yet */
    int32_t phases;
    int32_t pad_to_rows; /* rows up to here are zeroed; 0 = none beyond what the layout itself pads */
    int32_t blocks, threads;
} hal_cuda_dispatch_args;

/* One combine. `window_offset` is x's offset in the window, or -1 when it lies elsewhere and is first copied into slot
 * `scratch_slot` (pull), or read in place and pushed into the peers' scratch slots (push). */
typedef struct hal_cuda_combine_args {
    uint64_t x, out, bias0, bias1, row_weights, out_weights;
    uint64_t pos, idx, weights, source, counts;
    int64_t window_offset;
    int32_t tokens, weighted, carries_weights, scratch_slot, push, phases;
    int32_t late_done; /* pull: x may not be written before the next dispatch, so nobody waits for its readers here */
    int32_t blocks, threads, push_blocks;
} hal_cuda_combine_args;

typedef struct hal_cuda_properties {
    int32_t world, rank, lsa_size, lsa_rank, gin_type, device, nccl_version, sms;
    char gpu[64];
} hal_cuda_properties;

typedef struct hal_cuda_window {
    uint64_t ptr, bytes; /* this rank's part, as the frameworks see it */
    uint64_t peers,
        peer_stride; /* LSA rank 0's part as kernels address it; LSA rank r's is r * peer_stride further on */
    uint64_t handle; /* ncclWindow_t */
} hal_cuda_window;

/* One ordering word, run by the one-block interpreter kernel. */
enum { HAL_CUDA_PUT = 0, HAL_CUDA_SIGNAL, HAL_CUDA_WAIT, HAL_CUDA_QUIET };
enum { HAL_CUDA_MAX_OPS = 48 }; /* of one call */
typedef struct hal_cuda_op {
    int32_t kind, peer, order, signal_op, stage, queue;
    uint64_t address, source, bytes, value; /* address: of the peer's memory as this device addresses it */
} hal_cuda_op;

const char* hal_cuda_last_error(void);
int hal_cuda_abi(void);
int hal_cuda_compiled_nccl(void);

int hal_cuda_load_nccl(const char* path, int* version);
int hal_cuda_unique_id(void* id128);
int hal_cuda_comm_create(const void* id128, int world, int rank, int device, void** comm);
/* A communicator that somebody else made with the same NCCL library, and destroys. */
int hal_cuda_comm_adopt(void* nccl_comm, int device, void** comm);
int hal_cuda_comm_properties(void* comm, hal_cuda_properties* out);
int hal_cuda_comm_destroy(void* comm, int abort);
int hal_cuda_window_create(void* comm, uint64_t bytes, hal_cuda_window* out);
int hal_cuda_window_destroy(void* comm, hal_cuda_window* window);

int hal_cuda_dispatch(const hal_cuda_ep* ep, const hal_cuda_dispatch_args* args, uint64_t stream);
int hal_cuda_combine(const hal_cuda_ep* ep, const hal_cuda_combine_args* args, uint64_t stream);
int hal_cuda_state_bytes(void);
/* Bounded host wait for *word >> 32 == sequence; 0 and *value, 1 when time is up, 2 when `error` was claimed. */
int hal_cuda_await_rows(const uint64_t* word, uint32_t sequence, const hal_cuda_error* error, double seconds,
                        uint32_t* value);
/* The words one after the other, each complete before the next. `result` (pinned, device address) gets what the last
 * wait saw, or stays as it is. Uses device, state and error of `ep`. */
int hal_cuda_ops(const hal_cuda_ep* ep, const hal_cuda_op* ops, int count, uint64_t timeout_ns, uint64_t result,
                 uint64_t stream);

/* Counters of arrays that view slots; they outlive everything, since an array may. */
int64_t* hal_cuda_leases(int count);
/* A DLManagedTensor (DLPack) of leased memory: *lease goes up now, and down when its consumer lets go. NULL: no memory. */
void* hal_cuda_dlpack(uint64_t ptr, int device, int code, int bits, int dims, int64_t rows, int64_t columns,
                      int64_t* lease);
/* Lets go of one that no consumer took. */
void hal_cuda_dlpack_end(void* managed);

int hal_cuda_device_count(int* count);
int hal_cuda_malloc(int device, uint64_t bytes, uint64_t stream, uint64_t* ptr);
int hal_cuda_free(int device, uint64_t ptr, uint64_t stream);
int hal_cuda_host_alloc(int device, uint64_t bytes, void** host, uint64_t* address);
int hal_cuda_host_free(void* host);
int hal_cuda_memset(int device, uint64_t ptr, int value, uint64_t bytes, uint64_t stream);
int hal_cuda_copy(int device, uint64_t dst, uint64_t src, uint64_t bytes, uint64_t stream);
int hal_cuda_stream_create(int device, uint64_t* stream);
int hal_cuda_stream_destroy(int device, uint64_t stream);
int hal_cuda_stream_sync(int device, uint64_t stream);
/* *idle: all work given so far is done. An error of that work is this call's. */
int hal_cuda_stream_query(int device, uint64_t stream, int* idle);
int hal_cuda_stream_capturing(int device, uint64_t stream, int* capturing);
int hal_cuda_stream_order(int device, uint64_t earlier,
                          uint64_t later); /* `later` goes on after what `earlier` holds now */

#ifdef __cplusplus
}
#endif
#endif
