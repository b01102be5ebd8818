// SPDX-License-Identifier: Apache-2.0
// The requests of gin.cuh as NCCL's device API has them (2.30.7). The emulated NIC has a twin of this file.
#pragma once
#include <nccl.h>
#include <nccl_device.h>

#include "device.cuh"

namespace hal::cuda::gin {

// One queue = one GIN context. Ranks are world ranks; with rail connections NCCL reaches those of the same rail only.
// NCCL's requests are long (three kinds of network, three ways of sharing), so each stands once, out of line.
class Requests {
  public:
    __device__ Requests(const hal_cuda_gin& gin, int queue, Sharing sharing)
        : comm_(*reinterpret_cast<const ncclDevComm*>(gin.comm)), queue_(queue), sharing_(mode(sharing)) {}

    __device__ __noinline__ void put(int peer, Place to, Place from, std::uint64_t bytes, bool more) const {
        put_with(ncclGin_None{}, peer, to, from, bytes, more);
    }
    template <class Target>
    __device__ __noinline__ void put(int peer, Place to, Place from, std::uint64_t bytes, Target target,
                                     std::uint64_t add, bool strong, bool more) const {
        if (strong)
            put_with(strong_add(target, add), peer, to, from, bytes, more);
        else
            put_with(weak_add(target, add), peer, to, from, bytes, more);
    }
    template <class T>
    __device__ __noinline__ void put_value(int peer, Place to, T value, bool more) const {
        put_value_with(ncclGin_None{}, peer, to, value, more);
    }
    template <class T, class Target>
    __device__ __noinline__ void put_value(int peer, Place to, T value, Target target, std::uint64_t add,
                                           bool more) const {
        put_value_with(weak_add(target, add), peer, to, value, more);
    }
    template <class Target>
    __device__ __noinline__ void signal(int peer, Target target, std::uint64_t add, bool strong) const {
        if (strong)
            net().signal(world(), peer, strong_add(target, add));
        else
            net().signal(world(), peer, weak_add(target, add));
    }
    __device__ __noinline__ void get(int peer, Place from, Place to, std::uint64_t bytes) const {
        net().get(world(), peer, window(from), from.offset, window(to), to.offset, bytes);
    }
    __device__ std::uint64_t read(Signal signal) const {
        return net().readSignal(static_cast<ncclGinSignal_t>(signal.index));
    }

    // Warp-wide. NCCL's own wait ends only with its requests or with the communicator's abort flag, which HAL points at
    // `stop` (nccl_runtime.cu): 31 lanes wait, and the last one watches the clock and raises the flag. `watch` is given
    // two questions: whether all have finished, and for which rank the first unfinished lane waits.
    template <class Watch>
    __device__ bool flush(std::uint32_t* stop, Watch watch) const {
        constexpr int kFinished = -1;
        __shared__ int waits_for[32][32];
        volatile int* lanes = waits_for[threadIdx.x >> 5];
        const int lane = static_cast<int>(threadIdx.x & 31);
        const ncclTeam all = comm_.ginContextsRailed ? ncclTeamRail(comm_) : world();
        lanes[lane] = lane < min(31, all.nRanks) ? ncclTeamRankToWorld(comm_, all, lane) : kFinished;
        __syncwarp();
        bool ok = true;
        if (lane < 31) {
            for (int peer = lane; peer < all.nRanks; peer += 31) {
                lanes[lane] = ncclTeamRankToWorld(comm_, all, peer);
                wait_for_sources(all, peer);
            }
            __threadfence_block();
            lanes[lane] = kFinished;
        } else {
            auto unfinished = [&] {
                for (int i = 0; i < 31; ++i)
                    if (const int rank = lanes[i]; rank != kFinished) return rank;
                return kFinished;
            };
            ok = watch([&] { return unfinished() == kFinished; }, unfinished);
            if (!ok) atomicExch_system(stop, 1u);
            ok = ok && atomicAdd_system(stop, 0u) == 0;  // raised before: NCCL waited for nothing
        }
        __syncwarp();
        return __all_sync(0xffffffffu, ok) != 0;
    }

  private:
    __device__ static ncclGinResourceSharingMode mode(Sharing sharing) {
        return sharing == Sharing::device  ? NCCL_GIN_RESOURCE_SHARING_GPU
               : sharing == Sharing::block ? NCCL_GIN_RESOURCE_SHARING_CTA
                                           : NCCL_GIN_RESOURCE_SHARING_THREAD;
    }
    __device__ static ncclWindow_t window(Place place) { return reinterpret_cast<ncclWindow_t>(place.window); }
    __device__ static std::uint32_t flags(bool more) {
        return more ? ncclGinOptFlagsAggregateRequests : ncclGinOptFlagsDefault;
    }
    __device__ static ncclGin_StrongVASignalAdd strong_add(Word w, std::uint64_t add) {
        return {window(w), w.offset, add};
    }
    __device__ static ncclGin_WeakVASignalAdd weak_add(Word w, std::uint64_t add) { return {window(w), w.offset, add}; }
    __device__ static ncclGin_StrongSignalAdd strong_add(Signal s, std::uint64_t add) {
        return {static_cast<ncclGinSignal_t>(s.index), add};
    }
    __device__ static ncclGin_WeakSignalAdd weak_add(Signal s, std::uint64_t add) {
        return {static_cast<ncclGinSignal_t>(s.index), add};
    }
    __device__ ncclGin net() const { return ncclGin(comm_, queue_, sharing_); }
    __device__ ncclTeam world() const { return ncclTeamWorld(comm_); }
    template <class Action>
    __device__ void put_with(Action action, int peer, Place to, Place from, std::uint64_t bytes, bool more) const {
        net().put(world(), peer, window(to), to.offset, window(from), from.offset, bytes, action, ncclGin_None{},
                  ncclCoopThread{}, ncclGin_None{}, ::cuda::thread_scope_thread, ::cuda::thread_scope_device,
                  flags(more));
    }
    template <class Action, class T>
    __device__ void put_value_with(Action action, int peer, Place to, T value, bool more) const {
        net().putValue(world(), peer, window(to), to.offset, value, action, ncclCoopThread{}, ncclGin_None{},
                       ::cuda::thread_scope_thread, ::cuda::thread_scope_device, flags(more));
    }
    __device__ __noinline__ void wait_for_sources(ncclTeam team, int peer) const {
        const ncclGin gin = net();
        ncclGinRequest_t request;
        gin.flushAsync(team, static_cast<std::uint32_t>(peer), &request);
        gin.wait(request);
    }
    const ncclDevComm& comm_;
    int queue_;
    ncclGinResourceSharingMode sharing_;
};

}  // namespace hal::cuda::gin
