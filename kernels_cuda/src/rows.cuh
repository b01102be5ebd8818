// SPDX-License-Identifier: Apache-2.0
// Rows through registers: a warp loads a piece of a row once and stores it wherever it must go.
#pragma once
#include "device.cuh"

namespace hal::cuda {

// Eight 16-byte vectors for each lane, all loaded before the first is stored.
struct Piece {
    uint4 v[kLaneVectors];
    int first, end;  // vectors of the row

    __device__ void span(const RowCut& cut, int piece) {
        first = piece * cut.vectors + (threadIdx.x & 31);
        end = min((piece + 1) * cut.vectors, cut.row_vectors);
    }
    __device__ void load(const char* row) {
#pragma unroll
        for (int i = 0; i < kLaneVectors; ++i)
            if (first + i * 32 < end) v[i] = __ldcg(reinterpret_cast<const uint4*>(row) + first + i * 32);
    }
    // Of memory that another GPU or another block may have written during this launch.
    __device__ void load_shared(const char* row) {
#pragma unroll
        for (int i = 0; i < kLaneVectors; ++i)
            if (first + i * 32 < end) v[i] = __ldcg(reinterpret_cast<const uint4*>(row) + first + i * 32);
    }
    __device__ void store(char* row) const {
#pragma unroll
        for (int i = 0; i < kLaneVectors; ++i)
            if (first + i * 32 < end) store_window(reinterpret_cast<uint4*>(row) + first + i * 32, v[i]);
    }
    __device__ void clear() {
#pragma unroll
        for (int i = 0; i < kLaneVectors; ++i) v[i] = make_uint4(0, 0, 0, 0);
    }
};

}  // namespace hal::cuda
