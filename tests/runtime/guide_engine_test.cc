// Guides through the engine: an output never leaves the language and is what the model's logits
// under the masks say, with drafts, pauses and neighbours or alone; each guide is closed exactly
// once.
//
// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <cstdlib>
#include <map>
#include <new>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "count_allocations.h"
#include "dfa_guide.h"
#include "fake_executor.h"

namespace {

struct Options {
  int32_t draft_mode = PSM_DRAFT_OFF;
  int32_t num_blocks = 300;
  int32_t policy = PSM_GUARANTEED_NO_EVICT;
  int32_t manual = 1;
  int32_t max_queue_size = 100;
};

struct Outcome {
  std::vector<int32_t> tokens;
  int32_t finish_reason = -1;
  psm_status status = PSM_OK;
  std::string message;
  bool done = false;
  int32_t num_accepted = 0;
};

class Harness {
 public:
  explicit Harness(const Options& options) {
    fake_executor_init(&fake_);
    fake_.info.max_logits_rows = fake_.info.max_num_tokens;
    psm_engine_options o;
    psm_engine_options_init(&o);
    o.manual_step = options.manual;
    o.draft_mode = options.draft_mode;
    o.scheduler_policy = options.policy;
    o.max_draft_len = 4;
    o.adaptive_draft_len = 0;
    o.ngram_min = 1;
    o.max_queue_size = options.max_queue_size;
    o.kv_cache_bytes = static_cast<uint64_t>(options.num_blocks) * fake_.info.kv_bytes_per_block;
    const psm_executor table = fake_executor_table(&fake_);
    CHECK_OK(psm_engine_create(&table, &o, &engine_));
  }
  ~Harness() {
    psm_engine_destroy(engine_);
    fake_executor_free(&fake_);
  }
  uint64_t Submit(const psm_request& request) {
    uint64_t id;
    CHECK_OK(psm_engine_submit(engine_, &request, &id));
    return id;
  }
  bool Step() {
    int32_t did_work = 0;
    CHECK_OK(psm_engine_step(engine_, &did_work));
    Drain(0);
    return did_work != 0;
  }
  void Run() {
    while (Step()) {
    }
  }
  void Drain(int32_t timeout_ms) {
    psm_event events[32];
    size_t n = 0;
    do {
      CHECK_OK(psm_engine_poll(engine_, events, 32, timeout_ms, &n));
      for (size_t i = 0; i < n; ++i) Take(events[i]);
    } while (n > 0 && timeout_ms == 0);
  }
  Outcome& Of(uint64_t id, int32_t sequence_idx = 0) { return outcomes_[{id, sequence_idx}]; }
  psm_engine* engine() { return engine_; }

 private:
  void Take(const psm_event& event) {
    Outcome& outcome = Of(event.request_id, event.sequence_idx);
    CHECK(!outcome.done);
    if (event.kind == PSM_EVENT_TOKEN) return outcome.tokens.push_back(event.token_id);
    outcome.done = true;
    outcome.finish_reason = event.finish_reason;
    outcome.status = event.status;
    outcome.message = event.message;
    outcome.num_accepted = event.stats.num_accepted_draft_tokens;
  }

  fake_executor fake_;
  psm_engine* engine_ = nullptr;
  std::map<std::pair<uint64_t, int32_t>, Outcome> outcomes_;
};

struct Spec {
  std::vector<int32_t> prompt;
  float temperature = 0.0f;
  uint64_t seed = 0;
  int32_t max_tokens = 24;
  int32_t num_sequences = 1;
  float repetition_penalty = 1.0f;
  std::vector<int32_t> draft;  // of the caller

  psm_request Get() const {
    psm_request r{};
    psm_request_init(&r);
    r.struct_size = PSM_REQUEST_SIZE;
    r.draft_ids = draft.data();
    r.num_draft_ids = static_cast<int32_t>(draft.size());
    r.prompt_ids = prompt.data();
    r.num_prompt_ids = static_cast<int32_t>(prompt.size());
    r.max_tokens = max_tokens;
    r.temperature = temperature;
    r.seed = seed;
    r.num_return_sequences = num_sequences;
    r.repetition_penalty = repetition_penalty;
    r.end_ids = &kEnd;
    r.num_end_ids = 1;
    return r;
  }
};

Spec WithPrompt(std::vector<int32_t> prompt) {
  Spec spec;
  spec.prompt = std::move(prompt);
  return spec;
}

Spec RandomSpec(std::mt19937* random) {
  Spec spec;
  for (uint32_t n = 1 + (*random)() % 20; n > 0; --n) {
    spec.prompt.push_back(static_cast<int32_t>((*random)() % kVocab));
  }
  spec.temperature = (*random)() % 2 == 0 ? 0.0f : 1.0f;
  spec.seed = (*random)();
  spec.max_tokens = 1 + static_cast<int32_t>((*random)() % 40);
  if ((*random)() % 3 == 0) spec.repetition_penalty = 1.2f;
  return spec;
}

void CheckInLanguage(const Outcome& outcome, const Dfa& dfa) {
  CHECK(outcome.done && outcome.status == PSM_OK);
  const int32_t state =
      dfa.Walk(0, outcome.tokens.data(), static_cast<int32_t>(outcome.tokens.size()));
  CHECK(state != -1);
  CHECK((outcome.finish_reason == PSM_FINISH_END_ID) == (state == -2));
  CHECK(outcome.finish_reason == PSM_FINISH_END_ID || outcome.finish_reason == PSM_FINISH_LENGTH);
}

// Greedy: the best of the allowed logits, token for token, computed here.
void TestGreedyIsTheBestAllowed() {
  std::mt19937 random(21);
  for (uint32_t round = 0; round < 30; ++round) {
    const Dfa dfa = RandomDfa(round, 6, 20, 4);
    Counts counts;
    Spec spec = RandomSpec(&random);
    spec.temperature = 0.0f;
    spec.repetition_penalty = 1.0f;
    Outcome outcome;
    {
      Harness h(Options{});
      psm_request request = spec.Get();
      const psm_guide table = (new DfaGuide(&dfa, &counts))->Table();
      request.guide = &table;
      const uint64_t id = h.Submit(request);
      h.Run();
      outcome = h.Of(id);
    }
    CheckInLanguage(outcome, dfa);
    std::vector<int32_t> tokens = spec.prompt;
    int32_t state = 0;
    for (const int32_t token : outcome.tokens) {
      float logits[kVocab];
      fake_logits(tokens.data(), static_cast<int32_t>(tokens.size()), kVocab, logits);
      int32_t best = -1;
      for (int32_t t = 0; t < kVocab; ++t) {
        if (dfa.Allows(state, t) && (best == -1 || logits[t] > logits[best])) best = t;
      }
      CHECK(token == best);
      tokens.push_back(token);
      state = dfa.Walk(state, &token, 1);
    }
    CHECK(!counts.broke_contract && counts.made == 1 && counts.closed == 1);
  }
}

// Among neighbours, with drafts, pauses and n > 1: the same tokens as alone, in the language.
void TestBatchInvariance() {
  int32_t num_accepted = 0;
  for (uint32_t round = 0; round < 6; ++round) {
    std::mt19937 random(round);
    const Dfa dfa = RandomDfa(100 + round, 5, 2, 6);  // few choices: n-grams find something
    Counts counts;
    std::vector<Spec> specs;
    std::vector<std::vector<Outcome>> alone;
    for (int i = 0; i < 12; ++i) {
      specs.push_back(RandomSpec(&random));
      specs.back().num_sequences = 1 + static_cast<int32_t>(random() % 3);
      if (i % 2 == 0) specs.back().max_tokens = 60;
      alone.emplace_back();
      for (int32_t s = 0; s < specs.back().num_sequences; ++s) {
        Harness h(Options{});
        Spec one = specs.back();
        one.num_sequences = 1;
        one.seed += static_cast<uint64_t>(s);
        psm_request request = one.Get();
        const psm_guide table = (new DfaGuide(&dfa, &counts))->Table();
        request.guide = &table;
        const uint64_t id = h.Submit(request);
        h.Run();
        CheckInLanguage(h.Of(id), dfa);
        alone.back().push_back(h.Of(id));
      }
      if (i % 3 == 0) continue;
      // Right up to somewhere; then, or from the start, of another sequence or outside the
      // language.
      specs.back().draft = alone.back()[random() % alone.back().size()].tokens;
      if (i % 3 == 1) specs.back().draft[random() % specs.back().draft.size()] = kVocab - 1;
    }
    for (const Options& options :
         {Options{}, Options{PSM_DRAFT_NGRAM}, Options{PSM_DRAFT_OFF, 40, PSM_MAX_UTILIZATION},
          Options{PSM_DRAFT_NGRAM, 40, PSM_MAX_UTILIZATION}}) {
      Harness h(options);
      std::vector<uint64_t> ids;
      for (const Spec& spec : specs) {
        psm_request request = spec.Get();
        const psm_guide table = (new DfaGuide(&dfa, &counts))->Table();
        request.guide = &table;
        ids.push_back(h.Submit(request));
        if (random() % 2 == 0) h.Step();
      }
      h.Run();
      for (size_t i = 0; i < specs.size(); ++i) {
        for (int32_t s = 0; s < specs[i].num_sequences; ++s) {
          const Outcome& outcome = h.Of(ids[i], s);
          CHECK(outcome.done && outcome.status == PSM_OK);
          CHECK(outcome.tokens == alone[i][static_cast<size_t>(s)].tokens);
          num_accepted += outcome.num_accepted;
        }
      }
    }
    CHECK(!counts.broke_contract && counts.made == counts.closed);
  }
  CHECK(num_accepted > 300);
}

// A guide that fails ends its own request, with its words; the others do not notice.
void TestFailuresEndTheirRequest() {
  const Dfa dfa = RandomDfa(7, 6, 4, 1000);
  for (int draft_mode : {PSM_DRAFT_OFF, PSM_DRAFT_NGRAM}) {
    Counts counts;
    {
      Options options;
      options.draft_mode = draft_mode;
      Harness h(options);
      std::vector<uint64_t> ids;
      for (int i = 0; i < 6; ++i) {
        auto* guide = new DfaGuide(&dfa, &counts);
        if (i == 1) guide->fail_fill_at = 3;
        if (i == 2) guide->fail_accept_at = 2;
        if (i == 3) guide->throw_at = 0;
        if (i == 4) guide->empty_at = 2;
        Spec spec = WithPrompt({1, 2, 3, i});
        psm_request request = spec.Get();
        const psm_guide table = guide->Table();
        request.guide = &table;
        ids.push_back(h.Submit(request));
      }
      h.Run();
      for (int i : {0, 5}) CheckInLanguage(h.Of(ids[static_cast<size_t>(i)]), dfa);
      const auto failed = [&](size_t i, psm_status status, const char* text) {
        const Outcome& o = h.Of(ids[i]);
        CHECK(o.done && o.status == status);
        CHECK(o.message.find(text) != std::string::npos);
      };
      failed(1, PSM_ERROR_EXECUTOR, "a test's guide fell over");
      failed(2, PSM_ERROR_EXECUTOR, "a test's guide fell over");
      failed(3, PSM_ERROR_EXECUTOR, "thrown by a guide");
      failed(4, PSM_ERROR_INVALID_ARGUMENT, "");
    }
    CHECK(!counts.broke_contract && counts.made == 6 && counts.closed == 6);
  }
}

// A submission that fails leaves the guide with the caller, and closes the clones it made.
void TestRefusedSubmissions() {
  const Dfa dfa = RandomDfa(8, 6, 4, 1000);
  Counts counts;
  Options options;
  options.max_queue_size = 2;
  Harness h(options);
  Spec spec = WithPrompt({1, 2, 3});
  spec.num_sequences = 3;
  auto* guide = new DfaGuide(&dfa, &counts);
  psm_guide table = guide->Table();
  psm_request request = spec.Get();
  request.guide = &table;
  uint64_t id;
  guide->fail_clone_at = 1;
  CHECK(psm_engine_submit(h.engine(), &request, &id) == PSM_ERROR_INVALID_ARGUMENT);
  CHECK(counts.made == 2 && counts.closed == 1);
  table.clone = nullptr;
  CHECK(psm_engine_submit(h.engine(), &request, &id) == PSM_ERROR_INVALID_ARGUMENT);
  table = guide->Table();
  request.num_end_ids = 0;
  CHECK(psm_engine_submit(h.engine(), &request, &id) == PSM_ERROR_INVALID_ARGUMENT);
  request.num_end_ids = 1;
  request.beam_width = 2;
  CHECK(psm_engine_submit(h.engine(), &request, &id) == PSM_ERROR_INVALID_ARGUMENT);
  CHECK(counts.made - counts.closed == 1);
  psm_request plain = spec.Get();
  plain.num_return_sequences = 1;
  h.Submit(plain), h.Submit(plain);
  request.beam_width = 1;
  CHECK(psm_engine_submit(h.engine(), &request, &id) == PSM_ERROR_QUEUE_FULL);
  CHECK(counts.made - counts.closed == 1);
  h.Run();
  CHECK_OK(psm_engine_shutdown(h.engine()));
  CHECK(psm_engine_submit(h.engine(), &request, &id) == PSM_ERROR_SHUTDOWN);
  CHECK(counts.made - counts.closed == 1);
  DfaGuide::Close(guide);
  CHECK(!counts.broke_contract);
}

// Cancelled, timed out, or alive when the engine goes: closed exactly once, whatever runs.
void TestEndsAtAnyMoment() {
  const Dfa dfa = RandomDfa(9, 6, 4, 1000);
  std::mt19937 random(9);
  for (int round = 0; round < 12; ++round) {
    Counts counts;
    int num_guides = 0;
    {
      Options options;
      options.draft_mode = round % 2 == 0 ? PSM_DRAFT_OFF : PSM_DRAFT_NGRAM;
      options.manual = round % 3 == 0;
      Harness h(options);
      std::vector<uint64_t> ids;
      for (int i = 0; i < 20; ++i) {
        auto* guide = new DfaGuide(&dfa, &counts);
        guide->sleep_ms = i % 7 == 0;
        Spec spec = RandomSpec(&random);
        spec.num_sequences = 1 + i % 2;
        num_guides += spec.num_sequences;
        psm_request request = spec.Get();
        if (i % 5 == 0) request.allotted_time_ms = 2;
        const psm_guide table = guide->Table();
        request.guide = &table;
        ids.push_back(h.Submit(request));
        if (options.manual != 0) {
          h.Step();
        } else {
          h.Drain(1);
        }
        if (i % 3 == 0) psm_engine_cancel(h.engine(), ids[random() % ids.size()]);
      }
    }
    CHECK(counts.made == num_guides && counts.closed == num_guides);
    CHECK(!counts.broke_contract);
  }
}

// A shutdown waits for the guide's call in progress and for no more.
void TestShutdownWaitsForTheCall() {
  const Dfa dfa = RandomDfa(10, 6, 4, 1000);
  Counts counts;
  {
    Options options;
    options.manual = 0;
    Harness h(options);
    auto* guide = new DfaGuide(&dfa, &counts);
    guide->sleep_ms = 100;
    Spec spec = WithPrompt({1, 2, 3});
    spec.max_tokens = 100;
    psm_request request = spec.Get();
    const psm_guide table = guide->Table();
    request.guide = &table;
    h.Submit(request);
    while (counts.inside == 0) std::this_thread::yield();
    CHECK_OK(psm_engine_shutdown(h.engine()));
    CHECK(counts.inside == 0 && counts.fills <= 2);
    CHECK(counts.closed == 1);
  }
  CHECK(counts.closed == 1 && !counts.broke_contract);
}

// min_tokens forbids the end id: where nothing else may follow, the request says so.
void TestMinTokensAgainstTheLanguage() {
  Dfa dfa;
  dfa.next = {{{5, 1}}, {}};
  dfa.accepts = {false, true};
  Counts counts;
  Harness h(Options{});
  Spec spec = WithPrompt({1, 2, 3});
  psm_request request = spec.Get();
  request.min_tokens = 10;
  psm_guide table = (new DfaGuide(&dfa, &counts))->Table();
  request.guide = &table;
  const uint64_t refused = h.Submit(request);
  request.min_tokens = 1;
  table = (new DfaGuide(&dfa, &counts))->Table();
  const uint64_t fine = h.Submit(request);
  h.Run();
  CHECK(h.Of(refused).status == PSM_ERROR_INVALID_ARGUMENT);
  CHECK((h.Of(fine).tokens == std::vector<int32_t>{5, kEnd}));
  CHECK(h.Of(fine).finish_reason == PSM_FINISH_END_ID);
}

// A steady step with guides, drafts and all allocates nothing.
void TestSteadyStepAllocatesNothing() {
  const Dfa dfa = RandomDfa(12, 5, 2, 1000000);
  for (int draft_mode : {PSM_DRAFT_OFF, PSM_DRAFT_NGRAM}) {
    Counts counts;
    Options options;
    options.draft_mode = draft_mode;
    Harness h(options);
    for (int i = 0; i < 4; ++i) {
      Spec spec = WithPrompt({1, 2, 3, i});
      spec.max_tokens = 120;
      spec.temperature = 1.0f;
      psm_request request = spec.Get();
      const psm_guide table = (new DfaGuide(&dfa, &counts))->Table();
      request.guide = &table;
      h.Submit(request);
    }
    for (int i = 0; i < 8; ++i) h.Step();
    psm_event events[64];
    for (int i = 0; i < 10; ++i) {
      const long before = num_news;
      int32_t did_work = 0;
      CHECK_OK(psm_engine_step(h.engine(), &did_work));
      CHECK(did_work == 1);
      CHECK(num_news == before);
      size_t n = 0;
      CHECK_OK(psm_engine_poll(h.engine(), events, 64, 0, &n));
    }
  }
}

}  // namespace

int main() {
  TestGreedyIsTheBestAllowed();
  TestBatchInvariance();
  TestFailuresEndTheirRequest();
  TestRefusedSubmissions();
  TestEndsAtAnyMoment();
  TestShutdownWaitsForTheCall();
  TestMinTokensAgainstTheLanguage();
  TestSteadyStepAllocatesNothing();
  return 0;
}
