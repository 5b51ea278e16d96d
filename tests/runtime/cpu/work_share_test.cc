// Items of stages: each taken once, whoever is late, and a stage's results seen by the next; the
// number of a stage may wrap around.
//
// SPDX-License-Identifier: Apache-2.0
#include "cpu/work_share.h"

#include <chrono>
#include <thread>
#include <vector>

#include "check.h"

using plansmith::cpu::WorkShare;

namespace {

// Plain ints: the shares alone must make them safe.
struct Stages {
  explicit Stages(const std::vector<uint32_t>& counts) {
    for (uint32_t n : counts) times_run.emplace_back(n, 0);
  }
  std::vector<std::vector<int>> times_run;
};

void Walk(WorkShare* share, Stages* stages, uint32_t base, uint32_t thread_idx) {
  for (size_t s = 0; s < stages->times_run.size(); ++s) {
    const uint32_t stage = base + static_cast<uint32_t>(s);
    std::vector<int>& times_run = stages->times_run[s];
    const uint32_t n = static_cast<uint32_t>(times_run.size());
    if (n == 0) continue;  // all leave such a stage out
    if (s > 0) {
      for (int times : stages->times_run[s - 1]) CHECK(times == 1);
    }
    // Sometimes a thread comes when the others are stages ahead.
    if ((s * 7 + thread_idx) % 97 == 0) std::this_thread::sleep_for(std::chrono::microseconds(200));
    uint32_t num_tried = 0, num_run = 0;
    for (uint32_t item; (item = share->Claim(thread_idx, stage, n, &num_tried)) < n; ++num_run) {
      ++times_run[item];
    }
    if (num_run > 0) share->Finish(stage, num_run);
    while (!share->IsDone(stage, n)) std::this_thread::yield();
  }
}

void Check(uint32_t num_threads, uint32_t base) {
  std::vector<uint32_t> counts;
  for (uint32_t s = 0; s < 500; ++s) counts.push_back(s * 2654435761u % 13);
  Stages stages(counts);
  WorkShare share(static_cast<int>(num_threads));
  for (uint32_t n : {0u, 1u, 7u, 1000u}) {
    CHECK(share.FirstOf(0, n) == 0 && share.FirstOf(num_threads, n) == n);
  }
  // A share's counters begin at stage 0: to where `base` is the next, in steps below 2^31.
  for (uint32_t stage : {0x70000000u, 0xE0000000u}) {
    if (base < stage) continue;
    uint32_t num_tried = 0;
    while (share.Claim(0, stage, num_threads, &num_tried) < num_threads) {
    }
    CHECK(share.Finish(stage, num_threads) == num_threads);
  }
  std::vector<std::thread> threads;
  for (uint32_t i = 1; i < num_threads; ++i) {
    threads.emplace_back([&, i] { Walk(&share, &stages, base, i); });
  }
  Walk(&share, &stages, base, 0);
  for (std::thread& thread : threads) thread.join();
  for (const std::vector<int>& times_run : stages.times_run) {
    for (int times : times_run) CHECK(times == 1);
  }
}

}  // namespace

int main() {
  for (uint32_t num_threads : {1u, 2u, 3u, 5u}) {
    Check(num_threads, 1);
    Check(num_threads, UINT32_MAX - 250);
  }
  return 0;
}
