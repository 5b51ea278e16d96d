// Codes of 8-bit KV pools: what each instruction set stores and reads back, against the formats'
// definitions.
//
// SPDX-License-Identifier: Apache-2.0
#include "kv_codes.h"

#include <algorithm>

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
  const size_t value = format == kKvF32 ? sizeof(float) : 1;
  for (uint32_t block : {1u, 2u, 3u, 8u, 15u, 16u, 32u, 37u, 64u, 256u}) {
    for (uint32_t dim : {1u, 7u, 16u, 33u, 64u, 80u, 129u}) {
      const uint32_t first = random->Below(block), rows = 1 + random->Below(block - first);
      const size_t stride = dim + random->Below(9);
      std::vector<float> x = random->Floats(rows * stride, 3);
      x[random->Below(static_cast<uint32_t>(x.size()))] = format == kKvI8 ? INFINITY : NAN;
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

}  // namespace

int main() {
  for (const KernelTable* kernels : UsableTables()) {
    for (uint32_t format : {kKvF8, kKvI8}) {
      TestStores(*kernels, format);
      TestReads(*kernels, format);
    }
    TestNan(*kernels);
    Random random(9);
    for (int round = 0; round < 20; ++round) {
      for (uint32_t format : {kKvF32, kKvF8, kKvI8}) TestKeys(*kernels, format, &random);
    }
  }
  return 0;
}
