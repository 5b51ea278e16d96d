// Matrix products of every instruction set and weight type against float64, at odd sizes, and row
// by row.
//
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "isas.h"
#include "plan_builder.h"

using namespace plansmith::cpu;

namespace {

struct Case {
  uint32_t dtype, n, k, group_size;
  LinearInput input = kInputFloat;
  bool with_zeros = false;
};

bool IsF8(LinearInput kind) { return kind >= kInputF8Row; }
bool IsGroup(LinearInput kind) { return kind == kInputInt8Group || kind == kInputF8Group; }

constexpr float kStaticScale = 0.02f;  // saturates inputs beyond +-2.5

// The input of one product, quantized where the case wants it.
struct Input {
  LinearInput kind;
  uint32_t q_groups;
  std::vector<float> x;
  std::vector<int8_t> q;
  std::vector<uint16_t> f8;  // with q's stride
  std::vector<float> scales;
  std::vector<int32_t> sums;
};

Input MakeInput(const KernelTable& kernels, const PackedMatrix& w, uint32_t rows, const Case& c,
                std::vector<float> x, size_t q_stride) {
  const LinearInput kind = c.input;
  Input in;
  in.kind = kind;
  in.q_groups = IsGroup(kind) ? w.num_groups : kind == kInputF8Static ? 0 : 1;
  in.x = std::move(x);
  if (kind == kInputFloat) return in;
  const uint32_t q_groups = in.q_groups;
  in.q.assign(rows * q_stride, 77);
  // What lies behind a row's columns must not matter.
  in.f8.assign(rows * q_stride, 0x7FC0);
  in.scales.assign(std::max(rows * q_groups, 1u), kStaticScale);
  in.sums.resize(rows * w.num_groups);
  for (uint32_t r = 0; r < rows; ++r) {
    const float* row = in.x.data() + r * w.cols;
    int8_t* q = in.q.data() + r * q_stride;
    float* scales = in.scales.data() + r * q_groups;
    int32_t* sums = in.sums.data() + r * w.num_groups;
    const uint32_t padded = static_cast<uint32_t>(q_stride);
    if (IsF8(kind)) {
      const uint32_t group = q_groups == 0 ? w.cols : w.cols / q_groups;
      kernels.round_row_f8(row, w.cols, q_groups == 0 ? -1 : static_cast<int32_t>(group),
                           kStaticScale, in.f8.data() + r * q_stride, scales);
    } else if (kind == kInputInt8Static) {
      kernels.quantize_row_static(row, w.cols, padded, kStaticScale, w.num_groups, q, scales, sums);
    } else {
      kernels.quantize_row(row, w.cols, padded, q_groups, w.num_groups, q, scales, sums);
    }
  }
  return in;
}

float ScaleOf(const Input& in, const PackedMatrix& w, uint32_t r, uint32_t k) {
  return in.scales[r * in.q_groups + (in.q_groups <= 1 ? 0 : k / w.group_cols)];
}

double InputValue(const Input& in, const PackedMatrix& w, size_t q_stride, uint32_t r, uint32_t k) {
  if (in.kind == kInputFloat) return in.x[r * w.cols + k];
  const size_t at = r * q_stride + k;
  return (IsF8(in.kind) ? Bf16Value(in.f8[at]) : in.q[at]) * ScaleOf(in, w, r, k);
}

// Each is the E4M3 number that x / scale, a float, rounds to, and round_row's number by the scale.
void CheckF8Rounding(const KernelTable& kernels, const Input& in, const PackedMatrix& w,
                     uint32_t rows, size_t q_stride) {
  const uint32_t part = w.cols / std::max(in.q_groups, 1u);
  for (uint32_t r = 0; r < rows; ++r) {
    std::vector<float> rounded(w.cols);
    kernels.round_row(in.x.data() + r * w.cols, w.cols, kRoundF8,
                      in.q_groups == 0 ? -1 : static_cast<int32_t>(part), kStaticScale,
                      rounded.data());
    for (uint32_t k = 0; k < q_stride; ++k) {
      const uint16_t bits = in.f8[r * q_stride + k];
      if (k >= w.cols) {
        CHECK(bits == 0x7FC0);
        continue;
      }
      const float scale = ScaleOf(in, w, r, k), value = static_cast<float>(Bf16Value(bits));
      CHECK(value == F8Value(ToF8(in.x[r * w.cols + k] / scale)));
      CHECK(value * scale == rounded[k]);
    }
    for (uint32_t g = 0; g < in.q_groups; ++g) {
      float largest = 0;
      for (uint32_t k = 0; k < part; ++k) {
        largest = std::fmax(largest, std::fabs(in.x[r * w.cols + g * part + k]));
      }
      CHECK(in.scales[r * in.q_groups + g] == largest / 448);
    }
  }
}

// Each q is the number that x / scale, a float, rounds to, the even one of two.
void CheckQuantization(const Input& in, const PackedMatrix& w, uint32_t rows, size_t q_stride) {
  const double lowest = in.kind == kInputInt8Static ? -128 : -127;
  for (uint32_t r = 0; r < rows; ++r) {
    std::vector<int64_t> sums(w.num_groups, 0);
    for (uint32_t k = 0; k < q_stride; ++k) {
      const int q = in.q[r * q_stride + k];
      if (k >= w.cols) {
        CHECK(q == 0);
        continue;
      }
      sums[k / w.group_cols] += q;
      const float scale = ScaleOf(in, w, r, k);
      const double ratio = in.x[r * w.cols + k] / scale;
      CHECK(q == std::fmin(std::fmax(std::nearbyint(ratio), lowest), 127));
    }
    for (uint32_t g = 0; in.kind != kInputInt8Static && g < in.q_groups; ++g) {
      const uint32_t part = w.cols / in.q_groups;
      float largest = 0;
      for (uint32_t k = 0; k < part; ++k) {
        largest = std::fmax(largest, std::fabs(in.x[r * w.cols + g * part + k]));
      }
      CHECK(in.scales[r * in.q_groups + g] == largest / 127);
    }
    for (uint32_t g = 0; g < w.num_groups; ++g) CHECK(in.sums[r * w.num_groups + g] == sums[g]);
  }
}

// The portable kernels give the same bits, of weights with one group: they have no fused sums.
void CheckSameEverywhere(LinearArgs args, uint32_t rows, uint32_t tiles,
                         const std::vector<float>& before) {
  if (args.w.num_groups > 1) return;
  const float* got = args.out;
  std::vector<float> out = before;
  args.out = out.data();
  kPortableKernels.linear_f8(args, 0, rows, 0, tiles);
  CHECK(memcmp(got, out.data(), out.size() * sizeof(float)) == 0);
}

LinearKernel KernelOf(const KernelTable& kernels, const Case& c) {
  if (IsF8(c.input)) return kernels.linear_f8;
  return (c.input != kInputFloat ? kernels.linear_int8 : kernels.linear_float)[c.dtype];
}

void RunCase(const KernelTable& kernels, const Case& c, const Packed& packed, uint32_t rows,
             bool bias, bool accumulate, Random* random) {
  const PackedMatrix w = packed.Matrix();
  const size_t q_stride = (w.padded_cols + 63) / 64 * 64;
  const Input in = MakeInput(kernels, w, rows, c,
                             random->Floats(static_cast<size_t>(rows) * c.k, 3.0f), q_stride);
  if (IsF8(c.input)) {
    CheckF8Rounding(kernels, in, w, rows, q_stride);
  } else if (c.input != kInputFloat) {
    CheckQuantization(in, w, rows, q_stride);
  }
  const std::vector<float> biases = random->Floats(c.n);
  const size_t out_stride = c.n + 5;
  const std::vector<float> before = random->Floats(rows * out_stride);
  std::vector<float> out = before;
  LinearArgs args = {};
  args.w = w;
  // What lies beside a row's columns must not matter, not even a NaN.
  const size_t x_stride = c.k + 9;
  std::vector<float> x(rows * x_stride, NAN);
  for (uint32_t r = 0; r < rows; ++r) {
    std::copy_n(in.x.begin() + r * static_cast<ptrdiff_t>(c.k), c.k, &x[r * x_stride]);
  }
  args.x = x.data();
  args.x_stride = x_stride;
  args.q = in.q.data();
  args.q_stride = q_stride;
  args.q_scales = in.scales.data();
  args.q_sums = in.sums.data();
  args.q_groups = in.q_groups;
  args.q_full_range = c.input == kInputInt8Static;
  args.f8 = in.f8.data();
  args.f8_stride = q_stride;
  args.bias = bias ? biases.data() : nullptr;
  args.out = out.data();
  args.out_stride = out_stride;
  args.accumulate = accumulate;
  const uint32_t tiles = (c.n + kTile - 1) / kTile;
  const LinearKernel kernel = KernelOf(kernels, c);
  kernel(args, 0, rows, 0, tiles);

  // Sums of products in float32, K (or the groups, after exact integer sums) of them one after
  // another.
  const bool exact_sums = c.input != kInputFloat && !IsF8(c.input);
  const double steps = (exact_sums ? 0 : c.k) + 3.0 * w.num_groups + 4;
  for (uint32_t r = 0; r < rows; ++r) {
    for (uint32_t n = 0; n < c.n; ++n) {
      double sum = 0, size = 0;
      for (uint32_t k = 0; k < c.k; ++k) {
        const double p =
            InputValue(in, w, q_stride, r, k) * packed.values[static_cast<size_t>(n) * c.k + k];
        sum += p;
        size += std::fabs(p);
      }
      if (bias) sum += biases[n];
      if (accumulate) sum += before[r * out_stride + n];
      const double allowed = steps * std::ldexp(1.0, -24) * (size + 2);
      if (!(std::fabs(sum - out[r * out_stride + n]) <= allowed)) {
        fprintf(stderr,
                "%s dtype %u input %d %ux%u group %u rows %u: [%u,%u] is %g, wanted %g +- %g\n",
                kernels.name, c.dtype, c.input, c.n, c.k, c.group_size, rows, r, n,
                out[r * out_stride + n], sum, allowed);
        exit(1);
      }
    }
    for (size_t n = c.n; n < out_stride; ++n) {
      CHECK(out[r * out_stride + n] ==
            before[r * out_stride + n]);  // nothing written beside the view
    }
  }
  if (IsF8(c.input)) CheckSameEverywhere(args, rows, tiles, before);
  // A row alone, and a tile alone, have the same bits.
  for (uint32_t r = 0; r < rows; ++r) {
    std::vector<float> alone = before;
    args.out = alone.data();
    for (uint32_t t = 0; t < tiles; ++t) kernel(args, r, r + 1, t, t + 1);
    CHECK(memcmp(alone.data() + r * out_stride, out.data() + r * out_stride, c.n * sizeof(float)) ==
          0);
  }
}

// One product of a row of equal numbers with a weight whose data bytes are all `byte`.
float ProductOfExtremes(const KernelTable& kernels, uint32_t dtype, LinearInput kind, uint8_t byte,
                        float x, uint32_t k) {
  Packed packed = PackMatrix(std::vector<float>(16 * k, 1.0f), 16, k, dtype);
  packed.data.assign(packed.data.size(), byte);
  packed.scales.assign(packed.scales.size(), 1.0f);
  const PackedMatrix w = packed.Matrix();
  Case c = {dtype, 16, k, 0};
  c.input = kind;
  const Input in = MakeInput(kernels, w, 1, c, std::vector<float>(k, x), k);
  std::vector<float> out(16);
  LinearArgs args = {};
  args.w = w;
  args.q = in.q.data();
  args.q_stride = k;
  args.q_scales = in.scales.data();
  args.q_sums = in.sums.data();
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
  const Case cases[] = {
      {kF32, 16, 64, 0},
      {kF32, 50, 37, 0},
      {kF32, 7, 1, 0},
      {kBF16, 33, 65, 0},
      {kBF16, 96, 48, 0},
      {kF16, 50, 37, 0},
      {kF16, 112, 64, 0},
      {kF8, 50, 37, 0},
      {kF8, 113, 64, 0},
      {kF8, 7, 1, 0},
      {kF8, 40, 96, 32},
      {kF8, 40, 39, 13},
      {kF8, 18, 5, 1},
      {kF4, 50, 48, 16},
      {kF4, 113, 160, 16},
      {kF4, 7, 16, 16},
      {kI8, 50, 37, 0},
      {kI8, 112, 64, 0},
      {kI8, 17, 3, 0},
      {kI8, 40, 96, 32},
      {kI8, 40, 96, 12},
      {kI4, 50, 37, 0},
      {kI4, 113, 64, 0},
      {kI4, 17, 3, 0},
      {kI4, 40, 96, 32},
      {kI4, 21, 72, 24},
      {kI4, 16, 8, 8},
      {kI4, 50, 37, 0, kInputFloat, true},
      {kI4, 113, 256, 64, kInputFloat, true},
      {kI4, 21, 72, 24, kInputFloat, true},
      {kI8, 50, 37, 0, kInputInt8Row},
      {kI8, 112, 64, 0, kInputInt8Row},
      {kI8, 17, 3, 0, kInputInt8Row},
      {kI8, 40, 96, 32, kInputInt8Row},
      {kI8, 40, 96, 12, kInputInt8Group},
      {kI8, 50, 37, 0, kInputInt8Static},
      {kI8, 112, 64, 0, kInputInt8Static},
      {kI8, 40, 96, 32, kInputInt8Static},
      {kI4, 50, 37, 0, kInputInt8Row},
      {kI4, 48, 576, 0, kInputInt8Row},
      {kI4, 40, 96, 32, kInputInt8Row},
      {kI4, 70, 256, 64, kInputInt8Group},
      {kI4, 21, 72, 24, kInputInt8Group},
      {kI4, 16, 8, 8, kInputInt8Row},
      {kI4, 50, 37, 0, kInputInt8Static},
      {kI4, 70, 256, 64, kInputInt8Static},
      {kI8, 90, 576, 64, kInputInt8Group},
      {kI8, 90, 576, 32, kInputInt8Group},
      {kI8, 112, 256, 128, kInputInt8Group},
      {kI4, 50, 384, 128, kInputInt8Group},
      {kI4, 50, 384, 32, kInputInt8Group},
      {kF8, 50, 36, 0, kInputF8Row},
      {kF8, 113, 64, 0, kInputF8Row},
      {kF8, 7, 4, 0, kInputF8Row},
      {kF8, 48, 576, 0, kInputF8Static},
      {kF8, 113, 1032, 0, kInputF8Static},
      {kF8, 21, 600, 300, kInputF8Row},
      {kF8, 40, 96, 12, kInputF8Group},
      {kF8, 90, 576, 64, kInputF8Group},
      {kF8, 18, 20, 4, kInputF8Static},
  };
  for (const KernelTable* kernels : UsableTables()) {
    Random random(7);
    for (const Case& c : cases) {
      const bool integer = c.dtype == kI8 || c.dtype == kI4;
      for (uint32_t scale_dtype : {kF32, kBF16}) {
        if (scale_dtype == kBF16 && !integer) continue;
        const Packed packed = PackMatrix(random.Floats(static_cast<size_t>(c.n) * c.k), c.n, c.k,
                                         c.dtype, c.group_size, false, c.with_zeros, scale_dtype);
        for (uint32_t rows = 1; rows <= 37; rows += rows < 17 ? 1 : 20) {
          RunCase(*kernels, c, packed, rows, rows % 2 == 0, rows % 3 == 0, &random);
        }
      }
    }
    CheckExtremes(*kernels);
    CheckEveryCode(*kernels);
    CheckF8Codes(*kernels);
    CheckF8Nan(*kernels);
    CheckZerosAndNan(*kernels);
    printf("%s: ok\n", kernels->name);
  }
  return 0;
}
