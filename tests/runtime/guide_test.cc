// The guides' thread by itself, against an automaton: every mask is the language's, drafts that
// leave it and looks ahead included; failures stay with their guide; nothing is allocated.
//
// SPDX-License-Identifier: Apache-2.0
#include "guide.h"

#include <atomic>
#include <cstdlib>
#include <memory>
#include <new>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "count_allocations.h"
#include "dfa_guide.h"
#include "request.h"
#include "status.h"

namespace {

using plansmith::Guide;
using plansmith::GuideThread;
using plansmith::Request;
using plansmith::StatusError;

std::unique_ptr<Request> MakeRequest(DfaGuide* guide, int32_t max_draft_len) {
  auto request = std::make_unique<Request>();
  request->tokens.reserve(1000);
  for (int32_t token = 5; token < 8; ++token) request->tokens.push_back(token);
  request->num_prompt = 3;
  request->max_draft_len = max_draft_len;
  request->draft.reserve(static_cast<size_t>(max_draft_len));
  request->guide = std::make_unique<Guide>(guide->Table(), kVocab, max_draft_len);
  return request;
}

bool SameMask(const uint32_t* mask, const Dfa& dfa, int32_t state) {
  for (int32_t t = 0; t < kMaskWords * 32; ++t) {
    const bool wanted = t < kVocab && state >= 0 && dfa.Allows(state, t);
    if ((mask[t / 32] >> (t % 32) & 1) != static_cast<uint32_t>(wanted)) return false;
  }
  return true;
}

// Random walks of several requests at once, with drafts that may leave the language anywhere, looks
// ahead, steps that are not sampled and ones that give several tokens; nothing is allocated.
void TestMasksAgainstTheDfa() {
  const Dfa dfa = RandomDfa(3, 7, 5, 3);
  Counts counts;
  {
    constexpr int32_t kDraft = 4;
    GuideThread thread;
    thread.Reserve(6);
    std::vector<std::unique_ptr<Request>> requests;
    for (int i = 0; i < 6; ++i)
      requests.push_back(MakeRequest(new DfaGuide(&dfa, &counts), kDraft));
    std::vector<int32_t> states(requests.size(), 0);
    std::mt19937 random(11);
    const auto draw = [&](int32_t state, bool legal) {
      const auto& row = dfa.next[static_cast<size_t>(std::max(state, 0))];
      if (!legal || state < 0) return static_cast<int32_t>(random() % kVocab);
      return std::next(row.begin(), static_cast<long>(random() % row.size()))->first;
    };
    long news = 0;
    for (int step = 0; step < 1500; ++step) {
      if (step == 20) news = num_news;
      for (size_t i = 0; i < requests.size(); ++i) {
        Request* r = requests[i].get();
        r->draft.clear();
        int32_t state = states[i];
        for (uint32_t n = random() % (kDraft + 1); n > 0; --n) {
          if (random() % 3 == 0) {
            const uint32_t* mask =
                thread.MaskAhead(r, r->draft.data(), static_cast<int32_t>(r->draft.size()));
            CHECK(SameMask(mask, dfa, state));
          }
          const int32_t token = draw(state, random() % 4 != 0);
          r->draft.push_back(token);
          state = state == -2 ? -1 : dfa.Walk(state, &token, 1);
          if (state == -2) state = -1;  // nothing follows the end id either
        }
        thread.Prepare(r);
      }
      for (size_t i = 0; i < requests.size(); ++i) {
        if (random() % 8 == 0) continue;  // this step was for nothing
        Request* r = requests[i].get();
        int32_t state = states[i];
        for (size_t row = 0; row <= r->draft.size(); ++row) {
          CHECK(SameMask(thread.Mask(*r, static_cast<int32_t>(row)), dfa, state));
          const int32_t token = row < r->draft.size() && dfa.Allows(state, r->draft[row]) &&
                                        r->draft[row] != kEnd && random() % 4 != 0
                                    ? r->draft[row]
                                    : draw(state, true);
          r->tokens.push_back(token);
          thread.Accept(r, r->num_output() - 1);
          state = states[i] = dfa.Walk(state, &token, 1);
          if (row == r->draft.size() || token != r->draft[row]) break;
        }
        if (r->tokens.size() > 900) r->tokens.resize(3);  // the guide keeps its own state
      }
    }
    CHECK(num_news == news);
    for (const auto& r : requests) thread.Finish(r.get());
  }
  CHECK(!counts.broke_contract);
  CHECK(counts.closed == 6);
}

// What is already made for a look ahead is not made again.
void TestLooksAheadAreShared() {
  const Dfa dfa = RandomDfa(4, 5, 3, 100);
  Counts counts;
  GuideThread thread;
  auto r = MakeRequest(new DfaGuide(&dfa, &counts), 3);
  int32_t state = 0;
  for (int j = 0; j < 3; ++j) {
    thread.MaskAhead(r.get(), r->draft.data(), j);
    r->draft.push_back(dfa.next[static_cast<size_t>(state)].begin()->first);
    state = dfa.Walk(state, &r->draft.back(), 1);
  }
  thread.Prepare(r.get());
  CHECK(SameMask(thread.Mask(*r, 3), dfa, state));
  CHECK(counts.fills == 4);
  thread.Prepare(r.get());
  thread.Mask(*r, 3);
  CHECK(counts.fills == 4);
  thread.Finish(r.get());
}

template <typename Call>
psm_status CodeOf(Call&& call, const char* text) {
  try {
    call();
  } catch (const StatusError& e) {
    CHECK(std::string(e.what()).find(text) != std::string::npos);
    return e.code();
  }
  return PSM_OK;
}

void TestFailuresAreTheGuidesOwn() {
  const Dfa dfa = RandomDfa(5, 5, 3, 100);
  Counts counts;
  GuideThread thread;
  auto fill = std::make_unique<DfaGuide>(&dfa, &counts).release();
  fill->fail_fill_at = 1;
  auto accept = new DfaGuide(&dfa, &counts);
  accept->fail_accept_at = 0;
  auto throws = new DfaGuide(&dfa, &counts);
  throws->throw_at = 0;
  auto fine = new DfaGuide(&dfa, &counts);
  std::vector<std::unique_ptr<Request>> r;
  for (DfaGuide* guide : {fill, accept, throws, fine}) r.push_back(MakeRequest(guide, 2));
  for (const auto& request : r) thread.Prepare(request.get());
  CHECK(CodeOf([&] { thread.Mask(*r[2], 0); }, "thrown by a guide") == PSM_ERROR_EXECUTOR);
  const int32_t token = dfa.next[0].begin()->first;
  for (int i : {0, 1, 3}) {
    thread.Mask(*r[static_cast<size_t>(i)], 0);
    r[static_cast<size_t>(i)]->tokens.push_back(token);
    thread.Accept(r[static_cast<size_t>(i)].get(), 0);
    thread.Prepare(r[static_cast<size_t>(i)].get());
  }
  CHECK(CodeOf([&] { thread.Mask(*r[0], 0); }, "fill_mask") == PSM_ERROR_EXECUTOR);
  CHECK(CodeOf([&] { thread.Mask(*r[1], 0); }, "a test's guide fell over") == PSM_ERROR_EXECUTOR);
  CHECK(SameMask(thread.Mask(*r[3], 0), dfa, dfa.Walk(0, &token, 1)));
  const int fills = counts.fills;
  thread.Prepare(r[0].get());  // a guide that has failed is left alone
  CHECK(CodeOf([&] { thread.Mask(*r[0], 0); }, "fell over") == PSM_ERROR_EXECUTOR);
  CHECK(counts.fills == fills);
  CHECK(CodeOf([&] { thread.Mask(*r[3], 2); }, "row 2") == PSM_ERROR_INTERNAL);
  for (const auto& request : r) thread.Finish(request.get());
}

// A queued guide goes away at once, one at work when its call returns.
void TestFinishDropsWhatIsQueued() {
  const Dfa dfa = RandomDfa(6, 5, 3, 100);
  Counts counts;
  {
    GuideThread thread;
    auto slow = new DfaGuide(&dfa, &counts);
    slow->sleep_ms = 30;
    auto a = MakeRequest(slow, 0);
    auto b = MakeRequest(new DfaGuide(&dfa, &counts), 0);
    auto c = MakeRequest(new DfaGuide(&dfa, &counts), 0);
    for (Request* r : {a.get(), b.get(), c.get()}) thread.Prepare(r);
    while (counts.inside == 0) std::this_thread::yield();
    thread.Finish(b.get());
    b.reset();
    thread.Finish(a.get());
    CHECK(counts.inside == 0);
    a.reset();
    CHECK(SameMask(thread.Mask(*c, 0), dfa, 0));
    thread.Prepare(c.get());
  }
  CHECK(counts.closed == 3);
  CHECK(counts.fills == 2);
}

}  // namespace

int main() {
  TestMasksAgainstTheDfa();
  TestLooksAheadAreShared();
  TestFailuresAreTheGuidesOwn();
  TestFinishDropsWhatIsQueued();
  return 0;
}
