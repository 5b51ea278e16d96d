// SPDX-License-Identifier: Apache-2.0
#include "request_rules.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "abi.h"
#include "status.h"

namespace plansmith {
namespace {

[[noreturn]] void Invalid(const std::string& message) {
  throw StatusError(PSM_ERROR_INVALID_ARGUMENT, message);
}

// The rules, one after another.
class FieldRules {
 public:
  FieldRules(const psm_request& request, const EngineConfig& config)
      : r_(request), info_(config.info), config_(config) {}

  void Check() const {
    CheckLengths();
    CheckSampling();
    CheckSequences();
    CheckRetention();
    CheckOutputs();
    CheckGuide();
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
    const int64_t blocks = BlocksAtMost(length);
    if (blocks > config_.num_blocks) {
      throw StatusError(PSM_ERROR_OUT_OF_MEMORY,
                        Format("prompt and max_tokens need %lld KV blocks, the whole cache has %d; "
                               "lower max_tokens or give "
                               "kv_cache_bytes >= %llu",
                               static_cast<long long>(blocks), config_.num_blocks,
                               static_cast<unsigned long long>(static_cast<uint64_t>(blocks) *
                                                               config_.kv_bytes_per_block)));
    }
  }

  void CheckSampling() const {
    Range("temperature", r_.temperature, r_.temperature >= 0.0f, "0 (greedy) or more");
    if (r_.top_k < 0) Invalid(Format("top_k is %d, wanted 0 (all) or more", r_.top_k));
    Range("top_p", r_.top_p, r_.top_p > 0.0f && r_.top_p <= 1.0f,
          "more than 0 and at most 1 (1 = off)");
    Range("top_p_decay", r_.top_p_decay, r_.top_p_decay >= 0.0f && r_.top_p_decay <= 1.0f,
          "more than 0 and at most 1, or 0 (off)");
    Range("top_p_min", r_.top_p_min, r_.top_p_min >= 0.0f && r_.top_p_min <= 1.0f, "0 to 1");
    if (r_.top_p_decay != 0.0f &&
        (r_.top_p_reset_id < -1 || r_.top_p_reset_id >= info_.vocab_size)) {
      Invalid(Format("top_p_reset_id is %d, wanted -1 (none) or a token id from 0 to %d",
                     r_.top_p_reset_id, info_.vocab_size - 1));
    }
    if (r_.no_repeat_ngram_size < 0) {
      Invalid(
          Format("no_repeat_ngram_size is %d, wanted 0 (off) or more", r_.no_repeat_ngram_size));
    }
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

  void CheckSequences() const {
    const int32_t most = info_.max_batch_size;
    if (r_.num_return_sequences < 1 || r_.num_return_sequences > 1024) {
      Invalid(Format("num_return_sequences is %d, wanted 1 to 1024", r_.num_return_sequences));
    }
    if (r_.beam_width < 1 || r_.beam_width > most) {
      Invalid(
          Format("beam_width is %d, wanted 1 (off) to max_batch_size (%d)", r_.beam_width, most));
    }
    if (r_.beam_width > 1) CheckBeams();
  }

  void CheckBeams() const {
    const struct {
      bool wrong;
      const char* what;
    } rules[] = {
        {r_.num_return_sequences > 1, "num_return_sequences; ask for a wider beam_width instead"},
        {r_.guide != nullptr, "a guide; use num_return_sequences with it"},
        {r_.max_draft_len > 0, "max_draft_len: beams are not drafted for; leave it -1 or 0"},
        {r_.num_draft_ids > 0, "draft_ids: beams are not drafted for; leave them out"},
        {r_.return_generation_logits != 0 || r_.return_context_logits != 0,
         "logits outputs; leave them 0"},
        {r_.num_prompt_logprobs >= 0, "num_prompt_logprobs; leave it -1"},
        {r_.top_p_decay != 0.0f && r_.top_p_decay != 1.0f,
         "top_p_decay: beams do not sample; leave it out"},
        {r_.top_p != 1.0f || r_.min_p != 0.0f || r_.top_k > 1,
         "top_k, top_p or min_p: beams do not sample; leave them at their defaults"},
        {!config_.can_copy, "this executor, which cannot copy blocks (copy_blocks)"},
    };
    for (const auto& rule : rules) {
      if (rule.wrong) {
        Invalid(Format("beam_width %d does not go with %s", r_.beam_width, rule.what));
      }
    }
    Range("length_penalty", r_.length_penalty, true, "a finite number");
    Range("beam_search_diversity_rate", r_.beam_search_diversity_rate,
          r_.beam_search_diversity_rate >= 0.0f, "0 (off) or more");
    if (r_.early_stopping < PSM_EARLY_STOPPING_NO || r_.early_stopping > PSM_EARLY_STOPPING_NEVER) {
      Invalid(
          Format("early_stopping is %d, wanted 0 (no), 1 (yes) or 2 (never)", r_.early_stopping));
    }
  }

  void CheckRetention() const {
    const auto check = [](const char* name, int32_t priority, int32_t duration_ms) {
      if (priority < PSM_MIN_RETENTION || priority > PSM_MAX_RETENTION) {
        Invalid(Format("%s has the priority %d, wanted %d to %d", name, priority, PSM_MIN_RETENTION,
                       PSM_MAX_RETENTION));
      }
      if (duration_ms < -1) {
        Invalid(Format("%s has the duration %d ms, wanted 0 or more, or -1 (for ever)", name,
                       duration_ms));
      }
    };
    check("decode_retention", r_.decode_retention_priority, r_.decode_retention_duration_ms);
    const int32_t n = r_.num_retention_ranges;
    if (n < 0 || (n > 0 && r_.retention_ranges == nullptr)) {
      Invalid(Format("retention_ranges is %s with a count of %d; pass the ranges",
                     r_.retention_ranges == nullptr ? "NULL" : "set", n));
    }
    int32_t before = 0;
    for (int32_t i = 0; i < n; ++i) {
      const psm_retention_range& range = r_.retention_ranges[i];
      const std::string name = Format("retention_ranges[%d]", i);
      check(name.c_str(), range.priority, range.duration_ms);
      const int32_t end = range.end == -1 ? r_.num_prompt_ids : range.end;
      if (range.start < before || end <= range.start) {
        Invalid(
            Format("%s is [%d, %d), wanted ranges in ascending order that do not overlap and "
                   "are not empty (end -1 = the prompt's end)",
                   name.c_str(), range.start, range.end));
      }
      before = end;
    }
  }

  void CheckOutputs() const {
    Flag("return_context_logits", r_.return_context_logits);
    Flag("return_generation_logits", r_.return_generation_logits);
    if (r_.num_prompt_logprobs < -1 || r_.num_prompt_logprobs > PSM_MAX_TOP_LOGPROBS) {
      Invalid(Format("num_prompt_logprobs is %d, wanted -1 (none) to %d", r_.num_prompt_logprobs,
                     int{PSM_MAX_TOP_LOGPROBS}));
    }
    if (r_.max_draft_len < -1) {
      Invalid(Format("max_draft_len is %d, wanted -1 (the engine's) or more", r_.max_draft_len));
    }
    if (r_.max_draft_len > config_.options.max_draft_len) {
      Invalid(
          Format("max_draft_len is %d, the engine's is %d; ask for less or open the engine "
                 "with more",
                 r_.max_draft_len, config_.options.max_draft_len));
    }
  }

  void CheckGuide() const {
    if (r_.guide == nullptr) return;
    const psm_guide g = ReadStruct("psm_guide", r_.guide, psm_guide{}, {PSM_GUIDE_SIZE});
    const struct {
      const char* name;
      bool present;
    } functions[] = {{"fill_mask", g.fill_mask != nullptr},
                     {"accept", g.accept != nullptr},
                     {"close", g.close != nullptr},
                     {"clone", g.clone != nullptr || r_.num_return_sequences == 1}};
    for (const auto& f : functions) {
      if (!f.present) Invalid(Format("psm_guide.%s is NULL; give the function", f.name));
    }
    if (r_.num_end_ids == 0) {
      Invalid(
          "a guide needs end_ids: they end the output when its language ends; give the model's "
          "end token");
    }
  }

  // Whole prompt blocks are shared by all beams, the rest each has for itself.
  int64_t BlocksAtMost(int64_t length) const {
    const int64_t shared = r_.num_prompt_ids / info_.tokens_per_block;
    return shared + std::max(1, r_.beam_width) * (BlocksFor(length, info_) - shared);
  }

  [[noreturn]] static void TooLong(const std::string& message) {
    throw StatusError(PSM_ERROR_SHAPE, message);
  }

  static void Flag(const char* name, int32_t value) {
    if (value != 0 && value != 1) Invalid(Format("%s is %d, wanted 0 or 1", name, value));
  }

  static void Range(const char* name, float value, bool ok, const char* wanted) {
    if (!ok || !std::isfinite(value)) {
      Invalid(Format("%s is %g, wanted %s", name, static_cast<double>(value), wanted));
    }
  }

  const psm_request& r_;
  const psm_model_info& info_;
  const EngineConfig& config_;
};

}  // namespace

int32_t BlocksFor(int64_t num_positions, const psm_model_info& info) {
  return static_cast<int32_t>((num_positions + info.tokens_per_block - 1) / info.tokens_per_block);
}

void CheckFields(const psm_request& request, const EngineConfig& config) {
  FieldRules(request, config).Check();
}

}  // namespace plansmith
