// SPDX-License-Identifier: Apache-2.0
// What the device-side library does on a core: build descriptors, stage and publish them, ring, poll, quiet. The shim's
// templates (host_shim/aclshmem.h) end here.
#pragma once
#include <cstdint>

#include "emulation/device.hpp"

namespace hal::udma {

struct OpConfig {
    std::uint32_t cqe = 0, se = 0, fence = 0, odr = 0;
};

enum class Action : std::uint8_t { immediate, defer, submit };

struct Post {
    OpConfig config;
    Pipe pipe = Pipe::mte3;
    Action action = Action::immediate;
    Opcode opcode = Opcode::write;
    std::uint64_t dst = 0, src = 0;  // local addresses; the remote one is symmetric
    std::uint64_t bytes = 0;
    std::uint64_t signal_address = 0, operand = 0, compare = 0;
    int pe = 0;
    std::uint32_t qp = 0;
    void* scratch = nullptr;  // UB for the descriptors: 64 bytes for each request of a batch
    std::uint32_t sync_id = 0;
    std::uint32_t* pending_count = nullptr;  // of the batch
};

void post(Core& core, const Post& request);
// Polls until every expected completion entry of this queue was seen, then rings the completion doorbell.
void quiet(Core& core, int pe, std::uint32_t qp);
// Takes one completion entry if there is one.
bool poll_completion(Core& core, Queue& queue);
// Room for `blocks` more, polling for it if it may (rules 16, 17).
void wait_for_credit(Core& core, Queue& queue, std::uint32_t blocks);

// Hand-written descriptors: blocks stored by the scalar unit, then flushed and rung as one range.
void store_block(Core& core, Queue& queue, std::uint32_t index, const Block& block);
void flush_blocks(Core& core, Queue& queue, std::uint32_t first, std::uint32_t end);

}  // namespace hal::udma
