// Weights of every type decoded in plain C++, 16 outputs (two vectors) at a time: the `Weights` of
// FloatBlock (kernels_linear.h).
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cpu/kernels_linear.h"
#include "cpu/simd_portable.h"
#include "cpu/small_floats.h"

namespace plansmith {
namespace cpu {
namespace {

// w = value(output) of the 16 outputs.
template <typename Value>
inline void DecodeTile(V* w, Value&& value) {
  for (uint32_t h = 0; h < kTileVectors; ++h) {
    w[h] = VMake([&](uint32_t i) { return value(h * kLanes + i); });
  }
}

struct F32Weights : OneColumn, NoScales {
  static constexpr uint32_t kLineBytes = 64;
  static void Next(const Line* line, V* w) {
    const float* p = reinterpret_cast<const float*>(*line);
    for (uint32_t h = 0; h < kTileVectors; ++h) w[h] = VLoad(p + h * kLanes);
  }
};
struct Bf16Weights : OneColumn, NoScales {
  static constexpr uint32_t kLineBytes = 32;
  static void Next(const Line* line, V* w) {
    const uint16_t* p = reinterpret_cast<const uint16_t*>(*line);
    DecodeTile(w, [&](uint32_t i) { return Bf16ToFloat(p[i]); });
  }
};
struct F16Weights : OneColumn, NoScales {
  static constexpr uint32_t kLineBytes = 32;
  static void Next(const Line* line, V* w) {
    const uint16_t* p = reinterpret_cast<const uint16_t*>(*line);
    DecodeTile(w, [&](uint32_t i) { return F16ToFloat(p[i]); });
  }
};
// The values / 256 of all E4M3 codes: looking one up is faster than making it.
struct F8Values {
  F8Values() {
    for (uint32_t code = 0; code < 256; ++code)
      of[code] = F8ToFloat256th(static_cast<uint8_t>(code));
  }
  float of[256];
};
const F8Values kF8Values;
struct F8Weights : OneColumn, F8Scales {
  static constexpr uint32_t kLineBytes = 16;
  static void Next(const Line* line, V* w) {
    const uint8_t* p = *line;
    DecodeTile(w, [&](uint32_t i) { return kF8Values.of[p[i]]; });
  }
};

// A line of 64 bytes, 4 of each output.
struct PackedLine {
  const uint8_t* bytes;
  uint32_t next;
};
struct LineOf64 {
  static constexpr uint32_t kLineBytes = 64;
  using Line = PackedLine;
  static Line Load(const uint8_t* p) { return {p, 0}; }
  static uint32_t Column(uint32_t i) { return i; }
};
struct I8Weights : LineOf64, FloatScales {
  static constexpr uint32_t kStep = 4;
  static void Next(Line* line, V* w) {
    const int8_t* p = reinterpret_cast<const int8_t*>(line->bytes) + line->next++;
    DecodeTile(w, [&](uint32_t i) { return static_cast<float>(p[i * 4]); });
  }
};
template <typename Decode>
struct NibbleWeights : LineOf64 {
  static constexpr uint32_t kStep = 8;
  static void Next(Line* line, V* w) {
    const uint8_t* p = line->bytes + line->next % 4;
    const uint32_t shift = line->next++ / 4 * 4;
    DecodeTile(w, [&](uint32_t i) { return Decode::Value((p[i * 4] >> shift) & 15); });
  }
};
struct DecodeI4 {
  static float Value(int code) { return static_cast<float>(code - 8); }
};
struct DecodeCode {
  static float Value(int code) { return static_cast<float>(code); }
};
struct DecodeF4 {
  static float Value(int code) {
    constexpr float kValues[] = {0,     0.5f,  1,  1.5f,  2,  3,  4,  6,
                                 -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};
    return kValues[code];
  }
};
struct I4Weights : NibbleWeights<DecodeI4>, FloatScales {};
struct I4ZeroWeights : NibbleWeights<DecodeCode>, FloatScales {
  static constexpr bool kHasZeros = true;
};
struct F4Weights : NibbleWeights<DecodeF4>, F4Scales {};

}  // namespace
}  // namespace cpu
}  // namespace plansmith
