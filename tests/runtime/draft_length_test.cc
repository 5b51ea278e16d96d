// The choice of draft lengths: against every choice there is on small batches, and what it does on
// machines whose costs are known.
//
// SPDX-License-Identifier: Apache-2.0
#include "draft_length.h"

#include <cmath>
#include <functional>
#include <random>
#include <vector>

#include "check.h"

namespace {

using plansmith::DraftCandidate;
using plansmith::DraftChoice;
using plansmith::DraftLength;
using plansmith::DraftLoad;
using plansmith::StepCost;

using Time = std::function<double(double)>;

StepCost Learnt(const Time& time, int32_t most) {
  StepCost cost;
  for (int round = 0; round < 40; ++round) {
    for (int32_t n = 1; n <= most; n = n < 16 ? n + 1 : n + n / 4)
      cost.Observe(n, std::llround(time(n)));
  }
  return cost;
}

double Expected(double acceptance, int32_t length) {
  double tokens = 0.0;
  for (int32_t k = 0; k <= length; ++k) tokens += std::pow(acceptance, k);
  return tokens;
}

// Tokens per ns of given lengths.
double Rate(const StepCost& target, const StepCost* draft, const DraftLoad& load,
            const std::vector<DraftCandidate>& candidates, const std::vector<int32_t>& lengths) {
  double tokens = load.num_sequences - static_cast<double>(candidates.size()), ns = 0.0;
  int32_t rows = load.num_tokens, longest = 0;
  for (size_t i = 0; i < candidates.size(); ++i) {
    tokens += Expected(static_cast<double>(candidates[i].acceptance), lengths[i]);
    rows += lengths[i];
    longest = std::max(longest, lengths[i]);
  }
  for (int32_t k = 1; k <= longest && draft != nullptr; ++k) {
    int32_t n = 0;
    for (int32_t length : lengths) n += length >= k;
    ns += draft->Ns(n);
  }
  return tokens / (ns + target.Ns(rows));
}

std::vector<int32_t> Chosen(const std::vector<DraftCandidate>& candidates) {
  std::vector<int32_t> lengths;
  for (const DraftCandidate& c : candidates) lengths.push_back(c.length);
  return lengths;
}

// Up to 3 requests, up to 4 drafts: all 125 choices.
void TestAgainstAllChoices() {
  std::mt19937 random(1);
  const auto uniform = [&] { return static_cast<double>(random() % 10001) / 10000.0; };
  int off = 0, on = 0;
  for (int i = 0; i < 400; ++i) {
    const double fixed = 1e6 * uniform(), slope = 1e6 * std::pow(10.0, -4.0 * uniform());
    const double round = 1e6 * std::pow(10.0, -3.0 * uniform());
    const StepCost target = Learnt([&](double n) { return fixed + slope * n; }, 64);
    const StepCost draft = Learnt([&](double n) { return round + 0.02 * slope * n; }, 64);
    const StepCost* draft_or_free = i % 4 == 0 ? nullptr : &draft;
    std::vector<DraftCandidate> candidates(1 + random() % 3);
    for (DraftCandidate& c : candidates) {
      c.acceptance = static_cast<float>(0.05 + 0.9 * uniform());
      c.limit = 1 + static_cast<int32_t>(random() % 4);
    }
    DraftLoad load;
    load.num_sequences = static_cast<int32_t>(candidates.size() + random() % 3);
    load.num_tokens = load.num_sequences + static_cast<int32_t>(random() % 20);
    DraftLength lengths(4);
    const DraftChoice choice =
        lengths.Choose(target, draft_or_free, load, candidates.data(), candidates.size());
    const double got = Rate(target, draft_or_free, load, candidates, Chosen(candidates));
    double best = 0.0;
    std::vector<int32_t> tried(candidates.size(), 0);
    for (bool more = true; more;) {
      best = std::max(best, Rate(target, draft_or_free, load, candidates, tried));
      size_t at = 0;
      while (at < tried.size() && ++tried[at] > candidates[at].limit) tried[at++] = 0;
      more = at < tried.size();
    }
    // Acceptance is cut into 64 steps and a gain below 2 % is not taken.
    CHECK(got >= 0.97 * best);
    (choice.num_rounds == 0 ? off : on) += 1;
    for (const DraftCandidate& c : candidates) CHECK(c.length >= 0 && c.length <= c.limit);
  }
  CHECK(off > 50 && on > 50);
}

std::vector<DraftCandidate> Batch(int32_t n, float acceptance, int32_t limit) {
  return std::vector<DraftCandidate>(static_cast<size_t>(n), {acceptance, limit, 0});
}

DraftChoice ChooseFor(const StepCost& target, const StepCost* draft, int32_t n, float acceptance,
                      int32_t max_len) {
  DraftLength lengths(max_len);
  std::vector<DraftCandidate> batch = Batch(n, acceptance, max_len);
  return lengths.Choose(target, draft, {n, n}, batch.data(), batch.size());
}

void TestOffWhenComputeBound() {
  const StepCost target = Learnt([](double n) { return 1e5 * n; }, 512);
  const StepCost draft = Learnt([](double n) { return 1e4 * n; }, 512);
  for (const int32_t n : {1, 8, 64}) {
    const DraftChoice choice = ChooseFor(target, &draft, n, 0.9f, 8);
    CHECK(choice.num_rounds == 0 && choice.rate == choice.rate_without);
    CHECK(!choice.pays_if_accepted);
  }
}

void TestLongWhenMemoryBound() {
  const StepCost target = Learnt([](double n) { return 1e7 + 1e4 * n; }, 512);
  const StepCost draft = Learnt([](double n) { return 1e6 + 1e3 * n; }, 512);
  int32_t last = 9;
  for (const float acceptance : {0.98f, 0.9f, 0.7f, 0.5f, 0.3f, 0.05f}) {
    const DraftChoice choice = ChooseFor(target, &draft, 4, acceptance, 8);
    CHECK(choice.num_rounds <= last);
    last = choice.num_rounds;
    if (acceptance >= 0.98f) CHECK(choice.num_rounds == 8);
    CHECK(choice.pays_if_accepted);
  }
  CHECK(last == 0);
  CHECK(ChooseFor(target, nullptr, 4, 0.3f, 8).num_rounds > 0);  // a lookup costs rows only
}

// The bend of the curve: alone, many drafts; 64 together, none.
void TestFollowsTheLoad() {
  const StepCost target = Learnt([](double n) { return 1e7 * std::max(1.0, n / 48.0); }, 512);
  const StepCost draft = Learnt([](double n) { return 5e5 * std::max(1.0, n / 48.0); }, 512);
  const int32_t alone = ChooseFor(target, &draft, 1, 0.8f, 8).num_rounds;
  const int32_t some = ChooseFor(target, &draft, 12, 0.8f, 8).num_rounds;
  const int32_t many = ChooseFor(target, &draft, 96, 0.8f, 8).num_rounds;
  CHECK(alone >= 5 && some >= 1 && some < alone && many == 0);
}

// In one batch the good request gets drafts and the bad one none.
void TestEachByItself() {
  const StepCost target = Learnt([](double n) { return 1e6 + 1e5 * n; }, 64);
  const StepCost draft = Learnt([](double n) { return 1e5 + 1e3 * n; }, 64);
  std::vector<DraftCandidate> batch = {{0.95f, 8, 0}, {0.05f, 8, 0}, {0.95f, 2, 0}, {0.95f, 0, 0}};
  DraftLength lengths(8);
  lengths.Choose(target, &draft, {4, 4}, batch.data(), batch.size());
  CHECK(batch[0].length >= 3 && batch[1].length == 0 && batch[2].length == 2);
  CHECK(batch[3].length == 0);
}

// A second row that costs as much as half a step, and further ones that cost nothing: not given up
// at the first.
void TestStepsOverAJump() {
  StepCost target;
  for (int i = 0; i < 100; ++i) {
    for (const int32_t n : {1, 4, 5, 6, 7, 8, 9}) target.Observe(n, n == 1 ? 1000000 : 1900000);
  }
  const DraftChoice choice = ChooseFor(target, nullptr, 1, 0.85f, 8);
  CHECK(choice.num_rounds >= 6);
}

void TestNothingKnown() {
  const StepCost none;
  CHECK(ChooseFor(none, &none, 3, 0.7f, 8).num_rounds == 8);  // try, and measure
  DraftLength lengths(8);
  const DraftChoice choice = lengths.Choose(none, &none, {0, 1}, nullptr, 0);
  CHECK(choice.num_rounds == 0 && !choice.pays_if_accepted);
  DraftLength no_drafts(0);
  std::vector<DraftCandidate> batch = Batch(2, 0.9f, 0);
  CHECK(no_drafts.Choose(none, nullptr, {2, 2}, batch.data(), 2).num_rounds == 0);
}

}  // namespace

int main() {
  TestAgainstAllChoices();
  TestOffWhenComputeBound();
  TestLongWhenMemoryBound();
  TestFollowsTheLoad();
  TestEachByItself();
  TestStepsOverAJump();
  TestNothingKnown();
  return 0;
}
