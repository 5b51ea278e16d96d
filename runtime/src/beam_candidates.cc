// What one beam could go on with: its best tokens, scored.
//
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <limits>

#include "beam_search.h"
#include "request.h"
#include "sampler.h"
#include "status.h"

namespace plansmith {
namespace {

constexpr float kNegInf = -std::numeric_limits<float>::infinity();
constexpr int32_t kLanes = 32;
constexpr int32_t kBlock = 128;  // logits compared at once with what has to be beaten

// Sum of e^(x[i] - max), in an order that depends on n alone.
double SumOfExp(const float* x, int32_t n, float max) {
  double lanes[kLanes] = {};
  int32_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    float e[kLanes];
    for (int32_t j = 0; j < kLanes; ++j) e[j] = ExpNonPositive(x[i + j] - max);
    for (int32_t j = 0; j < kLanes; ++j) lanes[j] += static_cast<double>(e[j]);
  }
  for (int32_t j = 0; i + j < n; ++j) {
    lanes[j] += static_cast<double>(ExpNonPositive(x[i + j] - max));
  }
  double sum = 0.0;
  for (double lane : lanes) sum += lane;
  return sum;
}

bool AnyAbove(const float* x, int32_t n, float threshold) {
  int32_t above = 0;
  for (int32_t i = 0; i < n; ++i) above |= x[i] > threshold;
  return above != 0;
}

}  // namespace

void BeamSearch::Refuse(const Request& request, const char* what) {
  throw StatusError(
      PSM_ERROR_INVALID_ARGUMENT,
      Format("request %llu: %s at output %d of its beams",
             static_cast<unsigned long long>(request.public_id()), what, request.num_output()));
}

// What changes single entries may not leave the range that can be ranked.
void BeamSearch::CheckAdjusted(const float* row, const Request& request) const {
  float max;
  bool has_nan;
  ArgMax(row, vocab_size_, &max, &has_nan);
  if (has_nan || max == std::numeric_limits<float>::infinity()) {
    Refuse(request,
           "penalties, logit_bias or the logits processor drive a token beyond float32 (use "
           "smaller ones)");
  }
}

// Makes `beam` the request's history: the sampler and FinishReason then see the beam's own. Beams
// share most of their beginning, so few tokens change.
void BeamSearch::Present(const Beam& beam, Request* request) const {
  const size_t n = std::min(beam.tokens.size(), static_cast<size_t>(request->num_output()));
  const int32_t* output = request->output();
  const size_t common =
      static_cast<size_t>(std::mismatch(output, output + n, beam.tokens.begin()).first - output);
  while (request->num_output() > static_cast<int32_t>(common)) request->PopToken();
  for (size_t i = common; i < beam.tokens.size(); ++i) request->PushToken(beam.tokens[i]);
}

// The candidates of one beam: its num_entries_ best, of which at most num_ends end, so that width
// of them can go on.
void BeamSearch::Collect(const float* row, int32_t parent, Sampler* sampler, Request* request) {
  const Beam& beam = beams_[static_cast<size_t>(parent)];
  Present(beam, request);
  if (!LogSoftmax(row, sampler, *request)) return;
  const float* adjusted = sampler->Adjusted(logprobs_.data(), *request, nullptr);
  if (adjusted != logprobs_.data()) CheckAdjusted(adjusted, *request);
  KeepBest(adjusted);
  for (size_t rank = 0; rank < best_.size(); ++rank) {
    const Entry& entry = best_[rank];
    Candidate candidate;
    candidate.cum_logprob = beam.cum_logprob + static_cast<double>(entry.logprob);
    candidate.rank_score = candidate.cum_logprob -
                           static_cast<double>(params_.diversity_rate) * static_cast<double>(rank);
    candidate.logprob = logprobs_[static_cast<size_t>(entry.token)];
    candidate.token = entry.token;
    candidate.parent = parent;
    request->PushToken(entry.token);
    candidate.finish_reason = FinishReason(*request);
    request->PopToken();
    candidates_.push_back(candidate);
  }
}

// False when the model itself forbids every token.
bool BeamSearch::LogSoftmax(const float* row, Sampler* sampler, const Request& request) {
  float max;
  bool has_nan;
  ArgMax(row, vocab_size_, &max, &has_nan);
  if (has_nan || max == std::numeric_limits<float>::infinity()) {
    sampler->Adjusted(row, request, nullptr);  // throws, and says which token
  }
  if (max == kNegInf) return false;
  const double log_sum = std::log(SumOfExp(row, vocab_size_, max)) + static_cast<double>(max);
  float* out = logprobs_.data();
  for (int32_t i = 0; i < vocab_size_; ++i) {
    out[i] = static_cast<float>(static_cast<double>(row[i]) - log_sum);
  }
  return true;
}

// The num_entries_ best of a row into best_, one pass. Few entries are inserted: the n-th is among
// the k best with probability k / n.
void BeamSearch::KeepBest(const float* row) {
  best_.clear();
  float threshold = kNegInf;  // forbidden tokens never qualify
  for (int32_t begin = 0; begin < vocab_size_; begin += kBlock) {
    const int32_t end = std::min(begin + kBlock, vocab_size_);
    if (!AnyAbove(row + begin, end - begin, threshold)) continue;
    for (int32_t i = begin; i < end; ++i) {
      if (!(row[i] > threshold)) continue;
      if (best_.size() == num_entries_) best_.pop_back();
      auto place = best_.end();
      while (place != best_.begin() && (place - 1)->logprob < row[i]) --place;
      best_.insert(place, {row[i], i});
      if (best_.size() == num_entries_) threshold = best_.back().logprob;
    }
  }
}

}  // namespace plansmith
