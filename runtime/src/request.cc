// SPDX-License-Identifier: Apache-2.0
#include "request.h"

#include <algorithm>

namespace plansmith {

int32_t Request::CallerDraftLeft() {
  const int32_t n = num_output();
  const int32_t size = static_cast<int32_t>(caller_draft.size());
  if (n >= size) return 0;
  int32_t& right = num_caller_draft_right;
  while (right < n && output()[right] == caller_draft[static_cast<size_t>(right)]) ++right;
  if (right < n) return 0;
  return std::max(0, std::min({size - n, max_caller_draft, max_len() - num_tokens() - 1}));
}

float TopP(const Request& request) {
  const SamplingParams& p = request.params;
  if (p.top_p_after.empty()) return p.top_p;
  const int32_t last = static_cast<int32_t>(p.top_p_after.size()) - 1;  // stays from there on
  const int32_t most = std::min(last, request.num_output());
  const int32_t* end = request.output() + request.num_output();
  int32_t i = 0;
  while (i < most && end[-1 - i] != p.top_p_reset_id) ++i;
  return p.top_p_after[static_cast<size_t>(i)];
}

bool EndsWith(const Request& request, const int32_t* word, int32_t n) {
  return n <= request.num_tokens() && std::equal(word, word + n, request.tokens.end() - n);
}

int32_t FinishReason(const Request& request) {
  const SamplingParams& params = request.params;
  const int32_t n = request.num_output();
  const int32_t token = request.tokens.back();
  if (std::find(params.end_ids.begin(), params.end_ids.end(), token) != params.end_ids.end()) {
    return PSM_FINISH_END_ID;
  }
  for (size_t i = 0; n >= params.min_tokens && i < params.stop_words.size(); ++i) {
    const auto [word, length] = params.stop_words.word(i);
    if (length <= n && std::equal(word, word + length, request.tokens.end() - length)) {
      return PSM_FINISH_STOP_WORDS;
    }
  }
  return n >= request.max_tokens ? PSM_FINISH_LENGTH : PSM_FINISH_NOT_FINISHED;
}

}  // namespace plansmith
