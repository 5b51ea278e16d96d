// Memory that is missing between launch and collect: what was launched is collected all the same,
// every request ends once, and the engine serves on.
//
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <new>
#include <thread>

#include "check.h"
#include "fake_executor.h"
#include "halves_bench.h"
#include "halves_executor.h"

namespace {

// Of the engine's calls of new while a device works: so many succeed, then one fails.
std::atomic<bool> device_works{false};
std::atomic<int32_t> news_left{0};
std::atomic<bool> has_failed{false};
thread_local bool is_client = false;  // whose calls of the API are none of the engine's
// Until all requests are there the engine is held in its first step, which is another one's.
std::atomic<bool> all_are_there{false};

}  // namespace

// Not inlined: GCC would take malloc and free behind new and delete for a mismatch.
__attribute__((noinline)) void* operator new(size_t size) {
  if (device_works && !is_client && news_left-- == 0) {
    has_failed = true;
    throw std::bad_alloc();
  }
  void* p = std::malloc(size == 0 ? 1 : size);
  if (p == nullptr) throw std::bad_alloc();
  return p;
}
__attribute__((noinline)) void operator delete(void* p) noexcept { std::free(p); }
__attribute__((noinline)) void operator delete(void* p, size_t) noexcept { std::free(p); }

namespace {

using plansmith::Ask;
using plansmith::Bench;
using plansmith::HalvesExecutor;

constexpr int32_t kNumRequests = 3;
constexpr uint64_t kNumTokens = 120;  // each, so that the queue of events grows

// Words enough that their list grows once, while the device works.
Ask AskWithManyWords() {
  Ask ask;
  ask.request.max_tokens = static_cast<int32_t>(kNumTokens);
  for (int32_t i = 1; i <= 150; ++i) {
    ask.bad_ids.push_back(i % 60);
    ask.bad_ends.push_back(i);
  }
  return ask;
}

uint64_t NumCompleted(psm_engine* engine) {
  psm_engine_stats stats;
  stats.struct_size = PSM_ENGINE_STATS_SIZE;
  CHECK_OK(psm_engine_get_stats(engine, &stats));
  return stats.num_completed_requests;
}

// Takes events until so many requests have told their end, which may be a moment after they count
// as completed.
void PollUntil(Bench* bench, int64_t num_ends) {
  const auto is_end = [](const psm_event& e) { return e.is_final != 0; };
  for (;;) {
    bench->Poll();
    if (std::count_if(bench->events.begin(), bench->events.end(), is_end) >= num_ends) return;
    std::this_thread::yield();
  }
}

struct Outcome {
  int32_t num_finished = 0, num_out_of_memory = 0;
  bool is_drawn = true;  // every row, by the executor
};

Outcome RunWithout(int32_t num_news) {
  has_failed = all_are_there = false;
  news_left = num_news;
  Bench bench(
      true,
      [](HalvesExecutor* halves) {
        halves->checks_rules = false;  // which takes memory
        halves->between = [](void*) {
          if (all_are_there) {
            device_works = true;
          } else {
            while (!all_are_there) std::this_thread::yield();
          }
        };
        halves->behind = [] { device_works = false; };
      },
      false);
  Ask first, ask = AskWithManyWords();
  first.request.max_tokens = 1;
  const uint64_t first_id = bench.Submit(&first);
  for (int32_t i = 0; i < kNumRequests; ++i) bench.Submit(&ask);
  all_are_there = true;
  while (NumCompleted(bench.engine) < kNumRequests + 1) std::this_thread::yield();
  PollUntil(&bench, kNumRequests + 1);
  Outcome outcome;
  int32_t num_ends = 0;
  for (const psm_event& e : bench.events) {
    if (e.request_id == first_id) continue;
    num_ends += e.is_final;
    outcome.num_finished += e.kind == PSM_EVENT_FINISHED;
    outcome.num_out_of_memory += e.status == PSM_ERROR_OUT_OF_MEMORY;
  }
  CHECK(num_ends == kNumRequests);
  CHECK(outcome.num_finished + outcome.num_out_of_memory == kNumRequests);
  outcome.is_drawn = bench.num_given == 0;
  Ask another;
  const uint64_t id = bench.Submit(&another);
  PollUntil(&bench, kNumRequests + 2);
  CHECK(NumCompleted(bench.engine) == kNumRequests + 2);
  CHECK(bench.End(id).kind == PSM_EVENT_FINISHED && bench.NumTokens(id) == 20);
  return outcome;
}

}  // namespace

int main() {
  is_client = true;
  // First the list of a row's words: without room for it the rows come as logits.
  Outcome outcome = RunWithout(0);
  CHECK(has_failed && outcome.num_finished == kNumRequests && !outcome.is_drawn);
  // Then the queue of events, without which the step breaks down.
  outcome = RunWithout(1);
  CHECK(has_failed && outcome.num_out_of_memory == kNumRequests);
  // And no more.
  outcome = RunWithout(2);
  CHECK(!has_failed && outcome.num_finished == kNumRequests && outcome.is_drawn);
  return 0;
}
