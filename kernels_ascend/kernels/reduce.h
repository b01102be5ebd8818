// SPDX-License-Identifier: Apache-2.0
// The sum of combine on the vector unit: float32, in the order given, every product and every sum rounded once (Muls then
// Add, never fused), the result rounded once.
#pragma once
#include "core.h"

namespace hal::ascend {

inline constexpr std::int32_t kMostTerms = kMaxTopK + 2;

// One row to add: its address, and its weight if the sum is weighted.
struct Term {
    std::uint64_t address;
    float weight;
};

// Terms of one token. [inner_begin, inner_end) are summed on their own, from zero, before that sum is added.
struct Terms {
    Term term[kMostTerms];
    std::int32_t count = 0, inner_begin = 0, inner_end = 0;
    HAL_AICORE void add(std::uint64_t address, float weight) { term[count++] = {address, weight}; }
};

template <class T>
class Reducer {
  public:
    HAL_AICORE explicit Reducer(Core& core) : core_(core) {
        core.pipe_.InitBuffer(stored_buffer_, kChunk * sizeof(T));
        core.pipe_.InitBuffer(term_buffer_, kChunk * 4);
        core.pipe_.InitBuffer(sum_buffer_, kChunk * 4);
        core.pipe_.InitBuffer(inner_buffer_, kChunk * 4);
        stored_ = stored_buffer_.template Get<T>();
        term_ = term_buffer_.template Get<float>();
        sum_ = sum_buffer_.template Get<float>();
        inner_ = inner_buffer_.template Get<float>();
    }

    // y = ((0 + term 0) + term 1) + ... + bias 0 + bias 1; `row_bytes` of each.
    HAL_AICORE void sum(const Terms& terms, bool weighted, const std::uint64_t (&bias)[2], std::uint64_t row_bytes,
                        std::uint64_t y) {
        const std::uint32_t width = std::uint32_t(row_bytes / sizeof(T));
        for (std::uint32_t from = 0; from < width; from += kChunk) {
            const std::uint32_t n = std::uint32_t(smaller(kChunk, width - from));
            const std::uint64_t offset = std::uint64_t{from} * sizeof(T);
            AscendC::Duplicate(sum_, 0.0F, n);
            add_range(sum_, terms, 0, terms.inner_begin, weighted, offset, n);
            if (terms.inner_end > terms.inner_begin) {
                AscendC::Duplicate(inner_, 0.0F, n);
                add_range(inner_, terms, terms.inner_begin, terms.inner_end, weighted, offset, n);
                AscendC::PipeBarrier<PIPE_V>();
                AscendC::Add(sum_, sum_, inner_, n);
            }
            add_range(sum_, terms, terms.inner_end, terms.count, weighted, offset, n);
            for (std::int32_t b = 0; b < 2; ++b)
                if (bias[b]) add_row(sum_, bias[b] + offset, 1.0F, false, n);
            round(y + offset, n);
        }
    }

  private:
    static constexpr std::uint32_t kChunk = 2048;

    HAL_AICORE void add_range(const AscendC::LocalTensor<float>& into, const Terms& terms, std::int32_t from,
                              std::int32_t until, bool weighted, std::uint64_t offset, std::uint32_t n) {
        for (std::int32_t i = from; i < until; ++i)
            add_row(into, terms.term[i].address + offset, terms.term[i].weight, weighted, n);
    }
    HAL_AICORE void add_row(const AscendC::LocalTensor<float>& into, std::uint64_t address, float weight, bool weighted,
                            std::uint32_t n) {
        if constexpr (sizeof(T) == 4) {
            load(term_, address, n);
        } else {
            load(stored_, address, n);
            AscendC::Cast(term_, stored_, AscendC::RoundMode::CAST_NONE, n);
            AscendC::PipeBarrier<PIPE_V>();
        }
        if (weighted) {
            AscendC::Muls(term_, term_, weight, n);
            AscendC::PipeBarrier<PIPE_V>();
        }
        AscendC::Add(into, into, term_, n);
        AscendC::PipeBarrier<PIPE_V>();
    }
    HAL_AICORE void round(std::uint64_t y, std::uint32_t n) {
        if constexpr (sizeof(T) == 4) {
            save(y, sum_, n);
        } else {
            AscendC::Cast(stored_, sum_, AscendC::RoundMode::CAST_RINT, n);
            save(y, stored_, n);
        }
    }

    Core& core_;
    AscendC::TBuf<AscendC::TPosition::VECCALC> stored_buffer_, term_buffer_, sum_buffer_, inner_buffer_;
    AscendC::LocalTensor<T> stored_;
    AscendC::LocalTensor<float> term_, sum_, inner_;
};

}  // namespace hal::ascend
