// SPDX-License-Identifier: Apache-2.0
// The Ascend C names that HAL's kernels use, for the host compiler: our own declarations, made from public documentation,
// over the emulated core (emulation/core.hpp). Only what the kernels need; nothing here claims to be complete.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "emulation/device.hpp"
#include "half_types.h"

#define __aicore__
#define __global__
#define __gm__
#define __ubuf__
#define GM_ADDR std::uint8_t*

enum pipe_t { PIPE_S, PIPE_V, PIPE_MTE2, PIPE_MTE3, PIPE_ALL };
enum event_t { EVENT_ID0, EVENT_ID1, EVENT_ID2, EVENT_ID3, EVENT_ID4, EVENT_ID5, EVENT_ID6, EVENT_ID7 };

namespace hal_shim {
inline hal::udma::Core& core() { return hal::udma::Core::current(); }
inline hal::udma::Pipe pipe(pipe_t p) {
    using hal::udma::Pipe;
    switch (p) {
        case PIPE_S:
            return Pipe::scalar;
        case PIPE_V:
            return Pipe::vector;
        case PIPE_MTE2:
            return Pipe::mte2;
        case PIPE_MTE3:
            return Pipe::mte3;
        case PIPE_ALL:
            return Pipe::all;
    }
    return Pipe::all;
}
}  // namespace hal_shim

namespace AscendC {

inline std::int64_t GetBlockIdx() { return hal_shim::core().block; }
inline std::int64_t GetBlockNum() { return hal_shim::core().blocks; }
inline std::int64_t GetSystemCycle() { return std::int64_t(hal_shim::core().device.cycles()); }

template <bool isAIVOnly = true>
void SyncAll() {
    static_assert(isAIVOnly, "HAL's kernels run on vector cores only");
    hal_shim::core().device.sync_all(hal_shim::core());
}

enum class HardEvent { S_MTE2, MTE2_S, S_MTE3, MTE3_S, MTE2_MTE3, MTE3_MTE2, MTE2_V, V_MTE2, MTE3_V, V_MTE3, V_S, S_V };

namespace shim_detail {
constexpr pipe_t source_of(HardEvent e) {
    switch (e) {
        case HardEvent::MTE2_S:
        case HardEvent::MTE2_MTE3:
        case HardEvent::MTE2_V:
            return PIPE_MTE2;
        case HardEvent::MTE3_S:
        case HardEvent::MTE3_MTE2:
        case HardEvent::MTE3_V:
            return PIPE_MTE3;
        case HardEvent::V_MTE2:
        case HardEvent::V_MTE3:
        case HardEvent::V_S:
            return PIPE_V;
        default:
            return PIPE_S;
    }
}
}  // namespace shim_detail

template <HardEvent event>
void SetFlag(std::int32_t id) {
    hal_shim::core().set_flag(int(event), id, hal_shim::pipe(shim_detail::source_of(event)));
}
template <HardEvent event>
void WaitFlag(std::int32_t id) {
    hal_shim::core().wait_flag(int(event), id, hal_shim::pipe(shim_detail::source_of(event)), hal::udma::Pipe::all);
}
template <pipe_t p>
void PipeBarrier() {
    hal_shim::core().pipe_barrier(hal_shim::pipe(p));
}

enum class TPosition { VECIN, VECOUT, VECCALC };
enum class RoundMode { CAST_NONE, CAST_RINT };
enum class CacheMode { CACHE_MODE_DISABLE, CACHE_MODE_NORMAL };

template <class T>
class LocalTensor {
  public:
    LocalTensor() = default;
    LocalTensor(T* data, std::uint32_t size) : data_(data), size_(size) {}
    T GetValue(std::uint32_t i) const { return data_[i]; }
    void SetValue(std::uint32_t i, T value) const { data_[i] = value; }
    LocalTensor operator[](std::uint32_t offset) const { return {data_ + offset, size_ - offset}; }
    std::uint64_t GetPhyAddr() const { return reinterpret_cast<std::uint64_t>(data_); }
    std::uint32_t GetSize() const { return size_; }
    template <class U>
    LocalTensor<U> ReinterpretCast() const {
        return {reinterpret_cast<U*>(data_), std::uint32_t(size_ * sizeof(T) / sizeof(U))};
    }
    T* data() const { return data_; }

  private:
    T* data_ = nullptr;
    std::uint32_t size_ = 0;
};

template <class T>
class GlobalTensor {
  public:
    void SetGlobalBuffer(T* data, std::uint64_t size = 0) { data_ = data, size_ = size; }
    void SetL2CacheHint(CacheMode) {}
    T GetValue(std::uint64_t i) const { return hal_shim::core().load(data_ + i); }
    void SetValue(std::uint64_t i, T value) const { hal_shim::core().store(data_ + i, value); }
    GlobalTensor operator[](std::uint64_t offset) const {
        GlobalTensor t;
        t.SetGlobalBuffer(data_ + offset, size_ - offset);
        return t;
    }
    T* GetPhyAddr() const { return data_; }

  private:
    T* data_ = nullptr;
    std::uint64_t size_ = 0;
};

template <TPosition position>
class TBuf {
  public:
    template <class T>
    LocalTensor<T> Get() const {
        return {static_cast<T*>(data_), std::uint32_t(bytes_ / sizeof(T))};
    }
    void bind(void* data, std::uint32_t bytes) { data_ = data, bytes_ = bytes; }

  private:
    void* data_ = nullptr;
    std::uint32_t bytes_ = 0;
};

class TPipe {
  public:
    template <TPosition position>
    void InitBuffer(TBuf<position>& buffer, std::uint32_t bytes) {
        buffer.bind(hal_shim::core().allocate_scratch(bytes), (bytes + 31) / 32 * 32);
    }
};

// Strides are gaps between the end of a piece and the next one: bytes in global memory, 32-byte units in scratch.
struct DataCopyExtParams {
    std::uint16_t blockCount;
    std::uint32_t blockLen, srcStride, dstStride, rsv;
};
template <class T>
struct DataCopyPadExtParams {
    bool isPad;
    std::uint8_t leftPadding, rightPadding;
    T paddingValue;
};

namespace shim_detail {
inline std::uint64_t in_scratch(const DataCopyExtParams& p, std::uint32_t stride) {
    return (p.blockLen + 31) / 32 * 32 + std::uint64_t{stride} * 32;
}
}  // namespace shim_detail

template <class T>
void DataCopyPad(const LocalTensor<T>& dst, const GlobalTensor<T>& src, const DataCopyExtParams& p,
                 const DataCopyPadExtParams<T>&) {
    hal_shim::core().copy(
        hal::udma::Pipe::mte2,
        {reinterpret_cast<std::byte*>(dst.data()), reinterpret_cast<const std::byte*>(src.GetPhyAddr()), p.blockCount,
         p.blockLen, shim_detail::in_scratch(p, p.dstStride), std::uint64_t{p.blockLen} + p.srcStride});
}
template <class T>
void DataCopyPad(const GlobalTensor<T>& dst, const LocalTensor<T>& src, const DataCopyExtParams& p) {
    hal_shim::core().copy(
        hal::udma::Pipe::mte3,
        {reinterpret_cast<std::byte*>(dst.GetPhyAddr()), reinterpret_cast<const std::byte*>(src.data()), p.blockCount,
         p.blockLen, std::uint64_t{p.blockLen} + p.dstStride, shim_detail::in_scratch(p, p.srcStride)});
}

template <class T>
void Duplicate(const LocalTensor<T>& dst, T value, std::uint32_t count) {
    std::fill_n(dst.data(), count, value);
}
template <class D, class S>
void Cast(const LocalTensor<D>& dst, const LocalTensor<S>& src, RoundMode, std::uint32_t count) {
    D* d = dst.data();
    const S* s = src.data();
    for (std::uint32_t i = 0; i < count; ++i) hal_shim::from_float(hal_shim::to_float(s[i]), d[i]);
}
template <class T>
void Add(const LocalTensor<T>& dst, const LocalTensor<T>& a, const LocalTensor<T>& b, std::uint32_t count) {
    T *d = dst.data(), *x = a.data(), *y = b.data();
    for (std::uint32_t i = 0; i < count; ++i) d[i] = x[i] + y[i];
}
template <class T>
void Muls(const LocalTensor<T>& dst, const LocalTensor<T>& a, T factor, std::uint32_t count) {
    T *d = dst.data(), *x = a.data();
    for (std::uint32_t i = 0; i < count; ++i) d[i] = x[i] * factor;
}

}  // namespace AscendC

// Clean and invalidate the scalar cache: one line, a range of lines, everything.
inline void dcci_cacheline(void* address) { hal_shim::core().flush_line(address); }
inline void dcci_cachelines(void* address, std::uint64_t bytes) {
    const auto first = reinterpret_cast<std::uint64_t>(address) & ~63ull;
    for (std::uint64_t at = first; at < reinterpret_cast<std::uint64_t>(address) + bytes; at += 64)
        hal_shim::core().flush_line(reinterpret_cast<void*>(at));
}
inline void dcci_entire_cache() { hal_shim::core().flush_all(); }
// The store that reaches a device register.
inline void st_dev(std::uint32_t value, void* address, std::int32_t) {
    hal_shim::core().device.store_register(value, address);
}
