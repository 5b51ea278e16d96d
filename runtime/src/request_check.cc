// SPDX-License-Identifier: Apache-2.0
#include "request_check.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>

#include "abi.h"
#include "request_rules.h"
#include "status.h"

namespace plansmith {
namespace {

[[noreturn]] void Invalid(const std::string& message) {
  throw StatusError(PSM_ERROR_INVALID_ARGUMENT, message);
}

// Most draft tokens of the caller in a step with a guide, which has a mask for each.
constexpr int32_t kMaxGuidedDraft = 64;

// One request on its way in.
class RequestChecker {
 public:
  RequestChecker(const psm_request& request, const EngineConfig& config)
      : r_(request), info_(config.info), config_(config) {}

  std::vector<std::unique_ptr<Request>> Make() const {
    CheckFields(r_, config_);
    std::vector<std::unique_ptr<Request>> sequences;
    const int64_t now_ns = config_.NowNs();
    for (int32_t i = 0; i < r_.num_return_sequences; ++i) {
      sequences.push_back(MakeSequence(i, now_ns));
    }
    AddGuides(&sequences);  // last: the guide changes hands when nothing else can fail
    return sequences;
  }

 private:
  std::unique_ptr<Request> MakeSequence(int32_t sequence_idx, int64_t now_ns) const {
    auto request = std::make_unique<Request>();
    request->sequence_idx = sequence_idx;
    CopyPrompt(request.get());
    CopySampling(&request->params);
    request->params.seed += static_cast<uint64_t>(sequence_idx);
    request->client_id = r_.client_id;
    request->tenant_id = r_.tenant_id;
    request->adapter_id = r_.adapter_id;
    request->prefix_key.salt = r_.cache_salt;
    request->prefix_key.adapter_id = r_.adapter_id;
    request->priority = r_.priority;
    if (sequence_idx == 0) {  // the others have the same prompt, and reuse what it computed
      request->num_prompt_logprobs = r_.num_prompt_logprobs;
      request->return_context_logits = r_.return_context_logits != 0;
    }
    request->return_generation_logits = r_.return_generation_logits != 0;
    CopyRetention(&request->retention);
    SetTimes(request.get(), now_ns);
    if (request->params.has_penalties()) CountPrompt(request.get());
    if (r_.beam_width > 1) {
      const BeamParams beams = {r_.beam_width, r_.length_penalty, r_.early_stopping,
                                r_.beam_search_diversity_rate};
      const size_t num_ends = request->params.end_ids.size() + request->params.stop_words.size();
      request->beams = std::make_unique<BeamSearch>(beams, info_.vocab_size, r_.max_tokens,
                                                    BlocksFor(request->max_len(), info_),
                                                    static_cast<int32_t>(num_ends));
    }
    request->max_draft_len = DraftLength();
    CopyDraft(request.get());
    request->draft.reserve(static_cast<size_t>(DraftsAtMost(*request)));
    return request;
  }

  static int32_t DraftsAtMost(const Request& request) {
    return std::max(request.max_draft_len, request.max_caller_draft);
  }

  // Nothing follows an end id, and the last token needs no draft.
  void CopyDraft(Request* request) const {
    Ids("draft_ids", r_.draft_ids, r_.num_draft_ids);
    const std::vector<int32_t>& ends = request->params.end_ids;
    const int32_t* end =
        std::find_first_of(r_.draft_ids, r_.draft_ids + r_.num_draft_ids, ends.begin(), ends.end());
    const int32_t n = std::min(static_cast<int32_t>(end - r_.draft_ids), r_.max_tokens - 1);
    request->caller_draft.assign(r_.draft_ids, r_.draft_ids + n);
    request->max_caller_draft = std::min({n, info_.max_num_tokens - 1, info_.max_logits_rows - 1});
    if (r_.guide != nullptr)
      request->max_caller_draft = std::min(request->max_caller_draft, kMaxGuidedDraft);
  }

  int32_t DraftLength() const {
    const bool off = config_.options.draft_mode == PSM_DRAFT_OFF || r_.beam_width > 1;
    const int32_t most = off ? 0 : config_.options.max_draft_len;
    return r_.max_draft_len < 0 ? most : std::min(most, r_.max_draft_len);
  }

  // The first sequence has the caller's guide, the others clones.
  void AddGuides(std::vector<std::unique_ptr<Request>>* sequences) const {
    if (r_.guide == nullptr) return;
    const int32_t drafts = DraftsAtMost(*sequences->front());
    std::vector<std::unique_ptr<Guide>> clones;
    auto first = std::make_unique<Guide>(*r_.guide, info_.vocab_size, drafts);
    try {
      for (size_t i = 1; i < sequences->size(); ++i) clones.push_back(first->Clone());
    } catch (...) {
      first->Disown();  // still the caller's
      throw;
    }
    for (size_t i = 1; i < sequences->size(); ++i) {
      (*sequences)[i]->guide = std::move(clones[i - 1]);
    }
    sequences->front()->guide = std::move(first);
  }

  void CopyRetention(Retention* retention) const {
    retention->num_prompt = r_.num_prompt_ids;
    retention->decode_priority = r_.decode_retention_priority;
    retention->decode_duration_ms = r_.decode_retention_duration_ms;
    retention->ranges.assign(r_.retention_ranges, r_.retention_ranges + r_.num_retention_ranges);
    for (psm_retention_range& range : retention->ranges) {
      if (range.end == -1) range.end = r_.num_prompt_ids;
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
    request->kv.blocks.reserve(static_cast<size_t>(BlocksFor(static_cast<int64_t>(length), info_)));
  }

  void CopySampling(SamplingParams* p) const {
    p->temperature = r_.temperature;
    p->top_k = r_.top_k;
    p->top_p = r_.top_p;
    p->min_p = r_.min_p;
    p->no_repeat_ngram_size = r_.no_repeat_ngram_size;
    SetTopPDecay(p);
    p->repetition_penalty = r_.repetition_penalty;
    p->presence_penalty = r_.presence_penalty;
    p->frequency_penalty = r_.frequency_penalty;
    p->seed = r_.seed;
    p->min_tokens = r_.min_tokens;
    p->num_logprobs = r_.num_logprobs;
    p->logits_processor = r_.logits_processor;
    p->logits_processor_self = r_.logits_processor_self;
    Ids("end_ids", r_.end_ids, r_.num_end_ids);
    p->end_ids.assign(r_.end_ids, r_.end_ids + r_.num_end_ids);
    CopyBias(p);
    p->bad_words = Words("bad_words", r_.bad_words);
    p->stop_words = Words("stop_words", r_.stop_words);
  }

  // All values that top_p takes, up to the first that stays. In float32, one multiplication a
  // token, as the older stack has it.
  void SetTopPDecay(SamplingParams* p) const {
    if (r_.top_p_decay == 0.0f) return;
    p->top_p_reset_id = r_.top_p_reset_id;
    std::vector<float>& values = p->top_p_after;
    values.push_back(r_.top_p);
    for (int32_t i = 1; i < r_.max_tokens; ++i) {
      const float next = std::max(values.back() * r_.top_p_decay, r_.top_p_min);
      if (next == values.back()) break;
      values.push_back(next);
    }
    if (values.size() == 1) values.clear();
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
    }
    // By id; equal ones are added in the order they were given.
    std::vector<int32_t> order(static_cast<size_t>(r_.num_logit_bias));
    std::iota(order.begin(), order.end(), 0);
    std::sort(order.begin(), order.end(), [this](int32_t a, int32_t b) {
      const int32_t id_a = r_.logit_bias_ids[a], id_b = r_.logit_bias_ids[b];
      return id_a != id_b ? id_a < id_b : a < b;
    });
    for (int32_t i : order)
      p->logit_bias.emplace_back(r_.logit_bias_ids[i], r_.logit_bias_values[i]);
    const auto same_id = [](const auto& a, const auto& b) { return a.first == b.first; };
    p->has_repeated_bias = std::adjacent_find(p->logit_bias.begin(), p->logit_bias.end(),
                                              same_id) != p->logit_bias.end();
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

  void SetTimes(Request* request, int64_t now_ns) const {
    request->stats.arrival_time_ns = now_ns;
    if (r_.allotted_time_ms > 0)
      request->deadline_ns = now_ns + int64_t{r_.allotted_time_ms} * 1000000;
  }

  void CountPrompt(Request* request) const {
    // There are no more distinct tokens than the vocabulary has.
    request->counts.Reserve(static_cast<size_t>(std::min(request->max_len(), info_.vocab_size)));
    for (int32_t token : request->tokens) request->counts.AddPrompt(token);
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
  r.top_p_reset_id = -1;
  return r;
}

std::vector<std::unique_ptr<Request>> CheckRequest(const psm_request& request,
                                                   const EngineConfig& config) {
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
                                 END(guide),
                                 END(draft_ids),
                                 END(num_draft_ids),
                                 END(no_repeat_ngram_size),
                                 END(top_p_decay),
                                 END(top_p_min),
                                 END(top_p_reset_id)};
#undef END
  const psm_request full = ReadStruct("psm_request", &request, DefaultRequest(), ends);
  return RequestChecker(full, config).Make();
}

}  // namespace plansmith
