// The CPU executor through the C API: logits against float64, the same bits for every batching and
// thread count, and an error for every bad batch.
//
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <memory>

#include "driver.h"
#include "isas.h"
#include "resident_bytes.h"
#include "steps.h"
#include "tiny_model.h"

using namespace plansmith::cpu;

namespace {

std::vector<int32_t> RandomIds(Random* random, size_t n, uint32_t vocab) {
  std::vector<int32_t> ids(n);
  for (int32_t& id : ids) id = static_cast<int32_t>(random->Below(vocab));
  return ids;
}

// Root of the mean square of the difference, relative to that of `want`.
double RelativeError(const std::vector<float>& got, const std::vector<double>& want) {
  CHECK(got.size() == want.size());
  double error = 0, size = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    error += (got[i] - want[i]) * (got[i] - want[i]);
    size += want[i] * want[i];
  }
  return std::sqrt(error / size);
}

struct Precision {
  const char* name;
  double allowed;  // RelativeError: float32 rounding, or int8 activations (1/127 of the largest,
                   // several layers), or a few codes that fall the other way
  void (*set)(TinyShape* shape);
};
void SetF4(TinyShape* s) {
  s->dtype = kF4;
  s->group_size = 16;
  s->hidden = 48;
  s->inner = 64;
}

const Precision kPrecisions[] = {
    {"f32", 1e-5, [](TinyShape* s) { s->dtype = kF32; }},
    {"bf16", 1e-5, [](TinyShape* s) { s->dtype = kBF16; }},
    {"f16", 1e-5, [](TinyShape* s) { s->dtype = kF16; }},
    {"i8", 0.03, [](TinyShape* s) { s->dtype = kI8; }},
    {"i4", 0.03, [](TinyShape* s) { s->dtype = kI4; }},
    {"i4 by group", 0.03,
     [](TinyShape* s) {
       s->dtype = kI4;
       s->group_size = 8;
       s->scale_dtype = kBF16;
       s->by_group = true;
     }},
    {"i8, float inputs", 1e-5,
     [](TinyShape* s) {
       s->dtype = kI8;
       s->input = kInputFloat;
     }},
    {"i8, static inputs", 1e-5,
     [](TinyShape* s) {
       s->dtype = kI8;
       s->input = kInputInt8Static;
     }},
    {"i4, float inputs", 1e-5,
     [](TinyShape* s) {
       s->dtype = kI4;
       s->group_size = 8;
       s->input = kInputFloat;
       s->pre_scale = true;
     }},
    {"i4 with zero points", 1e-5,
     [](TinyShape* s) {
       s->dtype = kI4;
       s->group_size = 8;
       s->input = kInputFloat;
       s->with_zeros = true;
     }},
    {"f8", 1e-5, [](TinyShape* s) { s->dtype = kF8; }},
    {"f8, E4M3 inputs by row", 1e-3,
     [](TinyShape* s) {
       s->dtype = kF8;
       s->input = kInputF8Row;
     }},
    {"f8, E4M3 inputs by group", 1e-3,
     [](TinyShape* s) {
       s->dtype = kF8;
       s->group_size = 8;
       s->input = kInputF8Group;
     }},
    {"f8, static E4M3 inputs", 1e-3,
     [](TinyShape* s) {
       s->dtype = kF8;
       s->group_size = 4;
       s->input = kInputF8Static;
       s->pre_scale = true;
     }},
    {"f8, rounded by row", 1e-3,
     [](TinyShape* s) {
       s->dtype = kF8;
       s->round = kRoundF8;
     }},
    {"f8, rounded by group", 1e-3,
     [](TinyShape* s) {
       s->dtype = kF8;
       s->group_size = 8;
       s->round = kRoundF8;
       s->round_group = 8;
     }},
    {"f8, rounded statically", 1e-3,
     [](TinyShape* s) {
       s->dtype = kF8;
       s->round = kRoundF8;
       s->round_group = -1;
       s->pre_scale = true;
     }},
    {"f4", 1e-5, [](TinyShape* s) { SetF4(s); }},
    {"f4, rounded", 1e-3,
     [](TinyShape* s) {
       SetF4(s);
       s->round = kRoundF4;
       s->round_group = 16;
     }},
    {"f32, plain logits", 1e-5, [](TinyShape* s) { s->plain_logits = true; }},
    {"i8, plain logits", 0.03,
     [](TinyShape* s) {
       s->dtype = kI8;
       s->plain_logits = true;
       s->vocab = 700;  // of several items, and not a multiple of a tile
     }},
    {"f32, split logits", 1e-5,
     [](TinyShape* s) {
       s->plain_logits = true;
       s->split_logits = true;
     }},
    {"f16 KV", 1e-5, [](TinyShape* s) { s->kv_format = kKvF16; }},
    {"f8 KV", 1e-5, [](TinyShape* s) { s->kv_format = kKvF8; }},
    {"i8 KV", 1e-5, [](TinyShape* s) { s->kv_format = kKvI8; }},
};

TinyShape ShapeOf(const Precision& p) {
  TinyShape shape;
  p.set(&shape);
  return shape;
}

void CheckPrecision(const Precision& p, const char* isa) {
  const TinyModel built(ShapeOf(p));
  TinyModel model = built;
  const TempFile file;
  file.Write(model.plan.Bytes());
  Random random(21);
  std::vector<std::vector<int32_t>> prompts;
  for (size_t n : {60, 1, 33, 47}) prompts.push_back(RandomIds(&random, n, model.s.vocab));

  std::vector<std::vector<float>> alone;
  for (const std::vector<int32_t>& ids : prompts) {
    Driver driver(file.path(), isa, 1, 40);
    std::vector<Driver::Sequence> one(1);
    one[0].ids = ids;
    driver.Step(&one, {static_cast<int32_t>(ids.size())});
    const double error = RelativeError(one[0].logits, model.Forward(ids));
    if (error > p.allowed) {
      fprintf(stderr, "%s %s: relative error %g, wanted %g\n", isa, p.name, error, p.allowed);
      exit(1);
    }
    alone.push_back(one[0].logits);
  }
  for (int32_t threads : {1, 2, 3}) {
    Driver driver(file.path(), isa, threads, 60, static_cast<uint64_t>(threads));
    // Candidates come from the product that makes whole rows of logits, where there is one.
    const bool has_candidates = model.s.plain_logits && !model.s.split_logits;
    CHECK(driver.info.samples_rows == (has_candidates ? PSM_SAMPLES_CANDIDATES : PSM_SAMPLES_NONE));
    for (int round = 0; round < 3; ++round) {  // later rounds find the pools used
      std::vector<Driver::Sequence> sequences(prompts.size());
      for (size_t i = 0; i < prompts.size(); ++i) sequences[i].ids = prompts[i];
      for (bool more = true; more;) {
        more = false;
        std::vector<int32_t> counts;
        int32_t budget = driver.info.max_num_tokens;
        for (const Driver::Sequence& s : sequences) {
          const int32_t left = static_cast<int32_t>(s.ids.size()) - s.done;
          const int32_t n = std::min({left, budget, static_cast<int32_t>(random.Below(20))});
          counts.push_back(n);
          budget -= n;
          more |= left > 0;
        }
        if (std::all_of(counts.begin(), counts.end(), [](int32_t n) { return n == 0; })) continue;
        driver.Step(&sequences, counts);
      }
      for (size_t i = 0; i < prompts.size(); ++i) {
        CHECK(sequences[i].logits.size() == alone[i].size());
        CHECK(memcmp(sequences[i].logits.data(), alone[i].data(),
                     alone[i].size() * sizeof(float)) == 0);
        driver.Free(&sequences[i]);
      }
    }
  }
}

// A NaN in one value of one head reaches the logits, so that the engine can fail the request.
void CheckNan(const Precision& p, const char* isa) {
  TinyModel model(ShapeOf(p));
  const uint32_t q = model.s.heads * model.s.dim, kv = model.s.kv_heads * model.s.dim;
  for (Packed& t : model.plan.tensors) {
    if (t.record.rows != 1 || t.record.cols != q + 2 * kv) continue;  // the bias of q, k and v
    const float nan = NAN;
    memcpy(t.data.data() + (q + kv) * sizeof(float), &nan, sizeof(nan));
  }
  const TempFile file;
  file.Write(model.plan.Bytes());
  Driver driver(file.path(), isa, 2, 4);
  std::vector<Driver::Sequence> one(1);
  one[0].ids = {1, 2, 3};
  driver.Step(&one, {3});
  for (float y : one[0].logits) CHECK(std::isnan(y));
}

// A valid batch of two sequences that each bad batch differs from in one entry.
struct BatchArrays {
  std::vector<int32_t> ids = {1, 2, 3}, positions = {0, 1, 4}, query_lens = {2, 1},
                       kv_lens = {2, 5}, cu = {0, 2, 3}, table = {4, -1, 5, -1}, rows = {1, 2};
  psm_batch batch = {};
  psm_batch* Get() {
    batch.struct_size = PSM_BATCH_SIZE;
    batch.num_tokens = 3;
    batch.num_seqs = 2;
    batch.num_logits_rows = 2;
    batch.block_table_stride = 2;
    batch.input_ids = ids.data();
    batch.position_ids = positions.data();
    batch.query_lens = query_lens.data();
    batch.kv_lens = kv_lens.data();
    batch.cu_query_lens = cu.data();
    batch.block_table = table.data();
    batch.logits_rows = rows.data();
    return &batch;
  }
};

void Refused(Driver* driver, psm_batch* batch, psm_status code, const char* text) {
  const float* logits = reinterpret_cast<const float*>(batch);
  const psm_status status = driver->executor.step(driver->executor.self, batch, &logits);
  if (status != code || strstr(psm_last_error(), text) == nullptr) {
    fprintf(stderr, "got %s \"%s\", wanted \"%s\"\n", psm_status_name(status), psm_last_error(),
            text);
    exit(1);
  }
  CHECK(logits == nullptr);
  CHECK(strcmp(driver->executor.last_error(driver->executor.self), psm_last_error()) == 0);
}

void CheckBadBatches(const std::string& path) {
  Driver driver(path, nullptr, 2, 6);
  const float* logits;
  BatchArrays good;
  CHECK_OK(driver.executor.step(driver.executor.self, good.Get(), &logits));
  good.Get()->num_logits_rows = 0;
  CHECK_OK(driver.executor.step(driver.executor.self, &good.batch, &logits));
  const struct {
    std::vector<int32_t> BatchArrays::* array;
    size_t idx;
    int32_t value;
    psm_status code;
    const char* text;
  } bad[] = {
      {&BatchArrays::ids, 1, -1, PSM_ERROR_INVALID_ARGUMENT, "input_ids[1] is -1"},
      {&BatchArrays::ids, 2, 83, PSM_ERROR_INVALID_ARGUMENT, "input_ids[2] is 83, wanted 0 to 82"},
      {&BatchArrays::positions, 0, 96, PSM_ERROR_INVALID_ARGUMENT, "position_ids[0] is 96"},
      {&BatchArrays::query_lens, 0, 0, PSM_ERROR_SHAPE, "query_lens[0] is 0"},
      {&BatchArrays::query_lens, 1, 2, PSM_ERROR_SHAPE, "query_lens[1] is 2"},
      {&BatchArrays::query_lens, 0, 1, PSM_ERROR_INVALID_ARGUMENT, "cu_query_lens[1] is 2"},
      {&BatchArrays::kv_lens, 0, 1, PSM_ERROR_SHAPE, "kv_lens[0] is 1"},
      {&BatchArrays::kv_lens, 1, 97, PSM_ERROR_SHAPE, "kv_lens[1] is 97"},
      {&BatchArrays::kv_lens, 1, 17, PSM_ERROR_SHAPE, "needs 3 blocks of 8, block_table has 2"},
      {&BatchArrays::kv_lens, 1, 9, PSM_ERROR_INVALID_ARGUMENT, "block_table[1][1] is -1"},
      {&BatchArrays::table, 0, 6, PSM_ERROR_INVALID_ARGUMENT, "block_table[0][0] is 6"},
      {&BatchArrays::table, 2, 4, PSM_ERROR_INVALID_ARGUMENT, "this step also writes it"},
      {&BatchArrays::cu, 2, 4, PSM_ERROR_SHAPE, "cu_query_lens ends with 4"},
      {&BatchArrays::rows, 0, 2, PSM_ERROR_INVALID_ARGUMENT, "logits_rows[1] is 2"},
      {&BatchArrays::rows, 1, 3, PSM_ERROR_INVALID_ARGUMENT, "logits_rows[1] is 3"},
  };
  for (const auto& b : bad) {
    BatchArrays arrays;
    (arrays.*b.array)[b.idx] = b.value;
    Refused(&driver, arrays.Get(), b.code, b.text);
  }
  BatchArrays a;
  a.Get()->num_tokens = 65;
  Refused(&driver, &a.batch, PSM_ERROR_SHAPE, "num_tokens is 65, the executor takes 1 to 64");
  a.Get()->num_seqs = 9;
  Refused(&driver, &a.batch, PSM_ERROR_SHAPE, "num_seqs is 9");
  a.Get()->num_logits_rows = 4;
  Refused(&driver, &a.batch, PSM_ERROR_SHAPE, "num_logits_rows is 4");
  a.Get()->struct_size = 8;
  Refused(&driver, &a.batch, PSM_ERROR_INVALID_ARGUMENT, "struct_size is 8");
  a.Get()->kv_lens = nullptr;
  Refused(&driver, &a.batch, PSM_ERROR_INVALID_ARGUMENT, "NULL");
  // A block that another sequence only reads must not be written either.
  BatchArrays shared;
  shared.kv_lens[1] = 9;
  shared.table = {4, -1, 4, 5};
  Refused(&driver, shared.Get(), PSM_ERROR_INVALID_ARGUMENT, "this step also writes it");
  // Sharing what nobody writes is fine.
  BatchArrays prefix;
  prefix.kv_lens = {10, 9};
  prefix.table = {3, 4, 3, 5};
  CHECK_OK(driver.executor.step(driver.executor.self, prefix.Get(), &logits));
}

void CheckApi(const std::string& path) {
  psm_executor executor;
  psm_cpu_options options = {};
  psm_cpu_options_init(&options);
  CHECK(psm_cpu_executor_create(nullptr, nullptr, &executor) == PSM_ERROR_INVALID_ARGUMENT);
  CHECK(psm_cpu_executor_create("/no/such/plan", nullptr, &executor) == PSM_ERROR_ENGINE_FILE);
  CHECK(strstr(psm_last_error(), "/no/such/plan") != nullptr && executor.self == nullptr);
  options.isa = "sse9";
  CHECK(psm_cpu_executor_create(path.c_str(), &options, &executor) == PSM_ERROR_INVALID_ARGUMENT);
  CHECK(strstr(psm_last_error(), UsableIsaNames()) != nullptr);
  psm_cpu_options_init(&options);
  options.num_threads = -1;
  CHECK(psm_cpu_executor_create(path.c_str(), &options, &executor) == PSM_ERROR_INVALID_ARGUMENT);
  struct {
    psm_cpu_options options;
    int32_t newer;
  } future = {};
  psm_cpu_options_init(&future.options);
  future.options.struct_size = sizeof(future);
  future.newer = 1;
  CHECK(psm_cpu_executor_create(path.c_str(), &future.options, &executor) ==
        PSM_ERROR_INVALID_ARGUMENT);
  future.newer = 0;
  CHECK_OK(psm_cpu_executor_create(path.c_str(), &future.options, &executor));

  psm_model_info info = {};
  CHECK(executor.describe(executor.self, &info) == PSM_ERROR_INVALID_ARGUMENT);
  info.struct_size = PSM_MODEL_INFO_SIZE;
  CHECK_OK(executor.describe(executor.self, &info));
  CHECK(info.vocab_size == 83 && info.tokens_per_block == 8);
  CHECK(info.kv_bytes_per_block == 2 * 2 * 2 * 8 * 8 * 4);
  BatchArrays arrays;
  const float* logits;
  CHECK(executor.step(executor.self, arrays.Get(), &logits) == PSM_ERROR_INVALID_ARGUMENT);
  CHECK(strstr(psm_last_error(), "not open") != nullptr);
  CHECK(executor.open(executor.self, 0) == PSM_ERROR_INVALID_ARGUMENT);
  CHECK_OK(executor.open(executor.self, 6));
  CHECK(executor.open(executor.self, 6) == PSM_ERROR_INVALID_ARGUMENT);
  executor.close(executor.self);

  psm_cpu_options_init(&options);
  options.struct_size = PSM_CPU_OPTIONS_SIZE;
  options.weights = options.profile = 0;
  options.max_num_tokens = -1;
  CHECK(psm_cpu_executor_create(path.c_str(), &options, &executor) == PSM_ERROR_INVALID_ARGUMENT);
  CHECK(strstr(psm_last_error(), "max_num_tokens is -1") != nullptr);
  options.max_num_tokens = 9;
  CHECK_OK(psm_cpu_executor_create(path.c_str(), &options, &executor));
  CHECK_OK(executor.describe(executor.self, &info));
  CHECK(info.max_num_tokens == 9);
  executor.close(executor.self);
  options.reserved = 1;
  CHECK(psm_cpu_executor_create(path.c_str(), &options, &executor) == PSM_ERROR_INVALID_ARGUMENT);

  psm_cpu_options_init(&options);
  options.num_threads = 2;
  options.pin_threads = 1;
  CHECK_OK(psm_cpu_executor_create(path.c_str(), &options, &executor));
  CHECK_OK(executor.open(executor.self, 6));
  CHECK_OK(executor.step(executor.self, arrays.Get(), &logits));
  executor.close(executor.self);
}

// The steps of days: numbers of stages come to their end and begin anew.
void CheckManySteps() {
  const TempFile file;
  file.Write(TinyModel(TinyShape()).plan.Bytes());
  const auto make = [&](int threads) {
    return std::make_unique<Executor>(file.path(), threads, false, nullptr, LoraLimits{0, 0},
                                      WeightsIn::kAuto, false);
  };
  const auto few = make(1), many = make(4);
  const psm_model_info info = few->Describe();
  Steps steps(info, 1);
  few->Open(steps.num_blocks());
  many->Open(steps.num_blocks());
  for (uint32_t first : {0x7fffffffu, 0x80000000u, 0x80000001u, 0xfffffff0u}) {
    many->NumberStagesFrom(first);
    steps.Rewind(0, 0);
    for (int32_t rows : {30, 1, 1, 20}) {
      const psm_batch& batch = steps.Next({rows}, first, true);
      const float* want = few->Step(batch);
      const size_t bytes = static_cast<size_t>(info.vocab_size) * sizeof(float);
      CHECK(memcmp(want, many->Step(batch), bytes) == 0);
    }
  }
}

// What an executor takes, from its creation on, is that of its own limits and not of the plan's.
void CheckFewerTokens() {
  TinyShape shape;
  shape.vocab = 5003;
  shape.max_tokens = 4096;
  shape.plain_logits = true;
  const TempFile file;
  file.Write(TinyModel(shape).plan.Bytes());
  const auto make = [&](int32_t max_num_tokens, size_t* bytes) {
    const size_t before = MappedBytes();
    auto executor = std::make_unique<Executor>(file.path(), 1, false, nullptr, LoraLimits{0, 0},
                                               WeightsIn::kMapped, false, true, max_num_tokens);
    *bytes = MappedBytes() - before;
    return executor;
  };
  size_t all_bytes, few_bytes, most_bytes;
  const auto all = make(0, &all_bytes), few = make(24, &few_bytes), most = make(5000, &most_bytes);
  const size_t logits = size_t{shape.vocab} * shape.max_tokens * sizeof(float);
  if (MappedBytes() > 0) CHECK(all_bytes >= logits && few_bytes < all_bytes - logits / 2);
  CHECK(all->Describe().max_num_tokens == 4096 && most->Describe().max_num_tokens == 4096);
  const psm_model_info info = few->Describe();
  CHECK(info.max_num_tokens == 24 && info.max_logits_rows == 24 && info.max_batch_size == 8);
  Steps steps(all->Describe(), 2);
  all->Open(steps.num_blocks());
  few->Open(steps.num_blocks());
  for (const std::vector<int32_t>& counts : {std::vector<int32_t>{20, 4}, {1, 1}, {0, 24}}) {
    psm_batch batch = steps.Next(counts, 3, true);
    std::vector<int32_t> rows;  // of every token
    for (int32_t row = 0; row < batch.num_tokens; ++row) rows.push_back(row);
    batch.logits_rows = rows.data();
    batch.num_logits_rows = batch.num_tokens;
    const float* want = all->Step(batch);
    const size_t bytes = rows.size() * shape.vocab * sizeof(float);
    CHECK(memcmp(want, few->Step(batch), bytes) == 0);
  }
  const psm_batch& batch = steps.Next({25, 0}, 3, true);
  all->Step(batch);
  try {
    few->Step(batch);
    CHECK(false);
  } catch (const plansmith::StatusError& e) {
    CHECK(e.code() == PSM_ERROR_SHAPE && strstr(e.what(), "24") != nullptr);
  }
}

// Pools far beyond any address space; the executor stays usable.
void CheckOutOfMemory() {
  TinyShape shape;
  shape.heads = shape.kv_heads = 8;
  shape.dim = shape.block = shape.max_len = 256;
  TinyModel model(shape);
  const TempFile file;
  file.Write(model.plan.Bytes());
  psm_executor executor;
  CHECK_OK(psm_cpu_executor_create(file.path().c_str(), nullptr, &executor));
  CHECK(executor.open(executor.self, INT32_MAX) == PSM_ERROR_OUT_OF_MEMORY);
  CHECK_OK(executor.open(executor.self, 6));
  BatchArrays arrays;
  const float* logits;
  CHECK_OK(executor.step(executor.self, arrays.Get(), &logits));
  executor.close(executor.self);
}

}  // namespace

int main() {
  for (const KernelTable* kernels : UsableTables()) {
    for (const Precision& p : kPrecisions) {
      CheckPrecision(p, kernels->name);
      CheckNan(p, kernels->name);
    }
    printf("%s: ok\n", kernels->name);
  }
  TinyModel model{TinyShape()};
  const TempFile file;
  file.Write(model.plan.Bytes());
  CheckBadBatches(file.path());
  CheckApi(file.path());
  CheckManySteps();
  CheckFewerTokens();
  CheckOutOfMemory();
  return 0;
}
