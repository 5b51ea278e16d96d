// kOpRoundInput of a row: float32 x [n] to the int8, E4M3 or E2M1 number next to it, as float32, by
// a scale for the row, for each group of it, or a given one. Over the V of the file that includes
// it. Bound by its divisions: QuantizeLinear divides truly, so a product with 1 / s would differ.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cpu/kernels_rows.h"

namespace plansmith {
namespace cpu {
namespace {

// |x|, at most `largest`, to the nearest number of kDigits binary digits, the even one of two.
// Below 2^kMinExponent the steps stay what they are there: subnormal numbers. NaN stays.
template <int kDigits, int kMinExponent>
inline V RoundMagnitude(V x, float largest) {
  const V magnitude = VMin(VSet1(largest), VAbs(x));
  constexpr float kLeast = kMinExponent < 0 ? 1.0f / (1 << -kMinExponent) : 1 << kMinExponent;
  // Added to 1.5 * 2^e, a number keeps the digits from 2^(e - 23) on. The sum of a NaN is one.
  const V power = VMax(VSet1(kLeast), VPowerBelow(magnitude));
  const V magic = VMul(power, VSet1(1.5f * (1 << (24 - kDigits))));
  return VSub(VAdd(magnitude, magic), magic);
}

struct ToInt8 {
  static constexpr float kLargest = 127.0f;
  static V Round(V x) { return RoundToI8(x, -127.0f); }
};
struct ToInt8Static {
  static V Round(V x) { return RoundToI8(x, -128.0f); }
};
struct ToF8 {  // E4M3
  static constexpr float kLargest = 448.0f;
  static V Round(V x) { return VCopySign(RoundMagnitude<4, -6>(x, kLargest), x); }
};
struct ToF4 {  // E2M1
  static constexpr float kLargest = 6.0f;
  static V Round(V x) { return VCopySign(RoundMagnitude<2, 0>(x, kLargest), x); }
};

// out = round(x / scale) * scale; 0 where scale is 0.
template <typename Format>
inline void RoundWith(const float* x, uint32_t n, float scale, float* out) {
  const V s = VSet1(scale);
  ForVectors(n, [&](uint32_t i, uint32_t lanes) {
    const V y = scale == 0.0f ? s : VMul(Format::Round(VDiv(LoadUpTo(x + i, lanes), s)), s);
    StoreUpTo(out + i, y, lanes);
  });
}

// max|x|; NaN where x has a NaN or an infinity.
inline float LargestOrNan(const float* x, uint32_t n) {
  V m = VSet1(0.0f), nothing = m;
  ForVectors(n, [&](uint32_t i, uint32_t lanes) {
    const V v = LoadUpTo(x + i, lanes);
    m = VMax(m, VAbs(v));
    nothing = VFma(v, VSet1(0.0f), nothing);
  });
  return VReduceMax(m) + VReduceAdd(nothing);
}

template <typename Format>
inline void RoundGroups(const float* x, uint32_t n, uint32_t group, float* out) {
  for (uint32_t i = 0; i < n; i += group) {
    RoundWith<Format>(x + i, group, LargestOrNan(x + i, group) / Format::kLargest, out + i);
  }
}

// NVFP4: the scales of groups of 16 are E4M3 times the outer one.
inline void RoundF4(const float* x, uint32_t n, uint32_t group, float outer, float* out) {
  const V per_scale = VSet1(ToF4::kLargest * outer);
  for (uint32_t i = 0; i < n; i += group) {
    float code[kLanes];
    VStore(code, ToF8::Round(VDiv(VSet1(LargestOrNan(x + i, group)), per_scale)));
    RoundWith<ToF4>(x + i, group, code[0] * outer, out + i);
  }
}

void RoundRow(const float* x, uint32_t n, int32_t format, int32_t group, float scale, float* out) {
  const uint32_t columns = group > 0 ? static_cast<uint32_t>(group) : n;
  if (format == kRoundF4) {
    RoundF4(x, n, columns, scale, out);
  } else if (group < 0) {
    (format == kRoundInt8 ? RoundWith<ToInt8Static> : RoundWith<ToF8>)(x, n, scale, out);
  } else {
    (format == kRoundInt8 ? RoundGroups<ToInt8> : RoundGroups<ToF8>)(x, n, columns, out);
  }
}

// The same without the way back. A NaN is one in bfloat16, too: arithmetic sets the fraction's
// highest bit.
inline void StoreF8Codes(const float* x, uint32_t n, float scale, uint16_t* f8) {
  const V s = VSet1(scale);
  ForVectors(n, [&](uint32_t i, uint32_t lanes) {
    uint32_t bits[kLanes];
    const V y = scale == 0.0f ? s : ToF8::Round(VDiv(LoadUpTo(x + i, lanes), s));
    __builtin_memcpy(bits, &y, sizeof(bits));
    for (uint32_t lane = 0; lane < lanes; ++lane) {
      f8[i + lane] = static_cast<uint16_t>(bits[lane] >> 16);
    }
  });
}

void RoundRowF8(const float* x, uint32_t n, int32_t group, float scale, uint16_t* f8,
                float* scales) {
  if (group < 0) return StoreF8Codes(x, n, scale, f8);
  const uint32_t columns = group > 0 ? static_cast<uint32_t>(group) : n;
  for (uint32_t i = 0; i < n; i += columns) {
    *scales = LargestOrNan(x + i, columns) / ToF8::kLargest;
    StoreF8Codes(x + i, columns, *scales++, f8 + i);
  }
}

}  // namespace
}  // namespace cpu
}  // namespace plansmith
