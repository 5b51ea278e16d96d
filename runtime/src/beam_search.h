// Beam search of one request: which of the candidates go on, which are finished, and when to stop.
// The rules are those of transformers' beam search, so that the beams are the same.
//
// A candidate is a running beam and one token more. Its log-probability is the beam's plus that of
// the row: log-softmax of the logits first, then what changes single entries (logits processor,
// penalties over the beam's own history, bias, bad words, min_tokens), not normalized again. That
// is transformers' order. (The old runtime changed logits before the softmax: other scores where
// penalties are used.) Among the `width` best candidates, those that end (end id, stop word,
// max_tokens) become hypotheses, of which the `width` best are kept, by
// log-probability / length ^ length_penalty. The `width` best that do not end go on. A beam without
// a candidate of its own (more beams than allowed tokens) stays in the batch with a log-probability
// of -infinity, and nothing comes of it.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "kv_cache.h"
#include "plansmith/plansmith.h"

namespace plansmith {

class Sampler;
struct Request;

struct BeamParams {
  int32_t width = 1;
  float length_penalty = 1.0f;
  int32_t early_stopping = PSM_EARLY_STOPPING_NO;
  float diversity_rate = 0.0f;  // >= 0
};

// A beam that runs, or a finished hypothesis.
struct Beam {
  std::vector<int32_t> tokens;  // output only
  std::vector<float> logprobs;  // of each, the model's own
  double cum_logprob = 0.0;     // what beams are ranked by: after penalties
  double score = 0.0;           // of a hypothesis: with the length penalty
  int32_t finish_reason = PSM_FINISH_NOT_FINISHED;
  KvSequence kv;  // of a running one
};

// Sized when it is made: a step allocates nothing. The scheduler allocates the blocks of
// beams()[i].kv for each step (Extend, MakeWritable), the engine hands over the rows.
//
// While it runs, request->tokens holds the prompt and the best running beam's output, for its
// length; after Restart the prompt alone. request->params, num_prompt and max_tokens are read.
class BeamSearch {
 public:
  // max_blocks_per_seq: blocks of prompt + max_tokens. num_ends: end ids and stop words of the
  // request; so many candidates of one beam can end in a step.
  BeamSearch(const BeamParams& params, int32_t vocab_size, int32_t max_tokens,
             int32_t max_blocks_per_seq, int32_t num_ends);

  int32_t width() const { return params_.width; }
  // Whether it has started: before, the request is in its context, one sequence, Request::kv.
  bool running() const { return running_; }
  const std::vector<Beam>& beams() const { return beams_; }  // [width]
  std::vector<Beam>& beams() { return beams_; }

  // row: [V] logits, the one that ends the context. Chooses the first width tokens; every beam gets
  // a share of request->kv, which is released. When that already ends the search (max_tokens 1),
  // the blocks stay with request->kv. Throws like Sampler::Draw, with nothing changed but
  // request->tokens.
  void Start(const float* row, Sampler* sampler, KvCache* kv, Request* request);
  // rows: [width, V], one for each beam in order. Chooses, reorders and shares blocks. When the
  // search is over the blocks stay where they are until Release. Throws like Start.
  void Advance(const float* rows, Sampler* sampler, KvCache* kv, Request* request);
  // Whether the search is over; the hypotheses are then complete.
  bool done() const { return done_; }
  // Best first, exactly width of them. Running beams count as what they are when the search was cut
  // (finish_reason NOT_FINISHED); where there are too few different ones, the last is repeated; cut
  // before the first token, all are empty. After it only Release and Restart may be called.
  const std::vector<Beam>& Hypotheses();
  // Back to the prompt: after a pause. Releases all blocks.
  void Restart(KvCache* kv, Request* request);
  // The request ends: releases all blocks, keeps the hypotheses.
  void Release(KvCache* kv);

 private:
  struct Candidate {
    double rank_score;  // cum_logprob, less diversity
    double cum_logprob;
    float logprob;  // of the token, the model's own
    int32_t token;
    int32_t parent;
    int32_t finish_reason;
  };
  struct Entry {
    float logprob;
    int32_t token;
  };
  static bool Better(const Candidate& a, const Candidate& b);
  static bool IsDead(const Beam& beam);

  // beam_candidates.cc
  [[noreturn]] static void Refuse(const Request& request, const char* what);
  void CheckAdjusted(const float* row, const Request& request) const;
  void Present(const Beam& beam, Request* request) const;
  void Collect(const float* row, int32_t parent, Sampler* sampler, Request* request);
  bool LogSoftmax(const float* row, Sampler* sampler, const Request& request);
  void KeepBest(const float* row);

  // beam_search.cc
  void Select(const Request& request);
  void KeepHypothesis(const Beam& beam, const Candidate* candidate);
  void GoOn(const Candidate& candidate, Beam* to) const;
  void FinishStep(Request* request);
  void ShareBlocks(KvCache* kv);
  bool IsOver(double best_running, size_t length) const;
  double Score(double cum_logprob, size_t length) const;

  BeamParams params_;
  int32_t vocab_size_;
  int32_t max_tokens_;
  size_t num_entries_;  // candidates that one beam can have a use for
  bool running_ = false;
  bool done_ = false;
  std::vector<Beam> beams_;       // [width]
  std::vector<Beam> next_beams_;  // [width] the set that is being made
  std::vector<Beam> hypotheses_;  // [width] of which num_hypotheses_ count, best first
  size_t num_hypotheses_ = 0;
  std::vector<float> logprobs_;        // [V] log-softmax of a row
  std::vector<Entry> best_;            // of that row, best first
  std::vector<Candidate> candidates_;  // of all beams; then those that go on
};

}  // namespace plansmith
