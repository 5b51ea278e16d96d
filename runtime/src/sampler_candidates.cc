// Draws from a row's largest logits, where they are all that the draw looks at.
//
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <limits>

#include "sampler.h"
#include "status.h"

namespace plansmith {
namespace {

constexpr float kNegInf = -std::numeric_limits<float>::infinity();

// Filled entries of a list, its ids checked.
int32_t NumFilled(const psm_candidate* candidates, int32_t num_candidates, int32_t vocab_size) {
  int32_t n = 0;
  for (; n < num_candidates && candidates[n].token_id != -1; ++n) {
    if (candidates[n].token_id >= 0 && candidates[n].token_id < vocab_size) continue;
    throw StatusError(PSM_ERROR_EXECUTOR,
                      Format("the executor gave a candidate with token id %d, 0 to %d is wanted",
                             candidates[n].token_id, vocab_size - 1));
  }
  return n;
}

}  // namespace

int32_t Sampler::CandidatesFor(const Request& request) {
  const SamplingParams& p = request.params;
  if (request.beams != nullptr || request.guide != nullptr || p.num_logprobs > 0 ||
      ChangesLogits(request)) {
    return 0;
  }
  if (p.greedy()) return 1;
  // One more than is kept, to see where top_k cuts equal ones.
  return p.top_k > 0 && p.top_k < PSM_MAX_CANDIDATES ? p.top_k + 1 : 0;
}

bool Sampler::DrawFromCandidates(const psm_candidate* candidates, int32_t num_candidates,
                                 const Request& request, Sample* out) {
  const SamplingParams& params = request.params;
  const int32_t wanted = std::min(CandidatesFor(request), vocab_size_);
  if (wanted == 0 || wanted > num_candidates) return false;
  const int32_t filled = NumFilled(candidates, num_candidates, vocab_size_);
  if (filled == 0 || candidates[0].logit == kNegInf) return false;
  out->num_top = 0;
  if (params.greedy()) {
    out->token = candidates[0].token_id;
    return true;
  }
  const size_t n = std::min(static_cast<size_t>(filled), static_cast<size_t>(wanted));
  for (size_t i = 0; i < n; ++i) {
    const float z = (candidates[i].logit - candidates[0].logit) / params.temperature;
    candidates_[i] = {z, candidates[i].token_id};
  }
  const size_t k = static_cast<size_t>(params.top_k);
  if (n > k) {
    // Logits that differ may be equal once they are divided; then ids decide, of all such tokens.
    if (candidates_[k].z == candidates_[k - 1].z && candidates_[k].z != kNegInf) return false;
  }
  out->token = DrawFromKept(std::min(n, k), params, TopP(request),
                            DrawKey(params.seed, static_cast<uint32_t>(request.num_output())));
  return true;
}

}  // namespace plansmith
