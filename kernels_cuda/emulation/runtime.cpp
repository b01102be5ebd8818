// SPDX-License-Identifier: Apache-2.0
// Communicators and windows behind the C interface, as src/nccl_runtime.cu has them on GPUs.
#include <cuda_runtime.h>

#include <cstdio>
#include <cstring>
#include <exception>

#include "emulation/gin.hpp"
#include "emulation/hal_cuda_emulator.h"
#include "emulation/options.hpp"
#include "emulation/world.hpp"
#include "hal_cuda.h"

namespace hal::cuda {
int fail(const std::string& text);
}

using hal::cuda::fail;
using namespace hal::cuda::emulation;

namespace {

constexpr const char* kNoNccl =
    "the emulated library has no NCCL below it: communicators are made by hal_cuda_emulator_create";

Communicator& of(void* comm) { return *static_cast<Communicator*>(comm); }

}  // namespace

extern "C" {

int hal_cuda_compiled_nccl(void) { return 0; }
int hal_cuda_load_nccl(const char*, int*) { return fail(kNoNccl); }
int hal_cuda_unique_id(void*) { return fail(kNoNccl); }
int hal_cuda_comm_create(const void*, int, int, int, void**) { return fail(kNoNccl); }
int hal_cuda_comm_adopt(void*, int, void**) { return fail(kNoNccl); }

int hal_cuda_emulator_create(const int* links, int world, int rank, int nodes, int device, double seconds,
                             void** comm) {
    if (world < 1 || rank < 0 || rank >= world || nodes < 1 || world % nodes != 0)
        return fail("rank " + std::to_string(rank) + " of " + std::to_string(world) + " on " + std::to_string(nodes) +
                    " nodes: nodes hold equally many consecutive ranks");
    if (options().multiprocessors < 1 || options().multiprocessors > 132)
        return fail("HAL_CUDA_EMULATOR_BLOCKS is " + std::to_string(options().multiprocessors) + ": give 1 to 132");
    if (!(options().limit_seconds > 0)) return fail("HAL_CUDA_EMULATOR_LIMIT must be above 0 seconds");
    auto* made = new Communicator;
    made->world = world, made->rank = rank, made->nodes = nodes, made->device = device, made->seconds = seconds;
    made->links.assign(links, links + world);
    *comm = made;
    return 0;
}

int hal_cuda_emulator_mutate(int defect) {
    if (defect < 0 || defect >= static_cast<int>(Mutation::count))
        return fail("no such defect: " + std::to_string(defect));
    mutation.store(static_cast<Mutation>(defect));
    return 0;
}

int hal_cuda_emulator_configure(std::uint64_t seed, int adversary) {
    options().seed = seed, options().adversary = adversary != 0;
    return 0;
}

int hal_cuda_emulator_count_loads(std::uint64_t begin, std::uint64_t bytes, std::uint64_t* loads) {
    *loads = counted_loads.restart(begin, bytes);
    return 0;
}
int hal_cuda_emulator_count_stores(std::uint64_t begin, std::uint64_t bytes, std::uint64_t* stores) {
    *stores = counted_stores.restart(begin, bytes);
    return 0;
}
int hal_cuda_emulator_limit(double seconds) {
    options().limit_seconds = seconds;
    return 0;
}

int hal_cuda_comm_properties(void* comm, hal_cuda_properties* out) {
    const Communicator& c = of(comm);
    *out = {};
    out->world = c.world, out->rank = c.rank, out->device = c.device;
    out->lsa_size = c.lsa_size(), out->lsa_rank = c.lsa_rank();
    out->gin_type = options().gin == "full" ? kEmulatedGin : 0;
    out->rail_type = options().gin == "none" ? 0 : kEmulatedGin;
    out->sms = options().multiprocessors;
    std::snprintf(out->gpu, sizeof out->gpu, "emulated on CPUs");
    return 0;
}

// After a failure (`abort`) kernels may still run into their limit, so the windows stay.
int hal_cuda_comm_destroy(void* comm, int abort) {
    if (abort) {
        if (of(comm).gin) of(comm).gin->nic().stop(0.5);  // peers are told of the failure over the network, too
        return 0;
    }
    of(comm).leave_windows();
    delete &of(comm);
    return 0;
}

int hal_cuda_window_create(void* comm, std::uint64_t bytes, hal_cuda_window* out) {
    *out = {};
    try {
        Communicator& c = of(comm);
        const std::shared_ptr<Window> window = c.create(bytes);
        out->ptr = reinterpret_cast<std::uint64_t>(window->of_rank(c.rank)), out->bytes = bytes;
        out->peers = reinterpret_cast<std::uint64_t>(window->peers()), out->peer_stride = window->stride();
        out->handle = reinterpret_cast<std::uint64_t>(window.get());
        return 0;
    } catch (const std::exception& error) {
        return fail(error.what());
    }
}

int hal_cuda_window_destroy(void* comm, hal_cuda_window* window) {
    of(comm).destroy(reinterpret_cast<Window*>(window->handle));
    return 0;
}

int hal_cuda_window_free(void* comm, int, hal_cuda_window* window) {
    return hal_cuda_window_destroy(comm, window);  // an aborted communicator stays
}

}  // extern "C"
