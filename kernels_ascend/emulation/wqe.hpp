// SPDX-License-Identifier: Apache-2.0
// The 64-byte blocks of a send ring and the entries of a completion ring, as bits of 64-bit words. Plain requests take one
// block; a write with notification and the atomics take two.
#pragma once
#include <cstdint>

namespace hal::udma {

struct alignas(64) Block {
    std::uint64_t word[8];
};
static_assert(sizeof(Block) == 64);

enum class Odr : std::uint8_t { no = 0, relax = 5, strong = 6 };

enum class Opcode : std::uint8_t { none = 0, write = 3, write_notify = 5, read = 6, compare_swap = 7, fetch_add = 0xb };

// Word 0.
inline constexpr int kOdrShift = 16;
inline constexpr std::uint64_t kOdrMask = 7ull << kOdrShift;
inline constexpr std::uint64_t kFenceBit = 1ull << 19, kSeBit = 1ull << 20, kCqeBit = 1ull << 21;
inline constexpr int kOpcodeShift = 40;

struct Request {
    Opcode opcode = Opcode::write;
    std::uint64_t remote = 0, local = 0;  // addresses; a write moves local -> remote, a read remote -> local
    std::uint32_t bytes = 0;
    std::uint64_t notify_address = 0;
    std::uint64_t operand = 0, compare = 0;  // notify value, addend, or swap value; compare of a compare-and-swap
    std::uint8_t odr = 0;
    bool fence = false, cqe = false;
};

inline std::uint32_t blocks_of(Opcode opcode) { return opcode == Opcode::write || opcode == Opcode::read ? 1 : 2; }

inline Opcode opcode_of(const Block& first) { return static_cast<Opcode>((first.word[0] >> kOpcodeShift) & 0xff); }

inline void encode(const Request& r, Block (&out)[2]) {
    out[0] = out[1] = Block{};
    auto& w = out[0].word;
    w[0] = (std::uint64_t{r.odr} << kOdrShift) | (r.fence ? kFenceBit : 0) | (r.cqe ? kCqeBit : 0) |
           (std::uint64_t(r.opcode) << kOpcodeShift);
    w[1] = 1ull << 24;  // one scatter-gather element
    w[5] = r.remote;
    if (r.opcode == Opcode::write_notify) {
        w[6] = r.notify_address;
        w[7] = r.operand;
        out[1].word[2] = r.bytes;
        out[1].word[3] = r.local;
        return;
    }
    w[6] = r.bytes;
    w[7] = r.local;
    out[1].word[0] = r.operand;
    out[1].word[1] = r.compare;
}

inline Request decode(const Block& first, const Block& second) {
    Request r;
    r.opcode = opcode_of(first);
    r.odr = (first.word[0] & kOdrMask) >> kOdrShift;
    r.fence = first.word[0] & kFenceBit;
    r.cqe = first.word[0] & kCqeBit;
    r.remote = first.word[5];
    if (r.opcode == Opcode::write_notify) {
        r.notify_address = first.word[6];
        r.operand = first.word[7];
        r.bytes = static_cast<std::uint32_t>(second.word[2]);
        r.local = second.word[3];
        return r;
    }
    r.bytes = static_cast<std::uint32_t>(first.word[6]);
    r.local = first.word[7];
    r.operand = second.word[0];
    r.compare = second.word[1];
    return r;
}

// Completion entry: owner is bit 2 of word 0, substatus bits 16..23, status 24..31, entry index bits 32..47.
inline constexpr std::uint64_t kOwnerBit = 1ull << 2;

inline Block completion_entry(bool owner, std::uint8_t status, std::uint8_t substatus, std::uint32_t end_block) {
    Block e{};
    e.word[0] = (owner ? kOwnerBit : 0) | (std::uint64_t{substatus} << 16) | (std::uint64_t{status} << 24) |
                (std::uint64_t(end_block & 0xffff) << 32);
    return e;
}

}  // namespace hal::udma
