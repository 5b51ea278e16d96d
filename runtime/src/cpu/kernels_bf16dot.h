// FP8 weights by E4M3 numbers as dot products of bfloat16 pairs: both sides are exact in its 8
// digits. Two products a lane and step, so up to twice the rate of float32. For AVX-512 with BF16
// and VBMI.
//
// vdpbf16ps adds the product of the upper halves first, rounds to nearest even after each of its
// two sums, and takes subnormal numbers for 0: there are none, the least product is 2^-18. So the
// sums are those of float32 products in that order, bit for bit.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cpu/simd_avx512.h"
// The vectors above come first: what follows is written over them.
#include "cpu/kernels_linear.h"

namespace plansmith {
namespace cpu {
namespace {

// The bytes of bfloat16 numbers by code, low and high, those of codes from 128 up behind the
// others. constexpr: code that runs when the library is loaded would be of this file's instruction
// set.
struct Bf16Table {
  alignas(64) uint8_t low[256], high[256];
  constexpr void Set(uint32_t code, uint32_t bits) {
    low[code] = static_cast<uint8_t>(bits);
    high[code] = static_cast<uint8_t>(bits >> 8);
  }
};
// n * 2^exponent, n in 0..255
constexpr uint32_t Bf16Bits(uint32_t n, int exponent) {
  if (n == 0) return 0;
  uint32_t power = 0;
  while (n >> (power + 1) != 0) ++power;
  const uint32_t biased = static_cast<uint32_t>(static_cast<int>(power) + exponent + 127);
  return biased << 7 | (n - (1u << power)) << (7 - power);
}
constexpr Bf16Table MakeF8Table() {
  Bf16Table table = {};
  for (uint32_t code = 0; code < 128; ++code) {
    const uint32_t exponent = code >> 3, fraction = code & 7;
    const uint32_t bits = exponent == 0 ? Bf16Bits(fraction, -9)
                                        : Bf16Bits(8 + fraction, static_cast<int>(exponent) - 10);
    table.Set(code, bits);
    table.Set(code + 128, bits | 0x8000);
  }
  return table;
}
constexpr Bf16Table kF8Table = MakeF8Table();

struct BytePair {
  __m512i low, high;
};
// By the 128 entries at `table` for the lower 7 bits of each code.
inline __m512i LookUp128(const uint8_t* table, __m512i codes) {
  return _mm512_permutex2var_epi8(_mm512_load_si512(table), codes, _mm512_load_si512(table + 64));
}
inline BytePair LookUpF8(__m512i codes) {
  const __m512i sign = _mm512_set1_epi8(-128);  // of the higher byte: high | (codes & sign)
  return {LookUp128(kF8Table.low, codes),
          _mm512_ternarylogic_epi32(LookUp128(kF8Table.high, codes), codes, sign, 0xF8)};
}

// Where the bytes of a line [4 k][16 outputs] go, so that the lower and upper halves of 128-bit
// parts put together with their other bytes are k 0 and 1 of each output in a lane, and k 2 and 3.
struct PairOrder {
  constexpr PairOrder() : of() {
    for (uint32_t i = 0; i < 64; ++i) {
      const uint32_t part = i / 16, half = i / 8 % 2, at = i % 8;
      of[i] = static_cast<uint8_t>(16 * (2 * half + at % 2) + 4 * part + at / 2);
    }
  }
  alignas(64) uint8_t of[64];
};
constexpr PairOrder kPairOrder;

template <uint32_t kRows, uint32_t kTiles>
struct Bf16DotBlock {
  static constexpr uint32_t kMaxRows = kRows, kMaxTiles = kTiles, kOneRowTiles = kTiles;
  static constexpr uint32_t kStep = kF8Step, kLineBytes = 64;

  template <uint32_t MR, uint32_t NT>
  [[gnu::always_inline]] static void AddLine(const uint8_t* w, size_t tile_bytes, const uint16_t* x,
                                             size_t x_stride, V (*part)[NT]) {
    __m512i pairs[2][NT];
    for (uint32_t t = 0; t < NT; ++t) {
      const __m512i line = _mm512_loadu_si512(w + t * tile_bytes);
      const __m512i order = _mm512_load_si512(kPairOrder.of);
      const BytePair bytes = LookUpF8(_mm512_permutexvar_epi8(order, line));
      pairs[0][t] = _mm512_unpacklo_epi8(bytes.low, bytes.high);
      pairs[1][t] = _mm512_unpackhi_epi8(bytes.low, bytes.high);
    }
    for (uint32_t p = 0; p < 2; ++p) {
      for (uint32_t r = 0; r < MR; ++r) {
        int32_t two;
        __builtin_memcpy(&two, x + r * x_stride + 2 * p, sizeof(two));
        const __m512i xk = _mm512_set1_epi32(two);
        for (uint32_t t = 0; t < NT; ++t) {
          part[r][t] = _mm512_dpbf16_ps(part[r][t], (__m512bh)pairs[p][t], (__m512bh)xk);
        }
      }
    }
  }

  template <uint32_t MR, uint32_t NT>
  static void Run(const LinearArgs& a, uint32_t row, uint32_t tile) {
    const size_t tile_bytes = static_cast<size_t>(a.w.padded_cols) * kTile;
    const uint8_t* w = static_cast<const uint8_t*>(a.w.data) + tile * tile_bytes;
    ReadAhead<kLineBytes, kStep, MR, NT> ahead(w, tile_bytes);
    const size_t num_groups = a.w.num_groups;
    const uint16_t* x = a.f8 + row * a.f8_stride;
    const float* scales = static_cast<const float*>(a.w.scales) + tile * num_groups * kTile;
    V sum[MR][NT];
    Clear(sum);
    for (size_t g = 0; g < num_groups; ++g) {
      V part[MR][NT];
      Clear(part);
      for (uint32_t k = 0; k < a.w.group_cols; k += kStep, w += kLineBytes, x += kStep) {
        ahead.NextLine();
        AddLine<MR, NT>(w, tile_bytes, x, a.f8_stride, part);
      }
      for (uint32_t r = 0; r < MR; ++r) {
        const V scale = VSet1(RowScale(a, row + r, static_cast<uint32_t>(g)));
        for (uint32_t t = 0; t < NT; ++t) {
          const V ws = VLoad(scales + (t * num_groups + g) * kTile);
          sum[r][t] = VFma(VMul(part[r][t], scale), ws, sum[r][t]);
        }
      }
    }
    for (uint32_t r = 0; r < MR; ++r) {
      for (uint32_t t = 0; t < NT; ++t) Finish(a, row + r, tile + t, &sum[r][t]);
    }
  }

 private:
  template <uint32_t MR, uint32_t NT>
  static void Clear(V (&sums)[MR][NT]) {
    for (auto& of_row : sums) {
      for (V& sum : of_row) sum = VSet1(0.0f);
    }
  }
};

}  // namespace
}  // namespace cpu
}  // namespace plansmith
