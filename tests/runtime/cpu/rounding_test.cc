// Rounded inputs against the formats by their definition: every value of E4M3 and E2M1, the
// midpoints between them and the floats beside those, scales from the input itself, what is no
// number.
//
// SPDX-License-Identifier: Apache-2.0
#include "isas.h"
#include "kv_codes.h"
#include "packed.h"
#include "plan_builder.h"

using namespace plansmith::cpu;

namespace {

const char* const kFormatNames[] = {"int8", "f8", "f4"};

bool Same(float a, double b) { return a == b || (std::isnan(a) && std::isnan(b)); }

// What kOpRoundInput makes of one group, the quotients and scales in float32 as it says.
std::vector<double> RoundedGroup(const std::vector<float>& x, int32_t format, bool is_static,
                                 float scale) {
  float s = scale;
  if (!is_static) {
    float largest = 0;
    for (float v : x) {
      largest = std::isfinite(v) && !std::isnan(largest) ? std::fmax(largest, std::fabs(v)) : NAN;
    }
    if (format == kRoundF4) {
      const float per_scale = 6.0f * scale, ratio = largest / per_scale;
      s = static_cast<float>(F8Value(NearestCode(kKvF8, ratio))) * scale;
    } else {
      s = largest / (format == kRoundInt8 ? 127.0f : 448.0f);
    }
  }
  std::vector<double> out;
  for (float v : x) {
    const float ratio = v / s;
    const double value = NearestValue(format, ratio, is_static ? -128 : -127);
    out.push_back(s == 0 ? 0 : static_cast<float>(value) * s);
  }
  return out;
}

void Compare(const char* isa, int32_t format, int32_t group, const std::vector<float>& x,
             const std::vector<float>& got, const std::vector<double>& want) {
  for (size_t i = 0; i < x.size(); ++i) {
    if (Same(got[i], want[i])) continue;
    fprintf(stderr, "%s %s group %d: %.9g (%zu of %zu) became %.9g, wanted %.9g\n", isa,
            kFormatNames[format], group, x[i], i, x.size(), got[i], want[i]);
    exit(1);
  }
}

void CheckRow(const KernelTable& kernels, const std::vector<float>& x, int32_t format,
              int32_t group, float scale) {
  const size_t n = x.size(), part = group > 0 ? static_cast<size_t>(group) : n;
  std::vector<double> want;
  for (size_t i = 0; i < n; i += part) {
    const std::vector<float> columns(x.begin() + static_cast<ptrdiff_t>(i),
                                     x.begin() + static_cast<ptrdiff_t>(i + part));
    for (double v : RoundedGroup(columns, format, group < 0, scale)) want.push_back(v);
  }
  std::vector<float> out(n + 1, 9.0f);
  kernels.round_row(x.data(), static_cast<uint32_t>(n), format, group, scale, out.data());
  Compare(kernels.name, format, group, x, out, want);
  CHECK(out[n] == 9.0f);
  std::vector<float> in_place = x;
  kernels.round_row(in_place.data(), static_cast<uint32_t>(n), format, group, scale,
                    in_place.data());
  Compare(kernels.name, format, group, x, in_place, want);
}

// Every value of a format, the midpoints of neighbours, and the floats beside all of them.
std::vector<float> Landmarks(int32_t format) {
  std::vector<double> values;
  const uint32_t codes = format == kRoundInt8 ? 130 : format == kRoundF8 ? 127 : 8;
  for (uint32_t i = 0; i < codes; ++i) {
    values.push_back(format == kRoundInt8 ? i
                     : format == kRoundF8 ? F8Value(static_cast<uint8_t>(i))
                                          : F4Value(i));
  }
  const double step = values[codes - 1] - values[codes - 2];
  values.push_back(values.back() + step);  // what the next one would be
  std::vector<float> all;
  for (size_t i = 0; i < values.size(); ++i) {
    for (const double v : {values[i], i == 0 ? 0 : (values[i - 1] + values[i]) / 2}) {
      const float x = static_cast<float>(v);
      for (const float y : {x, std::nextafter(x, -INFINITY), std::nextafter(x, INFINITY)}) {
        all.push_back(y);
        all.push_back(-y);
      }
    }
  }
  for (const float y : {1e-45f, 1e-39f, 1.2e-38f, 1e-20f, 1e9f, 3e38f, INFINITY}) {
    all.push_back(y);
    all.push_back(-y);
  }
  all.push_back(NAN);
  return all;
}

// A scale of 1 takes the landmarks as they are; others round the quotient as well.
void CheckLandmarks(const KernelTable& kernels) {
  for (int32_t format : {kRoundInt8, kRoundF8}) {
    for (float scale : {1.0f, 0.25f, 0.0137f, 3e-30f}) {
      std::vector<float> x = Landmarks(format);
      CheckRow(kernels, x, format, -1, scale);
      for (float& v : x) v *= scale;
      CheckRow(kernels, x, format, -1, scale);
    }
  }
  // A group of F4 with a 6 in it, times an outer scale of a power of two, has a scale of 1.
  const std::vector<float> landmarks = Landmarks(kRoundF4);
  std::vector<float> x;
  for (float v : landmarks) {
    if (!(std::fabs(v) <= 6)) continue;
    if (x.size() % 16 == 0) x.push_back(6);
    x.push_back(v);
  }
  x.resize((x.size() + 15) / 16 * 16, 6.0f);
  for (float outer : {1.0f, 0.5f, 1.0f / 1024}) {
    std::vector<float> scaled = x;
    CheckRow(kernels, x, kRoundF4, 16, outer);
    for (float& v : scaled) v *= outer;
    CheckRow(kernels, scaled, kRoundF4, 16, outer);
  }
}

void CheckRandom(const KernelTable& kernels) {
  Random random(11);
  for (int32_t format : {kRoundInt8, kRoundF8, kRoundF4}) {
    for (uint32_t n : {1u, 2u, 7u, 16u, 17u, 33u, 48u, 96u, 576u}) {
      for (float size : {1.0f, 1e-3f, 70.0f, 1e-36f, 1e-42f, 1e-45f, 0.0f}) {
        std::vector<float> x = random.Floats(n, size);
        if (n > 16) std::fill(x.begin(), x.begin() + 16, 0.0f);  // a group without a number
        if (format == kRoundF4) {
          if (n % 16 == 0) CheckRow(kernels, x, format, 16, 0.003f);
          continue;
        }
        for (int32_t group : {-1, 0, 1, 3, 16, 24}) {
          if (group <= 0 || n % static_cast<uint32_t>(group) == 0) {
            CheckRow(kernels, x, format, group, 0.013f);
          }
        }
      }
    }
  }
}

// A NaN or an infinity, wherever it stands, makes the group whose scale it would make NaN.
void CheckNoNumbers(const KernelTable& kernels) {
  for (float bad : {NAN, -NAN, INFINITY, -INFINITY}) {
    for (size_t at = 0; at < 48; ++at) {
      std::vector<float> x(48, 1.5f);
      x[at] = bad;
      CheckRow(kernels, x, kRoundF4, 16, 0.5f);
      for (int32_t format : {kRoundInt8, kRoundF8}) {
        for (int32_t group : {-1, 0, 16, 24}) CheckRow(kernels, x, format, group, 0.5f);
      }
    }
  }
}

}  // namespace

int main() {
  for (const KernelTable* kernels : UsableTables()) {
    CheckLandmarks(*kernels);
    CheckRandom(*kernels);
    CheckNoNumbers(*kernels);
    printf("%s: ok\n", kernels->name);
  }
  return 0;
}
