// Requests through an engine with or without drafts, stepped by hand.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <memory>
#include <vector>

#include "check.h"
#include "history_executor.h"

namespace history {

// A request and what its pointers point to.
struct Ask {
  Ask() : request{} {
    psm_request_init(&request);
    request.struct_size = PSM_REQUEST_SIZE;
  }
  const psm_request& Get() {
    request.prompt_ids = prompt.data();
    request.num_prompt_ids = static_cast<int32_t>(prompt.size());
    request.end_ids = end_ids.data();
    request.num_end_ids = static_cast<int32_t>(end_ids.size());
    request.stop_words = {stop_ids.data(), stop_ends.data(),
                          static_cast<int32_t>(stop_ends.size())};
    request.draft_ids = draft.data();
    request.num_draft_ids = static_cast<int32_t>(draft.size());
    return request;
  }
  psm_request request;
  std::vector<int32_t> prompt, end_ids, stop_ids, stop_ends, draft;
};

struct Result {
  std::vector<int32_t> tokens;
  std::vector<float> logprobs;  // 0 where they were not asked for
  int32_t finish_reason = 0;
  psm_status status = PSM_OK;
  bool done = false;
  psm_request_stats stats{};
};

struct Setup {
  Setup() {
    psm_engine_options_init(&options);
    options.manual_step = 1;
    options.adaptive_draft_len = 0;
    options.max_draft_len = 4;
  }
  Setup& Mode(int32_t mode) {
    options.draft_mode = mode;
    return *this;
  }
  psm_engine_options options;
  Model model;         // the target
  float noise = 0.0f;  // of the draft
  int32_t num_blocks = 2000;
};

class Engine {
 public:
  explicit Engine(const Setup& setup) : target(setup.model), draft(Noisy(setup)) { setup_ = setup; }
  ~Engine() { psm_engine_destroy(engine_); }
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Whatever is to be changed of target and draft comes before.
  void Create() {
    psm_engine_options& o = setup_.options;
    table_ = target.Table();
    draft_table_ = draft.Table();
    if (now_ns != nullptr) table_.now_ns = now_ns;
    const bool has_draft = o.draft_mode == PSM_DRAFT_MODEL;
    if (has_draft) o.draft_executor = &draft_table_;
    o.kv_cache_bytes = static_cast<uint64_t>(setup_.num_blocks) *
                       (target.info.kv_bytes_per_block * (has_draft ? 2 : 1));
    CHECK_OK(psm_engine_create(&table_, &o, &engine_));
  }

  uint64_t Submit(Ask* ask) {
    if (engine_ == nullptr) Create();
    uint64_t id;
    CHECK_OK(psm_engine_submit(engine_, &ask->Get(), &id));
    return id;
  }
  void Cancel(uint64_t id) { psm_engine_cancel(engine_, id); }

  bool StepOnly() {
    int32_t did_work;
    CHECK_OK(psm_engine_step(engine_, &did_work));
    return did_work != 0;
  }
  bool Step() {
    const bool did_work = StepOnly();
    Poll();
    return did_work;
  }
  void Poll() {
    static psm_event events[256];
    for (size_t n = 1; n > 0;) {
      CHECK_OK(psm_engine_poll(engine_, events, 256, 0, &n));
      for (size_t i = 0; i < n; ++i) Take(events[i]);
    }
  }
  void Drain() {
    for (int idle = 0; idle < 2;) idle = Step() ? 0 : idle + 1;
  }
  // Of one sequence of a request.
  Result& Of(uint64_t id, int32_t sequence_idx = 0) { return results_[{id, sequence_idx}]; }
  psm_engine_stats Stats() {
    psm_engine_stats stats;
    stats.struct_size = PSM_ENGINE_STATS_SIZE;
    CHECK_OK(psm_engine_get_stats(engine_, &stats));
    return stats;
  }

  Executor target, draft;
  int64_t (*now_ns)(void* self) = nullptr;  // the engine's clock

 private:
  static Model Noisy(const Setup& setup) {
    Model model = setup.model;
    model.noise = setup.noise;
    return model;
  }
  void Take(const psm_event& e) {
    Result& r = results_[{e.request_id, e.sequence_idx}];
    CHECK(!r.done);
    if (e.kind == PSM_EVENT_CONTEXT) return;
    if (e.kind == PSM_EVENT_TOKEN) {
      CHECK(e.output_idx == static_cast<int32_t>(r.tokens.size()));
      r.tokens.push_back(e.token_id);
      r.logprobs.push_back(e.logprob);
      return;
    }
    r.done = true;
    r.finish_reason = e.finish_reason;
    r.status = e.kind == PSM_EVENT_FAILED ? e.status : psm_status{PSM_OK};
    r.stats = e.stats;
  }

  Setup setup_;
  psm_executor table_, draft_table_;
  psm_engine* engine_ = nullptr;
  std::map<std::pair<uint64_t, int32_t>, Result> results_;
};

// What the target alone gives.
inline Result PlainResult(Ask ask, const Model& model = {}) {
  Setup setup;
  setup.model = model;
  ask.request.num_return_sequences = 1;
  ask.draft.clear();
  Engine engine(setup);
  const uint64_t id = engine.Submit(&ask);
  engine.Drain();
  CHECK(engine.Of(id).done && engine.Of(id).status == PSM_OK);
  return engine.Of(id);
}
inline std::vector<int32_t> Plain(const Ask& ask, const Model& model = {}) {
  return PlainResult(ask, model).tokens;
}

}  // namespace history
