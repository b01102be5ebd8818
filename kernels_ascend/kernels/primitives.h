// SPDX-License-Identifier: Apache-2.0
// The ordering words themselves, one operation a launch on one core: what Session's put, signal, quiet and wait become.
#pragma once
#include <cstddef>

#include "memory.h"
#include "primitives_args.h"

namespace hal::ascend {

inline constexpr aclshmemx_udma_op_config_t kNoOrder{1U, 0U, 0U, ACLSHMEMX_UDMA_ODR_NO};
inline constexpr std::uint64_t kLargestPut = 256ULL << 20;

class Primitives {
  public:
    HAL_AICORE explicit Primitives(GM_ADDR args)
        : address_(reinterpret_cast<std::uint64_t>(args)), a_(from_global<PrimitiveArgs>(args)) {
        pipe_.InitBuffer(tile_buffer_, 32 * 1024);
        pipe_.InitBuffer(scratch_buffer_, 64);
        tile_ = tile_buffer_.Get<std::uint8_t>();
    }

    HAL_AICORE void run() {
        const bool self = a_.peer == aclshmem_my_pe();
        switch (a_.kind) {
            case Primitive::put:
                return self ? copy(tile_, a_.dst, a_.src, a_.bytes) : put();
            case Primitive::signal_set:
                return self ? write_word<std::uint64_t>(a_.dst, a_.value) : put();
            case Primitive::signal_add:
                return add(self);
            case Primitive::quiet:
                return quiet();
            case Primitive::wait:
                return wait();
        }
    }

  private:
    template <const aclshmemx_udma_op_config_t& CONFIG>
    HAL_AICORE void post(std::uint64_t dst, std::uint64_t src, std::uint32_t bytes) {
        aclshmemx_udma_qp_put_nbi<std::uint8_t, PIPE_MTE3, CONFIG>(
            reinterpret_cast<__gm__ std::uint8_t*>(dst), reinterpret_cast<__gm__ std::uint8_t*>(src),
            reinterpret_cast<__ubuf__ std::uint8_t*>(scratch_buffer_.Get<std::uint8_t>().GetPhyAddr()), bytes, a_.peer,
            std::uint32_t(a_.queue), EVENT_ID5);
    }
    // A put larger than one request goes in several; only the last one is strong, and it waits for the others.
    HAL_AICORE void put() {
        for (std::uint64_t at = 0; at < a_.bytes; at += kLargestPut) {
            const bool last = a_.bytes - at <= kLargestPut;
            const std::uint32_t n = std::uint32_t(last ? a_.bytes - at : kLargestPut);
            if (a_.order == std::uint32_t(Order::none))
                post<kNoOrder>(a_.dst + at, a_.src + at, n);
            else if (a_.order == std::uint32_t(Order::strong) && last)
                post<kStrong>(a_.dst + at, a_.src + at, n);
            else
                post<kRowLastOfBatch>(a_.dst + at, a_.src + at, n);
        }
    }
    // The library's atomics go by queue 0 and have no order, so a strong add waits first; on another queue it would be
    // outside of that queue's order as well.
    HAL_AICORE void add(bool self) {
        if (!self) {
            if (a_.order == std::uint32_t(Order::strong)) aclshmemx_udma_qp_quiet(a_.peer, std::uint32_t(a_.queue));
            aclshmemx_udma_atomic_add<std::uint64_t>(reinterpret_cast<__gm__ std::uint64_t*>(a_.dst), a_.value,
                                                     a_.peer);
            return;
        }
        hal_local_atomic_add(a_.dst, a_.value);
    }
    HAL_AICORE void quiet() {
        for (std::int32_t p = 0; p < aclshmem_n_pes(); ++p)
            if (p != aclshmem_my_pe() && (a_.peer < 0 || a_.peer == p))
                aclshmemx_udma_qp_quiet(p, std::uint32_t(a_.queue));
    }
    HAL_AICORE void wait() {
        std::uint64_t seen = read_word<std::uint64_t>(a_.dst);
        const std::uint64_t start = std::uint64_t(AscendC::GetSystemCycle());
        while (seen < a_.at_least && std::uint64_t(AscendC::GetSystemCycle()) - start < a_.timeout_cycles) {
            hal_pause(reinterpret_cast<const __gm__ void*>(a_.dst), a_.at_least, a_.source, a_.queue, -1);
            seen = read_word<std::uint64_t>(a_.dst);
        }
        write_word<std::uint64_t>(address_ + offsetof(PrimitiveArgs, value), seen);
    }

    const std::uint64_t address_;
    const PrimitiveArgs a_;
    AscendC::TPipe pipe_;
    AscendC::TBuf<AscendC::TPosition::VECCALC> tile_buffer_;
    AscendC::TBuf<AscendC::TPosition::VECOUT> scratch_buffer_;
    Bytes tile_;
};

}  // namespace hal::ascend
