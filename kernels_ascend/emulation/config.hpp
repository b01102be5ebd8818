// SPDX-License-Identifier: Apache-2.0
// Settings of one emulated device, and the defects that can be planted in it.
#pragma once
#include <cstdint>

namespace hal::udma {

// Each weakens one primitive below the kernels, whose source stays as it is. All must be caught (docs/ascend.md).
enum class Mutation : std::uint32_t {
    none,
    default_no,             // relaxed posts lose their order code
    strong_on_other_queue,  // the strong signal goes to the peer's next QP
    drop_empty_signal,      // no signal on a queue that carried no rows in this round
    batch_of_129,           // one row more than the descriptor scratch holds
    no_flush,               // descriptors are not flushed before the doorbell
    flush_first_span_only,  // only the part before the ring's end is flushed
    ring_before_copy,       // the doorbell does not wait for the copy of the descriptors
    early_source_reuse,     // quiet returns at once
    constant_one,           // signals carry 1 instead of the generation
    signal_before_quiet,    // quiet of QP 1 returns at once
    early_reclaim,          // the exit barrier before tail = head returns at once
    wait_on_wrong_slot,     // a wait looks at the neighbour's slot
    ignore_cqe_status,      // an error status counts as success
    keep_relaxed_bits,      // a descriptor becomes strong without clearing its relaxed code
};

struct EngineConfig {
    std::uint32_t qp_num = 2;        // queues to each target, 1..32
    std::uint32_t sq_depth = 32768;  // 64-byte blocks; a power of two
    std::uint32_t cq_depth = 32768;  // a power of two
    std::uint32_t first_index = 0;   // where the free-running 32-bit indices start
    std::uint32_t chunk_bytes = 0;   // a write may land in pieces of this size, in any order; 0 = whole
    bool quiet_covers_no = false;    // rule 42: true = a completion entry of a NO request covers all earlier requests
    bool direct_mode = true;         // rule 7: false = relay mode, which has no QP interface
    bool lazy = false;               // deliveries, caches and copy pipes wait for a scheduler
    std::uint64_t seed = 0;
    Mutation mutation = Mutation::none;
};

inline constexpr std::uint32_t kCreditGuard = 10;
inline constexpr std::uint64_t kLargestRequest = 256ull << 20;
inline constexpr std::uint32_t kMaxQueues = 32;

}  // namespace hal::udma
