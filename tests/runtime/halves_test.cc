// Executors with launch and collect, through the public API: the same tokens as through step, what
// happens between the halves, and what happens when one of them fails.
//
// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "fake_executor.h"
#include "halves_bench.h"
#include "halves_executor.h"

namespace {

using plansmith::Ask;
using plansmith::Bench;
using plansmith::HalvesExecutor;

// Everything but times, and logits by value.
void CheckSame(const psm_event& a, const psm_event& b) {
  CHECK(a.kind == b.kind && a.token_id == b.token_id && a.output_idx == b.output_idx);
  CHECK(a.finish_reason == b.finish_reason && a.status == b.status);
  CHECK(a.sequence_idx == b.sequence_idx && a.is_final == b.is_final);
  CHECK(a.logprob == b.logprob && a.cum_logprob == b.cum_logprob);
  CHECK(a.num_top_logprobs == b.num_top_logprobs);
  for (int32_t i = 0; i < a.num_top_logprobs; ++i) {
    CHECK(a.top_ids[i] == b.top_ids[i] && a.top_logprobs[i] == b.top_logprobs[i]);
  }
  CHECK((a.logits == nullptr) == (b.logits == nullptr));
  if (a.logits != nullptr) CHECK(std::memcmp(a.logits, b.logits, 101 * sizeof(float)) == 0);
}

psm_status Boost(void*, uint64_t, int32_t, const int32_t*, int32_t n, float* logits, int32_t) {
  logits[n % 101] += 6.0f;
  return PSM_OK;
}

// Each parameter by itself: the same events, and it is the executor that draws, unless it cannot.
void TestSameTokens() {
  struct Case {
    std::function<void(Ask*)> set;
    bool is_drawn = true;
  };
  const Case cases[] = {
      {[](Ask*) {}},
      {[](Ask* a) { a->request.temperature = 0.0f; }},
      {[](Ask* a) { a->request.top_k = 1; }},
      {[](Ask* a) { a->request.top_k = 7, a->request.seed = uint64_t{1} << 40; }},
      {[](Ask* a) { a->request.top_p = 0.7f; }},
      {[](Ask* a) { a->request.min_p = 0.2f; }},
      {[](Ask* a) { a->request.num_logprobs = 5; }},
      {[](Ask* a) { a->request.num_logprobs = PSM_MAX_TOP_LOGPROBS, a->request.temperature = 0; }},
      {[](Ask* a) { a->request.repetition_penalty = 1.5f, a->request.temperature = 0; }},
      {[](Ask* a) { a->request.presence_penalty = 2.0f; }},
      {[](Ask* a) { a->request.frequency_penalty = -1.0f; }},
      {[](Ask* a) { a->bias_ids = {40, 3}, a->bias = {9.0f, -2.0f}; }},
      {[](Ask* a) { a->bad_ids = {8, 1, 7, 2}, a->bad_ends = {1, 4}; }},
      {[](Ask* a) { a->request.no_repeat_ngram_size = 1; }},
      {[](Ask* a) { a->request.no_repeat_ngram_size = 2, a->request.top_k = 3; }},
      {[](Ask* a) {
        for (int32_t id = 0; id < 90; ++id) a->end_ids.push_back(id);
        a->request.min_tokens = 12;
      }},
      {[](Ask* a) {
        a->request.top_p = 0.9f, a->request.top_p_decay = 0.7f, a->request.top_p_min = 0.1f;
        a->request.top_p_reset_id = 5;
      }},
      {[](Ask* a) { a->request.num_return_sequences = 3; }},
      {[](Ask* a) { a->draft = {1, 2, 3}; }},
      {[](Ask* a) { a->bias_ids = {3, 3}, a->bias = {1.0f, 2.5f}; }, false},
      {[](Ask* a) { a->request.logits_processor = Boost; }, false},
      {[](Ask* a) { a->request.return_generation_logits = 1; }, false},
      {[](Ask* a) { a->request.beam_width = 3; }, false},
  };
  for (const Case& c : cases) {
    Ask ask;
    c.set(&ask);
    Bench plain(false), halves(true), given(true, [](HalvesExecutor* h) { h->draws = false; });
    for (Bench* bench : {&plain, &halves, &given}) {
      bench->Submit(&ask);
      bench->Drain();
      CHECK(bench->events.back().kind == PSM_EVENT_FINISHED);
    }
    for (Bench* bench : {&halves, &given}) {
      CHECK(bench->events.size() == plain.events.size());
      for (size_t i = 0; i < plain.events.size(); ++i) CheckSame(plain.events[i], bench->events[i]);
    }
    CHECK((halves.num_drawn > 0) == c.is_drawn && (halves.num_given > 0) == !c.is_drawn);
    CHECK(given.num_drawn == 0 && given.num_given > 0);
    for (Bench* bench : {&plain, &halves, &given}) {
      for (const psm_event& e : bench->events) psm_logits_free(e.logits);
    }
  }
}

// The prompt's rows are wanted as logits; what follows them is drawn by the executor again.
void TestPromptRows() {
  Ask ask;
  ask.request.num_prompt_logprobs = 2;
  Bench plain(false), halves(true);
  for (Bench* bench : {&plain, &halves}) {
    bench->Submit(&ask);
    bench->Drain();
  }
  CHECK(plain.events.size() == halves.events.size());
  for (size_t i = 0; i < plain.events.size(); ++i) CheckSame(plain.events[i], halves.events[i]);
  CHECK(halves.num_given == 4 && halves.num_drawn == 19);
}

// One beam search in a step makes its rows logits; the others' tokens stay what they are.
void TestMixedStep() {
  Ask ask, beams;
  ask.request.repetition_penalty = 1.2f;
  beams.request.beam_width = 2, beams.request.max_tokens = 6;
  Bench plain(false), halves(true);
  for (Bench* bench : {&plain, &halves}) {
    bench->Submit(&ask);
    bench->Submit(&beams);
    bench->Drain();
  }
  CHECK(plain.events.size() == halves.events.size());
  for (size_t i = 0; i < plain.events.size(); ++i) CheckSame(plain.events[i], halves.events[i]);
  CHECK(halves.num_given > 0 && halves.num_drawn > 0);
}

// Rows behind drafts that are right have them in their history, and take the edits back after it.
void TestDraftsWithPenalties() {
  Ask ask;
  ask.request.repetition_penalty = 1.6f, ask.request.frequency_penalty = 0.8f;
  ask.request.no_repeat_ngram_size = 2;
  Bench plain(false), halves(true);
  plain.Submit(&ask);
  plain.Drain();
  for (const psm_event& e : plain.events) {
    if (e.kind == PSM_EVENT_TOKEN) ask.draft.push_back(e.token_id);
  }
  ask.draft[12] = (ask.draft[12] + 1) % 101;  // and from there on they are wrong
  const uint64_t id = halves.Submit(&ask);
  halves.Drain();
  CHECK(plain.events.size() == halves.events.size());
  for (size_t i = 0; i < plain.events.size(); ++i) CheckSame(plain.events[i], halves.events[i]);
  // A step has 8 rows: 7 drafts and the token behind them, then 4 before the wrong one.
  const psm_request_stats& stats = halves.End(id).stats;
  CHECK(stats.num_draft_tokens == 14 && stats.num_accepted_draft_tokens == 11);
  CHECK(halves.num_given == 0 && halves.num_drawn == 20 + 3);  // the refused ones' were for nothing
}

void TestFailures() {
  const struct {
    Bench::Change change;
    const char* text;
  } cases[] = {
      {[](HalvesExecutor* h) { h->fail_launch = 3; }, "the launch fell over"},
      {[](HalvesExecutor* h) { h->fail_collect = 3; }, "the device was lost"},
  };
  for (const auto& c : cases) {
    Ask ask;
    Bench bench(true, c.change);
    const uint64_t first = bench.Submit(&ask);
    for (int i = 0; i < 3; ++i) CHECK(bench.Step());
    CHECK(bench.End(first).kind == PSM_EVENT_FAILED);
    CHECK(bench.End(first).status == PSM_ERROR_EXECUTOR);
    CHECK(std::strstr(bench.End(first).message, c.text) != nullptr);
    CHECK(std::strstr(bench.End(first).message, "PSM_ERROR_CUDA") != nullptr);
    CHECK(bench.NumTokens(first) == 2);
    const uint64_t second = bench.Submit(&ask);  // the engine goes on
    bench.Drain();
    CHECK(bench.End(second).kind == PSM_EVENT_FINISHED && bench.NumTokens(second) == 20);
  }
}

// Whatever a row cannot give is said with the words it is said with when the core draws.
void TestRowsWithoutToken() {
  const std::function<void(Ask*)> sets[] = {
      [](Ask* a) {
        for (int32_t id = 0; id < 101; ++id) {
          a->bias_ids.push_back(id);
          a->bias.push_back(-std::numeric_limits<float>::infinity());
        }
      },
      [](Ask* a) {
        a->request.repetition_penalty = 1e-38f;
        for (int32_t id = 0; id < 90; ++id) a->prompt.push_back(id);
      },
  };
  for (const auto& set : sets) {
    Ask bad, good;
    set(&bad);
    Bench plain(false), halves(true);
    for (Bench* bench : {&plain, &halves}) {
      const uint64_t bad_id = bench->Submit(&bad), good_id = bench->Submit(&good);
      bench->Drain();
      CHECK(bench->End(bad_id).status == PSM_ERROR_INVALID_ARGUMENT);
      CHECK(std::strcmp(bench->End(bad_id).message, plain.End(bad_id).message) == 0);
      CHECK(bench->End(good_id).kind == PSM_EVENT_FINISHED);
    }
    CHECK(halves.num_drawn > 0 && halves.num_given == 0);
  }
  Ask ask;
  Bench halves(true);
  halves.fake.nan_at_step = 1;
  const uint64_t first = halves.Submit(&ask), second = halves.Submit(&ask);
  halves.Drain();
  int32_t num_failed = 0;
  for (const uint64_t id : {first, second}) {
    if (halves.End(id).kind != PSM_EVENT_FAILED) continue;
    ++num_failed;
    CHECK(halves.End(id).status == PSM_ERROR_EXECUTOR);
    CHECK(std::strstr(halves.End(id).message, "NaN") != nullptr);
  }
  CHECK(num_failed == 1);
}

// An executor that leaves a row out, or gives nonsense, fails the request and nothing else.
void TestWrongDraws() {
  struct Liar {
    psm_executor inner;
    int32_t token;
    static Liar* At(void* self) { return static_cast<Liar*>(self); }
  };
  for (const int32_t token : {-9, 101, 1 << 30, int32_t{PSM_ROW_BAD_LOGITS}}) {
    fake_executor fake;
    fake_executor_init(&fake);
    Liar liar{HalvesExecutor::Table(new HalvesExecutor(fake_executor_table(&fake))), token};
    psm_executor table = liar.inner;
    table.self = &liar;
    table.describe = [](void* s, psm_model_info* i) {
      return Liar::At(s)->inner.describe(Liar::At(s)->inner.self, i);
    };
    table.open = [](void* s, int32_t n) {
      return Liar::At(s)->inner.open(Liar::At(s)->inner.self, n);
    };
    table.launch = [](void* s, const psm_batch* b) {
      return Liar::At(s)->inner.launch(Liar::At(s)->inner.self, b);
    };
    table.copy_blocks = nullptr;
    table.collect = [](void* s, const psm_step_sampling* sampling, psm_row_sample* samples,
                       const float** logits) {
      std::vector<psm_row_sample> own(8);
      psm_row_sample* to = sampling == nullptr ? nullptr : own.data();
      const psm_status status =
          Liar::At(s)->inner.collect(Liar::At(s)->inner.self, sampling, to, logits);
      // The first row is a lie, or not written at all.
      if (sampling != nullptr) {
        if (Liar::At(s)->token != PSM_ROW_BAD_LOGITS) samples[0].token = Liar::At(s)->token;
        std::copy(own.begin() + 1, own.begin() + sampling->num_rows, samples + 1);
      }
      return status;
    };
    table.close = [](void* s) { Liar::At(s)->inner.close(Liar::At(s)->inner.self); };
    table.last_error = nullptr;
    {
      Bench bench(table);
      Ask ask;
      bench.Submit(&ask);
      bench.Submit(&ask);
      CHECK(bench.Step());
      int32_t num_failed = 0;
      for (const psm_event& e : bench.events) num_failed += e.status == PSM_ERROR_EXECUTOR;
      CHECK(num_failed == 1);
      psm_engine_stats stats;
      stats.struct_size = PSM_ENGINE_STATS_SIZE;
      CHECK_OK(psm_engine_get_stats(bench.engine, &stats));
      CHECK(stats.num_active_requests == 1);
    }
    fake_executor_free(&fake);
  }
}

// The step in flight ends as it would have; what was asked meanwhile comes in the next one.
void TestCallsBetweenTheHalves() {
  struct Context {
    psm_engine* engine = nullptr;
    Ask ask;
    uint64_t cancel = 0, submitted = 0;
    int32_t num_calls = 0;
  } context;
  Bench bench(true, [&](HalvesExecutor* h) {
    h->between_context = &context;
    h->between = [](void* c) {
      Context* context = static_cast<Context*>(c);
      if (++context->num_calls != 3) return;
      CHECK(psm_engine_shutdown(context->engine) == PSM_ERROR_INVALID_ARGUMENT);
      int32_t did_work;
      CHECK(psm_engine_step(context->engine, &did_work) == PSM_ERROR_INVALID_ARGUMENT);
      CHECK_OK(psm_engine_cancel(context->engine, context->cancel));
      CHECK_OK(psm_engine_submit(context->engine, &context->ask.Get(), &context->submitted));
    };
  });
  context.engine = bench.engine;
  Ask ask;
  context.cancel = bench.Submit(&ask);
  bench.Drain();
  CHECK(bench.End(context.cancel).finish_reason == PSM_FINISH_CANCELLED);
  CHECK(bench.NumTokens(context.cancel) == 3);  // that of the step in flight too
  CHECK(bench.NumTokens(context.submitted) == 20);
}

// A shutdown while the device works waits for the step, and everybody gets an end.
void TestShutdownBetweenTheHalves() {
  std::atomic<int32_t> num_launched{0};
  Bench bench(
      true,
      [&](HalvesExecutor* h) {
        h->is_async = true;
        h->between_context = &num_launched;
        h->between = [](void* c) {
          ++*static_cast<std::atomic<int32_t>*>(c);
          std::this_thread::sleep_for(std::chrono::milliseconds(2));
        };
      },
      false);
  Ask ask;
  ask.request.max_tokens = 100;
  const uint64_t first = bench.Submit(&ask), second = bench.Submit(&ask);
  while (num_launched < 3) std::this_thread::yield();
  CHECK_OK(psm_engine_shutdown(bench.engine));
  bench.Poll();
  for (const uint64_t id : {first, second}) {
    CHECK(bench.End(id).kind == PSM_EVENT_FAILED && bench.End(id).status == PSM_ERROR_SHUTDOWN);
    int32_t next = 0;  // in order, none missing
    for (const psm_event& e : bench.events) {
      if (e.request_id == id && e.kind == PSM_EVENT_TOKEN) CHECK(e.output_idx == next++);
    }
    CHECK(next >= 2 && next == bench.End(id).stats.num_generated_tokens);
  }
}

int64_t clock_ns = 0;

// The executor's time is that from launch to the end of collect, in its own clock.
void TestTimes() {
  fake_executor fake;
  fake_executor_init(&fake);
  clock_ns = 1000;
  psm_executor table = fake_executor_table(&fake);
  table.step = nullptr;
  table.now_ns = [](void*) { return clock_ns; };
  table.launch = [](void*, const psm_batch*) -> psm_status {
    clock_ns += 2000000;
    return PSM_OK;
  };
  table.collect = [](void*, const psm_step_sampling* sampling, psm_row_sample*,
                     const float** logits) -> psm_status {
    static const float row[101] = {0.0f, 1.0f};
    CHECK(sampling == nullptr);
    clock_ns += 5000000;
    *logits = row;
    return PSM_OK;
  };
  {
    Bench bench(table);
    Ask ask;
    ask.request.max_tokens = 3;
    bench.Submit(&ask);
    bench.Drain();
    psm_engine_stats stats;
    stats.struct_size = PSM_ENGINE_STATS_SIZE;
    CHECK_OK(psm_engine_get_stats(bench.engine, &stats));
    CHECK(stats.iter == 3 && stats.step_time_ns == 3 * 7000000);
    psm_iteration_stats records[4];
    size_t n;
    CHECK_OK(psm_engine_iteration_stats(bench.engine, records, 4, &n));
    CHECK(n == 3 && records[0].executor_latency_ms == 7.0 && records[0].iter_latency_ms == 7.0);
  }
  fake_executor_free(&fake);
}

void CheckRefused(const psm_executor& table, const char* text,
                  psm_status status = PSM_ERROR_INVALID_ARGUMENT) {
  psm_engine* engine;
  CHECK(psm_engine_create(&table, nullptr, &engine) == status);
  if (std::strstr(psm_last_error(), text) == nullptr) {
    fprintf(stderr, "got: %s\nwanted: %s\n", psm_last_error(), text);
    CHECK(false);
  }
}

// What may be missing, and tables of before ABI 1.2.
void TestTables() {
  fake_executor fake;
  fake_executor_init(&fake);
  fake.info.samples_rows = 1;  // not looked at without collect
  const psm_executor whole = fake_executor_table(&fake);
  psm_executor table = whole;
  table.step = nullptr;
  CheckRefused(table, "psm_executor.step is NULL");
  table = whole;
  table.launch = [](void*, const psm_batch*) -> psm_status { return PSM_OK; };
  CheckRefused(table, "psm_executor.collect is NULL but launch is not");
  table = whole;
  table.collect = [](void*, const psm_step_sampling*, psm_row_sample*,
                     const float**) -> psm_status { return PSM_OK; };
  CheckRefused(table, "psm_executor.launch is NULL but collect is not");
  table = HalvesExecutor::Table(new HalvesExecutor(whole));
  table.describe = [](void*, psm_model_info* info) -> psm_status {
    fake_executor described;
    fake_executor_init(&described);
    *info = described.info;
    info->struct_size = PSM_MODEL_INFO_SIZE;
    info->samples_rows = 2;
    fake_executor_free(&described);
    return PSM_OK;
  };
  CheckRefused(table, "samples_rows = 2, 0 or 1 is wanted of one with collect", PSM_ERROR_EXECUTOR);
  table.close(table.self);
  // A table that ends with now_ns, and one with unload_adapter: what lies behind them is not read.
  for (const size_t size :
       {PSM_SIZE_UP_TO_(psm_executor, now_ns), PSM_SIZE_UP_TO_(psm_executor, unload_adapter)}) {
    fake_executor old_fake;
    fake_executor_init(&old_fake);
    old_fake.info.samples_rows = 1;
    table = fake_executor_table(&old_fake);
    std::memset(reinterpret_cast<char*>(&table) + size, 0x5a, sizeof table - size);
    table.struct_size = size;
    {
      Bench bench(table);
      Ask ask;
      const uint64_t id = bench.Submit(&ask);
      bench.Drain();
      CHECK(bench.NumTokens(id) == 20);
      psm_model_info info;
      info.struct_size = PSM_MODEL_INFO_SIZE;
      CHECK_OK(psm_engine_model_info(bench.engine, &info));
      CHECK(info.samples_rows == 0);
    }
    fake_executor_free(&old_fake);
  }
  fake_executor_free(&fake);
  // The executors of the library write what psm_executor was in ABI 1.1, and not a byte more.
  psm_simulated_options options;
  psm_simulated_options_init(&options);
  psm_executor out;
  std::memset(static_cast<void*>(&out), 0x5a, sizeof out);
  CHECK_OK(psm_simulated_executor_create(&options, &out));
  CHECK(out.struct_size == PSM_SIZE_UP_TO_(psm_executor, now_ns));
  const unsigned char* bytes = reinterpret_cast<const unsigned char*>(&out);
  for (size_t i = out.struct_size; i < sizeof out; ++i) CHECK(bytes[i] == 0x5a);
  out.close(out.self);
  std::memset(static_cast<void*>(&out), 0x5a, sizeof out);
  CHECK(psm_cpu_executor_create("/nowhere/model.plan", nullptr, &out) != PSM_OK);
  for (size_t i = PSM_SIZE_UP_TO_(psm_executor, now_ns); i < sizeof out; ++i)
    CHECK(bytes[i] == 0x5a);
}

}  // namespace

int main() {
  TestSameTokens();
  TestPromptRows();
  TestMixedStep();
  TestDraftsWithPenalties();
  TestFailures();
  TestRowsWithoutToken();
  TestWrongDraws();
  TestCallsBetweenTheHalves();
  TestShutdownBetweenTheHalves();
  TestTimes();
  TestTables();
  return 0;
}
