// SPDX-License-Identifier: Apache-2.0
// Communicators and symmetric windows from NCCL, which is opened at run time: the library must be the very version that
// the device structures here were compiled for, and a process may hold another one besides (torch brings its own).
#include <dlfcn.h>
#include <nccl.h>
#include <nccl_device.h>

#include <cstdio>
#include <cstring>
#include <memory>

#include "gin.cuh"
#include "launch.cuh"

namespace hal::cuda {
namespace {

// clang-format off
#define HAL_NCCL_FUNCTIONS(_) \
    _(ncclGetVersion) _(ncclGetErrorString) _(ncclGetLastError) _(ncclGetUniqueId) _(ncclCommInitRankConfig) \
    _(ncclCommDestroy) _(ncclCommAbort) _(ncclMemAlloc) _(ncclMemFree) _(ncclCommWindowRegister) \
    _(ncclCommWindowDeregister) _(ncclGetLsaDevicePointer) _(ncclCommQueryProperties) _(ncclDevCommCreate) \
    _(ncclDevCommDestroy)
// clang-format on

struct Nccl {
    void* library = nullptr;
#define HAL_DECLARE(name) decltype(&::name) name = nullptr;
    HAL_NCCL_FUNCTIONS(HAL_DECLARE)
#undef HAL_DECLARE
} api;

struct Comm {
    ncclComm_t comm = nullptr;
    ncclDevComm device_comm{};
    int device = 0;
    bool owned = true, has_device_comm = false;
    // GIN has a device communicator of its own, copied to the device, with HAL's words and counters.
    ncclDevComm gin_comm{};
    bool has_gin = false;
    hal_cuda_gin gin{};
    hal_cuda_window words{};
};

std::string version_text(int code) {
    return std::to_string(code / 10000) + "." + std::to_string(code / 100 % 100) + "." + std::to_string(code % 100);
}

int check(ncclResult_t status, const char* what, ncclComm_t comm = nullptr) {
    if (status == ncclSuccess) return 0;
    std::string text = std::string(what) + ": NCCL says " + api.ncclGetErrorString(status);
    if (const char* more = api.ncclGetLastError(comm)) text += std::string("; ") + more;
    return fail(text);
}

// The device's own view of the team and of a window, against the host's: shows that the structures agree.
__global__ void __launch_bounds__(1) look(ncclDevComm comm, ncclWindow_t window, std::uint64_t* out) {
    const ncclTeam lsa = ncclTeamLsa(comm);
    out[0] = lsa.rank, out[1] = lsa.nRanks;
    out[2] = reinterpret_cast<std::uint64_t>(ncclGetLsaPointer(window, 0, 0));
    out[3] = reinterpret_cast<std::uint64_t>(ncclGetLsaPointer(window, 0, lsa.nRanks - 1));
}

int create_device_comm(Comm& c) {
    ncclDevCommRequirements needs = NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER;
    needs.ginContextCount = 0;
    needs.ginStrongSignalsRequired = false, needs.ginVaSignalsRequired = false;
    if (check(api.ncclDevCommCreate(c.comm, &needs, &c.device_comm), "ncclDevCommCreate", c.comm) != 0) return -1;
    c.has_device_comm = true;
    return 0;
}

// Entries of a queue that a GPU rings itself: gin::kRoom posts, each with a put and a signal, and what quiet adds.
constexpr int kQueueDepth = 512;

// NCCL refuses strong signals where the network has none; that is asked, not known beforehand.
int create_gin_comm(Comm& c, const hal_cuda_gin_needs& want, ncclGinConnectionType_t connection, bool strong) {
    ncclDevCommRequirements needs = NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER;
    needs.ginContextCount = want.queues, needs.ginSignalCount = want.signals;
    needs.ginConnectionType = connection, needs.ginExclusiveContexts = true;
    needs.ginQueueDepth = kQueueDepth;
    needs.ginStrongSignalsRequired = strong, needs.ginVaSignalsRequired = true;
    if (want.traffic_class != INT32_MIN) needs.ginTrafficClass = want.traffic_class;
    const ncclResult_t status = api.ncclDevCommCreate(c.comm, &needs, &c.gin_comm);
    if (status == ncclInvalidUsage && strong) return create_gin_comm(c, want, connection, false);
    if (check(status, "ncclDevCommCreate with GIN", c.comm) != 0) return -1;
    c.has_gin = true;
    c.gin.strong = strong;
    return 0;
}

// Kernels read NCCL's structure from device memory. Its abort flag becomes the first word of HAL's counters: NCCL leaves
// it empty for communicators made from outside, and it is the only thing that ends NCCL's wait for its own requests.
int place_gin(Comm& c, int queues) {
    const std::uint64_t state_bytes = gin::Counts::bytes(queues, c.gin.world);
    const std::uint64_t aligned = (state_bytes + 255) / 256 * 256;
    void* memory = nullptr;
    if (hal::cuda::check(cudaMalloc(&memory, aligned + sizeof c.gin_comm), "cudaMalloc") != 0) return -1;
    c.gin.state = reinterpret_cast<std::uint64_t>(memory), c.gin.comm = c.gin.state + aligned;
    ncclDevComm copy = c.gin_comm;
    copy.abortFlag = reinterpret_cast<std::uint32_t*>(memory);
    if (hal::cuda::check(cudaMemset(memory, 0, aligned), "cudaMemset") != 0) return -1;
    return hal::cuda::check(cudaMemcpy(reinterpret_cast<void*>(c.gin.comm), &copy, sizeof copy, cudaMemcpyHostToDevice),
                            "cudaMemcpy");
}

int query(const Comm& c, ncclCommProperties& p) {
    p = {};
    p.size = sizeof p, p.magic = NCCL_API_MAGIC, p.version = NCCL_VERSION_CODE;
    return check(api.ncclCommQueryProperties(c.comm, &p), "ncclCommQueryProperties", c.comm);
}

int finish(std::unique_ptr<Comm> c, void** out) {
    const OnDevice here(c->device);
    ncclCommProperties p;
    if (query(*c, p) != 0) return -1;
    if (!p.deviceApiSupport)
        return fail(
            "NCCL gives no symmetric memory here (deviceApiSupport is false): it needs peer access between all GPUs "
            "of a node and cuMem (NCCL_CUMEM_ENABLE and NCCL_WIN_ENABLE not 0)");
    if (create_device_comm(*c) != 0) return -1;
    *out = c.release();
    return 0;
}

int check_view(Comm& c, const hal_cuda_window& window) {
    std::uint64_t *seen = nullptr, host[4] = {};
    if (hal::cuda::check(cudaMalloc(&seen, sizeof host), "cudaMalloc") != 0) return -1;
    look<<<1, 1>>>(c.device_comm, reinterpret_cast<ncclWindow_t>(window.handle), seen);
    const cudaError_t status = cudaMemcpy(host, seen, sizeof host, cudaMemcpyDeviceToHost);
    cudaFree(seen);
    if (hal::cuda::check(status, "reading a window on the device") != 0) return -1;
    const std::uint64_t last = window.peers + (host[1] - 1) * window.peer_stride;
    if (host[2] != window.peers || host[3] != last)
        return fail(
            "the device sees other window addresses than the host: NCCL's device structures do not match the library");
    return 0;
}

}  // namespace
}  // namespace hal::cuda

using namespace hal::cuda;

extern "C" {

int hal_cuda_compiled_nccl(void) { return NCCL_VERSION_CODE; }

int hal_cuda_load_nccl(const char* path, int* version) {
    if (api.library != nullptr) return api.ncclGetVersion(version) == ncclSuccess ? 0 : fail("ncclGetVersion failed");
    // Its own symbols first: another NCCL in the process must not take the calls that this one makes to itself.
    void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL | RTLD_DEEPBIND);
    if (library == nullptr) return fail(std::string("cannot open NCCL: ") + dlerror());
    Nccl found;
    found.library = library;
    found.ncclGetVersion = reinterpret_cast<decltype(found.ncclGetVersion)>(dlsym(library, "ncclGetVersion"));
    if (found.ncclGetVersion == nullptr || found.ncclGetVersion(version) != ncclSuccess) {
        dlclose(library);
        return fail(std::string(path) + " is no NCCL");
    }
    if (*version != NCCL_VERSION_CODE) {
        dlclose(library);
        return fail(std::string(path) + " is NCCL " + version_text(*version) + ", and this library was compiled for " +
                    version_text(NCCL_VERSION_CODE) +
                    ", whose device structures differ; install that version, or let hal compile "
                    "for this one (`hal_cuda.build`)");
    }
#define HAL_FIND(name)                                                          \
    found.name = reinterpret_cast<decltype(found.name)>(dlsym(library, #name)); \
    if (found.name == nullptr) return fail(std::string(path) + " lacks " #name);
    HAL_NCCL_FUNCTIONS(HAL_FIND)
#undef HAL_FIND
    api = found;
    return 0;
}

int hal_cuda_unique_id(void* id128) {
    return check(api.ncclGetUniqueId(static_cast<ncclUniqueId*>(id128)), "ncclGetUniqueId");
}

int hal_cuda_comm_create(const void* id128, int world, int rank, int device, void** comm) {
    const OnDevice here(device);
    auto c = std::make_unique<Comm>();
    c->device = device;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    ncclUniqueId id;
    std::memcpy(&id, id128, sizeof id);
    if (check(api.ncclCommInitRankConfig(&c->comm, world, id, rank, &config), "ncclCommInitRank") != 0) return -1;
    return finish(std::move(c), comm);
}

int hal_cuda_comm_adopt(void* nccl_comm, int device, void** comm) {
    auto c = std::make_unique<Comm>();
    c->comm = static_cast<ncclComm_t>(nccl_comm);
    c->device = device, c->owned = false;
    return finish(std::move(c), comm);
}

int hal_cuda_comm_properties(void* comm, hal_cuda_properties* out) {
    const Comm& c = *static_cast<Comm*>(comm);
    ncclCommProperties p;
    if (query(c, p) != 0) return -1;
    *out = {};
    out->world = p.nRanks, out->rank = p.rank, out->gin_type = p.ginType, out->device = c.device;
    out->rail_type = p.railedGinType;
    out->lsa_size = c.device_comm.lsaSize, out->lsa_rank = c.device_comm.lsaRank;
    if (check(api.ncclGetVersion(&out->nccl_version), "ncclGetVersion") != 0) return -1;
    cudaDeviceProp device{};
    if (hal::cuda::check(cudaGetDeviceProperties(&device, c.device), "cudaGetDeviceProperties") != 0) return -1;
    out->sms = device.multiProcessorCount;
    std::snprintf(out->gpu, sizeof out->gpu, "%.63s", device.name);
    return 0;
}

int hal_cuda_comm_destroy(void* comm, int abort) {
    std::unique_ptr<Comm> c(static_cast<Comm*>(comm));
    const OnDevice here(c->device);
    int status = 0;
    if (c->words.handle != 0 && !abort) status |= hal_cuda_window_destroy(comm, &c->words);
    if (c->gin.state != 0) cudaFree(reinterpret_cast<void*>(c->gin.state));
    if (c->has_gin && !abort)
        status |= check(api.ncclDevCommDestroy(c->comm, &c->gin_comm), "ncclDevCommDestroy", c->comm);
    if (c->has_device_comm && !abort)
        status |= check(api.ncclDevCommDestroy(c->comm, &c->device_comm), "ncclDevCommDestroy", c->comm);
    if (!c->owned) return status;
    return status | (abort ? check(api.ncclCommAbort(c->comm), "ncclCommAbort")
                           : check(api.ncclCommDestroy(c->comm), "ncclCommDestroy"));
}

int hal_cuda_gin_create(void* comm, const hal_cuda_gin_needs* needs, hal_cuda_gin* out, hal_cuda_gin_properties* got) {
    Comm& c = *static_cast<Comm*>(comm);
    const OnDevice here(c.device);
    ncclCommProperties p;
    if (query(c, p) != 0) return -1;
    const bool full = p.ginType != NCCL_GIN_TYPE_NONE;
    if (!full && p.railedGinType == NCCL_GIN_TYPE_NONE)
        return fail(
            "NCCL has no GIN here (type NONE), so nothing leaves the NVLink domain: it needs an RDMA network card on "
            "every "
            "rank (or the software NIC, docs/software_nic.md), and NCCL_GIN_ENABLE not 0; NCCL_DEBUG=INFO says what it "
            "found");
    if (p.nRanks % c.device_comm.lsaSize != 0)
        return fail(std::to_string(p.nRanks) + " ranks do not divide into NVLink domains of " +
                    std::to_string(c.device_comm.lsaSize) + "; give every host as many ranks");
    c.gin = {};
    c.gin.world = p.nRanks, c.gin.rank = p.rank;
    c.gin.lsa_size = c.device_comm.lsaSize, c.gin.lsa_rank = c.device_comm.lsaRank;
    c.gin.queues = needs->queues, c.gin.signals = needs->signals, c.gin.slots = needs->slots, c.gin.rail = !full;
    if (create_gin_comm(c, *needs, full ? NCCL_GIN_CONNECTION_FULL : NCCL_GIN_CONNECTION_RAIL, needs->strong != 0) != 0)
        return -1;
    if (c.gin_comm.ginContextCount < static_cast<unsigned>(needs->queues))
        return fail("NCCL gives " + std::to_string(c.gin_comm.ginContextCount) + " GIN contexts of the " +
                    std::to_string(needs->queues) + " asked for; lower `queues`");
    if (place_gin(c, needs->queues) != 0) return -1;
    if (hal_cuda_window_create(comm, gin::Words::bytes(needs->slots, needs->queues, p.nRanks), &c.words) != 0)
        return -1;
    c.gin.window = c.words.handle, c.gin.words = c.words.ptr;
    c.gin.peers = c.words.peers, c.gin.peer_stride = c.words.peer_stride;
    *out = c.gin;
    *got = {};
    got->type = full ? p.ginType : p.railedGinType;
    got->connection = full ? HAL_CUDA_GIN_FULL : HAL_CUDA_GIN_RAIL;
    got->contexts = static_cast<int>(c.gin_comm.ginContextCount), got->connections = c.gin_comm.ginConnectionCount;
    got->signals = needs->signals, got->strong = c.gin.strong, got->va_signals = 1;
    got->traffic_class = needs->traffic_class;
    got->lsa_size = c.gin.lsa_size, got->rail_size = c.gin.world / c.gin.lsa_size;
    return 0;
}

int hal_cuda_window_create(void* comm, uint64_t bytes, hal_cuda_window* out) {
    Comm& c = *static_cast<Comm*>(comm);
    const OnDevice here(c.device);
    *out = {};
    void* memory = nullptr;
    if (check(api.ncclMemAlloc(&memory, bytes), "ncclMemAlloc", c.comm) != 0) return -1;
    if (hal::cuda::check(cudaMemset(memory, 0, bytes), "cudaMemset") != 0) return -1;
    if (hal::cuda::check(cudaDeviceSynchronize(), "cudaMemset") != 0) return -1;
    ncclWindow_t window = nullptr;
    // Strict ordering, where a network is in play: a signal on a word of the window must not pass data before it.
    const int flags = NCCL_WIN_COLL_SYMMETRIC | (c.has_gin ? NCCL_WIN_STRICT_ORDERING : 0);
    if (check(api.ncclCommWindowRegister(c.comm, memory, bytes, &window, flags), "ncclCommWindowRegister", c.comm) != 0)
        return -1;
    if (window == nullptr) {
        api.ncclMemFree(memory);
        return fail(
            "NCCL registered the memory but gave no window: symmetric memory is not available here (see "
            "NCCL_DEBUG=INFO; "
            "NCCL_WIN_ENABLE and NCCL_CUMEM_ENABLE must not be 0)");
    }
    void *first = nullptr, *second = nullptr;
    if (check(api.ncclGetLsaDevicePointer(window, 0, 0, &first), "ncclGetLsaDevicePointer", c.comm) != 0) return -1;
    if (c.device_comm.lsaSize > 1 &&
        check(api.ncclGetLsaDevicePointer(window, 0, 1, &second), "ncclGetLsaDevicePointer", c.comm) != 0)
        return -1;
    out->ptr = reinterpret_cast<uint64_t>(memory), out->bytes = bytes, out->handle = reinterpret_cast<uint64_t>(window);
    out->peers = reinterpret_cast<uint64_t>(first);
    out->peer_stride = second != nullptr ? reinterpret_cast<uint64_t>(second) - out->peers : 0;
    return check_view(c, *out);
}

int hal_cuda_window_destroy(void* comm, hal_cuda_window* window) {
    Comm& c = *static_cast<Comm*>(comm);
    const OnDevice here(c.device);
    const int status = check(api.ncclCommWindowDeregister(c.comm, reinterpret_cast<ncclWindow_t>(window->handle)),
                             "ncclCommWindowDeregister", c.comm);
    return status | check(api.ncclMemFree(reinterpret_cast<void*>(window->ptr)), "ncclMemFree", c.comm);
}

int hal_cuda_window_free(void*, int device, hal_cuda_window* window) {
    const OnDevice here(device);
    return check(api.ncclMemFree(reinterpret_cast<void*>(window->ptr)), "ncclMemFree");
}

}  // extern "C"
