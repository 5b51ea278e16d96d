// A scheduler, a KV cache, and in place of a model a rule: the next token is a function of those
// before it. What blocks hold is kept as the hash of everything up to each position and compared
// with what a step expects to find, so that a block shared, copied or given away wrongly shows.
//
// SPDX-License-Identifier: Apache-2.0
#ifndef PLANSMITH_TESTS_SCHEDULER_WORLD_H_
#define PLANSMITH_TESTS_SCHEDULER_WORLD_H_

#include <algorithm>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "sampler.h"
#include "scheduler.h"
#include "status.h"

namespace plansmith {

constexpr int32_t kBlock = 4;
constexpr int32_t kVocab = 8;  // of the generated tokens

inline KvCacheConfig Pool(int32_t num_blocks, int32_t num_host_blocks = 0) {
  KvCacheConfig config;
  config.num_blocks = num_blocks;
  config.tokens_per_block = kBlock;
  config.num_host_blocks = num_host_blocks;
  config.can_copy = true;
  return config;
}

inline SchedulerConfig Config(int32_t policy, int32_t batch, int32_t tokens, bool chunked = true) {
  SchedulerConfig config;
  config.policy = policy;
  config.max_batch_size = batch;
  config.max_num_tokens = tokens;
  config.max_logits_rows = tokens;
  config.enable_chunked_context = chunked;
  return config;
}

// What the pools hold: for each position the hash of the tokens up to it.
class Contents {
 public:
  explicit Contents(const KvCacheConfig& config)
      : device_(static_cast<size_t>(config.num_blocks) * kBlock, 0),
        host_(static_cast<size_t>(config.num_host_blocks) * kBlock, 0) {}

  static uint64_t Next(uint64_t hash, int32_t token) {
    hash = (hash ^ static_cast<uint64_t>(token + 1)) * 0x9E3779B97F4A7C15u;
    return hash ^ (hash >> 31);
  }
  void Copy(const psm_block_copy& copy) {
    const std::vector<uint64_t>& from = copy.kind == PSM_COPY_FROM_HOST ? host_ : device_;
    std::vector<uint64_t>& to = copy.kind == PSM_COPY_TO_HOST ? host_ : device_;
    for (int32_t i = 0; i < copy.num_tokens; ++i) At(&to, copy.dst, i) = Get(from, copy.src, i);
  }
  // Reads positions [0, begin), writes [begin, end) of `tokens`; beyond the tokens: a draft that
  // came to nothing.
  void Step(const KvSequence& kv, const std::vector<int32_t>& tokens, int32_t begin, int32_t end,
            uint64_t hash) {
    for (int32_t p = 0; p < end; ++p) {
      const int32_t block = kv.blocks[static_cast<size_t>(p / kBlock)];
      const bool known = p < static_cast<int32_t>(tokens.size());
      hash = Next(hash, known ? tokens[static_cast<size_t>(p)] : -7);
      if (p < begin) {
        CHECK(Get(device_, block, p % kBlock) == hash);
      } else {
        At(&device_, block, p % kBlock) = hash;
      }
    }
  }

 private:
  static uint64_t& At(std::vector<uint64_t>* pool, int32_t block, int32_t i) {
    return (*pool)[static_cast<size_t>(block) * kBlock + static_cast<size_t>(i)];
  }
  static uint64_t Get(const std::vector<uint64_t>& pool, int32_t block, int32_t i) {
    return pool[static_cast<size_t>(block) * kBlock + static_cast<size_t>(i)];
  }
  std::vector<uint64_t> device_, host_;
};

struct World {
  World(const KvCacheConfig& pool, const SchedulerConfig& c)
      : config(c), kv(pool), scheduler(c, &kv), contents(pool), sampler(kVocab) {}
  World(int32_t num_blocks, const SchedulerConfig& c) : World(Pool(num_blocks), c) {}

  // Not yet added, so that its fields can be changed.
  Request* Make(std::vector<int32_t> prompt, int32_t max_tokens, float priority = 0.5f) {
    auto request = std::make_unique<Request>();
    request->id = ++next_id;
    request->num_prompt = static_cast<int32_t>(prompt.size());
    request->max_tokens = max_tokens;
    request->priority = priority;
    request->tokens = std::move(prompt);
    request->tokens.reserve(static_cast<size_t>(request->max_len()));
    request->max_draft_len = 64;
    all.push_back(std::move(request));
    return all.back().get();
  }
  void GiveBeams(Request* request, int32_t width) {
    BeamParams params;
    params.width = width;
    request->beams = std::make_unique<BeamSearch>(params, kVocab, request->max_tokens,
                                                  kv.BlocksFor(request->max_len()), 0);
  }
  Request* Add(std::vector<int32_t> prompt, int32_t max_tokens, float priority = 0.5f) {
    Request* request = Make(std::move(prompt), max_tokens, priority);
    scheduler.Add(request);
    return request;
  }
  // A prompt that has nothing in common with any other.
  Request* Add(int32_t num_prompt, int32_t max_tokens, float priority = 0.5f) {
    std::vector<int32_t> prompt;
    for (int32_t i = 0; i < num_prompt; ++i)
      prompt.push_back(static_cast<int32_t>(next_id + 1) * 1000 + i);
    return Add(std::move(prompt), max_tokens, priority);
  }
  void End(Request* request) {
    const bool publishes = request->state == RequestState::kRunning && request->beams == nullptr;
    if (publishes && request->num_computed > 0) Publish(request, true);
    scheduler.Remove(request);
    CHECK(request->kv.blocks.empty());
    request->state = RequestState::kRetired;
  }

  // Plans and runs a step. "c1:8 g2+3" = context of request 1 with 8 tokens, generation of request
  // 2 with 3 draft tokens.
  std::string Step() {
    StepPlan& plan = scheduler.Next();
    scheduler.CheckInvariants();
    CheckLimits(plan);
    CheckNobodyRepeats(plan);
    when_planned();
    for (const psm_block_copy& copy : kv.copies()) contents.Copy(copy);
    kv.ClearCopies();
    const std::string text = Describe(plan);
    for (const ScheduledSeq& seq : plan.context) RunContext(seq);
    for (const ScheduledSeq& seq : plan.generation) RunGeneration(seq);
    scheduler.CheckInvariants();
    ++now;
    return text;
  }

  static std::string Describe(const StepPlan& plan) {
    std::string text;
    for (const ScheduledSeq& seq : plan.context)
      text += "c" + std::to_string(seq.request->id) + ":" + std::to_string(seq.num_tokens) + " ";
    for (const ScheduledSeq& seq : plan.generation) {
      text += "g" + std::to_string(seq.request->id);
      text += (seq.num_draft > 0 ? "+" + std::to_string(seq.num_draft) : "") + " ";
    }
    if (!text.empty()) text.pop_back();
    return text;
  }

  // Rows that a context asks for; written down again on purpose.
  static int32_t Rows(const Request& r, int32_t begin, int32_t end) {
    int32_t rows = 0;
    for (int32_t p = begin; p < end; ++p) {
      const bool wanted = r.wants_context_rows() && p < r.num_prompt && p >= r.num_context_rows;
      rows += wanted || p + 1 == r.num_tokens();
    }
    return rows;
  }

  void CheckLimits(const StepPlan& plan) const {
    int32_t tokens = 0, rows = 0, slots = 0;
    for (const Request* request : scheduler.running()) slots += request->width();
    for (const ScheduledSeq& seq : plan.context) {
      const Request& r = *seq.request;
      CHECK(seq.num_tokens >= 1 && seq.num_draft == 0 && r.in_context());
      CHECK(r.num_computed + seq.num_tokens <= r.context_end && r.context_end == r.num_tokens());
      CHECK(static_cast<int32_t>(r.kv.blocks.size()) * kBlock >= r.num_computed + seq.num_tokens);
      tokens += seq.num_tokens;
      rows += Rows(r, r.num_computed, r.num_computed + seq.num_tokens);
    }
    for (const ScheduledSeq& seq : plan.generation) {
      const Request& r = *seq.request;
      CHECK(seq.num_tokens == 1 && !r.in_context() && r.num_computed + 1 == r.num_tokens());
      CHECK(seq.num_draft <= std::max(0, r.spec.want) && (r.beams == nullptr || !seq.num_draft));
      const int32_t end = r.num_computed + 1 + seq.num_draft;
      CHECK(end <= r.max_len());
      if (r.beams == nullptr) CHECK(static_cast<int32_t>(r.kv.blocks.size()) * kBlock >= end);
      tokens += r.width() + seq.num_draft;
      rows += r.width() + seq.num_draft;
    }
    CHECK(tokens <= config.max_num_tokens && rows <= config.max_logits_rows);
    CHECK(slots <= config.max_batch_size);
    // Nobody comes straight back from a pause.
    CHECK(plan.num_paused == 0 || plan.num_started == 0);
    // Every generating request has its token before the contexts have any.
    size_t generating = 0;
    for (const Request* request : scheduler.running()) generating += !request->in_context();
    CHECK(plan.generation.size() == generating);
  }

  // Nobody starts whose next block another one fills right now.
  void CheckNobodyRepeats(const StepPlan& plan) const {
    for (const ScheduledSeq& seq : plan.context) {
      const Request& r = *seq.request;
      const bool computes_all = r.wants_context_rows() && r.num_context_rows < r.num_prompt;
      if (r.start_order < first_start || computes_all) continue;
      const int32_t block = r.num_computed / kBlock;
      const size_t n = static_cast<size_t>(block + 1) * kBlock;
      if (n + 1 > r.tokens.size()) continue;
      for (const Request* other : scheduler.running()) {
        if (other == &r || !other->in_context() || !(other->prefix_key == r.prefix_key)) continue;
        if (other->start_order > r.start_order) continue;
        const int32_t next = std::max(other->num_computed / kBlock, other->sched.num_known_blocks);
        if (next != block || static_cast<size_t>(other->context_end) < n) continue;
        CHECK(!std::equal(r.tokens.begin(), r.tokens.begin() + static_cast<ptrdiff_t>(n),
                          other->tokens.begin()));
      }
    }
    first_start = 1;
    for (const Request* request : scheduler.running())
      first_start = std::max(first_start, request->start_order + 1);
  }

  static uint64_t KeyHash(const Request& r) {
    return Contents::Next(Contents::Next(r.prefix_key.salt, 1),
                          static_cast<int32_t>(r.prefix_key.adapter_id));
  }
  // What the model says next.
  static int32_t NextToken(const Request& r) {
    uint64_t hash = KeyHash(r);
    for (int32_t token : r.tokens) hash = Contents::Next(hash, token);
    return static_cast<int32_t>(hash % kVocab);
  }
  void Publish(Request* r, bool with_tail) {
    kv.Publish(r->prefix_key, r->tokens.data(), r->num_computed, r->retention, now, &r->kv);
    if (with_tail)
      kv.PublishTail(r->prefix_key, r->tokens.data(), r->num_computed, r->retention, now, &r->kv);
  }

  void RunContext(const ScheduledSeq& seq) {
    Request* r = seq.request;
    const int32_t end = r->num_computed + seq.num_tokens;
    contents.Step(r->kv, r->tokens, r->num_computed, end, KeyHash(*r));
    num_computed_tokens += seq.num_tokens;
    r->num_computed = end;
    if (r->wants_context_rows())
      r->num_context_rows = std::max(r->num_context_rows, std::min(end, r->num_prompt));
    const bool at_end = end == r->num_tokens();
    Publish(r, at_end);
    if (!at_end) return;
    if (r->beams != nullptr) {
      r->beams->Start(RandomRows(1), &sampler, &kv, r);
    } else {
      r->PushToken(NextToken(*r));
    }
    EndIfDone(r);
  }

  void RunGeneration(const ScheduledSeq& seq) {
    Request* r = seq.request;
    if (r->beams != nullptr) return RunBeams(r);
    const int32_t begin = r->num_computed;
    const int32_t num_accepted =
        seq.num_draft == 0 ? 0 : static_cast<int32_t>(random() % (seq.num_draft + 1u));
    for (int32_t i = 0; i <= num_accepted && r->num_output() < r->max_tokens; ++i) {
      ++r->num_computed;
      r->PushToken(NextToken(*r));
    }
    std::vector<int32_t> known(r->tokens.begin(), r->tokens.end() - 1);
    contents.Step(r->kv, known, begin, begin + 1 + seq.num_draft, KeyHash(*r));
    Publish(r, false);
    EndIfDone(r);
  }

  void RunBeams(Request* r) {
    const int32_t begin = r->num_computed++;
    std::vector<int32_t> owners(static_cast<size_t>(kv.num_blocks()), 0);
    for (const Beam& beam : r->beams->beams()) {
      std::vector<int32_t> tokens(r->tokens.begin(), r->tokens.begin() + r->num_prompt);
      tokens.insert(tokens.end(), beam.tokens.begin(), beam.tokens.end());
      contents.Step(beam.kv, tokens, begin, begin + 1, KeyHash(*r));
      CHECK(++owners[static_cast<size_t>(beam.kv.blocks[static_cast<size_t>(begin / kBlock)])] ==
            1);
    }
    r->beams->Advance(RandomRows(r->width()), &sampler, &kv, r);
    EndIfDone(r);
  }

  const float* RandomRows(int32_t n) {
    rows.resize(static_cast<size_t>(n) * kVocab);
    for (float& x : rows) x = static_cast<float>(random() % 1000) / 200.0f;
    return rows.data();
  }

  void EndIfDone(Request* r) {
    const bool done =
        r->beams != nullptr ? r->beams->done() : r->num_output() >= r->max_tokens || ends_early(*r);
    if (done) End(r);
  }

  SchedulerConfig config;
  KvCache kv;
  Scheduler scheduler;
  Contents contents;
  Sampler sampler;
  std::mt19937 random{3};
  std::function<bool(const Request&)> ends_early = [](const Request&) { return false; };
  std::function<void()> when_planned = [] {};
  uint64_t next_id = 0;
  int64_t now = 1;
  int64_t num_computed_tokens = 0;  // of contexts
  std::vector<std::unique_ptr<Request>> all;
  std::vector<float> rows;
  mutable uint64_t first_start = 1;  // of the step
};

}  // namespace plansmith

#endif  // PLANSMITH_TESTS_SCHEDULER_WORLD_H_
