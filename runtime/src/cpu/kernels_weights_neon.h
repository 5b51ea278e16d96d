// Weights of every type decoded in registers, 16 outputs (four vectors) at a time: the `Weights` of
// FloatBlock (kernels_linear.h) for NEON.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cpu/kernels_linear.h"
#include "cpu/simd_neon.h"

namespace plansmith {
namespace cpu {
namespace {

struct F32Weights : OneColumn, NoScales {
  static constexpr uint32_t kLineBytes = 64;
  static void Next(const Line* line, V* w) {
    const float* p = reinterpret_cast<const float*>(*line);
    for (uint32_t h = 0; h < kTileVectors; ++h) w[h] = vld1q_f32(p + h * kLanes);
  }
};

struct HalfFloats : OneColumn, NoScales {
  static constexpr uint32_t kLineBytes = 32;
  static uint16x8_t Half(const Line* line, uint32_t h) {
    return vld1q_u16(reinterpret_cast<const uint16_t*>(*line) + h * 8);
  }
};
struct Bf16Weights : HalfFloats {
  static void Next(const Line* line, V* w) {
    for (uint32_t h = 0; h < 2; ++h) {
      const uint16x8_t half = Half(line, h);
      w[2 * h] = vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(half), 16));
      w[2 * h + 1] = vreinterpretq_f32_u32(vshll_n_u16(vget_high_u16(half), 16));
    }
  }
};
inline void WidenHalf(uint16x8_t half, V* w) {
  w[0] = vcvt_f32_f16(vreinterpret_f16_u16(vget_low_u16(half)));
  w[1] = vcvt_f32_f16(vreinterpret_f16_u16(vget_high_u16(half)));
}
struct F16Weights : HalfFloats {
  static void Next(const Line* line, V* w) {
    for (uint32_t h = 0; h < 2; ++h) WidenHalf(Half(line, h), w + 2 * h);
  }
};
// An E4M3 code shifted into a half float is its value / 256, subnormal ones too.
struct F8Weights : OneColumn, F8Scales {
  static constexpr uint32_t kLineBytes = 16;
  static void Next(const Line* line, V* w) {
    const int8x16_t codes = vreinterpretq_s8_u8(vld1q_u8(*line));
    const uint16x8_t mask = vdupq_n_u16(0xBFFF);  // the sign is there twice
    const int16x8_t low = vshll_n_s8(vget_low_s8(codes), 7);
    const int16x8_t high = vshll_n_s8(vget_high_s8(codes), 7);
    WidenHalf(vandq_u16(vreinterpretq_u16_s16(low), mask), w);
    WidenHalf(vandq_u16(vreinterpretq_u16_s16(high), mask), w + 2);
  }
};

struct FourVectors {
  uint32x4_t of[4];
};
struct LineOf64 {
  static constexpr uint32_t kLineBytes = 64;
  using Line = FourVectors;
  static Line Load(const uint8_t* p) {
    Line line;
    for (uint32_t h = 0; h < 4; ++h) line.of[h] = vreinterpretq_u32_u8(vld1q_u8(p + 16 * h));
    return line;
  }
};
// The highest kBits of each lane as a signed number / 2^kFraction; the next ones move up.
template <int kBits, int kFraction = 0>
inline void TakeSigned(FourVectors* line, V* w) {
  for (uint32_t h = 0; h < 4; ++h) {
    const int32x4_t code = vshrq_n_s32(vreinterpretq_s32_u32(line->of[h]), 32 - kBits);
    w[h] =
        kFraction > 0 ? vcvtq_n_f32_s32(code, kFraction > 0 ? kFraction : 1) : vcvtq_f32_s32(code);
    line->of[h] = vshlq_n_u32(line->of[h], kBits);
  }
}
// Four k in a 32-bit lane, from the highest.
struct I8Weights : LineOf64, FloatScales {
  static constexpr uint32_t kStep = 4;
  static uint32_t Column(uint32_t i) { return 3 - i; }
  static void Next(Line* line, V* w) { TakeSigned<8>(line, w); }
};
// A code is the value + 8: with its highest bit turned over, a number of 4 bits in two's
// complement. From the highest: k0+7, k0+3, k0+6, k0+2, ...
struct I4Weights : LineOf64, FloatScales {
  static constexpr uint32_t kStep = 8;
  static uint32_t Column(uint32_t i) { return 7 - NibbleColumns::Column(i); }
  static Line Load(const uint8_t* p) {
    Line line = LineOf64::Load(p);
    for (uint32x4_t& v : line.of) v = veorq_u32(v, vdupq_n_u32(0x88888888u));
    return line;
  }
  static void Next(Line* line, V* w) { TakeSigned<4>(line, w); }
};
struct I4ZeroWeights : LineOf64, FloatScales {
  static constexpr uint32_t kStep = 8;
  static constexpr bool kHasZeros = true;
  static uint32_t Column(uint32_t i) { return 7 - NibbleColumns::Column(i); }
  static void Next(Line* line, V* w) {
    for (uint32_t h = 0; h < 4; ++h) {
      w[h] = vcvtq_f32_u32(vshrq_n_u32(line->of[h], 28));
      line->of[h] = vshlq_n_u32(line->of[h], 4);
    }
  }
};
// Twice a value is an integer: a table makes bytes of all nibbles of a line, those of the first
// four k and those of the last.
struct F4Weights : F4Scales {
  static constexpr uint32_t kStep = 8, kLineBytes = 64;
  struct Line {
    FourVectors high, low;
    uint32_t taken;
  };
  // k0+7, k0+6, k0+5, k0+4 of the high nibbles, then those of the low ones.
  static uint32_t Column(uint32_t i) { return 7 - i; }
  static Line Load(const uint8_t* p) {
    const int8_t twice[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
    const int8x16_t table = vld1q_s8(twice);
    Line line;
    for (uint32_t h = 0; h < 4; ++h) {
      const uint8x16_t both = vld1q_u8(p + 16 * h);
      const int8x16_t low = vqtbl1q_s8(table, vandq_u8(both, vdupq_n_u8(15)));
      line.low.of[h] = vreinterpretq_u32_s8(low);
      line.high.of[h] = vreinterpretq_u32_s8(vqtbl1q_s8(table, vshrq_n_u8(both, 4)));
    }
    line.taken = 0;
    return line;
  }
  static void Next(Line* line, V* w) {
    TakeSigned<8, 1>(line->taken++ < 4 ? &line->high : &line->low, w);
  }
};

}  // namespace
}  // namespace cpu
}  // namespace plansmith
