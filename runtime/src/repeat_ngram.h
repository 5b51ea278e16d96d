// Tokens that would repeat an n-gram.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

namespace plansmith {

namespace repeat_ngram {

constexpr size_t kBlock = 64;  // tokens looked at together; most have no hit

// Has no branch, so that it vectorizes.
inline bool AnyEqual(const int32_t* x, int32_t token) {
  int32_t hit = 0;
  for (size_t i = 0; i < kBlock; ++i) hit |= x[i] == token;
  return hit != 0;
}

}  // namespace repeat_ngram

// Calls visit(token) for each token that followed an earlier occurrence of the last n - 1 tokens,
// so that without them no n-gram comes twice: transformers' rule. n = 1: every token there is; 0:
// none. A token may come more than once. O(tokens), one pass.
template <typename Visit>
void ForEachRepeatingToken(const std::vector<int32_t>& tokens, int32_t n, Visit&& visit) {
  const size_t prefix = static_cast<size_t>(std::max(n, 1)) - 1;
  if (n <= 0 || tokens.size() <= prefix) return;
  if (prefix == 0) {
    for (int32_t token : tokens) visit(token);
    return;
  }
  // end: behind an earlier occurrence, whose next token is tokens[end].
  const int32_t* last = tokens.data() + tokens.size() - prefix;
  for (size_t end = prefix; end < tokens.size();) {
    const int32_t* x = tokens.data() + end - 1;
    if (tokens.size() - end >= repeat_ngram::kBlock &&
        !repeat_ngram::AnyEqual(x, last[prefix - 1])) {
      end += repeat_ngram::kBlock;
      continue;
    }
    const size_t stop = std::min(tokens.size(), end + repeat_ngram::kBlock);
    for (; end < stop; ++end) {
      const int32_t* begin = tokens.data() + end - prefix;
      if (std::equal(begin, begin + prefix, last)) visit(tokens[end]);
    }
  }
}

// Sets the logits of those tokens to -infinity.
inline void ForbidRepeatedNgrams(const std::vector<int32_t>& tokens, int32_t n, float* logits) {
  ForEachRepeatingToken(tokens, n, [logits](int32_t token) {
    logits[token] = -std::numeric_limits<float>::infinity();
  });
}

}  // namespace plansmith
