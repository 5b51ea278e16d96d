// Who runs, with how many tokens, step by step, without an executor.
//
// SPDX-License-Identifier: Apache-2.0
#include "scheduler.h"

#include <algorithm>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "status.h"

using plansmith::KvCache;
using plansmith::KvCacheConfig;
using plansmith::Request;
using plansmith::RequestState;
using plansmith::ScheduledSeq;
using plansmith::Scheduler;
using plansmith::SchedulerConfig;
using plansmith::StepPlan;

namespace {

KvCacheConfig Pool(int32_t num_blocks, int32_t tokens_per_block) {
  KvCacheConfig config;
  config.num_blocks = num_blocks;
  config.tokens_per_block = tokens_per_block;
  return config;
}

constexpr int32_t kBlock = 4;

// A scheduler with requests that "generate" token 0 whenever a step reaches their end.
struct World {
  World(int32_t num_blocks, SchedulerConfig c)
      : config(c), kv(Pool(num_blocks, kBlock)), scheduler(c, &kv) {}

  Request* Add(int32_t num_prompt, int32_t max_tokens, float priority = 0.5f) {
    auto request = std::make_unique<Request>();
    request->id = ++next_id;
    request->num_prompt = num_prompt;
    request->max_tokens = max_tokens;
    request->priority = priority;
    for (int32_t i = 0; i < num_prompt; ++i)  // nothing in common with any other
      request->tokens.push_back(static_cast<int32_t>(next_id) * 1000 + i);
    scheduler.Add(request.get());
    all.push_back(std::move(request));
    return all.back().get();
  }

  // "c1:8 g2" = context of request 1 with 8 tokens, generation of request 2.
  std::string Step() {
    const StepPlan& plan = scheduler.Next();
    scheduler.CheckInvariants();
    std::string text;
    int32_t tokens = 0;
    for (const ScheduledSeq& seq : plan.context) {
      text += "c" + std::to_string(seq.request->id) + ":" + std::to_string(seq.num_tokens) + " ";
      tokens += seq.num_tokens;
    }
    for (const ScheduledSeq& seq : plan.generation) {
      CHECK(seq.num_tokens == 1);
      text += "g" + std::to_string(seq.request->id) + " ";
      ++tokens;
    }
    CHECK(tokens <= config.max_num_tokens);
    CHECK(static_cast<int32_t>(scheduler.running().size()) <= config.max_batch_size);
    std::vector<Request*> done;
    for (const auto* seqs : {&plan.context, &plan.generation}) {
      for (const ScheduledSeq& seq : *seqs) {
        Request* request = seq.request;
        request->num_computed += seq.num_tokens;
        if (request->num_computed < request->num_tokens()) continue;
        request->tokens.push_back(0);
        if (request->num_output() == request->max_tokens) done.push_back(request);
      }
    }
    int num_half_read = 0;  // what rules out that half-read contexts block each other
    for (const Request* request : scheduler.running()) num_half_read += request->in_context();
    CHECK(num_half_read <= 1);
    for (Request* request : done) {
      scheduler.Remove(request);
      request->state = RequestState::kRetired;
    }
    scheduler.CheckInvariants();
    if (!text.empty()) text.pop_back();
    return text;
  }

  SchedulerConfig config;
  KvCache kv;
  Scheduler scheduler;
  uint64_t next_id = 0;
  std::vector<std::unique_ptr<Request>> all;
};

SchedulerConfig Config(int32_t policy, int32_t batch, int32_t tokens, bool chunked = true) {
  SchedulerConfig config;
  config.policy = policy;
  config.max_batch_size = batch;
  config.max_num_tokens = tokens;
  config.max_logits_rows = tokens;
  config.enable_chunked_context = chunked;
  return config;
}

void TestChunks() {
  World w(100, Config(PSM_GUARANTEED_NO_EVICT, 4, 10));
  w.Add(19, 3);
  w.Add(5, 3);
  CHECK(w.Step() == "c1:8");  // 10 rounded down to a block boundary
  CHECK(w.Step() == "c1:8");
  CHECK(w.Step() == "c1:3 c2:5");  // final chunks are not rounded
  CHECK(w.Step() == "g1 g2");
  w.Add(30, 2);
  CHECK(w.Step() == "c3:8 g1 g2");  // generation first in the budget: 8 left
  CHECK(w.Step() == "c3:8");
  CHECK(w.Step() == "c3:8");
  CHECK(w.Step() == "c3:6");
  CHECK(w.Step() == "g3");
  CHECK(w.scheduler.idle() && w.kv.num_used() == 0);
}

// A budget below a block still makes progress, and later chunks return to block boundaries when
// they can.
void TestTinyBudget() {
  World w(100, Config(PSM_GUARANTEED_NO_EVICT, 3, 3));
  w.Add(5, 1);
  CHECK(w.Step() == "c1:3");
  CHECK(w.Step() == "c1:2");
  World v(100, Config(PSM_GUARANTEED_NO_EVICT, 3, 6));
  v.Add(1, 2);
  v.Add(1, 3);
  v.Add(1, 3);
  CHECK(v.Step() == "c1:1 c2:1 c3:1");
  CHECK(v.Step() == "g1 g2 g3");
  v.Add(13, 1);
  CHECK(v.Step() == "c4:4 g2 g3");
  CHECK(v.Step() == "c4:4");
  CHECK(v.Step() == "c4:5");
}

void TestUnchunked() {
  World w(100, Config(PSM_GUARANTEED_NO_EVICT, 4, 10, false));
  w.Add(7, 2);
  w.Add(6, 2);
  w.Add(2, 2);
  CHECK(w.Step() == "c1:7");          // 6 more do not fit, and the third may not overtake
  CHECK(w.Step() == "c2:6 c3:2 g1");  // 1 + 6 + 2
  CHECK(w.Step() == "g2 g3");
}

void TestBatchLimitAndPriority() {
  World w(100, Config(PSM_GUARANTEED_NO_EVICT, 2, 10));
  w.Add(2, 2, 0.5f);
  w.Add(2, 2, 0.1f);
  w.Add(2, 2, 0.9f);
  w.Add(2, 2, 0.5f);
  CHECK(w.Step() == "c3:2 c1:2");
  CHECK(w.Step() == "g3 g1");
  CHECK(w.Step() == "c4:2 c2:2");
}

// Reserved to the full length, allocated as it fills; the head of the line stops those behind it.
void TestGuaranteedNoEvict() {
  World w(10, Config(PSM_GUARANTEED_NO_EVICT, 8, 32));
  w.Add(4, 16);                  // 5 blocks
  Request* big = w.Add(4, 20);   // 6 blocks: 5 + 6 > 10
  Request* small = w.Add(1, 1);  // would fit, but waits its turn
  CHECK(w.Step() == "c1:4" && w.kv.num_used() == 1);
  CHECK(w.scheduler.num_queued() == 2);
  for (int i = 0; i < 15; ++i) CHECK(w.Step() == "g1");
  CHECK(w.Step() == "c2:4 c3:1");
  CHECK(big->state == RequestState::kRunning && small->state == RequestState::kRetired);
}

void TestMaxUtilization() {
  World w(6, Config(PSM_MAX_UTILIZATION, 8, 32));
  Request* first = w.Add(8, 12);   // 2 blocks, at most 5
  Request* second = w.Add(8, 12);  // together they outgrow 6
  CHECK(w.Step() == "c1:8 c2:8");
  CHECK(w.Step() == "g1 g2");  // positions 9: the third block each
  for (int i = 0; i < 3; ++i) CHECK(w.Step() == "g1 g2");
  CHECK(w.kv.num_free() == 0);
  CHECK(w.Step() == "g1");  // position 13 does not fit twice: the last started gives way
  CHECK(second->state == RequestState::kPaused && second->kv.blocks.empty());
  CHECK(second->stats.num_pauses == 1 && w.scheduler.num_paused() == 1);
  CHECK(second->num_output() == 5);
  while (first->state != RequestState::kRetired) CHECK(w.Step() == "g1");
  CHECK(w.Step() == "c2:13");  // 8 prompt tokens and 5 generated ones, as context
  CHECK(w.Step() == "g2");
  while (!w.scheduler.idle()) w.Step();
  CHECK(second->num_output() == 12 && w.kv.num_used() == 0);
}

// A context waits for the blocks of all of it, not of its first chunk.
void TestContextStartsWhole() {
  World w(6, Config(PSM_MAX_UTILIZATION, 8, 8));
  w.Add(8, 6);
  w.Add(20, 4);  // 5 blocks, in chunks of 2
  CHECK(w.Step() == "c1:8");
  for (int i = 0; i < 5; ++i) CHECK(w.Step() == "g1");  // 4 or fewer blocks are free
  CHECK(w.Step() == "c2:8");
}

// The victim is the lowest priority, whoever started last.
void TestPausesByPriority() {
  World w(6, Config(PSM_MAX_UTILIZATION, 8, 32));
  Request* low = w.Add(8, 12, 0.2f);
  CHECK(w.Step() == "c1:8");
  Request* high = w.Add(8, 12, 0.8f);
  CHECK(w.Step() == "c2:8 g1");
  while (low->state == RequestState::kRunning) w.Step();
  CHECK(high->state == RequestState::kRunning && low->stats.num_pauses == 1);
  World v(6, Config(PSM_MAX_UTILIZATION, 8, 32));
  low = v.Add(8, 12, 0.2f);
  high = v.Add(8, 12, 0.8f);
  while (low->state == RequestState::kRunning || low->state == RequestState::kQueued) v.Step();
  CHECK(high->state == RequestState::kRunning);
}

// A recomputed context may exceed the budget that its prompt had to respect; it is cut even with
// chunking off.
void TestRecomputeOutgrowsBudget() {
  World w(8, Config(PSM_MAX_UTILIZATION, 8, 10, false));
  Request* first = w.Add(8, 20);
  Request* second = w.Add(8, 20);
  int steps = 0;
  while (!w.scheduler.idle()) {
    w.Step();
    CHECK(++steps < 500);
  }
  CHECK(first->num_output() == 20 && second->num_output() == 20);
  CHECK(second->stats.num_pauses >= 1);
}

// Whatever arrives: every step runs somebody, all finish, and the invariants hold (checked in
// Step).
void TestRandomLoads() {
  std::mt19937 random(11);
  for (int round = 0; round < 300; ++round) {
    const int32_t policy = round % 2 ? PSM_MAX_UTILIZATION : PSM_GUARANTEED_NO_EVICT;
    const int32_t tokens = 2 + static_cast<int32_t>(random() % 30);
    const int32_t batch =
        1 + static_cast<int32_t>(random() % static_cast<uint32_t>(std::min(tokens, 8)));
    const int32_t blocks = 3 + static_cast<int32_t>(random() % 12);
    const bool chunked = random() % 3 != 0;
    World w(blocks, Config(policy, batch, tokens, chunked));
    int to_come = 30;
    int steps = 0;
    while (to_come > 0 || !w.scheduler.idle()) {
      if (to_come > 0 && random() % 3 == 0) {
        --to_come;
        const int32_t longest = blocks * kBlock;
        int32_t prompt = 1 + static_cast<int32_t>(random() % static_cast<uint32_t>(longest - 1));
        if (!chunked) prompt = std::min(prompt, tokens);
        const int32_t output =
            1 + static_cast<int32_t>(random() % static_cast<uint32_t>(longest - prompt));
        w.Add(prompt, output, static_cast<float>(random() % 3) / 2.0f);
      }
      if (random() % 20 == 0) {  // a cancel
        for (auto& request : w.all) {
          if (request->state == RequestState::kRetired || random() % 4 != 0) continue;
          w.scheduler.Remove(request.get());
          request->state = RequestState::kRetired;
          break;
        }
      }
      const bool idle = w.scheduler.idle();
      CHECK(w.Step().empty() == idle);
      CHECK(++steps < 20000);
    }
    for (const auto& request : w.all) {
      CHECK(policy == PSM_MAX_UTILIZATION || request->stats.num_pauses == 0);
    }
    CHECK(w.kv.num_used() == 0);
  }
}

}  // namespace

int main() {
  TestChunks();
  TestTinyBudget();
  TestUnchunked();
  TestBatchLimitAndPriority();
  TestGuaranteedNoEvict();
  TestMaxUtilization();
  TestContextStartsWhole();
  TestPausesByPriority();
  TestRecomputeOutgrowsBudget();
  TestRandomLoads();
  return 0;
}
