// SPDX-License-Identifier: Apache-2.0
#include "repeat_ngram.h"

#include <algorithm>
#include <cstddef>
#include <limits>

namespace plansmith {
namespace {

constexpr size_t kBlock = 64;  // tokens looked at together; most have no hit

// Has no branch, so that it vectorizes.
bool AnyEqual(const int32_t* x, int32_t token) {
  int32_t hit = 0;
  for (size_t i = 0; i < kBlock; ++i) hit |= x[i] == token;
  return hit != 0;
}

}  // namespace

void ForbidRepeatedNgrams(const std::vector<int32_t>& tokens, int32_t n, float* logits) {
  constexpr float kNegInf = -std::numeric_limits<float>::infinity();
  const size_t prefix = static_cast<size_t>(std::max(n, 1)) - 1;
  if (n <= 0 || tokens.size() <= prefix) return;
  if (prefix == 0) {
    for (int32_t token : tokens) logits[token] = kNegInf;
    return;
  }
  // end: behind an earlier occurrence, whose next token is tokens[end].
  const int32_t* last = tokens.data() + tokens.size() - prefix;
  for (size_t end = prefix; end < tokens.size();) {
    const int32_t* x = tokens.data() + end - 1;
    if (tokens.size() - end >= kBlock && !AnyEqual(x, last[prefix - 1])) {
      end += kBlock;
      continue;
    }
    const size_t stop = std::min(tokens.size(), end + kBlock);
    for (; end < stop; ++end) {
      const int32_t* begin = tokens.data() + end - prefix;
      if (std::equal(begin, begin + prefix, last)) logits[tokens[end]] = kNegInf;
    }
  }
}

}  // namespace plansmith
