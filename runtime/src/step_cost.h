// How long a step takes, learnt from those that ran.
//
// A step of a memory-bound model costs the same whatever its tokens, one of a compute-bound model a
// fixed price for each: the curve is flat first, then a slope, and where it bends depends on the
// machine. So the observations are kept by the octave of their tokens, and a time is read off a
// line fitted to the octaves around it.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>

namespace plansmith {

// Forgets: about the last 32 steps of each octave count. Allocates nothing.
class StepCost {
 public:
  // num_tokens >= 1. One far outlier (another process had the core) counts as a smaller one.
  void Observe(int32_t num_tokens, int64_t took_ns);
  // Whether steps of different sizes have been seen, so that the price of a token means something.
  bool known() const { return num_observed_ >= 8 && max_tokens_ > min_tokens_; }
  bool any() const { return num_observed_ > 0; }
  // Estimated time of a step, ns; 0 before the first. With one size seen it is that size's time for
  // every size. Never negative, and never falls as num_tokens grows within the octaves of one fit.
  double Ns(double num_tokens) const;
  // Price of one more token, ns, over all sizes seen.
  double PerTokenNs() const;

 private:
  // Moments of (tokens, time).
  struct Moments {
    double w = 0, t = 0, tt = 0, y = 0, ty = 0;
    void Add(const Moments& o, double scale);
  };
  struct Line {
    double fixed = 0, per_token = 0;  // both >= 0
  };
  static Line Fit(const Moments& m);

  std::array<Moments, 24> octaves_{};       // [b]: steps of 2^b .. 2^(b+1) - 1 tokens
  std::array<int32_t, 24> num_outliers_{};  // of each octave, in a row
  int64_t num_observed_ = 0;
  int32_t min_tokens_ = 0;
  int32_t max_tokens_ = 0;
};

}  // namespace plansmith
