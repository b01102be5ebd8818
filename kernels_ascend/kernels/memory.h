// SPDX-License-Identifier: Apache-2.0
// Moving bytes on a core, each call complete when it returns: global memory to scratch (MTE2), scratch to global memory
// (MTE3), and the flags between the pipes without which a copy reads what is not there yet.
#pragma once
#include "device.h"

namespace hal::ascend {

using Bytes = AscendC::LocalTensor<std::uint8_t>;
using AscendC::HardEvent;

template <HardEvent event>
HAL_AICORE void after() {
    AscendC::SetFlag<event>(EVENT_ID0);
    AscendC::WaitFlag<event>(EVENT_ID0);
}

template <class T>
HAL_AICORE AscendC::GlobalTensor<T> global(std::uint64_t address) {
    AscendC::GlobalTensor<T> t;
    t.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(address));
    return t;
}

// A structure that the host wrote before the launch, word by word: the compiler does not copy objects between memories.
template <class T>
HAL_AICORE T from_global(GM_ADDR address) {
    static_assert(sizeof(T) % 8 == 0);
    T value;
    const auto words = reinterpret_cast<const __gm__ std::uint64_t*>(address);
    for (std::uint32_t i = 0; i < sizeof(T) / 8; ++i) reinterpret_cast<std::uint64_t*>(&value)[i] = words[i];
    return value;
}

// Global -> scratch; readable by the scalar and vector units afterwards.
template <class T>
HAL_AICORE void load(const AscendC::LocalTensor<T>& dst, std::uint64_t src, std::uint32_t count) {
    if (count == 0) return;
    after<HardEvent::V_MTE2>();
    after<HardEvent::MTE3_MTE2>();
    AscendC::DataCopyPad(dst, global<T>(src), {1, std::uint32_t(count * sizeof(T)), 0, 0, 0}, {false, 0, 0, T{}});
    after<HardEvent::MTE2_S>();
    after<HardEvent::MTE2_V>();
}

// Scratch, written by the scalar or vector unit, -> global; in memory afterwards.
template <class T>
HAL_AICORE void save(std::uint64_t dst, const AscendC::LocalTensor<T>& src, std::uint32_t count) {
    if (count == 0) return;
    after<HardEvent::S_MTE3>();
    after<HardEvent::V_MTE3>();
    AscendC::DataCopyPad(global<T>(dst), src, {1, std::uint32_t(count * sizeof(T)), 0, 0, 0});
    after<HardEvent::MTE3_S>();
    after<HardEvent::MTE3_V>();
}

// Global -> global through `tile`. Also to another PE's memory, by its mapped address.
HAL_AICORE void copy(const Bytes& tile, std::uint64_t dst, std::uint64_t src, std::uint64_t bytes) {
    for (std::uint64_t at = 0; at < bytes; at += tile.GetSize()) {
        const std::uint32_t n = std::uint32_t(smaller(std::int64_t(bytes - at), tile.GetSize()));
        after<HardEvent::MTE3_MTE2>();
        AscendC::DataCopyPad(tile, global<std::uint8_t>(src + at), {1, n, 0, 0, 0}, {false, 0, 0, 0});
        after<HardEvent::MTE2_MTE3>();
        AscendC::DataCopyPad(global<std::uint8_t>(dst + at), tile, {1, n, 0, 0, 0});
    }
    after<HardEvent::MTE3_S>();
}

HAL_AICORE void clear(const Bytes& tile, std::uint64_t dst, std::uint64_t bytes) {
    if (bytes == 0) return;
    AscendC::Duplicate(tile.ReinterpretCast<std::uint32_t>(), std::uint32_t{0}, tile.GetSize() / 4);
    for (std::uint64_t at = 0; at < bytes; at += tile.GetSize())
        save(dst + at, tile, std::uint32_t(smaller(std::int64_t(bytes - at), tile.GetSize())));
}

// Single words, past the scalar cache both ways.
template <class T>
HAL_AICORE T read_word(std::uint64_t address) {
    dcci_cacheline(reinterpret_cast<__gm__ void*>(address));
    return global<T>(address).GetValue(0);
}
template <class T>
HAL_AICORE void write_word(std::uint64_t address, T value) {
    global<T>(address).SetValue(0, value);
    dcci_cacheline(reinterpret_cast<__gm__ void*>(address));
}

}  // namespace hal::ascend
