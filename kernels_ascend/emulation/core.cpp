// SPDX-License-Identifier: Apache-2.0
#include "emulation/core.hpp"

#include <algorithm>

#include "emulation/device.hpp"

namespace hal::udma {

namespace {
int index_of(Pipe pipe) { return pipe == Pipe::mte2 ? 0 : 1; }
bool copies(Pipe pipe) { return pipe == Pipe::mte2 || pipe == Pipe::mte3; }
}  // namespace

Core::Core(Device& device_, int block_, int blocks_)
    : device(device_), block(block_), blocks(blocks_), scratch_(kScratchBytes + 64) {}

Core::Line& Core::line(std::uint64_t base) {
    auto [it, fresh] = cache_.try_emplace(base);
    if (fresh) std::memcpy(it->second.bytes, reinterpret_cast<const void*>(base), kLine);
    return it->second;
}

void Core::load_bytes(std::uint64_t address, void* out, std::uint32_t bytes) {
    if (!device.lazy()) {
        if (bytes == 8) {
            const auto v = __atomic_load_n(reinterpret_cast<const std::uint64_t*>(address), __ATOMIC_ACQUIRE);
            std::memcpy(out, &v, 8);
        } else if (bytes == 4) {
            const auto v = __atomic_load_n(reinterpret_cast<const std::uint32_t*>(address), __ATOMIC_ACQUIRE);
            std::memcpy(out, &v, 4);
        } else {
            std::memcpy(out, reinterpret_cast<const void*>(address), bytes);
        }
        return;
    }
    const std::uint64_t base = address & ~(kLine - 1);
    std::memcpy(out, line(base).bytes + (address - base), bytes);
}

void Core::store_bytes(std::uint64_t address, const void* value, std::uint32_t bytes) {
    if (!device.lazy()) {
        if (bytes == 8) {
            std::uint64_t v;
            std::memcpy(&v, value, 8);
            __atomic_store_n(reinterpret_cast<std::uint64_t*>(address), v, __ATOMIC_RELEASE);
        } else {
            std::memcpy(reinterpret_cast<void*>(address), value, bytes);
        }
        return;
    }
    const std::uint64_t base = address & ~(kLine - 1);
    Line& l = line(base);
    std::memcpy(l.bytes + (address - base), value, bytes);
    l.dirty |= ((bytes == 64 ? ~0ull : (1ull << bytes) - 1)) << (address - base);
}

void Core::write_back(std::uint64_t base, Line& l) {
    if (!l.dirty) return;
    auto* memory = reinterpret_cast<std::byte*>(base);
    for (std::uint64_t i = 0; i < kLine; ++i)
        if (l.dirty >> i & 1) memory[i] = l.bytes[i];
    device.changed();
}

void Core::flush_line(const void* address) {
    if (!device.lazy()) return;
    const auto it = cache_.find(reinterpret_cast<std::uint64_t>(address) & ~(kLine - 1));
    if (it == cache_.end()) return;
    write_back(it->first, it->second);
    cache_.erase(it);
}

void Core::flush_all() {
    for (auto& [base, l] : cache_) write_back(base, l);
    cache_.clear();
}

void Core::perform(const Copy& c) {
    for (std::uint32_t i = 0; i < c.rows; ++i)
        release_copy(c.dst + i * c.dst_stride, c.src + i * c.src_stride, c.bytes);
    if (device.landed && c.bytes == 8) device.landed(-1);  // perhaps a signal by the copy unit, to whomever
}

void Core::copy(Pipe pipe, const Copy& c) {
    if (!device.lazy()) return perform(c);
    PipeState& state = pipes_[index_of(pipe)];
    state.pending.push_back(c);
    ++state.issued;
    if (device.coin()) run_copies(pipe, state.issued);  // early is allowed as well
    point();
}

void Core::run_copies(Pipe pipe, std::uint64_t up_to) {
    PipeState& state = pipes_[index_of(pipe)];
    while (state.performed < up_to && !state.pending.empty()) {
        perform(state.pending.front());
        state.pending.pop_front();
        ++state.performed;
        if (pipe == Pipe::mte3) device.changed();
    }
}

void Core::set_flag(int event, int id, Pipe source) {
    if (!device.lazy()) return;  // copies are done when they are issued
    const std::uint64_t mark = copies(source) ? pipes_[index_of(source)].issued : 0;
    flags_[{event, id}].push_back(mark);
}

void Core::wait_flag(int event, int id, Pipe source, Pipe) {
    if (!device.lazy()) return;
    auto& marks = flags_[{event, id}];
    if (marks.empty()) throw Hang("a core waits for an event flag that was never set");
    if (copies(source)) run_copies(source, marks.front());
    marks.pop_front();
}

void Core::pipe_barrier(Pipe pipe) {
    for (const Pipe p : {Pipe::mte2, Pipe::mte3})
        if (pipe == Pipe::all || pipe == p) run_copies(p, pipes_[index_of(p)].issued);
}

std::byte* Core::allocate_scratch(std::uint32_t bytes) {
    const std::uint32_t rounded = (bytes + 31) / 32 * 32;
    if (scratch_used_ + rounded > kScratchBytes)
        throw Fault(23, "scratch (UB) is full: " + std::to_string(scratch_used_) + " + " + std::to_string(rounded) +
                            " of " + std::to_string(kScratchBytes) + " bytes");
    auto* aligned = reinterpret_cast<std::byte*>((reinterpret_cast<std::uint64_t>(scratch_.data()) + 63) & ~63ull);
    std::byte* result = aligned + scratch_used_;
    scratch_used_ += rounded;
    scratch_ends_.push_back(scratch_used_);
    return result;
}

std::uint64_t Core::scratch_behind(const void* pointer) const {
    const auto* aligned =
        reinterpret_cast<const std::byte*>((reinterpret_cast<std::uint64_t>(scratch_.data()) + 63) & ~63ull);
    const auto offset = static_cast<const std::byte*>(pointer) - aligned;
    if (offset < 0 || offset >= std::int64_t(scratch_used_)) return 0;
    const auto end = std::upper_bound(scratch_ends_.begin(), scratch_ends_.end(), std::uint32_t(offset));
    return *end - std::uint64_t(offset);
}

void Core::pause() { device.pause(); }
void Core::point() { device.point(); }

}  // namespace hal::udma
