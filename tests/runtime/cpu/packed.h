// Matrices packed as the plan format says, beside the numbers that they stand for.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <stdint.h>
#include <string.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "check.h"
#include "cpu/kernels.h"
#include "cpu/plan.h"
#include "cpu/plan_format.h"
#include "kv_codes.h"

namespace plansmith {
namespace cpu {

inline uint16_t ToBf16(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof(bits));
  return static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}
inline double Bf16Value(uint16_t code) {
  const uint32_t bits = static_cast<uint32_t>(code) << 16;
  float r;
  memcpy(&r, &bits, sizeof(r));
  return r;
}

// A half float: a sign, 5 bits of exponent (bias 15), 10 of fraction.
inline double F16Value(uint16_t code) {
  const int exponent = code >> 10 & 31, fraction = code & 1023;
  const double magnitude = exponent == 31  ? (fraction == 0 ? INFINITY : NAN)
                           : exponent == 0 ? std::ldexp(fraction, -24)
                                           : std::ldexp(1024 + fraction, exponent - 25);
  return code >= 0x8000 ? -magnitude : magnitude;
}
inline uint16_t ToF16(float x) {  // of what half floats can hold
  const double size = std::fabs(static_cast<double>(x));
  const int exponent = size < std::ldexp(1, -14) ? -14 : std::ilogb(size);
  const long steps = std::lrint(std::ldexp(size, 10 - exponent));  // 1024 of them are 2^exponent
  return static_cast<uint16_t>((std::signbit(x) ? 0x8000 : 0) + ((exponent + 14) << 10) + steps);
}

// E2M1: a sign, 2 bits of exponent (bias 1), 1 of fraction.
inline double F4Value(uint32_t code) {
  const double magnitudes[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  return code >= 8 ? -magnitudes[code - 8] : magnitudes[code];
}

// The nearest of a RoundFormat's values, of two the one with the even code; the last one beyond
// them. NaN stays.
inline double NearestValue(int32_t format, double x, double lowest_int8) {
  if (x != x) return x;
  if (format == kRoundInt8) return std::nearbyint(std::fmin(std::fmax(x, lowest_int8), 127));
  if (format == kRoundF8) return F8Value(NearestCode(kKvF8, x));
  uint32_t best = 0;
  for (uint32_t code = 1; code < 8; ++code) {
    const double gap = std::fabs(F4Value(code) - std::fabs(x));
    const double least = std::fabs(F4Value(best) - std::fabs(x));
    if (gap < least || (gap == least && code % 2 == 0)) best = code;
  }
  return std::copysign(F4Value(best), x);
}

// A code of the nearest magnitude among values(0), values(1), ... values(last), which go up.
template <typename Values>
uint32_t NearestMagnitude(double x, uint32_t last, Values&& values) {
  uint32_t low = 0, high = last;
  while (high - low > 1) {
    const uint32_t middle = (low + high) / 2;
    (values(middle) <= std::fabs(x) ? low : high) = middle;
  }
  return std::fabs(x) - values(low) <= values(high) - std::fabs(x) ? low : high;
}
inline uint8_t ToF8(double x) {
  const auto value = [](uint32_t code) { return F8Value(static_cast<uint8_t>(code)); };
  return static_cast<uint8_t>(NearestMagnitude(x, 0x7E, value) + (std::signbit(x) ? 0x80 : 0));
}
inline uint32_t ToF4(double x) {
  return NearestMagnitude(x, 7, F4Value) + (std::signbit(x) ? 8 : 0);
}

// A matrix packed as the plan format says, and what it stands for.
struct Packed {
  TensorRecord record = {};
  std::vector<uint8_t> data;
  std::vector<float> scales;          // F32, where neither of the others is there
  std::vector<uint8_t> f8_scales;     // of F4
  std::vector<uint16_t> bf16_scales;  // where record.scale_dtype says so; `scales` holds them, too
  std::vector<float> zeros;
  std::vector<double> values;  // [N][K] after quantization

  PackedMatrix Matrix() const {
    const PaddedShape shape = PaddedShapeOf(record);
    PackedMatrix m = {};
    m.dtype = record.dtype;
    m.rows = record.rows;
    m.cols = record.cols;
    m.padded_cols = static_cast<uint32_t>(shape.cols);
    m.num_groups = static_cast<uint32_t>(shape.num_groups);
    m.group_cols = record.group_size != 0 ? record.group_size : m.padded_cols;
    m.data = data.data();
    m.scales = ScaleBytes() != 0 ? ScaleData() : nullptr;
    m.scale_dtype = record.scale_dtype;
    m.zeros = zeros.empty() ? nullptr : zeros.data();
    m.outer_scale = record.outer_scale;
    return m;
  }
  const void* ScaleData() const {
    if (!f8_scales.empty()) return f8_scales.data();
    return bf16_scales.empty() ? static_cast<const void*>(scales.data()) : bf16_scales.data();
  }
  size_t ScaleBytes() const {
    if (!f8_scales.empty()) return f8_scales.size();
    return bf16_scales.empty() ? scales.size() * 4 : bf16_scales.size() * 2;
  }
};

inline bool IsQuantized(uint32_t dtype) { return dtype >= kI8 && dtype != kF16; }

// Puts one code at (row, column) of a matrix whose padding is done.
inline void PutCode(Packed* p, size_t row, size_t k, uint32_t code) {
  const TensorRecord& r = p->record;
  const size_t padded = PaddedShapeOf(r).cols, tile = row / kTile, lane = row % kTile;
  if (r.layout == kPackedN16K4 || r.layout == kPackedN16K8) {
    const size_t step = r.layout == kPackedN16K4 ? 4 : 8;
    uint8_t* byte = p->data.data() + (tile * (padded / step) + k / step) * 64 + lane * 4 + k % 4;
    const int shift = k % 8 < 4 ? 0 : 4;
    *byte = static_cast<uint8_t>(step == 4 ? code : (*byte & ~(15 << shift)) | (code << shift));
    return;
  }
  const size_t at = r.layout == kRowMajor ? row * r.cols + k : (tile * padded + k) * kTile + lane;
  const size_t bytes = r.dtype == kF32 ? 4 : r.dtype == kF8 ? 1 : 2;
  memcpy(p->data.data() + at * bytes, &code, bytes);  // little-endian
}

// A group's scale (and zero point) and the codes of its columns [first, end) of a row.
inline void PackGroup(Packed* p, const std::vector<float>& w, size_t row, size_t first, size_t end,
                      size_t scale_at, bool with_zeros) {
  const TensorRecord& r = p->record;
  const float* x = w.data() + row * r.cols;
  const float low = *std::min_element(x + first, x + end);
  const float high = *std::max_element(x + first, x + end);
  const float largest = std::fmax(std::fabs(low), std::fabs(high));
  float scale = 1, zero = 8;
  if (r.dtype == kF4) {
    p->f8_scales[scale_at] = ToF8(largest / 6 / r.outer_scale);
    scale = static_cast<float>(F8Value(p->f8_scales[scale_at])) * r.outer_scale;
  } else if (IsQuantized(r.dtype)) {
    scale = largest / (r.dtype == kI8 ? 127.0f : r.dtype == kF8 ? 448.0f : 7.0f);
    if (with_zeros) {
      scale = (std::fmax(high, 0.0f) - std::fmin(low, 0.0f)) / 15;
      zero = scale > 0 ? std::nearbyint(-std::fmin(low, 0.0f) / scale) : 8;
      p->zeros[scale_at] = zero;
    }
    if (r.scale_dtype == kBF16) {  // rounded before the codes are made
      p->bf16_scales[scale_at] = ToBf16(scale);
      scale = static_cast<float>(Bf16Value(p->bf16_scales[scale_at]));
    }
    p->scales[scale_at] = scale;
  }
  for (size_t k = first; k < end; ++k) {
    const float in_scale = scale > 0 ? x[k] / scale : 0;
    uint32_t code = 0;
    double value = 0;
    switch (r.dtype) {
      case kF32:
        memcpy(&code, &x[k], 4);
        value = x[k];
        break;
      case kBF16:
        code = ToBf16(x[k]);
        value = Bf16Value(static_cast<uint16_t>(code));
        break;
      case kF16:
        code = ToF16(x[k]);
        value = F16Value(static_cast<uint16_t>(code));
        break;
      case kI8:
        value = std::fmin(std::fmax(std::nearbyint(in_scale), -127), 127);
        code = static_cast<uint8_t>(static_cast<int>(value));
        break;
      case kI4:
        code = static_cast<uint32_t>(std::fmin(std::fmax(std::nearbyint(in_scale) + zero, 0), 15));
        value = code - static_cast<double>(zero);
        break;
      case kF8:
        code = ToF8(in_scale);
        value = F8Value(static_cast<uint8_t>(code));
        break;
      default:
        code = ToF4(in_scale);
        value = F4Value(code);
    }
    PutCode(p, row, k, code);
    // The stored scale of F4 is a product that is not rounded.
    const double exact = r.dtype == kF4
                             ? F8Value(p->f8_scales[scale_at]) * static_cast<double>(r.outer_scale)
                             : scale;
    p->values[row * r.cols + k] = value * exact;
  }
}

// w [n, k] rounded to `dtype` with a scale for each group_size columns (0: for a row), of
// scale_dtype.
inline Packed PackMatrix(const std::vector<float>& w, uint32_t n, uint32_t k, uint32_t dtype,
                         uint32_t group_size = 0, bool row_major = false, bool with_zeros = false,
                         uint32_t scale_dtype = kF32) {
  Packed p;
  const uint32_t layouts[kNumDTypes] = {kPackedN16, kPackedN16, kPackedN16K4, kPackedN16K8,
                                        kPackedN16, kPackedN16, kPackedN16K8};
  p.record.dtype = dtype;
  p.record.layout = row_major ? static_cast<uint32_t>(kRowMajor) : layouts[dtype];
  p.record.rows = n;
  p.record.cols = k;
  p.record.group_size = group_size;
  p.record.outer_scale = 1;
  p.values.resize(static_cast<size_t>(n) * k);
  const PaddedShape shape = PaddedShapeOf(p.record);
  p.data.assign(DataBytesOf(p.record), dtype == kI4 ? 0x88 : 0);
  const size_t num_scales = shape.rows * shape.num_groups;
  if (dtype == kF4) {
    float largest = 0;
    for (float x : w) largest = std::fmax(largest, std::fabs(x));
    if (largest > 0) p.record.outer_scale = largest / (6 * 448);
    p.f8_scales.assign(num_scales, 0);
    p.record.scale_dtype = kF8;
  } else if (IsQuantized(dtype)) {
    p.scales.assign(num_scales, 0.0f);
    p.record.scale_dtype = scale_dtype;
    if (scale_dtype == kBF16) p.bf16_scales.assign(num_scales, 0);
  }
  if (with_zeros) p.zeros.assign(num_scales, 8.0f);
  const size_t group = group_size == 0 ? k : group_size;
  CHECK(k % group == 0);
  for (size_t row = 0; row < n; ++row) {
    for (size_t first = 0; first < k; first += group) {
      const size_t at = (row / kTile * shape.num_groups + first / group) * kTile + row % kTile;
      PackGroup(&p, w, row, first, first + group, at, with_zeros);
    }
  }
  return p;
}

}  // namespace cpu
}  // namespace plansmith
