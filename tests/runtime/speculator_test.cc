// Speculation through the engine: tokens are those of the target alone whatever drafts; the draft's
// positions are right; what cannot be drafted for is not; and it costs no memory in a step.
//
// SPDX-License-Identifier: Apache-2.0
#include "speculator.h"

#include <atomic>
#include <cmath>
#include <cstdlib>
#include <new>
#include <random>

#include "count_allocations.h"
#include "sampler.h"
#include "speculation_harness.h"

namespace {

using history::Ask;
using history::Engine;
using history::Model;
using history::Plain;
using history::Result;
using history::Setup;
using Random = std::mt19937;

int32_t Pick(Random* random, int32_t n) {
  return static_cast<int32_t>((*random)() % static_cast<uint32_t>(n));
}

// Small alphabets make the n-gram lookup find something.
Ask RandomAsk(Random* random, int32_t vocab_size, int32_t max_prompt) {
  const auto pick = [&](int32_t n) { return Pick(random, n); };
  Ask ask;
  psm_request& r = ask.request;
  const int32_t alphabet = pick(2) ? 3 : vocab_size;
  if (pick(2)) {  // one of two beginnings that are shared
    for (int32_t i = 0, n = pick(max_prompt - 8), k = pick(2); i < n; ++i)
      ask.prompt.push_back((i * 7 + k) % vocab_size);
  }
  for (int32_t n = 1 + pick(8); n > 0; --n) ask.prompt.push_back(pick(alphabet));
  r.max_tokens = 1 + pick(40);
  r.temperature = pick(2) ? 0.0f : 0.4f + 0.1f * static_cast<float>(pick(8));
  r.seed = (*random)();
  r.top_k = pick(3) * 8;
  r.top_p = pick(2) ? 1.0f : 0.85f;
  r.min_p = pick(4) ? 0.0f : 0.1f;
  r.priority = static_cast<float>(pick(3)) / 2.0f;
  if (pick(2)) r.repetition_penalty = pick(2) ? 1.4f : 0.8f;
  if (pick(3) == 0) r.frequency_penalty = 0.5f;
  if (pick(3) == 0) r.presence_penalty = -0.4f;
  if (pick(4) == 0) r.num_logprobs = 2;
  if (pick(4) == 0 && vocab_size > 5) r.no_repeat_ngram_size = 2 + pick(3);
  if (pick(3) == 0) {
    r.top_p_decay = 0.7f;
    r.top_p_min = pick(2) ? 0.1f : 0.0f;
    r.top_p_reset_id = pick(3) - 1;
  }
  if (pick(3) == 0) ask.end_ids = {pick(vocab_size), pick(vocab_size)};
  if (pick(3) == 0) {
    r.min_tokens = pick(r.max_tokens);
    ask.stop_ids = {pick(vocab_size), pick(vocab_size), pick(vocab_size)};
    ask.stop_ends = {1, 3};
  }
  if (pick(5) == 0) r.max_draft_len = pick(2);
  if (pick(6) == 0) r.num_return_sequences = 2;
  return ask;
}

Setup RandomSetup(Random* random) {
  const auto pick = [&](int32_t n) { return Pick(random, n); };
  Setup setup;
  psm_engine_options& o = setup.options;
  setup.model.vocab_size = pick(2) ? 97 : 5;
  setup.noise = static_cast<float>(pick(4));
  setup.Mode(pick(3) ? PSM_DRAFT_MODEL : PSM_DRAFT_NGRAM);
  o.max_draft_len = 1 + pick(6);
  o.adaptive_draft_len = pick(2);
  o.ngram_min = 1 + pick(2);
  o.scheduler_policy = pick(2) ? PSM_MAX_UTILIZATION : PSM_GUARANTEED_NO_EVICT;
  o.chunking_policy = pick(2);
  o.enable_block_reuse = pick(4) > 0;
  o.enable_partial_reuse = pick(2);
  o.max_num_tokens = 8 + pick(41);
  o.max_batch_size = 1 + pick(8);
  setup.num_blocks = pick(2) ? 45 + pick(20) : 2000;
  return setup;
}

bool IsBeginningOf(const std::vector<int32_t>& x, const std::vector<int32_t>& whole) {
  return x.size() <= whole.size() && std::equal(x.begin(), x.end(), whole.begin());
}

// Arrivals, cancels, pauses, chunks, prefix hits, other requests: nothing shows in the tokens.
void TestSameTokens() {
  int64_t num_accepted = 0, num_refused = 0, num_pauses = 0, num_reused = 0;
  for (uint32_t round = 0; round < 150; ++round) {
    Random random(round);
    const Setup setup = RandomSetup(&random);
    Engine engine(setup);
    engine.draft.info.max_num_tokens = 8 + Pick(&random, 20);
    std::vector<Ask> asks;
    for (int i = 0; i < 12; ++i) asks.push_back(RandomAsk(&random, setup.model.vocab_size, 90));
    std::vector<uint64_t> ids;
    std::vector<bool> cancelled(asks.size());
    for (size_t i = 0; i < asks.size(); ++i) {
      ids.push_back(engine.Submit(&asks[i]));
      for (int n = Pick(&random, 4); n > 0; --n) engine.Step();
      const size_t j = static_cast<size_t>(Pick(&random, static_cast<int32_t>(2 * ids.size() + 4)));
      if (j < ids.size() && Pick(&random, 3) == 0) engine.Cancel(ids[j]), cancelled[j] = true;
    }
    engine.Drain();
    for (size_t i = 0; i < asks.size(); ++i) {
      for (int32_t s = 0; s < asks[i].request.num_return_sequences; ++s) {
        const Result& got = engine.Of(ids[i], s);
        Ask alone = asks[i];
        alone.request.seed += static_cast<uint64_t>(s);
        const std::vector<int32_t> want = Plain(alone, setup.model);
        CHECK(got.done && got.status == PSM_OK);
        if (cancelled[i])
          CHECK(IsBeginningOf(got.tokens, want));
        else
          CHECK(got.tokens == want);
      }
    }
    const psm_engine_stats stats = engine.Stats();
    CHECK(stats.num_failed_drafts == 0);
    CHECK(stats.used_num_blocks == 0);
    num_accepted += static_cast<int64_t>(stats.num_accepted_draft_tokens);
    num_refused += static_cast<int64_t>(stats.num_draft_tokens - stats.num_accepted_draft_tokens);
    num_pauses += static_cast<int64_t>(stats.num_pauses);
    num_reused += static_cast<int64_t>(stats.reused_tokens);
  }
  printf("accepted %lld, refused %lld, pauses %lld, reused tokens %lld\n",
         static_cast<long long>(num_accepted), static_cast<long long>(num_refused),
         static_cast<long long>(num_pauses), static_cast<long long>(num_reused));
  CHECK(num_accepted > 1000 && num_refused > 1000 && num_pauses > 20 && num_reused > 1000);
}

// A draft that is the target itself: whatever is refused was drafted from wrong positions. (The
// token that ends a request is not counted as accepted.)
void TestPerfectDraftIsAlwaysAccepted() {
  uint64_t num_drafted = 0;  // of all rounds: whether drafting pays in one is up to the clock
  for (uint32_t round = 0; round < 60; ++round) {
    Random random(round + 1000);
    Setup setup = RandomSetup(&random);
    setup.Mode(PSM_DRAFT_MODEL).noise = 0.0f;
    Engine engine(setup);
    engine.draft.info.max_num_tokens = 8 + Pick(&random, 20);
    std::vector<Ask> asks;
    std::vector<uint64_t> ids;
    for (int i = 0; i < 12; ++i) asks.push_back(RandomAsk(&random, setup.model.vocab_size, 90));
    for (Ask& ask : asks) {
      ids.push_back(engine.Submit(&ask));
      for (int n = Pick(&random, 4); n > 0; --n) engine.Step();
    }
    engine.Drain();
    for (size_t i = 0; i < asks.size(); ++i) {
      for (int32_t s = 0; s < asks[i].request.num_return_sequences; ++s) {
        const psm_request_stats& stats = engine.Of(ids[i], s).stats;
        CHECK(stats.num_draft_tokens - stats.num_accepted_draft_tokens <= 1);
      }
    }
    CHECK(engine.Stats().num_failed_drafts == 0);
    num_drafted += engine.Stats().num_draft_tokens;
  }
  CHECK(num_drafted > 100);
}

// What a draft with noise proposes and what the target then takes, worked out without an engine.
void TestDraftsAreTheDraftModels() {
  for (uint32_t round = 0; round < 40; ++round) {
    Random random(round);
    Setup setup;
    setup.Mode(PSM_DRAFT_MODEL).noise = 2.0f;
    const int32_t length = setup.options.max_draft_len = 1 + Pick(&random, 5);
    Ask ask;
    for (int32_t i = 0; i < 11; ++i) ask.prompt.push_back(Pick(&random, 97));
    ask.request.temperature = round % 2 == 0 ? 0.0f : 0.7f;
    ask.request.seed = round;
    ask.request.max_tokens = 60;
    const std::vector<int32_t> want = Plain(ask);

    Model draft = setup.model;
    draft.noise = setup.noise;
    plansmith::Sampler sampler(97);
    plansmith::Request request;
    request.tokens = ask.prompt;
    request.num_prompt = 11;
    request.params.temperature = ask.request.temperature;
    request.params.seed = ask.request.seed;
    int32_t num_drafted = 0, num_accepted = 0;
    std::vector<float> row(97);
    for (size_t at = 1; at < want.size();) {
      request.tokens.resize(11);
      request.tokens.insert(request.tokens.end(), want.begin(),
                            want.begin() + static_cast<ptrdiff_t>(at));
      const size_t most = std::min(static_cast<size_t>(length), want.size() - at - 1);
      size_t accepted = 0;
      bool good = true;
      for (size_t k = 0; k < most; ++k) {
        plansmith::Sample sample;
        draft.Logits(request.tokens, row.data());
        sampler.Draw(row.data(), request, nullptr, &sample);
        request.tokens.push_back(sample.token);
        good = good && sample.token == want[at + k];
        accepted += good;
      }
      num_drafted += static_cast<int32_t>(most);
      num_accepted += static_cast<int32_t>(accepted);
      at += accepted + 1;
    }

    Engine engine(setup);
    const uint64_t id = engine.Submit(&ask);
    engine.Drain();
    CHECK(engine.Of(id).tokens == want);
    const psm_engine_stats stats = engine.Stats();
    CHECK(stats.num_draft_tokens == static_cast<uint64_t>(num_drafted));
    CHECK(stats.num_accepted_draft_tokens == static_cast<uint64_t>(num_accepted));
  }
}

// A draft executor that fails, or gives NaN, costs drafts and nothing else; one that goes on
// failing is left alone.
void TestFailingDraft() {
  for (const int64_t fail_every : {1, 2, 5}) {
    for (const bool gives_nan : {false, true}) {
      Setup setup;
      Engine engine(setup.Mode(PSM_DRAFT_MODEL));
      (gives_nan ? engine.draft.nan_every : engine.draft.fail_every) = fail_every;
      Random random(5);
      std::vector<Ask> asks;
      std::vector<uint64_t> ids;
      for (int i = 0; i < 6; ++i) {
        asks.push_back(RandomAsk(&random, 97, 40));
        asks.back().request.max_tokens = 100;
        asks.back().request.num_return_sequences = 1;
        asks.back().request.min_tokens = 0;
      }
      for (Ask& ask : asks) ids.push_back(engine.Submit(&ask));
      engine.Drain();
      for (size_t i = 0; i < asks.size(); ++i)
        CHECK(engine.Of(ids[i]).status == PSM_OK && engine.Of(ids[i]).tokens == Plain(asks[i]));
      const psm_engine_stats stats = engine.Stats();
      CHECK((stats.num_failed_drafts > 0) == !gives_nan);
      if (!gives_nan && fail_every == 1) {
        CHECK(stats.num_draft_tokens == 0 && engine.draft.num_steps <= 4);
      } else if (fail_every == 5) {
        CHECK(stats.num_accepted_draft_tokens > 0);
      }
    }
  }
}

// A long prompt is caught up in chunks of the draft's size while another request has its drafts.
void TestCatchUpHoldsUpNobody() {
  Setup setup;
  Engine engine(setup.Mode(PSM_DRAFT_MODEL));
  engine.draft.info.max_num_tokens = 12;
  Ask quick, slow;
  quick.prompt = {1, 2, 3};
  quick.request.max_tokens = 100;
  slow.prompt.assign(110, 7);
  slow.request.max_tokens = 40;
  const uint64_t quick_id = engine.Submit(&quick);
  for (int i = 0; i < 3; ++i) engine.Step();
  const uint64_t slow_id = engine.Submit(&slow);
  int32_t num_both = 0;
  while (!engine.Of(slow_id).done) {
    const size_t before = engine.Of(quick_id).tokens.size();
    const bool slow_generates = !engine.Of(slow_id).tokens.empty();
    CHECK(engine.Step());
    // Contexts take a step's tokens before drafts do. A perfect draft: 5 tokens a step but the
    // last.
    if (!slow_generates || engine.Of(quick_id).tokens.size() >= 95) continue;
    CHECK(engine.Of(quick_id).tokens.size() - before == 5);
    ++num_both;
  }
  engine.Drain();
  CHECK(num_both > 5 && engine.draft.max_tokens_seen <= 12);
  CHECK(engine.Of(slow_id).stats.num_accepted_draft_tokens > 10);
  CHECK(engine.Of(slow_id).tokens == Plain(slow) && engine.Of(quick_id).tokens == Plain(quick));
}

// Requests with one prompt share blocks that the draft has yet to compute: they are computed once,
// and never written by two in one step (the executor checks).
void TestSharedPromptIsCaughtUpOnce() {
  Setup setup;
  Engine engine(setup.Mode(PSM_DRAFT_MODEL));
  Ask ask;
  for (int32_t i = 0; i < 41; ++i) ask.prompt.push_back(i);
  ask.request.max_tokens = 30;
  ask.request.num_return_sequences = 6;
  const uint64_t id = engine.Submit(&ask);
  engine.Drain();
  const psm_engine_stats stats = engine.Stats();
  CHECK(stats.num_failed_drafts == 0 && stats.num_accepted_draft_tokens > 60);
  for (int32_t s = 0; s < 6; ++s) {
    Ask alone = ask;
    alone.request.seed += static_cast<uint64_t>(s);
    CHECK(engine.Of(id, s).tokens == Plain(alone));
  }
}

// Beams, contexts and requests that want none get no drafts.
void TestWhoGetsNone() {
  for (const int32_t mode : {PSM_DRAFT_MODEL, PSM_DRAFT_NGRAM}) {
    Setup setup;
    Engine engine(setup.Mode(mode));
    Ask beams, none, last;
    beams.prompt = none.prompt = last.prompt = {4, 4, 4, 4};
    beams.request.beam_width = 2;
    beams.request.temperature = none.request.temperature = last.request.temperature = 0.0f;
    none.request.max_draft_len = 0;
    last.request.max_tokens = 2;  // the token behind the first needs no draft
    for (Ask* ask : {&beams, &none, &last}) engine.Submit(ask);
    engine.Drain();
    CHECK(engine.Stats().num_draft_tokens == 0);
  }
}

// A language without end: tokens are even and odd in turn.
constexpr int32_t kEndId = 96;
struct ParityGuide {
  std::vector<int32_t> accepted;
  int32_t vocab_size = 97;
  int64_t* num_illegal_ahead;

  psm_guide Table() {
    psm_guide g{};
    g.struct_size = PSM_GUIDE_SIZE;
    g.self = this;
    g.fill_mask = [](void* self, const int32_t* ahead, int32_t n, uint32_t* mask) {
      static_cast<ParityGuide*>(self)->Fill(ahead, n, mask);
      return psm_status{PSM_OK};
    };
    g.accept = [](void* self, const int32_t* tokens, int32_t n) {
      auto* guide = static_cast<ParityGuide*>(self);
      guide->accepted.insert(guide->accepted.end(), tokens, tokens + n);
      return psm_status{PSM_OK};
    };
    g.close = [](void* self) { delete static_cast<ParityGuide*>(self); };
    return g;
  }
  static bool Allowed(int32_t before, int32_t token) {
    return before < 0 || before % 2 != token % 2;
  }
  void Fill(const int32_t* ahead, int32_t n, uint32_t* mask) const {
    std::fill(mask, mask + (vocab_size + 31) / 32, 0u);
    int32_t before = accepted.empty() ? -1 : accepted.back();
    for (int32_t i = 0; i < n; before = ahead[i++]) {
      if (Allowed(before, ahead[i])) continue;
      ++*num_illegal_ahead;
      return;
    }
    for (int32_t v = 0; v < kEndId; ++v) {
      if (Allowed(before, v)) mask[v / 32] |= 1u << (v % 32);
    }
  }
};

// Drafts obey the guide, so that no row is spent on what it forbids.
void TestGuides() {
  for (const int32_t mode : {PSM_DRAFT_OFF, PSM_DRAFT_MODEL, PSM_DRAFT_NGRAM}) {
    Setup setup;
    setup.Mode(mode).noise = 1.0f;
    setup.model.range = 1.5f;
    setup.options.ngram_min = 1;
    std::vector<std::vector<int32_t>> tokens;
    for (uint64_t seed = 0; seed < 12; ++seed) {
      Engine engine(setup);
      Ask ask;
      int64_t num_illegal_ahead = 0;
      auto* guide = new ParityGuide;
      guide->num_illegal_ahead = &num_illegal_ahead;
      const psm_guide table = guide->Table();
      ask.prompt = {2, 1, 1, 4, 4, 4, 2, 1, 1, 3};
      ask.request.seed = seed;
      ask.request.max_tokens = 50;
      ask.request.temperature = seed % 3 == 0 ? 0.0f : 1.0f;
      ask.request.guide = &table;
      ask.end_ids = {kEndId};
      const uint64_t id = engine.Submit(&ask);
      engine.Drain();
      const Result& got = engine.Of(id);
      CHECK(got.status == PSM_OK && got.tokens.size() == 50);
      for (size_t i = 1; i < got.tokens.size(); ++i)
        CHECK(ParityGuide::Allowed(got.tokens[i - 1], got.tokens[i]));
      CHECK(num_illegal_ahead == 0);
      tokens.push_back(got.tokens);
      if (mode == PSM_DRAFT_MODEL) CHECK(got.stats.num_accepted_draft_tokens > 5);
    }
    static std::vector<std::vector<int32_t>> without;
    if (mode == PSM_DRAFT_OFF) without = tokens;
    CHECK(tokens == without);
  }
}

int64_t test_clock_ns = 0;

// Costs of a step of target and draft, ns.
struct Machine {
  int64_t target_fixed, target_per_token, draft_fixed, draft_per_token;
};

// How long 6 requests take together, on a machine whose clock is its costs, and the drafts.
int64_t TimeOn(const Machine& machine, int32_t mode, int32_t adaptive, float noise,
               int64_t* num_drafted) {
  Setup setup;
  setup.Mode(mode).noise = noise;
  setup.options.adaptive_draft_len = adaptive;
  setup.options.max_draft_len = 7;
  Engine engine(setup);
  engine.now_ns = [](void*) { return test_clock_ns; };
  engine.target.clock_ns = engine.draft.clock_ns = &test_clock_ns;
  engine.target.fixed_ns = machine.target_fixed;
  engine.target.per_token_ns = machine.target_per_token;
  engine.draft.fixed_ns = machine.draft_fixed;
  engine.draft.per_token_ns = machine.draft_per_token;
  std::vector<Ask> asks(6);
  const int64_t begin_ns = test_clock_ns;
  for (size_t i = 0; i < asks.size(); ++i) {
    asks[i].prompt = {9, static_cast<int32_t>(i)};
    asks[i].request.max_tokens = 150;
    asks[i].request.temperature = 0.0f;
    engine.Submit(&asks[i]);
  }
  engine.Drain();
  *num_drafted = static_cast<int64_t>(engine.Stats().num_draft_tokens);
  return test_clock_ns - begin_ns;
}

// Lengths that follow acceptance and cost are about as good as no drafts where drafts are bad, and
// about as good as long ones where those are good.
void TestAdapts() {
  const Machine memory_bound = {10000000, 10000, 1000000, 1000};
  const Machine compute_bound = {10000, 1000000, 1000, 100000};
  int64_t drafted;
  for (const Machine& machine : {memory_bound, compute_bound}) {
    for (const float noise : {0.0f, 100.0f}) {
      const int64_t off = TimeOn(machine, PSM_DRAFT_OFF, 0, noise, &drafted);
      const int64_t fixed = TimeOn(machine, PSM_DRAFT_MODEL, 0, noise, &drafted);
      const int64_t adaptive = TimeOn(machine, PSM_DRAFT_MODEL, 1, noise, &drafted);
      printf("%s-bound, %s draft: %.2f s without, %.2f fixed, %.2f adaptive (%lld drafted)\n",
             machine.target_fixed > machine.target_per_token ? "memory" : "compute",
             noise == 0.0f ? "perfect" : "useless", static_cast<double>(off) / 1e9,
             static_cast<double>(fixed) / 1e9, static_cast<double>(adaptive) / 1e9,
             static_cast<long long>(drafted));
      CHECK(static_cast<double>(adaptive) <= 1.15 * static_cast<double>(std::min(off, fixed)));
    }
  }
}

// Steps in the middle of long outputs, drafts and all.
void TestAllocatesNothing() {
  for (const int32_t mode : {PSM_DRAFT_MODEL, PSM_DRAFT_NGRAM}) {
    for (const int32_t adaptive : {0, 1}) {
      Setup setup;
      setup.Mode(mode).noise = 1.0f;
      setup.options.adaptive_draft_len = adaptive;
      setup.options.iter_stats_max_iterations = 8;
      setup.model.vocab_size = 40;
      Engine engine(setup);
      std::vector<Ask> asks(6);
      for (size_t i = 0; i < asks.size(); ++i) {
        asks[i].prompt = {1, 2, 1, 2, static_cast<int32_t>(i), 1, 2};
        asks[i].request.max_tokens = 150;
        asks[i].request.repetition_penalty = 1.1f;
        asks[i].request.top_p = 0.9f;
        asks[i].request.seed = i;
        engine.Submit(&asks[i]);
      }
      for (int i = 0; i < 12; ++i) engine.Step();
      long most = 0;
      for (int i = 0; i < 8; ++i) {
        // The harness itself keeps tokens in vectors, so the step alone is looked at.
        const long before = num_news;
        engine.StepOnly();
        most = std::max(most, num_news - before);
        engine.Poll();
      }
      CHECK(most == 0);
      // Adaptive lengths rightly come out as none: this draft costs what the target does.
      if (mode == PSM_DRAFT_MODEL && adaptive == 0)
        CHECK(engine.Stats().num_accepted_draft_tokens > 20);
    }
  }
}

}  // namespace

int main() {
  TestPerfectDraftIsAlwaysAccepted();
  TestDraftsAreTheDraftModels();
  TestSameTokens();
  TestFailingDraft();
  TestCatchUpHoldsUpNobody();
  TestSharedPromptIsCaughtUpOnce();
  TestWhoGetsNone();
  TestGuides();
  TestAdapts();
  TestAllocatesNothing();
  return 0;
}
