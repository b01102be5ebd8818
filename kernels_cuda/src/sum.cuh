// SPDX-License-Identifier: Apache-2.0
// Sums of rows as docs/contract.md states them: float32 from zero, each product and each sum rounded once, the result
// rounded once to the rows' type.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "device.cuh"

namespace hal::cuda {

// Eight (or four) values in one 16-byte vector.
struct Bfloat16 {
    static constexpr int kValues = 8;
    __device__ static void unpack(const uint4& v, float* out) {
        const std::uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            out[2 * i] = __uint_as_float(words[i] << 16);
            out[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
        }
    }
    __device__ static uint4 pack(const float* in) {
        std::uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const __nv_bfloat162 pair = __floats2bfloat162_rn(in[2 * i], in[2 * i + 1]);
            words[i] = *reinterpret_cast<const std::uint32_t*>(&pair);
        }
        return make_uint4(words[0], words[1], words[2], words[3]);
    }
};

struct Float16 {
    static constexpr int kValues = 8;
    __device__ static void unpack(const uint4& v, float* out) {
        const std::uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&words[i]));
            out[2 * i] = pair.x, out[2 * i + 1] = pair.y;
        }
    }
    __device__ static uint4 pack(const float* in) {
        std::uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const __half2 pair = __floats2half2_rn(in[2 * i], in[2 * i + 1]);
            words[i] = *reinterpret_cast<const std::uint32_t*>(&pair);
        }
        return make_uint4(words[0], words[1], words[2], words[3]);
    }
};

struct Float32 {
    static constexpr int kValues = 4;
    __device__ static void unpack(const uint4& v, float* out) {
        out[0] = __uint_as_float(v.x), out[1] = __uint_as_float(v.y), out[2] = __uint_as_float(v.z),
        out[3] = __uint_as_float(v.w);
    }
    __device__ static uint4 pack(const float* in) {
        return make_uint4(__float_as_uint(in[0]), __float_as_uint(in[1]), __float_as_uint(in[2]),
                          __float_as_uint(in[3]));
    }
};

// Four vectors of one row for each lane, of up to three rows at a time: 6 KiB of loads in flight for each warp, and with the
// float32 sums they still fit in the registers of 512 threads.
constexpr int kSumVectors = 4, kSumRows = 3;

template <class Type>
struct Sum {
    float value[kSumVectors][Type::kValues];
    int first, end;

    __device__ Sum(const RowCut& cut, int piece) {
        first = piece * cut.vectors + (threadIdx.x & 31);
        end = min((piece + 1) * cut.vectors, cut.row_vectors);
        clear();
    }
    __device__ void clear() {
#pragma unroll
        for (int i = 0; i < kSumVectors; ++i)
#pragma unroll
            for (int j = 0; j < Type::kValues; ++j) value[i][j] = 0.0f;
    }
    // Beyond the end the last vector is loaded and added again, and not stored: no branches between loads, nor between sums.
    __device__ void load(const char* row, uint4* v) const {
#pragma unroll
        for (int i = 0; i < kSumVectors; ++i)
            v[i] = __ldcg(reinterpret_cast<const uint4*>(row) + min(first + i * 32, end - 1));
    }
    // The same of a piece alone, in shared memory.
    __device__ void load_piece(const uint4* piece, uint4* v) const {
        const int lane = static_cast<int>(threadIdx.x & 31);
#pragma unroll
        for (int i = 0; i < kSumVectors; ++i) v[i] = piece[min(first + i * 32, end - 1) - (first - lane)];
    }
    template <bool kWeighted>
    __device__ void add(const uint4* v, float weight) {
#pragma unroll
        for (int i = 0; i < kSumVectors; ++i) {
            float row[Type::kValues];
            Type::unpack(v[i], row);
#pragma unroll
            for (int j = 0; j < Type::kValues; ++j)
                value[i][j] = __fadd_rn(value[i][j], kWeighted ? __fmul_rn(weight, row[j]) : row[j]);
        }
    }
    // Puts the sums aside in shared memory, where the same thread finds them again, and starts anew: registers are for rows.
    __device__ void put_aside(float4* aside) {
#pragma unroll
        for (int i = 0; i < kSumVectors; ++i)
#pragma unroll
            for (int j = 0; j < Type::kValues; j += 4)
                aside[place(i, j)] = make_float4(value[i][j], value[i][j + 1], value[i][j + 2], value[i][j + 3]);
        clear();
    }
    __device__ void add_aside(const float4* aside) {
#pragma unroll
        for (int i = 0; i < kSumVectors; ++i)
#pragma unroll
            for (int j = 0; j < Type::kValues; j += 4) {
                const float4 v = aside[place(i, j)];
                value[i][j] = __fadd_rn(value[i][j], v.x), value[i][j + 1] = __fadd_rn(value[i][j + 1], v.y);
                value[i][j + 2] = __fadd_rn(value[i][j + 2], v.z), value[i][j + 3] = __fadd_rn(value[i][j + 3], v.w);
            }
    }
    static constexpr std::size_t aside_bytes(int threads) {
        return static_cast<std::size_t>(threads) * kSumVectors * Type::kValues * sizeof(float);
    }
    __device__ void add_row(const char* row) {
        uint4 v[kSumVectors];
        load(row, v);
        add<false>(v, 1.0f);
    }
    // The sums themselves, unrounded.
    __device__ void store_sums(float* row) const {
#pragma unroll
        for (int i = 0; i < kSumVectors; ++i)
#pragma unroll
            for (int j = 0; j < Type::kValues; j += 4)
                if (first + i * 32 < end)
                    store_window(
                        reinterpret_cast<float4*>(row + static_cast<std::size_t>(first + i * 32) * Type::kValues + j),
                        make_float4(value[i][j], value[i][j + 1], value[i][j + 2], value[i][j + 3]));
    }
    __device__ void add_sums(const float* row) {
#pragma unroll
        for (int i = 0; i < kSumVectors; ++i)
#pragma unroll
            for (int j = 0; j < Type::kValues; ++j)
                if (first + i * 32 < end)
                    value[i][j] = __fadd_rn(value[i][j],
                                            __ldcg(row + static_cast<std::size_t>(first + i * 32) * Type::kValues + j));
    }
    __device__ void store(char* row) const {
#pragma unroll
        for (int i = 0; i < kSumVectors; ++i)
            if (first + i * 32 < end)
                store_window(reinterpret_cast<uint4*>(row) + first + i * 32, Type::pack(value[i]));
    }

  private:
    // A warp's lanes side by side, and constant distances between a lane's parts.
    __device__ static int place(int i, int j) {
        constexpr int kParts = kSumVectors * Type::kValues / 4;
        const int thread = static_cast<int>(threadIdx.x), part = (i * Type::kValues + j) / 4;
        return thread / 32 * 32 * kParts + thread % 32 + part * 32;
    }
};

}  // namespace hal::cuda
