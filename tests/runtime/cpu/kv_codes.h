// The 8-bit codes of KV pools by their definition: every value written out, the nearest one taken.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <stdint.h>

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

// What a pool gives back of x.
inline double HeldKv(uint32_t format, float x, float scale) {
  if (format == kKvF32) return x;
  return CodeValue(format, NearestCode(format, static_cast<double>(x / scale))) *
         static_cast<double>(scale);
}

}  // namespace cpu
}  // namespace plansmith
