// What a request must give, worked out without an engine: the simulated model's hashes, the core's
// sampler, one token after the other. And random requests to ask for.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "check.h"
#include "engine.h"
#include "engine_config.h"
#include "plansmith/plansmith.h"
#include "request_check.h"
#include "sampler.h"
#include "simulated/executor.h"
#include "simulated/hash_model.h"

namespace plansmith {

class FuzzRandom {
 public:
  explicit FuzzRandom(uint64_t seed) : random_(seed) {}
  int32_t Below(int32_t n) { return static_cast<int32_t>(random_() % static_cast<uint64_t>(n)); }
  int32_t Between(int32_t least, int32_t most) { return least + Below(most - least + 1); }
  bool OneIn(int32_t n) { return Below(n) == 0; }
  uint64_t Next() { return random_(); }

 private:
  std::mt19937_64 random_;
};

// A language for guides: which tokens may stand at an output position.
struct FuzzGuide {
  int32_t vocab_size;
  uint64_t salt;
  int32_t num_accepted = 0;
  bool* closed = nullptr;

  bool Allows(int32_t position, int32_t token) const {
    return simulated::Mix(salt + static_cast<uint64_t>(position), static_cast<uint64_t>(token)) %
               3 !=
           0;
  }
  void Fill(const int32_t* ahead, int32_t num_ahead, uint32_t* mask) const {
    const size_t words = static_cast<size_t>(vocab_size + 31) / 32;
    std::memset(mask, 0, words * sizeof(uint32_t));
    for (int32_t i = 0; i < num_ahead; ++i) {
      if (!Allows(num_accepted + i, ahead[i])) return;
    }
    for (int32_t id = 0; id < vocab_size; ++id) {
      if (Allows(num_accepted + num_ahead, id)) mask[id / 32] |= uint32_t{1} << id % 32;
    }
  }

  static psm_guide Table(FuzzGuide* self) {
    psm_guide g = {};
    g.struct_size = PSM_GUIDE_SIZE;
    g.self = self;
    g.fill_mask = [](void* s, const int32_t* ahead, int32_t n, uint32_t* mask) -> psm_status {
      static_cast<FuzzGuide*>(s)->Fill(ahead, n, mask);
      return PSM_OK;
    };
    g.accept = [](void* s, const int32_t* tokens, int32_t n) -> psm_status {
      FuzzGuide* guide = static_cast<FuzzGuide*>(s);
      for (int32_t i = 0; i < n; ++i) CHECK(guide->Allows(guide->num_accepted++, tokens[i]));
      return PSM_OK;
    };
    g.clone = [](void* s, void** out) -> psm_status {
      const FuzzGuide* guide = static_cast<FuzzGuide*>(s);
      CHECK(guide->num_accepted == 0);
      *out = new FuzzGuide(*guide);
      return PSM_OK;
    };
    g.close = [](void* s) { delete static_cast<FuzzGuide*>(s); };
    return g;
  }
};

// One adapter of the simulated model: its numbers follow from `salt`.
struct FuzzAdapter {
  explicit FuzzAdapter(uint64_t salt) : a(4), b(4) {
    for (size_t i = 0; i < 4; ++i) {
      a[i] = simulated::UnitFloat(simulated::Mix(salt, i));
      b[i] = simulated::UnitFloat(simulated::Mix(salt, i + 4));
    }
  }
  psm_lora_module Module() const { return {0, PSM_LORA_ATTN_Q, 1, 4, 4, 0.5f, a.data(), b.data()}; }
  uint64_t Print() const {
    const psm_lora_module module = Module();
    return simulated::AdapterPrint(&module, 1);
  }
  std::vector<float> a, b;
};

// What one sequence must give when nothing ends it before its time.
struct ExpectedSequence {
  std::vector<int32_t> tokens;
  std::vector<Sample> samples;  // of each token
  int32_t finish_reason = 0;
  std::vector<uint64_t> hashes;  // of the positions: prompt, then output but for its last token
};

// A request, everything it points to, and what must come of it.
struct FuzzRequest {
  FuzzRequest() : request{} {
    psm_request_init(&request);
    request.struct_size = PSM_REQUEST_SIZE;
  }

  psm_request request;
  std::vector<int32_t> prompt, end_ids, stop_ids, stop_ends, bad_ids, bad_ends, bias_ids, draft;
  std::vector<float> bias_values;
  std::vector<psm_retention_range> retention;
  uint64_t guide_salt = 0;  // 0 = none
  uint64_t adapter_print = 0;
  std::vector<ExpectedSequence> expected;  // of beams: from an engine of their own

  bool has_beams() const { return request.beam_width > 1; }
  bool wants_context() const {
    return request.num_prompt_logprobs >= 0 || request.return_context_logits != 0;
  }
  psm_request Get() {
    psm_request r = request;
    r.prompt_ids = prompt.data();
    r.num_prompt_ids = static_cast<int32_t>(prompt.size());
    r.end_ids = end_ids.data();
    r.num_end_ids = static_cast<int32_t>(end_ids.size());
    r.stop_words = {stop_ids.data(), stop_ends.data(), static_cast<int32_t>(stop_ends.size())};
    r.bad_words = {bad_ids.data(), bad_ends.data(), static_cast<int32_t>(bad_ends.size())};
    r.logit_bias_ids = bias_ids.data();
    r.logit_bias_values = bias_values.data();
    r.num_logit_bias = static_cast<int32_t>(bias_ids.size());
    r.retention_ranges = retention.data();
    r.num_retention_ranges = static_cast<int32_t>(retention.size());
    r.draft_ids = draft.data();
    r.num_draft_ids = static_cast<int32_t>(draft.size());
    return r;
  }
};

// Depends on its arguments alone, as it must: moves one logit, by the history's hash.
inline psm_status FuzzProcessor(void*, uint64_t, int32_t sequence_idx, const int32_t* tokens,
                                int32_t num_tokens, float* logits, int32_t vocab_size) {
  uint64_t hash = static_cast<uint64_t>(sequence_idx);
  for (int32_t i = 0; i < num_tokens; ++i)
    hash = simulated::Mix(hash, static_cast<uint64_t>(tokens[i]));
  logits[simulated::BestToken(hash, vocab_size)] += 5.0f;
  return PSM_OK;
}

inline void AppendHash(uint64_t model_seed, uint64_t adapter, int32_t token,
                       std::vector<uint64_t>* hashes) {
  hashes->push_back(
      simulated::HashAt(model_seed, adapter, static_cast<int32_t>(hashes->size()), token,
                        [&](int32_t p) { return (*hashes)[static_cast<size_t>(p)]; }));
}

// Not for beams. `config` is of any engine over the model.
inline void Expect(const EngineConfig& config, uint64_t model_seed, FuzzRequest* fuzz) {
  psm_request given = fuzz->Get();
  FuzzGuide language = {config.info.vocab_size, fuzz->guide_salt};
  const auto sequences = CheckRequest(given, config);
  Sampler sampler(config.info.vocab_size);
  std::vector<float> row(static_cast<size_t>(config.info.vocab_size));
  std::vector<uint32_t> mask((row.size() + 31) / 32);
  for (const std::unique_ptr<Request>& request : sequences) {
    ExpectedSequence e;
    for (int32_t token : fuzz->prompt)
      AppendHash(model_seed, fuzz->adapter_print, token, &e.hashes);
    for (;;) {
      simulated::FillRow(e.hashes.back(), config.info.vocab_size, row.data());
      language.num_accepted = request->num_output();
      if (fuzz->guide_salt != 0) language.Fill(nullptr, 0, mask.data());
      Sample sample;
      sampler.Draw(row.data(), *request, fuzz->guide_salt != 0 ? mask.data() : nullptr, &sample);
      request->PushToken(sample.token);
      e.tokens.push_back(sample.token);
      e.samples.push_back(sample);
      e.finish_reason = FinishReason(*request);
      if (e.finish_reason != PSM_FINISH_NOT_FINISHED) break;
      AppendHash(model_seed, fuzz->adapter_print, sample.token, &e.hashes);
    }
    fuzz->expected.push_back(std::move(e));
  }
}

// What the caller thinks will come: right up to somewhere, then not.
inline void AddCallerDraft(int32_t vocab_size, FuzzRandom* r, FuzzRequest* fuzz) {
  const std::vector<int32_t>& tokens = fuzz->expected.front().tokens;
  fuzz->draft = tokens;
  fuzz->draft.resize(static_cast<size_t>(r->Below(static_cast<int32_t>(tokens.size()) + 1)));
  for (int32_t n = r->Below(2) * r->Below(20); n > 0; --n)
    fuzz->draft.push_back(r->Below(vocab_size));
}

// The bounds of the requests of one episode.
struct FuzzShape {
  int32_t vocab_size, max_input_len, max_seq_len, max_beams;
  int32_t max_draft_len = 0;
  bool may_be_context_only_chunked = true;
  std::vector<std::vector<int32_t>> prefixes;  // that prompts begin with
};

inline void FillSampling(const FuzzShape& shape, FuzzRandom* r, FuzzRequest* f) {
  psm_request& q = f->request;
  q.temperature = r->OneIn(3) ? 0.0f : 0.6f + 0.1f * static_cast<float>(r->Below(8));
  if (r->OneIn(3)) q.top_k = r->Between(2, 12);
  if (r->OneIn(3)) q.top_p = 0.9f;
  if (r->OneIn(6)) q.min_p = 0.02f;
  if (r->OneIn(6)) {
    q.top_p_decay = 0.8f;
    q.top_p_min = 0.1f * static_cast<float>(r->Below(5));
    q.top_p_reset_id = r->Below(shape.vocab_size + 1) - 1;
  }
  if (r->OneIn(6)) q.no_repeat_ngram_size = r->Between(2, 4);
  if (r->OneIn(4)) q.repetition_penalty = 1.2f;
  if (r->OneIn(4)) q.frequency_penalty = 0.3f;
  if (r->OneIn(6)) q.presence_penalty = -0.2f;
  q.seed = r->OneIn(2) ? r->Next() : static_cast<uint64_t>(r->Below(3));
  if (r->OneIn(3)) q.num_logprobs = r->Between(1, 4);
  const auto token = [&] { return r->Below(shape.vocab_size); };
  if (r->OneIn(3)) f->end_ids = {token(), token()};
  if (r->OneIn(4)) {
    f->stop_ids = {token(), token(), token()};
    f->stop_ends = {1, 3};
  }
  if (r->OneIn(4)) {
    f->bad_ids = {token(), token(), token()};
    f->bad_ends = {1, 3};
  }
  if (r->OneIn(5)) {
    f->bias_ids = {token(), token()};
    f->bias_values = {4.0f, -5.0f};
  }
  if (r->OneIn(5)) q.min_tokens = r->Below(q.max_tokens + 1);
}

inline void FillOutputs(const FuzzShape& shape, FuzzRandom* r, FuzzRequest* f) {
  psm_request& q = f->request;
  if (r->OneIn(5) && shape.max_beams > 1) {
    q.beam_width = r->Between(2, shape.max_beams);
    q.temperature = 1.0f;
    q.top_k = 0;
    q.top_p = 1.0f;
    q.min_p = 0.0f;
    q.top_p_decay = 0.0f;
    q.length_penalty = 0.5f * static_cast<float>(r->Below(4));
    q.early_stopping = r->Below(3);
    if (r->OneIn(4)) q.beam_search_diversity_rate = 0.5f;
    return;
  }
  if (r->OneIn(4)) q.num_return_sequences = r->Between(2, 4);
  if (r->OneIn(8)) q.num_prompt_logprobs = r->Below(4);
  if (r->OneIn(10)) q.return_context_logits = 1;
  if (r->OneIn(8)) q.return_generation_logits = 1;
  if (r->OneIn(6)) {
    f->guide_salt = r->Next() | 1;
    if (f->end_ids.empty()) f->end_ids = {r->Below(shape.vocab_size)};  // a guide needs some
  }
  if (r->OneIn(8)) q.logits_processor = FuzzProcessor;
  if (r->OneIn(4)) q.max_draft_len = r->Below(shape.max_draft_len + 1);
}

inline std::unique_ptr<FuzzRequest> RandomRequest(const FuzzShape& shape, FuzzRandom* r) {
  auto f = std::make_unique<FuzzRequest>();
  psm_request& q = f->request;
  if (!r->OneIn(4)) {
    const auto& prefix =
        shape.prefixes[static_cast<size_t>(r->Below(static_cast<int32_t>(shape.prefixes.size())))];
    const int32_t n = r->OneIn(2) ? static_cast<int32_t>(prefix.size())
                                  : r->Below(static_cast<int32_t>(prefix.size()) + 1);
    f->prompt.assign(prefix.begin(), prefix.begin() + n);
  }
  // Copies of a few tokens, so that n-grams come back.
  const int32_t words = r->OneIn(2) ? shape.vocab_size : 3;
  for (int32_t n = r->Below(10); n > 0 || f->prompt.empty(); --n)
    f->prompt.push_back(r->Below(words));
  if (static_cast<int32_t>(f->prompt.size()) > shape.max_input_len)
    f->prompt.resize(static_cast<size_t>(shape.max_input_len));
  const int32_t room = shape.max_seq_len - static_cast<int32_t>(f->prompt.size());
  q.max_tokens = r->Between(1, std::min(room, r->OneIn(3) ? room : 12));
  FillSampling(shape, r, f.get());
  FillOutputs(shape, r, f.get());
  q.priority = 0.25f * static_cast<float>(r->Below(4));
  q.tenant_id = static_cast<uint64_t>(r->Below(3));
  if (r->OneIn(3)) q.cache_salt = static_cast<uint64_t>(r->Below(3));
  if (r->OneIn(6)) q.allotted_time_ms = r->Between(1, 8);
  if (r->OneIn(4)) {
    const int32_t cut = r->Between(1, static_cast<int32_t>(f->prompt.size()));
    f->retention = {{0, cut, r->Below(101), r->OneIn(2) ? -1 : r->Below(5)}};
    if (cut < static_cast<int32_t>(f->prompt.size()))
      f->retention.push_back({cut, -1, r->Below(101), -1});
    q.decode_retention_priority = r->Below(101);
  }
  return f;
}

}  // namespace plansmith
