// Paged attention of every instruction set and pool format against float64, over scattered blocks;
// and the same bits however a sequence is cut into chunks and tiles, and its context into runs of
// units, whoever computes them.
//
// SPDX-License-Identifier: Apache-2.0
#include "cpu/attention.h"

#include <algorithm>

#include "cpu/thread_pool.h"
#include "isas.h"
#include "kv_codes.h"
#include "plan_builder.h"

using namespace plansmith::cpu;

namespace {

// Where PLANSMITH_TEST_SHORT is set, as for an emulated processor: every case and format, but few
// of their combinations.
const bool kShort = getenv("PLANSMITH_TEST_SHORT") != nullptr;

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

struct Step {
  psm_batch batch = {};
  int32_t num_tokens, kv_len, cu[2];
  std::vector<int32_t> zeros;
};

// The step that takes tokens [done, done + n) of a sequence.
void SetStep(const Sequence& s, int32_t done, int32_t n, Step* step) {
  step->num_tokens = n;
  step->kv_len = done + n;
  step->cu[0] = 0;
  step->cu[1] = n;
  step->zeros.assign(static_cast<size_t>(n), 0);
  psm_batch& batch = step->batch;
  batch.struct_size = PSM_BATCH_SIZE;
  batch.num_tokens = n;
  batch.num_seqs = 1;
  batch.block_table_stride = static_cast<int32_t>(s.table.size());
  batch.input_ids = batch.position_ids = step->zeros.data();
  batch.query_lens = &step->num_tokens;
  batch.kv_lens = &step->kv_len;
  batch.cu_query_lens = step->cu;
  batch.block_table = s.table.data();
}

// Of rows from `done` on.
AttentionArgs ArgsOf(Sequence* s, int32_t done, float* out) {
  const Case& c = s->c;
  const size_t width = static_cast<size_t>(c.heads) * c.dim, first = static_cast<size_t>(done);
  AttentionArgs a = {};
  a.k_pool = s->k_pool.data();
  a.v_pool = s->v_pool.data();
  a.block_stride = static_cast<size_t>(c.kv_heads) * c.dim * c.block;
  a.k_scale = KvHasScales(s->format) ? kKScale : 1.0f;
  a.v_scale = KvHasScales(s->format) ? kVScale : 1.0f;
  a.block_size = c.block;
  a.head_dim = c.dim;
  a.q = s->q.data() + first * width;
  a.q_stride = width;
  a.out = out + first * width;
  a.out_stride = width;
  a.window = c.window;
  a.scale = 0.3f;
  a.softcap = c.softcap;
  return a;
}

std::vector<float> Scratch(const Case& c) {
  return std::vector<float>(AttentionScratchFloats(kMaxAttentionQueries, c.dim));
}

// Every head of every row is reported as complete once, behind the item that ended it.
struct Complete {
  explicit Complete(int32_t rows, uint32_t heads)
      : num_heads(heads), seen(static_cast<size_t>(rows) * heads, 0) {}
  void Add(const AttentionPart& part) {
    for (uint32_t r = part.row; r < part.row + part.num_rows; ++r) {
      for (uint32_t h = part.head; h < part.head + part.num_heads; ++h) {
        CHECK(seen.at(r * num_heads + h)++ == 0);
      }
    }
  }
  void CheckAll() const { CHECK(std::count(seen.begin(), seen.end(), 0) == 0); }
  uint32_t num_heads;
  std::vector<int> seen;
};

// Steps of chunk_sizes tokens (the last repeats); returns [kv_len][heads][dim].
std::vector<float> Run(const KernelTable& kernels, Sequence s, const std::vector<int32_t>& chunks,
                       int num_threads) {
  const Case& c = s.c;
  const size_t width = static_cast<size_t>(c.heads) * c.dim,
               kv_width = static_cast<size_t>(c.kv_heads) * c.dim;
  std::vector<float> out(s.q.size());
  const PlanHeader model = ModelOf(c);
  BatchPlaces places(model, static_cast<int32_t>(s.table.size()));
  AttentionWork work(c.heads, model, num_threads);
  std::vector<float> scratch = Scratch(c);
  size_t chunk_idx = 0;
  for (int32_t done = 0; done < c.kv_len; ++chunk_idx) {
    const int32_t wanted = chunks[std::min(chunk_idx, chunks.size() - 1)];
    const int32_t n = std::min(wanted, c.kv_len - done);
    Step step;
    SetStep(s, done, n, &step);
    places.Set(step.batch);
    const size_t first = static_cast<size_t>(done);
    WriteKv(kernels,
            {s.k.data() + first * kv_width, kv_width, s.v.data() + first * kv_width, kv_width,
             s.format, kKScale, kVScale, s.k_pool.data(), s.v_pool.data(), kv_width * c.block,
             s.q.data() + first * width, width, c.kv_heads, c.dim, c.block},
            places, 0, static_cast<uint32_t>(n));
    work.Set(step.batch);
    AttentionArgs a = ArgsOf(&s, done, out.data());
    a.scratch = scratch.data();
    Complete complete(n, c.heads);
    for (uint32_t i = work.num_items(); i-- > 0;) {
      complete.Add(work.Run(kernels.attend[s.format], step.batch, i, a));
    }
    complete.CheckAll();
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
      {1}, {5, 1, 64, 7, 130}, {c.kv_len - 1, 1}, {63, 2, 1, 63}, {17}};
  const size_t only = random->Below(static_cast<uint32_t>(cuts.size()));
  for (const std::vector<int32_t>& cut : cuts) {
    if (cut[0] < 1 || (kShort && &cut != &cuts[only])) continue;
    for (int threads : {1, 3}) {
      if (kShort && threads == 1) continue;
      const std::vector<float> cut_up = Run(kernels, s, cut, threads);
      CHECK(memcmp(cut_up.data(), whole.data(), whole.size() * sizeof(float)) == 0);
    }
  }
}

// A long context of one row or some, shared by threads that really run side by side.
struct SharedStep {
  const KernelTable* kernels;
  const Sequence* s;
  AttentionWork* work;
  const Step* step;
  AttentionArgs args;
  std::vector<std::vector<float>> scratch;
  std::atomic<uint32_t> next{0};
};

void TestThreads(const KernelTable& kernels, const Case& c, uint32_t format, Random* random) {
  Sequence s = MakeSequence(c, format, random);
  const std::vector<float> whole = Run(kernels, s, {c.kv_len}, 1);
  // The same pools, filled; Run had a copy.
  const PlanHeader model = ModelOf(c);
  BatchPlaces places(model, static_cast<int32_t>(s.table.size()));
  Step all;
  SetStep(s, 0, c.kv_len, &all);
  places.Set(all.batch);
  const size_t width = static_cast<size_t>(c.heads) * c.dim,
               kv_width = static_cast<size_t>(c.kv_heads) * c.dim;
  WriteKv(kernels,
          {s.k.data(), kv_width, s.v.data(), kv_width, s.format, kKScale, kVScale, s.k_pool.data(),
           s.v_pool.data(), kv_width * c.block, s.q.data(), width, c.kv_heads, c.dim, c.block},
          places, 0, static_cast<uint32_t>(c.kv_len));
  for (int threads : {2, 3, 4}) {
    if (kShort && threads != 3) continue;
    ThreadPool pool(threads, false);
    AttentionWork work(c.heads, model, threads);
    for (int32_t rows : {1, 3, 20}) {
      const int32_t done = c.kv_len - rows;
      Step step;
      SetStep(s, done, rows, &step);
      std::vector<float> out(s.q.size());
      SharedStep shared;
      shared.kernels = &kernels;
      shared.s = &s;
      shared.work = &work;
      shared.step = &step;
      shared.args = ArgsOf(&s, done, out.data());
      for (int i = 0; i < threads; ++i) shared.scratch.push_back(Scratch(c));
      work.Set(step.batch);
      CHECK(work.num_items() > c.kv_heads);  // else nothing is shared
      for (int round = 0; round < (kShort ? 2 : 20);
           ++round) {  // as many layers: the counts begin anew
        shared.next = 0;
        std::fill(out.begin(), out.end(), 0.0f);
        pool.Run(
            [](void* context, int idx) {
              SharedStep* x = static_cast<SharedStep*>(context);
              AttentionArgs a = x->args;
              a.scratch = x->scratch[static_cast<size_t>(idx)].data();
              for (uint32_t i; (i = x->next.fetch_add(1)) < x->work->num_items();) {
                x->work->Run(x->kernels->attend[x->s->format], x->step->batch, i, a);
              }
            },
            &shared);
        const size_t first = static_cast<size_t>(done) * width;
        CHECK(memcmp(&out[first], &whole[first], (out.size() - first) * sizeof(float)) == 0);
      }
    }
  }
}

// What pools hold after WriteKv in pieces, K and V each by themselves and heads apart too, against
// one value after the other; blocks that nobody gave stay as they were.
void TestWrites(const KernelTable& kernels, uint32_t format, Random* random) {
  for (uint32_t block = 1; block <= 256; block *= 2) {
    const uint32_t dims[] = {1, 16, 33, 64};
    const Case c = {
        6, 3, dims[random->Below(4)], block, 1 + static_cast<int32_t>(random->Below(300)), 0, 0};
    Sequence s = MakeSequence(c, format, random);
    const size_t kv_width = static_cast<size_t>(c.kv_heads) * c.dim, width = 2 * kv_width;
    const size_t bytes = KvValueBytes(format), head = static_cast<size_t>(c.dim) * block;
    std::vector<uint8_t> k_want = s.k_pool, v_want = s.v_pool;
    const auto put = [&](const float* x, float scale, std::vector<uint8_t>* pool, size_t at) {
      if (format == kKvF32) return static_cast<void>(memcpy(&(*pool)[at * bytes], x, bytes));
      kernels.store_kv[format](x, 1, scale, 1, &(*pool)[at * bytes]);
    };
    for (size_t t = 0; t < static_cast<size_t>(c.kv_len); ++t) {
      const size_t first = static_cast<size_t>(s.table[t / block]) * kv_width * block;
      for (size_t i = 0; i < kv_width; ++i) {
        const size_t at = first + i / c.dim * head, d = i % c.dim, pos = t % block;
        put(&s.k[t * kv_width + i], kKScale, &k_want, at + d * block + pos);
        put(&s.v[t * kv_width + i], kVScale, &v_want, at + pos * c.dim + d);
      }
    }
    BatchPlaces places(ModelOf(c), static_cast<int32_t>(s.table.size()));
    for (int32_t done = 0; done < c.kv_len;) {
      const int32_t n = std::min(c.kv_len - done, 1 + static_cast<int32_t>(random->Below(70)));
      Step step;
      SetStep(s, done, n, &step);
      places.Set(step.batch);
      const size_t first = static_cast<size_t>(done);
      const KvWriteArgs all = {s.k.data() + first * kv_width,
                               kv_width,
                               s.v.data() + first * kv_width,
                               kv_width,
                               format,
                               kKScale,
                               kVScale,
                               s.k_pool.data(),
                               s.v_pool.data(),
                               kv_width * block,
                               s.q.data() + first * width,
                               width,
                               c.kv_heads,
                               c.dim,
                               block};
      const uint32_t rows = static_cast<uint32_t>(n), cut = random->Below(rows + 1);
      KvWriteArgs k = all, v = all;  // of the last two heads, and of all
      k.v = nullptr;
      v.k = nullptr;
      k.k += c.dim;
      k.k_pool = s.k_pool.data() + head * bytes;
      k.num_kv_heads = 2;
      KvWriteArgs k0 = all;
      k0.v = nullptr;
      k0.num_kv_heads = 1;
      for (const KvWriteArgs& a : {k, k0, v}) {
        if (format == kKvI8) continue;  // they look at whole rows for a NaN
        WriteKv(kernels, a, places, 0, cut);
        WriteKv(kernels, a, places, cut, rows);
      }
      if (format == kKvI8) {
        WriteKv(kernels, all, places, 0, cut);
        WriteKv(kernels, all, places, cut, rows);
      }
      done += n;
    }
    CHECK(s.k_pool == k_want);
    CHECK(s.v_pool == v_want);
  }
}

// Rows that see a number that is none, or too large for one, tell; the others do not change.
void TestPoison(const KernelTable& kernels, uint32_t format, Random* random) {
  const Case c = {6, 2, 40, 16, 2 * static_cast<int32_t>(kAttentionUnit) + 9, 0, 0};
  const Sequence clean = MakeSequence(c, format, random);
  const std::vector<float> want = Run(kernels, clean, {c.kv_len}, 1);
  const size_t width = static_cast<size_t>(c.heads) * c.dim;
  for (int32_t at : {0, 7, static_cast<int32_t>(kAttentionUnit), c.kv_len - 1}) {
    if (kShort && at != 7) continue;
    for (float poison : {NAN, INFINITY, -INFINITY}) {
      for (bool in_k : {true, false}) {
        if (in_k && poison == poison) continue;  // an infinite key may just hide itself
        Sequence s = clean;
        const size_t place = static_cast<size_t>(at) * c.kv_heads * c.dim + 3;  // KV head 0
        (in_k ? s.k : s.v)[place] = poison;
        for (const std::vector<int32_t>& cut : {std::vector<int32_t>{c.kv_len}, {50, 1, 80}}) {
          const std::vector<float> got = Run(kernels, s, cut, 3);
          for (size_t i = 0; i < got.size(); ++i) {
            const size_t column = i % width, head = column / c.dim;
            const bool sees = i / width >= static_cast<size_t>(at) && head < 3;
            if (sees && (in_k || column % c.dim == 3)) {
              CHECK(!std::isfinite(got[i]));
            } else {
              CHECK(memcmp(&got[i], &want[i], sizeof(float)) == 0);
            }
          }
        }
      }
    }
  }
}

}  // namespace

int main() {
  const Case cases[] = {
      {9, 3, 64, 16, 150, 0, 0},   {1, 1, 16, 8, 70, 0, 0},
      {2, 2, 128, 32, 65, 0, 0},   {4, 2, 256, 64, 130, 0, 50},
      {8, 1, 32, 128, 200, 0, 0},  {9, 1, 24, 16, 129, 33, 0},
      {4, 4, 40, 8, 140, 64, 20},  {6, 2, 8, 1, 67, 1, 0},
      {5, 1, 20, 2, 90, 10, 5},    {12, 2, 80, 32, 64, 200, 0},
      {50, 1, 16, 16, 66, 0, 0},   {3, 1, 96, 256, 300, 100, 0},
      {2, 1, 64, 16, 1, 0, 0},     {7, 1, 33, 16, 80, 2147483647, 0},
      {6, 2, 64, 32, 300, 0, 0},   {4, 4, 48, 64, 260, 140, 0},
      {5, 1, 72, 128, 257, 0, 30}, {3, 1, 64, 8, 256, 0, 0},
  };
  for (const KernelTable* kernels : UsableTables()) {
    Random random(11);
    for (const Case& c : cases) {
      const uint32_t only = static_cast<uint32_t>(&c - cases) % kNumKvFormats;
      for (uint32_t format : {kKvF32, kKvF16, kKvF8, kKvI8}) {
        if (!kShort || format == only) RunCase(*kernels, c, format, &random);
      }
    }
    const Case shared[] = {{6, 3, 64, 32, 900, 0, 0}, {2, 1, 80, 16, 1100, 1000, 0}};
    for (const Case& c : shared) {
      for (uint32_t format : {kKvF16, c.window > 0 ? kKvI8 : kKvF32}) {
        if (!kShort || format == kKvF16) TestThreads(*kernels, c, format, &random);
      }
    }
    for (uint32_t format : {kKvF32, kKvF16}) TestPoison(*kernels, format, &random);
    for (int round = 0; round < (kShort ? 1 : 2); ++round) {
      for (uint32_t format : {kKvF32, kKvF8, kKvI8, kKvF16}) TestWrites(*kernels, format, &random);
    }
    printf("%s: ok\n", kernels->name);
  }
  return 0;
}
