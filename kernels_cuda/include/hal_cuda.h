/* SPDX-License-Identifier: Apache-2.0
 *
 * The plain C interface of the CUDA backend: NCCL runtime, dispatch and combine, and the ordering words over NVLink and GIN.
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

#define HAL_CUDA_ABI 5

/* What a kernel that could not go on leaves in pinned memory; the first to fail writes it. */
enum { HAL_CUDA_OK = 0, HAL_CUDA_TIMEOUT = 1, HAL_CUDA_BAD_INPUT = 2, HAL_CUDA_MIXED_HANDLES = 3 };
enum {
    HAL_CUDA_STAGE_NONE = 0,
    HAL_CUDA_STAGE_PREVIOUS_ROUND,   /* dispatch: the peer's rows of the round before */
    HAL_CUDA_STAGE_HEADER,           /* dispatch: the peer's counts and receive slot */
    HAL_CUDA_STAGE_GRID,             /* this GPU's own blocks */
    HAL_CUDA_STAGE_ROWS,             /* dispatch: the peer's rows */
    HAL_CUDA_STAGE_READY,            /* combine: the peer's rows to read, or its staging to write */
    HAL_CUDA_STAGE_COMBINE_ROWS,     /* combine: a row that the peer pushes */
    HAL_CUDA_STAGE_DONE,             /* combine: the peer has read this rank's rows */
    HAL_CUDA_STAGE_WAIT,             /* Session.wait */
    HAL_CUDA_STAGE_BARRIER,          /* Session.barrier */
    HAL_CUDA_STAGE_SOURCE,           /* quiet("source"): the network has read what this rank put */
    HAL_CUDA_STAGE_REMOTE,           /* quiet("remote"): the peer has what this rank put */
    HAL_CUDA_STAGE_ROOM,             /* dispatch over hosts: room in the peer's ring of a channel */
    HAL_CUDA_STAGE_CROSSING,         /* dispatch over hosts: the peer's rows */
    HAL_CUDA_STAGE_COMBINE_ROOM,     /* combine over hosts: room in the peer's ring of a channel */
    HAL_CUDA_STAGE_COMBINE_CROSSING, /* combine over hosts: the peer's rows or sums */
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
    uint64_t
        dirty; /* this rank's own (kernels_cuda/src/dirty.cuh): [receive slots, runs] x 2 words, ones at the start */
    uint64_t error; /* hal_cuda_error in pinned memory, device address */
    uint64_t abort; /* this rank's abort words (hal_cuda_abort_words), device memory that only this rank writes */
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

/* GIN as kernels see it (kernels_cuda/src/gin.cuh): what leads to ranks outside this rank's NVLink domain. */
typedef struct hal_cuda_gin {
    uint64_t comm;               /* device address of NCCL's device communicator; 0 = no GIN here */
    uint64_t window;             /* ncclWindow_t of HAL's own words (struct Words) */
    uint64_t words;              /* where they are on this rank */
    uint64_t peers, peer_stride; /* the same of lsa_rank 0 of this NVLink domain; lsa_rank i's are i * peer_stride on */
    uint64_t state;              /* this rank's counters (struct Counts), device memory, zeroed at the start */
    int32_t world, rank, lsa_size, lsa_rank; /* rank r is in the domain r / lsa_size; where lsa_size is 1, NCCL's
                                                own team may be larger */
    int32_t queues, signals;                 /* contexts; indexed signals of each */
    int32_t strong;                          /* the transport has strong signals (profile gin); else gin-weak */
    int32_t rail;                            /* only ranks with this rank's lsa_rank can be reached */
    int32_t slots, unused;                   /* signal slots of hal_cuda_gin_ops */
} hal_cuda_gin;

/* What an ExpertParallel over several hosts has beside hal_cuda_ep (kernels_cuda/src/hosts.cuh). Its peers are the ranks
 * that GIN takes it to: of the same rail on each other host (hierarchical), or all ranks of other hosts (direct). In its
 * hal_cuda_ep, `peers` is the window of lsa_rank 0 of this host, and what neighbours write has an entry for each of them.
 */
typedef struct hal_cuda_hosts {
    hal_cuda_gin gin;
    uint64_t window; /* ncclWindow_t of this ExpertParallel's window */
    uint64_t
        counts;    /* this rank's own: [4, peers x channels] uint64 cells sent and taken so far, zeroed at the start */
    uint64_t plan; /* this rank's own: 2 x ranks + experts + hosts uint32 */
    uint64_t off_outbox, off_inbox, off_headers_came, off_raised;
    uint64_t off_sending, off_received, off_combine_sending, off_combine_received; /* rings of cells, by channel */
    int32_t hierarchical, peers, channels, cells,
        batch; /* channels of each peer; cells of a ring; batch at most half */
    int32_t cell_bytes, combine_cell_bytes;
    int32_t record_bytes; /* direct: of a row's words in slot_meta [peers, max_tokens] */
} hal_cuda_hosts;

enum { HAL_CUDA_SEND = 1, HAL_CUDA_RECV = 2 };

/* One dispatch. Handle arrays live as long as the handle: pos [T, R] rows at each rank (layout rank) or [T, k] rows
 * (layout expert), -1 = none; idx and weights [T, k]; source: layout rank [rows] int32 source token; layout expert
 * [R * max_tokens, k] rows, as many weights, then [R * max_tokens] source tokens; counts [R] int32 rows from each rank,
 * then the total, the rows with padding, the round, and (fixed slots, layout expert) [L, R] rows of each expert and rank;
 * expert_counts [L] and expert_offsets [L + 1] as the caller gets them, who may overwrite its own.
 * Over several hosts: pos [T, k] places among this rank's rows for a destination, -1 = none; source and lists as
 * `came_from` and `Lists` of hosts.cuh say. */
typedef struct hal_cuda_dispatch_args {
    uint64_t x, topk_idx, topk_weights, scales;
    uint64_t pos, idx, weights, source, counts, expert_counts, expert_offsets, lists;
    uint64_t host_word; /* pinned: sequence << 32 | rows, written as soon as the rows are known; 0 = not wanted */
    uint32_t sequence;
    int32_t tokens, idx_is_64, cached; /* tokens: of the handle, in both halves */
    int32_t slot;                      /* where the caller's arrays lie */
    int32_t next_slot; /* fixed slots: offered to the peers for the next round as this one begins; -1 = none yet */
    int32_t phases;
    int32_t pad_to_rows; /* rows up to here are padding; 0 = none beyond what the layout itself pads */
    int32_t blocks, threads;
    int32_t push_warps; /* layout expert within one NVLink domain: about so many push rows to other ranks first */
} hal_cuda_dispatch_args;

/* One combine. The handle's addresses are as in hal_cuda_dispatch_args; it reads no expert_counts and expert_offsets.
 * `window_offset` is x's offset in the window, or -1 when it lies elsewhere and is first copied into slot
 * `scratch_slot` (pull), or read in place and pushed into the peers' scratch slots (push). */
typedef struct hal_cuda_combine_args {
    uint64_t x, out, bias0, bias1, row_weights, out_weights;
    uint64_t pos, idx, weights, source, counts, expert_counts, expert_offsets, lists;
    int64_t window_offset;
    int32_t tokens, weighted, carries_weights, scratch_slot, push, phases;
    int32_t late_done; /* pull: x may not be written before the next dispatch, so nobody waits for its readers here */
    int32_t blocks, threads, push_blocks;
    int32_t fly_ahead; /* pull, more rows than the blocks' warps: through shared memory, many at a time */
} hal_cuda_combine_args;

typedef struct hal_cuda_properties {
    int32_t world, rank, lsa_size, lsa_rank, gin_type, device, nccl_version, sms;
    char gpu[64];
    /* ncclGinType_t: gin_type reaches every rank (0 = none does), rail_type those of the same lsa_rank. */
    int32_t rail_type;
} hal_cuda_properties;

/* What GIN is to have, the same on all ranks, and what it got. */
enum { HAL_CUDA_GIN_FULL = 1, HAL_CUDA_GIN_RAIL = 2 };
typedef struct hal_cuda_gin_needs {
    int32_t queues;        /* contexts */
    int32_t signals;       /* indexed signals of each, for kernels */
    int32_t strong;        /* 1: strong signals if the transport has them; 0: do without */
    int32_t traffic_class; /* of the network; INT32_MIN = NCCL's own choice */
    int32_t slots;         /* signal slots of the interpreter below */
} hal_cuda_gin_needs;
typedef struct hal_cuda_gin_properties {
    int32_t type, connection; /* ncclGinType_t; HAL_CUDA_GIN_FULL or _RAIL */
    int32_t contexts, connections, signals, strong, va_signals, traffic_class;
    int32_t lsa_size, rail_size;
} hal_cuda_gin_properties;

typedef struct hal_cuda_window {
    uint64_t ptr, bytes; /* this rank's part, as the frameworks see it */
    uint64_t peers,
        peer_stride; /* LSA rank 0's part as kernels address it; LSA rank r's is r * peer_stride further on */
    uint64_t handle; /* ncclWindow_t */
} hal_cuda_window;

/* One ordering word, run by the one-block interpreter kernel. hal_cuda_ops knows addresses only. In hal_cuda_gin_ops
 * `address` of a signal and a wait is the slot's number, and a put with `network` has an offset in `window` as its address
 * and one in `source_window` as its source (both handles). */
enum {
    HAL_CUDA_PUT = 0,
    HAL_CUDA_SIGNAL,
    HAL_CUDA_WAIT,
    HAL_CUDA_QUIET,
    HAL_CUDA_PUT_VALUE, /* the rest in hal_cuda_gin_ops only. Eight bytes over the network, `value` */
    HAL_CUDA_ARRIVE,    /* barriers: say so to the peer; order 2 = complete */
    HAL_CUDA_AWAIT      /* until the peer has said so; order as it was said with */
};
enum { HAL_CUDA_MAX_OPS = 48 }; /* of one call */
typedef struct hal_cuda_op {
    int32_t kind, peer, order, signal_op, stage, queue;
    uint64_t address, source, bytes, value; /* address: of the peer's memory as this device addresses it */
    uint64_t window, source_window;
    int32_t network, source_only; /* source_only: of quiet */
} hal_cuda_op;

/* One instruction of a litmus program (hal/checker/program.py), of one thread of this rank. Places are lines of the
 * repetition, HAL_CUDA_LITMUS_LINE bytes each, their value in the first 8. */
enum { HAL_CUDA_LITMUS_LINE = 64, HAL_CUDA_LITMUS_RANKS = 8, HAL_CUDA_LITMUS_THREADS = 8 };
enum {
    HAL_CUDA_LITMUS_PUT = 0, /* `count` lines from `line` at `peer`: from `source_line`, or all of them the value */
    HAL_CUDA_LITMUS_SIGNAL,  /* at `peer`; order 2 = strong, else weak */
    HAL_CUDA_LITMUS_WAIT,    /* until the own lines `line` … `line + count - 1` sum to `value`; `peer`: who signals */
    HAL_CUDA_LITMUS_QUIET,   /* order 0 = source, 1 = remote; queue and peer -1 = all */
    HAL_CUDA_LITMUS_BARRIER, /* order 1 = each first completes its own operations */
    HAL_CUDA_LITMUS_WRITE,   /* the own `line` */
    HAL_CUDA_LITMUS_READ     /* the sum of the own lines into `target_register` */
};
typedef struct hal_cuda_litmus_op {
    int32_t what, thread, peer, queue, order;
    int32_t network; /* over GIN also where stores reach the peer */
    int32_t line, count, source_line, stage_line, target_register;
    int32_t value_register;                    /* the value is what that register holds; -1: it is `value` */
    int32_t set, own_line, own_set, own_order; /* a signal sets; the signal of a put itself, own_line -1 = none */
    uint64_t value, own_value;
} hal_cuda_litmus_op;

/* A program on this rank, played `repetitions` times in one launch. */
typedef struct hal_cuda_litmus {
    uint64_t ops;     /* hal_cuda_litmus_op[ops_count], device address */
    uint64_t results; /* [repetitions][registers], device address */
    uint64_t
        peer[HAL_CUDA_LITMUS_RANKS]; /* each rank's part of the window as this device addresses it; 0 = by GIN only */
    uint64_t window;                 /* hal_cuda_window.handle */
    uint64_t off_starts, off_barriers,
        off_lines;                         /* in the window: a line for each thread of the program, twice; lines */
    uint64_t seed, pause_ns;               /* pauses between instructions last up to this */
    uint32_t repetitions, lines;           /* lines of one repetition */
    uint32_t all_threads, barrier_threads; /* bits: threads of the program, and those that pass barriers */
    int32_t rank_of_thread[HAL_CUDA_LITMUS_THREADS];
    int32_t ops_count, registers, ranks, rank, threads, first_thread; /* this rank's threads follow each other */
    int32_t queues; /* of the program; queue number `queues` carries the arrivals */
    int32_t network;
} hal_cuda_litmus;

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
/* Collective, after the communicator and before its windows. Fails, saying why, where NCCL has no GIN. `out` is for
 * kernels, and lives until the communicator goes. */
int hal_cuda_gin_create(void* comm, const hal_cuda_gin_needs* needs, hal_cuda_gin* out, hal_cuda_gin_properties* got);
int hal_cuda_window_create(void* comm, uint64_t bytes, hal_cuda_window* out);
int hal_cuda_window_destroy(void* comm, hal_cuda_window* window);
/* This rank's memory of a window whose communicator was destroyed with `abort`. Nothing here uses it any more; what peers
 * still write to it reaches nobody. */
int hal_cuda_window_free(void* comm, int device, hal_cuda_window* window);

int hal_cuda_dispatch(const hal_cuda_ep* ep, const hal_cuda_dispatch_args* args, uint64_t stream);
int hal_cuda_combine(const hal_cuda_ep* ep, const hal_cuda_combine_args* args, uint64_t stream);
int hal_cuda_hosts_dispatch(const hal_cuda_ep* ep, const hal_cuda_hosts* hosts, const hal_cuda_dispatch_args* args,
                            uint64_t stream);
int hal_cuda_hosts_combine(const hal_cuda_ep* ep, const hal_cuda_hosts* hosts, const hal_cuda_combine_args* args,
                           uint64_t stream);
/* `out` gets numbers[id] for each of `count` ids (int32, or int64; `topk` a token) that is an expert's, 0 to experts - 1, and
 * the id itself for any other; but LOST_TWICE + id where a token names an expert again whose number is -1. `numbers` are
 * int32. All in device memory. */
enum { HAL_CUDA_LOST_TWICE = INT32_MIN };
int hal_cuda_renumber(int device, uint64_t ids, int ids_are_64, int64_t count, int topk, uint64_t numbers, int experts,
                      uint64_t out, uint64_t stream);
/* Row from[i] of `source` goes to row to[i] of `target`, for i below `rows`; int32 in device memory, 0 = row i itself,
 * negative = nowhere. `row_bytes` is a multiple of 4. */
int hal_cuda_move_rows(int device, uint64_t source, uint64_t target, uint64_t from, uint64_t to, int64_t rows,
                       uint64_t row_bytes, uint64_t stream);
int hal_cuda_state_bytes(void);
/* Bounded host wait for *word >> 32 == sequence; 0 and *value, 1 when time is up, 2 when `error` was claimed. */
int hal_cuda_await_rows(const uint64_t* word, uint32_t sequence, const hal_cuda_error* error, double seconds,
                        uint32_t* value);
/* The words one after the other, each complete before the next. `result` (pinned, device address) gets what the last
 * wait saw, or stays as it is. Uses device, state and error of `ep`. */
int hal_cuda_ops(const hal_cuda_ep* ep, const hal_cuda_op* ops, int count, uint64_t timeout_ns, uint64_t result,
                 uint64_t stream);

/* The same with what goes to other NVLink domains: relaxed puts and signals are then only posted. */
int hal_cuda_gin_ops(const hal_cuda_ep* ep, const hal_cuda_gin* gin, const hal_cuda_op* ops, int count,
                     uint64_t timeout_ns, uint64_t result, uint64_t stream);

/* Plays a litmus program. `gin` with comm 0: no GIN. Uses device, error, abort and timeout_ns of `ep`. */
int hal_cuda_play(const hal_cuda_ep* ep, const hal_cuda_gin* gin, const hal_cuda_litmus* run, uint64_t stream);

/* What GIN promises, tried out: every rank puts rows to every rank that it reaches in other domains and looks at what it
 * got as soon as it may. `bad` must stay 0 where the contract forbids a bad outcome, and may grow in the others. */
enum {
    HAL_CUDA_CHECK_STRONG_WORD = 0,                /* rows, then a strong signal on a word of a window */
    HAL_CUDA_CHECK_STRONG_SIGNAL,                  /* the same, an indexed signal */
    HAL_CUDA_CHECK_BUNDLED_STRONG,                 /* the last row's own strong signal */
    HAL_CUDA_CHECK_BUNDLED_WEAK,                   /* each row's own weak signal, and that row looked at */
    HAL_CUDA_CHECK_BARRIER,                        /* a complete barrier */
    HAL_CUDA_CHECK_QUIET_FLAG,                     /* quiet("remote"), then a flag by a relaxed put */
    HAL_CUDA_CHECK_FLUSHED,                        /* sources overwritten after flush; then a strong signal */
    HAL_CUDA_CHECK_MAY_FAIL,                       /* the rest may have bad outcomes: */
    HAL_CUDA_CHECK_FLAG = HAL_CUDA_CHECK_MAY_FAIL, /* a flag by a relaxed put */
    HAL_CUDA_CHECK_FLUSH_FLAG,                     /* flush, then a flag: flush is not quiet */
    HAL_CUDA_CHECK_WEAK_AFTER,                     /* a weak signal of its own (with gin-weak only) */
    HAL_CUDA_CHECK_WEAK_PRIOR,                     /* the last row's weak signal, and the others looked at */
    HAL_CUDA_CHECK_OTHER_QUEUE,                    /* a strong signal on another queue */
    HAL_CUDA_CHECK_BARE_BARRIER,                   /* a barrier that completes nothing */
    HAL_CUDA_CHECK_REUSED,                         /* sources overwritten at once; then a strong signal */
    HAL_CUDA_CHECKS
};
typedef struct hal_cuda_gin_check_args {
    int32_t kind, rounds, rows, queue, threads, unused;
    uint64_t window,
        base;           /* a window that was just made, hal_cuda_gin_check_bytes() long, and this rank's part of it */
    uint64_t row_bytes; /* a multiple of 8 */
    uint64_t before;    /* rounds of kind STRONG_SIGNAL that were run on this communicator */
    uint64_t bad, checked; /* results, 8-byte words in device memory: words of rows */
} hal_cuda_gin_check_args;
uint64_t hal_cuda_gin_check_bytes(const hal_cuda_gin* gin, const hal_cuda_gin_check_args* args);
int hal_cuda_gin_check(const hal_cuda_ep* ep, const hal_cuda_gin* gin, const hal_cuda_gin_check_args* args,
                       uint64_t timeout_ns, uint64_t stream);

/* Counters of arrays that view slots; they outlive everything, since an array may. */
int64_t* hal_cuda_leases(int count);
/* One array of a slot: `offset` bytes from the slot's start, of DLPack's type code and bits, [rows] or [rows, columns];
 * rows -1 = as many as were received; dims 0 = there is none. */
typedef struct hal_cuda_view {
    uint64_t offset;
    int64_t rows, columns;
    int32_t code, bits, dims, unused;
} hal_cuda_view;
/* What hal_cuda_tensors uses of the Python that calls it; so this library is linked to none, and any may load it. */
typedef struct hal_cuda_python {
    void* (*capsule)(void* pointer, const char* name, void* destructor); /* PyCapsule_New */
    void* (*call)(void* function, ...);                                  /* PyObject_CallFunctionObjArgs */
    void* (*tuple)(intptr_t size);                                       /* PyTuple_New */
    int (*set_item)(void* tuple, intptr_t at, void* item);               /* PyTuple_SetItem */
    void (*hold)(void* object);                                          /* Py_IncRef */
    void (*release)(void* object);                                       /* Py_DecRef */
    void* (*no_memory)(void);                                            /* PyErr_NoMemory */
    void* none;
    void* from_dlpack; /* makes a tensor of a capsule with a DLManagedTensor (DLPack) */
} hal_cuda_python;
/* A tuple of tensors (None where there is none) over the slot at `base`, where `rows` rows were received; NULL with a Python
 * exception set if they cannot be made. *lease goes up by one for each, and down when its memory is let go of. Python's lock
 * is held. */
void* hal_cuda_tensors(const hal_cuda_python* python, const hal_cuda_view* views, int count, uint64_t base,
                       int64_t rows, int device, int64_t* lease);

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
