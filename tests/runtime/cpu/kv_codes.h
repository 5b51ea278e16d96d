// What KV pools hold of a number, by the definition of their formats: of 8-bit codes every value is
// written out and the nearest one taken.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <stdint.h>

#include <algorithm>
#include <cmath>

#include "cpu/plan_format.h"

namespace plansmith {
namespace cpu {

// E4M3: a sign, 4 bits of exponent (bias 7), 3 of fraction; exponent 0 is subnormal, all ones NaN.
inline double F8Value(uint8_t code) {
  const int exponent = code >> 3 & 15, fraction = code & 7;
  if (exponent == 15 && fraction == 7) return NAN;
  const double magnitude =
      exponent == 0 ? std::ldexp(fraction, -9) : std::ldexp(8 + fraction, exponent - 10);
  return code >= 0x80 ? -magnitude : magnitude;
}

inline double CodeValue(uint32_t format, uint8_t code) {
  struct Values {
    Values() {
      for (int i = 0; i < 256; ++i) f8[i] = F8Value(static_cast<uint8_t>(i));
    }
    double f8[256];
  };
  static const Values values;
  return format == kKvF8 ? values.f8[code] : static_cast<int8_t>(code);
}

// The code nearest to a number, the even one of two, the last one for what is beyond.
inline uint8_t NearestCode(uint32_t format, double x) {
  if (x != x) return 0x7F;
  x = format == kKvF8 ? std::fmin(std::fmax(x, -448.0), 448.0)
                      : std::fmin(std::fmax(x, -128.0), 127.0);
  int best = -1;
  for (int code = 0; code < 256; ++code) {
    const double gap = std::fabs(CodeValue(format, static_cast<uint8_t>(code)) - x);
    if (gap != gap) continue;
    const bool same_sign =
        format == kKvI8 || std::signbit(x) == (code >= 0x80);  // 0 and -0 are two codes of F8
    if (!same_sign) continue;
    const double least =
        best < 0 ? INFINITY : std::fabs(CodeValue(format, static_cast<uint8_t>(best)) - x);
    if (gap < least || (gap == least && code % 2 == 0)) best = code;
  }
  return static_cast<uint8_t>(best);
}

// The half float nearest to a number, the even one of two: 11 bits from the leading one on, none
// below 2^-24, and nothing finite beyond 65504.
inline double NearestF16(double x) {
  if (!std::isfinite(x) || x == 0) return x;
  const double step = std::ldexp(1.0, std::max(std::ilogb(x), -14) - 10);
  return std::copysign(std::fmin(std::fabs(std::nearbyint(x / step) * step), 65504.0), x);
}

// What a pool gives back of x.
inline double HeldKv(uint32_t format, float x, float scale) {
  if (format == kKvF32) return x;
  if (format == kKvF16) return NearestF16(x);
  return CodeValue(format, NearestCode(format, static_cast<double>(x / scale))) *
         static_cast<double>(scale);
}

}  // namespace cpu
}  // namespace plansmith
