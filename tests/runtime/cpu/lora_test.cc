// LoRA adapters of the CPU executor: logits against float64, the same bits in every mixed batch, no
// trace in rows without one, and an error for every adapter that does not fit.
//
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "driver.h"
#include "isas.h"
#include "tiny_model.h"

using namespace plansmith::cpu;

namespace {

struct Module {
  int32_t layer, module, rank;
  uint32_t in, out;
  float scale;
  std::vector<float> a, b;
};
using Adapter = std::vector<Module>;

// Modules of a product, in the order of its columns; products of a layer in the order of the plan.
const std::vector<std::vector<int32_t>> kProducts = {
    {PSM_LORA_ATTN_Q, PSM_LORA_ATTN_K, PSM_LORA_ATTN_V},
    {PSM_LORA_ATTN_DENSE},
    {PSM_LORA_MLP_GATE, PSM_LORA_MLP_UP},
    {PSM_LORA_MLP_DOWN}};

uint32_t OutOf(const TinyShape& s, int32_t module) {
  switch (module) {
    case PSM_LORA_ATTN_Q:
      return s.heads * s.dim;
    case PSM_LORA_ATTN_K:
    case PSM_LORA_ATTN_V:
      return s.kv_heads * s.dim;
    case PSM_LORA_MLP_UP:
    case PSM_LORA_MLP_GATE:
      return s.inner;
    default:
      return s.hidden;
  }
}

uint32_t InOf(const TinyShape& s, int32_t module) {
  return module == PSM_LORA_ATTN_DENSE ? s.heads * s.dim
         : module == PSM_LORA_MLP_DOWN ? s.inner
                                       : s.hidden;
}

// Large enough that a module left out moves the logits far.
Module RandomModule(const TinyShape& s, Random* random, int32_t layer, int32_t module,
                    int32_t rank) {
  Module m = {layer, module, rank, InOf(s, module), OutOf(s, module), random->Uniform(0.5f, 2.0f),
              {},    {}};
  const float size = 1 / std::sqrt(static_cast<float>(rank));
  m.a = random->Floats(static_cast<size_t>(rank) * m.in, 1 / std::sqrt(static_cast<float>(m.in)));
  m.b = random->Floats(static_cast<size_t>(rank) * m.out, size);
  return m;
}

// [0] everything at ranks of its own, [1] q and v, [2] one module of the last layer, [3] the rest
// of the modules at the largest rank.
std::vector<Adapter> RandomAdapters(const TinyShape& s) {
  Random random(77);
  std::vector<Adapter> adapters(4);
  const int32_t ranks[] = {1, 5, 16, 17, 33, 64, 3};
  for (int32_t layer = 0; layer < static_cast<int32_t>(s.layers); ++layer) {
    for (int32_t module = 1; module <= 7; ++module) {
      adapters[0].push_back(RandomModule(s, &random, layer, module, ranks[module - 1]));
      const bool is_qv = module == PSM_LORA_ATTN_Q || module == PSM_LORA_ATTN_V;
      adapters[is_qv ? 1 : 3].push_back(RandomModule(s, &random, layer, module, is_qv ? 8 : 64));
    }
  }
  const int32_t last = static_cast<int32_t>(s.layers) - 1;
  adapters[2].push_back(RandomModule(s, &random, last, PSM_LORA_MLP_UP, 4));
  adapters[2].back().scale = 5;
  // In no order.
  std::reverse(adapters[0].begin(), adapters[0].end());
  return adapters;
}

std::vector<psm_lora_module> Structs(const Adapter& adapter) {
  std::vector<psm_lora_module> structs;
  for (const Module& m : adapter) {
    structs.push_back({m.layer, m.module, m.rank, static_cast<int32_t>(m.in),
                       static_cast<int32_t>(m.out), m.scale, m.a.data(), m.b.data()});
  }
  return structs;
}

psm_status Load(Driver* driver, int32_t slot, const std::vector<psm_lora_module>& modules) {
  const psm_executor& e = driver->executor;
  return e.load_adapter(e.self, slot, modules.data(), modules.size());
}

// The update in float64; products are counted, so nothing here depends on their names.
TinyModel::Update UpdateOf(const TinyModel& model, const Adapter& adapter) {
  std::vector<int32_t> product_of(model.plan.ops.size(), -1);
  int32_t count = 0;
  for (size_t i = 0; i < model.plan.ops.size(); ++i) {
    if (model.plan.ops[i].code == kOpLinear) product_of[i] = count++;
  }
  return [&model, &adapter, product_of](size_t op_idx, const double* x, double* out) {
    const size_t product = static_cast<size_t>(product_of[op_idx]);
    const size_t layer = product / kProducts.size();
    if (layer >= model.s.layers) return;  // the logits
    for (const int32_t module : kProducts[product % kProducts.size()]) {
      for (const Module& m : adapter) {
        if (m.layer != static_cast<int32_t>(layer) || m.module != module) continue;
        for (size_t r = 0; r < static_cast<size_t>(m.rank); ++r) {
          double inner = 0;
          for (size_t k = 0; k < m.in; ++k) inner += x[k] * m.a[r * m.in + k];
          for (size_t n = 0; n < m.out; ++n) {
            out[n] += m.scale * inner * m.b[n * static_cast<size_t>(m.rank) + r];
          }
        }
      }
      out += OutOf(model.s, module);
    }
  };
}

template <typename Want>
double RelativeError(const std::vector<float>& got, const std::vector<Want>& want) {
  CHECK(got.size() == want.size());
  double error = 0, size = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    error += (got[i] - want[i]) * (got[i] - want[i]);
    size += want[i] * want[i];
  }
  return std::sqrt(error / size);
}

struct Case {
  const char* name;
  uint32_t dtype, group_size;
  bool by_group, gather_early;
  double allowed;        // RelativeError: float32 rounding, or int8 activations over several layers
  bool rounded = false;  // to F8, after a vector of factors: adapters take what was there before
};
constexpr Case kCases[] = {{"f32", kF32, 0, false, false, 1e-5},
                           {"f32 early", kF32, 0, false, true, 1e-5},
                           {"bf16 early", kBF16, 0, false, true, 1e-5},
                           {"i8 early", kI8, 0, false, true, 0.03},
                           {"i4 by group", kI4, 8, true, true, 0.03},
                           {"f8, rounded", kF8, 0, false, false, 1e-5, true},
                           {"f8, rounded, early", kF8, 0, false, true, 1e-5, true}};

TinyShape ShapeOf(const Case& c) {
  TinyShape shape;
  shape.dtype = c.dtype;
  shape.group_size = c.group_size;
  shape.by_group = c.by_group;
  shape.gather_early = c.gather_early;
  shape.pre_scale = c.rounded;
  shape.round = c.rounded ? kRoundF8 : -1;
  return shape;
}

std::vector<float> RunAlone(Driver* driver, const std::vector<int32_t>& ids, int32_t adapter) {
  std::vector<Driver::Sequence> one(1);
  one[0].ids = ids;
  one[0].adapter = adapter;
  driver->Step(&one, {static_cast<int32_t>(ids.size())});
  const std::vector<float> logits = one[0].logits;
  driver->Free(&one[0]);
  return logits;
}

// Random cuts into mixed steps, in a random order of sequences, until all are done.
void RunMixed(Driver* driver, std::vector<Driver::Sequence>* sequences, Random* random,
              bool last_only) {
  for (bool more = true; more;) {
    more = false;
    std::vector<int32_t> counts;
    int32_t budget = driver->info.max_num_tokens;
    for (const Driver::Sequence& s : *sequences) {
      const int32_t left = static_cast<int32_t>(s.ids.size()) - s.done;
      const int32_t n = std::min({left, budget, static_cast<int32_t>(random->Below(20))});
      counts.push_back(n);
      budget -= n;
      more |= left > 0;
    }
    if (std::all_of(counts.begin(), counts.end(), [](int32_t n) { return n == 0; })) continue;
    driver->Step(sequences, counts, last_only);
  }
}

void CheckMixed(const std::string& path, const char* isa, const std::vector<Adapter>& adapters,
                const std::vector<std::vector<int32_t>>& prompts,
                const std::vector<int32_t>& adapter_of,
                const std::vector<std::vector<float>>& alone) {
  Random random(5);
  const size_t vocab = 83;
  for (int32_t threads : {1, 2, 3}) {
    Driver driver(path, isa, threads, 80, static_cast<uint64_t>(threads));
    // Other slots than alone: 7, 6, 5, 4.
    for (size_t i = 0; i < adapters.size(); ++i) {
      CHECK_OK(Load(&driver, 7 - static_cast<int32_t>(i), Structs(adapters[i])));
    }
    for (int round = 0; round < 4; ++round) {
      std::vector<size_t> order(prompts.size());
      for (size_t i = 0; i < order.size(); ++i) order[i] = i;
      for (size_t i = order.size(); i > 1; --i) {
        std::swap(order[i - 1], order[random.Below(static_cast<uint32_t>(i))]);
      }
      std::vector<Driver::Sequence> sequences(prompts.size());
      for (size_t i = 0; i < order.size(); ++i) {
        sequences[i].ids = prompts[order[i]];
        sequences[i].adapter = adapter_of[order[i]] < 0 ? -1 : 7 - adapter_of[order[i]];
      }
      const bool last_only = round % 2 == 1;
      RunMixed(&driver, &sequences, &random, last_only);
      for (size_t i = 0; i < order.size(); ++i) {
        const std::vector<float>& want = alone[order[i]];
        const std::vector<float>& got = sequences[i].logits;
        const size_t n = last_only ? vocab : want.size();
        CHECK(got.size() >= n);
        CHECK(memcmp(&got[got.size() - n], &want[want.size() - n], n * sizeof(float)) == 0);
        driver.Free(&sequences[i]);
      }
    }
  }
}

void CheckCase(const Case& c, const char* isa) {
  TinyModel model(ShapeOf(c));
  const std::vector<Adapter> adapters = RandomAdapters(model.s);
  const TempFile file;
  file.Write(model.plan.Bytes());
  Random random(21);
  std::vector<std::vector<int32_t>> prompts;
  for (const size_t n : {60, 1, 33, 47, 33, 20, 5}) {
    prompts.emplace_back(n);
    for (int32_t& id : prompts.back()) id = static_cast<int32_t>(random.Below(model.s.vocab));
  }
  prompts[4] = prompts[2];  // the same tokens with another adapter
  const std::vector<int32_t> adapter_of = {0, 3, 1, -1, 2, 0, 3};
  std::vector<std::vector<float>> alone;
  Driver driver(file.path(), isa, 1, 40);
  Driver plain(file.path(), isa, 1, 40);
  CHECK(driver.info.max_adapters == 8 && driver.info.max_adapter_rank == 64);
  for (size_t i = 0; i < adapters.size(); ++i) {
    CHECK_OK(Load(&driver, static_cast<int32_t>(i), Structs(adapters[i])));
  }
  for (size_t i = 0; i < prompts.size(); ++i) {
    alone.push_back(RunAlone(&driver, prompts[i], adapter_of[i]));
    const std::vector<float> without = RunAlone(&plain, prompts[i], -1);
    if (adapter_of[i] < 0) {
      CHECK(memcmp(alone[i].data(), without.data(), without.size() * sizeof(float)) == 0);
      continue;
    }
    const Adapter& adapter = adapters[static_cast<size_t>(adapter_of[i])];
    const double error =
        RelativeError(alone[i], model.Forward(prompts[i], UpdateOf(model, adapter)));
    const double effect = RelativeError(alone[i], without);
    if (error > c.allowed || effect < 3 * c.allowed) {
      fprintf(stderr, "%s %s adapter %d: relative error %g, wanted %g; effect %g\n", isa, c.name,
              adapter_of[i], error, c.allowed, effect);
      exit(1);
    }
  }
  CheckMixed(file.path(), isa, adapters, prompts, adapter_of, alone);
}

// Of this process; 0 where the system does not tell.
size_t MappedBytes() {
  FILE* file = fopen("/proc/self/statm", "r");
  if (file == nullptr) return 0;
  size_t pages = 0;
  CHECK(fscanf(file, "%zu", &pages) == 1);
  fclose(file);
  return pages * static_cast<size_t>(sysconf(_SC_PAGESIZE));
}

// A slot is used again after its adapter is gone, with nothing left of it.
void CheckUnload(const std::string& path, const std::vector<Adapter>& adapters) {
  Driver driver(path, nullptr, 2, 20);
  const psm_executor& e = driver.executor;
  const std::vector<int32_t> ids = {3, 1, 4, 1, 5, 9, 2, 6};
  const std::vector<float> without = RunAlone(&driver, ids, -1);
  CHECK_OK(Load(&driver, 2, Structs(adapters[0])));
  const std::vector<float> first = RunAlone(&driver, ids, 2);
  CHECK(e.unload_adapter(e.self, 1) == PSM_ERROR_NOT_FOUND);
  CHECK_OK(e.unload_adapter(e.self, 2));
  CHECK(e.unload_adapter(e.self, 2) == PSM_ERROR_NOT_FOUND);
  CHECK(e.unload_adapter(e.self, 8) == PSM_ERROR_INVALID_ARGUMENT);
  CHECK(e.unload_adapter(e.self, -1) == PSM_ERROR_INVALID_ARGUMENT);
  CHECK_OK(Load(&driver, 2, Structs(adapters[2])));
  const std::vector<float> second = RunAlone(&driver, ids, 2);
  CHECK(second != first && second != without);
  CHECK_OK(Load(&driver, 0, Structs(adapters[0])));
  CHECK(RunAlone(&driver, ids, 0) == first);
  CHECK(RunAlone(&driver, ids, -1) == without);
  // Its memory comes straight from the system, so the system is asked whether it goes back there.
  const size_t before = MappedBytes();
  for (int i = 0; i < 400; ++i) {
    CHECK_OK(e.unload_adapter(e.self, 2));
    CHECK_OK(Load(&driver, 2, Structs(adapters[i % 2 == 0 ? 0 : 3])));
  }
  size_t floats = 0;
  for (const Module& m : adapters[0]) floats += m.a.size() + m.b.size();
  CHECK(MappedBytes() < before + 100 * floats * sizeof(float));
}

void Refused(Driver* driver, int32_t slot, const std::vector<psm_lora_module>& modules,
             psm_status code, const char* text) {
  const psm_status status = Load(driver, slot, modules);
  if (status != code || strstr(psm_last_error(), text) == nullptr) {
    fprintf(stderr, "got %s \"%s\", wanted \"%s\"\n", psm_status_name(status), psm_last_error(),
            text);
    exit(1);
  }
  CHECK(strcmp(driver->executor.last_error(driver->executor.self), psm_last_error()) == 0);
}

void CheckBadAdapters(const std::string& path, const TinyShape& shape) {
  Driver driver(path, nullptr, 1, 8);
  Random random(3);
  const Adapter good = {RandomModule(shape, &random, 0, PSM_LORA_ATTN_K, 4),
                        RandomModule(shape, &random, 1, PSM_LORA_MLP_DOWN, 4)};
  const std::vector<psm_lora_module> base = Structs(good);
  const auto with = [&](auto&& change) {
    std::vector<psm_lora_module> modules = base;
    change(&modules[1]);
    return modules;
  };
  constexpr psm_status kInvalid = PSM_ERROR_INVALID_ARGUMENT, kShape = PSM_ERROR_SHAPE;
  Refused(&driver, -1, base, kInvalid, "slot is -1, wanted 0 to 7");
  Refused(&driver, 8, base, kInvalid, "slot is 8, wanted 0 to 7");
  Refused(&driver, 0, {}, kInvalid, "at least one module");
  Refused(&driver, 0, with([](psm_lora_module* m) { m->layer_idx = 2; }), kInvalid,
          "modules[1] (down of layer 2)");
  Refused(&driver, 0, with([](psm_lora_module* m) { m->layer_idx = -1; }), kInvalid,
          "layers 0 to 1");
  Refused(&driver, 0, with([](psm_lora_module* m) { m->module = 0; }), kInvalid, "module is 0");
  Refused(&driver, 0, with([](psm_lora_module* m) { m->module = 8; }), kInvalid, "module is 8");
  Refused(&driver, 0, with([](psm_lora_module* m) { m->rank = 0; }), kShape, "takes 1 to 64");
  Refused(&driver, 0, with([](psm_lora_module* m) { m->rank = 65; }), kShape,
          "rank is 65, the executor takes 1 to 64; create it with a larger max_adapter_rank");
  Refused(&driver, 0, with([](psm_lora_module* m) { m->in_features = 40; }), kShape,
          "has 40 in and 40 out features, the model has 56 and 40");
  Refused(&driver, 0, with([](psm_lora_module* m) { m->out_features = 41; }), kShape,
          "another model");
  Refused(&driver, 0, with([](psm_lora_module* m) { m->a = nullptr; }), kInvalid, "NULL");
  Refused(&driver, 0, with([](psm_lora_module* m) { m->b = nullptr; }), kInvalid, "NULL");
  Refused(&driver, 0, with([](psm_lora_module* m) { m->scale = NAN; }), kInvalid, "NaN");
  Refused(&driver, 0, with([](psm_lora_module* m) { m->scale = INFINITY; }), kInvalid, "infinity");
  std::vector<psm_lora_module> twice = base;
  twice.push_back(base[0]);
  Refused(&driver, 0, twice, kInvalid, "modules[2] (k of layer 0) is there twice");
  for (const float bad : {NAN, INFINITY, -INFINITY}) {
    Adapter damaged = good;
    damaged[0].a.back() = bad;
    Refused(&driver, 0, Structs(damaged), kInvalid, "modules[0] (k of layer 0): holds a NaN");
    damaged = good;
    damaged[1].b[17] = bad;
    Refused(&driver, 0, Structs(damaged), kInvalid, "modules[1] (down of layer 1): holds a NaN");
  }
  Adapter huge = good;  // finite, but not with its scale
  huge[1].b[0] = 1e38f;
  huge[1].scale = 100;
  Refused(&driver, 0, Structs(huge), kInvalid, "infinity");
  // Nothing of these is left: slot 0 is free, and is taken then.
  CHECK_OK(Load(&driver, 0, base));
  Refused(&driver, 0, base, kInvalid, "slot 0 holds an adapter already");
}

void CheckBadSlots(const std::string& path, const Adapter& adapter) {
  Driver driver(path, nullptr, 1, 8);
  const psm_executor& e = driver.executor;
  CHECK_OK(Load(&driver, 3, Structs(adapter)));
  const int32_t ids[] = {1, 2}, positions[] = {0, 0}, ones[] = {1, 1}, cu[] = {0, 1, 2},
                table[] = {0, 1}, rows[] = {0, 1};
  int32_t slots[] = {-1, 3};
  psm_batch batch = {PSM_BATCH_SIZE, 2,  2,     2,    1,     ids, positions, ones,
                     ones,           cu, table, rows, slots, 0,   nullptr};
  const float* logits = nullptr;
  CHECK_OK(e.step(e.self, &batch, &logits));
  for (const int32_t bad : {-2, 2, 8, INT32_MAX, INT32_MIN}) {
    slots[1] = bad;
    CHECK(e.step(e.self, &batch, &logits) == PSM_ERROR_INVALID_ARGUMENT);
    CHECK(strstr(psm_last_error(), "adapter_slots[1] is ") != nullptr);
  }
  batch.adapter_slots = nullptr;
  CHECK_OK(e.step(e.self, &batch, &logits));
}

// An executor over a plan that says max_adapters 0, for `text`.
void TakesNone(const std::string& path, const psm_cpu_options* options, const char* text) {
  psm_executor e;
  CHECK_OK(psm_cpu_executor_create(path.c_str(), options, &e));
  psm_model_info info = {};
  info.struct_size = PSM_MODEL_INFO_SIZE;
  CHECK_OK(e.describe(e.self, &info));
  CHECK(info.max_adapters == 0 && info.max_adapter_rank == 0);
  const psm_lora_module module = {};
  CHECK(e.load_adapter(e.self, 0, &module, 1) == PSM_ERROR_UNSUPPORTED);
  CHECK(strstr(psm_last_error(), text) != nullptr);
  CHECK(e.unload_adapter(e.self, 0) == PSM_ERROR_UNSUPPORTED);
  e.close(e.self);
}

void CheckOptions(const std::string& path) {
  psm_cpu_options options = {};
  psm_cpu_options_init(&options);
  CHECK(options.max_adapters == 8 && options.max_adapter_rank == 64);
  psm_executor e;
  for (int32_t* field : {&options.max_adapters, &options.max_adapter_rank}) {
    for (const int32_t bad : {-1, 1 << 20}) {
      psm_cpu_options_init(&options);
      *field = bad;
      CHECK(psm_cpu_executor_create(path.c_str(), &options, &e) == PSM_ERROR_INVALID_ARGUMENT);
      CHECK(strstr(psm_last_error(), "max_adapter") != nullptr);
    }
    psm_cpu_options_init(&options);
    *field = 0;
    TakesNone(path, &options, "max_adapters and max_adapter_rank above 0");
  }
  // A caller that knows the fields before them gets the defaults.
  psm_cpu_options_init(&options);
  options.struct_size = PSM_SIZE_UP_TO_(psm_cpu_options, isa);
  options.max_adapters = 12345;
  CHECK_OK(psm_cpu_executor_create(path.c_str(), &options, &e));
  psm_model_info info = {};
  info.struct_size = PSM_MODEL_INFO_SIZE;
  CHECK_OK(e.describe(e.self, &info));
  CHECK(info.max_adapters == 8 && info.max_adapter_rank == 64);
  e.close(e.self);
}

// Plans whose products do not tell every matrix of every layer take no adapters at all.
void CheckUnknownPlans() {
  const auto product = [](const TinyModel& model, size_t n) {
    size_t i = 0;
    for (; model.plan.ops[i].code != kOpLinear || n-- > 0; ++i) continue;
    return i;
  };
  const auto refused = [&](const std::vector<std::pair<size_t, size_t>>& renamed) {
    TinyModel model{TinyShape()};
    for (const auto& pair : renamed) {
      model.plan.ops[product(model, pair.first)].name =
          model.plan.ops[product(model, pair.second)].name;
    }
    const TempFile file;
    file.Write(model.plan.Bytes());
    TakesNone(file.path(), nullptr, "does not name its products");
  };
  refused({{0, 8}});          // one is called lm_head
  refused({{4, 0}});          // layer 1's is called layer 0's
  refused({{1, 2}, {2, 1}});  // o has the width of gate and up
}

}  // namespace

int main() {
  for (const KernelTable* kernels : UsableTables()) {
    for (const Case& c : kCases) CheckCase(c, kernels->name);
    printf("%s: ok\n", kernels->name);
  }
  TinyModel model{TinyShape()};
  const TempFile file;
  file.Write(model.plan.Bytes());
  const std::vector<Adapter> adapters = RandomAdapters(model.s);
  CheckUnload(file.path(), adapters);
  CheckBadAdapters(file.path(), model.s);
  CheckBadSlots(file.path(), adapters[1]);
  CheckOptions(file.path());
  CheckUnknownPlans();
  return 0;
}
