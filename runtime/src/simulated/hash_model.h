// What a simulated model computes: a hash for each position instead of K and V, and logits made
// from it.
//
// Like attention, the hash of a position depends on its token, on the position before it and on
// some earlier ones that the hash itself chooses, all read back through the block table. So a wrong
// block, a stale position or a copy that came too late changes this token or one of the next.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace plansmith {
namespace simulated {

constexpr int kNumAttended = 2;  // earlier positions besides the one before

// Two rounds of xor-shift and multiply over odd constants: every bit of both reaches all 64.
inline uint64_t Mix(uint64_t a, uint64_t b) {
  uint64_t x = a ^ (b * 0x9E3779B97F4A7C15u + 0x632BE59BD9B4E019u);
  x = (x ^ (x >> 32)) * 0xD6E8FEB86659FD93u;
  x = (x ^ (x >> 32)) * 0xD6E8FEB86659FD93u;
  return x ^ (x >> 32);
}

// The hash of `position`, which holds `token`; never 0, which marks a position nobody has written.
// read(p) gives the hash of an earlier position; adapter is 0 or what an adapter is known by.
template <typename Read>
uint64_t HashAt(uint64_t seed, uint64_t adapter, int32_t position, int32_t token, Read&& read) {
  const uint64_t model = Mix(seed, adapter);
  uint64_t hash = Mix(position == 0 ? model : read(position - 1), static_cast<uint64_t>(token));
  hash = Mix(hash, model);
  for (int i = 0; i < kNumAttended && position > 0; ++i) {
    const uint64_t q = (hash >> 32) * static_cast<uint64_t>(position) >> 32;
    hash = Mix(hash, read(static_cast<int32_t>(q)));
  }
  return hash | 1;
}

// In [0, 1), 24 bits: exact in a float.
inline float UnitFloat(uint64_t hash) { return static_cast<float>(hash >> 40) * 0x1p-24f; }

inline int32_t BestToken(uint64_t hash, int32_t vocab_size) {
  return static_cast<int32_t>((hash >> 32) * static_cast<uint64_t>(vocab_size) >> 32);
}

// row: [V]. One clear best token, 2 to 6 above the rest, and noise of [0, 4) on all: greedy is
// never close, and at temperature 1 with V = 64 about a fifth of the draws take another token.
inline void FillRow(uint64_t hash, int32_t vocab_size, float* row) {
  for (int32_t id = 0; id < vocab_size; ++id)
    row[id] = 4.0f * UnitFloat(Mix(hash, static_cast<uint64_t>(id)));
  row[BestToken(hash, vocab_size)] += 6.0f;
}

}  // namespace simulated
}  // namespace plansmith
