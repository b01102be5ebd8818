// SPDX-License-Identifier: Apache-2.0
// What happens around dispatch and combine once a rank is lost (on_peer_loss = mask): expert ids as the ranks that are left
// number them, and rows put where the caller has them. Those kernels themselves know nothing of lost ranks.
#include "hal_cuda.h"
#include "launch.cuh"

namespace hal::cuda {
namespace {

constexpr int kThreads = 256, kMostBlocks = 64;

int blocks_for(std::int64_t units, int of_block) {
    const std::int64_t blocks = (units + of_block - 1) / of_block;
    return static_cast<int>(blocks < kMostBlocks ? blocks : kMostBlocks);
}

// An id that is no expert's stays what it is, so that dispatch finds and refuses it. So must it find an expert that a token
// names twice, also one that is lost, of which nothing would be left: the second becomes an id that nobody gives.
template <class Id>
__global__ void __launch_bounds__(kThreads)
    renumber_kernel(const Id* ids, std::int64_t count, int topk, const std::int32_t* numbers, std::int64_t experts,
                    Id* out) {
    const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
    for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step) {
        const Id id = ids[i];
        Id number = id >= 0 && id < experts ? static_cast<Id>(numbers[id]) : id;
        if (number == -1 && id != -1)
            for (std::int64_t j = i - i % topk; j < i; ++j)
                if (ids[j] == id) number = static_cast<Id>(HAL_CUDA_LOST_TWICE) + id;
        out[i] = number;
    }
}

template <class Id>
int renumber(int device, std::uint64_t ids, std::int64_t count, int topk, std::uint64_t numbers, int experts,
             std::uint64_t out, std::uint64_t stream) {
    return launch(renumber_kernel<Id>, device, blocks_for(count, kThreads), kThreads, 0, stream, "renumber",
                  reinterpret_cast<const Id*>(ids), count, topk, reinterpret_cast<const std::int32_t*>(numbers),
                  static_cast<std::int64_t>(experts), reinterpret_cast<Id*>(out));
}

// Row from[i] goes to row to[i], by a warp; null: row i. Negative ones stay where they are.
template <class Word>
__global__ void __launch_bounds__(kThreads)
    move_rows_kernel(const char* source, char* target, const std::int32_t* from, const std::int32_t* to,
                     std::int64_t rows, std::int64_t row_words) {
    const std::int64_t warp = (static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
    const std::int64_t warps = static_cast<std::int64_t>(gridDim.x) * blockDim.x / 32;
    for (std::int64_t i = warp; i < rows; i += warps) {
        const std::int64_t a = from != nullptr ? from[i] : i, b = to != nullptr ? to[i] : i;
        if (a < 0 || b < 0) continue;
        const Word* row = reinterpret_cast<const Word*>(source) + a * row_words;
        for (std::int64_t w = threadIdx.x & 31; w < row_words; w += 32)
            store_window(reinterpret_cast<Word*>(target) + b * row_words + w, load_window(row + w));
    }
}

template <class Word>
int move_rows(int device, std::uint64_t source, std::uint64_t target, std::uint64_t from, std::uint64_t to,
              std::int64_t rows, std::uint64_t row_bytes, std::uint64_t stream) {
    return launch(move_rows_kernel<Word>, device, blocks_for(rows, kThreads / 32), kThreads, 0, stream, "moving rows",
                  reinterpret_cast<const char*>(source), reinterpret_cast<char*>(target),
                  reinterpret_cast<const std::int32_t*>(from), reinterpret_cast<const std::int32_t*>(to), rows,
                  static_cast<std::int64_t>(row_bytes / sizeof(Word)));
}

}  // namespace
}  // namespace hal::cuda

extern "C" int hal_cuda_renumber(int device, std::uint64_t ids, int ids_are_64, std::int64_t count, int topk,
                                 std::uint64_t numbers, int experts, std::uint64_t out, std::uint64_t stream) {
    using namespace hal::cuda;
    if (count == 0) return 0;
    return ids_are_64 != 0 ? renumber<std::int64_t>(device, ids, count, topk, numbers, experts, out, stream)
                           : renumber<std::int32_t>(device, ids, count, topk, numbers, experts, out, stream);
}

extern "C" int hal_cuda_move_rows(int device, std::uint64_t source, std::uint64_t target, std::uint64_t from,
                                  std::uint64_t to, std::int64_t rows, std::uint64_t row_bytes, std::uint64_t stream) {
    using namespace hal::cuda;
    if (rows == 0 || row_bytes == 0) return 0;
    return (source | target | row_bytes) % 16 == 0
               ? move_rows<uint4>(device, source, target, from, to, rows, row_bytes, stream)
               : move_rows<std::uint32_t>(device, source, target, from, to, rows, row_bytes, stream);
}
