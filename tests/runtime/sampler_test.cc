// Sampling: known answers of the generator, hand-computed penalties, filters at their edges, and
// the distribution that comes out against exact probabilities.
//
// SPDX-License-Identifier: Apache-2.0
#include "sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>
#include <random>
#include <set>
#include <vector>

#include "check.h"
#include "rng.h"
#include "status.h"

using plansmith::ArgMax;
using plansmith::ExpNonPositive;
using plansmith::Request;
using plansmith::Sample;
using plansmith::Sampler;
using plansmith::StatusError;

namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

Request MakeRequest(std::vector<int32_t> prompt, std::vector<int32_t> output = {}) {
  Request request;
  request.id = 42;
  request.num_prompt = static_cast<int32_t>(prompt.size());
  request.max_tokens = 1000;
  request.tokens = prompt;
  request.counts.Reserve(100);
  for (int32_t token : prompt) request.counts.AddPrompt(token);
  for (int32_t token : output) {
    request.tokens.push_back(token);
    request.counts.AddOutput(token);
  }
  return request;
}

int32_t Token(const std::vector<float>& logits, const Request& request) {
  Sampler sampler(static_cast<int32_t>(logits.size()));
  Sample sample;
  sampler.Draw(logits.data(), request, nullptr, &sample);
  return sample.token;
}

psm_status CodeOf(const std::vector<float>& logits, const Request& request) {
  try {
    Token(logits, request);
    return PSM_OK;
  } catch (const StatusError& e) {
    return e.code();
  }
}

// The known answers that Random123 publishes for philox4x32-10.
void TestPhilox() {
  using plansmith::Philox4x32;
  using plansmith::PhiloxCounter;
  CHECK((Philox4x32({0, 0, 0, 0}, {0, 0}) ==
         PhiloxCounter{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  CHECK((Philox4x32({~0u, ~0u, ~0u, ~0u}, {~0u, ~0u}) ==
         PhiloxCounter{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  CHECK((Philox4x32({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}) ==
         PhiloxCounter{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

// The nucleus shrinks by a factor a token down to its least, and is whole again behind the reset
// token. What counts is the output alone, so the values are those of any order of calls.
void TestTopPDecays() {
  std::vector<float> logits(100);
  for (size_t i = 0; i < logits.size(); ++i) logits[i] = 0.01f * static_cast<float>(i % 7);
  std::mt19937 random(3);
  for (int round = 0; round < 200; ++round) {
    const float top_p = 0.2f + 0.1f * static_cast<float>(random() % 9);
    const float decay = 0.5f + 0.05f * static_cast<float>(random() % 11);
    const float least = 0.05f * static_cast<float>(random() % 5);
    Request request = MakeRequest({5, 6});
    request.params.temperature = 1.0f;
    request.params.seed = random();
    request.params.top_p = top_p;
    request.params.top_p_reset_id = round % 3 == 0 ? -1 : 4;
    for (float p = top_p; request.params.top_p_after.size() < 50; p = std::max(p * decay, least))
      request.params.top_p_after.push_back(p);
    Request fixed = MakeRequest({5, 6});
    fixed.params.temperature = 1.0f;
    fixed.params.seed = request.params.seed;
    fixed.params.top_p = top_p;
    for (int i = 0; i < 40; ++i) {
      CHECK(Token(logits, request) == Token(logits, fixed));
      const int32_t token = static_cast<int32_t>(random() % 8);
      request.PushToken(token);
      fixed.PushToken(token);
      fixed.params.top_p = token == request.params.top_p_reset_id
                               ? top_p
                               : std::max(fixed.params.top_p * decay, least);
    }
  }
}

// Deviations of a chi-square over equally likely cells from its mean (Wilson and Hilferty).
double ChiSquareSigmas(const std::vector<int>& counts) {
  const double n = std::accumulate(counts.begin(), counts.end(), 0.0);
  const double expected = n / static_cast<double>(counts.size());
  double chi2 = 0.0;
  for (int count : counts) chi2 += (count - expected) * (count - expected) / expected;
  const double freedom = static_cast<double>(counts.size()) - 1.0, v = 2.0 / (9.0 * freedom);
  return (std::cbrt(chi2 / freedom) - (1.0 - v)) / std::sqrt(v);
}

// The bits of all tokens are the same on every machine, uniform over ids, positions and seeds, and
// those of two tokens, positions or seeds are independent of each other.
void TestDrawBits() {
  using plansmith::DrawBits;
  using plansmith::DrawKey;
  CHECK(DrawKey(0, 0) == (plansmith::PhiloxKey{0x6627e8d5, 0xe169c58d}));
  CHECK(DrawKey(uint64_t{1} << 32, 0) != DrawKey(0, 0));  // all of the seed
  CHECK(DrawBits(DrawKey(0, 0), 0) == 0x6b493d50);
  CHECK(DrawBits(DrawKey(0, 0), 1) == 0xad3c02aa);
  CHECK(DrawBits(DrawKey(7, 3), 49151) == 0x9ab1f696);
  CHECK(DrawBits(DrawKey(uint64_t{1} << 40, 9), 151935) == 0x3047e19a);
  const auto pair = [](uint32_t a, uint32_t b) { return (a >> 28) * 16 + (b >> 28); };
  for (uint64_t seed : {uint64_t{0}, uint64_t{1}, uint64_t{1} << 40}) {
    std::vector<int> high(1024), low(1024), ids(256), positions(256), seeds(256);
    for (uint32_t at = 0; at < 3; ++at) {
      const auto key = DrawKey(seed, at), next = DrawKey(seed, at + 1),
                 other = DrawKey(seed + 1, at);
      for (int32_t id = 0; id < 49152; ++id) {
        const uint32_t bits = DrawBits(key, id);
        ++high[bits >> 22], ++low[bits & 1023];
        ++ids[pair(bits, DrawBits(key, id + 1))];
        ++positions[pair(bits, DrawBits(next, id))];
        ++seeds[pair(bits, DrawBits(other, id))];
      }
    }
    for (const auto& counts : {high, low, ids, positions, seeds})
      CHECK(std::fabs(ChiSquareSigmas(counts)) < 4.5);
  }
  for (int32_t distance = 1; distance < 1 << 17; distance *= 2) {
    std::vector<int> both(256), small(256);  // `small`: where a number decides
    for (uint64_t seed = 0; seed < 2000; ++seed) {
      for (uint32_t at = 0; at < 50; ++at) {
        const auto key = DrawKey(seed, at);
        const uint32_t a = DrawBits(key, 1000), b = DrawBits(key, 1000 ^ distance);
        ++both[pair(a, b)];
        if (a >> 28 == 0) ++small[pair(a << 4, b)];
      }
    }
    CHECK(std::fabs(ChiSquareSigmas(both)) < 4.5 && std::fabs(ChiSquareSigmas(small)) < 4.5);
  }
}

void TestExponential() {
  using plansmith::Exponential;
  std::mt19937 random(8);
  double worst = 0.0;
  for (int i = 0; i < 300000; ++i) {
    const uint32_t bits = i < 100 ? ~0u - static_cast<uint32_t>(i) : random() >> i % 33 % 32;
    const double exact = -std::log1p(-(bits + 0.5) * 0x1.0p-32);
    worst = std::max(worst, std::fabs(Exponential(bits) - exact) / exact);
  }
  CHECK(worst < 1e-10);
}

void TestExp() {
  CHECK(ExpNonPositive(0.0f) == 1.0f);
  CHECK(ExpNonPositive(-kInf) == 0.0f && ExpNonPositive(-88.0f) == 0.0f);
  double worst = 0.0;
  for (int i = 0; i < 300000; ++i) {
    const float x = -86.9f * static_cast<float>(i) / 300000.0f;
    const double exact = std::exp(static_cast<double>(x));
    worst = std::max(worst, std::fabs(static_cast<double>(ExpNonPositive(x)) - exact) / exact);
  }
  CHECK(worst < 3e-7);
}

void TestArgMax() {
  std::mt19937 random(2);
  for (int32_t n : {1, 2, 15, 16, 17, 1023, 1024, 1025, 49152}) {
    std::vector<float> x(static_cast<size_t>(n));
    for (int round = 0; round < 20; ++round) {
      // Few distinct values: ties everywhere.
      for (float& value : x) value = static_cast<float>(random() % 50) - 100.0f;
      float max;
      bool has_nan;
      const int32_t idx = ArgMax(x.data(), n, &max, &has_nan);
      CHECK(idx == std::max_element(x.begin(), x.end()) - x.begin());
      CHECK(max == x[static_cast<size_t>(idx)] && !has_nan);
      x[random() % x.size()] = kNan;
      ArgMax(x.data(), n, &max, &has_nan);
      CHECK(has_nan);
    }
  }
}

void TestGreedy() {
  Request request = MakeRequest({0});
  request.params.temperature = 0.0f;
  CHECK(Token({1, 3, 2, 3}, request) == 1);
  CHECK(Token({-kInf, -kInf, -5}, request) == 2);
  request.params.temperature = 5.0f;
  request.params.top_k = 1;
  for (uint64_t seed = 0; seed < 50; ++seed) {
    request.params.seed = seed;
    CHECK(Token({1, 3, 2, 3}, request) == 1);
  }
}

// Against a map, with few and many distinct tokens: collisions included.
void TestTokenCounts() {
  std::mt19937 random(7);
  for (uint32_t vocab : {3u, 100u, 150000u}) {
    plansmith::TokenCounts counts;
    counts.Reserve(500);
    std::map<int32_t, int32_t> expected;
    for (int i = 0; i < 500; ++i) {
      const int32_t token = static_cast<int32_t>(random() % vocab);
      if (i < 200) {
        counts.AddPrompt(token);
        expected.emplace(token, 0);
      } else {
        counts.AddOutput(token);
        ++expected[token];
      }
    }
    CHECK(counts.entries().size() == expected.size());
    for (const auto& entry : counts.entries()) CHECK(expected.at(entry.token) == entry.num_output);
  }
}

// Repetition divides positive logits and multiplies negative ones, over prompt and output; presence
// and frequency are subtracted for output tokens only.
void TestPenalties() {
  Request request = MakeRequest({0, 0}, {1, 1, 2});
  request.params.temperature = 0.0f;
  request.params.repetition_penalty = 2.0f;
  CHECK(Token({4, 1, 1, 2.1f}, request) == 3);      // 4/2 = 2 < 2.1
  CHECK(Token({4, 1, 1, 1.9f}, request) == 0);      // 2 > 1.9
  CHECK(Token({-1, -9, -9, -2.1f}, request) == 0);  // -2 > -2.1
  CHECK(Token({-1, -9, -9, -1.9f}, request) == 3);
  request.params.repetition_penalty = 1.0f;
  request.params.presence_penalty = 0.5f;
  request.params.frequency_penalty = 0.25f;
  // token 1: 2 - 0.5 - 2*0.25 = 1; token 2: 2 - 0.5 - 0.25 = 1.25; token 0, in the prompt only:
  // unchanged
  CHECK(Token({1.26f, 2, 2, 1.24f}, request) == 0);
  CHECK(Token({1.2f, 2, 2, 1.24f}, request) == 2);
  CHECK(Token({1.2f, 2.26f, 2, 1.24f}, request) == 1);
  request.params.repetition_penalty = 2.0f;  // first: (2/2) - 0.5 - 0.25 = 0.25
  CHECK(Token({-9, -9, 2, 0.24f}, request) == 2);
  CHECK(Token({-9, -9, 2, 0.26f}, request) == 3);
}

void TestBiasBadWordsMinTokens() {
  Request request = MakeRequest({4}, {2, 3});
  request.params.temperature = 0.0f;
  request.params.logit_bias = {{1, 2.0f}, {0, -kInf}, {1, 1.0f}};
  CHECK(Token({9, 1, 3.5f, 0, 0}, request) == 1);  // 1 + 2 + 1
  CHECK(Token({9, 1, 4.5f, 0, 0}, request) == 2);
  request.params.logit_bias.clear();
  request.params.bad_words.ids = {0, 2, 3, 1, 3, 2, 4};
  request.params.bad_words.ends = {1, 4, 7};    // [0], [2, 3, 1], [3, 2, 4]
  CHECK(Token({9, 8, 7, 6, 5}, request) == 2);  // 0 always, 1 because 2 3 was just produced; 4 free
  CHECK(Token({9, 8, 1, 1, 5}, request) == 4);
  request = MakeRequest({4}, {2});
  request.params.temperature = 0.0f;
  request.params.end_ids = {0, 1};
  request.params.min_tokens = 2;
  CHECK(Token({9, 8, 7, 6, 5}, request) == 2);
  request.params.min_tokens = 1;
  CHECK(Token({9, 8, 7, 6, 5}, request) == 0);
}

void TestBadRows() {
  Request request = MakeRequest({0});
  CHECK(CodeOf({1, kNan, 0}, request) == PSM_ERROR_EXECUTOR);
  CHECK(CodeOf({1, kInf, 0}, request) == PSM_ERROR_EXECUTOR);
  CHECK(CodeOf({-kInf, -kInf, -kInf}, request) == PSM_ERROR_INVALID_ARGUMENT);
  request.params.logit_bias = {{0, -kInf}, {1, -kInf}, {2, -kInf}};
  CHECK(CodeOf({1, 2, 3}, request) == PSM_ERROR_INVALID_ARGUMENT);
  request.params.logit_bias = {{0, 3e38f}, {0, 3e38f}};
  CHECK(CodeOf({1, 2, 3}, request) == PSM_ERROR_INVALID_ARGUMENT);
  // What is forbidden is no number beyond float32 any more.
  request.params.logit_bias = {{0, 3e38f}, {0, 3e38f}, {0, -kInf}};
  request.params.temperature = 0.0f;
  CHECK(Token({1, 2, 3}, request) == 2);
  Request repeats = MakeRequest({1}, {0, 0});
  repeats.params.frequency_penalty = -3e38f;  // -inf + inf: NaN
  CHECK(CodeOf({-kInf, 2, 3}, repeats) == PSM_ERROR_INVALID_ARGUMENT);
  try {
    Token({0, 0, kNan}, request);
    CHECK(false);
  } catch (const StatusError& e) {
    CHECK(std::string(e.what()).find("token 2") != std::string::npos);
    CHECK(std::string(e.what()).find("request 42") != std::string::npos);
  }
}

// Draws with seeds 0.. and compares counts with `expected` probabilities; zero ones must never come
// up.
void CheckDistribution(const std::vector<float>& logits, Request& request,
                       const std::vector<double>& expected) {
  constexpr int kDraws = 20000;
  Sampler sampler(static_cast<int32_t>(logits.size()));
  std::vector<int> counts(logits.size(), 0);
  for (int i = 0; i < kDraws; ++i) {
    request.params.seed = static_cast<uint64_t>(i) * 7919;
    Sample sample;
    sampler.Draw(logits.data(), request, nullptr, &sample);
    ++counts[static_cast<size_t>(sample.token)];
  }
  double chi2 = 0.0;
  int freedom = -1;
  for (size_t v = 0; v < logits.size(); ++v) {
    if (expected[v] == 0.0) {
      CHECK(counts[v] == 0);
      continue;
    }
    const double e = expected[v] * kDraws;
    chi2 += (counts[v] - e) * (counts[v] - e) / e;
    ++freedom;
  }
  // Mean f, variance 2f; 5 sigma and a bit for the skew. Seeds are fixed: this does not flicker.
  CHECK(chi2 < freedom + 5.0 * std::sqrt(2.0 * freedom) + 8.0);
}

std::vector<double> Softmax(const std::vector<float>& logits, double temperature) {
  std::vector<double> p;
  double sum = 0.0;
  for (float l : logits)
    p.push_back(std::exp(static_cast<double>(l) / temperature)), sum += p.back();
  for (double& x : p) x /= sum;
  return p;
}

void KeepOnly(std::vector<double>* p, const std::set<size_t>& kept) {
  double sum = 0.0;
  for (size_t i = 0; i < p->size(); ++i) {
    if (kept.count(i) == 0) (*p)[i] = 0.0;
    sum += (*p)[i];
  }
  for (double& x : *p) x /= sum;
}

void TestDistributions() {
  const std::vector<float> logits = {0.5f, 2.0f, -1.0f, 1.5f, 0.0f, -3.0f, 1.0f, -kInf};
  // softmax at temperature 1: 1: .4114, 3: .2495, 6: .1513, 0: .0918, 4: .0557, 2: .0205, 5: .0028
  Request request = MakeRequest({0});
  std::vector<double> p = Softmax(logits, 1.0);
  CheckDistribution(logits, request, p);
  request.params.temperature = 2.5f;
  CheckDistribution(logits, request, Softmax(logits, 2.5));
  request.params.temperature = 0.3f;
  CheckDistribution(logits, request, Softmax(logits, static_cast<double>(0.3f)));
  request.params.temperature = 1.0f;

  request.params.top_k = 3;
  KeepOnly(&p, {1, 3, 6});
  CheckDistribution(logits, request, p);
  request.params.top_k = 100;  // more than V: all
  CheckDistribution(logits, request, Softmax(logits, 1.0));
  request.params.top_k = 0;

  request.params.top_p = 0.7f;  // .4114 + .2495 = .6609 < .7: the third is in
  p = Softmax(logits, 1.0);
  KeepOnly(&p, {1, 3, 6});
  CheckDistribution(logits, request, p);
  request.params.top_p = 0.66f;
  p = Softmax(logits, 1.0);
  KeepOnly(&p, {1, 3});
  CheckDistribution(logits, request, p);

  // top_p over what top_k left: of {.4114, .2495, .1513} / .8122 the first two are .8137
  request.params.top_k = 3;
  request.params.top_p = 0.8f;
  CheckDistribution(logits, request, p);
  request.params.top_k = 0;
  request.params.top_p = 1.0f;

  request.params.min_p =
      0.3f;  // of the best: .1513 / .4114 = .368 stays, .0918 / .4114 = .223 goes
  p = Softmax(logits, 1.0);
  KeepOnly(&p, {1, 3, 6});
  CheckDistribution(logits, request, p);
  request.params.top_k = 5;  // the same with the sorted path
  CheckDistribution(logits, request, p);
}

// The tokens that top_k and top_p keep, and their probabilities at temperature 1.
std::vector<double> Kept(const std::vector<float>& logits, int32_t top_k, float top_p) {
  std::vector<double> p = Softmax(logits, 1.0);
  std::vector<size_t> order(p.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return logits[a] > logits[b]; });
  if (top_k > 0) order.resize(std::min(order.size(), static_cast<size_t>(top_k)));
  double total = 0.0, sum = 0.0;
  for (size_t i : order) total += p[i];
  size_t n = 0;
  while (n < order.size() && sum < static_cast<double>(top_p) * total) sum += p[order[n++]];
  KeepOnly(&p, std::set<size_t>(order.begin(), order.begin() + static_cast<ptrdiff_t>(n)));
  return p;
}

// The draw is the race, run here over all tokens in double precision, of the request's seed and the
// output position: with equal and with steep logits, in both directions, blocks that end early, and
// tokens that cannot be drawn.
void TestDrawIsARace() {
  std::mt19937 random(5);
  for (const size_t v : {1u, 2u, 63u, 64u, 65u, 1000u, 5000u}) {
    for (int kind = 0; kind < 5; ++kind) {
      std::vector<float> logits(v, 0.0f);
      for (size_t i = 0; i < v; ++i) {
        const float slope = 60.0f * static_cast<float>(i) / static_cast<float>(v);
        if (kind == 1) logits[i] = slope;
        if (kind == 2) logits[i] = -slope;
        if (kind >= 3) logits[i] = static_cast<float>(random() % 12000) / 1000.0f;
        if (kind == 4 && i + 1 < v && random() % 3 != 0) logits[i] = -kInf;
      }
      for (uint32_t at = 0; at < 20; ++at) {
        Request request = MakeRequest({3, 4, 5}, std::vector<int32_t>(at, 7));
        request.params.seed = uint64_t{random()} << 20;
        request.params.top_k = at % 4 == 1 ? static_cast<int32_t>(v / 2 + 2) : 0;
        request.params.top_p = at % 4 == 2 ? 0.8f : 1.0f;
        const std::vector<double> p = Kept(logits, request.params.top_k, request.params.top_p);
        const auto key = plansmith::DrawKey(request.params.seed, at);
        std::vector<double> times;
        for (size_t i = 0; i < v; ++i) {
          const uint32_t bits = plansmith::DrawBits(key, static_cast<int32_t>(i));
          times.push_back(-std::log1p(-(bits + 0.5) * 0x1.0p-32) / p[i]);
        }
        const size_t token = static_cast<size_t>(Token(logits, request));
        CHECK(times[token] <= *std::min_element(times.begin(), times.end()) * (1.0 + 1e-5));
      }
    }
  }
}

// Two models that draw with the same numbers agree as often as the race guarantees: what a sampled
// draft's acceptance comes from.
void TestCoupling() {
  constexpr int kDraws = 20000;
  std::mt19937 random(6);
  std::normal_distribution<float> normal;
  std::vector<float> target(700), draft(700);
  for (size_t i = 0; i < target.size(); ++i) {
    target[i] = 2.5f * normal(random);
    draft[i] = target[i] + 0.4f * normal(random);
  }
  Sampler sampler(700);
  for (const auto& [top_k, top_p] :
       std::vector<std::pair<int32_t, float>>{{0, 1.0f}, {40, 1.0f}, {0, 0.9f}, {100, 0.8f}}) {
    const std::vector<double> p = Kept(target, top_k, top_p), q = Kept(draft, top_k, top_p);
    double distance = 0.0;
    for (size_t i = 0; i < p.size(); ++i) distance += 0.5 * std::fabs(p[i] - q[i]);
    CHECK(distance > 0.1 && distance < 0.4);
    Request request = MakeRequest({0});
    request.params.seed = 11;
    request.params.top_k = top_k;
    request.params.top_p = top_p;
    int num_equal = 0;
    for (int i = 0; i < kDraws; ++i) {
      Sample of_target, of_draft;
      sampler.Draw(target.data(), request, nullptr, &of_target);
      sampler.Draw(draft.data(), request, nullptr, &of_draft);
      num_equal += of_target.token == of_draft.token;
      request.tokens.push_back(of_target.token);
    }
    // 4 sigma of a share are below 0.0142.
    CHECK(num_equal >= kDraws * ((1.0 - distance) / (1.0 + distance) - 0.0142));
    CHECK(num_equal <= kDraws * (1.0 - distance + 0.0142));  // no coupling does better
  }
}

void TestFilterEdges() {
  const std::vector<float> logits = {1.0f, 2.0f, 2.0f, 0.0f};
  Request request = MakeRequest({0});
  std::set<int32_t> seen;
  const auto draw = [&] {
    seen.clear();
    for (uint64_t seed = 0; seed < 300; ++seed) {
      request.params.seed = seed;
      seen.insert(Token(logits, request));
    }
    return seen;
  };
  request.params.top_p = 1e-9f;  // at least one, the lower id of the tie
  CHECK((draw() == std::set<int32_t>{1}));
  request.params.top_p = 1.0f;
  request.params.min_p = 1.0f;  // all that equal the best
  CHECK((draw() == std::set<int32_t>{1, 2}));
  request.params.min_p = 0.0f;
  request.params.top_k = 2;
  CHECK((draw() == std::set<int32_t>{1, 2}));
  request.params.top_k = 3;
  CHECK((draw() == std::set<int32_t>{0, 1, 2}));
  request.params.top_k = 0;
  request.params.temperature = 1e-30f;  // no overflow
  CHECK((draw() == std::set<int32_t>{1, 2}));
  request.params.temperature = 1e30f;  // flat
  CHECK((draw() == std::set<int32_t>{0, 1, 2, 3}));
  request.params.top_p = 0.9999999f;
  CHECK((draw() == std::set<int32_t>{0, 1, 2, 3}));
}

// The rule of sampler.h, plainly: a full sort, sums of weights as whole numbers of 2^-34, all
// tokens race. No order of additions, so a device can follow it bit for bit.
int32_t PlainDraw(const std::vector<float>& logits, const plansmith::SamplingParams& params) {
  const float max = *std::max_element(logits.begin(), logits.end());
  std::vector<float> z;
  for (float l : logits) z.push_back((l - max) / params.temperature);
  std::vector<size_t> order(z.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return z[a] > z[b]; });
  if (params.top_k > 0) order.resize(std::min(order.size(), static_cast<size_t>(params.top_k)));
  const auto units = [&](size_t id) {
    return std::llrint(static_cast<double>(ExpNonPositive(z[id])) * 0x1.0p34);  // ties to even
  };
  int64_t total = 0, sum = 0;
  for (size_t id : order) total += units(id);
  const double wanted = static_cast<double>(params.top_p) * static_cast<double>(total);
  size_t n = params.top_p < 1.0f ? 0 : order.size();
  while (n < order.size()) {
    sum += units(order[n++]);
    if (static_cast<double>(sum) >= wanted) break;
  }
  const auto key = plansmith::DrawKey(params.seed, 0);
  double best = std::numeric_limits<double>::infinity();
  int32_t winner = -1;
  for (size_t i = 0; i < n; ++i) {
    const float weight = ExpNonPositive(z[order[i]]);
    if (weight == 0.0f || weight < params.min_p) continue;
    const int32_t id = static_cast<int32_t>(order[i]);
    const double time = plansmith::Exponential(plansmith::DrawBits(key, id)) / weight;
    if (time < best || (time == best && id < winner)) best = time, winner = id;
  }
  return winner;
}

void TestPlainRule() {
  std::mt19937 random(9);
  const auto choose = [&](std::initializer_list<double> of) {
    return static_cast<float>(*(of.begin() + random() % of.size()));
  };
  for (int i = 0; i < 6000; ++i) {
    std::vector<float> logits(1 + random() % (i % 50 == 0 ? 5000 : 200));
    const float step = choose({0.0, 0.001, 0.1, 3.0});  // equal ones, near ones, far ones
    for (float& l : logits) {
      l = step * static_cast<float>(random() % 64);
      if (random() % 9 == 0) l = -kInf;
    }
    logits[random() % logits.size()] = step * 70.0f;
    Request request = MakeRequest({0});
    request.params.seed = uint64_t{random()} << (random() % 32);
    request.params.temperature = choose({1.0, 0.3, 1e-6, 2.0, 1e30});
    request.params.top_k = static_cast<int32_t>(choose({0.0, 2.0, 5.0, 64.0, 300.0}));
    request.params.top_p = choose({1.0, 0.9, 0.5, 0.999, 0.99999994, 1e-9});
    request.params.min_p = choose({0.0, 0.0, 0.05, 1.0});
    CHECK(Token(logits, request) == PlainDraw(logits, request.params));
  }
}

// Above 2^19 tokens sums keep being exact: the nucleus of equal tokens is counted to the last one.
void TestVocabularyOfMillions() {
  const int32_t v = (1 << 20) + 8;
  const std::vector<float> logits(static_cast<size_t>(v), 0.25f);
  Request request = MakeRequest({0});
  request.params.top_p = 3.0f / (1 << 20);  // 3.00002 tokens: the first four
  std::set<int32_t> seen;
  Sampler sampler(v);
  for (uint64_t seed = 0; seed < 40; ++seed) {
    request.params.seed = seed;
    Sample sample;
    sampler.Draw(logits.data(), request, nullptr, &sample);
    seen.insert(sample.token);
  }
  CHECK((seen == std::set<int32_t>{0, 1, 2, 3}));
}

// Large vocabularies run through the thresholds and batches that small ones never reach: compare
// the set of tokens that can be drawn with a full sort.
void TestLargeVocabulary() {
  std::mt19937 random(3);
  const int32_t v = 5000;
  std::vector<float> logits(v);
  for (float& l : logits) l = static_cast<float>(random() % 4001) / 1000.0f;  // many ties
  std::vector<int32_t> order(v);
  for (int32_t i = 0; i < v; ++i) order[static_cast<size_t>(i)] = i;
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    return logits[static_cast<size_t>(a)] > logits[static_cast<size_t>(b)];
  });
  const std::vector<double> p = Softmax(logits, 1.0);
  Sampler sampler(v);
  for (const auto& [top_k, top_p] : std::vector<std::pair<int32_t, float>>{
           {0, 1}, {7, 1}, {300, 1}, {2600, 1}, {4999, 1}, {0, 0.3f}, {0, 0.9f}, {700, 0.5f}}) {
    const size_t k = top_k == 0 ? order.size() : static_cast<size_t>(top_k);
    double total = 0.0, sum = 0.0;
    for (size_t i = 0; i < k; ++i) total += p[static_cast<size_t>(order[i])];
    size_t n = 0;
    while (n < k && (n == 0 || sum < static_cast<double>(top_p) * total))
      sum += p[static_cast<size_t>(order[n++])];
    const std::set<int32_t> allowed(order.begin(),
                                    order.begin() + static_cast<ptrdiff_t>(std::min(k, n + 1)));
    Request request = MakeRequest({0});
    request.params.top_k = top_k;
    request.params.top_p = top_p;
    std::set<int32_t> seen;
    double mean_rank = 0.0;
    for (uint64_t seed = 0; seed < 1500; ++seed) {
      request.params.seed = seed;
      Sample sample;
      sampler.Draw(logits.data(), request, nullptr, &sample);
      CHECK(allowed.count(sample.token) == 1);
      seen.insert(sample.token);
      mean_rank += logits[static_cast<size_t>(sample.token)] / 1500.0;
    }
    double expected = 0.0;
    for (size_t i = 0; i < n; ++i)
      expected += p[static_cast<size_t>(order[i])] / sum *
                  static_cast<double>(logits[static_cast<size_t>(order[i])]);
    CHECK(std::fabs(mean_rank - expected) < 0.08);  // sd of a logit here is below 1; 1500 draws
    CHECK(seen.size() > std::min<size_t>(n, 1500) / 4);
  }
}

void TestLogProbs() {
  const std::vector<float> logits = {0.5f, 2.0f, -1.0f, 2.0f, -kInf};
  Request request = MakeRequest({0});
  request.params.temperature = 0.0f;
  request.params.logit_bias = {
      {2, 50.0f}};  // chosen by bias; the log-probabilities stay the model's own
  request.params.num_logprobs = 4;
  Sampler sampler(5);
  Sample sample;
  sampler.Draw(logits.data(), request, nullptr, &sample);
  const std::vector<double> p = Softmax(logits, 1.0);
  CHECK(sample.token == 2 && std::fabs(sample.logprob - std::log(p[2])) < 1e-6);
  CHECK(sample.num_top == 4);
  const int32_t best[] = {1, 3, 0, 2};
  for (int i = 0; i < 4; ++i) {
    CHECK(sample.top_ids[i] == best[i]);
    CHECK(std::fabs(sample.top_logprobs[i] - std::log(p[static_cast<size_t>(best[i])])) < 1e-6);
  }
  request.params.num_logprobs = PSM_MAX_TOP_LOGPROBS;  // more than there are
  sampler.Draw(logits.data(), request, nullptr, &sample);
  CHECK(sample.num_top == 4);  // what is impossible is not listed

  std::vector<float> wide(100000, -20.0f);  // the sum of many small terms: 1 + 1e5 e^-20
  wide[77] = 0.0f;
  Sampler wide_sampler(100000);
  request = MakeRequest({0});
  request.params.temperature = 0.0f;
  request.params.num_logprobs = 1;
  wide_sampler.Draw(wide.data(), request, nullptr, &sample);
  CHECK(sample.token == 77 &&
        std::fabs(sample.logprob + std::log1p(99999.0 * std::exp(-20.0))) < 1e-9);
}

// The row decides, not the object's past.
void TestNoMemory() {
  std::mt19937 random(4);
  Sampler used(257);
  for (int i = 0; i < 300; ++i) {
    std::vector<float> logits(257);
    for (float& l : logits) l = static_cast<float>(random() % 1000) / 100.0f;
    Request request = MakeRequest({3, 4}, {5});
    request.params.seed = random();
    request.params.top_k = static_cast<int32_t>(random() % 3) * 20;
    request.params.top_p = random() % 2 ? 0.8f : 1.0f;
    request.params.min_p = random() % 2 ? 0.1f : 0.0f;
    request.params.num_logprobs = static_cast<int32_t>(random() % 4);
    request.params.presence_penalty = random() % 2 ? 1.0f : 0.0f;
    Sample sample;
    used.Draw(logits.data(), request, nullptr, &sample);
    CHECK(sample.token == Token(logits, request));
  }
}

// The k largest of a row as psm_batch.candidates has them.
std::vector<psm_candidate> Largest(const std::vector<float>& logits, size_t k) {
  std::vector<psm_candidate> all;
  for (size_t i = 0; i < logits.size(); ++i) {
    if (logits[i] > -kInf) all.push_back({logits[i], static_cast<int32_t>(i)});
  }
  std::stable_sort(all.begin(), all.end(), [](const psm_candidate& a, const psm_candidate& b) {
    return a.logit > b.logit;
  });
  all.resize(k, {0.0f, -1});
  return all;
}

// Greedy and top_k draws from the largest logits are those from the row; where equal ones are cut
// they are left to the row.
void TestCandidates() {
  std::mt19937 random(11);
  int num_drawn = 0, num_left = 0;
  for (int round = 0; round < 20000; ++round) {
    std::vector<float> logits(1 + random() % 300);
    // Few different values: ties within lists and at their ends, also by division.
    const int num_values = 1 + static_cast<int>(random() % 40);
    const float unit = random() % 2 == 0 ? 0.25f : 1e-7f;
    for (float& x : logits) {
      x = random() % 9 == 0 ? -kInf : 5.0f + unit * static_cast<float>(random() % num_values);
    }
    if (*std::max_element(logits.begin(), logits.end()) == -kInf) continue;
    Request request = MakeRequest({1, 2});
    request.params.seed = random();
    request.params.temperature =
        random() % 3 == 0 ? 0.0f : 0.1f * static_cast<float>(random() % 20);
    request.params.top_k = static_cast<int32_t>(1 + random() % 60);
    request.params.top_p = random() % 2 == 0 ? 1.0f : 0.05f * static_cast<float>(1 + random() % 19);
    request.params.min_p = random() % 3 == 0 ? 0.01f * static_cast<float>(random() % 50) : 0.0f;
    const int32_t wanted = Sampler::CandidatesFor(request);
    CHECK(wanted == (request.params.greedy() ? 1 : request.params.top_k + 1));
    const size_t given = static_cast<size_t>(wanted) + random() % 5;
    const std::vector<psm_candidate> candidates = Largest(logits, given);
    Sampler sampler(static_cast<int32_t>(logits.size()));
    Sample sample;
    if (!sampler.DrawFromCandidates(candidates.data(), static_cast<int32_t>(given), request,
                                    &sample)) {
      ++num_left;
      continue;
    }
    ++num_drawn;
    CHECK(sample.token == Token(logits, request));
  }
  CHECK(num_drawn > 10000 && num_left > 100);
}

// What needs more than the largest logits says so, and bad lists are found out.
void TestCandidatesThatDoNotServe() {
  const auto wanted = [](auto change) {
    Request request = MakeRequest({1, 2});
    request.params.temperature = 0.0f;
    change(&request);
    return Sampler::CandidatesFor(request);
  };
  CHECK(wanted([](Request*) {}) == 1);
  CHECK(wanted([](Request* r) { r->params.temperature = 1.0f; }) == 0);
  CHECK(wanted([](Request* r) { r->params.num_logprobs = 1; }) == 0);
  CHECK(wanted([](Request* r) { r->params.repetition_penalty = 1.1f; }) == 0);
  CHECK(wanted([](Request* r) { r->params.logit_bias = {{3, 1.0f}}; }) == 0);
  CHECK(wanted([](Request* r) { r->params.no_repeat_ngram_size = 2; }) == 0);
  CHECK(wanted([](Request* r) {
          r->params.temperature = 1.0f;
          r->params.top_k = PSM_MAX_CANDIDATES;
        }) == 0);
  Sampler sampler(8);
  Sample sample;
  const Request request = MakeRequest({1, 2});
  const psm_candidate empty = {0.0f, -1}, beyond = {1.0f, 8};
  CHECK(!sampler.DrawFromCandidates(&empty, 1, request, &sample));
  CHECK(!sampler.DrawFromCandidates(&empty, 0, request, &sample));
  try {
    Request greedy = MakeRequest({1, 2});
    greedy.params.temperature = 0.0f;
    sampler.DrawFromCandidates(&beyond, 1, greedy, &sample);
    CHECK(false);
  } catch (const StatusError& e) {
    CHECK(e.code() == PSM_ERROR_EXECUTOR);
  }
}

}  // namespace

int main() {
  TestCandidates();
  TestCandidatesThatDoNotServe();
  TestTopPDecays();
  TestPhilox();
  TestDrawBits();
  TestExponential();
  TestExp();
  TestArgMax();
  TestGreedy();
  TestTokenCounts();
  TestPenalties();
  TestBiasBadWordsMinTokens();
  TestBadRows();
  TestDistributions();
  TestDrawIsARace();
  TestCoupling();
  TestFilterEdges();
  TestPlainRule();
  TestVocabularyOfMillions();
  TestLargeVocabulary();
  TestLogProbs();
  TestNoMemory();
  return 0;
}
