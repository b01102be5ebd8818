// SPDX-License-Identifier: Apache-2.0
// One rank of an all-to-all over GIN: relaxed puts in pieces, one strong signal for each peer, every word checked inside
// the kernel right after the wait. A second strong signal says "consumed", and nobody writes before it has come: quiet
// would not do. All waits are bounded. Prints one line of JSON. kernels_cuda/software_nic/check_on_gpus.py runs it.
//
//   gin_alltoall RANK WORLD ID_FILE ROUNDS PIECES BYTES_PER_PEER
#include <cuda_runtime.h>
#include <nccl.h>
#include <nccl_device.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

namespace {

constexpr int threads = 256;

#define CHECK_CUDA(call)                                                    \
    do {                                                                    \
        cudaError_t status = (call);                                        \
        if (status != cudaSuccess) fail(#call, cudaGetErrorString(status)); \
    } while (0)
#define CHECK_NCCL(call)                                                    \
    do {                                                                    \
        ncclResult_t status = (call);                                       \
        if (status != ncclSuccess) fail(#call, ncclGetErrorString(status)); \
    } while (0)

[[noreturn]] void fail(const char* what, const char* why) {
    std::fprintf(stderr, "%s: %s\n", what, why);
    std::exit(1);
}

struct Report {
    unsigned long long bad, checked;
    unsigned late_from;  // 1 + rank that was waited for in vain
    unsigned late_round;
};

// Different for each (round, source, target, word); never the value of another round.
__device__ std::uint32_t pattern(unsigned round, unsigned src, unsigned dst, std::size_t word) {
    std::uint32_t x = round * 0x9e3779b9u ^ src * 0x85ebca6bu ^ dst * 0xc2b2ae35u ^ static_cast<std::uint32_t>(word);
    x = (x ^ (x >> 16)) * 0x7feb352du;
    return (x ^ (x >> 15)) | 1u;
}

__global__ void fill(std::uint32_t* send, unsigned round, unsigned rank, unsigned world, std::size_t words) {
    for (std::size_t i = blockIdx.x * std::size_t{blockDim.x} + threadIdx.x; i < words * world;
         i += gridDim.x * std::size_t{blockDim.x})
        send[i] = pattern(round, rank, static_cast<unsigned>(i / words), i % words);
}

__device__ bool await(ncclGin const& gin, ncclGinSignal_t signal, std::uint64_t least) {
    const long long limit = 20ll * 1000 * 1000 * 1000;  // cycles: about ten seconds
    const long long begin = clock64();
    while (gin.readSignal(signal) < least)
        if (clock64() - begin > limit) return false;
    return true;
}

// Signals 0 … world-1: data of that source has come; world … 2*world-1: that target has consumed ours.
__global__ void exchange(ncclDevComm comm, ncclWindow_t send, ncclWindow_t receive, std::uint32_t const* received,
                         unsigned round, unsigned pieces, std::size_t bytes, Report* report) {
    ncclGin gin{comm, 0};
    ncclTeam world = ncclTeamWorld(comm);
    const unsigned rank = world.rank, nranks = world.nRanks;
    __shared__ bool stopped;
    if (threadIdx.x == 0) {
        stopped = report->late_from != 0;
        for (unsigned step = 0; step < nranks && !stopped; ++step) {
            unsigned peer = (rank + step) % nranks;  // each rank starts elsewhere
            if (!await(gin, nranks + peer, round)) {
                report->late_from = 1 + peer, report->late_round = round;
                stopped = true;
                break;
            }
            for (unsigned piece = 0; piece < pieces; ++piece) {
                std::size_t begin = bytes * piece / pieces / 4 * 4, end = bytes * (piece + 1) / pieces / 4 * 4;
                gin.put(world, peer, receive, rank * bytes + begin, send, peer * bytes + begin, end - begin);
            }
            gin.signal(world, peer, ncclGin_StrongSignalInc{rank});
        }
    }
    __syncthreads();
    for (unsigned step = 0; step < nranks && !stopped; ++step) {
        unsigned src = (rank + nranks - step) % nranks;
        if (threadIdx.x == 0 && !await(gin, src, round + 1)) {
            report->late_from = 1 + src, report->late_round = round;
            stopped = true;
        }
        __syncthreads();
        if (stopped) break;
        unsigned long long bad = 0;
        for (std::size_t i = threadIdx.x; i < bytes / 4; i += blockDim.x) {
            std::uint32_t seen = reinterpret_cast<const volatile std::uint32_t*>(received)[src * bytes / 4 + i];
            bad += seen != pattern(round, src, rank, i);
        }
        if (bad) atomicAdd(&report->bad, bad);
        __syncthreads();
        if (threadIdx.x == 0) {
            report->checked += bytes / 4;
            gin.signal(world, src, ncclGin_StrongSignalInc{nranks + rank});
        }
    }
    if (threadIdx.x == 0) gin.flush(ncclCoopThread{});
}

ncclUniqueId meet(int rank, const std::string& path) {
    ncclUniqueId id;
    if (rank == 0) {
        CHECK_NCCL(ncclGetUniqueId(&id));
        std::string making = path + ".new";
        std::FILE* file = std::fopen(making.c_str(), "wb");
        if (!file || std::fwrite(&id, sizeof id, 1, file) != 1 || std::fclose(file) != 0)
            fail("writing the id", path.c_str());
        std::rename(making.c_str(), path.c_str());
        return id;
    }
    for (int tries = 0; tries < 3000; ++tries, usleep(10000)) {
        std::FILE* file = std::fopen(path.c_str(), "rb");
        if (!file) continue;
        bool whole = std::fread(&id, sizeof id, 1, file) == 1;
        std::fclose(file);
        if (whole) return id;
    }
    fail("waiting for rank 0's id", path.c_str());
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 7) fail("usage", "gin_alltoall RANK WORLD ID_FILE ROUNDS PIECES BYTES_PER_PEER");
    const int rank = std::atoi(argv[1]), world = std::atoi(argv[2]), rounds = std::atoi(argv[4]);
    const unsigned pieces = static_cast<unsigned>(std::atoi(argv[5]));
    const std::size_t bytes = std::strtoull(argv[6], nullptr, 10) / 4 * 4;
    int devices = 0;
    CHECK_CUDA(cudaGetDeviceCount(&devices));
    CHECK_CUDA(cudaSetDevice(rank % devices));

    ncclComm_t comm;
    CHECK_NCCL(ncclCommInitRank(&comm, world, meet(rank, argv[3]), rank));
    void *send = nullptr, *receive = nullptr;
    ncclWindow_t send_window = nullptr, receive_window = nullptr;
    CHECK_NCCL(ncclMemAlloc(&send, bytes * world));
    CHECK_NCCL(ncclMemAlloc(&receive, bytes * world));
    CHECK_NCCL(ncclCommWindowRegister(comm, send, bytes * world, &send_window, NCCL_WIN_COLL_SYMMETRIC));
    CHECK_NCCL(ncclCommWindowRegister(comm, receive, bytes * world, &receive_window, NCCL_WIN_COLL_SYMMETRIC));
    if (!send_window || !receive_window)
        fail("ncclCommWindowRegister", "no symmetric memory here: look at NCCL_DEBUG=INFO");

    ncclDevCommRequirements requirements = NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER;
    requirements.ginConnectionType = NCCL_GIN_CONNECTION_FULL;
    requirements.ginContextCount = 1;
    requirements.ginSignalCount = 2 * world;
    ncclDevComm device_comm;
    CHECK_NCCL(ncclDevCommCreate(comm, &requirements, &device_comm));

    // Everything is allocated and loaded before the first exchange: allocating may wait for a kernel that waits for us.
    Report* report;
    CHECK_CUDA(cudaMalloc(&report, sizeof *report));
    CHECK_CUDA(cudaMemset(report, 0, sizeof *report));
    CHECK_CUDA(cudaMemset(receive, 0, bytes * world));
    cudaStream_t stream;
    cudaEvent_t begin, end;
    CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CHECK_CUDA(cudaEventCreate(&begin));
    CHECK_CUDA(cudaEventCreate(&end));
    CHECK_CUDA(cudaDeviceSynchronize());

    CHECK_CUDA(cudaEventRecord(begin, stream));
    for (int round = 0; round < rounds; ++round) {
        fill<<<32, threads, 0, stream>>>(static_cast<std::uint32_t*>(send), round, rank, world, bytes / 4);
        exchange<<<1, threads, 0, stream>>>(device_comm, send_window, receive_window,
                                            static_cast<std::uint32_t*>(receive), round, pieces, bytes, report);
        CHECK_CUDA(cudaGetLastError());
    }
    CHECK_CUDA(cudaEventRecord(end, stream));
    Report seen;
    CHECK_CUDA(cudaMemcpyAsync(&seen, report, sizeof seen, cudaMemcpyDefault, stream));
    CHECK_CUDA(cudaStreamSynchronize(stream));
    float milliseconds = 0;
    CHECK_CUDA(cudaEventElapsedTime(&milliseconds, begin, end));
    std::printf(
        "{\"rank\": %d, \"bad\": %llu, \"checked\": %llu, \"late_from\": %d, \"late_round\": %u, \"us_per_round\": "
        "%.1f}\n",
        rank, seen.bad, seen.checked, static_cast<int>(seen.late_from) - 1, seen.late_round,
        1e3 * milliseconds / rounds);
    std::fflush(stdout);
    const bool good = seen.late_from == 0;
    if (!good) std::_Exit(3);  // a peer is gone or stuck: closing in order would wait for it

    CHECK_NCCL(ncclDevCommDestroy(comm, &device_comm));
    CHECK_NCCL(ncclCommWindowDeregister(comm, send_window));
    CHECK_NCCL(ncclCommWindowDeregister(comm, receive_window));
    CHECK_NCCL(ncclMemFree(send));
    CHECK_NCCL(ncclMemFree(receive));
    CHECK_CUDA(cudaFree(report));
    CHECK_NCCL(ncclCommDestroy(comm));
    return 0;
}
