// SPDX-License-Identifier: Apache-2.0
// Rows that a warp's sums will need, on their way into shared memory: pieces of the next kAhead rows, also those of later units.
// With rows in registers (add_rows) nothing is on its way while a warp sums and stores. For few blocks, which need every byte in
// flight: 16 then combine nearly as fast as 24, but 32 move less than through registers, and why is not known
// (docs/performance_cuda.md).
#pragma once
#include "combine.cuh"

namespace hal::cuda {

constexpr int kAhead = 3;  // 4, 6 and 7 were no faster

// A slot's n-th copy is a piece of a row; or nothing, for a unit without rows.
template <class Rows>
class RowsAhead {
  public:
    static constexpr std::size_t shared_bytes(int threads) {
        return static_cast<std::size_t>(threads / 32) * kAhead * (kSlotVectors * sizeof(uint4) + sizeof(Arrival));
    }
    // After what made the rows visible. `next`: the terms of the tickets' first unit.
    __device__ RowsAhead(const hal_cuda_ep& ep, const hal_cuda_combine_args& a, const RowCut& cut, const Tickets& units,
                         const Terms<Rows>& next, const std::uint64_t* rows)
        : ep_(ep), a_(a), cut_(cut), units_(units), next_(next), rows_(rows) {
        if (lane_id() == 0)
            for (slot_ = 0; slot_ < kAhead; ++slot_) begin_arrivals(arrival());
        order_copies();
        __syncwarp();
        for (slot_ = 0; slot_ < kAhead; ++slot_) send();
        slot_ = 0;
    }
    // The next unit, and how many rows make it up; false after the last.
    __device__ bool unit(int& unit, int& count) {
        if (done_ == begun_) return false;
        unit = __shfl_sync(0xffffffffu, queued_unit_, done_), count = __shfl_sync(0xffffffffu, queued_count_, done_);
        done_ = (done_ + 1) & 31;
        return true;
    }
    // Adds the next row of that unit; of a unit without rows (`there` = false), nothing.
    template <class Type>
    __device__ void add_to(Sum<Type>& sum, bool there) {
        await_arrival(arrival(), turn_);
        uint4 v[kSumVectors];
        sum.load_piece(slot(), v);
        const float weight = Rows::kWeighted ? __shfl_sync(0xffffffffu, weights_, slot_) : 1.0f;
        __syncwarp();  // all have read it
        send();
        if (++slot_ == kAhead) slot_ = 0, turn_ ^= 1;
        if (there) sum.template add<Rows::kWeighted>(v, weight);
    }

  private:
    static constexpr int kSlotVectors = kSumVectors * 32;
    // The next row's piece, into slot_.
    __device__ void send() {
        if (left_ == 0 && !begin_unit()) return;
        if (left_ != 0) {
            const int lane = lowest_lane(left_);
            const auto* row = reinterpret_cast<const char*>(__shfl_sync(0xffffffffu, address_, lane));
            if (Rows::kWeighted) {
                const float weight = __shfl_sync(0xffffffffu, terms_.weight, lane);
                if (lane_id() == slot_) weights_ = weight;
            }
            const int first = piece_ * cut_.vectors, vectors = min(cut_.vectors, cut_.row_vectors - first);
            copy_to_shared(slot(), reinterpret_cast<const uint4*>(row) + first, vectors, arrival());
            left_ &= left_ - 1;
            if (left_ == 0) more_terms();
        } else {
            copy_to_shared(slot(), nullptr, 0, arrival());
        }
    }
    // False after the last.
    __device__ bool begin_unit() {
        if (!units_.more()) return false;
        const int unit = units_.unit();
        token_ = unit / cut_.pieces, piece_ = unit - token_ * cut_.pieces, start_ = 0;
        terms_ = next_;
        units_.advance();
        next_ = look_up();  // while this unit's rows fly
        point();
        int count = __popc(left_);
        for (int start = 32; start < terms_.count(ep_); start += 32)
            count += __popc(Terms<Rows>(ep_, a_, token_, start).lanes());
        if (lane_id() == begun_) queued_unit_ = unit, queued_count_ = count;
        begun_ = (begun_ + 1) & 31;  // at most kAhead + 1 are queued
        if (left_ == 0) more_terms();
        return true;
    }
    // More than 32 ranks: the next that have rows.
    __device__ void more_terms() {
        while (left_ == 0 && start_ + 32 < terms_.count(ep_)) {
            start_ += 32;
            terms_ = Terms<Rows>(ep_, a_, token_, start_);
            point();
        }
    }
    __device__ void point() {
        left_ = terms_.lanes();
        address_ = terms_.address(ep_, rows_, start_);
    }
    __device__ Terms<Rows> look_up() const {
        return units_.more() ? Terms<Rows>(ep_, a_, units_.unit() / cut_.pieces, 0) : Terms<Rows>();
    }
    __device__ uint4* slot() const {
        return dynamic_shared<uint4>() + static_cast<std::size_t>(warp_id() * kAhead + slot_) * kSlotVectors;
    }
    __device__ Arrival* arrival() const {
        auto* all = reinterpret_cast<Arrival*>(dynamic_shared<uint4>() + warps_in_block() * kAhead * kSlotVectors);
        return all + warp_id() * kAhead + slot_;
    }

    const hal_cuda_ep& ep_;
    const hal_cuda_combine_args& a_;
    const RowCut& cut_;
    Tickets units_;
    Terms<Rows> next_, terms_;  // of the tickets' unit, and of the one whose rows are being sent
    const std::uint64_t* rows_;
    int token_ = 0, piece_ = 0, start_ = 0;  // that one
    unsigned left_ = 0;                      // its rows that have yet to be sent
    unsigned long long address_ = 0;
    int slot_ = 0;
    unsigned turn_ = 0;                       // parity of the slots' copies
    int begun_ = 0, done_ = 0;                // units, modulo 32
    int queued_unit_ = 0, queued_count_ = 0;  // lane i: of the i-th
    float weights_ = 1.0f;                    // lane i: of slot i's row
};

}  // namespace hal::cuda
