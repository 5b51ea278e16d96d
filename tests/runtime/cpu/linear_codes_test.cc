// Codes of weights and inputs at their ends: the largest products of int8, every code of a weight
// and every pair of FP8 ones, what is 0, infinite or NaN.
//
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "isas.h"
#include "plan_builder.h"

using namespace plansmith::cpu;

namespace {

constexpr float kStaticScale = 0.02f;  // saturates inputs beyond +-2.5

// One product of a row of equal numbers with a weight whose data bytes are all `byte`.
float ProductOfExtremes(const KernelTable& kernels, uint32_t dtype, LinearInput kind, uint8_t byte,
                        float x, uint32_t k) {
  Packed packed = PackMatrix(std::vector<float>(16 * k, 1.0f), 16, k, dtype);
  packed.data.assign(packed.data.size(), byte);
  packed.scales.assign(packed.scales.size(), 1.0f);
  const std::vector<float> row(k, x);
  std::vector<int8_t> q(k);
  float scale;
  int32_t sum;
  if (kind == kInputInt8Static) {
    kernels.quantize_row_static(row.data(), k, k, kStaticScale, 1, q.data(), &scale, &sum);
  } else {
    kernels.quantize_row(row.data(), k, k, 1, 1, q.data(), &scale, &sum);
  }
  std::vector<float> out(16);
  LinearArgs args = {};
  args.w = packed.Matrix();
  args.q = q.data();
  args.q_stride = k;
  args.q_scales = &scale;
  args.q_sums = &sum;
  args.q_groups = 1;
  args.q_full_range = kind == kInputInt8Static;
  args.out = out.data();
  args.out_stride = 16;
  kernels.linear_int8[dtype](args, 0, 1, 0, 1);
  for (float y : out) CHECK(y == out[0]);
  return out[0];
}

// The largest products of int8 and int4, of the longest sums, must not saturate anywhere.
void CheckExtremes(const KernelTable& kernels) {
  const struct {
    uint32_t dtype;
    uint8_t byte;
    double weight;
  } weights[] = {{kI8, 0x7F, 127}, {kI8, 0x81, -127}, {kI8, 0x80, -128},
                 {kI4, 0xFF, 7},   {kI4, 0x11, -7},   {kI4, 0x00, -8}};
  for (const auto& weight : weights) {
    for (uint32_t k : {64u, 512u, 65536u}) {
      for (float x : {-1.0f, 1.0f}) {
        const double product = weight.weight * x * k;
        const float got =
            ProductOfExtremes(kernels, weight.dtype, kInputInt8Row, weight.byte, x, k);
        CHECK(std::fabs(got - product) <= 1e-6 * std::fabs(product));
        // Far beyond the scale: q = -128 or 127.
        const double q = x < 0 ? -128 : 127;
        const double wanted = q * static_cast<double>(kStaticScale) * weight.weight * k;
        const float saturated =
            ProductOfExtremes(kernels, weight.dtype, kInputInt8Static, weight.byte, x * 1e30f, k);
        CHECK(std::fabs(saturated - wanted) <= 1e-6 * std::fabs(wanted));
      }
    }
  }
}

// The one column of 16 at which x is 1 comes out as the weights' values, for every code there is.
void CheckEveryCode(const KernelTable& kernels) {
  for (uint32_t dtype : {kF16, kF8, kI8, kI4, kF4}) {
    const uint32_t codes = dtype == kF16 ? 65536 : dtype == kF8 || dtype == kI8 ? 256 : 16;
    const uint32_t k = dtype == kF16 || dtype == kF8 ? 1 : 16;
    const bool in_groups = dtype == kF4;
    for (int zero = -1; zero <= (dtype == kI4 ? 15 : -1); ++zero) {
      Packed packed = PackMatrix(std::vector<float>(static_cast<size_t>(codes) * k, 1.0f), codes, k,
                                 dtype, in_groups ? 16 : 0, false, zero >= 0);
      packed.scales.assign(packed.scales.size(), 1.0f);
      packed.f8_scales.assign(packed.f8_scales.size(), 0x38);  // 1
      packed.record.outer_scale = 1.0f;
      packed.zeros.assign(packed.zeros.size(), static_cast<float>(zero));
      for (uint32_t row = 0; row < codes; ++row) {
        for (uint32_t i = 0; i < k; ++i) PutCode(&packed, row, i, (row + i) % codes);
      }
      for (uint32_t i = 0; i < k; ++i) {
        std::vector<float> x(k, 0.0f), out(codes);
        x[i] = 1.0f;
        LinearArgs args = {};
        args.w = packed.Matrix();
        args.x = x.data();
        args.x_stride = k;
        args.out = out.data();
        args.out_stride = codes;
        kernels.linear_float[dtype](args, 0, 1, 0, (codes + kTile - 1) / kTile);
        for (uint32_t row = 0; row < codes; ++row) {
          const uint32_t code = (row + i) % codes;
          const double value = dtype == kF16  ? F16Value(static_cast<uint16_t>(code))
                               : dtype == kF8 ? F8Value(static_cast<uint8_t>(code))
                               : dtype == kI8 ? static_cast<int8_t>(code)
                               : dtype == kF4 ? F4Value(code)
                                              : static_cast<int>(code) - (zero < 0 ? 8 : zero);
          if (dtype == kF8 && value != value) continue;  // no weight is NaN
          CHECK(out[row] == value || (std::isnan(out[row]) && std::isnan(value)));
        }
      }
    }
  }
  // Every scale of F4, subnormal ones too.
  Packed packed = PackMatrix(std::vector<float>(256 * 16, 1.0f), 256, 16, kF4, 16);
  packed.record.outer_scale = 0.75f;
  for (uint32_t row = 0; row < 256; ++row) {
    packed.f8_scales[row] = static_cast<uint8_t>(row);
    for (uint32_t i = 0; i < 16; ++i) PutCode(&packed, row, i, 2);
  }
  const std::vector<float> x(16, 1.0f);
  std::vector<float> out(256);
  LinearArgs args = {};
  args.w = packed.Matrix();
  args.x = x.data();
  args.x_stride = 16;
  args.out = out.data();
  args.out_stride = 256;
  kernels.linear_float[kF4](args, 0, 1, 0, 16);
  for (uint32_t row = 0; row < 256; ++row) {
    const double value = 16 * 0.75 * F8Value(static_cast<uint8_t>(row));
    CHECK(out[row] == value || (std::isnan(out[row]) && std::isnan(value)));
  }
}

// FP8 weights by E4M3 codes: each code by each other, alone in its sum, is exact; a code or a scale
// that is NaN makes all of its row NaN, and of no other.
void CheckF8Codes(const KernelTable& kernels) {
  constexpr uint32_t kCodes = 256;
  Packed packed = PackMatrix(std::vector<float>(16 * kCodes, 1.0f), 16, kCodes, kF8);
  packed.scales.assign(packed.scales.size(), 1.0f);
  for (uint32_t n = 0; n < 16; ++n) {
    for (uint32_t k = 0; k < kCodes; ++k) PutCode(&packed, n, k, (k + n) % kCodes);
  }
  std::vector<uint16_t> f8(2 * kCodes, 0);
  std::vector<float> out(2 * 16), scales = {1.0f, 1.0f};
  LinearArgs args = {};
  args.w = packed.Matrix();
  args.f8 = f8.data();
  args.f8_stride = kCodes;
  args.q_scales = scales.data();
  args.q_groups = 1;
  args.out = out.data();
  args.out_stride = 16;
  for (uint32_t code = 0; code < kCodes; ++code) {
    const double x = F8Value(static_cast<uint8_t>(code));
    if (x != x) continue;
    for (uint32_t k = 0; k < kCodes; ++k) {
      f8[k] = ToBf16(static_cast<float>(x));
      kernels.linear_f8(args, 0, 1, 0, 1);
      f8[k] = 0;
      for (uint32_t n = 0; n < 16; ++n) {
        const double w = F8Value(static_cast<uint8_t>(k + n));
        CHECK(w != w || out[n] == x * w);  // no weight is NaN
      }
    }
  }
  f8[kCodes + 9] = 0x7FC0;
  kernels.linear_f8(args, 0, 2, 0, 1);
  for (uint32_t n = 0; n < 16; ++n) CHECK(out[n] == 0 && std::isnan(out[16 + n]));
  f8[kCodes + 9] = 0;
  scales[1] = NAN;
  kernels.linear_f8(args, 0, 2, 0, 1);
  for (uint32_t n = 0; n < 16; ++n) CHECK(out[n] == 0 && std::isnan(out[16 + n]));
}

// A NaN or an infinity makes all of its group NaN, an infinity is saturated by a scale that it did
// not make; zeros have the scale 0.
void CheckF8Nan(const KernelTable& kernels) {
  constexpr uint32_t kN = 40;
  std::vector<uint16_t> f8(kN);
  for (float bad : {NAN, -NAN, INFINITY, -INFINITY, 0.0f}) {
    for (uint32_t at = 0; at < kN; ++at) {
      std::vector<float> x(kN, bad == 0 ? 0.0f : 1.0f), scales(4, -1.0f);
      x[at] = bad;
      kernels.round_row_f8(x.data(), kN, 10, 1, f8.data(), scales.data());
      for (uint32_t g = 0; g < 4; ++g) {
        const float wanted = bad == 0 ? 0 : 1.0f / 448;
        CHECK(g == at / 10 && bad != 0 ? std::isnan(scales[g]) : scales[g] == wanted);
        if (bad == 0) CHECK(f8[g * 10] == 0);
      }
      kernels.round_row_f8(x.data(), kN, -1, 1, f8.data(), nullptr);
      const double rounded = Bf16Value(f8[at]);
      CHECK(std::isnan(bad) ? std::isnan(rounded)
                            : rounded == (bad == 0 ? 0 : copysignf(448, bad)));
    }
  }
}

void CheckZerosAndNan(const KernelTable& kernels) {
  std::vector<float> x(40, 0.0f);
  std::vector<int8_t> q(64);
  float scale = 1;
  int32_t sum = 1;
  kernels.quantize_row(x.data(), 40, 64, 1, 1, q.data(), &scale, &sum);
  CHECK(scale == 0 && sum == 0);
  for (int8_t v : q) CHECK(v == 0);
  // A NaN or an infinity anywhere, beside large and tiny numbers, makes the scale of its part NaN.
  for (float other : {1.0f, 1e-35f}) {
    for (float bad : {NAN, -NAN, INFINITY, -INFINITY}) {
      for (uint32_t at = 0; at < 40; ++at) {
        std::fill(x.begin(), x.end(), other);
        x[at] = bad;
        std::vector<float> scales(4, 0.0f);
        std::vector<int32_t> sums(4);
        kernels.quantize_row(x.data(), 40, 64, 1, 1, q.data(), scales.data(), sums.data());
        CHECK(std::isnan(scales[0]));
        scales[0] = 0;
        kernels.quantize_row(x.data(), 40, 64, 1, 4, q.data(), scales.data(), sums.data());
        CHECK(std::isnan(scales[0]));
        if (std::isnan(bad)) {  // an infinity is saturated by a scale that it did not make
          scales[0] = 0;
          kernels.quantize_row_static(x.data(), 40, 64, 0.1f, 4, q.data(), scales.data(),
                                      sums.data());
          CHECK(std::isnan(scales[0]));
        }
        kernels.quantize_row(x.data(), 40, 64, 4, 4, q.data(), scales.data(), sums.data());
        for (uint32_t g = 0; g < 4; ++g) CHECK(std::isnan(scales[g]) == (g == at / 10));
      }
    }
  }
}

}  // namespace

int main() {
  for (const KernelTable* kernels : UsableTables()) {
    CheckExtremes(*kernels);
    CheckEveryCode(*kernels);
    CheckF8Codes(*kernels);
    CheckF8Nan(*kernels);
    CheckZerosAndNan(*kernels);
    printf("%s: ok\n", kernels->name);
  }
  return 0;
}
