// Paged attention of every instruction set and pool format against float64, over scattered blocks;
// and the same bits however a sequence is cut into chunks, tiles and heads.
//
// SPDX-License-Identifier: Apache-2.0
#include "cpu/attention.h"

#include <algorithm>

#include "isas.h"
#include "kv_codes.h"
#include "plan_builder.h"

using namespace plansmith::cpu;

namespace {

constexpr float kKScale = 0.011f, kVScale = 0.017f;  // values are within 2: some are cut off

struct Case {
  uint32_t heads, kv_heads, dim, block;
  int32_t kv_len, window;
  float softcap;
};

// One sequence in its own pools, its blocks in random order.
struct Sequence {
  Case c;
  uint32_t format;                     // KvFormat
  std::vector<float> q, k, v;          // [kv_len][heads or kv_heads][dim]
  std::vector<double> held_k, held_v;  // what the pools hold of k and v
  std::vector<int32_t> table;
  std::vector<uint8_t> k_pool, v_pool;
};

PlanHeader ModelOf(const Case& c) {
  PlanHeader h = {};
  h.vocab_size = 10;
  h.num_kv_heads = static_cast<int32_t>(c.kv_heads);
  h.head_dim = static_cast<int32_t>(c.dim);
  h.num_layers = 1;
  h.max_batch_size = 4;
  h.max_num_tokens = 4096;
  h.max_seq_len = 4096;
  h.tokens_per_block = static_cast<int32_t>(c.block);
  return h;
}

Sequence MakeSequence(const Case& c, uint32_t format, Random* random) {
  Sequence s;
  s.c = c;
  s.format = format;
  const size_t n = static_cast<size_t>(c.kv_len);
  s.q = random->Floats(n * c.heads * c.dim, 2);
  s.k = random->Floats(n * c.kv_heads * c.dim, 2);
  s.v = random->Floats(n * c.kv_heads * c.dim, 2);
  for (float x : s.k) s.held_k.push_back(HeldKv(format, x, kKScale));
  for (float x : s.v) s.held_v.push_back(HeldKv(format, x, kVScale));
  const size_t used = (n + c.block - 1) / c.block;
  for (size_t i = 0; i < used + 3; ++i) s.table.push_back(static_cast<int32_t>(i));
  for (size_t i = s.table.size(); i-- > 1;) {
    std::swap(s.table[i], s.table[random->Below(static_cast<uint32_t>(i + 1))]);
  }
  const size_t values = s.table.size() * c.kv_heads * c.dim * c.block;
  // What was in the pools before must not matter, not even a NaN, which is all ones.
  s.k_pool.assign(values * KvValueBytes(format) + 64, 0xFF);
  s.v_pool = s.k_pool;
  return s;
}

// Steps of chunk_sizes tokens (the last repeats); returns [kv_len][heads][dim].
std::vector<float> Run(const KernelTable& kernels, Sequence s, const std::vector<int32_t>& chunks,
                       int num_threads) {
  const Case& c = s.c;
  const size_t width = static_cast<size_t>(c.heads) * c.dim,
               kv_width = static_cast<size_t>(c.kv_heads) * c.dim;
  const size_t block_stride = kv_width * c.block;
  std::vector<float> out(s.q.size());
  const PlanHeader model = ModelOf(c);
  BatchPlaces places(model, static_cast<int32_t>(s.table.size()));
  AttentionWork work(c.heads, model, num_threads);
  std::vector<float> scratch(AttentionScratchFloats(kMaxAttentionQueries, c.dim));
  size_t chunk_idx = 0;
  for (int32_t done = 0; done < c.kv_len; ++chunk_idx) {
    const int32_t wanted = chunks[std::min(chunk_idx, chunks.size() - 1)];
    const int32_t n = std::min(wanted, c.kv_len - done), kv_len = done + n, cu[] = {0, n};
    const std::vector<int32_t> zeros(static_cast<size_t>(n), 0);
    psm_batch batch = {};
    batch.struct_size = PSM_BATCH_SIZE;
    batch.num_tokens = n;
    batch.num_seqs = 1;
    batch.block_table_stride = static_cast<int32_t>(s.table.size());
    batch.input_ids = batch.position_ids = zeros.data();
    batch.query_lens = &n;
    batch.kv_lens = &kv_len;
    batch.cu_query_lens = cu;
    batch.block_table = s.table.data();
    places.Set(batch);
    const size_t first = static_cast<size_t>(done);
    WriteKv(kernels,
            {s.k.data() + first * kv_width, kv_width, s.v.data() + first * kv_width, kv_width,
             s.format, kKScale, kVScale, s.k_pool.data(), s.v_pool.data(), block_stride,
             s.q.data() + first * width, width, c.kv_heads, c.dim, c.block},
            places, 0, static_cast<uint32_t>(n));
    work.Set(batch);
    AttentionArgs a = {};
    a.k_pool = s.k_pool.data();
    a.v_pool = s.v_pool.data();
    a.block_stride = block_stride;
    a.k_scale = s.format == kKvF32 ? 1.0f : kKScale;
    a.v_scale = s.format == kKvF32 ? 1.0f : kVScale;
    a.block_size = c.block;
    a.head_dim = c.dim;
    a.q = s.q.data() + first * width;
    a.q_stride = width;
    a.out = out.data() + first * width;
    a.out_stride = width;
    a.window = c.window;
    a.scale = 0.3f;
    a.softcap = c.softcap;
    a.scratch = scratch.data();
    for (uint32_t i = work.num_items(); i-- > 0;) work.Run(kernels.attend[s.format], batch, i, a);
    done += n;
  }
  return out;
}

void CheckAgainstFloat64(const KernelTable& kernels, const Sequence& s,
                         const std::vector<float>& got) {
  const Case& c = s.c;
  const uint32_t group = c.heads / c.kv_heads;
  for (int32_t t = 0; t < c.kv_len; ++t) {
    for (uint32_t h = 0; h < c.heads; ++h) {
      const float* q = &s.q[(static_cast<size_t>(t) * c.heads + h) * c.dim];
      const int32_t from = c.window > 0 ? std::max(0, t - c.window + 1) : 0;
      std::vector<double> p;
      for (int32_t j = from; j <= t; ++j) {
        const double* k = &s.held_k[(static_cast<size_t>(j) * c.kv_heads + h / group) * c.dim];
        double dot = 0;
        for (uint32_t d = 0; d < c.dim; ++d) dot += q[d] * k[d];
        dot *= static_cast<double>(0.3f);
        if (c.softcap > 0) dot = c.softcap * std::tanh(dot / c.softcap);
        p.push_back(dot);
      }
      const double max = *std::max_element(p.begin(), p.end());
      double sum = 0;
      for (double& x : p) sum += x = std::exp(x - max);
      for (uint32_t d = 0; d < c.dim; ++d) {
        double want = 0;
        for (int32_t j = from; j <= t; ++j) {
          want += p[static_cast<size_t>(j - from)] / sum *
                  s.held_v[(static_cast<size_t>(j) * c.kv_heads + h / group) * c.dim + d];
        }
        const float y = got[(static_cast<size_t>(t) * c.heads + h) * c.dim + d];
        // Scores reach 1.2 * D; their float32 error, relative to 1, becomes that of p. Values are
        // within 2.
        const double allowed = 2 * (std::ldexp(1.0, -23) * 1.2 * c.dim + 1e-6);
        if (!(std::fabs(y - want) <= allowed)) {
          fprintf(stderr,
                  "%s KV %u H %u KVH %u D %u BS %u len %d window %d cap %g: [%d,%u,%u] %g wanted "
                  "%g\n",
                  kernels.name, s.format, c.heads, c.kv_heads, c.dim, c.block, c.kv_len, c.window,
                  c.softcap, t, h, d, y, want);
          exit(1);
        }
      }
    }
  }
}

void RunCase(const KernelTable& kernels, const Case& c, uint32_t format, Random* random) {
  const Sequence s = MakeSequence(c, format, random);
  const std::vector<float> whole = Run(kernels, s, {c.kv_len}, 1);
  CheckAgainstFloat64(kernels, s, whole);
  const std::vector<std::vector<int32_t>> cuts = {
      {1}, {5, 1, 64, 7}, {c.kv_len - 1, 1}, {63, 2, 1}, {17}};
  for (const std::vector<int32_t>& cut : cuts) {
    if (cut[0] < 1) continue;
    for (int threads : {1, 3}) {
      const std::vector<float> cut_up = Run(kernels, s, cut, threads);
      CHECK(memcmp(cut_up.data(), whole.data(), whole.size() * sizeof(float)) == 0);
    }
  }
}

}  // namespace

int main() {
  const Case cases[] = {
      {9, 3, 64, 16, 150, 0, 0},  {1, 1, 16, 8, 70, 0, 0},
      {2, 2, 128, 32, 65, 0, 0},  {4, 2, 256, 64, 130, 0, 50},
      {8, 1, 32, 128, 200, 0, 0}, {9, 1, 24, 16, 129, 33, 0},
      {4, 4, 40, 8, 140, 64, 20}, {6, 2, 8, 1, 67, 1, 0},
      {5, 1, 20, 2, 90, 10, 5},   {12, 2, 80, 32, 64, 200, 0},
      {50, 1, 16, 16, 66, 0, 0},  {3, 1, 96, 256, 300, 100, 0},
      {2, 1, 64, 16, 1, 0, 0},    {7, 1, 33, 16, 80, 2147483647, 0},
  };
  for (const KernelTable* kernels : UsableTables()) {
    Random random(11);
    for (const Case& c : cases) {
      for (uint32_t format : {kKvF32, kKvF8, kKvI8}) RunCase(*kernels, c, format, &random);
    }
    printf("%s: ok\n", kernels->name);
  }
  return 0;
}
