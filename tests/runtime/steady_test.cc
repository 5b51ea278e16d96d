// A steady step allocates nothing: 64 sequences that generate, with and without drafts, over block
// boundaries, published blocks and evictions, in one call and in halves.
//
// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <new>
#include <random>
#include <vector>

#include "check.h"
#include "count_allocations.h"
#include "engine.h"
#include "give_candidates.h"
#include "halves_executor.h"
#include "request_check.h"

namespace {

using namespace plansmith;

constexpr int32_t kNumSeqs = 64, kPrompt = 40, kLength = 400, kVocab = 64;

psm_executor Simulated(uint64_t seed, uint64_t draft_of_seed) {
  psm_simulated_options m;
  psm_simulated_options_init(&m);
  m.info.vocab_size = kVocab;
  m.info.max_batch_size = kNumSeqs;
  m.info.max_num_tokens = 1024;
  m.info.max_logits_rows = 1024;
  m.info.max_input_len = kPrompt;
  m.info.max_seq_len = kPrompt + kLength;
  m.info.tokens_per_block = 8;
  m.seed = seed;
  m.draft_of_seed = draft_of_seed;
  m.draft_agreement = draft_of_seed != 0 ? 0.7 : 0.0;
  psm_executor e;
  CHECK_OK(psm_simulated_executor_create(&m, &e));
  return e;
}

int64_t num_found = 0;

// An executor that gives its rows' candidates, without copies of blocks.
psm_executor Finding(const psm_executor& executor) {
  static const auto inner = [](void* self) -> const psm_executor& {
    return *static_cast<psm_executor*>(self);
  };
  psm_executor e{};
  e.struct_size = PSM_EXECUTOR_SIZE;
  e.self = new psm_executor(executor);
  e.describe = [](void* self, psm_model_info* info) {
    const psm_status status = inner(self).describe(inner(self).self, info);
    info->samples_rows = PSM_SAMPLES_CANDIDATES;
    return status;
  };
  e.open = [](void* self, int32_t num_blocks) {
    return inner(self).open(inner(self).self, num_blocks);
  };
  e.step = [](void* self, const psm_batch* batch, const float** logits) {
    psm_batch without = *batch;
    without.num_candidates = 0;
    CHECK_OK(inner(self).step(inner(self).self, &without, logits));
    const int32_t k = batch->num_candidates;
    for (int32_t row = 0; k > 0 && row < batch->num_logits_rows; ++row, ++num_found) {
      give_candidates(*logits + row * kVocab, kVocab, k, batch->candidates + row * k);
    }
    return static_cast<psm_status>(PSM_OK);
  };
  e.close = [](void* self) {
    inner(self).close(inner(self).self);
    delete static_cast<psm_executor*>(self);
  };
  return e;
}

struct Case {
  const char* name;
  int32_t policy;
  int32_t draft_mode;
  int32_t num_blocks;
  int32_t host_blocks;
  int32_t temperature;
  bool draws = false;  // the executors have halves and draw, with penalties
  bool finds = false;  // the executor finds candidates
};

int64_t num_drawn = 0;

psm_executor Drawing(const psm_executor& executor) {
  auto halves = std::make_unique<HalvesExecutor>(executor);
  halves->checks_rules = false;
  halves->num_drawn = &num_drawn;
  return HalvesExecutor::Table(halves.release());
}

void RunCase(const Case& c) {
  const psm_executor executor = c.draws   ? Drawing(Simulated(1, 0))
                                : c.finds ? Finding(Simulated(1, 0))
                                          : Simulated(1, 0);
  psm_executor draft{};
  psm_engine_options o;
  psm_engine_options_init(&o);
  o.manual_step = 1;
  o.scheduler_policy = c.policy;
  o.draft_mode = c.draft_mode;
  o.max_draft_len = 4;
  const uint64_t bytes = 4096 * (c.draft_mode == PSM_DRAFT_MODEL ? 2u : 1u);
  o.kv_cache_bytes = static_cast<uint64_t>(c.num_blocks) * bytes;
  o.host_cache_bytes = static_cast<uint64_t>(c.host_blocks) * bytes;
  if (c.host_blocks > 0) o.pause_policy = PSM_PAUSE_SWAP;  // whatever it costs
  if (c.draft_mode == PSM_DRAFT_MODEL) {
    draft = c.draws ? Drawing(Simulated(2, 1)) : Simulated(2, 1);
    o.draft_executor = &draft;
  }
  Engine engine(MakeEngineConfig(&executor, &o));
  std::mt19937 random(3);
  const auto submit = [&](int32_t max_tokens) {
    std::vector<int32_t> prompt(kPrompt);
    for (int32_t& id : prompt) id = static_cast<int32_t>(random() % kVocab);
    psm_request q;
    psm_request_init(&q);
    q.prompt_ids = prompt.data();
    q.num_prompt_ids = kPrompt;
    q.max_tokens = max_tokens;
    q.temperature = static_cast<float>(c.temperature);
    q.seed = random();
    if (c.finds) q.top_k = 5;
    if (c.draws) q.repetition_penalty = 1.05f, q.frequency_penalty = 0.01f;
    engine.Submit(CheckRequest(q, engine.config()));
  };
  // Leave something cached that has to go when the later ones grow.
  for (int32_t i = 0; i < 6 * kNumSeqs; ++i) submit(20);
  while (engine.StepOnce()) {
  }
  for (int32_t i = 0; i < kNumSeqs; ++i) submit(kLength);
  std::vector<psm_event> events(4096);
  // Rings and scratch reach their size first.
  const int32_t warm = c.draft_mode == PSM_DRAFT_OFF ? 60 : 30;
  for (int32_t step = 0; step < warm; ++step) {
    CHECK(engine.StepOnce());
    engine.events().Poll(events.data(), events.size(), 0);
  }
  const psm_engine_stats before = engine.Stats();
  const int32_t num_steps = c.draft_mode == PSM_DRAFT_OFF ? 200 : 40;
  const long news = num_news;
  for (int32_t step = 0; step < num_steps; ++step) {
    engine.StepOnce();
    engine.events().Poll(events.data(), events.size(), 0);
    if (num_news != news) {
      fprintf(stderr, "%s: %ld allocations in step %d\n", c.name, num_news - news, step);
      CHECK(false);
    }
  }
  const psm_engine_stats after = engine.Stats();
  CHECK(after.num_completed_requests == before.num_completed_requests);  // they all generated on
  CHECK(after.num_active_requests + after.num_paused_requests == kNumSeqs);
  CHECK(after.num_generated_tokens >= before.num_generated_tokens + 20u * kNumSeqs);
  CHECK(c.draft_mode == PSM_DRAFT_OFF || after.num_draft_tokens > before.num_draft_tokens);
  CHECK(c.num_blocks == 4000 || after.cached_num_blocks < before.cached_num_blocks);
  CHECK(c.host_blocks == 0 || after.offloaded_blocks > before.offloaded_blocks);
}

}  // namespace

int main() {
  // 64 sequences of 440 positions in blocks of 8 are 3520.
  const Case cases[] = {
      {"greedy", PSM_GUARANTEED_NO_EVICT, PSM_DRAFT_OFF, 4000, 0, 0},
      {"sampled", PSM_GUARANTEED_NO_EVICT, PSM_DRAFT_OFF, 4000, 0, 1},
      {"evicting", PSM_MAX_UTILIZATION, PSM_DRAFT_OFF, 3530, 0, 0},
      {"offloading", PSM_GUARANTEED_NO_EVICT, PSM_DRAFT_OFF, 3530, 1000, 0},
      {"n-gram", PSM_GUARANTEED_NO_EVICT, PSM_DRAFT_NGRAM, 4000, 0, 0},
      {"draft model", PSM_MAX_UTILIZATION, PSM_DRAFT_MODEL, 4000, 0, 1},
      {"drawn", PSM_GUARANTEED_NO_EVICT, PSM_DRAFT_OFF, 4000, 0, 1, true},
      {"drawn n-gram", PSM_GUARANTEED_NO_EVICT, PSM_DRAFT_NGRAM, 4000, 0, 0, true},
      {"drawn draft model", PSM_MAX_UTILIZATION, PSM_DRAFT_MODEL, 4000, 0, 1, true},
      {"greedy by candidates", PSM_GUARANTEED_NO_EVICT, PSM_DRAFT_OFF, 4000, 0, 0, false, true},
      {"sampled by candidates", PSM_GUARANTEED_NO_EVICT, PSM_DRAFT_OFF, 4000, 0, 1, false, true},
  };
  for (const Case& c : cases) {
    const int64_t before = num_drawn, found_before = num_found;
    RunCase(c);
    CHECK((num_drawn > before) == c.draws && (num_found > found_before) == c.finds);
  }
  return 0;
}
