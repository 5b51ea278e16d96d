// The rows, edits and masks an executor is given are what Sampler::Draw would do, entry by entry.
//
// SPDX-License-Identifier: Apache-2.0
#include "sampling_rows.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#include "check.h"
#include "sampler.h"
#include "status.h"

namespace {

using namespace plansmith;

constexpr int32_t kVocab = 75;
constexpr float kNegInf = -std::numeric_limits<float>::infinity();

class Random {
 public:
  explicit Random(uint32_t seed) : random_(seed) {}
  int32_t Below(int32_t n) { return static_cast<int32_t>(random_() % static_cast<uint32_t>(n)); }
  bool OneIn(int32_t n) { return Below(n) == 0; }
  int32_t Token() { return Below(kVocab); }

 private:
  std::mt19937 random_;
};

void AddWord(WordList* words, Random* r, int32_t n) {
  for (int32_t i = 0; i < n; ++i) words->ids.push_back(r->Below(6));
  words->ends.push_back(static_cast<int32_t>(words->ids.size()));
}

// Tokens below 6 are frequent, so that words and n-grams come back.
std::unique_ptr<Request> RandomRequest(Random* r) {
  auto request = std::make_unique<Request>();
  SamplingParams& p = request->params;
  if (r->OneIn(2)) p.repetition_penalty = r->OneIn(2) ? 1.3f : 0.7f;
  if (r->OneIn(3)) p.presence_penalty = 0.4f;
  if (r->OneIn(3)) p.frequency_penalty = -0.3f;
  if (r->OneIn(3)) p.no_repeat_ngram_size = 1 + r->Below(3);
  for (int32_t n = r->Below(2) * r->Below(5); n > 0; --n) AddWord(&p.bad_words, r, 1 + r->Below(3));
  int32_t id = 0;
  for (int32_t n = r->Below(2) * r->Below(8); n > 0 && id < kVocab; --n) {
    id += 1 + r->Below(12);
    if (id < kVocab) p.logit_bias.emplace_back(id, r->OneIn(4) ? kNegInf : 0.7f);
  }
  p.min_tokens = r->Below(30);
  for (int32_t n = r->Below(4); n > 0; --n) p.end_ids.push_back(r->Token());
  request->num_prompt = 1 + r->Below(40);
  request->max_tokens = 30;
  request->tokens.reserve(static_cast<size_t>(request->max_len()));
  request->counts.Reserve(kVocab);
  for (int32_t i = 0; i < request->num_prompt; ++i) {
    const int32_t token = r->OneIn(2) ? r->Below(6) : r->Token();
    request->tokens.push_back(token);
    if (p.has_penalties()) request->counts.AddPrompt(token);
  }
  return request;
}

void Apply(const psm_step_sampling& s, const psm_sampling_row& row, std::vector<float>* logits) {
  for (int32_t id = 0; row.mask_idx >= 0 && id < kVocab; ++id) {
    const uint32_t word = s.masks[row.mask_idx * s.mask_words + id / 32];
    if ((word >> (id % 32) & 1) == 0) (*logits)[static_cast<size_t>(id)] = kNegInf;
  }
  for (int32_t e = row.edit_begin; e < row.edit_end; ++e) {
    CHECK(e == row.edit_begin || s.edits[e - 1].id < s.edits[e].id);
    float& x = (*logits)[static_cast<size_t>(s.edits[e].id)];
    x = x > 0 ? x / s.edits[e].factor : x * s.edits[e].factor;
    x = x - s.edits[e].minus;
    x = x + s.edits[e].plus;
  }
}

std::vector<float> RandomLogits(Random* r) {
  std::vector<float> logits(kVocab);
  for (float& x : logits) {
    const float values[] = {0.0f, -0.0f, kNegInf, 1e-40f, -3e38f};
    x = r->OneIn(6) ? values[r->Below(5)] : 0.001f * static_cast<float>(r->Below(8000) - 4000);
  }
  return logits;
}

// Bit for bit, over a growing output with drafts tried and taken back between.
void TestEdits() {
  Random r(7);
  Sampler sampler(kVocab);
  SamplingRows rows(kVocab, 4);
  int64_t num_edits = 0, num_masks = 0;
  for (int32_t round = 0; round < 3000; ++round) {
    const std::unique_ptr<Request> request = RandomRequest(&r);
    for (int32_t output = 0; output < 12; ++output) {
      std::vector<uint32_t> mask((kVocab + 31) / 32);
      for (uint32_t& word : mask) word = static_cast<uint32_t>(r.Below(1 << 30)) * 3;
      mask.back() &= (1u << kVocab % 32) - 1;
      const uint32_t* used = r.OneIn(3) ? mask.data() : nullptr;
      const int32_t num_ahead = r.Below(3);
      for (int32_t i = 0; i < num_ahead; ++i) request->PushToken(r.Below(8));
      const std::vector<float> logits = RandomLogits(&r);
      rows.Clear();
      rows.Add(request.get(), nullptr);  // another row before it
      rows.Add(request.get(), used);
      const psm_step_sampling& s = rows.sampling();
      CHECK(s.num_rows == 2 && s.rows[1].output_idx == request->num_output());
      std::vector<float> edited = logits;
      Apply(s, s.rows[1], &edited);
      const float* want = sampler.Adjusted(logits.data(), *request, used);
      CHECK(std::memcmp(want, edited.data(), edited.size() * sizeof(float)) == 0);
      num_edits += s.num_edits;
      num_masks += s.num_masks;
      for (int32_t i = 0; i < num_ahead; ++i) request->PopToken();
      request->PushToken(r.OneIn(2) ? r.Below(6) : r.Token());
    }
  }
  CHECK(num_edits > 100000 && num_masks > 1000);
}

void TestParameters() {
  SamplingRows rows(kVocab, 3);
  Request request;
  request.num_prompt = 1;
  request.tokens = {5};
  SamplingParams& p = request.params;
  p.seed = 0x1122334455667788u;
  p.temperature = 0.7f, p.top_k = 9, p.top_p = 0.8f, p.min_p = 0.1f, p.num_logprobs = 4;
  rows.Add(&request, nullptr);
  p.top_k = 1;
  p.top_p_after = {0.9f, 0.8f, 0.7f};
  request.PushToken(3);
  rows.Add(&request, nullptr, false);
  const psm_step_sampling& s = rows.sampling();
  CHECK(s.struct_size == PSM_STEP_SAMPLING_SIZE && s.num_rows == 2 && s.num_edits == 0);
  CHECK(s.num_masks == 0 && s.mask_words == 3);
  const psm_sampling_row& a = s.rows[0];
  CHECK(a.seed == p.seed && a.output_idx == 0 && a.temperature == 0.7f && a.top_k == 9);
  CHECK(a.top_p == 0.8f && a.min_p == 0.1f && a.num_logprobs == 4 && a.mask_idx == -1);
  const psm_sampling_row& b = s.rows[1];  // top_k 1 is greedy, whatever the temperature
  CHECK(b.temperature == 0.0f && b.output_idx == 1 && b.top_p == 0.8f && b.num_logprobs == 0);
  // The words as a device reads them.
  uint32_t words[12];
  std::memcpy(words, &a, sizeof words);
  CHECK(words[0] == 0x55667788u && words[1] == 0x11223344u && words[11] == 0);
}

// What changes nothing is no edit: a prompt of thousands of tokens costs nothing without a
// repetition penalty.
void TestOnlyWhatChanges() {
  SamplingRows rows(kVocab, 2);
  Request request;
  request.num_prompt = 3;
  request.params.frequency_penalty = 0.5f;
  request.counts.Reserve(kVocab);
  for (int32_t token : {9, 4, 9}) {
    request.tokens.push_back(token);
    request.counts.AddPrompt(token);
  }
  rows.Add(&request, nullptr);
  CHECK(rows.sampling().num_edits == 0);
  request.PushToken(4);
  request.PushToken(4);
  rows.Add(&request, nullptr);
  const psm_step_sampling& s = rows.sampling();
  CHECK(s.num_edits == 1 && s.edits[0].id == 4 && s.edits[0].factor == 1.0f);
  CHECK(s.edits[0].minus == 1.0f && s.edits[0].plus == 0.0f && std::signbit(s.edits[0].plus));
}

// What is forbidden is so whatever a penalty makes of it.
void TestForbiddenAndPenalized() {
  SamplingRows rows(kVocab, 1);
  Request request;
  request.num_prompt = 1;
  request.params.repetition_penalty = 1e-38f;
  request.params.no_repeat_ngram_size = 1;
  request.counts.Reserve(kVocab);
  request.tokens.push_back(2);
  request.counts.AddPrompt(2);
  rows.Add(&request, nullptr);
  std::vector<float> logits(kVocab, 3e38f);
  Apply(rows.sampling(), rows.sampling().rows[0], &logits);
  CHECK(logits[2] == kNegInf && logits[3] == 3e38f);
  // So is what its own bias forbids, here and where the core draws.
  request.params.no_repeat_ngram_size = 0;
  request.params.logit_bias = {{2, kNegInf}};
  rows.Clear();
  rows.Add(&request, nullptr);
  std::fill(logits.begin(), logits.end(), 3e38f);
  Sampler sampler(kVocab);
  const float* want = sampler.Adjusted(logits.data(), request, nullptr);
  Apply(rows.sampling(), rows.sampling().rows[0], &logits);
  CHECK(logits[2] == kNegInf && want[2] == kNegInf);
  // Every edit that forbids does so by itself, however an executor reads a plus of -infinity.
  const psm_logit_edit& edit = rows.sampling().edits[0];
  CHECK(edit.factor == 1.0f && edit.minus == 0.0f && edit.plus == kNegInf);
}

void TestWhatCannotBeDescribed() {
  Request request;
  CHECK(SamplingRows::CanDescribe(request));
  request.params.has_repeated_bias = true;
  CHECK(!SamplingRows::CanDescribe(request));
  request.params.has_repeated_bias = false;
  request.params.logits_processor = [](void*, uint64_t, int32_t, const int32_t*, int32_t, float*,
                                       int32_t) -> psm_status { return PSM_OK; };
  CHECK(!SamplingRows::CanDescribe(request));
}

// A step beyond the limits would write past the arrays.
void TestTooManyRows() {
  SamplingRows rows(kVocab, 1);
  Request request;
  request.num_prompt = 1;
  request.tokens = {1};
  rows.Add(&request, nullptr);
  try {
    rows.Add(&request, nullptr);
    CHECK(false);
  } catch (const StatusError& e) {
    CHECK(e.code() == PSM_ERROR_INTERNAL);
  }
}

psm_status Refused(const psm_row_sample& drawn, const Request& request, const uint32_t* mask) {
  Sample sample;
  try {
    TakeSample(drawn, request, mask, kVocab, &sample);
  } catch (const StatusError& e) {
    return e.code();
  }
  return PSM_OK;
}

void TestTakeSample() {
  Request request;
  request.num_prompt = 1;
  request.tokens = {1};
  request.params.num_logprobs = 2;
  psm_row_sample drawn{};
  drawn.token = 70, drawn.logprob = -1.5f, drawn.num_top = 2;
  drawn.top_ids[0] = 3, drawn.top_ids[1] = 70;
  drawn.top_logprobs[0] = -0.5f, drawn.top_logprobs[1] = -1.5f;
  const uint32_t mask[3] = {0, 0, 1u << 6};
  Sample sample;
  TakeSample(drawn, request, mask, kVocab, &sample);
  CHECK(sample.token == 70 && sample.logprob == -1.5f && sample.num_top == 2);
  CHECK(sample.top_ids[0] == 3 && sample.top_logprobs[1] == -1.5f);
  const uint32_t other[3] = {~0u, ~0u, 1u << 5};
  CHECK(Refused(drawn, request, other) == PSM_ERROR_EXECUTOR);
  for (const int32_t token : {-4, kVocab, std::numeric_limits<int32_t>::min()}) {
    psm_row_sample bad = drawn;
    bad.token = token;
    CHECK(Refused(bad, request, nullptr) == PSM_ERROR_EXECUTOR);
  }
  psm_row_sample bad = drawn;
  bad.token = PSM_ROW_BAD_LOGITS;
  CHECK(Refused(bad, request, nullptr) == PSM_ERROR_EXECUTOR);
  bad.token = PSM_ROW_FORBIDDEN;
  CHECK(Refused(bad, request, nullptr) == PSM_ERROR_INVALID_ARGUMENT);
  bad.token = PSM_ROW_OVERFLOW;
  CHECK(Refused(bad, request, nullptr) == PSM_ERROR_INVALID_ARGUMENT);
  for (const int32_t num_top : {-1, 3, 1 << 20}) {
    bad = drawn;
    bad.num_top = num_top;
    CHECK(Refused(bad, request, nullptr) == PSM_ERROR_EXECUTOR);
  }
  bad = drawn;
  bad.top_ids[1] = kVocab;
  CHECK(Refused(bad, request, nullptr) == PSM_ERROR_EXECUTOR);
}

}  // namespace

int main() {
  TestEdits();
  TestParameters();
  TestOnlyWhatChanges();
  TestForbiddenAndPenalized();
  TestWhatCannotBeDescribed();
  TestTooManyRows();
  TestTakeSample();
  return 0;
}
