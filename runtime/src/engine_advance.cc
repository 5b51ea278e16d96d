// What becomes of a step's rows of logits: tokens, events, ends.
//
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <new>

#include "engine.h"
#include "status.h"

namespace plansmith {
namespace {

void Address(const Request& request, int32_t kind, psm_event* event) {
  event->kind = kind;
  event->request_id = request.group->id;
  event->client_id = request.client_id;
  event->sequence_idx = request.sequence_idx;
}

psm_event EventOf(const Request& request, int32_t kind) {
  psm_event event{};
  Address(request, kind, &event);
  return event;
}

void CopyTop(const Sample& sample, psm_event* event) {
  event->logprob = sample.logprob;
  event->num_top_logprobs = sample.num_top;
  std::copy_n(sample.top_ids, sample.num_top, event->top_ids);
  std::copy_n(sample.top_logprobs, sample.num_top, event->top_logprobs);
}

}  // namespace

void Engine::AdvanceAll(const StepPlan& plan, Rows rows) {
  // First all positions, for the sum; a finished request gives its blocks back at once.
  for (const ScheduledSeq& seq : plan.context) seq.request->num_computed += seq.num_tokens;
  for (const ScheduledSeq& seq : plan.generation) seq.request->num_computed += 1;
  stats_.AddHeldPositions(scheduler_, kv_);
  for (const auto* seqs : {&plan.context, &plan.generation}) {
    for (const ScheduledSeq& seq : *seqs) {
      Request* request = seq.request;
      request->stats.last_iter = stats_.iter();
      const int32_t num_rows =
          seqs == &plan.context ? AdvanceContext(seq, rows) : AdvanceGeneration(request, rows);
      rows.Skip(num_rows);
    }
  }
}

int32_t Engine::AdvanceContext(const ScheduledSeq& seq, Rows rows) {
  Request* request = seq.request;
  const int32_t end = request->num_computed;
  const ContextRows wanted(*request, end - seq.num_tokens, end);
  const int32_t num_rows =
      wanted.context_end - wanted.context_begin + wanted.last_is_extra + seq.num_draft;
  PublishBlocks(request, wanted.reaches_last);
  try {
    for (int32_t p = wanted.context_begin; p < wanted.context_end; ++p) {
      EmitContext(request, rows.logits);
      if (p + 1 < wanted.context_end || wanted.last_is_extra) rows.Skip(1);
    }
    if (!wanted.reaches_last) return num_rows;
    ++request->stats.num_decode_iters;
    if (request->beams != nullptr) {
      request->beams->Start(rows.logits, &sampler_, &kv_, request);
      FinishBeamsIfDone(request);
    } else {
      Verify(request, rows);
    }
  } catch (const StatusError& e) {
    Fail(request, e.code(), e.what());
  }
  return num_rows;
}

int32_t Engine::AdvanceGeneration(Request* request, const Rows& rows) {
  ++request->stats.num_decode_iters;
  try {
    if (request->beams == nullptr) return Verify(request, rows);
    request->beams->Advance(rows.logits, &sampler_, &kv_, request);
    FinishBeamsIfDone(request);
  } catch (const StatusError& e) {
    Fail(request, e.code(), e.what());
  }
  return request->width();
}

// Row j follows draft[0..j); it counts as long as the drafts before it are what was drawn.
int32_t Engine::Verify(Request* request, Rows rows) {
  const int32_t num_draft = static_cast<int32_t>(request->draft.size());
  int32_t num_accepted = 0;
  int32_t reason = PSM_FINISH_NOT_FINISHED;
  try {
    for (int32_t j = 0; j <= num_draft && reason == PSM_FINISH_NOT_FINISHED; ++j) {
      reason = DrawToken(request, rows, j);
      if (j == num_draft || request->tokens.back() != request->draft[static_cast<size_t>(j)]) break;
      ++request->num_computed;
      ++num_accepted;
      rows.Skip(1);
    }
  } catch (const StatusError& e) {
    Fail(request, e.code(), e.what());
    return 1 + num_draft;
  }
  if (num_draft > 0) {
    request->stats.num_draft_tokens += num_draft;
    request->stats.num_accepted_draft_tokens += num_accepted;
    stats_.AddAccepted(num_accepted);
    speculator_->Observe(request, num_draft, num_accepted);
    request->draft.clear();
  }
  if (reason != PSM_FINISH_NOT_FINISHED) {
    Finish(request, reason);
  } else {
    PublishBlocks(request, false);
  }
  return 1 + num_draft;
}

// Draws and emits a token; why the request ends with it, or PSM_FINISH_NOT_FINISHED. Throws
// StatusError when the row or the request does not allow a token.
int32_t Engine::DrawToken(Request* request, const Rows& row, int32_t row_idx) {
  const uint32_t* mask = request->guide == nullptr ? nullptr : guides_.Mask(*request, row_idx);
  Sample sample;
  if (row.samples != nullptr) {
    TakeSample(*row.samples, *request, mask, config_.info.vocab_size, &sample);
  } else {
    DrawFromRow(row, *request, mask, &sample);
  }
  EmitToken(request, sample, row.logits);
  if (request->guide != nullptr) guides_.Accept(request, request->num_output() - 1);
  return FinishReason(*request);
}

void Engine::DrawFromRow(const Rows& row, const Request& request, const uint32_t* mask,
                         Sample* sample) {
  if (row.candidates == nullptr ||
      !sampler_.DrawFromCandidates(row.candidates, static_cast<int32_t>(row.num_candidates),
                                   request, sample)) {
    sampler_.Draw(row.logits, request, mask, sample);
  }
}

// What a step has filled becomes shareable. Almost always there is nothing to do.
void Engine::PublishBlocks(Request* request, bool with_tail) {
  const bool filled =
      request->num_computed / config_.info.tokens_per_block > request->kv.num_published;
  if (!filled && !with_tail) return;
  const int64_t now_ns = config_.NowNs();
  kv_.Publish(request->prefix_key, request->tokens.data(), request->num_computed,
              request->retention, now_ns, &request->kv);
  if (!with_tail) return;
  kv_.PublishTail(request->prefix_key, request->tokens.data(), request->num_computed,
                  request->retention, now_ns, &request->kv);
}

// The row of the next position of the prompt.
void Engine::EmitContext(Request* request, const float* row) {
  psm_event event = EventOf(*request, PSM_EVENT_CONTEXT);
  const int32_t position = request->num_context_rows;
  event.output_idx = position;
  event.token_id =
      position + 1 < request->num_prompt ? request->tokens[static_cast<size_t>(position) + 1] : -1;
  // Also where logits alone are wanted: a NaN in them fails the request like any other.
  const bool has_logprobs = request->num_prompt_logprobs >= 0;
  Sample sample;
  sampler_.RowLogProbs(row, *request, has_logprobs ? event.token_id : -1,
                       std::max(0, request->num_prompt_logprobs), &sample);
  if (has_logprobs) CopyTop(sample, &event);
  if (request->return_context_logits) event.logits = CopyLogits(row);
  new_events_.push_back(event);
  ++request->num_context_rows;
}

// For an event, whose taker frees it.
float* Engine::CopyLogits(const float* row) const {
  const size_t vocab_size = static_cast<size_t>(config_.info.vocab_size);
  float* logits = new (std::nothrow) float[vocab_size];
  if (logits == nullptr) {
    throw StatusError(PSM_ERROR_OUT_OF_MEMORY,
                      Format("the host has no memory for %zu logits; ask for fewer or poll more "
                             "often",
                             vocab_size));
  }
  std::copy_n(row, vocab_size, logits);
  return logits;
}

void Engine::EmitToken(Request* request, const Sample& sample, const float* row) {
  const int64_t now_ns = config_.NowNs();
  if (request->stats.first_token_time_ns == 0) request->stats.first_token_time_ns = now_ns;
  request->stats.last_token_time_ns = now_ns;
  float* logits = request->return_generation_logits ? CopyLogits(row) : nullptr;
  psm_event& event = new_events_.emplace_back();  // in place: it is large, and there are many
  Address(*request, PSM_EVENT_TOKEN, &event);
  event.token_id = sample.token;
  event.output_idx = request->num_output();
  event.logits = logits;
  if (request->params.num_logprobs > 0) {
    request->cum_logprob += static_cast<double>(sample.logprob);
    event.cum_logprob = static_cast<float>(request->cum_logprob);
    CopyTop(sample, &event);
  }
  request->PushToken(sample.token);
  stats_.AddToken();
}

void Engine::FinishBeamsIfDone(Request* request) {
  const int64_t now_ns = config_.NowNs();
  if (request->stats.first_token_time_ns == 0) request->stats.first_token_time_ns = now_ns;
  request->stats.last_token_time_ns = now_ns;
  if (request->beams->done()) Finish(request, PSM_FINISH_NOT_FINISHED);
}

// Their events may be many, so there is room for them only once they come. It leaves that of the
// others alone.
bool Engine::MakeRoomForBeams(const Request& request) {
  size_t num_events = 0;
  for (const Beam& beam : request.beams->Hypotheses()) num_events += beam.tokens.size() + 1;
  try {
    ReserveAtLeast(&new_events_, new_events_.size() + num_events + num_usual_events_);
  } catch (const std::bad_alloc&) {
    return false;
  }
  return true;
}

// All tokens of the beams as events, sequence by sequence, each with its end. `reason`: why the
// search was cut off, which is then the end of them all, since a longer search could have found
// others; NOT_FINISHED when it was not.
void Engine::EmitBeams(Request* request, int32_t reason) {
  const std::vector<Beam>& beams = request->beams->Hypotheses();
  for (size_t i = 0; i < beams.size(); ++i) {
    const Beam& beam = beams[i];
    request->sequence_idx = static_cast<int32_t>(i);
    double cum_logprob = 0.0;
    for (size_t j = 0; j < beam.tokens.size(); ++j) {
      psm_event event = EventOf(*request, PSM_EVENT_TOKEN);
      event.token_id = beam.tokens[j];
      event.output_idx = static_cast<int32_t>(j);
      event.logprob = beam.logprobs[j];
      cum_logprob += static_cast<double>(beam.logprobs[j]);
      event.cum_logprob = static_cast<float>(cum_logprob);
      new_events_.push_back(event);
      stats_.AddToken();
    }
    psm_event end = EventOf(*request, PSM_EVENT_FINISHED);
    end.finish_reason = reason != PSM_FINISH_NOT_FINISHED ? reason : beam.finish_reason;
    end.stats = request->stats;
    end.stats.num_generated_tokens = static_cast<int32_t>(beam.tokens.size());
    end.is_final = i + 1 == beams.size();
    new_events_.push_back(end);
  }
}

void Engine::Finish(Request* request, int32_t reason) {
  const bool has_beams = request->beams != nullptr && request->beams->running();
  Retire(request);
  psm_event event = EventOf(*request, PSM_EVENT_FINISHED);
  event.finish_reason = reason;
  if (has_beams) {
    if (MakeRoomForBeams(*request)) return EmitBeams(request, reason);
    event.kind = PSM_EVENT_FAILED;
    event.status = PSM_ERROR_OUT_OF_MEMORY;
    event.finish_reason = PSM_FINISH_NOT_FINISHED;
    CopyMessage(
        "the host has no memory for the tokens of all beams; lower beam_width or max_tokens, or "
        "poll more often",
        event.message);
  }
  PushEnd(request, &event);
}

void Engine::Fail(Request* request, psm_status status, const char* message) {
  if (request->state == RequestState::kRetired) return;
  Retire(request);
  psm_event event = EventOf(*request, PSM_EVENT_FAILED);
  event.status = status;
  CopyMessage(message, event.message);
  PushEnd(request, &event);
}

// Its blocks go back. The request itself lives until Publish: the plan of the step still points to
// it.
void Engine::Retire(Request* request) {
  if (request->state == RequestState::kRunning && request->beams == nullptr &&
      request->num_computed > 0 && breakdown_ == PSM_OK) {
    PublishBlocks(request, true);
  }
  if (deadlines_.Contains(request)) deadlines_.Remove(request);
  if (request->guide != nullptr) guides_.Finish(request);
  request->draft.clear();
  scheduler_.Remove(request);
  if (request->beams != nullptr) request->beams->Release(&kv_);
  request->state = RequestState::kRetired;
  request->stats.num_prompt_tokens = request->num_prompt;
  request->stats.num_generated_tokens = request->num_output();
  stats_.AddRetired(request->stats);
  retired_.push_back(request);
  // Its sequences share until the last of them ends.
  if (--request->group->num_open == 0 && request->prefix_key.private_id != 0) {
    kv_.Forget(request->prefix_key);
  }
  num_ended_requests_ += request->group->num_open == 0;
}

void Engine::PushEnd(Request* request, psm_event* event) {
  event->stats = request->stats;
  event->is_final = request->group->num_open == 0;
  new_events_.push_back(*event);
}

}  // namespace plansmith
