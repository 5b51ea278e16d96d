// How many draft tokens each request of a batch is worth.
//
// With acceptance a, a request that gets k draft tokens yields 1 + a + ... + a^k tokens in the
// step. The step costs the target's time for all rows, plus one draft round for each length that
// somebody wants. Lengths are chosen for the whole batch so that tokens / time is highest; when
// nothing beats no drafts at all, that is the choice.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "step_cost.h"

namespace plansmith {

// One request that may be drafted for.
struct DraftCandidate {
  float acceptance = 0.0f;  // 0..1
  int32_t limit = 0;        // most draft tokens it may get, >= 0
  int32_t length = 0;       // out: what it should get
};

// What the step looks like without drafts.
struct DraftLoad {
  int32_t num_sequences = 0;  // that generate, drafted for or not: a token each
  int32_t num_tokens = 0;     // theirs, and those of contexts beside them; >= 1
};

struct DraftChoice {
  int32_t num_rounds = 0;  // the longest length
  // Expected tokens of the generating sequences per ns, without drafts and as chosen. 0 = the
  // target's cost is not known yet.
  double rate_without = 0.0;
  double rate = 0.0;
  // Whether drafting would pay if every draft were good: then a request that is drafted for no more
  // is worth another try, else the load stands against it.
  bool pays_if_accepted = false;
};

// Owns its scratch: Choose allocates nothing. O(candidates + 64 * max_draft_len).
class DraftLength {
 public:
  explicit DraftLength(int32_t max_draft_len);

  // draft_round: cost of one round over n sequences; NULL = proposing costs nothing (n-gram).
  // Costs that are not known count as nothing, so that the first steps try and measure them.
  DraftChoice Choose(const StepCost& target, const StepCost* draft_round, const DraftLoad& load,
                     DraftCandidate* candidates, size_t num_candidates);

 private:
  static constexpr int32_t kBuckets = 64;  // of acceptance
  static int32_t BucketOf(float acceptance);

  struct Costs {
    const StepCost* target;
    const StepCost* draft_round;
    double TargetStep(double num_tokens) const { return target->Ns(num_tokens); }
    double Round(double num_sequences) const {
      return draft_round == nullptr ? 0.0 : draft_round->Ns(num_sequences);
    }
  };
  struct Plan {
    double tokens = 0.0;
    double ns = 0.0;
    int32_t num_rounds = 0;
    double Gain(double rate) const { return tokens - rate * ns; }
  };

  void Count(const DraftCandidate* candidates, size_t num_candidates);
  Plan BestAt(double rate, const Costs& costs, const DraftLoad& load);
  Plan Extend(double rate, double row_rate, const Costs& costs, const DraftLoad& load);
  bool WouldPay(double rate, const Costs& costs, const DraftLoad& load) const;
  int32_t& alive(int32_t bucket, int32_t round) {
    return alive_[static_cast<size_t>(bucket * (max_draft_len_ + 1) + round)];
  }

  int32_t max_draft_len_;
  std::vector<int32_t> alive_;    // [kBuckets, max_draft_len + 1] candidates whose limit >= round
  std::vector<double> powers_;    // [kBuckets, max_draft_len + 1] acceptance ^ round
  std::vector<int32_t> lengths_;  // [kBuckets] as chosen, before limits
  std::vector<int32_t> lengths_of_all_;  // [kBuckets]
};

}  // namespace plansmith
