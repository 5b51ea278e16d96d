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
