// SPDX-License-Identifier: Apache-2.0
// A small seeded generator (splitmix64), one for each block, so that no lock orders what they choose.
#pragma once
#include <cstdint>

namespace hal::cuda::emulation {

class Random {
  public:
    explicit Random(std::uint64_t seed) : state_(seed) {}
    std::uint64_t next() {
        std::uint64_t z = state_ += 0x9e3779b97f4a7c15ull;
        z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
        z = (z ^ z >> 27) * 0x94d049bb133111ebull;
        return z ^ z >> 31;
    }
    // In [0, n).
    std::uint64_t below(std::uint64_t n) { return next() % n; }

  private:
    std::uint64_t state_;
};

}  // namespace hal::cuda::emulation
