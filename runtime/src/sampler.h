// From one row of logits to one token.
//
// Order: logits processor, mask, penalties (repetition over prompt and output, presence and
// frequency over the output), logit bias, bad words, repeated n-grams, min_tokens (end ids
// forbidden), temperature, top_k, top_p (over what top_k left), min_p, draw. Each row is handled by
// itself and in a fixed order of additions, so the token depends on the row and the request alone.
// No libm function with rounding of its own takes part, so equal logits give equal tokens on every
// machine.
//
// What top_k, top_p and min_p keep is a function of the logits alone, whatever order a device adds
// in. Candidates are ordered by z = (logit - best) / temperature, equal ones by id. top_p sums
// weights rounded (to nearest, ties to even) to multiples of 2^-34: float64 holds every sum of 2^19
// of them exactly. Above 2^19 tokens the unit doubles with each doubling of the vocabulary. The
// nucleus ends with the first token at which the sum is at least float64(top_p) * total; a token
// below half a unit adds nothing and is kept only before that one. min_p and the race take weights
// as they are.
//
// The draw is an exponential race: of the tokens kept, the one with the least E / w (the lower id
// of equal ones), w its weight e^z, E = -log(1 - u) and u a uniform number of (seed, output
// position, token id). Two models with the same numbers then draw the same token at least (1 - d) /
// (1 + d) of the time, d the total variation distance of their distributions, which is what
// speculation lives on; no draw without knowledge of the other distribution guarantees more. A walk
// along cumulated weights would agree far less: where the sums before a token differ, so do the
// intervals.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "request.h"
#include "rng.h"

namespace plansmith {

struct Sample {
  int32_t token = -1;
  // With num_logprobs: natural logs of the model's own probabilities (of the raw logits).
  float logprob = 0.0f;
  int32_t num_top = 0;
  int32_t top_ids[PSM_MAX_TOP_LOGPROBS];
  float top_logprobs[PSM_MAX_TOP_LOGPROBS];
};

// e^x for x <= 0, relative error below 3e-7; 0 below -87.7. Has no branch and no second look at x,
// so that a loop of it vectorizes, and no call, so that every machine gives the same bits.
inline float ExpNonPositive(float x) {
  // x = n ln 2 + r with |r| <= ln 2 / 2; adding 1.5 * 2^23 rounds to the nearest integer. ln 2 in
  // two parts, the first with few enough bits that n times it is exact. The polynomial is the
  // Taylor series to r^6 / 6!: its next term is below 1.3e-7 of the result. At the clamp n is -127,
  // whose scale has the bits of 0.
  // The clamp works on the bits of |x|: GCC turns one on floats into a branch, and the loop no
  // longer vectorizes.
  int32_t magnitude;
  std::memcpy(&magnitude, &x, sizeof magnitude);
  magnitude &= 0x7fffffff;
  magnitude = magnitude < 0x42b00000 ? magnitude : 0x42b00000;  // 88.0f; std::min would branch, too
  float clamped;
  std::memcpy(&clamped, &magnitude, sizeof clamped);
  clamped = -clamped;
  const float shifted = clamped * 1.44269504f + 12582912.0f;
  const float n = shifted - 12582912.0f;
  const float r = (clamped - n * 0.693359375f) - n * -2.12194440e-4f;
  float p = 1.0f / 720.0f;
  p = p * r + 1.0f / 120.0f;
  p = p * r + 1.0f / 24.0f;
  p = p * r + 1.0f / 6.0f;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const int32_t bits =
      static_cast<int32_t>(static_cast<uint32_t>(static_cast<int32_t>(n) + 127) << 23);
  float scale;
  std::memcpy(&scale, &bits, sizeof scale);
  return p * scale;
}

// The lowest index of the largest of x[0..n), and that value. NaN anywhere makes `*has_nan` true
// (the rest is then meaningless). One pass that vectorizes; n >= 1.
int32_t ArgMax(const float* x, int32_t n, float* max, bool* has_nan);

// What a request fails with that leaves no token to draw: its own changes drive one beyond float32,
// or forbid them all.
[[noreturn]] void RefuseOverflow(const Request& request);
[[noreturn]] void RefuseForbidden(const Request& request);

// Owns the scratch space, so that a step allocates nothing. Not thread-safe.
class Sampler {
 public:
  explicit Sampler(int32_t vocab_size);

  // logits: [V] float32. Uses request.tokens as history; the drawn token is output number
  // request.num_output(). Throws EXECUTOR for NaN or +inf logits, INVALID_ARGUMENT when the request
  // forbids every token.
  // mask: NULL, or bit id % 32 of word id / 32 for each token that is allowed.
  void Draw(const float* logits, const Request& request, const uint32_t* mask, Sample* out);
  // How many of a row's largest logits its draw looks at, if at no others; 0 = it needs the row.
  static int32_t CandidatesFor(const Request& request);
  // Like Draw of the row that the candidates are of (psm_batch.candidates), by them alone; false,
  // and nothing drawn, where they do not suffice. Throws EXECUTOR for ids that are no tokens.
  bool DrawFromCandidates(const psm_candidate* candidates, int32_t num_candidates,
                          const Request& request, Sample* out);
  // Logs of the model's own probabilities for one row: `token`'s (-1 = none wanted) and the
  // num_logprobs best. Throws EXECUTOR for NaN or +inf.
  void RowLogProbs(const float* logits, const Request& request, int32_t token, int32_t num_logprobs,
                   Sample* out);
  // The logits that beams are ranked by: after everything but temperature and filters. Valid until
  // the next call; `logits` itself when nothing changes it. Throws like Draw.
  const float* Adjusted(const float* logits, const Request& request, const uint32_t* mask);

 private:
  struct Candidate {
    float z;  // (logit - best) / temperature, <= 0
    int32_t id;
  };
  static bool Better(const Candidate& a, const Candidate& b) {
    return a.z != b.z ? a.z > b.z : a.id < b.id;
  }

  // Whether anything but a mask makes the logits other ones.
  static bool ChangesLogits(const Request& request);
  void CheckRow(const float* logits, const Request& request, float* max, int32_t* best);
  const float* Adjust(const float* logits, const Request& request, const uint32_t* mask);
  void RunProcessor(const Request& request, float* logits) const;
  int32_t DrawFrom(const float* logits, float max, const SamplingParams& params, float top_p,
                   const PhiloxKey& key);
  // From the first n of candidates_, which top_k left, in any order.
  int32_t DrawFromKept(size_t n, const SamplingParams& params, float top_p, const PhiloxKey& key);
  int32_t RaceAll(float min_p, const PhiloxKey& key);
  int32_t RaceKept(size_t n, float min_p, const PhiloxKey& key) const;
  double CandidateSum(size_t n) const;
  size_t KeepTopK(int32_t top_k);
  size_t KeepPlausible(float top_p, double* total);
  size_t KeepTopP(size_t n, double total, float top_p);
  void LogProbs(const float* logits, float max, int32_t num_logprobs, Sample* out);

  int32_t vocab_size_;
  double rounder_;               // adding and subtracting it rounds a weight to the unit of sums
  std::vector<float> adjusted_;  // [V]
  std::vector<float> z_;         // [V], then -inf up to whole blocks of a race
  std::vector<float> weights_;   // [V] e^z
  std::vector<Candidate> candidates_;  // [V]
  std::vector<float> block_weights_;   // the largest of each block of a race
};

}  // namespace plansmith
