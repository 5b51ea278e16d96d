// SPDX-License-Identifier: Apache-2.0
#include "beam_search.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "request.h"

namespace plansmith {
namespace {

constexpr double kDead = -std::numeric_limits<double>::infinity();

std::vector<Beam> MakeBeams(size_t width, int32_t max_tokens, int32_t max_blocks) {
  std::vector<Beam> beams(width);
  for (Beam& beam : beams) {
    beam.tokens.reserve(static_cast<size_t>(max_tokens));
    beam.logprobs.reserve(static_cast<size_t>(max_tokens));
    beam.kv.blocks.reserve(static_cast<size_t>(max_blocks));
  }
  return beams;
}

}  // namespace

BeamSearch::BeamSearch(const BeamParams& params, int32_t vocab_size, int32_t max_tokens,
                       int32_t max_blocks_per_seq, int32_t num_ends)
    : params_(params),
      vocab_size_(vocab_size),
      max_tokens_(max_tokens),
      num_entries_(
          static_cast<size_t>(std::min<int64_t>(vocab_size, int64_t{params.width} + num_ends))) {
  const size_t width = static_cast<size_t>(params.width);
  beams_ = MakeBeams(width, max_tokens, max_blocks_per_seq);
  next_beams_ = MakeBeams(width, max_tokens, max_blocks_per_seq);
  hypotheses_ = MakeBeams(width, max_tokens, 0);
  logprobs_.resize(static_cast<size_t>(vocab_size));
  best_.reserve(num_entries_);
  candidates_.reserve(width * num_entries_);
}

// Equal ones in the order of beams; within a beam they are in the order of tokens.
bool BeamSearch::Better(const Candidate& a, const Candidate& b) {
  if (a.rank_score != b.rank_score) return a.rank_score > b.rank_score;
  if (a.parent != b.parent) return a.parent < b.parent;
  return a.token < b.token;
}

bool BeamSearch::IsDead(const Beam& beam) { return beam.cum_logprob == kDead; }

double BeamSearch::Score(double cum_logprob, size_t length) const {
  return cum_logprob /
         std::pow(static_cast<double>(length), static_cast<double>(params_.length_penalty));
}

void BeamSearch::Start(const float* row, Sampler* sampler, KvCache* kv, Request* request) {
  // The first beam is the prompt, the others have nothing to add to it.
  for (Beam& beam : beams_) beam.cum_logprob = kDead;
  beams_[0].cum_logprob = 0.0;
  candidates_.clear();
  Collect(row, 0, sampler, request);
  Select(*request);
  if (!done_) {
    for (Beam& beam : next_beams_) kv->Fork(request->kv, &beam.kv);
    kv->Release(&request->kv);
  }
  running_ = true;
  FinishStep(request);
}

void BeamSearch::Advance(const float* rows, Sampler* sampler, KvCache* kv, Request* request) {
  candidates_.clear();
  for (int32_t b = 0; b < params_.width; ++b) {
    if (IsDead(beams_[static_cast<size_t>(b)])) continue;
    Collect(rows + static_cast<size_t>(b) * static_cast<size_t>(vocab_size_), b, sampler, request);
  }
  Select(*request);
  if (!done_) ShareBlocks(kv);
  FinishStep(request);
}

// From the candidates to hypotheses, next_beams_ (without blocks) and done_. What goes on is left
// in candidates_, in order.
void BeamSearch::Select(const Request& request) {
  if (candidates_.empty() && num_hypotheses_ == 0) {
    Refuse(request, "every token is forbidden (relax logit_bias, bad_words or min_tokens)");
  }
  std::sort(candidates_.begin(), candidates_.end(), Better);
  const size_t width = beams_.size();
  size_t num_running = 0;
  double best_running = kDead;
  for (size_t i = 0; i < candidates_.size() && num_running < width; ++i) {
    const Candidate candidate = candidates_[i];
    if (candidate.finish_reason == PSM_FINISH_NOT_FINISHED) {
      candidates_[num_running++] = candidate;
      best_running = std::max(best_running, candidate.cum_logprob);
    } else if (i < width) {
      KeepHypothesis(beams_[static_cast<size_t>(candidate.parent)], &candidate);
    }
  }
  candidates_.resize(num_running);
  done_ = num_running == 0 || IsOver(best_running, beams_[0].tokens.size() + 1);
  for (size_t i = 0; i < width && !done_; ++i) {
    GoOn(candidates_[i < num_running ? i : 0], &next_beams_[i]);
    if (i >= num_running) next_beams_[i].cum_logprob = kDead;
  }
}

// length: of the running beams with their new tokens.
bool BeamSearch::IsOver(double best_running, size_t length) const {
  if (num_hypotheses_ < beams_.size()) return false;
  if (params_.early_stopping == PSM_EARLY_STOPPING_YES) return true;
  // A score only falls with a further token where length is not rewarded; where it is, NEVER looks
  // at the longest that may come, NO at what there is.
  const bool look_ahead =
      params_.early_stopping == PSM_EARLY_STOPPING_NEVER && params_.length_penalty > 0.0f;
  const size_t best_length = look_ahead ? static_cast<size_t>(max_tokens_) : length;
  return !(Score(best_running, best_length) > hypotheses_[num_hypotheses_ - 1].score);
}

// `beam` with the candidate's token; NULL: as it is.
void BeamSearch::KeepHypothesis(const Beam& beam, const Candidate* candidate) {
  const double cum_logprob = candidate == nullptr ? beam.cum_logprob : candidate->cum_logprob;
  const double score = Score(cum_logprob, beam.tokens.size() + (candidate == nullptr ? 0 : 1));
  if (num_hypotheses_ == hypotheses_.size()) {
    if (!(score > hypotheses_.back().score)) return;
  } else {
    ++num_hypotheses_;
  }
  size_t slot = num_hypotheses_ - 1;
  Beam& hypothesis = hypotheses_[slot];
  hypothesis.tokens = beam.tokens;
  hypothesis.logprobs = beam.logprobs;
  hypothesis.cum_logprob = cum_logprob;
  hypothesis.score = score;
  hypothesis.finish_reason = PSM_FINISH_NOT_FINISHED;
  if (candidate != nullptr) {
    hypothesis.tokens.push_back(candidate->token);
    hypothesis.logprobs.push_back(candidate->logprob);
    hypothesis.finish_reason = candidate->finish_reason;
  }
  for (; slot > 0 && hypotheses_[slot].score > hypotheses_[slot - 1].score; --slot) {
    std::swap(hypotheses_[slot], hypotheses_[slot - 1]);
  }
}

void BeamSearch::GoOn(const Candidate& candidate, Beam* to) const {
  const Beam& from = beams_[static_cast<size_t>(candidate.parent)];
  to->tokens = from.tokens;
  to->tokens.push_back(candidate.token);
  to->logprobs = from.logprobs;
  to->logprobs.push_back(candidate.logprob);
  to->cum_logprob = candidate.cum_logprob;
}

// The last child of a beam takes its blocks over, the others before it share them; what no child
// took is released. Nothing is given up before everybody has what it needs.
void BeamSearch::ShareBlocks(KvCache* kv) {
  const auto parent_of = [this](size_t i) {
    return candidates_[i < candidates_.size() ? i : 0].parent;
  };
  const size_t width = beams_.size();
  for (size_t i = 0; i < width; ++i) {
    bool is_last = true;
    for (size_t j = i + 1; j < width; ++j) is_last = is_last && parent_of(j) != parent_of(i);
    KvSequence& from = beams_[static_cast<size_t>(parent_of(i))].kv;
    if (is_last) {
      std::swap(from, next_beams_[i].kv);
    } else {
      kv->Fork(from, &next_beams_[i].kv);
    }
  }
  for (Beam& beam : beams_) kv->Release(&beam.kv);
}

void BeamSearch::FinishStep(Request* request) {
  if (!done_) {
    beams_.swap(next_beams_);
    Present(beams_[0], request);
  } else {
    // The search is over, the length is still what it would be.
    Present(beams_[0], request);
    request->PushToken(hypotheses_[0].tokens.back());
  }
}

const std::vector<Beam>& BeamSearch::Hypotheses() {
  if (!done_ && !beams_[0].tokens.empty()) {
    for (const Beam& beam : beams_) {
      if (!IsDead(beam)) KeepHypothesis(beam, nullptr);
    }
    done_ = true;
  }
  for (; num_hypotheses_ > 0 && num_hypotheses_ < hypotheses_.size(); ++num_hypotheses_) {
    hypotheses_[num_hypotheses_] = hypotheses_[num_hypotheses_ - 1];
  }
  return hypotheses_;
}

void BeamSearch::Restart(KvCache* kv, Request* request) {
  Release(kv);
  kv->Release(&request->kv);
  for (std::vector<Beam>* set : {&beams_, &next_beams_, &hypotheses_}) {
    for (Beam& beam : *set) {
      beam.tokens.clear();
      beam.logprobs.clear();
      beam.cum_logprob = beam.score = 0.0;
      beam.finish_reason = PSM_FINISH_NOT_FINISHED;
    }
  }
  num_hypotheses_ = 0;
  done_ = false;
  Present(beams_[0], request);
}

void BeamSearch::Release(KvCache* kv) {
  for (Beam& beam : beams_) kv->Release(&beam.kv);
  running_ = false;
}

}  // namespace plansmith
