// Row kernels over the V of the file that includes it: quantization, normalization, rotation,
// activations. All are bound by the few KB of a row that lie in L1, so plain loops over vectors
// suffice.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cpu/kernels.h"
#include "cpu/kernels_tile.h"
#include "cpu/simd_math.h"
#if defined(__AVX512F__)
#include "cpu/kernels_quantize_avx512.h"
#endif

namespace plansmith {
namespace cpu {
namespace {

// Calls body(offset, lanes) over 0..n.
template <typename Body>
inline void ForVectors(uint32_t n, Body&& body) {
  uint32_t i = 0;
  for (; i + kLanes <= n; i += kLanes) body(i, kLanes);
  if (i < n) body(i, n - i);
}

// To -127..127, or from -128 with a given scale. A NaN stays: the bounds come first.
inline V RoundToI8(V x, float lowest) {
  return VRound(VMax(VSet1(lowest), VMin(VSet1(127.0f), x)));
}

// Sum of the quantized values: sums of integers below 2^24 are exact in float32. NaN when x / scale
// is one anywhere: for a NaN, and for an infinity that made the scale.
inline float QuantizePart(const float* x, uint32_t n, float scale, float lowest, int8_t* q) {
  V sum = VSet1(0.0f);
  const V divisor = VSet1(scale == 0.0f ? 1.0f : scale), used = VSet1(scale == 0.0f ? 0.0f : 1.0f);
  ForVectors(n, [&](uint32_t i, uint32_t lanes) {
    const V x_used = VMul(LoadUpTo(x + i, lanes), used);
    const V y = RoundToI8(VDiv(x_used, divisor), lowest);
    VStoreI8(q + i, y, lanes);
    sum = VAdd(sum, y);
  });
  return VReduceAdd(sum);
}

inline float LargestOf(const float* x, uint32_t n) {
  V m = VSet1(0.0f);
  ForVectors(n, [&](uint32_t i, uint32_t lanes) { m = VMax(m, VAbs(LoadUpTo(x + i, lanes))); });
  return VReduceMax(m);
}

void QuantizeRow(const float* x, uint32_t n, uint32_t padded, uint32_t num_scales,
                 uint32_t num_sums, int8_t* q, float* scales, int32_t* sums) {
  const uint32_t part = n / num_scales, sum_part = n / num_sums;
  for (uint32_t g = 0; g < num_scales; ++g) {
#if defined(__AVX512F__)
    if (num_scales == num_sums &&
        QuantizeGroup(x + g * part, part, q + g * part, scales + g, sums + g))
      continue;
#endif
    const float scale = scales[g] = LargestOf(x + g * part, part) / 127.0f;
    // The part's sums: one, or all of them under the one scale.
    const uint32_t end = num_scales == 1 ? num_sums : g + 1;
    for (uint32_t s = g; s < end; ++s) {
      const float sum = QuantizePart(x + s * sum_part, sum_part, scale, -127.0f, q + s * sum_part);
      const bool is_nan = sum != sum;
      if (is_nan) scales[g] = sum;
      sums[s] = is_nan ? 0 : static_cast<int32_t>(sum);
    }
  }
  for (uint32_t i = n; i < padded; ++i) q[i] = 0;
}

void QuantizeRowStatic(const float* x, uint32_t n, uint32_t padded, float scale, uint32_t num_sums,
                       int8_t* q, float* scales, int32_t* sums) {
  const uint32_t part = n / num_sums;
  *scales = scale;
  for (uint32_t s = 0; s < num_sums; ++s) {
    const float sum = QuantizePart(x + s * part, part, scale, -128.0f, q + s * part);
    const bool is_nan = sum != sum;
    if (is_nan) *scales = sum;
    sums[s] = is_nan ? 0 : static_cast<int32_t>(sum);
  }
  for (uint32_t i = n; i < padded; ++i) q[i] = 0;
}

void RmsNorm(const float* x, const float* weight, uint32_t n, float epsilon, float* out) {
  V sum = VSet1(0.0f);
  ForVectors(n, [&](uint32_t i, uint32_t lanes) {
    const V v = LoadUpTo(x + i, lanes);
    sum = VFma(v, v, sum);
  });
  const float mean = VReduceAdd(sum) / static_cast<float>(n);
  const V factor = VSet1(1.0f / __builtin_sqrtf(mean + epsilon));
  ForVectors(n, [&](uint32_t i, uint32_t lanes) {
    const V v = VMul(VMul(LoadUpTo(x + i, lanes), factor), LoadUpTo(weight + i, lanes));
    StoreUpTo(out + i, v, lanes);
  });
}

void Rope(float* x, const float* cos, const float* sin, uint32_t half) {
  ForVectors(half, [&](uint32_t i, uint32_t lanes) {
    const V a = LoadUpTo(x + i, lanes), b = LoadUpTo(x + half + i, lanes);
    const V c = LoadUpTo(cos + i, lanes), s = LoadUpTo(sin + i, lanes);
    StoreUpTo(x + i, VSub(VMul(a, c), VMul(b, s)), lanes);
    StoreUpTo(x + half + i, VAdd(VMul(b, c), VMul(a, s)), lanes);
  });
}

template <typename Act>
inline void GluWith(const float* gate, const float* up, uint32_t n, float* out, Act&& act) {
  ForVectors(n, [&](uint32_t i, uint32_t lanes) {
    StoreUpTo(out + i, VMul(act(LoadUpTo(gate + i, lanes)), LoadUpTo(up + i, lanes)), lanes);
  });
}

void Glu(const float* gate, const float* up, uint32_t n, int32_t activation, float* out) {
  if (activation == kSilu) {
    GluWith(gate, up, n, out, [](V x) { return VMul(x, VSigmoid(x)); });
  } else if (activation == kGeluTanh) {
    GluWith(gate, up, n, out, [](V x) {
      const V cubed = VMul(VMul(x, x), x);
      const V inner = VMul(VSet1(0.7978845608f), VFma(VSet1(0.044715f), cubed, x));
      return VMul(VMul(VSet1(0.5f), x), VAdd(VSet1(1.0f), VTanh(inner)));
    });
  } else {
    GluWith(gate, up, n, out, [](V x) {
      const V erf = VErf(VMul(x, VSet1(0.7071067812f)));
      return VMul(VMul(VSet1(0.5f), x), VAdd(VSet1(1.0f), erf));
    });
  }
}

void Add(const float* a, const float* b, uint32_t n, float* out) {
  ForVectors(n, [&](uint32_t i, uint32_t lanes) {
    StoreUpTo(out + i, VAdd(LoadUpTo(a + i, lanes), LoadUpTo(b + i, lanes)), lanes);
  });
}

void Mul(const float* a, const float* b, uint32_t n, float* out) {
  ForVectors(n, [&](uint32_t i, uint32_t lanes) {
    StoreUpTo(out + i, VMul(LoadUpTo(a + i, lanes), LoadUpTo(b + i, lanes)), lanes);
  });
}

void Softcap(float* x, uint32_t n, float cap) {
  ForVectors(n, [&](uint32_t i, uint32_t lanes) {
    const V y = VDiv(LoadUpTo(x + i, lanes), VSet1(cap));
    StoreUpTo(x + i, VMul(VSet1(cap), VTanh(y)), lanes);
  });
}

void Scale(float* x, uint32_t n, float factor) {
  ForVectors(n, [&](uint32_t i, uint32_t lanes) {
    StoreUpTo(x + i, VMul(LoadUpTo(x + i, lanes), VSet1(factor)), lanes);
  });
}

}  // namespace
}  // namespace cpu
}  // namespace plansmith
