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
  bool by_group;
};

// The input of one product, quantized where the weights want it.
struct Input {
  std::vector<float> x;
  std::vector<int8_t> q;
  std::vector<float> scales;
  std::vector<int32_t> sums;
};

Input MakeInput(const KernelTable& kernels, const PackedMatrix& w, uint32_t rows, bool by_group,
                std::vector<float> x, size_t q_stride) {
  Input in;
  in.x = std::move(x);
  if (w.scales == nullptr) return in;
  const uint32_t q_groups = by_group ? w.num_groups : 1;
  in.q.assign(rows * q_stride, 77);
  in.scales.resize(rows * q_groups);
  in.sums.resize(rows * w.num_groups);
  for (uint32_t r = 0; r < rows; ++r) {
    kernels.quantize_row(in.x.data() + r * w.cols, w.cols, static_cast<uint32_t>(q_stride),
                         q_groups, w.num_groups, in.q.data() + r * q_stride,
                         in.scales.data() + r * q_groups, in.sums.data() + r * w.num_groups);
  }
  return in;
}

double InputValue(const Input& in, const PackedMatrix& w, uint32_t q_groups, size_t q_stride,
                  uint32_t r, uint32_t k) {
  if (w.scales == nullptr) return in.x[r * w.cols + k];
  const float scale = in.scales[r * q_groups + (q_groups == 1 ? 0 : k / w.group_cols)];
  return static_cast<double>(in.q[r * q_stride + k]) * scale;
}

void CheckQuantization(const Input& in, const PackedMatrix& w, uint32_t rows, uint32_t q_groups,
                       size_t q_stride) {
  for (uint32_t r = 0; r < rows; ++r) {
    std::vector<int64_t> sums(w.num_groups, 0);
    for (uint32_t k = 0; k < q_stride; ++k) {
      const int q = in.q[r * q_stride + k];
      if (k >= w.cols) {
        CHECK(q == 0);
        continue;
      }
      CHECK(q >= -127 && q <= 127);
      sums[k / w.group_cols] += q;
      const double scale = in.scales[r * q_groups + (q_groups == 1 ? 0 : k / w.group_cols)];
      CHECK(std::fabs(q * scale - in.x[r * w.cols + k]) <= 0.50001 * scale);
    }
    for (uint32_t g = 0; g < w.num_groups; ++g) CHECK(in.sums[r * w.num_groups + g] == sums[g]);
  }
}

void RunCase(const KernelTable& kernels, const Case& c, uint32_t rows, bool bias, bool accumulate,
             Random* random) {
  const Packed packed =
      PackMatrix(random->Floats(static_cast<size_t>(c.n) * c.k), c.n, c.k, c.dtype, c.group_size);
  const PackedMatrix w = packed.Matrix();
  const size_t q_stride = (w.padded_cols + 63) / 64 * 64;
  const uint32_t q_groups = c.by_group ? w.num_groups : 1;
  const Input in = MakeInput(kernels, w, rows, c.by_group,
                             random->Floats(static_cast<size_t>(rows) * c.k, 3.0f), q_stride);
  if (w.scales != nullptr) CheckQuantization(in, w, rows, q_groups, q_stride);
  const std::vector<float> biases = random->Floats(c.n);
  const size_t out_stride = c.n + 5;
  const std::vector<float> before = random->Floats(rows * out_stride);
  std::vector<float> out = before;
  LinearArgs args = {};
  args.w = w;
  args.x = in.x.data();
  args.x_stride = c.k;
  args.q = in.q.data();
  args.q_stride = q_stride;
  args.q_scales = in.scales.data();
  args.q_sums = in.sums.data();
  args.q_groups = q_groups;
  args.bias = bias ? biases.data() : nullptr;
  args.out = out.data();
  args.out_stride = out_stride;
  args.accumulate = accumulate;
  const uint32_t tiles = (c.n + kTile - 1) / kTile;
  const LinearKernel kernel =
      (w.scales != nullptr ? kernels.linear_int8 : kernels.linear_float)[c.dtype];
  kernel(args, 0, rows, 0, tiles);

  // Sums of products in float32, K (or the groups, after exact integer sums) of them one after
  // another.
  const double steps = (c.dtype >= kI8 ? 3.0 * w.num_groups : c.k) + 4;
  for (uint32_t r = 0; r < rows; ++r) {
    for (uint32_t n = 0; n < c.n; ++n) {
      double sum = 0, size = 0;
      for (uint32_t k = 0; k < c.k; ++k) {
        const double p = InputValue(in, w, q_groups, q_stride, r, k) *
                         packed.values[static_cast<size_t>(n) * c.k + k];
        sum += p;
        size += std::fabs(p);
      }
      if (bias) sum += biases[n];
      if (accumulate) sum += before[r * out_stride + n];
      const double allowed = steps * std::ldexp(1.0, -24) * (size + 2);
      if (!(std::fabs(sum - out[r * out_stride + n]) <= allowed)) {
        fprintf(stderr, "%s dtype %u %ux%u group %u rows %u: [%u,%u] is %g, wanted %g +- %g\n",
                kernels.name, c.dtype, c.n, c.k, c.group_size, rows, r, n, out[r * out_stride + n],
                sum, allowed);
        exit(1);
      }
    }
    for (size_t n = c.n; n < out_stride; ++n) {
      CHECK(out[r * out_stride + n] ==
            before[r * out_stride + n]);  // nothing written beside the view
    }
  }
  // A row alone, and a tile alone, have the same bits.
  for (uint32_t r = 0; r < rows; ++r) {
    std::vector<float> alone = before;
    args.out = alone.data();
    for (uint32_t t = 0; t < tiles; ++t) kernel(args, r, r + 1, t, t + 1);
    CHECK(memcmp(alone.data() + r * out_stride, out.data() + r * out_stride, c.n * sizeof(float)) ==
          0);
  }
}

// The largest products of int8 and int4 must not saturate anywhere.
void CheckExtremes(const KernelTable& kernels) {
  for (uint32_t dtype : {kI8, kI4}) {
    for (int sign : {-1, 1}) {
      const uint32_t n = 16, k = 512;
      std::vector<float> weights(n * k, static_cast<float>(sign));
      const std::vector<float> x(k, -1.0f);
      Packed packed = PackMatrix(weights, n, k, dtype);
      double weight = sign;
      if (sign < 0) {  // what rounding to nearest never makes, but the types hold: -128 and -8
        packed.data.assign(packed.data.size(), dtype == kI8 ? 0x80 : 0x00);
        weight = dtype == kI8 ? -128 / 127.0 : -8 / 7.0;
      }
      const PackedMatrix w = packed.Matrix();
      const Input in = MakeInput(kernels, w, 1, false, x, k);
      std::vector<float> out(n);
      LinearArgs args = {};
      args.w = w;
      args.q = in.q.data();
      args.q_stride = k;
      args.q_scales = in.scales.data();
      args.q_sums = in.sums.data();
      args.q_groups = 1;
      args.out = out.data();
      args.out_stride = n;
      kernels.linear_int8[dtype](args, 0, 1, 0, 1);
      for (float y : out) CHECK(std::fabs(y + weight * k) < 1e-3 * k);
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
        kernels.quantize_row(x.data(), 40, 64, 4, 4, q.data(), scales.data(), sums.data());
        for (uint32_t g = 0; g < 4; ++g) CHECK(std::isnan(scales[g]) == (g == at / 10));
      }
    }
  }
}

}  // namespace

int main() {
  const Case cases[] = {
      {kF32, 16, 64, 0, false},  {kF32, 50, 37, 0, false},  {kF32, 7, 1, 0, false},
      {kBF16, 33, 65, 0, false}, {kBF16, 96, 48, 0, false}, {kI8, 50, 37, 0, false},
      {kI8, 112, 64, 0, false},  {kI8, 17, 3, 0, false},    {kI8, 40, 96, 32, false},
      {kI8, 40, 96, 12, true},   {kI4, 50, 37, 0, false},   {kI4, 48, 576, 0, false},
      {kI4, 40, 96, 32, false},  {kI4, 70, 256, 64, true},  {kI4, 21, 72, 24, true},
      {kI4, 16, 8, 8, false},
  };
  for (const KernelTable* kernels : UsableTables()) {
    Random random(7);
    for (const Case& c : cases) {
      for (uint32_t rows = 1; rows <= 37; rows += rows < 10 ? 1 : 9) {
        RunCase(*kernels, c, rows, rows % 2 == 0, rows % 3 == 0, &random);
      }
    }
    CheckExtremes(*kernels);
    CheckZerosAndNan(*kernels);
    printf("%s: ok\n", kernels->name);
  }
  return 0;
}
