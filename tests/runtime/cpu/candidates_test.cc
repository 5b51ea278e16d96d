// The largest logits of rows that come in parts: against a sort, with ties within parts and between
// them, and with what is not finite.
//
// SPDX-License-Identifier: Apache-2.0
#include "cpu/candidates.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "check.h"
#include "isas.h"

using namespace plansmith::cpu;

namespace {

std::vector<psm_candidate> Sorted(const float* row, uint32_t n) {
  std::vector<psm_candidate> all;
  for (uint32_t i = 0; i < n; ++i) all.push_back({row[i], static_cast<int32_t>(i)});
  std::stable_sort(all.begin(), all.end(), [](const psm_candidate& a, const psm_candidate& b) {
    return a.logit > b.logit;
  });
  return all;
}

struct Case {
  uint32_t vocab_size, num_rows, num_parts, k;
  int num_values;  // few: ties
};

void CheckCase(const KernelTable& kernels, const Case& c, CandidateSearch* search,
               std::mt19937* random) {
  std::vector<float> logits(static_cast<size_t>(c.num_rows) * c.vocab_size);
  for (float& x : logits) {
    x = static_cast<float>((*random)() % static_cast<uint32_t>(c.num_values)) - 3.5f;
  }
  std::vector<bool> is_finite(c.num_rows, true);
  for (uint32_t row = 0; row < c.num_rows; ++row) {
    if ((*random)() % 4 != 0) continue;
    constexpr float kInf = std::numeric_limits<float>::infinity();
    const float bad[] = {kInf, -kInf, std::numeric_limits<float>::quiet_NaN()};
    logits[row * c.vocab_size + (*random)() % c.vocab_size] = bad[(*random)() % 3];
    is_finite[row] = false;
  }
  std::vector<psm_candidate> found(static_cast<size_t>(c.num_rows) * c.k, {0.0f, 7});
  psm_batch batch = {};
  batch.struct_size = PSM_BATCH_SIZE;
  batch.num_logits_rows = static_cast<int32_t>(c.num_rows);
  batch.num_candidates = static_cast<int32_t>(c.k);
  batch.candidates = found.data();
  CHECK(search->Begin(batch, c.num_parts) && search->wanted());
  const uint32_t each = (c.vocab_size + c.num_parts - 1) / c.num_parts;
  for (uint32_t part = c.num_parts; part-- > 0;) {
    const uint32_t begin = std::min(c.vocab_size, part * each);
    for (uint32_t row = 0; row < c.num_rows; ++row) {
      search->Scan(kernels, &logits[row * c.vocab_size], row, part, begin, begin + each);
    }
  }
  search->Finish(batch);
  CHECK(!search->wanted());
  for (uint32_t row = 0; row < c.num_rows; ++row) {
    const psm_candidate* given = &found[row * c.k];
    if (!is_finite[row]) {
      CHECK(given[0].token_id == -1);
      continue;
    }
    const auto wanted = Sorted(&logits[row * c.vocab_size], c.vocab_size);
    const uint32_t num = std::min(c.k, c.vocab_size);
    for (uint32_t i = 0; i < num; ++i) {
      CHECK(given[i].token_id == wanted[i].token_id && given[i].logit == wanted[i].logit);
    }
    if (num < c.k) CHECK(given[num].token_id == -1);
  }
}

uint32_t Below(uint32_t n, std::mt19937* random) { return static_cast<uint32_t>((*random)()) % n; }

void TestAgainstASort() {
  std::mt19937 random(5);
  for (const KernelTable* kernels : UsableTables()) {
    for (int round = 0; round < 60; ++round) {
      const uint32_t vocab_size = 1 + Below(round % 5 == 0 ? 40000 : 700, &random);
      CandidateSearch search(vocab_size);
      for (int step = 0; step < 3; ++step) {
        const uint32_t k = step == 0 ? 1 : 1 + Below(PSM_MAX_CANDIDATES, &random);
        const int num_values = Below(2, &random) == 0 ? 5 : 1000000;
        CheckCase(*kernels,
                  {vocab_size, 1 + Below(4, &random), 1 + Below(20, &random), k, num_values},
                  &search, &random);
      }
    }
  }
}

// A batch of before the fields, one that wants none, and one with more lists than there is room
// for, whose rows are left to their logits.
void TestWithoutCandidates() {
  CandidateSearch search(1000);
  psm_batch batch = {};
  batch.struct_size = PSM_BATCH_SIZE_1_2;
  batch.num_candidates = 3;  // not to be looked at
  CHECK(!search.Begin(batch, 4) && !search.wanted());
  batch.struct_size = PSM_BATCH_SIZE;
  batch.num_candidates = 0;
  CHECK(!search.Begin(batch, 4) && !search.wanted());
  std::vector<psm_candidate> found(100000, {1.0f, 5});
  batch.num_logits_rows = 50000;
  batch.num_candidates = 2;
  batch.candidates = found.data();
  CHECK(!search.Begin(batch, 2) && !search.wanted());
  for (size_t row = 0; row < 50000; ++row) CHECK(found[2 * row].token_id == -1);
  search.Finish(batch);
}

}  // namespace

int main() {
  TestAgainstASort();
  TestWithoutCandidates();
  return 0;
}
