// The n-gram lookup against the definition, read literally.
//
// SPDX-License-Identifier: Apache-2.0
#include "ngram.h"

#include <chrono>
#include <cstdio>
#include <random>
#include <vector>

#include "check.h"

namespace {

using plansmith::FindNgram;
using plansmith::NgramDraft;

// Longest first, most recent first.
int32_t Naive(const std::vector<int32_t>& x, int32_t max_n, int32_t min_n) {
  const int32_t n = static_cast<int32_t>(x.size());
  for (int32_t length = std::min(max_n, n - 1); length >= min_n; --length) {
    for (int32_t begin = n - length - 1; begin >= 0; --begin) {
      if (std::equal(x.end() - length, x.end(), x.begin() + begin)) return begin + length;
    }
  }
  return -1;
}

void TestAgainstNaive() {
  std::mt19937 random(1);
  int found = 0;
  for (int i = 0; i < 40000; ++i) {
    const uint32_t alphabet = 2 + random() % (i % 3 == 0 ? 200 : 6);
    std::vector<int32_t> x(1 + random() % (i % 10 == 0 ? 600 : 90));
    for (int32_t& token : x) token = static_cast<int32_t>(random() % alphabet);
    const int32_t min_n = 1 + static_cast<int32_t>(random() % 3);
    const int32_t max_n = min_n + static_cast<int32_t>(random() % 4);
    const int32_t got = FindNgram(x.data(), static_cast<int32_t>(x.size()), max_n, min_n);
    CHECK(got == Naive(x, max_n, min_n));
    found += got >= 0;
  }
  CHECK(found > 10000 && found < 39000);  // the test sees both outcomes
}

void TestDraft() {
  std::vector<int32_t> draft;
  draft.reserve(8);
  const auto of = [&](std::vector<int32_t> x, int32_t want) {
    NgramDraft(x, 4, 2, want, &draft);
    return draft;
  };
  using V = std::vector<int32_t>;
  CHECK(of({1, 2, 3, 4, 5, 9, 1, 2}, 3) == V({3, 4, 5}));
  CHECK(of({1, 2, 3, 9, 1, 2}, 8) == V({3, 9, 1, 2, 3, 9, 1, 2}));  // goes on with itself
  CHECK(of({7, 7, 7, 7}, 5) == V({7, 7, 7, 7, 7}));
  CHECK(of({1, 2, 1, 2, 1}, 4) == V({2, 1, 2, 1}));
  CHECK(of({2, 3, 8, 1, 2, 3, 7, 0, 1, 2, 3}, 1) == V({7}));  // three tokens beat two, ...
  CHECK(of({2, 3, 8, 4, 2, 3, 7, 0, 2, 3}, 1) == V({7}));     // ... the later of equal ones
  CHECK(of({1, 2, 3, 4}, 4).empty());
  CHECK(of({1}, 4).empty());
  CHECK(of({1, 2, 3, 1, 2}, 0).empty());
  CHECK(draft.capacity() == 8);
}

// What is too far back is not looked for, however long the history.
void TestBound() {
  std::vector<int32_t> x(plansmith::kMaxNgramScan + 100);
  for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<int32_t>(i);
  x[10] = 1 << 20, x[11] = 1 << 21;
  x[x.size() - 2] = 1 << 20, x[x.size() - 1] = 1 << 21;
  const int32_t n = static_cast<int32_t>(x.size());
  CHECK(FindNgram(x.data(), n, 4, 2) == -1);
  CHECK(FindNgram(x.data() + 11, n - 11, 4, 1) == -1);
  x[200] = 1 << 20, x[201] = 1 << 21;
  CHECK(FindNgram(x.data(), n, 4, 2) == 202);
}

// Not a measurement, but a lookup that went through 4096 tokens one by one in bad cases would show.
void TestCost() {
  std::mt19937 random(2);
  std::vector<int32_t> x(4096);
  for (int32_t& token : x) token = static_cast<int32_t>(random() % 49152);
  for (const bool frequent : {false, true}) {
    // The last token is everywhere, what is before it nowhere.
    if (frequent)
      for (size_t i = 0; i + 2 < x.size(); i += 2) x[i] = 5;
    x.back() = 5;
    x[x.size() - 2] = -1;
    const auto begin = std::chrono::steady_clock::now();
    int64_t sum = 0;
    for (int i = 0; i < 1000; ++i) sum += FindNgram(x.data(), 4096, 4, 2);
    const auto took = std::chrono::steady_clock::now() - begin;
    const double us =
        std::chrono::duration_cast<std::chrono::nanoseconds>(took).count() / 1000.0 / 1000.0;
    printf("lookup in 4096 tokens, %s last token: %.2f us\n", frequent ? "frequent" : "rare", us);
    CHECK(sum == -1000 && us < 1000.0);
  }
}

}  // namespace

int main() {
  TestAgainstNaive();
  TestDraft();
  TestBound();
  TestCost();
  return 0;
}
