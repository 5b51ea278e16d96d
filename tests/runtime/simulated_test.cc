// The simulated executor against a direct model of its hashes, its clock against the formula by
// hand, and an error for every rule that a batch can break.
//
// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <cstring>
#include <functional>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "plansmith/plansmith.h"
#include "simulated/hash_model.h"

namespace {

using plansmith::simulated::BestToken;
using plansmith::simulated::FillRow;
using plansmith::simulated::HashAt;

constexpr int32_t kBlock = 4, kNumBlocks = 40, kVocab = 50;

psm_simulated_options SmallOptions(uint64_t seed) {
  psm_simulated_options options;
  psm_simulated_options_init(&options);
  options.info.vocab_size = kVocab;
  options.info.tokens_per_block = kBlock;
  options.info.max_batch_size = 6;
  options.info.max_num_tokens = 32;
  options.info.max_logits_rows = 16;
  options.info.max_input_len = 48;
  options.info.max_seq_len = 64;
  options.info.max_adapters = 2;
  options.info.max_adapter_rank = 4;
  options.info.kv_bytes_per_block = 4096;
  options.seed = seed;
  return options;
}

// Owns an open executor.
struct Simulated {
  explicit Simulated(const psm_simulated_options& options) {
    CHECK_OK(psm_simulated_executor_create(&options, &table));
    CHECK_OK(table.open(table.self, kNumBlocks));
    CHECK_OK(table.open_host(table.self, 8));
  }
  ~Simulated() { table.close(table.self); }
  Simulated(const Simulated&) = delete;
  Simulated& operator=(const Simulated&) = delete;

  int64_t now() const { return table.now_ns(table.self); }
  void Copy(int32_t kind, int32_t src, int32_t dst, int32_t num_tokens) {
    const psm_block_copy copy = {kind, src, dst, num_tokens};
    CHECK_OK(table.copy_blocks(table.self, &copy, 1));
  }
  psm_executor table{};
};

struct Sequence {
  std::vector<int32_t> ids;
  std::vector<int32_t> blocks;
  int32_t done = 0;
  int32_t slot = -1;
};

// A batch and its arrays. Every row is wanted.
struct Step {
  void Add(const Sequence& s, int32_t count) {
    for (int32_t p = s.done; p < s.done + count; ++p) {
      rows.push_back(static_cast<int32_t>(ids.size()));
      ids.push_back(s.ids[static_cast<size_t>(p)]);
      positions.push_back(p);
    }
    query_lens.push_back(count);
    kv_lens.push_back(s.done + count);
    cu.push_back(cu.back() + count);
    slots.push_back(s.slot);
    table.resize(table.size() + kStride, -1);
    std::copy(s.blocks.begin(), s.blocks.end(), table.end() - kStride);
  }
  psm_batch Batch() const {
    psm_batch b = {};
    b.struct_size = PSM_BATCH_SIZE;
    b.num_tokens = static_cast<int32_t>(ids.size());
    b.num_seqs = static_cast<int32_t>(query_lens.size());
    b.num_logits_rows = static_cast<int32_t>(rows.size());
    b.block_table_stride = kStride;
    b.input_ids = ids.data();
    b.position_ids = positions.data();
    b.query_lens = query_lens.data();
    b.kv_lens = kv_lens.data();
    b.cu_query_lens = cu.data();
    b.block_table = table.data();
    b.logits_rows = rows.data();
    b.adapter_slots = slots.data();
    return b;
  }
  static constexpr int32_t kStride = 16;
  std::vector<int32_t> ids, positions, query_lens, kv_lens, cu = {0}, table, rows, slots;
};

std::vector<float> Run(Simulated* executor, const Step& step) {
  const psm_batch batch = step.Batch();
  const float* logits = nullptr;
  const psm_status status = executor->table.step(executor->table.self, &batch, &logits);
  if (status != PSM_OK) fprintf(stderr, "%s\n", executor->table.last_error(executor->table.self));
  CHECK(status == PSM_OK);
  return {logits, logits + batch.num_logits_rows * kVocab};
}

std::vector<float> Run(Simulated* executor, Sequence* sequence, int32_t count) {
  Step step;
  step.Add(*sequence, count);
  sequence->done += count;
  return Run(executor, step);
}

std::vector<uint64_t> Hashes(const std::vector<int32_t>& ids, uint64_t seed, uint64_t adapter = 0) {
  std::vector<uint64_t> hashes;
  for (int32_t id : ids) {
    hashes.push_back(HashAt(seed, adapter, static_cast<int32_t>(hashes.size()), id,
                            [&](int32_t p) { return hashes[static_cast<size_t>(p)]; }));
  }
  return hashes;
}

std::vector<float> Rows(const std::vector<uint64_t>& hashes) {
  std::vector<float> rows(hashes.size() * kVocab);
  for (size_t i = 0; i < hashes.size(); ++i) FillRow(hashes[i], kVocab, rows.data() + i * kVocab);
  return rows;
}

std::vector<int32_t> RandomIds(std::mt19937* random, size_t n) {
  std::vector<int32_t> ids(n);
  for (int32_t& id : ids) id = static_cast<int32_t>((*random)() % kVocab);
  return ids;
}

int32_t ArgMaxOf(const std::vector<float>& rows, size_t row) {
  const auto begin = rows.begin() + static_cast<ptrdiff_t>(row * kVocab);
  return static_cast<int32_t>(std::max_element(begin, begin + kVocab) - begin);
}

// Random cuts over scattered blocks, several sequences mixed: each one's rows are the direct
// model's.
void TestAgainstDirectModel() {
  std::mt19937 random(5);
  for (int round = 0; round < 50; ++round) {
    Simulated executor(SmallOptions(7));
    std::vector<int32_t> blocks(kNumBlocks);
    std::iota(blocks.begin(), blocks.end(), 0);
    std::shuffle(blocks.begin(), blocks.end(), random);
    std::vector<Sequence> sequences(1 + random() % 4);
    std::vector<std::vector<float>> got(sequences.size());
    for (Sequence& s : sequences) {
      s.ids = RandomIds(&random, 1 + random() % 30);
      for (size_t p = 0; p < s.ids.size(); p += kBlock) {
        s.blocks.push_back(blocks.back());
        blocks.pop_back();
      }
    }
    for (bool more = true; more;) {
      more = false;
      Step step;
      std::vector<std::pair<size_t, int32_t>> counts;
      for (size_t i = 0; i < sequences.size(); ++i) {
        Sequence& s = sequences[i];
        const int32_t left = static_cast<int32_t>(s.ids.size()) - s.done;
        if (left == 0) continue;
        more = true;
        if (random() % 3 == 0) continue;
        const int32_t count = 1 + static_cast<int32_t>(random() % 4) % left;
        step.Add(s, count);
        s.done += count;
        counts.emplace_back(i, count);
      }
      if (counts.empty()) continue;
      const std::vector<float> rows = Run(&executor, step);
      auto row = rows.begin();
      for (const auto& c : counts) {
        got[c.first].insert(got[c.first].end(), row, row + c.second * kVocab);
        row += c.second * kVocab;
      }
    }
    for (size_t i = 0; i < sequences.size(); ++i)
      CHECK(got[i] == Rows(Hashes(sequences[i].ids, 7)));
  }
}

// Every mistake of the books that no check sees changes tokens: the sceptic's reason to believe
// that equal tokens mean right books.
void TestWrongBlocksShow() {
  std::mt19937 random(6);
  Simulated executor(SmallOptions(1));
  Sequence a;
  a.ids = RandomIds(&random, 24);
  a.blocks = {0, 1, 2, 3, 4, 5};
  Run(&executor, &a, 12);
  Run(&executor, &a, 8);
  Sequence other = {RandomIds(&random, 24), {10, 11, 12, 13, 14, 15}, 0, -1};
  Run(&executor, &other, 12);
  Run(&executor, &other, 8);
  for (int32_t wrong = 0; wrong < 5; ++wrong) {
    Sequence b = a;
    b.blocks[static_cast<size_t>(wrong)] = other.blocks[static_cast<size_t>(wrong)];
    b.blocks[5] = 20 + wrong;
    CHECK(Run(&executor, &b, 4) != Rows(Hashes(a.ids, 1)));
    const std::vector<uint64_t> right = Hashes(a.ids, 1);
    Sequence c = a;
    c.blocks[5] = 30;
    const std::vector<float> rows = Run(&executor, &c, 4);
    CHECK(rows == Rows({right.begin() + 20, right.end()}));
  }
}

void TestCopies() {
  std::mt19937 random(8);
  Simulated executor(SmallOptions(2));
  Sequence a = {RandomIds(&random, 8), {0, 1}, 0, -1};
  Run(&executor, &a, 7);
  // To the host, out of the way, back to another place; the last block only as far as it goes.
  executor.Copy(PSM_COPY_TO_HOST, 0, 5, kBlock);
  executor.Copy(PSM_COPY_FROM_HOST, 5, 30, kBlock);
  executor.Copy(PSM_COPY_DEVICE, 1, 31, 3);
  Sequence b = a;
  b.blocks = {30, 31};
  CHECK(Run(&executor, &b, 1) == [&] {
    const std::vector<uint64_t> hashes = Hashes(a.ids, 2);
    return Rows({hashes.back()});
  }());
  // One after another: each sees what those before wrote.
  const psm_block_copy chain[] = {{PSM_COPY_DEVICE, 30, 12, kBlock},
                                  {PSM_COPY_TO_HOST, 12, 0, kBlock},
                                  {PSM_COPY_FROM_HOST, 0, 13, kBlock}};
  CHECK_OK(executor.table.copy_blocks(executor.table.self, chain, 3));
  Sequence c = {a.ids, {13, 14}, 4, -1};
  const std::vector<uint64_t> hashes = Hashes(a.ids, 2);
  CHECK(Run(&executor, &c, 4) == Rows({hashes.begin() + 4, hashes.end()}));
  // Positions behind what was copied are nobody's.
  executor.Copy(PSM_COPY_DEVICE, 0, 14, 2);
  Sequence d = {a.ids, {14, 15}, 4, -1};
  Step step;
  step.Add(d, 1);
  const psm_batch batch = step.Batch();
  const float* logits;
  CHECK(executor.table.step(executor.table.self, &batch, &logits) == PSM_ERROR_INVALID_ARGUMENT);
  CHECK(std::strstr(executor.table.last_error(executor.table.self), "nobody has written"));

  const psm_block_copy bad[] = {{3, 0, 1, 1},
                                {PSM_COPY_DEVICE, 0, 0, 1},
                                {PSM_COPY_DEVICE, -1, 0, 1},
                                {PSM_COPY_DEVICE, 0, kNumBlocks, 1},
                                {PSM_COPY_TO_HOST, 0, 8, 1},
                                {PSM_COPY_FROM_HOST, 8, 0, 1},
                                {PSM_COPY_DEVICE, 0, 1, 0},
                                {PSM_COPY_DEVICE, 0, 1, kBlock + 1}};
  for (const psm_block_copy& copy : bad) {
    CHECK(executor.table.copy_blocks(executor.table.self, &copy, 1) == PSM_ERROR_INVALID_ARGUMENT);
    CHECK(std::strstr(executor.table.last_error(executor.table.self), "cop"));
  }
}

void TestClock() {
  psm_simulated_options o = SmallOptions(1);
  o.overhead_us = 3;
  Simulated executor(o);
  const int64_t begin = executor.now();
  CHECK(begin > 0);
  std::mt19937 random(9);
  Sequence a = {RandomIds(&random, 20), {0, 1, 2, 3, 4}, 0, -1};
  Run(&executor, &a, 8);
  const double a_position = 4096.0 / kBlock;
  // 8 written, 8 read; 1 MB of weights; 36 pairs.
  const double bytes = 1e6 + 16 * a_position, flops = 8 * 1e6 + 36 * 4.0 * 4 * 16 * 2;
  const double want = std::max(bytes / 1e12, flops / 1e14) * 1e9 + 3000;
  CHECK(std::fabs(static_cast<double>(executor.now() - begin) - want) <= 1);
  int64_t before = executor.now();
  executor.Copy(PSM_COPY_TO_HOST, 0, 0, kBlock);
  CHECK(std::fabs(static_cast<double>(executor.now() - before) - 4096 / 25.0) <= 1);

  o.flops_per_s = 1e9;  // now arithmetic takes longer than the bytes
  Simulated slow(o);
  before = slow.now();
  Sequence b = {a.ids, {0, 1, 2, 3, 4}, 0, -1};
  Run(&slow, &b, 8);
  CHECK(std::fabs(static_cast<double>(slow.now() - before) - (flops + 3000)) <= 1);
}

// At a share of the positions the draft's row is the target's; elsewhere its best token differs.
void TestDraft() {
  std::mt19937 random(10);
  Simulated target(SmallOptions(42));
  psm_simulated_options options = SmallOptions(43);
  options.draft_agreement = 0.7;
  options.draft_of_seed = 42;
  options.overhead_us = 5;
  Simulated draft(options);
  int agreed = 0, total = 0;
  for (int round = 0; round < 100; ++round) {
    Sequence t = {RandomIds(&random, 16), {0, 1, 2, 3}, 0, -1}, d = t;
    const std::vector<float> want = Run(&target, &t, 16);
    const int64_t before = target.now();
    std::vector<float> got = Run(&draft, &d, 5);  // in two cuts
    CHECK(target.now() - before >= 5000);         // one clock for both
    const std::vector<float> rest = Run(&draft, &d, 11);
    got.insert(got.end(), rest.begin(), rest.end());
    for (size_t i = 0; i < 16; ++i, ++total) {
      const bool same = std::memcmp(&want[i * kVocab], &got[i * kVocab], kVocab * 4) == 0;
      CHECK(same == (ArgMaxOf(want, i) == ArgMaxOf(got, i)));
      agreed += same;
    }
  }
  // 1600 positions: four standard deviations are 0.046.
  CHECK(std::fabs(static_cast<double>(agreed) / total - 0.7) < 0.046);
  Simulated alone(SmallOptions(5));
  CHECK(alone.now() < target.now());  // not a draft: its own time
}

void TestAdapters() {
  Simulated executor(SmallOptions(3));
  psm_executor& e = executor.table;
  std::vector<float> a(8, 0.5f), b(8, 0.25f);
  psm_lora_module module = {0, PSM_LORA_ATTN_Q, 2, 4, 4, 1.0f, a.data(), b.data()};
  CHECK_OK(e.load_adapter(e.self, 0, &module, 1));
  CHECK(e.load_adapter(e.self, 0, &module, 1) == PSM_ERROR_INVALID_ARGUMENT);
  b[7] = 0.125f;
  CHECK_OK(e.load_adapter(e.self, 1, &module, 1));
  std::mt19937 random(11);
  const std::vector<int32_t> ids = RandomIds(&random, 6);
  std::vector<std::vector<float>> rows;
  for (int32_t slot : {-1, 0, 1, 0}) {
    Sequence s = {ids, {2 * slot + 4, 2 * slot + 5}, 0, slot};
    rows.push_back(Run(&executor, &s, 6));
  }
  CHECK(rows[0] == Rows(Hashes(ids, 3)));
  CHECK(rows[1] != rows[0] && rows[2] != rows[0] && rows[1] != rows[2] && rows[3] == rows[1]);
  CHECK_OK(e.unload_adapter(e.self, 0));
  CHECK(e.unload_adapter(e.self, 0) == PSM_ERROR_INVALID_ARGUMENT);
  Step step;
  step.Add({ids, {0, 1}, 0, 0}, 6);
  const psm_batch batch = step.Batch();
  const float* logits;
  CHECK(e.step(e.self, &batch, &logits) == PSM_ERROR_INVALID_ARGUMENT);
  CHECK(std::strstr(e.last_error(e.self), "adapter_slots[0] is 0"));
  for (int i = 0; i < 7; ++i) {
    psm_lora_module bad = module;
    if (i == 0) bad.rank = 5;
    if (i == 1) bad.rank = 0;
    if (i == 2) bad.module = 8;
    if (i == 3) bad.layer_idx = 2;
    if (i == 4) bad.a = nullptr;
    if (i == 5) bad.in_features = 0;
    CHECK(e.load_adapter(e.self, i == 6 ? 2 : 0, &bad, 1) == PSM_ERROR_INVALID_ARGUMENT);
  }
}

void TestBadBatches() {
  std::mt19937 random(12);
  Simulated executor(SmallOptions(4));
  Sequence a = {RandomIds(&random, 12), {3, 4, 5}, 0, -1},
           b = {RandomIds(&random, 12), {6, 7, 8}, 0, -1};
  Run(&executor, &a, 8);
  Run(&executor, &b, 8);
  const int64_t before = executor.now();
  const struct {
    const char* text;
    std::function<void(Step*, psm_batch*)> spoil;
  } cases[] = {
      {"struct_size", [](Step*, psm_batch* p) { p->struct_size = 8; }},
      {"num_tokens is 0", [](Step*, psm_batch* p) { p->num_tokens = 0; }},
      {"num_tokens is 33", [](Step*, psm_batch* p) { p->num_tokens = 33; }},
      {"num_seqs is 7", [](Step*, psm_batch* p) { p->num_seqs = 7; }},
      {"num_logits_rows is 17", [](Step*, psm_batch* p) { p->num_logits_rows = 17; }},
      {"block_table_stride is 17", [](Step*, psm_batch* p) { p->block_table_stride = 17; }},
      {"an array is NULL", [](Step*, psm_batch* p) { p->kv_lens = nullptr; }},
      {"query_lens[1] is 0", [](Step* s, psm_batch*) { s->query_lens[1] = 0; }},
      {"query_lens[0] is 9", [](Step* s, psm_batch*) { s->query_lens[0] = 9; }},
      {"cu_query_lens[1] is 1", [](Step* s, psm_batch*) { s->cu[1] = 1; }},
      {"cu_query_lens ends with 7", [](Step* s, psm_batch*) { s->cu[2] = 7; }},
      {"kv_lens[1] is 65", [](Step* s, psm_batch*) { s->kv_lens[1] = 65; }},
      {"kv_lens[0] is 3", [](Step* s, psm_batch*) { s->kv_lens[0] = 3; }},
      {"position_ids[0] is 9, wanted 8", [](Step* s, psm_batch*) { s->positions[0] = 9; }},
      {"position_ids[0] is 8, wanted 7", [](Step* s, psm_batch*) { s->kv_lens[0] = 11; }},
      {"input_ids[2] is 50", [](Step* s, psm_batch*) { s->ids[2] = kVocab; }},
      {"input_ids[2] is -1", [](Step* s, psm_batch*) { s->ids[2] = -1; }},
      {"block_table[1][2] is -1", [](Step* s, psm_batch*) { s->table[16 + 2] = -1; }},
      {"block_table[0][0] is 40", [](Step* s, psm_batch*) { s->table[0] = kNumBlocks; }},
      {"block_table[0][5] is -2", [](Step* s, psm_batch*) { s->table[5] = -2; }},
      {"block 5 is written as", [](Step* s, psm_batch*) { s->table[16 + 2] = 5; }},
      {"block 5 is read as", [](Step* s, psm_batch*) { s->table[16 + 1] = 5; }},
      {"block 8 is read as", [](Step* s, psm_batch*) { s->table[16] = 8; }},
      {"logits_rows[1] is 0", [](Step* s, psm_batch*) { s->rows[1] = 0; }},
      {"logits_rows[7] is 8", [](Step* s, psm_batch*) { s->rows[7] = 8; }},
      {"adapter_slots[1] is 0", [](Step* s, psm_batch*) { s->slots[1] = 0; }},
      {"adapter_slots[0] is -2", [](Step* s, psm_batch*) { s->slots[0] = -2; }},
      {"reads position", [](Step* s, psm_batch*) { s->table[1] = 20; }},
  };
  for (const auto& c : cases) {
    Step step;
    step.Add(a, 4);
    step.Add(b, 4);
    psm_batch batch = step.Batch();
    c.spoil(&step, &batch);
    const float* logits = nullptr;
    CHECK(executor.table.step(executor.table.self, &batch, &logits) == PSM_ERROR_INVALID_ARGUMENT);
    const char* text = executor.table.last_error(executor.table.self);
    if (std::strstr(text, c.text) == nullptr) {
      fprintf(stderr, "wanted '%s', got '%s'\n", c.text, text);
      CHECK(false);
    }
    CHECK(logits == nullptr && executor.now() == before);
  }
}

void TestBadOptions() {
  psm_executor out;
  psm_simulated_options good;
  psm_simulated_options_init(&good);
  CHECK_OK(psm_simulated_executor_create(&good, &out));
  const float* logits;
  const psm_batch batch = {};
  CHECK(out.step(out.self, &batch, &logits) == PSM_ERROR_INVALID_ARGUMENT);  // not open
  CHECK(out.open_host(out.self, 2) == PSM_ERROR_INVALID_ARGUMENT);
  CHECK(out.open(out.self, 0) == PSM_ERROR_INVALID_ARGUMENT);
  CHECK_OK(out.open(out.self, 2));
  CHECK(out.open(out.self, 2) == PSM_ERROR_INVALID_ARGUMENT);  // twice
  out.close(out.self);
  const std::function<void(psm_simulated_options*)> cases[] = {
      [](psm_simulated_options* o) { o->struct_size = 4; },
      [](psm_simulated_options* o) { o->info.vocab_size = 1; },
      [](psm_simulated_options* o) { o->info.max_seq_len = o->info.max_input_len - 1; },
      [](psm_simulated_options* o) { o->info.tokens_per_block = 0; },
      [](psm_simulated_options* o) { o->info.kv_bytes_per_block = 0; },
      [](psm_simulated_options* o) { o->memory_bytes_per_s = 0; },
      [](psm_simulated_options* o) { o->flops_per_s = -1; },
      [](psm_simulated_options* o) { o->flops_per_token = NAN; },
      [](psm_simulated_options* o) { o->overhead_us = INFINITY; },
      [](psm_simulated_options* o) { o->host_copy_bytes_per_s = 0; },
      [](psm_simulated_options* o) { o->draft_agreement = 1.1; },
  };
  for (const auto& spoil : cases) {
    psm_simulated_options options = good;
    spoil(&options);
    CHECK(psm_simulated_executor_create(&options, &out) == PSM_ERROR_INVALID_ARGUMENT);
    CHECK(out.self == nullptr);
  }
  CHECK(psm_simulated_executor_create(nullptr, &out) == PSM_ERROR_INVALID_ARGUMENT);
}

}  // namespace

int main() {
  TestAgainstDirectModel();
  TestWrongBlocksShow();
  TestCopies();
  TestClock();
  TestDraft();
  TestAdapters();
  TestBadBatches();
  TestBadOptions();
  return 0;
}
