// SPDX-License-Identifier: Apache-2.0
#include "sampler.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "repeat_ngram.h"
#include "rng.h"
#include "status.h"

namespace plansmith {
namespace {

constexpr float kNegInf = -std::numeric_limits<float>::infinity();
constexpr int32_t kLanes = 32;     // more than GCC unrolls away before it vectorizes
constexpr int32_t kBlock = 1024;   // floats searched again for the index of the maximum
constexpr size_t kRaceBlock = 64;  // tokens looked at together before any alone

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

// The constant whose addition and subtraction round a weight to a multiple of the unit in which
// sums of V of them stay below 2^53: 1.5 * 2^18 for 2^-34 up to V = 2^19, twice it from there on
// for each doubling of V.
double WeightRounder(int32_t vocab_size) {
  double rounder = 0x1.8p18;
  for (int64_t most = int64_t{1} << 19; most < vocab_size; most *= 2) rounder *= 2.0;
  return rounder;
}

double Rounded(float weight, double rounder) {
  return (static_cast<double>(weight) + rounder) - rounder;
}

// The exact sum of rounded weights. Lanes, so that it vectorizes.
double RoundedSum(const float* x, int32_t n, double rounder) {
  double lanes[kLanes] = {};
  int32_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int32_t j = 0; j < kLanes; ++j) lanes[j] += Rounded(x[i + j], rounder);
  }
  for (int32_t j = 0; i + j < n; ++j) lanes[j] += Rounded(x[i + j], rounder);
  double sum = 0.0;
  for (double lane : lanes) sum += lane;
  return sum;
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

// The largest of kRaceBlock numbers <= 0: as integers, whose order GCC may change and so vectorize.
float BlockMaxNonPositive(const float* z) {
  int32_t least = 0x7fffffff;
  for (size_t j = 0; j < kRaceBlock; ++j) {
    int32_t magnitude;
    std::memcpy(&magnitude, z + j, sizeof magnitude);
    magnitude &= 0x7fffffff;
    least = magnitude < least ? magnitude : least;
  }
  float max;
  std::memcpy(&max, &least, sizeof max);
  return -max;
}

// Tokens arrive after exponentially distributed times, their weights being the rates; the first
// wins. Each wins with its share of the weight, in whatever order they enter. The least u is 2^-33:
// tokens with less than about 1e-10 of the best one's weight win never instead of that rarely.
class Race {
 public:
  explicit Race(float min_p) : min_p_(min_p) {}

  void Enter(int32_t id, float z, uint32_t bits) {
    const float weight = ExpNonPositive(z);
    if (weight == 0.0f || weight < min_p_) return;
    const double time = Exponential(bits) / static_cast<double>(weight);
    if (time < best_ || (time == best_ && id < winner_)) {
      best_ = time;
      winner_ = id;
    }
  }

  // Tokens of at most this weight neither win nor tie unless the upper 16 of their bits are below
  // the result: u is below -log(1 - u), so this takes no logarithm. 1e-5 for what rounding takes.
  int32_t Limit(float weight) const {
    if (weight == 0.0f) return 0;
    const double bound = best_ * static_cast<double>(weight) * 1.00001;
    return static_cast<int32_t>(std::min(bound, 1.0) * 0x1.0p16) + 1;
  }

  int32_t winner() const { return winner_; }

 private:
  float min_p_;
  double best_ = std::numeric_limits<double>::infinity();
  int32_t winner_ = -1;
};

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

bool IsBelowMinTokens(const Request& request) {
  return request.num_output() < request.params.min_tokens && !request.params.end_ids.empty();
}

// The n <= 32 logits whose bits are set can no longer be drawn. Most words of a mask are all ones
// or all zeros.
void Forbid(uint32_t bits, int32_t n, float* logits) {
  if (bits == 0) return;
  if (bits == ~uint32_t{0}) {
    std::fill(logits, logits + n, kNegInf);
    return;
  }
  for (int32_t i = 0; i < n; ++i) {
    if ((bits >> i & 1) != 0) logits[i] = kNegInf;
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

void RefuseOverflow(const Request& request) {
  throw StatusError(
      PSM_ERROR_INVALID_ARGUMENT,
      Format("request %llu: penalties, logit_bias or the logits processor drive a token beyond "
             "float32 at output %d; use smaller ones",
             static_cast<unsigned long long>(request.public_id()), request.num_output()));
}

void RefuseForbidden(const Request& request) {
  throw StatusError(
      PSM_ERROR_INVALID_ARGUMENT,
      Format("request %llu forbids every token at output %d; relax its logit_bias, bad_words, "
             "no_repeat_ngram_size, min_tokens, guide or logits processor",
             static_cast<unsigned long long>(request.public_id()), request.num_output()));
}

Sampler::Sampler(int32_t vocab_size)
    : vocab_size_(vocab_size), rounder_(WeightRounder(vocab_size)) {
  const size_t n = static_cast<size_t>(vocab_size);
  adjusted_.resize(n);
  z_.resize((n + kRaceBlock - 1) / kRaceBlock * kRaceBlock, kNegInf);
  weights_.resize(n);
  candidates_.resize(n);
  block_weights_.resize(z_.size() / kRaceBlock);
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
    RefuseOverflow(request);
  }
  if (max == kNegInf) RefuseForbidden(request);
  out->token = params.greedy()
                   ? best
                   : DrawFrom(adjusted, max, params, TopP(request),
                              DrawKey(params.seed, static_cast<uint32_t>(request.num_output())));
  out->num_top = 0;
  if (params.num_logprobs > 0) LogProbs(logits, raw_max, params.num_logprobs, out);
}

bool Sampler::ChangesLogits(const Request& request) {
  const SamplingParams& p = request.params;
  return p.has_penalties() || !p.logit_bias.empty() || p.bad_words.size() > 0 ||
         p.no_repeat_ngram_size > 0 || IsBelowMinTokens(request) || p.logits_processor != nullptr;
}

// The logits after everything that changes single entries; `logits` itself when nothing does.
const float* Sampler::Adjust(const float* logits, const Request& request, const uint32_t* mask) {
  const SamplingParams& p = request.params;
  if (!ChangesLogits(request) && mask == nullptr) return logits;

  float* l = adjusted_.data();
  std::copy(logits, logits + vocab_size_, l);
  if (p.logits_processor != nullptr) RunProcessor(request, l);
  if (mask != nullptr) {
    for (int32_t begin = 0; begin < vocab_size_; begin += 32) {
      Forbid(~mask[begin / 32], std::min(32, vocab_size_ - begin), l + begin);
    }
  }
  if (p.has_penalties()) Penalize(request, l);
  // -INFINITY forbids, also what a penalty has driven to +infinity.
  for (const auto& [id, bias] : p.logit_bias) l[id] = bias == kNegInf ? kNegInf : l[id] + bias;
  for (size_t i = 0; i < p.bad_words.size(); ++i) {
    const auto [word, n] = p.bad_words.word(i);
    if (EndsWith(request, word, n - 1)) l[word[n - 1]] = kNegInf;
  }
  ForbidRepeatedNgrams(request.tokens, p.no_repeat_ngram_size, l);
  if (IsBelowMinTokens(request)) {
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

int32_t Sampler::DrawFrom(const float* logits, float max, const SamplingParams& params, float top_p,
                          const PhiloxKey& key) {
  const float temperature = params.temperature;
  float* z = z_.data();
  // Relative to the best first: a small temperature cannot overflow then.
  for (int32_t i = 0; i < vocab_size_; ++i) z[i] = (logits[i] - max) / temperature;
  const bool cut_k = params.top_k > 0 && params.top_k < vocab_size_;
  const bool cut_p = top_p < 1.0f;
  if (!cut_k && !cut_p) return RaceAll(params.min_p, key);

  if (cut_k) return DrawFromKept(KeepTopK(params.top_k), params, top_p, key);
  double total = 0.0;
  const size_t n = KeepPlausible(top_p, &total);
  return RaceKept(KeepTopP(n, total, top_p), params.min_p, key);
}

int32_t Sampler::DrawFromKept(size_t n, const SamplingParams& params, float top_p,
                              const PhiloxKey& key) {
  if (top_p < 1.0f) n = KeepTopP(n, CandidateSum(n), top_p);
  return RaceKept(n, params.min_p, key);
}

int32_t Sampler::RaceKept(size_t n, float min_p, const PhiloxKey& key) const {
  Race race(min_p);
  for (size_t i = 0; i < n; ++i) {
    const auto [token_z, id] = candidates_[i];
    race.Enter(id, token_z, DrawBits(key, id));
  }
  return race.winner();
}

double Sampler::CandidateSum(size_t n) const {
  double sum = 0.0;
  for (size_t i = 0; i < n; ++i) sum += Rounded(ExpNonPositive(candidates_[i].z), rounder_);
  return sum;
}

// No top_k and no top_p: the whole vocabulary runs. In most blocks no u is small enough even for
// the heaviest token, and then none of them is looked at alone.
int32_t Sampler::RaceAll(float min_p, const PhiloxKey& key) {
  float* heaviest = block_weights_.data();
  const size_t num_blocks = block_weights_.size();
  for (size_t b = 0; b < num_blocks; ++b)
    heaviest[b] = BlockMaxNonPositive(z_.data() + b * kRaceBlock);
  for (size_t b = 0; b < num_blocks; ++b) heaviest[b] = ExpNonPositive(heaviest[b]);

  Race race(min_p);
  for (size_t b = 0; b < num_blocks; ++b) {
    const int32_t limit = race.Limit(heaviest[b]);
    if (limit == 0) continue;
    const size_t begin = b * kRaceBlock;
    const float* z = z_.data() + begin;
    uint32_t upper[kRaceBlock / 2];
    int32_t num_early = 0;
    for (size_t j = 0; j < kRaceBlock / 2; ++j) {
      upper[j] = UpperDrawBits(key, static_cast<uint32_t>(begin / 2 + j));
      num_early += static_cast<int32_t>(upper[j] >> 16) < limit;
      num_early += static_cast<int32_t>(upper[j] & 0xffff) < limit;
    }
    if (num_early == 0) continue;
    for (size_t j = 0; j < kRaceBlock; ++j) {
      const int32_t id = static_cast<int32_t>(begin + j);
      if (static_cast<int32_t>(upper[j / 2] >> (j % 2 * 16) & 0xffff) < limit)
        race.Enter(id, z[j], DrawBits(key, id));
    }
  }
  return race.winner();
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

// For top_p without top_k: the sum of all weights, and as candidates those that can be in the
// nucleus. Tokens below (1 - top_p) / V of the whole add up to less than 1 - top_p, so the nucleus
// is reached without them; usually a few hundred remain to be ordered.
size_t Sampler::KeepPlausible(float top_p, double* total) {
  ExpAll(z_.data(), vocab_size_, 0.0f, weights_.data());
  *total = RoundedSum(weights_.data(), vocab_size_, rounder_);
  // Half of the bound, because e^z is monotonic but for its last bits, and less half a unit, by
  // which rounding may raise a weight.
  const double unit = rounder_ * 0x1.5555555555555p-53;  // 2^-34 of 1.5 * 2^18
  const float floor =
      static_cast<float>(0.5 * ((1.0 - static_cast<double>(top_p)) * *total / vocab_size_ - unit));
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
      sum += Rounded(ExpNonPositive(candidates_[ordered].z), rounder_);
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
