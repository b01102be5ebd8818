/* SPDX-License-Identifier: Apache-2.0
 *
 * What the emulated library has besides hal_cuda.h. Its communicators are made here, since there is no NCCL below it.
 */
#ifndef HAL_CUDA_EMULATOR_H
#define HAL_CUDA_EMULATOR_H
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* links[p]: a connected Unix stream socket to rank p of this machine (links[rank] is not looked at), the caller's, which
 * stays open as long as the communicator; windows are made by passing descriptors over them. `nodes` equal groups of
 * consecutive ranks are the LSA teams. `seconds` bounds every exchange. */
int hal_cuda_emulator_create(const int* links, int world, int rank, int nodes, int device, double seconds, void** comm);

/* Plants a defect below the kernels, for tests: a member of emulation::Mutation (order.hpp); 0 takes it away. */
int hal_cuda_emulator_mutate(int defect);
/* The same of emulation::NetworkMutation. */
int hal_cuda_emulator_mutate_network(int defect);
/* The seed of the launches from now on, and whether stores are kept back. */
int hal_cuda_emulator_configure(uint64_t seed, int adversary);
/* Seconds after which a block that only looks at memory ends its launch. */
int hal_cuda_emulator_limit(double seconds);
/* Counts the kernels' loads of [begin, begin + bytes) from now on; of what was watched before, *loads gets the number. */
int hal_cuda_emulator_count_loads(uint64_t begin, uint64_t bytes, uint64_t* loads);
/* The same of stores, of at most 16 bytes each. */
int hal_cuda_emulator_count_stores(uint64_t begin, uint64_t bytes, uint64_t* stores);

/* CUDA graphs: a stream is captured from `begin_capture` to `end_capture`, by one thread; the graph is launched any number
 * of times. `mode`: a cudaStreamCaptureMode. An invalidated capture ends too, and gives no graph. */
int hal_cuda_emulator_begin_capture(uint64_t stream, int mode);
int hal_cuda_emulator_end_capture(uint64_t stream, uint64_t* graph);
int hal_cuda_emulator_launch_graph(uint64_t graph, uint64_t stream);
int hal_cuda_emulator_destroy_graph(uint64_t graph);

#ifdef __cplusplus
}
#endif
#endif
