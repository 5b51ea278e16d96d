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

// The key of the random numbers, one a token id, that decide output token `output_idx` of a request
// with `seed`.
inline PhiloxKey DrawKey(uint64_t seed, uint32_t output_idx) {
  const PhiloxCounter x = Philox4x32(
      {output_idx, 0, 0, 0}, {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)});
  return {x[0], x[1]};
}

// Wellons' triple32, a well-tested hash of 32 bits, with half of the key before it and half inside.
inline uint32_t KeyedHash(const PhiloxKey& key, uint32_t x) {
  x = (x ^ key[0]) * 0xED5AD4BBu;
  x = ((x ^ x >> 11) + key[1]) * 0xAC4C1B51u;
  x = (x ^ x >> 15) * 0x31848BABu;
  return x ^ x >> 14;
}

// The upper 16 random bits of the tokens 2 * pair (in the low half) and 2 * pair + 1. Philox for
// each token would cost more than the rest of a draw; this vectorizes, and serves two tokens
// because few have upper bits so small that the others matter.
inline uint32_t UpperDrawBits(const PhiloxKey& key, uint32_t pair) { return KeyedHash(key, pair); }

// The 32 random bits of token `id`.
inline uint32_t DrawBits(const PhiloxKey& key, int32_t id) {
  const uint32_t x = static_cast<uint32_t>(id);
  const uint32_t upper = UpperDrawBits(key, x / 2) >> (x % 2 * 16);
  return upper << 16 | KeyedHash(key, x | 0x80000000u) >> 16;  // no pair has the highest bit
}

// -log(1 - u) of the uniform number u = (bits + 0.5) 2^-32, which is never 0: exponentially
// distributed with mean 1. Relative error below 1e-10, and no operation but +, -, *, / takes part,
// so that every machine gives the same bits.
inline double Exponential(uint32_t bits) {
  // 1 - u = m 2^-k with m in [sqrt(1/2), sqrt(2)), exactly, and log m = 2 atanh((m - 1) / (m + 1)):
  // the series to s^11 / 11, whose |s| is below 0.1716. Near u = 0 m - 1 is -u itself.
  double m = 1.0 - (static_cast<double>(bits) + 0.5) * 0x1.0p-32;
  double k = 0.0;
  for (; m < 0.70710678118654752; m *= 2.0) k += 1.0;
  const double s = (m - 1.0) / (m + 1.0);
  const double s2 = s * s;
  double p = 1.0 / 11.0;
  p = p * s2 + 1.0 / 9.0;
  p = p * s2 + 1.0 / 7.0;
  p = p * s2 + 1.0 / 5.0;
  p = p * s2 + 1.0 / 3.0;
  p = p * s2 + 1.0;
  return k * 0.69314718055994531 - 2.0 * s * p;
}

}  // namespace plansmith
