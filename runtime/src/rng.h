// Philox 4x32-10, the counter-based generator of Salmon et al., "Parallel Random Numbers: As Easy
// as 1, 2, 3" (SC 2011). A number depends on its key and counter alone, so a token's draw depends
// on (seed, output position) and not on what else ran before it: no state to save at a pause, none
// to share between threads.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>

namespace plansmith {

using PhiloxCounter = std::array<uint32_t, 4>;
using PhiloxKey = std::array<uint32_t, 2>;

inline PhiloxCounter PhiloxRound(const PhiloxCounter& c, const PhiloxKey& k) {
  const uint64_t p0 = uint64_t{0xD2511F53u} * c[0];
  const uint64_t p1 = uint64_t{0xCD9E8D57u} * c[2];
  return {static_cast<uint32_t>(p1 >> 32) ^ c[1] ^ k[0], static_cast<uint32_t>(p1),
          static_cast<uint32_t>(p0 >> 32) ^ c[3] ^ k[1], static_cast<uint32_t>(p0)};
}

inline PhiloxCounter Philox4x32(PhiloxCounter counter, PhiloxKey key) {
  for (int round = 0; round < 10; ++round) {
    counter = PhiloxRound(counter, key);
    key[0] += 0x9E3779B9u;  // the golden ratio
    key[1] += 0xBB67AE85u;  // sqrt(3) - 1
  }
  return counter;
}

// The uniform number in [0, 1) that decides output token `output_idx` of a request with `seed`; 53
// random bits.
inline double UniformAt(uint64_t seed, uint32_t output_idx) {
  const PhiloxCounter x = Philox4x32(
      {output_idx, 0, 0, 0}, {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)});
  const uint64_t bits = (uint64_t{x[0]} << 32 | x[1]) >> 11;
  return static_cast<double>(bits) * 0x1.0p-53;
}

}  // namespace plansmith
