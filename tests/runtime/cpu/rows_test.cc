// Row kernels of every instruction set against float64, at all lengths up to some vectors and a
// tail.
//
// SPDX-License-Identifier: Apache-2.0
#include "isas.h"
#include "plan_builder.h"

using namespace plansmith::cpu;

namespace {

constexpr uint32_t kLengths[] = {1, 2, 7, 8, 9, 15, 16, 17, 31, 33, 64, 100};

// |got - want| in units of the last place of `want`, but not below 1e-30.
double Ulps(double got, double want) {
  if (got == want) return 0;
  const double ulp = std::ldexp(1.0, std::ilogb(std::fmax(std::fabs(want), 1e-30)) - 23);
  return std::fabs(got - want) / ulp;
}

void CheckNear(const char* isa, const char* what, double got, double want, double allowed) {
  if (std::fabs(got - want) <= allowed) return;
  fprintf(stderr, "%s %s: %.9g, wanted %.9g +- %g\n", isa, what, got, want, allowed);
  exit(1);
}

double Act(int32_t activation, double x) {
  switch (activation) {
    case kSilu:
      return x / (1 + std::exp(-x));
    case kGeluTanh:
      return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
    default:
      return 0.5 * x * std::erfc(-x / std::sqrt(2.0));
  }
}

void CheckGlu(const KernelTable& kernels) {
  const char* names[] = {"silu", "gelu_tanh", "gelu_erf"};
  for (int32_t activation = 0; activation < 3; ++activation) {
    double worst = 0;
    for (double x = -20; x < 20; x += 0.00137) {
      const float gate = static_cast<float>(x), up = 1.5f;
      float out;
      kernels.glu(&gate, &up, 1, activation, &out);
      const double want = Act(activation, gate) * up;
      // The gelus add 1 to a number near -1 on the left: the error is one of 1's last place times
      // x.
      const double allowed =
          std::fabs(want) * 6e-7 + (activation == kSilu ? 1e-37 : std::fabs(x) * 2e-7);
      CheckNear(kernels.name, names[activation], out, want, allowed);
      if (std::fabs(want) > 0.1 && (x > 0 || activation == kSilu))
        worst = std::fmax(worst, Ulps(out, want));
    }
    printf("%s %s: %.1f ulp\n", kernels.name, names[activation], worst);
    CHECK(worst < 8);
    const float wild[] = {-100, -1000, 1000, 0};
    const float ups[] = {1, 1, 1, 1};
    float out[4];
    kernels.glu(wild, ups, 4, activation, out);
    CHECK(std::fabs(out[1]) < 1e-34 && out[2] == 1000 && out[3] == 0);
    const float nan = NAN;
    kernels.glu(&nan, ups, 1, activation, out);
    CHECK(std::isnan(out[0]));
  }
}

void CheckSoftcap(const KernelTable& kernels) {
  double worst = 0;
  for (double x = -300; x < 300; x += 0.0173) {
    float y = static_cast<float>(x);
    const double want = 30 * std::tanh(static_cast<double>(y) / 30);
    kernels.softcap(&y, 1, 30.0f);
    worst = std::fmax(worst, Ulps(y, want));
  }
  CHECK(worst < 5);
}

void CheckLengths(const KernelTable& kernels, uint32_t n, Random* random) {
  const std::vector<float> a = random->Floats(n, 4), b = random->Floats(n, 4);
  std::vector<float> out(n + 1, 9.0f);
  kernels.add(a.data(), b.data(), n, out.data());
  for (uint32_t i = 0; i < n; ++i) CHECK(out[i] == a[i] + b[i]);
  CHECK(out[n] == 9.0f);
  kernels.mul(a.data(), b.data(), n, out.data());
  for (uint32_t i = 0; i < n; ++i) CHECK(out[i] == a[i] * b[i]);
  CHECK(out[n] == 9.0f);

  double squares = 0;
  for (float x : a) squares += static_cast<double>(x) * x;
  kernels.rms_norm(a.data(), b.data(), n, 1e-5f, out.data());
  for (uint32_t i = 0; i < n; ++i) {
    const double want = a[i] / std::sqrt(squares / n + 1e-5) * b[i];
    CheckNear(kernels.name, "rms_norm", out[i], want, 1e-6 * std::fabs(want) + 1e-30);
  }
  CHECK(out[n] == 9.0f);

  std::vector<float> in_place = a;
  kernels.scale(in_place.data(), n, 0.3f);
  for (uint32_t i = 0; i < n; ++i) CHECK(in_place[i] == a[i] * 0.3f);

  for (int32_t activation = 0; activation < 3; ++activation) {
    kernels.glu(a.data(), b.data(), n, activation, out.data());
    for (uint32_t i = 0; i < n; ++i) {
      CheckNear(kernels.name, "glu", out[i], Act(activation, a[i]) * b[i], 4e-6);
      float alone;  // the same bits wherever in a vector the number stands
      kernels.glu(&a[i], &b[i], 1, activation, &alone);
      CHECK(alone == out[i]);
    }
    CHECK(out[n] == 9.0f);
  }

  std::vector<float> x = random->Floats(2 * n, 2);
  const std::vector<float> before = x;
  kernels.rope(x.data(), a.data(), b.data(), n);
  for (uint32_t i = 0; i < n; ++i) {
    const double x1 = before[i], x2 = before[n + i];
    CheckNear(kernels.name, "rope", x[i], x1 * a[i] - x2 * b[i], 3e-6);
    CheckNear(kernels.name, "rope", x[n + i], x2 * a[i] + x1 * b[i], 3e-6);
  }
}

void CheckEmbedding() {
  Random random(5);
  for (uint32_t dtype = 0; dtype < kNumDTypes; ++dtype) {
    // One group, or groups of 24 (of F4 16) with small scales; packed or row-major; without and
    // with zero points.
    for (int variant = 0; variant < (dtype == kI4 ? 4 : 2); ++variant) {
      const bool row_major = variant == 1 && !IsQuantized(dtype);
      const uint32_t n = 37, k = dtype == kF4 ? 80 : 72;
      const uint32_t group = IsQuantized(dtype) && variant % 2 == 1 ? 24 : 0;
      const bool integer = dtype == kI8 || dtype == kI4;
      const uint32_t scales = integer && variant % 2 == 1 ? kBF16 : kF32;
      const Packed p = PackMatrix(random.Floats(n * k), n, k, dtype, dtype == kF4 ? 16 : group,
                                  row_major, variant >= 2, scales);
      std::vector<float> out(k);
      for (uint32_t row = 0; row < n; ++row) {
        DequantizeRow(p.Matrix(), p.record.layout, row, 2.5f, out.data());
        for (uint32_t i = 0; i < k; ++i) {
          const double want = 2.5 * p.values[row * k + i];
          CheckNear("embedding", "row", out[i], want, std::fabs(want) * 2e-7);
        }
      }
    }
  }
}

// Groups by themselves, of lengths that kernels have loops of their own for and others; scales that
// are subnormal are coarse, so that codes beyond 127 are possible.
void CheckQuantizedGroups(const KernelTable& kernels, Random* random) {
  constexpr uint32_t kGroups = 9;
  for (uint32_t n : {8u, 32u, 48u, 64u, 128u}) {
    std::vector<float> x = random->Floats(static_cast<size_t>(kGroups) * n);
    const float factors[kGroups] = {1, 0, 1e-30f, 1e30f, 3e-42f, 1e-37f, 1e-44f, 1, 127};
    for (uint32_t i = 0; i < kGroups * n; ++i) x[i] *= factors[i / n];
    x[7 * n + n / 2] = NAN;
    std::vector<int8_t> q(x.size() + 16, 1);
    float scales[kGroups];
    int32_t sums[kGroups];
    kernels.quantize_row(x.data(), kGroups * n, kGroups * n + 8, kGroups, kGroups, q.data(), scales,
                         sums);
    for (uint32_t g = 0; g < kGroups; ++g) {
      if (g == 7) {
        CHECK(std::isnan(scales[g]));
        continue;
      }
      float most = 0;
      for (uint32_t i = 0; i < n; ++i) most = std::fmax(most, std::fabs(x[g * n + i]));
      const float scale = most / 127.0f;
      CHECK(scales[g] == scale);
      int32_t sum = 0;
      for (uint32_t i = 0; i < n; ++i) {
        const float y = scale == 0 ? 0.0f : x[g * n + i] / scale;
        const float code = std::nearbyint(std::fmin(std::fmax(y, -127.0f), 127.0f));
        CHECK(q[g * n + i] == code);
        sum += static_cast<int32_t>(code);
      }
      CHECK(sums[g] == sum);
    }
    for (uint32_t i = 0; i < 16; ++i) CHECK(q[kGroups * n + i] == (i < 8 ? 0 : 1));
  }
}

}  // namespace

int main() {
  for (const KernelTable* kernels : UsableTables()) {
    Random random(3);
    for (uint32_t n : kLengths) CheckLengths(*kernels, n, &random);
    CheckGlu(*kernels);
    CheckSoftcap(*kernels);
    CheckQuantizedGroups(*kernels, &random);
    printf("%s: ok\n", kernels->name);
  }
  CheckEmbedding();
  return 0;
}
