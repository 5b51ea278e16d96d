// One step of the scheduler.
//
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "batch_builder.h"
#include "scheduler.h"
#include "status.h"

namespace plansmith {
namespace {

int32_t NumRows(const ContextRows& rows) {
  return rows.context_end - rows.context_begin + (rows.last_is_extra ? 1 : 0);
}

bool HasBeams(const Request& request) {
  return request.beams != nullptr && request.beams->running();
}

// Draft tokens that a generating request can use: the last token of its length needs none.
int32_t WantedDrafts(const Request& request) {
  if (request.beams != nullptr || request.spec.want == 0) return 0;
  return std::max(0, std::min(request.spec.want, request.max_len() - request.num_computed - 2));
}

bool EndsContext(const ScheduledSeq& seq) {
  return seq.request->num_computed + seq.num_tokens == seq.request->num_tokens();
}

}  // namespace

StepPlan& Scheduler::Next() {
  BeginStep();
  ScheduleGeneration();
  ScheduleContext();
  ScheduleDrafts();
  num_context_tokens_ += static_cast<uint64_t>(plan_.num_context_tokens);
  if (plan_.empty() && !idle()) {
    throw StatusError(PSM_ERROR_INTERNAL,
                      Format("scheduler: %zu running of %zu requests, but none can run",
                             running_.size(), all_.size()));
  }
  return plan_;
}

void Scheduler::BeginStep() {
  plan_.context.clear();
  plan_.generation.clear();
  plan_.num_context_tokens = plan_.num_started = plan_.num_paused = 0;
  contexts_.clear();
  budget_ = config_.max_num_tokens;
  rows_ = config_.max_logits_rows;
  num_wanted_drafts_ = context_debt_ = 0;
  context_cut_ = false;
  for (size_t i = awaited_.size(); i-- > 0;) {
    Request* request = awaited_[i];
    waiting_.TakeBack(request, false);  // nobody waits for more than its context
    if (request->sched.put_off != nullptr) continue;
    awaited_[i] = awaited_.back();
    awaited_.pop_back();
  }
}

// In the order of rank. Blocks promised to a context are not for those that rank below it. Victims
// come from the tail, so none of them has been given its token yet.
void Scheduler::ScheduleGeneration() {
  const int64_t block = kv_->tokens_per_block();
  for (size_t i = 0; i < running_.size(); ++i) {
    Request* request = running_[i];
    if (request->in_context()) {
      contexts_.push_back(request);
      context_debt_ += ContextDebt(*request);
      continue;
    }
    if (HasBeams(*request)) {
      if (!AllocateBeams(request, i)) return;
    } else if (static_cast<int64_t>(request->kv.blocks.size()) * block <= request->num_computed) {
      while (!guaranteed() && kv_->num_free() - context_debt_ < 1) {
        PauseLast();
        if (i == running_.size()) return;  // it was the tail itself
      }
      Allocate(request, int64_t{request->num_computed} + 1);
    }
    plan_.generation.push_back({request, 1, WantedDrafts(*request)});
    budget_ -= request->width();
    rows_ -= request->width();
    num_wanted_drafts_ += plan_.generation.back().num_draft;
  }
}

// A position for every beam of `request` = running_[at], in a block that no other beam reads. False
// when it had to be paused.
bool Scheduler::AllocateBeams(Request* request, size_t at) {
  const int64_t position = request->num_computed;
  for (size_t beam = 0; beam < request->beams->beams().size(); ++beam) {
    KvSequence* kv = &request->beams->beams()[beam].kv;
    // Beams that share a block copy it one after the other, the last one keeps it: so look at each
    // when its turn has come.
    while (!guaranteed() && kv_->num_free() - context_debt_ < 1 &&
           (static_cast<int32_t>(kv->blocks.size()) < kv_->BlocksFor(position + 1) ||
            kv_->BlocksToWrite(*kv, position) > 0)) {
      PauseLast();
      if (at == running_.size()) return false;
    }
    const int32_t added = kv_->Extend(kv, position + 1);
    AddAllocated(request, added > 0 ? added : kv_->MakeWritable(kv, position));
  }
  return true;
}

void Scheduler::ScheduleContext() {
  if (equal_progress()) {
    ScheduleContextEqually();
    return;
  }
  for (size_t i = 0; i < contexts_.size() && budget_ > 0 && !context_cut_; ++i) {
    MakeRoomForContext(*contexts_[i]);
    context_cut_ = !AddContext(contexts_[i], budget_);
  }
  StartWaiting();
}

// A block to each in turn. Where the budget ends, the next step goes on.
void Scheduler::ScheduleContextEqually() {
  const size_t n = contexts_.size();
  size_t num_served = 0;
  if (n > 0) MakeRoomForContext(*contexts_[0]);
  for (size_t i = 0; i < contexts_.size() && budget_ > 0; ++i, ++num_served) {
    AddContext(contexts_[(turn_ + i) % contexts_.size()], kv_->tokens_per_block());
  }
  if (num_served < n) turn_ = (turn_ + num_served) % n;
  StartWaiting();
  for (bool grew = true; grew && budget_ > 0;) {
    grew = false;
    for (ScheduledSeq& seq : plan_.context) grew |= GrowContext(&seq, kv_->tokens_per_block());
  }
}

// What generating requests take of the blocks promised to contexts below them, they give back when
// they end, so the contexts get their blocks sooner or later. Should that ever fail, the last
// started gives way: better than nobody going on.
void Scheduler::MakeRoomForContext(const Request& request) {
  while (plan_.empty() && kv_->PositionsWithin(request.kv) <= request.num_computed &&
         running_.back() != &request) {
    PauseLast();
  }
}

// Plans up to `most` tokens of a running context; returns whether that is all of it.
bool Scheduler::AddContext(Request* request, int32_t most) {
  plan_.context.push_back({request, 0, 0});
  GrowContext(&plan_.context.back(), most);
  const int32_t num_tokens = plan_.context.back().num_tokens;
  if (num_tokens == 0) plan_.context.pop_back();
  return request->num_computed + num_tokens == request->context_end;
}

// Up to `most` tokens more of a planned context, as blocks, budget and rows allow.
bool Scheduler::GrowContext(ScheduledSeq* seq, int32_t most) {
  Request* request = seq->request;
  const int32_t begin = request->num_computed + seq->num_tokens;
  const int64_t room = kv_->PositionsWithin(request->kv) - begin;
  most = static_cast<int32_t>(std::min<int64_t>({most, budget_, std::max<int64_t>(room, 0)}));
  const int32_t chunk = ContextChunk(*request, begin, most, true);
  const int32_t end = begin + chunk;
  const bool is_ragged = end < request->context_end && end % kv_->tokens_per_block() != 0;
  const bool is_alone = plan_.context.size() == 1 && seq->num_tokens == 0;
  if (chunk == 0 || (is_ragged && !is_alone && equal_progress())) return false;
  const size_t held = request->kv.blocks.size();
  Allocate(request, end);
  context_debt_ -= static_cast<int32_t>(request->kv.blocks.size() - held);
  seq->num_tokens += chunk;
  plan_.num_context_tokens += chunk;
  budget_ -= chunk;
  rows_ -= NumRows(ContextRows(*request, begin, end));
  return true;
}

// Tokens from `begin` on, at most `most`. A cut that leaves a rest ends on a block boundary unless
// that would leave nothing.
int32_t Scheduler::ContextChunk(const Request& request, int32_t begin, int32_t most,
                                bool may_cut) const {
  const int32_t remaining = request.num_tokens() - begin;
  const int32_t chunk = std::min({remaining, most, ChunkWithinRows(request, begin)});
  if (chunk == remaining) return chunk;
  if (!may_cut) return 0;
  const int32_t cut_end = begin + chunk;
  const int32_t aligned_end = cut_end - cut_end % kv_->tokens_per_block();
  return aligned_end > begin ? aligned_end - begin : chunk;
}

int32_t Scheduler::ChunkWithinRows(const Request& request, int32_t begin) const {
  const int32_t end = request.num_tokens();
  if (begin == end) return 0;  // a planned context that is whole already
  const ContextRows rows(request, begin, end);
  if (NumRows(rows) <= rows_) return end - begin;
  if (rows.context_end - rows.context_begin <= rows_) return end - begin - 1;
  return rows.context_begin - begin + rows_;
}

void Scheduler::StartWaiting() {
  // Whoever has just given way must not come straight back.
  if (plan_.num_paused > 0 && !plan_.empty()) return;
  int32_t num_put_off = 0;
  bool makers_known = false;
  while (budget_ > 0 && !context_cut_) {
    Request* request = waiting_.Next();
    if (request == nullptr || num_slots_ + request->width() > config_.max_batch_size) return;
    const int32_t available = AvailableBlocks();
    if (request->id == blocked_id_ && available <= blocked_available_) return;
    if (!makers_known) NoteMakers();
    makers_known = true;
    PrefixMatch match = MatchFor(*request);
    request->sched.num_known_blocks = match.num_blocks;
    if (request->computes_all()) {
      match = {};
    } else if (const PrefixMakers::Found found = makers_.Find(*request, match.num_tokens);
               found.maker != nullptr) {
      // However long the line of them: one step looks at so many.
      if (num_put_off++ == config_.max_batch_size) return;
      PutOff(request, found);
      continue;
    }
    if (MissingBlocks(*request, match) > available) {
      blocked_id_ = request->id;
      blocked_available_ = available;
      return;
    }
    if (!CanBegin(*request, match.num_tokens)) return;
    Start(request, match);
    makers_.Add(request);
    const bool is_whole = AddContext(request, equal_progress() ? kv_->tokens_per_block() : budget_);
    context_cut_ = !is_whole && !equal_progress();
  }
}

void Scheduler::NoteMakers() {
  makers_.Clear();
  for (Request* request : contexts_) makers_.Add(request);
}

void Scheduler::PutOff(Request* request, const PrefixMakers::Found& found) {
  waiting_.Remove(request);
  if (found.maker->sched.put_off == nullptr) awaited_.push_back(found.maker);
  WaitingQueue::PutOff(request, found.maker, found.until);
}

// Whether the budget takes the beginning of its context. Without chunking that is all of it, unless
// no step could take all of it: recomputed with what it had generated, or with more rows wanted
// than a step gives.
bool Scheduler::CanBegin(const Request& request, int32_t begin) const {
  const int32_t end = request.num_tokens();
  // In equal parts, less than a block is for one that is alone.
  const int32_t unit = kv_->tokens_per_block() - begin % kv_->tokens_per_block();
  if (equal_progress() && !plan_.context.empty() && budget_ < std::min(unit, end - begin))
    return false;
  const bool may_cut = config_.enable_chunked_context || end - begin > config_.max_num_tokens ||
                       NumRows(ContextRows(request, begin, end)) > config_.max_logits_rows;
  return ContextChunk(request, begin, budget_, may_cut) > 0;
}

// num_draft is what a sequence wants, and becomes what it gets; a context that ends wants what its
// caller gave. When not everybody can have what it wants, all get the same number: a first draft
// token is accepted more often than a second.
void Scheduler::ScheduleDrafts() {
  for (ScheduledSeq& seq : plan_.context) {
    seq.num_draft = EndsContext(seq) ? seq.request->CallerDraftLeft() : 0;
    num_wanted_drafts_ += seq.num_draft;
  }
  if (num_wanted_drafts_ == 0) return;
  int32_t left_over = 0;
  const int32_t each = DraftsEach(&left_over);
  for (auto* seqs : {&plan_.context, &plan_.generation}) {
    for (ScheduledSeq& seq : *seqs) {
      int32_t n = std::min(seq.num_draft, each);
      if (n < seq.num_draft && left_over > 0) {
        ++n;
        --left_over;
      }
      if (n > 0) n = DraftWithinBlocks(seq, n);
      seq.num_draft = n;
      if (n == 0) continue;
      Allocate(seq.request, int64_t{seq.request->num_computed} + seq.num_tokens + n);
      budget_ -= n;
      rows_ -= n;
    }
  }
}

// The most that all can have, and how many get one more.
int32_t Scheduler::DraftsEach(int32_t* left_over) const {
  const int32_t available = std::max(0, std::min(budget_, rows_));
  if (num_wanted_drafts_ <= available) return num_wanted_drafts_;
  const auto total = [this](int32_t each) {
    int64_t sum = 0;
    for (const auto* seqs : {&plan_.context, &plan_.generation}) {
      for (const ScheduledSeq& seq : *seqs) sum += std::min(seq.num_draft, each);
    }
    return sum;
  };
  int32_t low = 0, high = available;
  while (low < high) {
    const int32_t each = low + (high - low + 1) / 2;
    if (total(each) <= available)
      low = each;
    else
      high = each - 1;
  }
  *left_over = static_cast<int32_t>(available - total(low));
  return low;
}

// A draft may fail, so it takes no block that could be missing elsewhere: with MAX_UTILIZATION the
// contexts' rest and a block for each sequence stay free. With GUARANTEED_NO_EVICT it uses blocks
// that the request has been promised.
int32_t Scheduler::DraftWithinBlocks(const ScheduledSeq& seq, int32_t num_draft) const {
  if (guaranteed()) return num_draft;
  const Request& request = *seq.request;
  const int64_t block = kv_->tokens_per_block();
  const int64_t spare_blocks = std::max(0, kv_->num_free() - context_debt_ - num_slots_);
  const int64_t end = (static_cast<int64_t>(request.kv.blocks.size()) + spare_blocks) * block;
  return static_cast<int32_t>(std::min<int64_t>(
      num_draft, std::max<int64_t>(end - request.num_computed - seq.num_tokens, 0)));
}

}  // namespace plansmith
