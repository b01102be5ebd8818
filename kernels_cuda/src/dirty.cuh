// SPDX-License-Identifier: Apache-2.0
// Which rows of the receive slots may hold data of earlier dispatches, so that a dispatch clears these and no others: what was
// cleared once, and not written since, is padding still.
#pragma once
#include "device.cuh"

namespace hal::cuda {

// Runs of rows of one receive slot whose ends are kept. Fixed slots: a source's, or an expert's of a source; then one more,
// which says whether rows landed in the slot that no receive half has counted (0 = no, 1 = of one send half, 2 = of more).
// Else one, from the slot's start.
__device__ __forceinline__ int runs_of(const hal_cuda_ep& ep) {
    return ep.fixed_slots ? (ep.expert_layout ? ep.experts : ep.world) : 1;
}
__device__ __forceinline__ int uncounted_run(const hal_cuda_ep& ep) { return runs_of(ep); }

// Rows of a run beyond which all are padding. Blocks read the number whenever they need it, and
// one thread writes the next without waiting for them: there are two words in turn, each with the launch that wrote it, so a
// launch knows its own and passes it over. Words of ones, as all are at first, say that every row may hold data.
class Dirty {
  public:
    __device__ Dirty(const hal_cuda_ep& ep, unsigned slot, int run)
        : words_(reinterpret_cast<unsigned long long*>(ep.dirty) +
                 2 * (static_cast<std::size_t>(slot) * (runs_of(ep) + (ep.fixed_slots ? 1 : 0)) + run)),
          stamp_(Launch::number() << kBits) {
        load_relaxed_gpu(words_, first_, second_);
    }
    // Of `most` that the run has.
    __device__ unsigned rows(unsigned most) const {
        const auto n = static_cast<unsigned>((second_is_last() ? second_ : first_) & kAll);
        return n == kAll ? most : min(n, most);
    }
    // What the next launch reads. By one thread, once in a launch.
    __device__ void put(unsigned rows) const {
        store_relaxed(reinterpret_cast<std::uint64_t*>(words_ + (second_is_last() ? 0 : 1)), stamp_ | min(rows, kAll));
    }
    __device__ void put_all() const { put(kAll); }

  private:
    static constexpr int kBits = 24;
    static constexpr unsigned kAll = (1u << kBits) - 1;
    unsigned long long *words_, stamp_, first_, second_;

    __device__ bool mine(unsigned long long word) const { return (word ^ stamp_) >> kBits == 0; }
    __device__ bool second_is_last() const {
        return mine(first_) || (!mine(second_) && static_cast<long long>(second_ - first_) > 0);
    }
};

// The bound of a run of which `used` rows hold data, once those from there up to `shown` are cleared.
__device__ __forceinline__ unsigned still_dirty(unsigned dirty, unsigned used, unsigned shown) {
    return dirty > shown ? max(dirty, used) : used;
}

}  // namespace hal::cuda
