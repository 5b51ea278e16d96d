// The engine under attack: random requests of every kind over random small engines, with cancels,
// deadlines, pauses, swaps, drafts and failing steps. Whatever happens, every block is accounted
// for, and what a request says is what it would have said alone.
//
//     fuzz_test [requests [seed]]        episodes of random engines until so many were asked for
//     fuzz_test --episode seed           one of them again
//
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <string>
#include <thread>

#include "fuzz_model.h"
#include "give_candidates.h"
#include "halves_executor.h"
#include "status.h"

namespace plansmith {
namespace {

uint64_t current_episode = 0;
std::string current_engine;  // its options, in words

#define FUZZ_CHECK(condition, ...)                                                           \
  do {                                                                                       \
    if (!(condition)) {                                                                      \
      fprintf(stderr, "%s:%d: %s\n  ", __FILE__, __LINE__, #condition);                      \
      fprintf(stderr, __VA_ARGS__);                                                          \
      fprintf(stderr, "\n  %s\n  again: fuzz_test --episode %llu\n", current_engine.c_str(), \
              static_cast<unsigned long long>(current_episode));                             \
      exit(1);                                                                               \
    }                                                                                        \
  } while (0)

// What has been exercised: a test that reaches nothing finds nothing.
struct Coverage {
  uint64_t requests = 0, completed = 0, cancelled = 0, timed_out = 0, failed = 0, refused = 0;
  uint64_t beams = 0, tokens = 0, context_events = 0;
  uint64_t pauses = 0, reused_tokens = 0, offloaded = 0, onboarded = 0, drafted = 0, accepted = 0,
           ngram_accepted = 0, steps = 0;
  int64_t drawn_rows = 0, given_rows = 0;  // by executors with halves, and as logits by those
  int64_t candidate_rows = 0;
} coverage;

// An executor whose steps and copies fail now and then, or whose logits hold a NaN.
struct Flaky {
  psm_executor inner{};
  FuzzRandom random{1};
  int32_t step_failures = 0;  // one in so many; 0 = none
  int32_t copy_failures = 0;
  int32_t nans = 0;  // a row in so many
  bool can_copy = true;
  bool gives_candidates = false;
  int32_t vocab_size = 0;

  static psm_executor Table(Flaky* self) {
    psm_executor e = self->inner;
    e.self = self;
    e.describe = [](void* s, psm_model_info* info) {
      const psm_status status = Of(s).describe(Of(s).self, info);
      if (static_cast<Flaky*>(s)->gives_candidates) info->samples_rows = PSM_SAMPLES_CANDIDATES;
      return status;
    };
    e.open = [](void* s, int32_t n) { return Of(s).open(Of(s).self, n); };
    e.open_host = [](void* s, int32_t n) { return Of(s).open_host(Of(s).self, n); };
    e.step = [](void* s, const psm_batch* batch, const float** logits) -> psm_status {
      Flaky* f = static_cast<Flaky*>(s);
      if (f->step_failures > 0 && f->random.OneIn(f->step_failures)) return PSM_ERROR_CUDA;
      const psm_status status = Of(s).step(Of(s).self, batch, logits);
      for (int32_t row = 0; status == PSM_OK && f->nans > 0 && row < batch->num_logits_rows;
           ++row) {
        if (!f->random.OneIn(f->nans)) continue;
        const_cast<float*>(*logits)[row * f->vocab_size] = std::numeric_limits<float>::quiet_NaN();
      }
      if (status == PSM_OK && batch->num_candidates > 0) f->GiveCandidates(*batch, *logits);
      return status;
    };
    e.copy_blocks = [](void* s, const psm_block_copy* copies, size_t n) -> psm_status {
      Flaky* f = static_cast<Flaky*>(s);
      if (f->copy_failures > 0 && f->random.OneIn(f->copy_failures)) return PSM_ERROR_CUDA;
      return Of(s).copy_blocks(Of(s).self, copies, n);
    };
    e.load_adapter = [](void* s, int32_t slot, const psm_lora_module* m, size_t n) {
      return Of(s).load_adapter(Of(s).self, slot, m, n);
    };
    e.unload_adapter = [](void* s, int32_t slot) { return Of(s).unload_adapter(Of(s).self, slot); };
    e.now_ns = [](void* s) { return Of(s).now_ns(Of(s).self); };
    e.last_error = [](void* s) { return Of(s).last_error(Of(s).self); };
    e.close = [](void* s) {
      Of(s).close(Of(s).self);
      delete static_cast<Flaky*>(s);
    };
    if (!self->can_copy) {
      e.copy_blocks = nullptr;
      e.open_host = nullptr;
    }
    return e;
  }
  static const psm_executor& Of(void* s) { return static_cast<Flaky*>(s)->inner; }
  void GiveCandidates(const psm_batch& batch, const float* logits) const {
    CHECK(gives_candidates);
    coverage.candidate_rows += batch.num_logits_rows;
    for (int32_t row = 0; row < batch.num_logits_rows; ++row) {
      give_candidates(logits + row * vocab_size, vocab_size, batch.num_candidates,
                      batch.candidates + row * batch.num_candidates);
    }
  }
};

constexpr uint64_t kModelSeed = 77;

psm_simulated_options RandomModel(FuzzRandom* r) {
  psm_simulated_options m;
  psm_simulated_options_init(&m);
  m.seed = kModelSeed;
  m.info.vocab_size = r->Between(12, 40);
  m.info.tokens_per_block = r->OneIn(8) ? 1 : r->Between(2, 8);
  m.info.max_batch_size = r->Between(1, 14);
  m.info.max_num_tokens = r->Between(m.info.max_batch_size, 60);
  m.info.max_input_len = r->Between(8, 48);
  m.info.max_seq_len = m.info.max_input_len + r->Between(4, 60);
  m.info.max_logits_rows = r->OneIn(2) ? 0 : r->Between(m.info.max_batch_size, 60);
  m.info.max_adapters = 3;
  m.info.kv_bytes_per_block = 4096;
  m.overhead_us = 150;                             // so that some deadlines of milliseconds pass
  if (r->OneIn(3)) m.host_copy_bytes_per_s = 1e8;  // recomputing is cheaper
  return m;
}

psm_engine_options RandomOptions(const psm_model_info& info, FuzzRandom* r) {
  psm_engine_options o;
  psm_engine_options_init(&o);
  o.scheduler_policy = r->Below(2);
  o.chunking_policy = r->Below(2);
  o.pause_policy = r->Below(3);
  o.enable_chunked_context = !r->OneIn(5);
  o.enable_block_reuse = !r->OneIn(4);
  o.enable_partial_reuse = !r->OneIn(3);
  o.max_tenant_share = r->OneIn(3) ? 0.5f : 1.0f;
  o.max_queue_size = r->OneIn(6) ? r->Between(1, 12) : 100000;
  o.host_offload_min_priority = r->OneIn(3) ? 50 : 0;
  o.max_kv_events = r->OneIn(2) ? 100 : 0;
  o.draft_mode = r->Below(3);
  const int32_t rows = info.max_logits_rows == 0 ? info.max_batch_size : info.max_logits_rows;
  o.max_draft_len = std::min(r->Between(1, 6), std::min(rows, info.max_num_tokens) - 1);
  if (o.max_draft_len == 0) o.draft_mode = PSM_DRAFT_OFF;
  o.adaptive_draft_len = r->OneIn(2);
  o.ngram_min = r->Between(1, 2);
  o.ngram_max = r->Between(o.ngram_min, 4);
  o.struct_size = PSM_ENGINE_OPTIONS_SIZE;
  o.queue_order = r->Below(2);
  const int32_t longest = (info.max_seq_len - 1) / info.tokens_per_block + 1;
  // Often so few that those who run get into each other's way.
  const int32_t num_blocks = longest * (r->OneIn(3) ? r->Between(3, 8) : 1) + r->Below(longest + 2);
  const uint64_t bytes = info.kv_bytes_per_block * (o.draft_mode == PSM_DRAFT_MODEL ? 2 : 1);
  o.kv_cache_bytes = bytes * static_cast<uint64_t>(num_blocks);
  if (r->OneIn(2) || o.pause_policy == PSM_PAUSE_SWAP)
    o.host_cache_bytes = bytes * static_cast<uint64_t>(r->Between(1, 40));
  return o;
}

std::string Describe(const EngineConfig& c) {
  const psm_engine_options& o = c.options;
  return Format(
      "policy %d order %d chunking %d chunked %d pause %d reuse %d partial %d tenant share %g "
      "draft %d of "
      "%d "
      "(adaptive %d); blocks %d of %d, host %d, batch %d, budget %d, rows %d, input %d, length %d, "
      "queue %d, manual %d",
      o.scheduler_policy, o.queue_order, o.chunking_policy, o.enable_chunked_context,
      o.pause_policy, o.enable_block_reuse, o.enable_partial_reuse,
      static_cast<double>(o.max_tenant_share), o.draft_mode, o.max_draft_len, o.adaptive_draft_len,
      c.num_blocks, c.info.tokens_per_block, c.num_host_blocks, c.info.max_batch_size,
      c.info.max_num_tokens, c.info.max_logits_rows, c.info.max_input_len, c.info.max_seq_len,
      o.max_queue_size, o.manual_step);
}

psm_executor Simulated(const psm_simulated_options& options) {
  psm_executor e;
  CHECK_OK(psm_simulated_executor_create(&options, &e));
  return e;
}

// What an engine has said about one sequence, held against what it must say.
struct Seen {
  int32_t num_tokens = 0;
  int32_t num_context = 0;
  std::vector<int32_t> tokens;
  bool done = false;
};

struct Live {
  std::unique_ptr<FuzzRequest> fuzz;
  uint64_t id = 0;
  uint64_t adapter_id = 0;
  std::atomic<bool> cancelled{false};
  std::vector<Seen> seen;
  bool over = false;
};

class Checker {
 public:
  explicit Checker(int32_t vocab_size) : vocab_size_(vocab_size), sampler_(vocab_size) {}

  // client_id is the index of the request in `all`.
  void Take(const psm_event& event, Live* live) {
    const FuzzRequest& fuzz = *live->fuzz;
    const size_t num_sequences = fuzz.has_beams()
                                     ? static_cast<size_t>(fuzz.request.beam_width)
                                     : static_cast<size_t>(fuzz.request.num_return_sequences);
    live->seen.resize(num_sequences);
    FUZZ_CHECK(!live->over, "an event after the last of request %llu", Number(event));
    FUZZ_CHECK(event.sequence_idx >= 0 && static_cast<size_t>(event.sequence_idx) < num_sequences,
               "sequence %d", event.sequence_idx);
    Seen* seen = &live->seen[static_cast<size_t>(event.sequence_idx)];
    FUZZ_CHECK(!seen->done, "an event after the end of sequence %d", event.sequence_idx);
    switch (event.kind) {
      case PSM_EVENT_CONTEXT:
        TakeContext(event, fuzz, seen);
        break;
      case PSM_EVENT_TOKEN:
        TakeToken(event, fuzz, seen);
        break;
      case PSM_EVENT_FINISHED:
      case PSM_EVENT_FAILED:
        TakeEnd(event, live, seen);
        break;
      default:
        FUZZ_CHECK(false, "an event of kind %d", event.kind);
    }
  }

  bool executor_may_fail = false;
  bool is_shut_down = false;

 private:
  static unsigned long long Number(const psm_event& e) { return e.request_id; }

  static std::string Text(const std::vector<int32_t>& tokens) {
    std::string text;
    for (int32_t token : tokens) text += Format("%d ", token);
    return text;
  }

  const ExpectedSequence& ExpectedOf(const FuzzRequest& fuzz, const psm_event& event) {
    return fuzz.expected[static_cast<size_t>(event.sequence_idx)];
  }

  void TakeContext(const psm_event& event, const FuzzRequest& fuzz, Seen* seen) {
    ++coverage.context_events;
    FUZZ_CHECK(fuzz.wants_context() && seen->num_tokens == 0 && event.sequence_idx == 0,
               "a CONTEXT event nobody wants");
    FUZZ_CHECK(event.output_idx == seen->num_context, "position %d after %d", event.output_idx,
               seen->num_context);
    const size_t p = static_cast<size_t>(seen->num_context++);
    FUZZ_CHECK(p < fuzz.prompt.size(), "position %zu", p);
    const int32_t next = p + 1 < fuzz.prompt.size() ? fuzz.prompt[p + 1] : -1;
    FUZZ_CHECK(event.token_id == next, "token %d, wanted %d", event.token_id, next);
    const std::vector<float> row = Row(ExpectedOf(fuzz, event).hashes[p]);
    CheckLogits(event, fuzz.request.return_context_logits != 0, row);
    if (fuzz.request.num_prompt_logprobs < 0) return;
    Sample sample;
    sampler_.RowLogProbs(row.data(), Request(), next, fuzz.request.num_prompt_logprobs, &sample);
    CheckTop(event, sample, next >= 0);
  }

  void TakeToken(const psm_event& event, const FuzzRequest& fuzz, Seen* seen) {
    ++coverage.tokens;
    FUZZ_CHECK(event.output_idx == seen->num_tokens, "output %d after %d tokens", event.output_idx,
               seen->num_tokens);
    const size_t idx = static_cast<size_t>(seen->num_tokens++);
    seen->tokens.push_back(event.token_id);
    if (fuzz.has_beams()) return;  // compared as a whole, at the end
    if (fuzz.wants_context() && event.sequence_idx == 0) {
      FUZZ_CHECK(seen->num_context == static_cast<int32_t>(fuzz.prompt.size()),
                 "a token after %d of %zu CONTEXT events", seen->num_context, fuzz.prompt.size());
    }
    const ExpectedSequence& want = ExpectedOf(fuzz, event);
    FUZZ_CHECK(idx < want.tokens.size(), "request %llu gives more than the %zu tokens it has alone",
               Number(event), want.tokens.size());
    FUZZ_CHECK(event.token_id == want.tokens[idx],
               "request %llu (client %llu), sequence %d, output %zu: token %d, alone it is %d",
               Number(event), static_cast<unsigned long long>(event.client_id), event.sequence_idx,
               idx, event.token_id, want.tokens[idx]);
    CheckLogits(event, fuzz.request.return_generation_logits != 0,
                Row(want.hashes[fuzz.prompt.size() - 1 + idx]));
    if (fuzz.request.num_logprobs > 0) CheckTop(event, want.samples[idx], true);
  }

  void TakeEnd(const psm_event& event, Live* live, Seen* seen) {
    const FuzzRequest& fuzz = *live->fuzz;
    seen->done = true;
    if (event.is_final) {
      live->over = true;
      Count(event);
    }
    if (event.kind == PSM_EVENT_FAILED) {
      FUZZ_CHECK((executor_may_fail && event.status == PSM_ERROR_EXECUTOR) ||
                     (is_shut_down && event.status == PSM_ERROR_SHUTDOWN),
                 "request %llu failed: %s", Number(event), event.message);
      return;
    }
    if (event.finish_reason == PSM_FINISH_CANCELLED) {
      FUZZ_CHECK(live->cancelled, "request %llu cancelled itself", Number(event));
      return;
    }
    if (event.finish_reason == PSM_FINISH_TIMED_OUT) {
      FUZZ_CHECK(fuzz.request.allotted_time_ms > 0, "request %llu has no deadline", Number(event));
      return;
    }
    FUZZ_CHECK(event.stats.num_prompt_tokens == static_cast<int32_t>(fuzz.prompt.size()) &&
                   event.stats.first_token_time_ns > event.stats.arrival_time_ns &&
                   event.stats.last_token_time_ns >= event.stats.first_token_time_ns,
               "its statistics are wrong");
    const ExpectedSequence& want = ExpectedOf(fuzz, event);
    FUZZ_CHECK(seen->tokens == want.tokens, "request %llu, sequence %d (%s): %s, alone %s",
               Number(event), event.sequence_idx, fuzz.has_beams() ? "a beam" : "sampled",
               Text(seen->tokens).c_str(), Text(want.tokens).c_str());
    FUZZ_CHECK(event.finish_reason == want.finish_reason, "finish reason %d, alone it is %d",
               event.finish_reason, want.finish_reason);
    FUZZ_CHECK(event.stats.num_generated_tokens == seen->num_tokens, "it counts %d of %d tokens",
               event.stats.num_generated_tokens, seen->num_tokens);
  }

  static void Count(const psm_event& event) {
    coverage.failed += event.kind == PSM_EVENT_FAILED;
    if (event.kind == PSM_EVENT_FAILED) return;
    coverage.cancelled += event.finish_reason == PSM_FINISH_CANCELLED;
    coverage.timed_out += event.finish_reason == PSM_FINISH_TIMED_OUT;
    coverage.completed += event.finish_reason == PSM_FINISH_LENGTH ||
                          event.finish_reason == PSM_FINISH_END_ID ||
                          event.finish_reason == PSM_FINISH_STOP_WORDS;
  }

  std::vector<float> Row(uint64_t hash) const {
    std::vector<float> row(static_cast<size_t>(vocab_size_));
    simulated::FillRow(hash, vocab_size_, row.data());
    return row;
  }

  void CheckLogits(const psm_event& event, bool wanted, const std::vector<float>& row) {
    FUZZ_CHECK((event.logits != nullptr) == wanted, "logits are %s", wanted ? "missing" : "there");
    if (!wanted) return;
    FUZZ_CHECK(std::memcmp(event.logits, row.data(), row.size() * sizeof(float)) == 0,
               "request %llu: other logits at %d", Number(event), event.output_idx);
    psm_logits_free(event.logits);
  }

  void CheckTop(const psm_event& event, const Sample& want, bool has_own) {
    FUZZ_CHECK(!has_own || event.logprob == want.logprob, "logprob %g, alone it is %g",
               static_cast<double>(event.logprob), static_cast<double>(want.logprob));
    FUZZ_CHECK(event.num_top_logprobs == want.num_top, "%d logprobs, wanted %d",
               event.num_top_logprobs, want.num_top);
    for (int32_t i = 0; i < want.num_top; ++i) {
      FUZZ_CHECK(
          event.top_ids[i] == want.top_ids[i] && event.top_logprobs[i] == want.top_logprobs[i],
          "other top logprobs");
    }
  }

  int32_t vocab_size_;
  Sampler sampler_;
};

// One engine from its making to its end.
class Episode {
 public:
  Episode(uint64_t seed, int32_t num_requests) : r_(seed), all_(static_cast<size_t>(num_requests)) {
    model_ = RandomModel(&r_);
    options_ = RandomOptions(model_.info, &r_);
    threaded_ = r_.OneIn(8);
    options_.manual_step = !threaded_;
    can_copy_ = options_.host_cache_bytes > 0 || !r_.OneIn(4);
    if (r_.OneIn(8)) last_step_ = static_cast<uint64_t>(r_.Below(400));
    MakeEngine();
    shape_.vocab_size = model_.info.vocab_size;
    shape_.max_input_len = config().info.max_input_len;
    if (options_.enable_chunked_context == 0)
      shape_.max_input_len = std::min(shape_.max_input_len, config().info.max_num_tokens);
    shape_.max_seq_len = config().info.max_seq_len;
    shape_.max_beams = can_copy_ ? std::min(4, config().info.max_batch_size) : 1;
    shape_.max_draft_len = options_.max_draft_len;
    for (int i = 0; i < 3; ++i) {
      std::vector<int32_t> prefix(static_cast<size_t>(r_.Between(4, 40)));
      for (int32_t& id : prefix) id = r_.Below(shape_.vocab_size);
      shape_.prefixes.push_back(prefix);
    }
  }

  void Run() {
    if (threaded_) {
      RunThreaded();
    } else {
      RunByHand();
    }
    Settle();
  }

 private:
  const EngineConfig& config() const { return engine_->config(); }

  // In half of the engines its step has two halves, and mostly it draws by itself.
  psm_executor MaybeInHalves(const psm_executor& executor, std::string* words) {
    if (r_.OneIn(2)) return executor;
    auto halves = std::make_unique<HalvesExecutor>(executor);
    halves->draws = !r_.OneIn(4);
    halves->is_async = r_.OneIn(6);
    halves->num_drawn = &coverage.drawn_rows;
    halves->num_given = &coverage.given_rows;
    if (may_fail_) {
      halves->fail_launch = r_.Below(60);
      halves->fail_collect = r_.Below(60);
    }
    *words += Format("; halves, draws %d, async %d", halves->draws, halves->is_async);
    return HalvesExecutor::Table(halves.release());
  }

  void MakeEngine() {
    auto flaky = std::make_unique<Flaky>();
    flaky->inner = Simulated(model_);
    flaky->random = FuzzRandom(r_.Next());
    if (r_.OneIn(5)) flaky->step_failures = 40;
    if (r_.OneIn(8)) flaky->copy_failures = 10;
    if (r_.OneIn(10)) flaky->nans = 200;
    flaky->vocab_size = model_.info.vocab_size;
    flaky->can_copy = can_copy_;
    flaky->gives_candidates = r_.OneIn(2);
    may_fail_ = flaky->step_failures > 0 || flaky->copy_failures > 0 || flaky->nans > 0;
    std::string failures =
        Format("; one in %d steps, %d copies, %d rows fails; %s", flaky->step_failures,
               flaky->copy_failures, flaky->nans, can_copy_ ? "copies" : "cannot copy");
    const psm_executor executor = MaybeInHalves(Flaky::Table(flaky.release()), &failures);
    psm_executor draft{};
    if (options_.draft_mode == PSM_DRAFT_MODEL) {
      psm_simulated_options d = model_;
      d.seed = kModelSeed + 1;
      d.draft_of_seed = kModelSeed;
      d.draft_agreement = r_.OneIn(2) ? 1.0 : 0.3 * r_.Below(4);
      d.info.max_adapters = 0;
      auto flaky_draft = std::make_unique<Flaky>();
      flaky_draft->inner = Simulated(d);
      if (may_fail_) flaky_draft->step_failures = 30;
      draft = MaybeInHalves(Flaky::Table(flaky_draft.release()), &failures);
      options_.draft_executor = &draft;
    }
    engine_ = std::make_unique<Engine>(MakeEngineConfig(&executor, &options_));
    options_.draft_executor = nullptr;
    current_engine = Describe(config()) + failures;
  }

  // The beams of a request that has an engine for itself: no reuse, no draft, no lack of anything.
  void ExpectBeams(FuzzRequest* fuzz, uint64_t adapter_salt) {
    psm_engine_options o;
    psm_engine_options_init(&o);
    o.manual_step = 1;
    o.enable_block_reuse = 0;
    const psm_executor executor = Simulated(model_);
    Engine engine(MakeEngineConfig(&executor, &o));
    psm_request q = fuzz->Get();
    q.cache_salt = 0;
    q.allotted_time_ms = 0;
    if (q.adapter_id != 0) {
      const FuzzAdapter adapter(adapter_salt);
      const psm_lora_module module = adapter.Module();
      engine.LoadAdapter(q.adapter_id, &module, 1);
    }
    engine.Submit(CheckRequest(q, engine.config()));
    fuzz->expected.resize(static_cast<size_t>(q.beam_width));
    while (engine.StepOnce()) {
    }
    psm_event event;
    while (engine.events().Poll(&event, 1, 0) > 0) {
      ExpectedSequence& e = fuzz->expected[static_cast<size_t>(event.sequence_idx)];
      if (event.kind == PSM_EVENT_TOKEN) {
        e.tokens.push_back(event.token_id);
      } else {
        FUZZ_CHECK(event.kind == PSM_EVENT_FINISHED, "beams alone fail: %s", event.message);
        e.finish_reason = event.finish_reason;
      }
    }
  }

  // Ids 1 and 2 with, in time, other numbers under the same id.
  void ChangeAdapters() {
    const uint64_t id = static_cast<uint64_t>(r_.Between(1, 2));
    try {
      if (adapter_salts_[id] != 0) {
        engine_->UnloadAdapter(id);
        adapter_salts_[id] = 0;
        if (r_.OneIn(4)) return;
      }
      const FuzzAdapter adapter(++last_salt_);
      const psm_lora_module module = adapter.Module();
      engine_->LoadAdapter(id, &module, 1);
      adapter_salts_[id] = last_salt_;
    } catch (const StatusError& e) {
      FUZZ_CHECK(adapter_salts_[id] != 0 && e.code() == PSM_ERROR_INVALID_ARGUMENT,
                 "adapter %d: %s", static_cast<int>(id), e.what());
    }
  }

  // In a vocabulary of a dozen tokens a long output may repeat none of them: not without all of its
  // n-grams forbidding every token.
  void ExpectTokens(FuzzRequest* fuzz) {
    try {
      Expect(config(), kModelSeed, fuzz);
    } catch (const StatusError&) {
      FUZZ_CHECK(fuzz->request.no_repeat_ngram_size > 0, "the script forbids every token");
      fuzz->request.no_repeat_ngram_size = 0;
      fuzz->expected.clear();
      Expect(config(), kModelSeed, fuzz);
    }
  }

  void Submit() {
    const size_t idx = num_submitted_++;
    Live* live = &all_[idx];
    live->fuzz = RandomRequest(shape_, &r_);
    FuzzRequest* fuzz = live->fuzz.get();
    fuzz->request.client_id = idx;
    const uint64_t adapter = static_cast<uint64_t>(r_.OneIn(4) ? r_.Between(1, 2) : 0);
    if (adapter != 0 && adapter_salts_[adapter] != 0) {
      fuzz->request.adapter_id = adapter;
      fuzz->adapter_print = FuzzAdapter(adapter_salts_[adapter]).Print();
    }
    ++coverage.requests;
    if (!fuzz->has_beams()) {
      ExpectTokens(fuzz);
      if (r_.OneIn(4)) AddCallerDraft(shape_.vocab_size, &r_, fuzz);
    } else {
      ++coverage.beams;
      ExpectBeams(fuzz, adapter_salts_[adapter]);
    }
    psm_request q = fuzz->Get();
    auto guide = std::make_unique<FuzzGuide>();
    guide->vocab_size = shape_.vocab_size;
    guide->salt = fuzz->guide_salt;
    const psm_guide table = FuzzGuide::Table(guide.get());
    if (fuzz->guide_salt != 0) q.guide = &table;
    try {
      live->id = engine_->Submit(CheckRequest(q, config()));
      if (q.guide != nullptr) guide.release();
    } catch (const StatusError& e) {
      const bool too_wide = e.code() == PSM_ERROR_OUT_OF_MEMORY && fuzz->has_beams();
      FUZZ_CHECK(too_wide || e.code() == PSM_ERROR_QUEUE_FULL, "a request was refused: %s",
                 e.what());
      live->over = true;
      ++coverage.refused;
    }
  }

  void CancelSome() {
    if (num_submitted_ == 0) return;
    const size_t back = std::min<size_t>(num_submitted_, 30);
    Live* live =
        &all_[num_submitted_ - 1 - static_cast<size_t>(r_.Below(static_cast<int32_t>(back)))];
    if (live->id == 0) return;
    try {
      live->cancelled = true;
      engine_->Cancel(live->id);
    } catch (const StatusError& e) {
      FUZZ_CHECK(e.code() == PSM_ERROR_NOT_FOUND, "%s", e.what());
    }
  }

  void Act() {
    if (num_submitted_ < all_.size() && r_.OneIn(3)) {
      for (int32_t n = r_.OneIn(10) ? 30 : r_.Between(1, 3); n > 0 && num_submitted_ < all_.size();
           --n) {
        Submit();
      }
    }
    if (r_.OneIn(6)) CancelSome();
    if (r_.OneIn(3)) ChangeAdapters();
  }

  bool AllSubmitted() const { return num_submitted_ == all_.size(); }

  void RunByHand() {
    Checker checker(shape_.vocab_size);
    checker.executor_may_fail = may_fail_;
    int64_t idle_steps = 0;
    for (uint64_t step = 0;; ++step) {
      Act();
      const bool ran = engine_->StepOnce();
      Drain(&checker);
      if (step % 8 == 0) Check();
      if (step == last_step_) return ShutDown(&checker);
      if (ran || !AllSubmitted()) {
        idle_steps = 0;
        FUZZ_CHECK(step < 200000, "no end in sight: %zu of %zu submitted", num_submitted_,
                   all_.size());
        continue;
      }
      if (++idle_steps < 3) continue;
      for (const Live& live : all_) {
        FUZZ_CHECK(live.over, "the engine is idle and request %llu is not over",
                   static_cast<unsigned long long>(live.id));
      }
      return;
    }
  }

  // Everybody gets an end, and nobody gets in any more.
  void ShutDown(Checker* checker) {
    checker->is_shut_down = true;
    engine_->Shutdown();
    Drain(checker);
    for (size_t i = 0; i < num_submitted_; ++i)
      FUZZ_CHECK(all_[i].over, "a request without an end after the shutdown");
    try {
      FuzzRequest again;
      again.prompt = {1};
      again.request.max_tokens = 1;
      engine_->Submit(CheckRequest(again.Get(), config()));
      FUZZ_CHECK(false, "a request was taken after the shutdown");
    } catch (const StatusError& e) {
      FUZZ_CHECK(e.code() == PSM_ERROR_SHUTDOWN, "%s", e.what());
    }
  }

  void Drain(Checker* checker) {
    psm_event events[32];
    for (;;) {
      const int64_t n = engine_->events().Poll(events, 32, 0);
      if (n <= 0) return;
      for (int64_t i = 0; i < n; ++i) checker->Take(events[i], &all_[events[i].client_id]);
    }
  }

  void Check() {
    try {
      engine_->CheckInvariants();
    } catch (const StatusError& e) {
      FUZZ_CHECK(false, "%s", e.what());
    }
  }

  // The engine steps by itself, this thread asks and cancels, another one listens.
  void RunThreaded() {
    std::atomic<size_t> num_over{0};
    std::thread listener([&] {
      Checker checker(shape_.vocab_size);
      checker.executor_may_fail = may_fail_;
      psm_event events[16];
      for (;;) {
        const int64_t n = engine_->events().Poll(events, 16, -1);
        if (n < 0) return;
        for (int64_t i = 0; i < n; ++i) {
          Live* live = &all_[events[i].client_id];
          checker.Take(events[i], live);
          if (live->over) ++num_over;
        }
      }
    });
    size_t refused = 0;
    while (!AllSubmitted()) {
      const size_t before = num_submitted_;
      Act();
      for (size_t i = before; i < num_submitted_; ++i) refused += all_[i].id == 0;
      if (r_.OneIn(20)) Check();
      if (r_.OneIn(4)) std::this_thread::yield();
    }
    while (num_over + refused < all_.size()) std::this_thread::yield();
    Check();
    num_over_ = num_over;
    stats_ = engine_->Stats();
    engine_->Shutdown();
    listener.join();
  }

  void Settle() {
    Check();
    const psm_engine_stats s = threaded_ ? stats_ : engine_->Stats();
    FUZZ_CHECK(s.used_num_blocks == 0 && s.num_active_requests == 0 && s.num_queued_requests == 0 &&
                   s.num_paused_requests == 0,
               "%d blocks used, %d active, %d queued, %d paused at the end", s.used_num_blocks,
               s.num_active_requests, s.num_queued_requests, s.num_paused_requests);
    FUZZ_CHECK(s.free_num_blocks == s.max_num_blocks, "%d of %d blocks free", s.free_num_blocks,
               s.max_num_blocks);
    FUZZ_CHECK(s.num_completed_requests == s.num_submitted_requests, "%llu of %llu completed",
               static_cast<unsigned long long>(s.num_completed_requests),
               static_cast<unsigned long long>(s.num_submitted_requests));
    FUZZ_CHECK(options_.scheduler_policy == PSM_MAX_UTILIZATION || s.num_pauses == 0,
               "%llu pauses under GUARANTEED_NO_EVICT",
               static_cast<unsigned long long>(s.num_pauses));
    FUZZ_CHECK(options_.enable_block_reuse != 0 || s.cached_num_blocks == 0,
               "%d blocks cached with reuse off", s.cached_num_blocks);
    coverage.pauses += s.num_pauses;
    coverage.reused_tokens += s.reused_tokens;
    coverage.offloaded += s.offloaded_blocks;
    coverage.onboarded += s.onboarded_blocks;
    coverage.drafted += s.num_draft_tokens;
    coverage.accepted += s.num_accepted_draft_tokens;
    if (options_.draft_mode == PSM_DRAFT_NGRAM)
      coverage.ngram_accepted += s.num_accepted_draft_tokens;
    coverage.steps += s.iter;
  }

  FuzzRandom r_;
  psm_simulated_options model_;
  psm_engine_options options_;
  bool threaded_ = false;
  bool may_fail_ = false;
  bool can_copy_ = true;
  uint64_t last_step_ = ~uint64_t{0};  // then it is shut down, whatever goes on
  FuzzShape shape_;
  std::unique_ptr<Engine> engine_;
  std::vector<Live> all_;
  size_t num_submitted_ = 0;
  size_t num_over_ = 0;
  psm_engine_stats stats_{};
  uint64_t adapter_salts_[3] = {};  // by id; 0 = not loaded
  uint64_t last_salt_ = 0;
};

constexpr int32_t kRequestsEach = 125;

void RunEpisode(uint64_t seed) {
  current_episode = seed;
  Episode(seed, kRequestsEach).Run();
}

void PrintCoverage() {
  const Coverage& c = coverage;
  const auto print = [](const char* name, uint64_t n) {
    printf("%s %llu  ", name, static_cast<unsigned long long>(n));
  };
  print("requests", c.requests), print("completed", c.completed), print("cancelled", c.cancelled);
  print("timed out", c.timed_out), print("failed", c.failed), print("refused", c.refused);
  printf("\n");
  print("steps", c.steps), print("tokens", c.tokens), print("context", c.context_events);
  print("beams", c.beams), print("pauses", c.pauses), print("reused tokens", c.reused_tokens);
  printf("\n");
  print("offloaded", c.offloaded), print("onboarded", c.onboarded), print("drafted", c.drafted);
  print("accepted", c.accepted), print("of n-grams", c.ngram_accepted);
  print("rows drawn by executors", static_cast<uint64_t>(c.drawn_rows));
  print("given", static_cast<uint64_t>(c.given_rows));
  print("with candidates", static_cast<uint64_t>(c.candidate_rows));
  printf("\n");
}

}  // namespace
}  // namespace plansmith

int main(int argc, char** argv) {
  using namespace plansmith;
  if (argc == 3 && std::strcmp(argv[1], "--episode") == 0) {
    RunEpisode(std::strtoull(argv[2], nullptr, 10));
    PrintCoverage();
    return 0;
  }
  const uint64_t requests = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 10000;
  const uint64_t first = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1;
  for (uint64_t episode = first; coverage.requests < requests; ++episode) RunEpisode(episode);
  PrintCoverage();
  if (requests < 2000) return 0;
  // What nothing reached was not tested.
  const Coverage& c = coverage;
  CHECK(c.completed > requests / 3 && c.cancelled > 20 && c.timed_out > 20 && c.failed > 20);
  CHECK(c.pauses > 20 && c.reused_tokens > 1000 && c.beams > 50 && c.context_events > 100);
  CHECK(c.offloaded > 20 && c.onboarded > 20 && c.accepted > 100 && c.ngram_accepted > 10);
  CHECK(c.drawn_rows > 1000 && c.given_rows > 1000 && c.candidate_rows > 1000);
  return 0;
}
