// What an executor's items go on with gives the same bits as stages of its own: random programs,
// every instruction set, 1 to 4 threads, 1 to 70 rows a step.
//
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <memory>

#include "isas.h"
#include "steps.h"
#include "tiny_model.h"

using namespace plansmith::cpu;

namespace {

// Of every kind of weight and input; sizes that fit tiles, groups and heads, and such that do not.
TinyShape RandomShape(Random* random) {
  TinyShape s;
  const auto one_of = [&](std::initializer_list<uint32_t> values) {
    return values.begin()[random->Below(static_cast<uint32_t>(values.size()))];
  };
  s.layers = 2;
  s.max_tokens = 80;
  s.dim = one_of({8, 16, 24, 32});
  s.kv_heads = one_of({1, 2, 3});
  s.heads = s.kv_heads * one_of({1, 2, 3, 4});
  s.hidden = 16 * one_of({2, 3, 5});
  s.inner = one_of({32, 48, 64, 72, 96, 128});
  s.dtype = one_of({kF32, kBF16, kF16, kI8, kI8, kI8, kI4, kI4, kF8, kF8, kF4});
  s.kv_format = one_of({kKvF32, kKvF16, kKvF8, kKvI8});
  s.gather_early = random->Below(2) == 0;
  s.pre_scale = random->Below(3) == 0;
  s.plain_logits = random->Below(2) == 0;
  if (s.dtype == kF4) {
    s.group_size = 16;
    s.dim = one_of({16, 32});
    s.inner = one_of({32, 48, 64, 96});
    if (random->Below(2) == 0) {
      s.round = kRoundF4;
      s.round_group = 16;
    }
  } else if (s.dtype == kI8 || s.dtype == kI4) {
    s.group_size = one_of({0, 8, 8, 8});
    s.by_group = s.group_size != 0 && random->Below(4) != 0;
    if (!s.by_group && random->Below(3) == 0) s.input = kInputInt8Static;
    if (!s.by_group && random->Below(3) == 0) s.input = kInputFloat;
  } else if (s.dtype == kF8 && random->Below(3) != 0) {
    s.group_size = one_of({0, 4, 8});
    s.input = static_cast<int32_t>(one_of({kInputF8Row, kInputF8Static, kInputF8Group}));
    if (s.input == kInputF8Group && s.group_size == 0) s.group_size = 8;
  } else if (random->Below(2) == 0) {
    s.round = static_cast<int32_t>(one_of({kRoundInt8, kRoundF8}));
    s.round_group = random->Below(3) == 0 ? -1 : static_cast<int32_t>(one_of({0, 8}));
  }
  return s;
}

std::unique_ptr<Executor> Make(const std::string& path, const char* isa, int threads, bool fuse) {
  return std::make_unique<Executor>(path, threads, false, isa, LoraLimits{2, 4}, WeightsIn::kAuto,
                                    false, fuse);
}

std::vector<psm_candidate> CandidatesOf(const psm_batch& batch) {
  return {batch.candidates, batch.candidates + batch.num_logits_rows * batch.num_candidates};
}

bool IsSame(const std::vector<psm_candidate>& a, const std::vector<psm_candidate>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const psm_candidate& x, const psm_candidate& y) {
                      return x.token_id == y.token_id && x.logit == y.logit;
                    });
}

// Returns how many phases were fused.
size_t CheckProgram(const TinyShape& shape, const char* isa, Random* random) {
  TinyModel model(shape, random->Next());
  const TempFile file;
  file.Write(model.plan.Bytes());
  const auto apart = Make(file.path(), isa, 1, false);
  CHECK(apart->num_fused() == 0);
  const auto fused = Make(file.path(), isa, 1 + static_cast<int>(random->Below(4)), true);
  const psm_model_info info = apart->Describe();
  Steps steps(info, 4);
  apart->Open(steps.num_blocks());
  fused->Open(steps.num_blocks());
  for (int i = 0; i < 6; ++i) {
    std::vector<int32_t> counts(4);
    const uint32_t kind = random->Below(3);
    if (kind == 0) counts[random->Below(4)] = 1;
    if (kind == 1) counts.assign(4, 1);
    if (kind == 2) {
      for (int32_t& n : counts) n = static_cast<int32_t>(random->Below(18));
      counts[random->Below(4)] = 1 + static_cast<int32_t>(random->Below(20));
    }
    for (size_t s = 0; s < 4; ++s) {
      if (steps.done(s) + counts[s] > info.max_seq_len) counts[s] = 0;
    }
    if (std::all_of(counts.begin(), counts.end(), [](int32_t n) { return n == 0; })) continue;
    if (shape.plain_logits) steps.WantCandidates(static_cast<int32_t>(random->Below(9)));
    const psm_batch& batch =
        steps.Next(counts, static_cast<uint32_t>(random->Next()), random->Below(5) != 0);
    const float* want = apart->Step(batch);
    const std::vector<psm_candidate> candidates = CandidatesOf(batch);
    const float* got = fused->Step(batch);
    CHECK(IsSame(candidates, CandidatesOf(batch)));
    const size_t n =
        static_cast<size_t>(batch.num_logits_rows) * static_cast<size_t>(info.vocab_size);
    if (memcmp(want, got, n * sizeof(float)) != 0) {
      fprintf(stderr, "%s: dtype %u, group %u, input %d, round %d by %d, KV %u, %d rows differ\n",
              isa, shape.dtype, shape.group_size, shape.input, shape.round, shape.round_group,
              shape.kv_format, batch.num_tokens);
      exit(1);
    }
  }
  return fused->num_fused();
}

// Several blocks of rows: threads fuse what is uneven work among the heads.
void CheckManyRows(const char* isa) {
  TinyShape s;
  s.dtype = kI8;
  s.by_group = true;
  s.group_size = 8;
  s.inner = 64;
  s.max_tokens = s.max_len = 600;
  const TempFile file;
  file.Write(TinyModel(s).plan.Bytes());
  const auto apart = Make(file.path(), isa, 1, false), fused = Make(file.path(), isa, 2, true);
  Steps steps(apart->Describe(), 1);
  apart->Open(steps.num_blocks());
  fused->Open(steps.num_blocks());
  for (int32_t rows : {560, 1, 39}) {
    const psm_batch& batch = steps.Next({rows}, 5, true);
    const float* want = apart->Step(batch);
    CHECK(memcmp(want, fused->Step(batch), s.vocab * sizeof(float)) == 0);
  }
}

// The shape of the models that speed is wanted for: everything that can be joined is.
void CheckAllFused() {
  TinyShape s;
  s.dtype = kI8;
  s.by_group = true;
  s.group_size = 8;
  s.inner = 64;
  const TempFile file;
  file.Write(TinyModel(s).plan.Bytes());
  // A layer: q_norm, two rotations, the KV write; the rounding behind attention; the residual; the
  // activation and the rounding behind it. At the end the logits' scale and cap.
  CHECK(Make(file.path(), nullptr, 2, true)->num_fused() == 8 * s.layers + 2);
  TinyShape f8 = s;  // whose codes carry NaN: a scale for all fuses too
  f8.dtype = kF8;
  f8.by_group = false;
  f8.hidden = f8.inner = 64;
  f8.heads = 4;
  f8.dim = 16;
  for (int32_t input : {kInputF8Group, kInputF8Static}) {
    f8.input = input;
    file.Write(TinyModel(f8).plan.Bytes());
    CHECK(Make(file.path(), nullptr, 2, true)->num_fused() == 8 * s.layers + 2);
  }
  s.kv_format = kKvI8;  // whose NaN rule is the row's
  file.Write(TinyModel(s).plan.Bytes());
  CHECK(Make(file.path(), nullptr, 2, true)->num_fused() == 7 * s.layers + 2);
  s.inner = 56;  // half of the product is no whole number of tiles
  file.Write(TinyModel(s).plan.Bytes());
  CHECK(Make(file.path(), nullptr, 2, true)->num_fused() == 5 * s.layers + 2);
}

// A product of 4 tiles (8 for a pair of halves) into columns 0.. of slot `a`, ops of one's own
// behind it over 64 columns, and logits of what the last of them writes.
class Chain {
 public:
  explicit Chain(uint32_t num_outputs) {
    PlanHeader& h = plan_.header;
    h.vocab_size = h.hidden_size = kWidth;
    h.num_layers = h.num_heads = h.num_kv_heads = 1;
    h.head_dim = h.tokens_per_block = 8;
    h.max_batch_size = 4;
    h.max_num_tokens = h.max_input_len = h.max_seq_len = 64;
    x_ = plan_.Slot(kRowsTokens, kWidth);
    a = plan_.Slot(kRowsTokens, 160);
    b = plan_.Slot(kRowsTokens, 160);
    c = plan_.Slot(kRowsTokens, 160);
    const int32_t table = Weight("table", kWidth);
    for (int32_t slot : {x_, c}) {
      OpRecord& embed = plan_.Op(kOpEmbed, "embed");
      embed.out = {slot, 0};
      embed.tensors[0] = table;
      embed.f[0] = 1;
    }
    Product({x_, 0}, Weight("weight", num_outputs), {a, 0});
    vector_ = plan_.Tensor("vector", PackMatrix(random_.Floats(kWidth), 1, kWidth, kF32, 0, true));
  }

  void Mul(View in, View out) {
    OpRecord& op = Op(kOpMulVector, in, {-1, 0}, out);
    op.tensors[0] = vector_;
  }
  void Add(View in, View other, View out) { Op(kOpAdd, in, other, out); }
  void Glu(View gate, View up, View out) { Op(kOpGlu, gate, up, out); }

  // The number of fused phases is as wanted, and steps by several threads give the bits of one.
  void Check(size_t num_fused) {
    const View last = plan_.ops.back().out;
    const int32_t rows = plan_.Slot(kRowsLogits, kWidth), logits = plan_.Slot(kRowsLogits, kWidth);
    Op(kOpGatherRows, last, {-1, 0}, {rows, 0});
    Product({rows, 0}, Weight("logits", kWidth), {logits, 0});
    plan_.header.logits_slot = static_cast<uint32_t>(logits);
    const TempFile file;
    file.Write(plan_.Bytes());
    const auto apart = Make(file.path(), nullptr, 1, false),
               fused = Make(file.path(), nullptr, 2, true);
    CHECK(fused->num_fused() == num_fused);
    Steps steps(apart->Describe(), 1);
    apart->Open(steps.num_blocks());
    fused->Open(steps.num_blocks());
    for (uint32_t i = 0; i < 100; ++i) {
      steps.Rewind(0, 0);
      const psm_batch& batch = steps.Next({i % 3 == 0 ? 1 : 40}, i, true);
      const float* want = apart->Step(batch);
      CHECK(memcmp(want, fused->Step(batch), kWidth * sizeof(float)) == 0);
    }
  }

  int32_t a, b, c;  // slots of 160 columns; c holds the tokens' embedding from column 0 on

 private:
  static constexpr uint32_t kWidth = 64;
  int32_t Weight(const char* name, uint32_t n) {
    return plan_.Tensor(name, PackMatrix(random_.Floats(size_t{n} * kWidth), n, kWidth, kF32, 0));
  }
  OpRecord& Op(uint32_t code, View in, View other, View out) {
    OpRecord& op = plan_.Op(code, "op");
    op.in[0] = in;
    op.in[1] = other;
    op.out = out;
    op.i[0] = kWidth;
    return op;
  }
  void Product(View in, int32_t weight, View out) {
    OpRecord& op = Op(kOpLinear, in, {-1, 0}, out);
    op.i[0] = 0;
    op.i[1] = kInputFloat;
    op.tensors[0] = weight;
  }

  PlanBuilder plan_;
  Random random_{3};
  int32_t x_, vector_;
};

// What an item reads or writes of another's columns keeps ops apart, wherever it comes from.
void CheckHazards() {
  {  // each item its own columns, also of older values
    Chain chain(64);
    chain.Mul({chain.a, 0}, {chain.b, 16});
    chain.Add({chain.b, 16}, {chain.a, 0}, {chain.b, 16});
    chain.Add({chain.c, 0}, {chain.b, 16}, {chain.a, 80});
    chain.Check(3);
  }
  {  // columns of the product that other items compute
    Chain chain(64);
    chain.Mul({chain.a, 0}, {chain.b, 0});
    chain.Add({chain.b, 0}, {chain.a, 16}, {chain.b, 0});
    chain.Check(1);
  }
  {  // columns that other items' ops have written before
    Chain chain(64);
    chain.Mul({chain.a, 0}, {chain.b, 16});
    chain.Mul({chain.b, 16}, {chain.a, 80});
    chain.Add({chain.a, 80}, {chain.b, 0}, {chain.a, 80});
    chain.Check(2);
  }
  {  // writes what other items' product writes and their ops read
    Chain chain(64);
    chain.Mul({chain.a, 0}, {chain.b, 0});
    chain.Add({chain.b, 0}, {chain.c, 0}, {chain.a, 16});
    chain.Check(1);
  }
  {  // writes what other items still read beside their columns
    Chain chain(64);
    chain.Add({chain.a, 0}, {chain.c, 0}, {chain.b, 0});
    chain.Mul({chain.b, 0}, {chain.c, 32});
    chain.Check(1);
  }
  {  // behind a pair of halves: each item has both
    Chain chain(128);
    chain.Glu({chain.a, 0}, {chain.a, 64}, {chain.b, 0});
    chain.Add({chain.b, 0}, {chain.a, 64}, {chain.b, 0});
    chain.Check(2);
  }
  {
    Chain chain(128);
    chain.Glu({chain.a, 0}, {chain.a, 64}, {chain.b, 0});
    chain.Add({chain.b, 0}, {chain.a, 16}, {chain.b, 0});
    chain.Check(1);
  }
}

}  // namespace

int main(int argc, char** argv) {
  CheckAllFused();
  CheckHazards();
  const int count = argc > 1 ? atoi(argv[1]) : 60;
  Random random(argc > 2 ? strtoull(argv[2], nullptr, 10) : 1);
  for (const KernelTable* kernels : UsableTables()) {
    CheckManyRows(kernels->name);
    size_t num_fused = 0;
    for (int i = 0; i < count; ++i) {
      num_fused += CheckProgram(RandomShape(&random), kernels->name, &random);
    }
    CHECK(num_fused > static_cast<size_t>(count));
    printf("%s: %zu fused phases of %d programs\n", kernels->name, num_fused, count);
  }
  return 0;
}
