// Beam search of one request: which of the candidates go on, which are finished, and when to stop.
// The rules are those of transformers' beam search, so that the beams are the same.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "kv_cache.h"
#include "plansmith/plansmith.h"

namespace plansmith {

struct Request;

struct BeamParams {
  int32_t width = 1;
  float length_penalty = 1.0f;
  int32_t early_stopping = PSM_EARLY_STOPPING_NO;
  float diversity_rate = 0.0f;
};

// A beam that runs, or a finished hypothesis.
struct Beam {
  std::vector<int32_t> tokens;  // output only
  std::vector<float> logprobs;  // of each, the model's own
  double cum_logprob = 0.0;     // what beams are ranked by: after penalties
  double score = 0.0;           // of a finished one: with the length penalty
  int32_t finish_reason = PSM_FINISH_NOT_FINISHED;
  KvSequence kv;  // of a running one
};

// Sized when it is made: a step allocates nothing. The scheduler allocates the blocks of
// beams()[i].kv for each step, the engine hands over the rows.
class BeamSearch {
 public:
  BeamSearch(const BeamParams& params, int32_t vocab_size, int32_t max_tokens,
             int32_t max_blocks_per_seq);

  int32_t width() const { return params_.width; }
  // False while the request is in its context: one sequence, Request::kv.
  bool running() const { return running_; }
  const std::vector<Beam>& beams() const { return beams_; }  // [width]
  std::vector<Beam>& beams() { return beams_; }

  // The row that ends the context: the first width tokens. Every beam gets a share of
  // request->kv, which is released.
  void Start(const float* row, KvCache* kv, Request* request);
  // rows: [width, V], one for each beam in order. Chooses, reorders and shares blocks. Appends a
  // token to request->tokens for its length alone (which token means nothing).
  void Advance(const float* rows, KvCache* kv, Request* request);
  // Whether the search is over; the hypotheses are then complete.
  bool done() const { return done_; }
  // Best first, at most width; the running beams count as what they are when the search was cut.
  const std::vector<Beam>& Hypotheses();
  // Back to the prompt: after a pause. Releases all blocks.
  void Restart(KvCache* kv, Request* request);
  // The request ends: releases all blocks, keeps the hypotheses.
  void Release(KvCache* kv);

 private:
  BeamParams params_;
  int32_t vocab_size_;
  bool running_ = false;
  bool done_ = false;
  std::vector<Beam> beams_;
};

}  // namespace plansmith
