// Values of KV pools that are not float32: what each instruction set stores and reads back, against
// the formats' definitions.
//
// SPDX-License-Identifier: Apache-2.0
#include "kv_codes.h"

#include <algorithm>

#include "cpu/attention.h"
#include "isas.h"
#include "plan_builder.h"

using namespace plansmith::cpu;

namespace {

// Every value of a format, the middles between neighbours, and their neighbours among floats.
std::vector<float> Hard(uint32_t format) {
  std::vector<double> values;
  for (int code = 0; code < 256; ++code) {
    const double value = CodeValue(format, static_cast<uint8_t>(code));
    if (value == value) values.push_back(value);
  }
  std::sort(values.begin(), values.end());
  std::vector<float> hard = {0.0f, -0.0f, 1e-45f, -1e-45f, 1e30f, -1e30f, INFINITY, -INFINITY};
  for (size_t i = 0; i < values.size(); ++i) {
    const double next = i + 1 < values.size() ? values[i + 1] : values[i] + 1;
    for (double x : {values[i], (values[i] + next) / 2, values[i] * 0.75 + next * 0.25}) {
      const float f = static_cast<float>(x);
      hard.insert(hard.end(), {f, std::nextafterf(f, INFINITY), std::nextafterf(f, -INFINITY)});
    }
  }
  return hard;
}

void CheckStored(const KernelTable& kernels, uint32_t format, const std::vector<float>& x,
                 float scale) {
  const uint32_t n = static_cast<uint32_t>(x.size());
  for (size_t stride : {1, 3}) {
    const std::vector<uint8_t> old(n * stride + 64, 0xA5);
    std::vector<uint8_t> out = old;
    kernels.store_kv[format](x.data(), n, scale, stride, out.data() + 32);
    for (size_t i = 0; i < out.size(); ++i) {
      const size_t at = i - 32;
      const bool written = i >= 32 && at < n * stride && at % stride == 0;
      const float y = written ? x[at / stride] / scale : 0;
      const uint8_t want = written ? NearestCode(format, static_cast<double>(y)) : old[i];
      if (out[i] == want) continue;
      fprintf(stderr, "%s KV %u: %.9g / %g became %02x, wanted %02x\n", kernels.name, format,
              static_cast<double>(y * scale), static_cast<double>(scale), out[i], want);
      exit(1);
    }
  }
}

void TestStores(const KernelTable& kernels, uint32_t format) {
  Random random(5);
  CheckStored(kernels, format, Hard(format), 1.0f);
  CheckStored(kernels, format, Hard(format), 0.3f);
  for (uint32_t n = 1; n < 40; ++n) CheckStored(kernels, format, random.Floats(n, 3), 0.02f);
  for (float size : {1e-3f, 0.1f, 10.0f, 500.0f})
    CheckStored(kernels, format, random.Floats(500, size), 1.0f);
}

// store_keys puts what store_kv, or a plain copy, puts row by row, and touches nothing else.
void TestKeys(const KernelTable& kernels, uint32_t format, Random* random) {
  const size_t value = KvValueBytes(format);
  for (uint32_t block : {1u, 2u, 3u, 8u, 15u, 16u, 32u, 37u, 64u, 256u}) {
    for (uint32_t dim : {1u, 7u, 16u, 33u, 64u, 80u, 129u}) {
      const uint32_t first = random->Below(block), rows = 1 + random->Below(block - first);
      const size_t stride = dim + random->Below(9);
      std::vector<float> x = random->Floats(rows * stride, 3);
      const auto put = [&](float f) { x[random->Below(static_cast<uint32_t>(x.size()))] = f; };
      for (float f : {1e5f, -1e30f, INFINITY, -INFINITY, 65519.9f, 1e-7f}) put(f);
      if (format != kKvI8) put(NAN);
      const std::vector<uint8_t> old(block * dim * value, 0xA5);
      std::vector<uint8_t> want = old, got = old;
      for (uint32_t i = 0; i < rows; ++i) {
        uint8_t* to = want.data() + (first + i) * value;
        const float* from = x.data() + i * stride;
        if (format != kKvF32) {
          kernels.store_kv[format](from, dim, 0.02f, block, to);
          continue;
        }
        for (size_t d = 0; d < dim; ++d) memcpy(to + d * block * value, from + d, value);
      }
      kernels.store_keys[format](x.data(), stride, rows, dim, 0.02f, block,
                                 got.data() + first * value);
      if (got == want) continue;
      fprintf(stderr, "%s KV %u: %u keys of %u values from position %u of a block of %u differ\n",
              kernels.name, format, rows, dim, first, block);
      exit(1);
    }
  }
}

// A NaN stays one in the pool, with its sign.
void TestNan(const KernelTable& kernels) {
  for (uint32_t n = 1; n < 20; ++n) {
    std::vector<float> x(n, 1.0f);
    x[n - 1] = NAN;
    std::vector<uint8_t> out(n);
    kernels.store_kv[kKvF8](x.data(), n, 0.5f, 1, out.data());
    CHECK((out[n - 1] & 0x7F) == 0x7F);
    for (uint32_t i = 0; i + 1 < n; ++i) CHECK(out[i] == 0x40);
  }
}

// Attention to one position gives its V as it is, and so every code's value.
void TestReads(const KernelTable& kernels, uint32_t format) {
  const uint32_t dim = 256, block = 8;
  std::vector<uint8_t> k(dim * block + 64, 0), v = k;
  for (uint32_t code = 0; code < dim; ++code) v[code] = static_cast<uint8_t>(code);
  const std::vector<float> q(dim, 0.1f);
  std::vector<float> out(dim), scratch(AttentionScratchFloats(1, dim));
  const int32_t blocks[] = {0};
  AttentionArgs a = {};
  a.k_pool = k.data();
  a.v_pool = v.data();
  a.block_stride = dim * block;
  a.k_scale = 3;
  a.v_scale = 0.125f;
  a.blocks = blocks;
  a.block_size = block;
  a.head_dim = a.q_stride = a.out_stride = dim;
  a.q = q.data();
  a.out = out.data();
  a.num_rows = a.num_heads = a.end_unit = 1;
  a.scale = 1;
  a.scratch = scratch.data();
  kernels.attend[format](a);
  for (uint32_t code = 0; code < dim; ++code) {
    const double want = 0.125 * CodeValue(format, static_cast<uint8_t>(code));
    const double got = static_cast<double>(out[code]);
    if (got == want || (got != got && want != want)) continue;
    fprintf(stderr, "%s KV %u: code %02x is %g, wanted %g\n", kernels.name, format, code, got,
            want);
    exit(1);
  }
}

double F16Value(uint16_t bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  double magnitude =
      exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, exponent - 25);
  if (exponent == 31) magnitude = fraction == 0 ? INFINITY : NAN;
  return bits >> 15 ? -magnitude : magnitude;
}

// Attention to one position of 1024 columns at a time: every half float, as V.
void TestReadsF16(const KernelTable& kernels) {
  const uint32_t dim = 1024;
  std::vector<uint16_t> k(dim + 64, 0), v = k;
  const std::vector<float> q(dim, 0.1f);
  std::vector<float> out(dim), scratch(AttentionScratchFloats(1, dim));
  const int32_t blocks[] = {0};
  AttentionArgs a = {};
  a.k_pool = k.data();
  a.v_pool = v.data();
  a.block_stride = dim;
  a.k_scale = a.v_scale = a.scale = 1;
  a.blocks = blocks;
  a.block_size = 1;
  a.head_dim = a.q_stride = a.out_stride = dim;
  a.q = q.data();
  a.out = out.data();
  a.num_rows = a.num_heads = a.end_unit = 1;
  a.scratch = scratch.data();
  for (uint32_t first = 0; first < 0x10000; first += dim) {
    for (uint32_t i = 0; i < dim; ++i) v[i] = static_cast<uint16_t>(first + i);
    kernels.attend[kKvF16](a);
    for (uint32_t i = 0; i < dim; ++i) {
      const double want = F16Value(v[i]), got = static_cast<double>(out[i]);
      if (got == want || (got != got && want != want)) continue;
      fprintf(stderr, "%s: half float %04x is %g, wanted %g\n", kernels.name, v[i], got, want);
      exit(1);
    }
  }
}

void CheckF16(const KernelTable& kernels, float x, uint16_t bits) {
  const double y = static_cast<double>(x), want = NearestF16(y), got = F16Value(bits);
  const bool same = y != y ? got != got : got == want;
  if (same && (bits >> 15 != 0) == std::signbit(y)) return;
  fprintf(stderr, "%s: %.9g became half float %04x, wanted %g\n", kernels.name, y, bits, want);
  exit(1);
}

void CheckStoredF16(const KernelTable& kernels, const std::vector<float>& x) {
  const uint32_t n = static_cast<uint32_t>(x.size());
  for (size_t stride : {1, 3}) {
    std::vector<uint16_t> out(n * stride + 64, 0xA5A5);
    kernels.store_kv[kKvF16](x.data(), n, 5.0f, stride, out.data() + 32);  // heeds no scale
    for (size_t i = 0; i < out.size(); ++i) {
      const size_t at = i - 32;
      if (i < 32 || at >= n * stride || at % stride != 0) {
        CHECK(out[i] == 0xA5A5);
        continue;
      }
      CheckF16(kernels, x[at / stride], out[i]);
    }
  }
}

// Every half float, the middles between neighbours and what lies beside them; a number that is too
// large becomes the largest, an infinity and a NaN stay.
std::vector<float> HardF16() {
  std::vector<float> hard = {0.0f,     -0.0f,     1e-45f,    -1e-45f,  65504.0f,
                             65519.9f, 65520.0f,  -65520.0f, 65536.0f, -1e30f,
                             INFINITY, -INFINITY, NAN,       -NAN,     3.4e38f};
  for (uint32_t bits = 0; bits < 0x7C00; ++bits) {
    const double value = F16Value(static_cast<uint16_t>(bits));
    const double next = F16Value(static_cast<uint16_t>(bits + 1));
    const float middle = static_cast<float>(bits == 0x7BFF ? 65520.0 : (value + next) / 2);
    for (float f : {static_cast<float>(value), middle, std::nextafterf(middle, INFINITY),
                    std::nextafterf(middle, 0.0f)}) {
      hard.insert(hard.end(), {f, -f});
    }
  }
  return hard;
}

void TestStoresF16(const KernelTable& kernels) {
  CheckStoredF16(kernels, HardF16());
  Random random(6);
  for (uint32_t n = 1; n < 40; ++n) CheckStoredF16(kernels, random.Floats(n, 3));
  for (float size : {1e-7f, 1e-4f, 1.0f, 1e5f}) CheckStoredF16(kernels, random.Floats(500, size));
  // A NaN of which only low bits tell: cut off, it would be an infinity.
  const uint32_t low = 0x7F800001;
  float nan;
  memcpy(&nan, &low, sizeof(nan));
  CheckStoredF16(kernels, std::vector<float>(19, nan));
}

// Keys as half floats by the format's definition, whole runs and single ones; no scale is heeded.
void TestKeysF16(const KernelTable& kernels) {
  const uint32_t dim = 19, block = 64, first = 3;
  const std::vector<float> hard = HardF16();
  for (uint32_t rows : {1u, 5u, 16u, 61u}) {
    const size_t step = static_cast<size_t>(rows) * dim;
    for (size_t begin = 0; begin + step <= hard.size(); begin += step) {
      std::vector<uint16_t> out(block * dim, 0xA5A5);
      kernels.store_keys[kKvF16](&hard[begin], dim, rows, dim, 5.0f, block, out.data() + first);
      for (uint32_t d = 0; d < dim; ++d) {
        for (uint32_t i = 0; i < block; ++i) {
          const uint16_t got = out[d * block + i];
          if (i < first || i >= first + rows) {
            CHECK(got == 0xA5A5);
          } else {
            CheckF16(kernels, hard[begin + (i - first) * dim + d], got);
          }
        }
      }
    }
  }
}

}  // namespace

int main() {
  for (const KernelTable* kernels : UsableTables()) {
    for (uint32_t format : {kKvF8, kKvI8}) {
      TestStores(*kernels, format);
      TestReads(*kernels, format);
    }
    TestNan(*kernels);
    TestStoresF16(*kernels);
    TestKeysF16(*kernels);
    TestReadsF16(*kernels);
    Random random(9);
    for (int round = 0; round < 20; ++round) {
      for (uint32_t format : {kKvF32, kKvF8, kKvI8, kKvF16}) TestKeys(*kernels, format, &random);
    }
  }
  return 0;
}
