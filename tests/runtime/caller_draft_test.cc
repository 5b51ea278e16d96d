// Drafts that callers bring with their requests: they save steps where they are right, and change
// no token anywhere.
//
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdlib>
#include <new>
#include <random>

#include "count_allocations.h"
#include "speculation_harness.h"

namespace {

using history::Ask;
using history::Engine;
using history::Plain;
using history::PlainResult;
using history::Result;
using history::Setup;
using Random = std::mt19937;

int32_t Pick(Random* random, int32_t n) {
  return static_cast<int32_t>((*random)() % static_cast<uint32_t>(n));
}

Ask RandomAsk(Random* random) {
  const auto pick = [&](int32_t n) { return Pick(random, n); };
  Ask ask;
  psm_request& r = ask.request;
  if (pick(2)) ask.prompt.assign(static_cast<size_t>(pick(70)), pick(2));
  for (int32_t n = 1 + pick(8); n > 0; --n) ask.prompt.push_back(pick(97));
  r.max_tokens = 1 + pick(60);
  r.temperature = pick(2) ? 0.0f : 0.9f;
  r.seed = (*random)();
  r.top_p = pick(2) ? 1.0f : 0.9f;
  r.top_p_decay = pick(2) ? 0.0f : 0.9f;
  r.top_p_min = 0.2f;
  r.top_p_reset_id = pick(97);
  r.no_repeat_ngram_size = pick(3);
  r.priority = static_cast<float>(pick(3)) / 2.0f;
  r.num_logprobs = pick(3);
  if (pick(2)) r.repetition_penalty = 1.3f;
  if (pick(3) == 0) r.frequency_penalty = 0.5f;
  if (pick(2)) ask.end_ids = {pick(97), pick(97)};
  if (pick(3) == 0) {
    r.min_tokens = pick(r.max_tokens);
    ask.stop_ids = {pick(97), pick(97), pick(97)};
    ask.stop_ends = {1, 3};
  }
  if (pick(4) == 0) r.max_draft_len = pick(2);
  if (pick(4) == 0) r.num_return_sequences = 1 + pick(3);
  if (pick(6) == 0) r.num_prompt_logprobs = 0;
  return ask;
}

// The output, right up to some token; then anything, or nothing.
std::vector<int32_t> DraftOf(const std::vector<int32_t>& output, Random* random) {
  std::vector<int32_t> draft = output;
  draft.resize(static_cast<size_t>(Pick(random, static_cast<int32_t>(output.size()) + 1)));
  for (int32_t n = Pick(random, 2) * Pick(random, 30); n > 0; --n)
    draft.push_back(Pick(random, 97));
  return draft;
}

Setup RandomSetup(Random* random) {
  const auto pick = [&](int32_t n) { return Pick(random, n); };
  Setup setup;
  psm_engine_options& o = setup.options;
  setup.noise = static_cast<float>(pick(3));
  setup.Mode(pick(3));
  o.max_draft_len = 1 + pick(6);
  o.adaptive_draft_len = pick(2);
  o.ngram_min = 1 + pick(2);
  o.scheduler_policy = pick(2) ? PSM_MAX_UTILIZATION : PSM_GUARANTEED_NO_EVICT;
  o.chunking_policy = pick(2);
  o.max_num_tokens = 8 + pick(41);
  o.enable_block_reuse = pick(4) > 0;
  o.max_batch_size = 1 + pick(8);
  setup.num_blocks = pick(2) ? 45 + pick(20) : 2000;
  return setup;
}

// Engines with and without drafts of their own, arrivals, cancels, pauses, chunks, prefix hits.
void TestSameTokens() {
  int64_t num_accepted = 0, num_refused = 0, num_pauses = 0;
  for (uint32_t round = 0; round < 150; ++round) {
    Random random(round);
    const Setup setup = RandomSetup(&random);
    Engine engine(setup);
    std::vector<Ask> asks;
    std::vector<std::vector<Result>> want;
    for (int i = 0; i < 12; ++i) {
      asks.push_back(RandomAsk(&random));
      want.emplace_back();
      for (int32_t s = 0; s < asks.back().request.num_return_sequences; ++s) {
        Ask alone = asks.back();
        alone.request.seed += static_cast<uint64_t>(s);
        want.back().push_back(PlainResult(alone));
      }
      if (i % 4 > 0) asks.back().draft = DraftOf(want.back()[0].tokens, &random);
    }
    std::vector<uint64_t> ids;
    std::vector<bool> cancelled(asks.size());
    for (Ask& ask : asks) {
      ids.push_back(engine.Submit(&ask));
      for (int n = Pick(&random, 4); n > 0; --n) engine.Step();
      const size_t j = static_cast<size_t>(Pick(&random, static_cast<int32_t>(2 * ids.size() + 8)));
      if (j < ids.size() && Pick(&random, 3) == 0) engine.Cancel(ids[j]), cancelled[j] = true;
    }
    engine.Drain();
    for (size_t i = 0; i < asks.size(); ++i) {
      for (size_t s = 0; s < want[i].size(); ++s) {
        const Result& got = engine.Of(ids[i], static_cast<int32_t>(s));
        CHECK(got.done && got.status == PSM_OK);
        if (cancelled[i]) continue;
        CHECK(got.tokens == want[i][s].tokens && got.logprobs == want[i][s].logprobs);
        CHECK(got.finish_reason == want[i][s].finish_reason);
      }
    }
    const psm_engine_stats stats = engine.Stats();
    CHECK(stats.used_num_blocks == 0 && stats.num_failed_drafts == 0);
    num_accepted += static_cast<int64_t>(stats.num_accepted_draft_tokens);
    num_refused += static_cast<int64_t>(stats.num_draft_tokens - stats.num_accepted_draft_tokens);
    num_pauses += static_cast<int64_t>(stats.num_pauses);
  }
  printf("accepted %lld, refused %lld, pauses %lld\n", static_cast<long long>(num_accepted),
         static_cast<long long>(num_refused), static_cast<long long>(num_pauses));
  CHECK(num_accepted > 10000 && num_refused > 1000 && num_pauses > 20);
}

Ask AskFor(int32_t max_tokens, float temperature) {
  Ask ask;
  for (int32_t i = 0; i < 10; ++i) ask.prompt.push_back(3 * i);
  ask.request.max_tokens = max_tokens;
  ask.request.temperature = temperature;
  ask.request.seed = 11;
  return ask;
}

// n drafts that are right and one more token come out of the step that ends the prompt.
void TestRightOnesCostNoStep() {
  for (const int32_t mode : {PSM_DRAFT_OFF, PSM_DRAFT_NGRAM, PSM_DRAFT_MODEL}) {
    for (const float temperature : {0.0f, 1.0f}) {
      Setup setup;
      Engine engine(setup.Mode(mode));
      Ask ask = AskFor(26, temperature);
      ask.request.max_draft_len = 0;  // the engine's own have a limit, these have none
      ask.draft = Plain(ask);
      const std::vector<int32_t> want = ask.draft;
      ask.draft.resize(20);
      const uint64_t id = engine.Submit(&ask);
      CHECK(engine.Step() && engine.Of(id).tokens.size() == 21);
      CHECK(engine.target.num_steps == 1 && engine.target.max_tokens_seen == 30);
      engine.Drain();
      const Result& got = engine.Of(id);
      CHECK(got.tokens == want && engine.target.num_steps == 6);
      CHECK(got.stats.num_draft_tokens == 20 && got.stats.num_accepted_draft_tokens == 20);
      CHECK(engine.Stats().num_draft_tokens == 20 && got.stats.num_decode_iters == 6);
      CHECK(engine.Stats().num_requests_with_draft_tokens == 1);
    }
  }
}

// What comes behind a wrong one is proposed once and never again.
void TestWrongOnesAreGivenUp() {
  Setup setup;
  Engine engine(setup);
  Ask ask = AskFor(26, 0.0f);
  ask.draft = Plain(ask);
  ask.draft.resize(20);
  ask.draft[7] = (ask.draft[7] + 1) % 97;
  const uint64_t id = engine.Submit(&ask);
  CHECK(engine.Step() && engine.Of(id).tokens.size() == 8);
  engine.Drain();
  const Result& got = engine.Of(id);
  CHECK(got.tokens == Plain(ask) && engine.target.num_steps == 19);
  CHECK(got.stats.num_draft_tokens == 20 && got.stats.num_accepted_draft_tokens == 7);
}

// A step takes as many as its tokens, rows and blocks allow; the next ones go on.
void TestLimitsOfAStep() {
  for (const int32_t policy : {PSM_GUARANTEED_NO_EVICT, PSM_MAX_UTILIZATION}) {
    for (const int32_t num_requests : {1, 3}) {
      for (const int32_t max_rows : {8, 48}) {
        Setup setup;
        setup.options.max_num_tokens = 12;
        setup.options.scheduler_policy = policy;
        setup.num_blocks = 30;
        Engine engine(setup);
        engine.target.info.max_logits_rows = max_rows;
        engine.target.max_step_tokens = 12;
        std::vector<Ask> asks;
        std::vector<uint64_t> ids;
        for (int32_t i = 0; i < num_requests; ++i) {
          asks.push_back(AskFor(25, 0.0f));
          asks.back().prompt[0] = i;
          asks.back().draft = Plain(asks.back());
        }
        for (Ask& ask : asks) ids.push_back(engine.Submit(&ask));
        engine.Drain();
        for (size_t i = 0; i < asks.size(); ++i) {
          const Result& got = engine.Of(ids[i]);
          CHECK(got.tokens == asks[i].draft);
          CHECK(got.stats.num_accepted_draft_tokens == got.stats.num_draft_tokens);
        }
        // Each step is as full as it can be.
        const int32_t num_tokens = 35 * num_requests;
        const int32_t most = max_rows == 8 ? 2 : 1;
        CHECK(engine.target.num_steps <= most * (num_tokens / 12 + 2));
      }
    }
  }
}

// Nothing follows an end, so nothing is proposed there.
void TestEndsCutThem() {
  Ask ask = AskFor(26, 0.0f);
  const std::vector<int32_t> output = Plain(ask);
  ask.end_ids = {output[9]};
  const size_t end =
      static_cast<size_t>(std::find(output.begin(), output.end(), output[9]) - output.begin());
  ask.draft = output;
  Engine engine{Setup()};
  const uint64_t id = engine.Submit(&ask);
  engine.Drain();
  CHECK(engine.target.num_steps == 1 && engine.Of(id).tokens.size() == end + 1);
  CHECK(engine.Of(id).stats.num_draft_tokens == static_cast<int32_t>(end));
  CHECK(engine.Of(id).finish_reason == PSM_FINISH_END_ID);

  Ask whole = AskFor(26, 0.0f);  // as many as the output has, and more
  whole.draft = output;
  whole.draft.resize(500, 1);
  Engine other{Setup()};
  const uint64_t other_id = other.Submit(&whole);
  other.Drain();
  CHECK(other.target.num_steps == 1 && other.Of(other_id).tokens == output);
  CHECK(other.Of(other_id).stats.num_draft_tokens == 25);
}

// Each sequence is checked against them; where they draw the same, all profit.
void TestSequencesOfARequest() {
  Setup setup;
  Engine engine(setup);
  Ask ask = AskFor(20, 0.0f);
  ask.request.num_return_sequences = 3;
  ask.draft = Plain(ask);
  const uint64_t id = engine.Submit(&ask);
  engine.Drain();
  for (int32_t s = 0; s < 3; ++s) {
    CHECK(engine.Of(id, s).tokens == ask.draft);
    CHECK(engine.Of(id, s).stats.num_accepted_draft_tokens == 19);
  }
  CHECK(engine.target.num_steps <= 3);  // 2 * 20 tokens are the next one's, 48 fit
}

int64_t test_clock_ns = 0;

// Drafts that the engine looks up for a request, behind many that brought wrong ones, or none.
int64_t NumLookedUp(bool brings) {
  Setup setup;
  setup.Mode(PSM_DRAFT_NGRAM).options.adaptive_draft_len = 1;
  Engine engine(setup);
  engine.now_ns = [](void*) { return test_clock_ns; };
  engine.target.clock_ns = &test_clock_ns;
  engine.target.fixed_ns = 10000000;  // so that drafts pay where they are thought to be right
  engine.target.per_token_ns = 100000;
  for (int32_t i = 0; i < 1500; ++i) {
    Ask wrong = AskFor(3, 0.0f);
    wrong.prompt[1] = i % 97;
    wrong.prompt[2] = i / 97;
    wrong.request.max_draft_len = 0;
    if (brings) wrong.draft = {Plain(wrong)[0] == 96 ? 95 : 96, 1};
    engine.Submit(&wrong);
    engine.Drain();
  }
  const uint64_t before = engine.Stats().num_draft_tokens;
  Ask ask = AskFor(20, 0.0f);
  ask.prompt.assign(30, 5);
  ask.request.logits_processor = [](void*, uint64_t, int32_t, const int32_t*, int32_t,
                                    float* logits, int32_t) {
    logits[5] = 100.0f;  // what is looked up is right
    return psm_status{PSM_OK};
  };
  engine.Submit(&ask);
  engine.Step();  // the prompt
  engine.Step();
  return static_cast<int64_t>(engine.Stats().num_draft_tokens - before);
}

// What the engine's own drafter has learnt does not hang on what callers bring.
void TestTheDrafterLearnsNothingFromThem() {
  const int64_t want = NumLookedUp(false);
  CHECK(want == 4 && NumLookedUp(true) == want);
}

void TestAllocatesNothing() {
  Setup setup;
  setup.options.max_num_tokens = 24;
  setup.options.iter_stats_max_iterations = 8;
  Engine engine(setup);
  std::vector<Ask> asks(3);
  for (size_t i = 0; i < asks.size(); ++i) {
    asks[i].prompt = {1, 2, static_cast<int32_t>(i)};
    asks[i].request.max_tokens = 150;
    asks[i].request.no_repeat_ngram_size = 4;
    asks[i].draft = Plain(asks[i]);
  }
  for (Ask& ask : asks) engine.Submit(&ask);
  for (int i = 0; i < 2; ++i) engine.Step();
  long most = 0;
  for (int i = 0; i < 8; ++i) {
    const long before = num_news;
    engine.StepOnly();
    most = std::max(most, num_news - before);
    engine.Poll();
  }
  CHECK(most == 0 && engine.Stats().num_accepted_draft_tokens > 100);
}

}  // namespace

int main() {
  TestRightOnesCostNoStep();
  TestWrongOnesAreGivenUp();
  TestLimitsOfAStep();
  TestEndsCutThem();
  TestSequencesOfARequest();
  TestTheDrafterLearnsNothingFromThem();
  TestAllocatesNothing();
  TestSameTokens();
  return 0;
}
