// FP8 weights by int8 or E4M3 codes as dot products of bfloat16 pairs: both sides are exact in its
// 8 digits. Two products a lane and step, so up to twice the rate of float32. For AVX-512 with BF16
// and VBMI.
//
// vdpbf16ps rounds to nearest even after each of its two sums and takes subnormal numbers for 0:
// there are none, the least product is 2^-18.
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
constexpr Bf16Table MakeInt8Table() {
  Bf16Table table = {};
  for (uint32_t code = 0; code < 128; ++code) {
    table.Set(code, Bf16Bits(code, 0));
    table.Set(code + 128, Bf16Bits(128 - code, 0) | 0x8000);
  }
  return table;
}
constexpr Bf16Table kF8Table = MakeF8Table(), kInt8Table = MakeInt8Table();

struct BytePair {
  __m512i low, high;
};
// By the 128 entries at `table` for the lower 7 bits of each code.
inline __m512i LookUp128(const uint8_t* table, __m512i codes) {
  return _mm512_permutex2var_epi8(_mm512_load_si512(table), codes, _mm512_load_si512(table + 64));
}
inline BytePair LookUp256(const Bf16Table& table, __m512i codes) {
  const __mmask64 upper = _mm512_movepi8_mask(codes);
  const auto look_up = [&](const uint8_t* of) {
    return _mm512_mask_mov_epi8(LookUp128(of, codes), upper, LookUp128(of + 128, codes));
  };
  return {look_up(table.low), look_up(table.high)};
}
inline BytePair LookUpF8(__m512i codes) {
  const __m512i sign = _mm512_set1_epi8(-128);  // of the higher byte: high | (codes & sign)
  return {LookUp128(kF8Table.low, codes),
          _mm512_ternarylogic_epi32(LookUp128(kF8Table.high, codes), codes, sign, 0xF8)};
}

// Where the bytes of 64 codes go, so that the lower and upper halves of 128-bit parts put together
// with their other bytes are
//   in order    numbers 0..31 and 32..63
//   in pairs    of a line [4 k][16 outputs], k 0 and 1 of each output in a lane, and k 2 and 3
struct ByteOrders {
  constexpr ByteOrders() : in_order(), in_pairs() {
    for (uint32_t i = 0; i < 64; ++i) {
      const uint32_t part = i / 16, half = i / 8 % 2, at = i % 8;
      in_order[i] = static_cast<uint8_t>(32 * half + 8 * part + at);
      in_pairs[i] = static_cast<uint8_t>(16 * (2 * half + at % 2) + 4 * part + at / 2);
    }
  }
  alignas(64) uint8_t in_order[64], in_pairs[64];
};
constexpr ByteOrders kByteOrders;

template <uint32_t kRows, uint32_t kTiles>
struct Bf16DotBlock {
  static constexpr uint32_t kMaxRows = kRows, kMaxTiles = kTiles, kOneRowTiles = kTiles;
  // Columns of x that are turned into bfloat16 at a time: 4 KiB of L1 for 8 rows.
  static constexpr uint32_t kChunk = 256;
  static constexpr uint32_t kStep = 4, kLineBytes = 64;

  // Codes [0, n) as bfloat16, zeros behind them up to a multiple of 64.
  static void Widen(const LinearArgs& a, const int8_t* codes, uint32_t n, uint16_t* to) {
    const Bf16Table& table = a.q_format == kRoundF8 ? kF8Table : kInt8Table;
    for (uint32_t i = 0; i < n; i += 64) {
      const __mmask64 mask = n - i < 64 ? (1ull << (n - i)) - 1 : ~0ull;
      const __m512i line = _mm512_maskz_loadu_epi8(mask, codes + i);
      const __m512i order = _mm512_load_si512(kByteOrders.in_order);
      const BytePair bytes = LookUp256(table, _mm512_permutexvar_epi8(order, line));
      _mm512_store_si512(to + i, _mm512_unpacklo_epi8(bytes.low, bytes.high));
      _mm512_store_si512(to + i + 32, _mm512_unpackhi_epi8(bytes.low, bytes.high));
    }
  }

  template <uint32_t MR, uint32_t NT>
  [[gnu::always_inline]] static void AddLine(const __m512i* lines, const uint16_t (*x)[kChunk],
                                             uint32_t column, V (*part)[NT]) {
    __m512i pairs[2][NT];
    for (uint32_t t = 0; t < NT; ++t) {
      const __m512i order = _mm512_load_si512(kByteOrders.in_pairs);
      const BytePair bytes = LookUpF8(_mm512_permutexvar_epi8(order, lines[t]));
      pairs[0][t] = _mm512_unpacklo_epi8(bytes.low, bytes.high);
      pairs[1][t] = _mm512_unpackhi_epi8(bytes.low, bytes.high);
    }
    for (uint32_t p = 0; p < 2; ++p) {
      for (uint32_t r = 0; r < MR; ++r) {
        int32_t two;
        __builtin_memcpy(&two, &x[r][column + 2 * p], sizeof(two));
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
    const uint32_t cols = num_groups == 1 ? a.w.cols : a.w.group_cols;
    const int8_t* q = a.q + row * a.q_stride;
    const float* scales = static_cast<const float*>(a.w.scales) + tile * num_groups * kTile;
    V sum[MR][NT];
    for (size_t g = 0; g < num_groups; ++g) {
      V part[MR][NT];
      for (auto& of_row : part) {
        for (V& p : of_row) p = VSet1(0.0f);
      }
      for (uint32_t k = 0; k < cols; k += kChunk) {
        alignas(64) uint16_t x[MR][kChunk];
        const uint32_t n = cols - k < kChunk ? cols - k : kChunk;
        for (uint32_t r = 0; r < MR; ++r) Widen(a, q + r * a.q_stride, n, x[r]);
        __m512i lines[NT];
        uint32_t column = 0;
        for (; column + kStep <= n; column += kStep, w += kLineBytes) {
          ahead.NextLine();
          for (uint32_t t = 0; t < NT; ++t) lines[t] = _mm512_loadu_si512(w + t * tile_bytes);
          AddLine<MR, NT>(lines, x, column, part);
        }
        if (column < n) {  // of one group alone: it is the end of the row
          const __mmask64 mask = (1ull << (n - column) * kTile) - 1;
          for (uint32_t t = 0; t < NT; ++t) {
            lines[t] = _mm512_maskz_loadu_epi8(mask, w + t * tile_bytes);
          }
          AddLine<MR, NT>(lines, x, column, part);
        }
        q += n;
      }
      for (uint32_t r = 0; r < MR; ++r) {
        const V scale = VSet1(RowScale(a, row + r, static_cast<uint32_t>(g)));
        for (uint32_t t = 0; t < NT; ++t) {
          const V scaled = VMul(part[r][t], scale);
          const V ws = VLoad(scales + (t * num_groups + g) * kTile);
          sum[r][t] = g == 0 ? VMul(scaled, ws) : VFma(scaled, ws, sum[r][t]);
        }
      }
    }
    for (uint32_t r = 0; r < MR; ++r) {
      for (uint32_t t = 0; t < NT; ++t) Finish(a, row + r, tile + t, &sum[r][t]);
    }
  }
};

}  // namespace
}  // namespace cpu
}  // namespace plansmith
