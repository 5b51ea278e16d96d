// SPDX-License-Identifier: Apache-2.0
#include "sampling_rows.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <new>

#include "repeat_ngram.h"
#include "reserve.h"
#include "sampler.h"
#include "status.h"

namespace plansmith {
namespace {

constexpr float kNegInf = -std::numeric_limits<float>::infinity();
constexpr size_t kMostReserved = size_t{1} << 20;  // edits, 16 MiB
constexpr char kAdvice[] = "lower max_num_tokens";

bool MayBeDrawn(int32_t token, const uint32_t* mask) {
  return mask == nullptr || (mask[token / 32] >> (token % 32) & 1) != 0;
}

}  // namespace

SamplingRows::SamplingRows(int32_t vocab_size, int32_t max_rows)
    : rows_(static_cast<size_t>(max_rows), "the sampling of a step's rows", kAdvice),
      samples_(static_cast<size_t>(max_rows), "a step's samples", kAdvice),
      masks_(static_cast<size_t>(max_rows) * static_cast<size_t>((vocab_size + 31) / 32),
             "a step's masks", kAdvice) {
  sampling_.struct_size = PSM_STEP_SAMPLING_SIZE;
  sampling_.mask_words = (vocab_size + 31) / 32;
  sampling_.rows = &rows_[0];
  sampling_.masks = &masks_[0];
}

bool SamplingRows::CanDescribe(const Request& request) {
  return request.beams == nullptr && request.params.logits_processor == nullptr &&
         !request.params.has_repeated_bias;
}

size_t SamplingRows::EditsAtMost(const Request& request, int32_t vocab_size) {
  const SamplingParams& p = request.params;
  const bool of_history = p.has_penalties() || p.no_repeat_ngram_size > 0;
  const size_t v = static_cast<size_t>(vocab_size);
  return std::min(v, (of_history ? static_cast<size_t>(request.max_len()) : 0) +
                         p.logit_bias.size() + p.bad_words.size() +
                         (p.min_tokens > 0 ? p.end_ids.size() : 0));
}

void SamplingRows::Reserve(size_t num_rows, size_t edits_each) noexcept {
  try {
    ReserveAtLeast(&edits_, std::min(num_rows * edits_each, kMostReserved));
    ReserveAtLeast(&forbidden_, std::min(edits_each, kMostReserved));
  } catch (const std::bad_alloc&) {
    // A step without room for its edits draws from the logits.
  }
}

void SamplingRows::Clear() {
  sampling_.num_rows = sampling_.num_edits = sampling_.num_masks = 0;
  edits_.clear();
}

void SamplingRows::Add(Request* request, const uint32_t* mask, bool with_logprobs) {
  if (static_cast<size_t>(sampling_.num_rows) == rows_.size()) {
    throw StatusError(
        PSM_ERROR_INTERNAL,
        Format("a step with more than %zu rows to draw; please report it", rows_.size()));
  }
  const SamplingParams& p = request->params;
  psm_sampling_row row{};
  row.seed = p.seed;
  row.output_idx = request->num_output();
  row.temperature = p.greedy() ? 0.0f : p.temperature;
  row.top_p = TopP(*request);
  row.min_p = p.min_p;
  row.top_k = p.top_k;
  row.num_logprobs = with_logprobs ? p.num_logprobs : 0;
  row.edit_begin = static_cast<int32_t>(edits_.size());
  AddEdits(request);
  row.edit_end = static_cast<int32_t>(edits_.size());
  row.mask_idx = -1;
  if (mask != nullptr) {
    row.mask_idx = sampling_.num_masks++;
    const size_t words = static_cast<size_t>(sampling_.mask_words);
    std::copy_n(mask, words, &masks_[static_cast<size_t>(row.mask_idx) * words]);
  }
  rows_[static_cast<size_t>(sampling_.num_rows++)] = row;
  sampling_.edits = edits_.data();
  sampling_.num_edits = row.edit_end;
}

// Penalties, bias and what is forbidden, each ascending, merged. What does nothing is left out; the
// numbers that change no float are 1, 0 and -0.
void SamplingRows::AddEdits(Request* request) {
  const SamplingParams& p = request->params;
  CollectForbidden(*request);
  const std::vector<TokenCounts::Entry>& entries = request->counts.entries();
  static const std::vector<int32_t> kNone;
  const std::vector<int32_t>& order = p.has_penalties() ? request->counts.Ascending() : kNone;
  auto penalty = order.begin();
  auto bias = p.logit_bias.begin();
  auto forbidden = forbidden_.begin();
  const bool repetition = p.repetition_penalty != 1.0f;
  constexpr int32_t kEnd = std::numeric_limits<int32_t>::max();
  for (;;) {
    const TokenCounts::Entry* entry =
        penalty == order.end() ? nullptr : &entries[static_cast<size_t>(*penalty)];
    const int32_t id = std::min({entry == nullptr ? kEnd : entry->token,
                                 bias == p.logit_bias.end() ? kEnd : bias->first,
                                 forbidden == forbidden_.end() ? kEnd : *forbidden});
    if (id == kEnd) return;
    psm_logit_edit edit = {id, 1.0f, 0.0f, -0.0f};
    bool changes = false;
    if (entry != nullptr && entry->token == id) {
      edit.factor = p.repetition_penalty;
      if (entry->num_output > 0) {
        edit.minus =
            p.presence_penalty + p.frequency_penalty * static_cast<float>(entry->num_output);
      }
      changes = repetition || entry->num_output > 0;
      ++penalty;
    }
    if (bias != p.logit_bias.end() && bias->first == id) {
      edit.plus = bias->second;
      changes = true;
      ++bias;
    }
    if (forbidden != forbidden_.end() && *forbidden == id) {
      edit.plus = kNegInf;
      changes = true;
      ++forbidden;
    }
    // Whatever a penalty would make of it: +infinity - infinity is no number.
    if (edit.plus == kNegInf) edit = {id, 1.0f, 0.0f, kNegInf};
    if (changes) edits_.push_back(edit);
  }
}

// Ascending, each once.
void SamplingRows::CollectForbidden(const Request& request) {
  const SamplingParams& p = request.params;
  forbidden_.clear();
  for (size_t i = 0; i < p.bad_words.size(); ++i) {
    const auto [word, n] = p.bad_words.word(i);
    if (EndsWith(request, word, n - 1)) forbidden_.push_back(word[n - 1]);
  }
  ForEachRepeatingToken(request.tokens, p.no_repeat_ngram_size,
                        [this](int32_t token) { forbidden_.push_back(token); });
  if (request.num_output() < p.min_tokens) {
    forbidden_.insert(forbidden_.end(), p.end_ids.begin(), p.end_ids.end());
  }
  std::sort(forbidden_.begin(), forbidden_.end());
  forbidden_.erase(std::unique(forbidden_.begin(), forbidden_.end()), forbidden_.end());
}

void TakeSample(const psm_row_sample& drawn, const Request& request, const uint32_t* mask,
                int32_t vocab_size, Sample* out) {
  if (drawn.token == PSM_ROW_BAD_LOGITS) {
    throw StatusError(
        PSM_ERROR_EXECUTOR,
        Format("the executor's logits for output %d of request %llu hold NaN or +infinity; finite "
               "values (or -inf) are wanted: check the plan's weights and precision",
               request.num_output(), static_cast<unsigned long long>(request.public_id())));
  }
  if (drawn.token == PSM_ROW_FORBIDDEN) RefuseForbidden(request);
  if (drawn.token == PSM_ROW_OVERFLOW) RefuseOverflow(request);
  const int32_t most = std::min(
      {request.params.num_logprobs, vocab_size, static_cast<int32_t>(PSM_MAX_TOP_LOGPROBS)});
  const auto is_token = [&](int32_t id) { return id >= 0 && id < vocab_size; };
  if (!is_token(drawn.token) || !MayBeDrawn(drawn.token, mask)) {
    throw StatusError(PSM_ERROR_EXECUTOR,
                      Format("the executor drew token %d for output %d of request %llu, which is "
                             "%s; check its sampling",
                             drawn.token, request.num_output(),
                             static_cast<unsigned long long>(request.public_id()),
                             is_token(drawn.token) ? "not allowed by the row's mask"
                                                   : "no token of the vocabulary"));
  }
  if (drawn.num_top < 0 || drawn.num_top > most ||
      !std::all_of(drawn.top_ids, drawn.top_ids + drawn.num_top, is_token)) {
    throw StatusError(PSM_ERROR_EXECUTOR,
                      Format("the executor gave %d best tokens for output %d of request %llu, "
                             "wanted at most %d, all of the vocabulary; check its sampling",
                             drawn.num_top, request.num_output(),
                             static_cast<unsigned long long>(request.public_id()), most));
  }
  out->token = drawn.token;
  out->logprob = drawn.logprob;
  out->num_top = drawn.num_top;
  std::copy_n(drawn.top_ids, drawn.num_top, out->top_ids);
  std::copy_n(drawn.top_logprobs, drawn.num_top, out->top_logprobs);
}

}  // namespace plansmith
