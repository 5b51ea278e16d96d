// Sampled outputs with speculation against the distribution that the parameters define, worked out
// in double precision by a program of its own: chi-square over many seeds.
//
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "speculation_harness.h"

namespace {

using history::Ask;
using history::Engine;
using history::Model;
using history::Setup;

constexpr int32_t kVocab = 7;
constexpr int32_t kLength = 4;  // the first token comes without a draft, the others with
constexpr int32_t kSeeds = 30000;

struct Params {
  double temperature = 0.8, top_p = 1.0, min_p = 0.0, repetition = 1.0, presence = 0.0,
         frequency = 0.0;
  int32_t top_k = 0;
};

// The probabilities of the next token, from the definition of each parameter.
std::vector<double> Next(const Model& model, const std::vector<int32_t>& tokens, size_t num_prompt,
                         const Params& p) {
  std::vector<float> logits(kVocab);
  model.Logits(tokens, logits.data());
  std::vector<double> x(logits.begin(), logits.end());
  for (int32_t v = 0; v < kVocab; ++v) {
    if (std::find(tokens.begin(), tokens.end(), v) == tokens.end()) continue;
    x[v] = x[v] > 0 ? x[v] / p.repetition : x[v] * p.repetition;
    const auto n = std::count(tokens.begin() + static_cast<ptrdiff_t>(num_prompt), tokens.end(), v);
    if (n > 0) x[v] -= p.presence + p.frequency * static_cast<double>(n);
  }
  const double best = *std::max_element(x.begin(), x.end());
  for (double& value : x) value = std::exp((value - best) / p.temperature);
  std::vector<int32_t> order(kVocab);
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return x[a] > x[b]; });
  size_t kept = p.top_k > 0 ? static_cast<size_t>(p.top_k) : order.size();
  const auto sum_of = [&](size_t n) {
    double sum = 0;
    for (size_t i = 0; i < n; ++i) sum += x[order[i]];
    return sum;
  };
  const double total = sum_of(kept);
  size_t nucleus = 1;
  while (nucleus < kept && sum_of(nucleus) < p.top_p * total) ++nucleus;
  while (nucleus > 1 && x[order[nucleus - 1]] < p.min_p) --nucleus;
  std::vector<double> probabilities(kVocab, 0.0);
  for (size_t i = 0; i < nucleus; ++i) probabilities[order[i]] = x[order[i]] / sum_of(nucleus);
  return probabilities;
}

// [kVocab ^ kLength], the first token the highest digit.
std::vector<double> Joint(const Model& model, const std::vector<int32_t>& prompt, const Params& p) {
  std::vector<double> joint{1.0};
  std::vector<std::vector<int32_t>> histories{prompt};
  for (int32_t i = 0; i < kLength; ++i) {
    std::vector<double> longer;
    std::vector<std::vector<int32_t>> next_histories;
    for (size_t h = 0; h < histories.size(); ++h) {
      const std::vector<double> next = Next(model, histories[h], prompt.size(), p);
      for (int32_t v = 0; v < kVocab; ++v) {
        longer.push_back(joint[h] * next[static_cast<size_t>(v)]);
        next_histories.push_back(histories[h]);
        next_histories.back().push_back(v);
      }
    }
    joint.swap(longer);
    histories.swap(next_histories);
  }
  return joint;
}

// Standard deviations that chi-square lies above its mean (Wilson and Hilferty's cube root). Cells
// with fewer than 8 expected go together.
double ChiSquareSigmas(const std::vector<int32_t>& seen, const std::vector<double>& expected) {
  double chi = 0.0, rest_expected = 0.0, rest_seen = 0.0;
  int32_t num_cells = 0;
  for (size_t i = 0; i < seen.size(); ++i) {
    const double e = expected[i] * kSeeds, s = seen[i];
    if (e < 8.0) {
      rest_expected += e;
      rest_seen += s;
      if (e == 0.0) CHECK(s == 0);  // what is cut away never comes
      continue;
    }
    chi += (s - e) * (s - e) / e;
    ++num_cells;
  }
  if (rest_expected >= 8.0) {
    chi += (rest_seen - rest_expected) * (rest_seen - rest_expected) / rest_expected;
    ++num_cells;
  }
  const double df = num_cells - 1;
  CHECK(df >= 10);
  const double v = 2.0 / (9.0 * df);
  return (std::cbrt(chi / df) - (1.0 - v)) / std::sqrt(v);
}

std::vector<int32_t> Count(const Setup& setup, const std::vector<int32_t>& prompt, const Params& p,
                           double* acceptance) {
  size_t num_cells = 1;
  for (int32_t i = 0; i < kLength; ++i) num_cells *= kVocab;
  std::vector<int32_t> seen(num_cells, 0);
  Engine engine(setup);
  for (int32_t begin = 0; begin < kSeeds; begin += 600) {
    std::vector<uint64_t> ids;
    for (int32_t seed = begin; seed < begin + 600; ++seed) {
      Ask ask;
      ask.prompt = prompt;
      psm_request& r = ask.request;
      r.max_tokens = kLength;
      r.temperature = static_cast<float>(p.temperature);
      r.top_p = static_cast<float>(p.top_p);
      r.top_k = p.top_k;
      r.min_p = static_cast<float>(p.min_p);
      r.repetition_penalty = static_cast<float>(p.repetition);
      r.presence_penalty = static_cast<float>(p.presence);
      r.frequency_penalty = static_cast<float>(p.frequency);
      r.seed = static_cast<uint64_t>(seed);
      ids.push_back(engine.Submit(&ask));
    }
    engine.Drain();
    for (const uint64_t id : ids) {
      size_t cell = 0;
      for (const int32_t token : engine.Of(id).tokens)
        cell = cell * kVocab + static_cast<size_t>(token);
      ++seen[cell];
    }
  }
  const psm_engine_stats stats = engine.Stats();
  *acceptance = static_cast<double>(stats.num_accepted_draft_tokens) /
                static_cast<double>(std::max<uint64_t>(1, stats.num_draft_tokens));
  CHECK(stats.num_draft_tokens > 10000);
  return seen;
}

void Test(const char* name, const Params& p, int32_t mode) {
  Setup setup;
  setup.Mode(mode).noise = 1.5f;
  setup.model.vocab_size = kVocab;
  setup.model.range = 2.0f;
  setup.options.ngram_min = 1;
  const std::vector<int32_t> prompt = {1, 2, 3, 0, 1, 4, 5, 0, 6, 2, 3};
  double acceptance;
  const std::vector<int32_t> seen = Count(setup, prompt, p, &acceptance);
  const double sigmas = ChiSquareSigmas(seen, Joint(setup.model, prompt, p));
  printf("%-24s %s  acceptance %.2f  chi-square %+.2f sigma\n", name,
         mode == PSM_DRAFT_MODEL ? "model " : "n-gram", acceptance, sigmas);
  CHECK(acceptance > 0.05 && acceptance < 0.95);  // both outcomes are in it
  CHECK(std::abs(sigmas) < 4.0);
  // The test would see the draft's distribution, or a penalty that counts a draft twice.
  Model draft = setup.model;
  draft.noise = 0.3f;
  Params other = p;
  other.frequency += 0.2;
  if (p.top_k == 0 && p.top_p == 1.0) CHECK(ChiSquareSigmas(seen, Joint(draft, prompt, p)) > 8.0);
  if (p.top_k == 0 && p.top_p == 1.0)
    CHECK(ChiSquareSigmas(seen, Joint(setup.model, prompt, other)) > 8.0);
}

}  // namespace

int main() {
  Params plain, penalties, filters, all;
  penalties.repetition = 1.3, penalties.presence = 0.4, penalties.frequency = 0.3;
  filters.top_p = 0.85, filters.top_k = 6;
  all = penalties;
  all.top_p = 0.9, all.min_p = 0.05, all.temperature = 1.1;
  for (const int32_t mode : {PSM_DRAFT_MODEL, PSM_DRAFT_NGRAM}) {
    Test("temperature", plain, mode);
    Test("penalties", penalties, mode);
    Test("top_k, top_p", filters, mode);
    Test("penalties, top_p, min_p", all, mode);
  }
  return 0;
}
