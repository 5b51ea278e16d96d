// GFLOP/s (GOP/s) and GB/s of the matrix products and of paged attention, and a decode and a
// prefill step of a model of SmolLM2-135M's shape with random weights, beside the peaks of the same
// machine.
//
//     bench_kernels [isa] [threads] [linear | attention | model]
//
// SPDX-License-Identifier: Apache-2.0
#include "cpu/kernels.h"

#include <stdio.h>
#include <string.h>

#include <algorithm>
#include <string>
#include <vector>

#include "cpu/attention.h"
#include "cpu/pages.h"
#include "cpu/peaks.h"
#include "driver.h"
#include "tiny_model.h"

using namespace plansmith::cpu;

namespace {

constexpr double kSecondsEach = 0.15;

// Weights of one product, in as many copies as it takes to leave the caches.
struct LinearBench {
  const KernelTable* kernels;
  ThreadPool* pool;
  std::vector<LinearArgs> copies;
  uint32_t rows, tiles;
  const LinearArgs* args;
  std::atomic<uint32_t> next;
};

void RunLinear(void* context, int) {
  LinearBench* b = static_cast<LinearBench*>(context);
  const uint32_t threads = static_cast<uint32_t>(b->pool->num_threads());
  const uint32_t each = std::max(3u, b->tiles / (4 * threads) / 3 * 3);
  const uint32_t row_items = (b->rows + 127) / 128, tile_items = (b->tiles + each - 1) / each;
  for (uint32_t i; (i = b->next.fetch_add(1)) < row_items * tile_items;) {
    const uint32_t row = i / tile_items * 128, tile = i % tile_items * each;
    const KernelTable& table = *b->kernels;
    const LinearKernel kernel =
        b->args->f8 != nullptr
            ? table.linear_f8
            : (b->args->q != nullptr ? table.linear_int8 : table.linear_float)[b->args->w.dtype];
    kernel(*b->args, row, std::min(b->rows, row + 128), tile, std::min(b->tiles, tile + each));
  }
}

void BenchLinear(const KernelTable& kernels, ThreadPool* pool, const Peaks& peaks) {
  const struct {
    uint32_t n, k;
  } shapes[] = {{960, 576}, {576, 576}, {3072, 576}, {576, 1536}, {49152, 576}};
  const struct {
    const char* name;
    uint32_t dtype, group_size;
    LinearInput input;
    bool with_zeros;
  } pairs[] = {
      {"f32", kF32, 0, kInputFloat, false},
      {"bf16", kBF16, 0, kInputFloat, false},
      {"f16", kF16, 0, kInputFloat, false},
      {"f8", kF8, 0, kInputFloat, false},
      {"f4", kF4, 16, kInputFloat, false},
      {"i8", kI8, 0, kInputFloat, false},
      {"i4", kI4, 64, kInputFloat, false},
      {"i4, zeros", kI4, 64, kInputFloat, true},
      {"i8 x i8", kI8, 0, kInputInt8Row, false},
      {"i8 x i8, static", kI8, 0, kInputInt8Static, false},
      {"i4 x i8", kI4, 64, kInputInt8Row, false},
      {"i8 x i8, by 32", kI8, 32, kInputInt8Group, false},
      {"i4 x i8, by 32", kI4, 32, kInputInt8Group, false},
      {"i8 x i8, by 64", kI8, 64, kInputInt8Group, false},
      {"i4 x i8, by 64", kI4, 64, kInputInt8Group, false},
      {"f8 x f8", kF8, 0, kInputF8Row, false},
  };
  Random random(1);
  printf("%-15s %-12s %4s %9s %9s %6s\n", "weight x input", "N x K", "M", "GOP/s", "GB/s", "peak");
  for (const auto& pair : pairs) {
    for (const auto& shape : shapes) {
      const bool grouped = pair.input == kInputInt8Group;  // with the small scales of such plans
      const Packed packed =
          PackMatrix(random.Floats(static_cast<size_t>(shape.n) * shape.k), shape.n, shape.k,
                     pair.dtype, pair.group_size, false, pair.with_zeros, grouped ? kBF16 : kF32);
      const size_t bytes = packed.data.size();
      const size_t num_copies = std::max<size_t>(1, (256u << 20) / bytes);
      const Pages weights(bytes * num_copies, "weights");
      for (size_t i = 0; i < num_copies; ++i) {
        memcpy(weights.as<uint8_t>() + i * bytes, packed.data.data(), bytes);
      }
      const uint32_t max_rows = 512;
      const std::vector<float> x = random.Floats(static_cast<size_t>(max_rows) * shape.k);
      const PackedMatrix w = packed.Matrix();
      std::vector<int8_t> q(static_cast<size_t>(max_rows) * w.padded_cols);
      const uint32_t q_groups = pair.input == kInputInt8Group ? w.num_groups : 1;
      std::vector<float> scales(static_cast<size_t>(max_rows) * q_groups);
      std::vector<int32_t> sums(max_rows * w.num_groups);
      const bool float8 = pair.input == kInputF8Row;
      const bool integer = pair.input != kInputFloat && !float8;
      std::vector<uint16_t> f8(float8 ? static_cast<size_t>(max_rows) * w.padded_cols : 0);
      if (float8) {
        for (uint32_t r = 0; r < max_rows; ++r) {
          kernels.round_row_f8(&x[r * w.cols], w.cols, static_cast<int32_t>(w.cols), 1.0f,
                               &f8[r * w.padded_cols], &scales[r]);
        }
      }
      if (integer) {
        for (uint32_t r = 0; r < max_rows; ++r) {
          kernels.quantize_row(&x[r * w.cols], w.cols, w.padded_cols, q_groups, w.num_groups,
                               &q[r * w.padded_cols], &scales[r * q_groups],
                               &sums[r * w.num_groups]);
        }
      }
      const Pages out(static_cast<size_t>(max_rows) * shape.n * sizeof(float), "outputs");
      LinearBench b = {&kernels, pool, {}, 0, (shape.n + kTile - 1) / kTile, nullptr, {0}};
      for (size_t i = 0; i < num_copies; ++i) {
        LinearArgs a = {};
        a.w = w;
        a.w.data = weights.as<uint8_t>() + i * bytes;
        a.x = x.data();
        a.x_stride = shape.k;
        a.q = integer ? q.data() : nullptr;
        a.q_full_range = pair.input == kInputInt8Static;
        a.q_stride = w.padded_cols;
        a.q_scales = scales.data();
        a.q_sums = sums.data();
        a.q_groups = q_groups;
        a.f8 = float8 ? f8.data() : nullptr;
        a.f8_stride = w.padded_cols;
        a.out = out.as<float>();
        a.out_stride = shape.n;
        b.copies.push_back(a);
      }
      for (uint32_t rows : {1u, 2u, 4u, 8u, 16u, 64u, 128u, 512u}) {
        b.rows = rows;
        double best = 1e9;  // of rounds over some copies: other processes can only slow one down
        const double start = Seconds();
        size_t copy = 0;
        while (Seconds() - start < kSecondsEach) {
          const size_t products = std::max<size_t>(1, (4u << 20) / bytes / rows);
          const double round = Seconds();
          for (size_t i = 0; i < products; ++i) {
            b.args = &b.copies[copy++ % num_copies];
            b.next = 0;
            pool->Run(RunLinear, &b);
          }
          best = std::min(best, (Seconds() - round) / static_cast<double>(products));
        }
        const double ops = 2.0 * rows * shape.n * shape.k / best * 1e-9;
        const double gb = static_cast<double>(bytes) / best * 1e-9;
        // Codes meet FP8 weights as bfloat16 where that is known, else as floats.
        const double floats =
            float8 && peaks.bf16_gflop_s > 0 ? peaks.bf16_gflop_s : peaks.fma_gflop_s;
        const double peak = integer ? peaks.int8_gop_s : floats;
        const double share = std::max(gb / peaks.read_gb_s, peak > 0 ? ops / peak : 0);
        printf("%-15s %5ux%-6u %4u %9.1f %9.1f %5.0f%%\n", pair.name, shape.n, shape.k, rows, ops,
               gb, 100 * share);
      }
    }
  }
}

struct AttentionBench {
  const KernelTable* kernels;
  uint32_t kv_format;
  const AttentionWork* work;
  const psm_batch* batch;
  AttentionArgs args;
  std::vector<Pages> scratch;
  std::atomic<uint32_t> next;
};

void RunAttention(void* context, int idx) {
  AttentionBench* b = static_cast<AttentionBench*>(context);
  AttentionArgs args = b->args;
  args.scratch = b->scratch[static_cast<size_t>(idx)].as<float>();
  for (uint32_t i; (i = b->next.fetch_add(1)) < b->work->num_items();) {
    b->work->Run(b->kernels->attend[b->kv_format], *b->batch, i, args);
  }
}

// One and 16 sequences at decode, one at prefill; SmolLM2's heads. As many layers as leave the
// caches: a step's own weights would have put out what the step before had read.
void BenchAttention(const KernelTable& kernels, uint32_t kv_format, ThreadPool* pool,
                    const Peaks& peaks) {
  const int32_t heads = 9, kv_heads = 3, dim = 64, block = 32;
  const char* names[] = {"attention, F32 pools", "attention, F8 pools", "attention, I8 pools",
                         "attention, F16 pools"};
  printf("%-22s %9s %9s %9s\n", names[kv_format], "us", "GFLOP/s", "GB/s");
  const struct {
    int32_t seqs, rows, kv_len;
  } cases[] = {{1, 1, 150},   {1, 1, 1024}, {1, 1, 4096},  {16, 1, 128},
               {16, 1, 1024}, {1, 8, 1024}, {1, 512, 512}, {1, 128, 2048}};
  for (const auto& c : cases) {
    PlanHeader model = {};
    model.num_kv_heads = kv_heads;
    model.head_dim = dim;
    model.tokens_per_block = block;
    model.max_num_tokens = 4096;
    const int32_t stride = (c.kv_len + block - 1) / block;
    const size_t values = static_cast<size_t>(c.seqs * stride * block * kv_heads * dim);
    const size_t bytes = values * KvValueBytes(kv_format);
    const size_t layers = (256u << 20) / (2 * bytes) + 1;
    const Pages pool_bytes(2 * bytes * layers + 64, "K and V");  // [blocks][layers][K, V]
    for (size_t i = 0; i < 2 * values * layers; ++i) {           // any numbers but NaN
      if (kv_format == kKvF32) {
        pool_bytes.as<float>()[i] = 0.01f * (i % 64);
      } else if (kv_format == kKvF16) {
        pool_bytes.as<uint16_t>()[i] = static_cast<uint16_t>(0x3000 + i % 64);
      } else {
        pool_bytes.as<uint8_t>()[i] = static_cast<uint8_t>(i % 64);
      }
    }
    const size_t block_values = static_cast<size_t>(kv_heads * dim * block);
    const size_t q_floats = static_cast<size_t>(c.seqs * c.rows * heads * dim);
    std::vector<float> q(q_floats, 0.1f), out(q_floats);
    std::vector<int32_t> table, query_lens, kv_lens, cu = {0};
    for (int32_t i = 0; i < c.seqs * stride; ++i) table.push_back(i);
    for (int32_t i = 0; i < c.seqs; ++i) {
      query_lens.push_back(c.rows);
      kv_lens.push_back(c.kv_len);
      cu.push_back(cu.back() + c.rows);
    }
    psm_batch batch = {};
    batch.num_seqs = c.seqs;
    batch.num_tokens = c.seqs * c.rows;
    batch.block_table_stride = stride;
    batch.query_lens = query_lens.data();
    batch.kv_lens = kv_lens.data();
    batch.cu_query_lens = cu.data();
    batch.block_table = table.data();
    AttentionWork work(heads, model, pool->num_threads());
    work.Set(batch);
    AttentionBench b = {&kernels, kv_format, &work, &batch, {}, {}, {0}};
    b.args.k_scale = b.args.v_scale = KvHasScales(kv_format) ? 0.01f : 1.0f;
    b.args.block_stride = 2 * block_values * layers;
    b.args.block_size = block;
    b.args.head_dim = dim;
    b.args.q = q.data();
    b.args.q_stride = b.args.out_stride = heads * dim;
    b.args.out = out.data();
    b.args.scale = 0.125f;
    for (int i = 0; i < pool->num_threads(); ++i) {
      b.scratch.emplace_back(AttentionScratchFloats(kMaxAttentionQueries, dim) * 4, "scratch");
    }
    double best = 1e9;
    const double start = Seconds();
    for (size_t layer = 0; Seconds() - start < kSecondsEach; layer = (layer + 1) % layers) {
      const size_t half = block_values * KvValueBytes(kv_format);
      b.args.k_pool = pool_bytes.as<uint8_t>() + 2 * half * layer;
      b.args.v_pool = pool_bytes.as<uint8_t>() + 2 * half * layer + half;
      const double round = Seconds();
      b.next = 0;
      pool->Run(RunAttention, &b);
      best = std::min(best, Seconds() - round);
    }
    double pairs = 0;  // of queries and positions
    for (int32_t r = 0; r < c.rows; ++r) pairs += c.seqs * heads * (c.kv_len - c.rows + r + 1.0);
    char name[64];
    snprintf(name, sizeof(name), "%d x %d rows, %d long", c.seqs, c.rows, c.kv_len);
    printf("%-22s %9.1f %9.1f %9.1f\n", name, best * 1e6, 4 * dim * pairs / best * 1e-9,
           2e-9 * static_cast<double>(bytes) / best);
  }
  printf("peaks: %.1f GFLOP/s, %.1f GB/s\n", peaks.fma_gflop_s, peaks.read_gb_s);
}

// SmolLM2-135M's shape.
void BenchModel(const KernelTable& kernels, int32_t threads, uint32_t dtype, bool float_inputs) {
  TinyShape shape;
  shape.vocab = 49152;
  shape.hidden = 576;
  shape.layers = 30;
  shape.heads = 9;
  shape.kv_heads = 3;
  shape.dim = 64;
  shape.inner = 1536;
  shape.block = 32;
  shape.max_tokens = 512;
  shape.max_batch = 64;
  shape.max_len = 1024;
  shape.dtype = dtype;
  shape.group_size = dtype == kI4 ? 64 : dtype == kF4 ? 16 : 0;
  if (float_inputs) shape.input = kInputFloat;
  const TempFile file;
  {
    TinyModel model(shape);
    file.Write(model.plan.Bytes());
  }
  const char* names[kNumDTypes] = {"f32", "bf16", "i8", "i4", "f16", "f8", "f4"};
  for (int32_t batch : {1, 16}) {
    Driver driver(file.path(), kernels.name, threads, 600);
    std::vector<Driver::Sequence> sequences(static_cast<size_t>(batch));
    const int32_t prompt = 116, steps = 76;  // of each: 1853 and 1210 tokens over 16
    double prefill = 0, decode = 0;
    for (Driver::Sequence& s : sequences) s.ids.assign(1024, 7);
    for (size_t i = 0; i < sequences.size(); i += 4) {
      std::vector<int32_t> counts(sequences.size(), 0);
      for (size_t j = i; j < std::min(i + 4, sequences.size()); ++j) counts[j] = prompt;
      const double start = Seconds();
      driver.Step(&sequences, counts, /*last_only=*/true);
      prefill += Seconds() - start;
    }
    double best = 1e9;
    for (int32_t i = 0; i < steps; ++i) {
      const double start = Seconds();
      driver.Step(&sequences, std::vector<int32_t>(sequences.size(), 1), true);
      decode += Seconds() - start;
      best = std::min(best, Seconds() - start);
    }
    printf(
        "%s x %s, %d sequences: prefill %.0f tokens/s, decode %.0f tokens/s (best step %.2f ms), "
        "generated %.0f "
        "tokens/s over all\n",
        names[dtype], float_inputs ? "f32" : "i8", batch, batch * prompt / prefill,
        batch * steps / decode, best * 1e3, batch * (steps + 1) / (prefill + decode));
  }
}

}  // namespace

int main(int argc, char** argv) {
  const KernelTable& kernels =
      ChooseKernels(argc > 1 && strcmp(argv[1], "best") != 0 ? argv[1] : nullptr);
  const int threads = argc > 2 ? std::max(1, atoi(argv[2])) : NumUsableCores();
  const std::string what = argc > 3 ? argv[3] : "";
  ThreadPool pool(threads, false);
  const bool vnni = strncmp(kernels.name, "avx512", 6) == 0 || kernels.dot_tiles != nullptr;
  const bool avx2 = vnni || strcmp(kernels.name, "avx2") == 0;
  const Peaks peaks = MeasurePeaks(&pool, avx2, vnni, kernels.has_bf16_dots, kernels.dot_tiles);
  printf(
      "%s, %d threads; peaks: read %.1f GB/s, fp32 FMA %.0f GFLOP/s, bf16 %.0f GFLOP/s, int8 %.0f "
      "GOP/s\n",
      kernels.name, threads, peaks.read_gb_s, peaks.fma_gflop_s, peaks.bf16_gflop_s,
      peaks.int8_gop_s);
  if (what.empty() || what == "linear") BenchLinear(kernels, &pool, peaks);
  if (what.empty() || what == "attention") {
    for (uint32_t format : {kKvF32, kKvF16, kKvF8, kKvI8})
      BenchAttention(kernels, format, &pool, peaks);
  }
  if (what.empty() || what == "model") {
    for (uint32_t dtype : {kI8, kI4}) BenchModel(kernels, threads, dtype, false);
    for (uint32_t dtype : {kI8, kI4, kF8, kF4, kF16, kBF16, kF32}) {
      BenchModel(kernels, threads, dtype, true);
    }
  }
  return 0;
}
