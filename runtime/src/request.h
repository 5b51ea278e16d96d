// One request inside the core: what was asked (copied, checked) and how far it is.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "beam_search.h"
#include "guide.h"
#include "kv_cache.h"
#include "plansmith/plansmith.h"
#include "token_counts.h"
#include "waiting_queue.h"

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
  int32_t no_repeat_ngram_size = 0;  // 0 = off
  std::vector<float> top_p_after;    // [i] top_p behind i tokens; empty = top_p
  int32_t top_p_reset_id = -1;       // counting begins anew behind it; -1 = none
  psm_logits_processor logits_processor = nullptr;
  void* logits_processor_self = nullptr;
  std::vector<int32_t> end_ids;
  std::vector<std::pair<int32_t, float>> logit_bias;  // by id, equal ones as they were given
  bool has_repeated_bias = false;                     // an id of it comes twice
  WordList bad_words;
  WordList stop_words;

  bool greedy() const { return temperature == 0.0f || top_k == 1; }
  bool has_penalties() const {
    return repetition_penalty != 1.0f || presence_penalty != 0.0f || frequency_penalty != 0.0f;
  }
};

enum class RequestState { kQueued, kRunning, kPaused, kRetired };

// What the sequences of one request (num_return_sequences) share.
struct RequestGroup {
  uint64_t id = 0;       // the request's public id: its first sequence's
  int32_t num_live = 0;  // guarded by the engine's mutex
  int32_t num_open = 0;  // that have not got their end; of the stepping thread
};

// How well drafting works for one request. Owned by the speculator.
struct DraftState {
  float acceptance = -1.0f;  // running share of draft tokens that were accepted; -1 = none tried
  float num_trials = 0.0f;   // draft tokens behind it
  int32_t want = 0;          // draft tokens it should get in the coming step
  int32_t idle_steps = 0;    // since it was last drafted for
  int32_t probe_after = 0;   // idle steps before the next try
  int32_t base = -1;         // num_tokens() when the draft model drafted; -1 = it has not
  bool is_callers = false;   // the drafts of the coming step are the caller's
  int32_t num_callers = 0;   // so many of them are planned
};

// One sequence of a request (all its beams, with beam search): num_return_sequences of them go
// through the scheduler each by itself. Its vectors are sized when it is submitted: a running
// request allocates nothing.
struct Request {
  uint64_t id = 0;  // ascending with arrival
  std::shared_ptr<RequestGroup> group;
  int32_t sequence_idx = 0;
  uint64_t client_id = 0;
  uint64_t tenant_id = 0;
  uint64_t adapter_id = 0;
  int32_t adapter_slot = -1;
  float priority = 0.5f;
  int64_t deadline_ns = 0;  // of the engine's clock; 0 = none
  int32_t num_prompt = 0;
  int32_t max_tokens = 0;
  SamplingParams params;

  PrefixKey prefix_key;
  Retention retention;
  int32_t num_prompt_logprobs = -1;
  bool return_context_logits = false;
  bool return_generation_logits = false;
  int32_t num_context_rows = 0;  // positions of the prompt whose CONTEXT events are out

  std::vector<int32_t> tokens;  // prompt, then output
  int32_t last_token = -1;      // once one is generated; here, so that a step reads no page for it
  TokenCounts counts;           // of tokens; filled only with penalties
  double cum_logprob = 0.0;

  RequestState state = RequestState::kQueued;
  uint64_t start_order = 0;    // of its last start
  int32_t num_computed = 0;    // positions whose K and V are in the cache
  int32_t context_end = 0;     // tokens there were at its last start: up to here it is context
  KvSequence kv;               // with beams: of the context only
  SchedulerNotes sched;        // the scheduler's
  int32_t deadline_slot = -1;  // the engine's
  psm_request_stats stats{};

  std::unique_ptr<BeamSearch> beams;  // NULL = none
  std::unique_ptr<Guide> guide;       // NULL = free
  int32_t max_draft_len = 0;
  DraftState spec;
  std::vector<int32_t> draft;          // proposed for the coming step; sized for all that may be
  std::vector<int32_t> caller_draft;   // what the caller thinks the output begins with
  int32_t max_caller_draft = 0;        // most of it in a step
  int32_t num_caller_draft_right = 0;  // of it; the output's beginning as far as looked at

  // The id that the caller knows.
  uint64_t public_id() const { return group == nullptr ? id : group->id; }
  int32_t num_tokens() const { return static_cast<int32_t>(tokens.size()); }
  int32_t num_output() const { return num_tokens() - num_prompt; }
  const int32_t* output() const { return tokens.data() + num_prompt; }
  bool in_context() const { return num_computed < context_end; }
  int32_t max_len() const { return num_prompt + max_tokens; }
  // Every row of its context is wanted, so none of it may come from the cache.
  bool wants_context_rows() const { return num_prompt_logprobs >= 0 || return_context_logits; }
  // Its context has to be computed whole: rows of it are still to come out.
  bool computes_all() const { return wants_context_rows() && num_context_rows < num_prompt; }
  // Sequences it runs as in a step.
  int32_t width() const { return beams == nullptr ? 1 : beams->width(); }

  // Draft tokens of the caller that a step may verify next: what caller_draft has behind the
  // output, as long as that is its beginning. The last token of the request's length needs none.
  int32_t CallerDraftLeft();

  // The next token, and taking it back (a draft that was only tried).
  void PushToken(int32_t token) {
    tokens.push_back(token);
    last_token = token;
    if (params.has_penalties()) counts.AddOutput(token);
  }
  void PopToken() {
    if (params.has_penalties()) counts.UndoOutput(tokens.back());
    tokens.pop_back();
    last_token = tokens.back();
  }
};

// Why `request`, which has just got a token, ends: a PSM_FINISH_ code, PSM_FINISH_NOT_FINISHED if
// it does not.
int32_t FinishReason(const Request& request);

// top_p of the coming token: a function of the output alone, so drafts and pauses do not show.
float TopP(const Request& request);

// Whether its tokens end with the n ids of `word`.
bool EndsWith(const Request& request, const int32_t* word, int32_t n);

}  // namespace plansmith
