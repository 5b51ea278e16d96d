// From one row of logits to one token.
//
// Order: penalties (repetition over prompt and output, presence and frequency over the output),
// logit bias, bad words, min_tokens (end ids forbidden), temperature, top_k, top_p (over what top_k
// left), min_p, draw. Each row is handled by itself and in a fixed order of additions, so the token
// depends on the row and the request alone. No libm function with rounding of its own takes part,
// so equal logits give equal tokens on every machine.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "request.h"

namespace plansmith {

struct Sample {
  int32_t token = -1;
  // With num_logprobs: natural logs of the model's own probabilities (of the raw logits).
  float logprob = 0.0f;
  int32_t num_top = 0;
  int32_t top_ids[PSM_MAX_TOP_LOGPROBS];
  float top_logprobs[PSM_MAX_TOP_LOGPROBS];
};

// e^x for x <= 0, relative error below 3e-7; 0 below -87. Written so that compilers vectorize a
// loop of it and so that every machine gives the same bits.
float ExpNonPositive(float x);

// The lowest index of the largest of x[0..n), and that value. NaN anywhere makes `*has_nan` true
// (the rest is then meaningless). One pass that vectorizes; n >= 1.
int32_t ArgMax(const float* x, int32_t n, float* max, bool* has_nan);

// Owns the scratch space, so that a step allocates nothing. Not thread-safe.
class Sampler {
 public:
  explicit Sampler(int32_t vocab_size);

  // logits: [V] float32. Uses request.tokens as history; the drawn token is output number
  // request.num_output(). Throws EXECUTOR for NaN or +inf logits, INVALID_ARGUMENT when the request
  // forbids every token.
  void Draw(const float* logits, const Request& request, Sample* out);

 private:
  struct Candidate {
    float z;  // (logit - best) / temperature, <= 0
    int32_t id;
  };
  static bool Better(const Candidate& a, const Candidate& b) {
    return a.z != b.z ? a.z > b.z : a.id < b.id;
  }

  const float* Adjust(const float* logits, const Request& request);
  int32_t DrawFrom(const float* logits, float max, const SamplingParams& params, double u);
  int32_t DrawByWalk(float min_p, double u);
  size_t KeepTopK(int32_t top_k);
  size_t KeepAll(float top_p);
  size_t KeepTopP(size_t n, double total, float top_p);
  void LogProbs(const float* logits, float max, int32_t num_logprobs, Sample* out);

  int32_t vocab_size_;
  std::vector<float> adjusted_;        // [V]
  std::vector<float> z_;               // [V]
  std::vector<float> weights_;         // [V] e^z
  std::vector<Candidate> candidates_;  // [V]
};

}  // namespace plansmith
