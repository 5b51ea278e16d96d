// SPDX-License-Identifier: Apache-2.0
#include "draft_length.h"

#include <algorithm>

namespace plansmith {
namespace {

// The rate converges from below in a few steps, and each is exact for the rate it was given.
constexpr int kMaxIterations = 5;
// A choice has to win by this much: estimates are noisy, and speculation that merely breaks even
// costs energy.
constexpr double kLeastGain = 1.02;
constexpr double kGoodAcceptance = 0.9;

}  // namespace

DraftLength::DraftLength(int32_t max_draft_len) : max_draft_len_(std::max(0, max_draft_len)) {
  const size_t columns = static_cast<size_t>(max_draft_len_) + 1;
  alive_.resize(kBuckets * columns);
  powers_.resize(kBuckets * columns);
  lengths_.resize(kBuckets);
  lengths_of_all_.resize(kBuckets);
  for (size_t b = 0; b < kBuckets; ++b) {
    const double acceptance = (static_cast<double>(b) + 0.5) / kBuckets;
    double power = 1.0;
    for (size_t k = 0; k < columns; ++k, power *= acceptance) powers_[b * columns + k] = power;
  }
}

int32_t DraftLength::BucketOf(float acceptance) {
  const float scaled = std::min(std::max(acceptance, 0.0f), 1.0f) * kBuckets;
  return std::min(kBuckets - 1, static_cast<int32_t>(scaled));
}

void DraftLength::Count(const DraftCandidate* candidates, size_t num_candidates) {
  std::fill(alive_.begin(), alive_.end(), 0);
  for (size_t i = 0; i < num_candidates; ++i) {
    const int32_t limit = std::min(candidates[i].limit, max_draft_len_);
    if (limit >= 0) ++alive(BucketOf(candidates[i].acceptance), limit);
  }
  for (int32_t b = 0; b < kBuckets; ++b) {
    for (int32_t k = max_draft_len_; k-- > 0;) alive(b, k) += alive(b, k + 1);
  }
}

// The lengths that maximise tokens - rate * time. Who is worth the price of a row at each round
// goes on; and since a row can be dear just where the curve jumps (the second one, the next tile),
// once more as if rows were free.
DraftLength::Plan DraftLength::BestAt(double rate, const Costs& costs, const DraftLoad& load) {
  const Plan all = Extend(rate, 0.0, costs, load);
  lengths_of_all_.swap(lengths_);
  const Plan worthy = Extend(rate, rate, costs, load);
  if (all.Gain(rate) <= worthy.Gain(rate)) return worthy;
  lengths_of_all_.swap(lengths_);
  return all;
}

// Round by round. A bucket that leaves at some round is out of all later ones: its powers only
// fall.
DraftLength::Plan DraftLength::Extend(double rate, double row_rate, const Costs& costs,
                                      const DraftLoad& load) {
  double num_tokens = static_cast<double>(load.num_tokens);
  double target_ns = costs.TargetStep(num_tokens);
  Plan now{static_cast<double>(load.num_sequences), target_ns, 0};
  Plan best = now;
  std::fill(lengths_.begin(), lengths_.end(), 0);
  for (int32_t k = 1; k <= max_draft_len_; ++k) {
    const double row_price = row_rate * (costs.TargetStep(num_tokens + 1.0) - target_ns);
    double gain = 0.0;
    int32_t num = 0;
    for (int32_t b = 0; b < kBuckets; ++b) {
      const int32_t members = alive(b, k);
      const double power = powers_[static_cast<size_t>(b * (max_draft_len_ + 1) + k)];
      if (members == 0 || lengths_[static_cast<size_t>(b)] < k - 1 || power <= row_price) continue;
      lengths_[static_cast<size_t>(b)] = k;
      gain += power * members;
      num += members;
    }
    if (num == 0) break;
    num_tokens += num;
    const double next_ns = std::max(target_ns, costs.TargetStep(num_tokens));
    now.tokens += gain;
    now.ns += costs.Round(num) + next_ns - target_ns;
    now.num_rounds = k;
    target_ns = next_ns;
    if (now.Gain(rate) > best.Gain(rate)) best = now;
  }
  return best;
}

// One round for all candidates, all of it accepted at kGoodAcceptance.
bool DraftLength::WouldPay(double rate, const Costs& costs, const DraftLoad& load) const {
  int32_t num = 0;
  for (int32_t b = 0; b < kBuckets; ++b) {
    num += alive_[static_cast<size_t>(b * (max_draft_len_ + 1)) + (max_draft_len_ > 0 ? 1 : 0)];
  }
  if (num == 0 || max_draft_len_ == 0) return false;
  const double tokens = static_cast<double>(load.num_tokens);
  const double more = costs.TargetStep(tokens + num) - costs.TargetStep(tokens) + costs.Round(num);
  return kGoodAcceptance * num > rate * more;
}

DraftChoice DraftLength::Choose(const StepCost& target, const StepCost* draft_round,
                                const DraftLoad& load, DraftCandidate* candidates,
                                size_t num_candidates) {
  const Costs costs{&target, draft_round};
  Count(candidates, num_candidates);
  DraftChoice choice;
  const double alone_ns = costs.TargetStep(static_cast<double>(load.num_tokens));
  if (alone_ns > 0.0) choice.rate_without = load.num_sequences / alone_ns;
  // Dinkelbach: the best plan at the present rate has a rate at least as high.
  choice.rate = choice.rate_without;
  Plan best;
  for (int i = 0; i < kMaxIterations; ++i) {
    const Plan plan = BestAt(choice.rate, costs, load);
    const double rate = plan.ns > 0.0 ? plan.tokens / plan.ns : 0.0;
    best = plan;
    if (rate <= choice.rate * (1.0 + 1e-6)) break;
    choice.rate = rate;
  }
  choice.pays_if_accepted = WouldPay(choice.rate_without, costs, load);
  if (choice.rate < kLeastGain * choice.rate_without) {
    best.num_rounds = 0;
    choice.rate = choice.rate_without;
  }
  choice.num_rounds = 0;
  for (size_t i = 0; i < num_candidates; ++i) {
    DraftCandidate& c = candidates[i];
    c.length =
        std::min({c.limit, best.num_rounds, lengths_[static_cast<size_t>(BucketOf(c.acceptance))]});
    choice.num_rounds = std::max(choice.num_rounds, c.length);
  }
  return choice;
}

}  // namespace plansmith
