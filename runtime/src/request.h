// One request inside the core: what was asked (copied, checked) and how far it is.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "kv_cache.h"
#include "plansmith/plansmith.h"
#include "token_counts.h"

namespace plansmith {

// Words (token sequences) one after another; word i is ids[ends[i - 1] .. ends[i]).
struct WordList {
  std::vector<int32_t> ids;
  std::vector<int32_t> ends;
  size_t size() const { return ends.size(); }
  std::pair<const int32_t*, int32_t> word(size_t i) const {
    const int32_t begin = i == 0 ? 0 : ends[i - 1];
    return {ids.data() + begin, ends[i] - begin};
  }
};

struct SamplingParams {
  float temperature = 1.0f;
  int32_t top_k = 0;
  float top_p = 1.0f;
  float min_p = 0.0f;
  float repetition_penalty = 1.0f;
  float presence_penalty = 0.0f;
  float frequency_penalty = 0.0f;
  uint64_t seed = 0;
  int32_t min_tokens = 0;
  int32_t num_logprobs = 0;
  std::vector<int32_t> end_ids;
  std::vector<std::pair<int32_t, float>> logit_bias;
  WordList bad_words;
  WordList stop_words;

  bool greedy() const { return temperature == 0.0f || top_k == 1; }
  bool has_penalties() const {
    return repetition_penalty != 1.0f || presence_penalty != 0.0f || frequency_penalty != 0.0f;
  }
};

enum class RequestState { kQueued, kRunning, kPaused, kRetired };

// Its vectors are sized when it is submitted: a running request allocates nothing.
struct Request {
  uint64_t id = 0;  // ascending with arrival
  uint64_t client_id = 0;
  float priority = 0.5f;
  int64_t deadline_ns = 0;  // CLOCK_MONOTONIC; 0 = none
  int32_t num_prompt = 0;
  int32_t max_tokens = 0;
  SamplingParams params;

  std::vector<int32_t> tokens;  // prompt, then output
  TokenCounts counts;           // of tokens; filled only with penalties
  double cum_logprob = 0.0;

  bool is_cancelled = false;  // guarded by the engine's mutex, unlike all the rest

  RequestState state = RequestState::kQueued;
  uint64_t start_order = 0;     // of its last start
  int32_t num_computed = 0;     // positions whose K and V are in the cache
  int32_t context_end = 0;      // tokens there were at its last start: up to here it is context
  int32_t reserved_blocks = 0;  // GUARANTEED_NO_EVICT
  KvSequence kv;
  psm_request_stats stats{};

  int32_t num_tokens() const { return static_cast<int32_t>(tokens.size()); }
  int32_t num_output() const { return num_tokens() - num_prompt; }
  const int32_t* output() const { return tokens.data() + num_prompt; }
  bool in_context() const { return num_computed < context_end; }
  int32_t max_len() const { return num_prompt + max_tokens; }
};

// Why `request`, which has just got a token, ends: a PSM_FINISH_ code, PSM_FINISH_NOT_FINISHED if
// it does not.
int32_t FinishReason(const Request& request);

}  // namespace plansmith
