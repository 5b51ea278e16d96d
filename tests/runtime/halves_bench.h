// What tests of steps in two halves share: a request, and an engine over the fake executor in
// halves.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "check.h"
#include "fake_executor.h"
#include "halves_executor.h"
#include "plansmith/plansmith.h"

namespace plansmith {

struct Ask {
  Ask() : request{} {
    psm_request_init(&request);
    request.struct_size = PSM_REQUEST_SIZE;
    request.max_tokens = 20;
  }
  const psm_request& Get() {
    request.prompt_ids = prompt.data();
    request.num_prompt_ids = static_cast<int32_t>(prompt.size());
    request.end_ids = end_ids.data();
    request.num_end_ids = static_cast<int32_t>(end_ids.size());
    request.bad_words = {bad_ids.data(), bad_ends.data(), static_cast<int32_t>(bad_ends.size())};
    request.logit_bias_ids = bias_ids.data();
    request.logit_bias_values = bias.data();
    request.num_logit_bias = static_cast<int32_t>(bias.size());
    request.draft_ids = draft.data();
    request.num_draft_ids = static_cast<int32_t>(draft.size());
    return request;
  }
  std::vector<int32_t> prompt = {7, 8, 9, 8}, end_ids, bad_ids, bad_ends, bias_ids, draft;
  std::vector<float> bias;
  psm_request request;
};

// An engine over the fake executor, which is wrapped into halves unless `wrap` is NULL.
class Bench {
 public:
  using Change = std::function<void(HalvesExecutor*)>;
  explicit Bench(bool in_halves, const Change& change = nullptr, bool manual = true) {
    fake_executor_init(&fake);
    psm_executor table = fake_executor_table(&fake);
    if (in_halves) {
      auto* halves = new HalvesExecutor(table);
      halves->num_drawn = &num_drawn;
      halves->num_given = &num_given;
      if (change) change(halves);
      table = HalvesExecutor::Table(halves);
    }
    Create(table, manual);
  }
  explicit Bench(const psm_executor& table) {
    fake_executor_init(&fake);
    Create(table, true);
  }
  ~Bench() {
    psm_engine_destroy(engine);
    fake_executor_free(&fake);
  }
  Bench(const Bench&) = delete;
  Bench& operator=(const Bench&) = delete;

  uint64_t Submit(Ask* ask) {
    uint64_t id;
    CHECK_OK(psm_engine_submit(engine, &ask->Get(), &id));
    return id;
  }
  bool Step() {
    int32_t did_work;
    CHECK_OK(psm_engine_step(engine, &did_work));
    Poll();
    return did_work != 0;
  }
  void Poll() {
    psm_event taken[64];
    for (size_t n = 1; n > 0;) {
      const psm_status status = psm_engine_poll(engine, taken, 64, 0, &n);
      CHECK(status == PSM_OK || status == PSM_ERROR_SHUTDOWN);
      events.insert(events.end(), taken, taken + n);
    }
  }
  void Drain() {
    while (Step()) {
    }
  }
  const psm_event& End(uint64_t id) const {
    for (const psm_event& e : events) {
      if (e.request_id == id && e.is_final != 0) return e;
    }
    CHECK(false);
    return events[0];
  }
  int32_t NumTokens(uint64_t id) const {
    int32_t n = 0;
    for (const psm_event& e : events) n += e.request_id == id && e.kind == PSM_EVENT_TOKEN;
    return n;
  }

  fake_executor fake;
  psm_engine* engine = nullptr;
  std::vector<psm_event> events;
  int64_t num_drawn = 0, num_given = 0;

 private:
  void Create(const psm_executor& table, bool manual) {
    psm_engine_options o;
    psm_engine_options_init(&o);
    o.manual_step = manual;
    CHECK_OK(psm_engine_create(&table, &o, &engine));
  }
};

}  // namespace plansmith
