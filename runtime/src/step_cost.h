// How long a step takes, learnt from those that ran: a fixed part and one for each token.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace plansmith {

// ns(T) ~ fixed + per_token * T, a regression that forgets. Both parts are never negative.
class StepCost {
 public:
  void Observe(int32_t num_tokens, int64_t took_ns);
  bool known() const;  // enough steps of different sizes have been seen
  double Ns(double num_tokens) const;
  double PerTokenNs() const;

 private:
  // Moments with exponential forgetting: weights, tokens, times.
  double w_ = 0, t_ = 0, tt_ = 0, y_ = 0, ty_ = 0;
};

}  // namespace plansmith
