// SPDX-License-Identifier: Apache-2.0
#include "request_check.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "abi.h"
#include "clock.h"
#include "status.h"

namespace plansmith {
namespace {

[[noreturn]] void Invalid(const std::string& message) {
  throw StatusError(PSM_ERROR_INVALID_ARGUMENT, message);
}

// Everything that can be wrong with one request, rule by rule. `config` gives the engine's limits.
class RequestChecker {
 public:
  RequestChecker(const psm_request& request, const EngineConfig& config)
      : r_(request), info_(config.info), config_(config) {}

  std::unique_ptr<Request> Make() const {
    CheckLengths();
    CheckSampling();
    auto request = std::make_unique<Request>();
    CopyPrompt(request.get());
    CopySampling(&request->params);
    request->client_id = r_.client_id;
    request->priority = r_.priority;
    SetTimes(request.get());
    if (request->params.has_penalties()) CountPrompt(request.get());
    return request;
  }

 private:
  void CheckLengths() const {
    if (r_.num_prompt_ids < 1) {
      Invalid(
          Format("num_prompt_ids is %d, wanted at least 1; give a prompt (a start token will do)",
                 r_.num_prompt_ids));
    }
    if (r_.max_tokens < 1) Invalid(Format("max_tokens is %d, wanted at least 1", r_.max_tokens));
    if (r_.min_tokens < 0 || r_.min_tokens > r_.max_tokens) {
      Invalid(
          Format("min_tokens is %d, wanted 0 to max_tokens (%d)", r_.min_tokens, r_.max_tokens));
    }
    if (r_.num_prompt_ids > info_.max_input_len) {
      TooLong(Format(
          "prompt has %d tokens, the engine's max_input_len is %d; shorten it or rebuild with "
          "--max-input-len %d",
          r_.num_prompt_ids, info_.max_input_len, r_.num_prompt_ids));
    }
    const int64_t length = int64_t{r_.num_prompt_ids} + r_.max_tokens;
    if (length > info_.max_seq_len) {
      TooLong(Format(
          "prompt (%d) and max_tokens (%d) make %lld tokens, the engine's max_seq_len is %d; lower "
          "max_tokens or rebuild with --max-seq-len %lld",
          r_.num_prompt_ids, r_.max_tokens, static_cast<long long>(length), info_.max_seq_len,
          static_cast<long long>(length)));
    }
    if (config_.options.enable_chunked_context == 0 && r_.num_prompt_ids > info_.max_num_tokens) {
      TooLong(Format(
          "prompt has %d tokens, a step takes max_num_tokens = %d and chunked context is off; turn "
          "enable_chunked_context on or raise max_num_tokens",
          r_.num_prompt_ids, info_.max_num_tokens));
    }
    const int64_t blocks = (length + info_.tokens_per_block - 1) / info_.tokens_per_block;
    if (blocks > config_.num_blocks) {
      throw StatusError(PSM_ERROR_OUT_OF_MEMORY,
                        Format("prompt and max_tokens need %lld KV blocks, the whole cache has %d; "
                               "lower max_tokens or give "
                               "kv_cache_bytes >= %llu",
                               static_cast<long long>(blocks), config_.num_blocks,
                               static_cast<unsigned long long>(static_cast<uint64_t>(blocks) *
                                                               info_.kv_bytes_per_block)));
    }
  }

  void CheckSampling() const {
    Range("temperature", r_.temperature, r_.temperature >= 0.0f, "0 (greedy) or more");
    if (r_.top_k < 0) Invalid(Format("top_k is %d, wanted 0 (all) or more", r_.top_k));
    Range("top_p", r_.top_p, r_.top_p > 0.0f && r_.top_p <= 1.0f,
          "more than 0 and at most 1 (1 = off)");
    Range("min_p", r_.min_p, r_.min_p >= 0.0f && r_.min_p <= 1.0f, "0 (off) to 1");
    Range("repetition_penalty", r_.repetition_penalty, r_.repetition_penalty > 0.0f,
          "more than 0 (1 = off)");
    Range("presence_penalty", r_.presence_penalty, true, "a finite number (0 = off)");
    Range("frequency_penalty", r_.frequency_penalty, true, "a finite number (0 = off)");
    Range("priority", r_.priority, r_.priority >= 0.0f && r_.priority <= 1.0f, "0 to 1");
    if (r_.num_logprobs < 0 || r_.num_logprobs > PSM_MAX_TOP_LOGPROBS) {
      Invalid(Format("num_logprobs is %d, wanted 0 (none) to %d", r_.num_logprobs,
                     int{PSM_MAX_TOP_LOGPROBS}));
    }
    if (r_.allotted_time_ms < 0) {
      Invalid(
          Format("allotted_time_ms is %d, wanted 0 (no deadline) or more", r_.allotted_time_ms));
    }
  }

  void CopyPrompt(Request* request) const {
    Ids("prompt_ids", r_.prompt_ids, r_.num_prompt_ids);
    request->num_prompt = r_.num_prompt_ids;
    request->max_tokens = r_.max_tokens;
    const size_t length =
        static_cast<size_t>(r_.num_prompt_ids) + static_cast<size_t>(r_.max_tokens);
    request->tokens.reserve(length);
    request->tokens.assign(r_.prompt_ids, r_.prompt_ids + r_.num_prompt_ids);
    const size_t block = static_cast<size_t>(info_.tokens_per_block);
    request->kv.blocks.reserve((length + block - 1) / block);
  }

  void CopySampling(SamplingParams* p) const {
    p->temperature = r_.temperature;
    p->top_k = r_.top_k;
    p->top_p = r_.top_p;
    p->min_p = r_.min_p;
    p->repetition_penalty = r_.repetition_penalty;
    p->presence_penalty = r_.presence_penalty;
    p->frequency_penalty = r_.frequency_penalty;
    p->seed = r_.seed;
    p->min_tokens = r_.min_tokens;
    p->num_logprobs = r_.num_logprobs;
    Ids("end_ids", r_.end_ids, r_.num_end_ids);
    p->end_ids.assign(r_.end_ids, r_.end_ids + r_.num_end_ids);
    CopyBias(p);
    p->bad_words = Words("bad_words", r_.bad_words);
    p->stop_words = Words("stop_words", r_.stop_words);
  }

  void CopyBias(SamplingParams* p) const {
    Ids("logit_bias_ids", r_.logit_bias_ids, r_.num_logit_bias);
    if (r_.num_logit_bias > 0 && r_.logit_bias_values == nullptr) {
      Invalid(Format("logit_bias_values is NULL with num_logit_bias = %d; give one value an id",
                     r_.num_logit_bias));
    }
    for (int32_t i = 0; i < r_.num_logit_bias; ++i) {
      const float bias = r_.logit_bias_values[i];
      if (std::isnan(bias) || (std::isinf(bias) && bias > 0)) {
        Invalid(Format("logit_bias_values[%d] is %f, wanted a finite number or -INFINITY (forbid)",
                       i, static_cast<double>(bias)));
      }
      p->logit_bias.emplace_back(r_.logit_bias_ids[i], bias);
    }
  }

  WordList Words(const char* name, const psm_token_lists& lists) const {
    WordList words;
    if (lists.num_lists < 0)
      Invalid(Format("%s.num_lists is %d, wanted 0 or more", name, lists.num_lists));
    if (lists.num_lists == 0) return words;
    if (lists.ends == nullptr)
      Invalid(Format("%s.ends is NULL with num_lists = %d; give one end a word", name,
                     lists.num_lists));
    for (int32_t i = 0; i < lists.num_lists; ++i) {
      const int32_t before = i == 0 ? 0 : lists.ends[i - 1];
      if (lists.ends[i] <= before) {
        Invalid(
            Format("%s.ends[%d] is %d, wanted more than %d: ends are strictly increasing and no "
                   "word is empty",
                   name, i, lists.ends[i], before));
      }
    }
    const int32_t num_ids = lists.ends[lists.num_lists - 1];
    Ids(Format("%s.ids", name).c_str(), lists.ids, num_ids);
    words.ids.assign(lists.ids, lists.ids + num_ids);
    words.ends.assign(lists.ends, lists.ends + lists.num_lists);
    return words;
  }

  void SetTimes(Request* request) const {
    const int64_t now_ns = NowNs();
    request->stats.arrival_time_ns = now_ns;
    if (r_.allotted_time_ms > 0)
      request->deadline_ns = now_ns + int64_t{r_.allotted_time_ms} * 1000000;
  }

  void CountPrompt(Request* request) const {
    // There are no more distinct tokens than the vocabulary has.
    request->counts.Reserve(static_cast<size_t>(std::min(request->max_len(), info_.vocab_size)));
    for (int32_t token : request->tokens) request->counts.AddPrompt(token);
  }

  [[noreturn]] static void TooLong(const std::string& message) {
    throw StatusError(PSM_ERROR_SHAPE, message);
  }

  static void Range(const char* name, float value, bool ok, const char* wanted) {
    if (!ok || !std::isfinite(value)) {
      Invalid(Format("%s is %g, wanted %s", name, static_cast<double>(value), wanted));
    }
  }

  void Ids(const char* name, const int32_t* ids, int32_t n) const {
    if (n < 0) Invalid(Format("%s has the count %d, wanted 0 or more", name, n));
    if (n > 0 && ids == nullptr)
      Invalid(Format("%s is NULL with a count of %d; pass the ids", name, n));
    for (int32_t i = 0; i < n; ++i) {
      if (ids[i] < 0 || ids[i] >= info_.vocab_size) {
        Invalid(Format(
            "%s[%d] is %d, wanted a token id from 0 to %d; is this the tokenizer of this engine?",
            name, i, ids[i], info_.vocab_size - 1));
      }
    }
  }

  const psm_request& r_;
  const psm_model_info& info_;
  const EngineConfig& config_;
};

}  // namespace

psm_request DefaultRequest() {
  psm_request r{};
  r.struct_size = PSM_REQUEST_SIZE;
  r.max_tokens = 16;
  r.temperature = 1.0f;
  r.top_p = 1.0f;
  r.repetition_penalty = 1.0f;
  r.priority = 0.5f;
  r.num_return_sequences = 1;
  r.beam_width = 1;
  r.length_penalty = 1.0f;
  r.decode_retention_priority = PSM_DEFAULT_RETENTION;
  r.decode_retention_duration_ms = -1;
  r.num_prompt_logprobs = -1;
  r.max_draft_len = -1;
  return r;
}

std::unique_ptr<Request> CheckRequest(const psm_request& request, const EngineConfig& config) {
#define END(field) PSM_FIELD_END(psm_request, field)
  static const FieldEnds ends = {END(num_prompt_ids),
                                 END(max_tokens),
                                 END(min_tokens),
                                 END(temperature),
                                 END(top_k),
                                 END(top_p),
                                 END(min_p),
                                 END(repetition_penalty),
                                 END(presence_penalty),
                                 END(frequency_penalty),
                                 END(seed),
                                 END(end_ids),
                                 END(num_end_ids),
                                 END(num_logit_bias),
                                 END(logit_bias_ids),
                                 END(logit_bias_values),
                                 END(bad_words),
                                 END(stop_words),
                                 END(num_logprobs),
                                 END(priority),
                                 END(allotted_time_ms),
                                 END(client_id),
                                 END(num_return_sequences),
                                 END(beam_width),
                                 END(length_penalty),
                                 END(early_stopping),
                                 END(beam_search_diversity_rate),
                                 END(cache_salt),
                                 END(adapter_id),
                                 END(tenant_id),
                                 END(retention_ranges),
                                 END(num_retention_ranges),
                                 END(decode_retention_priority),
                                 END(decode_retention_duration_ms),
                                 END(num_prompt_logprobs),
                                 END(return_context_logits),
                                 END(return_generation_logits),
                                 END(max_draft_len),
                                 END(logits_processor),
                                 END(logits_processor_self),
                                 END(guide)};
#undef END
  const psm_request full = ReadStruct("psm_request", &request, DefaultRequest(), ends);
  return RequestChecker(full, config).Make();
}

}  // namespace plansmith
