// SPDX-License-Identifier: Apache-2.0
#include "sampler.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "rng.h"
#include "status.h"

namespace plansmith {
namespace {

constexpr float kNegInf = -std::numeric_limits<float>::infinity();
constexpr int32_t kLanes = 32;    // more than GCC unrolls away before it vectorizes
constexpr int32_t kBlock = 1024;  // floats searched again for the index of the maximum

float BlockMax(const float* x, int32_t n, bool* has_nan) {
  float lane_max[kLanes];
  int32_t lane_nan[kLanes] = {};
  std::fill(lane_max, lane_max + kLanes, kNegInf);
  int32_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int32_t j = 0; j < kLanes; ++j) {
      lane_max[j] = x[i + j] > lane_max[j] ? x[i + j] : lane_max[j];
      lane_nan[j] |= x[i + j] != x[i + j];
    }
  }
  for (int32_t j = 0; i + j < n; ++j) {
    lane_max[j] = x[i + j] > lane_max[j] ? x[i + j] : lane_max[j];
    lane_nan[j] |= x[i + j] != x[i + j];
  }
  for (int32_t nan : lane_nan) *has_nan |= nan != 0;
  return *std::max_element(lane_max, lane_max + kLanes);
}

// Sum in double, in an order that depends on n alone.
double Sum(const float* x, int32_t n) {
  double lanes[kLanes] = {};
  int32_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int32_t j = 0; j < kLanes; ++j) lanes[j] += static_cast<double>(x[i + j]);
  }
  for (int32_t j = 0; i + j < n; ++j) lanes[j] += static_cast<double>(x[i + j]);
  double sum = 0.0;
  for (double lane : lanes) sum += lane;
  return sum;
}

// out[i] = e^(x[i] - max). The arrays do not overlap.
void ExpAll(const float* __restrict x, int32_t n, float max, float* __restrict out) {
  for (int32_t i = 0; i < n; ++i) out[i] = ExpNonPositive(x[i] - max);
}

[[noreturn]] void BadLogits(const float* logits, int32_t vocab_size, const Request& request) {
  int32_t id = 0;
  while (id + 1 < vocab_size && !std::isnan(logits[id]) &&
         !(std::isinf(logits[id]) && logits[id] > 0))
    ++id;
  throw StatusError(PSM_ERROR_EXECUTOR,
                    Format("the executor gave the logit %f to token %d for output %d of request "
                           "%llu; finite values (or -inf) "
                           "are wanted: check the plan's weights and precision",
                           static_cast<double>(logits[id]), id, request.num_output(),
                           static_cast<unsigned long long>(request.public_id())));
}

// Whether the history ends with the first n ids of `word`.
bool EndsWith(const Request& request, const int32_t* word, int32_t n) {
  return n <= request.num_tokens() && std::equal(word, word + n, request.tokens.end() - n);
}

void Penalize(const Request& request, float* l) {
  const SamplingParams& p = request.params;
  for (const TokenCounts::Entry& entry : request.counts.entries()) {
    float& x = l[entry.token];
    x = x > 0.0f ? x / p.repetition_penalty : x * p.repetition_penalty;
    if (entry.num_output > 0) {
      x -= p.presence_penalty + p.frequency_penalty * static_cast<float>(entry.num_output);
    }
  }
}

}  // namespace

int32_t ArgMax(const float* x, int32_t n, float* max, bool* has_nan) {
  *max = kNegInf;
  *has_nan = false;
  int32_t best_block = 0;
  for (int32_t begin = 0; begin < n; begin += kBlock) {
    const float block_max = BlockMax(x + begin, std::min(kBlock, n - begin), has_nan);
    if (block_max > *max) {  // strictly: the first block wins a tie
      *max = block_max;
      best_block = begin;
    }
  }
  int32_t idx = best_block;
  while (idx < n - 1 && x[idx] != *max) ++idx;
  return idx;
}

Sampler::Sampler(int32_t vocab_size) : vocab_size_(vocab_size) {
  const size_t n = static_cast<size_t>(vocab_size);
  adjusted_.resize(n);
  z_.resize(n);
  weights_.resize(n);
  candidates_.resize(n);
  block_sums_.resize((n + kBlock - 1) / kBlock);
}

void Sampler::CheckRow(const float* logits, const Request& request, float* max, int32_t* best) {
  bool has_nan;
  *best = ArgMax(logits, vocab_size_, max, &has_nan);
  if (has_nan || *max == std::numeric_limits<float>::infinity()) {
    BadLogits(logits, vocab_size_, request);
  }
}

void Sampler::RowLogProbs(const float* logits, const Request& request, int32_t token,
                          int32_t num_logprobs, Sample* out) {
  float max;
  int32_t best;
  CheckRow(logits, request, &max, &best);
  out->token = token;
  LogProbs(logits, max, num_logprobs, out);
}

const float* Sampler::Adjusted(const float* logits, const Request& request, const uint32_t* mask) {
  float max;
  int32_t best;
  CheckRow(logits, request, &max, &best);
  return Adjust(logits, request, mask);
}

void Sampler::Draw(const float* logits, const Request& request, const uint32_t* mask, Sample* out) {
  const SamplingParams& params = request.params;
  float raw_max;
  int32_t raw_best;
  CheckRow(logits, request, &raw_max, &raw_best);
  const float* adjusted = Adjust(logits, request, mask);
  bool has_nan = false;
  float max = raw_max;
  int32_t best = raw_best;
  if (adjusted != logits) best = ArgMax(adjusted, vocab_size_, &max, &has_nan);
  if (has_nan || max == std::numeric_limits<float>::infinity()) {
    throw StatusError(
        PSM_ERROR_INVALID_ARGUMENT,
        Format("request %llu: penalties and logit_bias drive a token beyond float32 at output %d; "
               "use smaller ones",
               static_cast<unsigned long long>(request.public_id()), request.num_output()));
  }
  if (max == kNegInf) {
    throw StatusError(
        PSM_ERROR_INVALID_ARGUMENT,
        Format("request %llu forbids every token at output %d; relax its logit_bias, bad_words or "
               "min_tokens",
               static_cast<unsigned long long>(request.public_id()), request.num_output()));
  }
  out->token = params.greedy()
                   ? best
                   : DrawFrom(adjusted, max, params,
                              UniformAt(params.seed, static_cast<uint32_t>(request.num_output())));
  out->num_top = 0;
  if (params.num_logprobs > 0) LogProbs(logits, raw_max, params.num_logprobs, out);
}

// The logits after everything that changes single entries; `logits` itself when nothing does.
const float* Sampler::Adjust(const float* logits, const Request& request, const uint32_t* mask) {
  const SamplingParams& p = request.params;
  const bool below_min_tokens = request.num_output() < p.min_tokens && !p.end_ids.empty();
  if (!p.has_penalties() && p.logit_bias.empty() && p.bad_words.size() == 0 && !below_min_tokens &&
      p.logits_processor == nullptr && mask == nullptr)
    return logits;

  float* l = adjusted_.data();
  std::copy(logits, logits + vocab_size_, l);
  if (p.logits_processor != nullptr) RunProcessor(request, l);
  if (mask != nullptr) {
    for (int32_t i = 0; i < vocab_size_; ++i) {
      l[i] = (mask[i / 32] >> (i % 32) & 1) != 0 ? l[i] : kNegInf;
    }
  }
  if (p.has_penalties()) Penalize(request, l);
  for (const auto& [id, bias] : p.logit_bias) l[id] += bias;
  for (size_t i = 0; i < p.bad_words.size(); ++i) {
    const auto [word, n] = p.bad_words.word(i);
    if (EndsWith(request, word, n - 1)) l[word[n - 1]] = kNegInf;
  }
  if (below_min_tokens) {
    for (int32_t id : p.end_ids) l[id] = kNegInf;
  }
  return l;
}

void Sampler::RunProcessor(const Request& request, float* logits) const {
  const SamplingParams& p = request.params;
  const psm_status status =
      p.logits_processor(p.logits_processor_self, request.client_id, request.sequence_idx,
                         request.tokens.data(), request.num_tokens(), logits, vocab_size_);
  if (status != PSM_OK) {
    throw StatusError(PSM_ERROR_INVALID_ARGUMENT,
                      Format("the logits processor of request %llu failed at output %d: %s",
                             static_cast<unsigned long long>(request.public_id()),
                             request.num_output(), psm_status_name(status)));
  }
}

int32_t Sampler::DrawFrom(const float* logits, float max, const SamplingParams& params, double u) {
  const float temperature = params.temperature;
  float* z = z_.data();
  // Relative to the best first: a small temperature cannot overflow then.
  for (int32_t i = 0; i < vocab_size_; ++i) z[i] = (logits[i] - max) / temperature;
  const bool cut_k = params.top_k > 0 && params.top_k < vocab_size_;
  const bool cut_p = params.top_p < 1.0f;
  if (!cut_k && !cut_p) return DrawByWalk(params.min_p, u);

  size_t n = cut_k ? KeepTopK(params.top_k) : KeepPlausible(params.top_p);
  if (cut_k) std::sort(candidates_.begin(), candidates_.begin() + n, Better);
  if (cut_p)
    n = KeepTopP(n, cut_k ? CandidateSum(n) : Sum(weights_.data(), vocab_size_), params.top_p);
  while (n > 1 && ExpNonPositive(candidates_[n - 1].z) < params.min_p) --n;

  double left = u * CandidateSum(n);
  for (size_t i = 0; i + 1 < n; ++i) {
    left -= static_cast<double>(ExpNonPositive(candidates_[i].z));
    if (left < 0.0) return candidates_[i].id;
  }
  return candidates_[n - 1].id;
}

double Sampler::CandidateSum(size_t n) const {
  double sum = 0.0;
  for (size_t i = 0; i < n; ++i) sum += static_cast<double>(ExpNonPositive(candidates_[i].z));
  return sum;
}

// No top_k and no top_p: walk the vocabulary in its own order, nothing needs sorting.
int32_t Sampler::DrawByWalk(float min_p, double u) {
  float* w = weights_.data();
  ExpAll(z_.data(), vocab_size_, 0.0f, w);
  if (min_p > 0.0f) {
    for (int32_t i = 0; i < vocab_size_; ++i) w[i] = w[i] < min_p ? 0.0f : w[i];
  }
  double total = 0.0;
  for (size_t b = 0; b < block_sums_.size(); ++b) {
    const int32_t begin = static_cast<int32_t>(b) * kBlock;
    block_sums_[b] = Sum(w + begin, std::min(kBlock, vocab_size_ - begin));
    total += block_sums_[b];
  }
  // Whole blocks first. What cannot be drawn (weight 0) must not catch the rounding of the last
  // subtraction either.
  double left = u * total;
  size_t block = 0;
  for (size_t b = 0; b < block_sums_.size(); ++b) {
    if (block_sums_[b] == 0.0) continue;
    block = b;
    if (left < block_sums_[b]) break;
    left -= block_sums_[b];
  }
  const int32_t begin = static_cast<int32_t>(block) * kBlock;
  const int32_t end = std::min(begin + kBlock, vocab_size_);
  int32_t drawn = begin;
  for (int32_t i = begin; i < end; ++i) {
    if (w[i] == 0.0f) continue;
    drawn = i;
    left -= static_cast<double>(w[i]);
    if (left < 0.0) break;
  }
  return drawn;
}

// The top_k best into candidates_, in no order. One pass over V with a threshold that rises
// whenever the buffer fills.
size_t Sampler::KeepTopK(int32_t top_k) {
  const size_t k = static_cast<size_t>(top_k);
  const size_t capacity = std::min(candidates_.size(), 2 * k + 256);
  const auto begin = candidates_.begin();
  size_t n = 0;
  float threshold = kNegInf;
  for (int32_t i = 0; i < vocab_size_; ++i) {
    // Forbidden tokens never qualify; an equal value with a higher id loses to those kept.
    if (!(z_[i] > threshold)) continue;
    if (n == capacity) {
      std::nth_element(begin, begin + k - 1, begin + n, Better);
      n = k;
      threshold = candidates_[k - 1].z;
      if (!(z_[i] > threshold)) continue;
    }
    candidates_[n++] = {z_[i], i};
  }
  if (n > k) {
    std::nth_element(begin, begin + k - 1, begin + n, Better);
    n = k;
  }
  return n;
}

// For top_p without top_k: weights_ of all, and as candidates those that can be in the nucleus.
// Tokens below (1 - top_p) / V of the whole add up to less than 1 - top_p, so the nucleus is
// reached without them; usually a few hundred remain to be ordered.
size_t Sampler::KeepPlausible(float top_p) {
  ExpAll(z_.data(), vocab_size_, 0.0f, weights_.data());
  const double total = Sum(weights_.data(), vocab_size_);
  // Half of the bound, for what rounding takes.
  const float floor =
      static_cast<float>(0.5 * (1.0 - static_cast<double>(top_p)) * total / vocab_size_);
  size_t n = 0;
  for (int32_t i = 0; i < vocab_size_; ++i) {
    const float w = weights_[i];
    if (w > 0.0f && w >= floor) candidates_[n++] = {z_[i], i};
  }
  return n;
}

// The smallest set of best candidates whose weight reaches top_p of `total` (at least one), in
// order. Sorts 128, 512, ... at a time: the nucleus is mostly small.
size_t Sampler::KeepTopP(size_t n, double total, float top_p) {
  const double wanted = static_cast<double>(top_p) * total;
  const auto begin = candidates_.begin();
  double sum = 0.0;
  for (size_t ordered = 0, batch = 128; ordered < n; batch *= 4) {
    const size_t end = std::min(n, ordered + batch);
    if (end < n) std::nth_element(begin + ordered, begin + end, begin + n, Better);
    std::sort(begin + ordered, begin + end, Better);
    for (; ordered < end; ++ordered) {
      sum += static_cast<double>(ExpNonPositive(candidates_[ordered].z));
      if (sum >= wanted) return ordered + 1;
    }
  }
  return n;
}

void Sampler::LogProbs(const float* logits, float max, int32_t num_logprobs, Sample* out) {
  ExpAll(logits, vocab_size_, max, weights_.data());
  const double log_sum = std::log(Sum(weights_.data(), vocab_size_)) + static_cast<double>(max);
  const auto logprob = [&](int32_t id) {
    return static_cast<float>(static_cast<double>(logits[id]) - log_sum);
  };
  out->logprob = out->token >= 0 ? logprob(out->token) : 0.0f;
  out->num_top = 0;
  if (num_logprobs == 0) return;
  std::copy(logits, logits + vocab_size_, z_.begin());
  const size_t n = KeepTopK(std::min(num_logprobs, vocab_size_));
  std::sort(candidates_.begin(), candidates_.begin() + n, Better);
  out->num_top = static_cast<int32_t>(n);
  for (size_t i = 0; i < n; ++i) {
    out->top_ids[i] = candidates_[i].id;
    out->top_logprobs[i] = logprob(candidates_[i].id);
  }
}

}  // namespace plansmith
