// Repeated n-grams against a table of all n-grams there are.
//
// SPDX-License-Identifier: Apache-2.0
#include "repeat_ngram.h"

#include <cmath>
#include <cstddef>
#include <map>
#include <random>
#include <set>

#include "check.h"

namespace {

using Tokens = std::vector<int32_t>;

// What followed each (n - 1)-gram, as transformers keeps it.
std::set<int32_t> Forbidden(const Tokens& tokens, size_t n) {
  std::map<Tokens, std::set<int32_t>> followers;
  for (size_t i = 0; n > 0 && i + n <= tokens.size(); ++i) {
    const auto begin = tokens.begin() + static_cast<std::ptrdiff_t>(i);
    const auto last = begin + static_cast<std::ptrdiff_t>(n) - 1;
    followers[Tokens(begin, last)].insert(*last);
  }
  if (n == 0 || tokens.size() + 1 < n) return {};
  return followers[Tokens(tokens.end() - (static_cast<std::ptrdiff_t>(n) - 1), tokens.end())];
}

void TestRandomTexts() {
  std::mt19937 random(1);
  int64_t num_forbidden = 0;
  for (int round = 0; round < 3000; ++round) {
    const uint32_t vocab = 2 + random() % 30;
    Tokens tokens(random() % 400);
    for (int32_t& token : tokens) token = static_cast<int32_t>(random() % vocab);
    const size_t n = random() % 6;
    std::vector<float> logits(vocab, 1.0f);
    plansmith::ForbidRepeatedNgrams(tokens, static_cast<int32_t>(n), logits.data());
    const std::set<int32_t> want = Forbidden(tokens, n);
    for (int32_t v = 0; v < static_cast<int32_t>(vocab); ++v) {
      const float logit = logits[static_cast<size_t>(v)];
      CHECK(want.count(v) > 0 ? std::isinf(logit) && logit < 0 : logit == 1.0f);
    }
    num_forbidden += static_cast<int64_t>(want.size());
  }
  CHECK(num_forbidden > 3000);
}

// Sizes beyond any text forbid nothing.
void TestHugeSizes() {
  std::vector<float> logits(3, 0.0f);
  for (const int32_t n : {4, 5, 1 << 30, 2147483647}) {
    plansmith::ForbidRepeatedNgrams({1, 1, 1}, n, logits.data());
    CHECK(logits[1] == 0.0f);
  }
  plansmith::ForbidRepeatedNgrams({1, 1, 1}, 3, logits.data());
  CHECK(std::isinf(logits[1]) && logits[0] == 0.0f);
}

}  // namespace

int main() {
  TestRandomTexts();
  TestHugeSizes();
  return 0;
}
