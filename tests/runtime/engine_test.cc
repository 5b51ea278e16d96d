// The engine as a whole over the fake executor: a request's tokens are its own, whatever else
// happens; blocks and lists balance after every operation; a steady step allocates nothing.
//
// SPDX-License-Identifier: Apache-2.0
#include "engine.h"

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <new>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "fake_executor.h"
#include "request_check.h"
#include "status.h"

static std::atomic<long> num_news{0};
// While memory is short: so many calls of new succeed, then so many fail, then all succeed.
static std::atomic<bool> memory_is_short{false};
static long news_left = 0;
static long failures_left = 0;
static std::atomic<size_t> largest_new{SIZE_MAX};  // more at once fails

// Not inlined: GCC would take malloc and free behind new and delete for a mismatch.
__attribute__((noinline)) void* operator new(size_t size) {
  ++num_news;
  if (size > largest_new) throw std::bad_alloc();
  if (memory_is_short && --news_left < 0 && failures_left > 0) {
    --failures_left;
    throw std::bad_alloc();
  }
  void* p = std::malloc(size == 0 ? 1 : size);
  if (p == nullptr) throw std::bad_alloc();
  return p;
}
__attribute__((noinline)) void operator delete(void* p) noexcept { std::free(p); }
__attribute__((noinline)) void operator delete(void* p, size_t) noexcept { std::free(p); }

namespace {

using plansmith::Engine;
using plansmith::EngineConfig;

struct Spec {
  std::vector<int32_t> prompt;
  std::vector<int32_t> end_ids;
  std::vector<int32_t> stop_ids, stop_ends;
  psm_request request;

  const psm_request& Get() {
    request.prompt_ids = prompt.data();
    request.num_prompt_ids = static_cast<int32_t>(prompt.size());
    request.end_ids = end_ids.data();
    request.num_end_ids = static_cast<int32_t>(end_ids.size());
    request.stop_words = {stop_ids.data(), stop_ends.data(),
                          static_cast<int32_t>(stop_ends.size())};
    return request;
  }
};

Spec RandomSpec(std::mt19937* random, int32_t max_prompt, int32_t max_len) {
  const auto pick = [&](int32_t n) {
    return static_cast<int32_t>((*random)() % static_cast<uint32_t>(n));
  };
  Spec spec;
  psm_request_init(&spec.request);
  for (int32_t n = 1 + pick(max_prompt); n > 0; --n) spec.prompt.push_back(pick(101));
  const int32_t room = max_len - static_cast<int32_t>(spec.prompt.size());
  spec.request.max_tokens = 1 + pick(room);
  spec.request.temperature = pick(3) == 0 ? 0.0f : 0.5f + static_cast<float>(pick(10)) * 0.1f;
  spec.request.seed = (*random)();
  spec.request.top_k = pick(3) * 10;
  spec.request.top_p = pick(2) ? 1.0f : 0.9f;
  spec.request.priority = static_cast<float>(pick(4)) / 4.0f;
  if (pick(2)) spec.request.repetition_penalty = 1.3f;
  if (pick(3) == 0) spec.request.frequency_penalty = 0.4f;
  if (pick(4) == 0) spec.request.num_logprobs = 3;
  if (pick(3) == 0) spec.end_ids = {pick(101), pick(101), pick(101)};
  if (pick(3) == 0) {
    spec.request.min_tokens = pick(spec.request.max_tokens);
    spec.stop_ids = {pick(101), pick(101), pick(101)};
    spec.stop_ends = {1, 3};
  }
  return spec;
}

struct Options {
  int32_t policy = PSM_GUARANTEED_NO_EVICT;
  int32_t budget = 32;
  int32_t batch = 8;
  int32_t num_blocks = 1000;
  int32_t chunked = 1;
};

// An engine that is stepped by hand, and what it has said about each request.
class Harness {
 public:
  struct Outcome {
    std::vector<int32_t> tokens;
    std::vector<float> logprobs;
    int32_t finish_reason = -1;
    psm_status status = PSM_OK;
    bool done = false;
    int32_t num_pauses = 0;
  };

  explicit Harness(const Options& options) {
    fake_executor_init(&fake_);
    EngineConfig config{};
    config.executor = fake_executor_table(&fake_);
    config.info = fake_.info;
    config.info.max_num_tokens = options.budget;
    config.info.max_batch_size = std::min(options.batch, options.budget);
    psm_engine_options_init(&config.options);
    config.options.scheduler_policy = options.policy;
    config.options.enable_chunked_context = options.chunked;
    config.options.manual_step = 1;
    config.options.max_queue_size = 100000;
    config.num_blocks = options.num_blocks;
    engine_ = std::make_unique<Engine>(config);
  }
  ~Harness() {
    engine_.reset();
    CHECK(fake_.is_closed == 1);
    fake_executor_free(&fake_);
  }

  uint64_t Submit(const psm_request& request) {
    return engine_->Submit(plansmith::CheckRequest(request, engine_->config()));
  }
  bool Step() {
    const bool ran = engine_->StepOnce();
    Drain();
    return ran;
  }
  void Drain() {
    for (;;) {
      const int64_t n = engine_->events().Poll(events_, 32, 0);
      if (n <= 0) return;
      for (int64_t i = 0; i < n; ++i) Take(events_[i]);
    }
  }

  Engine& engine() { return *engine_; }
  fake_executor& fake() { return fake_; }
  std::map<uint64_t, Outcome> outcomes;

 private:
  void Take(const psm_event& event) {
    Outcome& outcome = outcomes[event.request_id];
    CHECK(!outcome.done);
    if (event.kind == PSM_EVENT_TOKEN) {
      CHECK(event.output_idx ==
            static_cast<int32_t>(outcome.tokens.size()));  // none twice, none left out
      outcome.tokens.push_back(event.token_id);
      outcome.logprobs.push_back(event.logprob);
      return;
    }
    outcome.done = true;
    outcome.finish_reason = event.finish_reason;
    outcome.status = event.status;
    outcome.num_pauses = event.stats.num_pauses;
    CHECK(event.stats.num_generated_tokens == static_cast<int32_t>(outcome.tokens.size()));
  }

  fake_executor fake_;
  std::unique_ptr<Engine> engine_;
  psm_event events_[32];
};

Harness::Outcome RunAlone(Spec* spec) {
  Harness h(Options{});
  const uint64_t id = h.Submit(spec->Get());
  while (h.Step()) {
  }
  CHECK(h.outcomes[id].done && h.outcomes[id].status == PSM_OK);
  return h.outcomes[id];
}

bool IsPrefix(const std::vector<int32_t>& a, const std::vector<int32_t>& b) {
  return a.size() <= b.size() && std::equal(a.begin(), a.end(), b.begin());
}

// Tokens alone = tokens among neighbours, for every budget from 1 on, both policies, few and many
// blocks.
void TestBatchInvariance() {
  std::mt19937 random(5);
  std::vector<Spec> specs;
  std::vector<Harness::Outcome> alone;
  for (int i = 0; i < 24; ++i) {
    specs.push_back(RandomSpec(&random, 50, 80));
    alone.push_back(RunAlone(&specs.back()));
  }
  int num_pauses = 0;
  for (int32_t budget = 1; budget <= 32; ++budget) {
    for (int32_t policy : {PSM_GUARANTEED_NO_EVICT, PSM_MAX_UTILIZATION}) {
      for (int32_t num_blocks : {20, 31, 200}) {  // 80 positions take 20 blocks of 4
        Options options;
        options.policy = policy;
        options.budget = budget;
        options.num_blocks = num_blocks;
        Harness h(options);
        std::vector<uint64_t> ids;
        for (Spec& spec : specs) ids.push_back(h.Submit(spec.Get()));
        while (h.Step()) h.engine().CheckInvariants();
        for (size_t i = 0; i < specs.size(); ++i) {
          const Harness::Outcome& got = h.outcomes[ids[i]];
          CHECK(got.done && got.status == PSM_OK && got.finish_reason == alone[i].finish_reason);
          CHECK(got.tokens == alone[i].tokens && got.logprobs == alone[i].logprobs);
          num_pauses += got.num_pauses;
        }
        CHECK(h.engine().Stats().used_num_blocks == 0);
      }
    }
  }
  CHECK(num_pauses > 100);  // or the small caches tested nothing
}

// Submits, steps, cancels, executor failures in random order.
void TestRandomOperations() {
  int operations = 0;
  int cancelled = 0, failed = 0, finished = 0;
  for (uint32_t seed = 0; seed < 24; ++seed) {
    std::mt19937 random(seed);
    Options options;
    options.policy = seed % 2 ? PSM_MAX_UTILIZATION : PSM_GUARANTEED_NO_EVICT;
    options.budget = 4 + static_cast<int32_t>(random() % 29);
    options.batch = 1 + static_cast<int32_t>(random() % 8);
    options.num_blocks = 12 + static_cast<int32_t>(random() % 20);
    Harness h(options);
    std::map<uint64_t, Spec> specs;
    std::vector<uint64_t> ids;
    for (int i = 0; i < 250; ++i, ++operations) {
      switch (random() % 8) {
        case 0:
        case 1: {
          Spec spec = RandomSpec(&random, 30, 45);
          const uint64_t id = h.Submit(spec.Get());
          specs[id] = spec;
          ids.push_back(id);
          break;
        }
        case 2:
          if (!ids.empty()) {
            const uint64_t id = ids[random() % ids.size()];
            try {
              h.engine().Cancel(id);
              CHECK(!h.outcomes[id].done);
            } catch (const plansmith::StatusError& e) {
              CHECK(e.code() == PSM_ERROR_NOT_FOUND && h.outcomes[id].done);
            }
          }
          break;
        case 3:
          if (random() % 16 == 0) h.fake().fail_at_step = h.fake().num_steps;
          break;
        default:
          h.Step();
      }
      h.engine().CheckInvariants();
    }
    while (h.Step()) h.engine().CheckInvariants();
    for (auto& [id, spec] : specs) {
      const Harness::Outcome& got = h.outcomes[id];
      CHECK(got.done);
      const Harness::Outcome alone = RunAlone(&spec);
      if (got.status == PSM_ERROR_EXECUTOR) {
        ++failed;
        CHECK(IsPrefix(got.tokens, alone.tokens));
      } else if (got.finish_reason == PSM_FINISH_CANCELLED) {
        ++cancelled;
        CHECK(IsPrefix(got.tokens, alone.tokens));
      } else {
        ++finished;
        CHECK(got.status == PSM_OK && got.tokens == alone.tokens &&
              got.finish_reason == alone.finish_reason);
      }
    }
    const psm_engine_stats stats = h.engine().Stats();
    CHECK(stats.used_num_blocks == 0 && stats.num_active_requests == 0 &&
          stats.num_queued_requests == 0);
    CHECK(stats.num_completed_requests == specs.size() &&
          stats.num_submitted_requests == specs.size());
  }
  CHECK(operations >= 2000 && cancelled > 50 && failed > 10 && finished > 500);
}

// The event that ends one request on an engine whose executor has `step`.
psm_event LastEventWith(psm_status (*step)(void*, const psm_batch*, const float**)) {
  fake_executor fake;
  fake_executor_init(&fake);
  EngineConfig config{};
  config.executor = fake_executor_table(&fake);
  config.executor.step = step;
  config.info = fake.info;
  config.num_blocks = 50;
  psm_engine_options_init(&config.options);
  config.options.manual_step = 1;
  psm_event events[4];
  {
    Engine engine(config);
    std::mt19937 random(8);
    Spec spec = RandomSpec(&random, 5, 10);
    for (int round = 0; round < 2; ++round) {  // the engine lives on
      engine.Submit(plansmith::CheckRequest(spec.Get(), engine.config()));
      CHECK(engine.StepOnce());
      CHECK(engine.events().Poll(events, 4, 0) == 1);
      engine.CheckInvariants();
      CHECK(engine.Stats().used_num_blocks == 0);
    }
  }
  fake_executor_free(&fake);
  CHECK(events[0].kind == PSM_EVENT_FAILED && events[0].status == PSM_ERROR_EXECUTOR);
  return events[0];
}

bool Contains(const char* text, const char* part) { return std::strstr(text, part) != nullptr; }

void TestMisbehavingExecutors() {
  const psm_event threw =
      LastEventWith([](void*, const psm_batch*, const float**) -> psm_status { throw 7; });
  CHECK(Contains(threw.message, "threw an exception"));
  const psm_event null =
      LastEventWith([](void*, const psm_batch*, const float**) -> psm_status { return PSM_OK; });
  CHECK(Contains(null.message, "NULL"));
  // A text longer than a message holds is cut between characters, not inside one.
  const psm_event wordy =
      LastEventWith([](void* self, const psm_batch*, const float**) -> psm_status {
        char* error = static_cast<fake_executor*>(self)->error;
        for (int i = 0; i < 99; ++i) std::memcpy(error + 2 * i, "\xc3\xa9", 3);
        return PSM_ERROR_CUDA;
      });
  const size_t length = std::strlen(wordy.message);
  CHECK(length >= PSM_MAX_ERROR_TEXT - 2 && length < PSM_MAX_ERROR_TEXT);
  CHECK(wordy.message[length - 1] == '\xa9');
  const psm_event shifted =
      LastEventWith([](void* self, const psm_batch*, const float**) -> psm_status {
        char* error = static_cast<fake_executor*>(self)->error;
        error[0] = '!';  // one byte on: one of the two texts would be cut inside a character
        for (int i = 0; i < 99; ++i) std::memcpy(error + 1 + 2 * i, "\xc3\xa9", 3);
        return PSM_ERROR_CUDA;
      });
  CHECK(shifted.message[std::strlen(shifted.message) - 1] == '\xa9');
}

// Each sequence's message names the request by the id that its caller has.
void TestMessagesNameTheRequest() {
  Harness h(Options{});
  std::vector<int32_t> ids(101);
  std::iota(ids.begin(), ids.end(), 0);
  const std::vector<float> forbidden(ids.size(), -INFINITY);
  Spec spec;
  psm_request_init(&spec.request);
  spec.prompt = {1, 2, 3};
  spec.request.num_return_sequences = 2;
  spec.request.logit_bias_ids = ids.data();
  spec.request.logit_bias_values = forbidden.data();
  spec.request.num_logit_bias = 101;
  for (int round = 0; round < 2; ++round) {
    const uint64_t id = h.engine().Submit(plansmith::CheckRequest(spec.Get(), h.engine().config()));
    while (h.engine().StepOnce()) {
    }
    psm_event events[4];
    CHECK(h.engine().events().Poll(events, 4, 0) == 2);
    for (int i = 0; i < 2; ++i) {
      CHECK(events[i].kind == PSM_EVENT_FAILED && events[i].request_id == id);
      CHECK(Contains(events[i].message, ("request " + std::to_string(id) + " forbids").c_str()));
    }
  }
}

// The rows of a prompt come once, and once is it computed, however many sequences it has.
void TestRowsOfASharedPrompt() {
  Harness h(Options{});
  Spec spec;
  psm_request_init(&spec.request);
  spec.prompt = {1, 2, 3, 4, 5, 6, 7, 8, 9};
  spec.request.num_return_sequences = 3;
  spec.request.max_tokens = 1;
  spec.request.num_prompt_logprobs = 0;
  h.engine().Submit(plansmith::CheckRequest(spec.Get(), h.engine().config()));
  while (h.engine().StepOnce()) {
  }
  psm_event events[32];
  CHECK(h.engine().events().Poll(events, 32, 0) == 9 + 3 * 2);
  for (int i = 0; i < 9; ++i) {
    CHECK(events[i].kind == PSM_EVENT_CONTEXT && events[i].sequence_idx == 0);
    CHECK(events[i].output_idx == i);
  }
  CHECK(h.engine().Stats().num_prompt_tokens == 9 + 2);  // the others begin at the last block
}

// Copies that throw fail what runs, and nothing that they may have spoilt is used again.
void TestCopiesThatThrow() {
  fake_executor fake;
  fake_executor_init(&fake);
  EngineConfig config{};
  config.executor = fake_executor_table(&fake);
  config.executor.copy_blocks = [](void*, const psm_block_copy*, size_t) -> psm_status { throw 7; };
  config.info = fake.info;
  config.num_blocks = 50;
  config.can_copy = true;
  psm_engine_options_init(&config.options);
  config.options.manual_step = 1;
  {
    Engine engine(config);
    Spec spec;
    psm_request_init(&spec.request);
    spec.prompt = {1, 2, 3, 4, 5, 6, 7};  // a block and a part, which the second request copies
    for (int round = 0; round < 3; ++round) {
      engine.Submit(plansmith::CheckRequest(spec.Get(), config));
      while (engine.StepOnce()) engine.CheckInvariants();
      psm_event events[64];
      const int64_t n = engine.events().Poll(events, 64, 0);
      CHECK(n > 0 && events[n - 1].is_final == 1);
      CHECK(events[n - 1].kind == (round == 1 ? PSM_EVENT_FAILED : PSM_EVENT_FINISHED));
      if (round == 1) CHECK(Contains(events[n - 1].message, "could not copy"));
      CHECK(events[n - 1].stats.reused_blocks == (round == 1 ? 1 : 0));
    }
  }
  fake_executor_free(&fake);
}

// Adapters come and go between two steps of an engine that never rests.
void TestAdaptersOfABusyEngine() {
  fake_executor fake;
  fake_executor_init(&fake);
  EngineConfig config{};
  config.executor = fake_executor_table(&fake);
  config.executor.step = [](void* self, const psm_batch* batch, const float** logits) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    fake_executor* own = static_cast<fake_executor*>(self);
    return fake_executor_table(own).step(own, batch, logits);
  };
  config.executor.load_adapter = [](void*, int32_t, const psm_lora_module*, size_t) -> psm_status {
    return PSM_OK;
  };
  config.executor.unload_adapter = [](void*, int32_t) -> psm_status { return PSM_OK; };
  config.info = fake.info;
  config.info.max_adapters = 1;
  config.num_blocks = 1000;
  psm_engine_options_init(&config.options);
  {
    Engine engine(config);
    Spec spec;
    psm_request_init(&spec.request);
    spec.prompt = {1, 2, 3};
    spec.request.max_tokens = 80;
    for (int i = 0; i < 40; ++i) engine.Submit(plansmith::CheckRequest(spec.Get(), config));
    while (engine.Stats().iter == 0) std::this_thread::yield();
    for (uint64_t id = 1; id <= 10; ++id) {
      engine.LoadAdapter(id, nullptr, 0);
      engine.UnloadAdapter(id);
    }
    // 40 requests of 80 tokens in a batch of 8 take 400 steps; each call waits for one or two.
    CHECK(engine.Stats().iter < 200);
  }
  fake_executor_free(&fake);
}

// Once its buffers have grown, a step of running requests calls operator new not once.
void TestSteadyStepAllocatesNothing() {
  std::mt19937 random(6);
  Options options;
  options.policy = PSM_MAX_UTILIZATION;
  Harness h(options);
  std::vector<Spec> specs;
  for (int i = 0; i < 8; ++i) {
    Spec spec = RandomSpec(&random, 20, 30);
    spec.end_ids.clear();
    spec.stop_ends.clear();
    spec.request.max_tokens = 90;
    spec.request.repetition_penalty = 1.2f;
    spec.request.num_logprobs = 2;
    specs.push_back(spec);
  }
  for (Spec& spec : specs) h.Submit(spec.Get());
  psm_event events[64];
  const auto step = [&] {
    CHECK(h.engine().StepOnce());
    h.engine().events().Poll(events, 64, 0);
  };
  for (int i = 0; i < 20; ++i) step();
  const long before = num_news;
  for (int i = 0; i < 60; ++i) step();
  CHECK(num_news == before);
  h.Submit(specs[0].Get());
  CHECK(num_news > before);  // the counter counts
}

// Runs `body`, in which new may fail; false when it threw for it.
template <typename Body>
bool ShortOfMemory(Body body) {
  memory_is_short = true;
  bool fine = true;
  try {
    body();
  } catch (const std::bad_alloc&) {
    fine = false;
  }
  memory_is_short = false;
  return fine;
}

// Every request that was taken ends exactly once and the books balance, whichever calls of new fail
// in submissions, cancels, steps and the shutdown.
void TestNoMemory(int32_t num_steps, long num_failures) {
  std::mt19937 random(4);
  std::vector<Spec> specs;
  for (int i = 0; i < 10; ++i) {
    Spec spec = RandomSpec(&random, 30, 80);
    spec.request.max_tokens = 40;
    spec.request.min_tokens = 0;
    specs.push_back(spec);
  }
  bool all_failed_calls_seen = false;
  for (long n = 0; !all_failed_calls_seen; ++n) {
    fake_executor fake;
    fake_executor_init(&fake);
    fake.fail_at_step = 30;
    EngineConfig config{};
    config.executor = fake_executor_table(&fake);
    config.info = fake.info;
    config.num_blocks = 40;
    psm_engine_options_init(&config.options);
    config.options.scheduler_policy = PSM_MAX_UTILIZATION;
    config.options.manual_step = 1;
    std::map<uint64_t, int> num_ends;
    {
      Engine engine(config);
      news_left = n;
      failures_left = num_failures;
      for (size_t i = 0; i < specs.size(); ++i) {
        uint64_t id = 0;
        ShortOfMemory(
            [&] { id = engine.Submit(plansmith::CheckRequest(specs[i].Get(), engine.config())); });
        if (id != 0) num_ends[id] = 0;
        if (id != 0 && i % 4 == 3) ShortOfMemory([&] { engine.Cancel(id); });
      }
      for (int32_t step = 0; step < num_steps; ++step) {
        ShortOfMemory([&] { engine.StepOnce(); });
        engine.CheckInvariants();
      }
      if (num_steps > 100) {  // with memory again the engine serves on
        num_ends[engine.Submit(plansmith::CheckRequest(specs[0].Get(), engine.config()))] = 0;
        engine.StepOnce();  // which may have a breakdown to end
        while (engine.StepOnce()) {
        }
        CHECK(engine.Stats().num_queued_requests + engine.Stats().num_active_requests == 0);
      }
      while (!ShortOfMemory([&] { engine.Shutdown(); })) {
      }
      engine.CheckInvariants();
      psm_event events[64];
      for (int64_t taken; (taken = engine.events().Poll(events, 64, 0)) > 0;) {
        for (int64_t i = 0; i < taken; ++i)
          num_ends[events[i].request_id] += events[i].kind != PSM_EVENT_TOKEN;
      }
      CHECK(engine.Stats().used_num_blocks == 0);
      CHECK(engine.Stats().num_completed_requests == num_ends.size());
      for (const auto& [id, ends] : num_ends) CHECK(ends == 1);
    }
    fake_executor_free(&fake);
    all_failed_calls_seen = failures_left == num_failures;
    CHECK(!all_failed_calls_seen || n > 50);  // or the tests of memory tested little
  }
}

// Runs a greedy request beside `num_searches` of beams, no call of new for more than `largest`
// bytes; returns how it and the first of them ended.
std::vector<psm_status> RunBeamSearches(int num_searches, int32_t beam_width, size_t largest) {
  fake_executor fake;
  fake_executor_init(&fake);
  EngineConfig config{};
  config.executor = fake_executor_table(&fake);
  config.info = fake.info;
  config.info.max_logits_rows = fake.info.max_num_tokens;
  config.num_blocks = 1000;
  config.can_copy = true;
  psm_engine_options_init(&config.options);
  config.options.manual_step = 1;
  config.options.max_queue_size = num_searches + 1;
  std::map<uint64_t, psm_status> ends;
  std::vector<psm_status> statuses;
  {
    Engine engine(config);
    largest_new = largest;
    Spec spec;
    psm_request_init(&spec.request);
    spec.prompt = {1, 2, 3};
    spec.request.max_tokens = 80;
    spec.request.temperature = 0.0f;
    std::vector<uint64_t> ids;
    for (int i = 0; i <= num_searches; ++i) {
      spec.request.beam_width = i == 0 ? 1 : beam_width;
      ids.push_back(engine.Submit(plansmith::CheckRequest(spec.Get(), config)));
    }
    while (ends.count(ids[0]) == 0 || ends.count(ids[1]) == 0) {
      CHECK(engine.StepOnce());
      psm_event events[64];
      for (int64_t taken; (taken = engine.events().Poll(events, 64, 0)) > 0;) {
        for (int64_t i = 0; i < taken; ++i)
          if (events[i].is_final) ends[events[i].request_id] = events[i].status;
      }
    }
    largest_new = SIZE_MAX;
    statuses = {ends[ids[0]], ends[ids[1]]};
  }
  fake_executor_free(&fake);
  return statuses;
}

// Beams come all at once. It is not for those of searches that wait that there is room, and a
// search that ends and finds none fails alone.
void TestTheMemoryOfBeams() {
  const std::vector<psm_status> fine = {PSM_OK, PSM_OK}, alone = {PSM_OK, PSM_ERROR_OUT_OF_MEMORY};
  const size_t of_one_search = 7 * 81 * sizeof(psm_event);
  CHECK(RunBeamSearches(1, 7, 3 * of_one_search) == fine);
  CHECK(RunBeamSearches(1, 7, of_one_search / 2) == alone);
  CHECK(RunBeamSearches(1000, 7, 8 * of_one_search) == fine);
}

// The C API reports it with a status and a message, whichever call of new fails.
void TestNoMemoryAtTheApi() {
  bool all_failed_calls_seen = false;
  for (long n = 0; !all_failed_calls_seen; ++n) {
    fake_executor fake;
    fake_executor_init(&fake);
    const psm_executor table = fake_executor_table(&fake);
    news_left = n;
    failures_left = 4;  // the message's memory included
    psm_engine* engine = nullptr;
    psm_status status = PSM_OK;
    CHECK(ShortOfMemory([&] { status = psm_engine_create(&table, nullptr, &engine); }));
    all_failed_calls_seen = failures_left == 4;
    CHECK((status == PSM_OK) == (engine != nullptr));
    if (status == PSM_OK) {
      CHECK(all_failed_calls_seen);
      psm_engine_destroy(engine);
    } else {
      CHECK(status == PSM_ERROR_OUT_OF_MEMORY);
      CHECK(std::strlen(psm_last_error()) > 0);
      table.close(table.self);
    }
    CHECK(fake.is_closed == 1);
    fake_executor_free(&fake);
  }
}

void TestAnExecutorThatThrowsWhileStarting() {
  fake_executor fake;
  fake_executor_init(&fake);
  psm_executor table = fake_executor_table(&fake);
  table.describe = [](void*, psm_model_info*) -> psm_status { throw 7; };
  psm_engine* engine;
  CHECK(psm_engine_create(&table, nullptr, &engine) == PSM_ERROR_EXECUTOR && engine == nullptr);
  CHECK(Contains(psm_last_error(), "threw an exception"));
  table = fake_executor_table(&fake);
  table.open = [](void*, int32_t) -> psm_status { throw 7; };
  CHECK(psm_engine_create(&table, nullptr, &engine) == PSM_ERROR_EXECUTOR && engine == nullptr);
  CHECK(Contains(psm_last_error(), "threw an exception"));
}

}  // namespace

int main() {
  TestBatchInvariance();
  TestRandomOperations();
  TestMisbehavingExecutors();
  TestMessagesNameTheRequest();
  TestRowsOfASharedPrompt();
  TestCopiesThatThrow();
  TestAdaptersOfABusyEngine();
  TestSteadyStepAllocatesNothing();
  TestNoMemory(200, 1);
  TestNoMemory(200, 25);
  TestNoMemory(3, 2);
  TestTheMemoryOfBeams();
  TestNoMemoryAtTheApi();
  TestAnExecutorThatThrowsWhileStarting();
  return 0;
}
