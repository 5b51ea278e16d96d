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
    printf("%s: ok\n", kernels->name);
  }
  return 0;
}
