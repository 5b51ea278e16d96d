// SPDX-License-Identifier: Apache-2.0
#include "ngram.h"

#include <algorithm>

namespace plansmith {
namespace {

constexpr int32_t kBlock = 64;  // tokens looked at together; a hit is then found one by one

// Whether any of x[0..kBlock) is `last` with `before` in front of it. Has no branch, so that it
// vectorizes. x[-1] exists.
bool AnyPair(const int32_t* x, int32_t before, int32_t last) {
  int32_t hit = 0;
  for (int32_t i = 0; i < kBlock; ++i) hit |= (x[i] == last) & (x[i - 1] == before);
  return hit != 0;
}

bool AnyEqual(const int32_t* x, int32_t last) {
  int32_t hit = 0;
  for (int32_t i = 0; i < kBlock; ++i) hit |= x[i] == last;
  return hit != 0;
}

// Tokens that the occurrence ending at tokens[end] has in common with the suffix, at most max_n.
int32_t CommonLength(const int32_t* tokens, int32_t n, int32_t end, int32_t max_n) {
  const int32_t most = std::min(max_n, end + 1);
  int32_t length = 0;
  while (length < most && tokens[end - length] == tokens[n - 1 - length]) ++length;
  return length;
}

}  // namespace

int32_t FindNgram(const int32_t* tokens, int32_t n, int32_t max_n, int32_t min_n) {
  if (n <= min_n) return -1;
  const int32_t last = tokens[n - 1];
  const int32_t before = n > 1 ? tokens[n - 2] : 0;
  const int32_t first = std::max(min_n - 1, n - 1 - kMaxNgramScan);  // least index of an end
  int32_t best = 0, best_end = -1;
  int32_t end = n - 2;
  while (end >= first) {
    // Whole blocks without a hit are skipped.
    if (end - kBlock + 1 >= std::max(first, 1)) {
      const int32_t* block = tokens + end - kBlock + 1;
      if (!(min_n >= 2 ? AnyPair(block, before, last) : AnyEqual(block, last))) {
        end -= kBlock;
        continue;
      }
    }
    for (const int32_t stop = std::max(first, end - kBlock + 1); end >= stop; --end) {
      if (tokens[end] != last) continue;
      const int32_t length = CommonLength(tokens, n, end, max_n);
      if (length < min_n || length <= best) continue;
      best = length;
      best_end = end;
      if (best == max_n) return best_end + 1;
    }
  }
  return best_end < 0 ? -1 : best_end + 1;
}

void NgramDraft(const std::vector<int32_t>& tokens, int32_t max_n, int32_t min_n, int32_t want,
                std::vector<int32_t>* draft) {
  draft->clear();
  const int32_t n = static_cast<int32_t>(tokens.size());
  const int32_t begin = FindNgram(tokens.data(), n, max_n, min_n);
  if (begin < 0) return;
  for (int32_t i = begin; i < begin + want; ++i) {
    draft->push_back(i < n ? tokens[static_cast<size_t>(i)] : (*draft)[static_cast<size_t>(i - n)]);
  }
}

}  // namespace plansmith
