// Items of stages: each taken once, whoever is late, and a stage's results seen by the next, also
// where numbers of stages are large and where they begin anew.
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

// 500 stages by all threads, the first of them number `base`.
void WalkAll(WorkShare* share, uint32_t num_threads, uint32_t base) {
  std::vector<uint32_t> counts;
  for (uint32_t s = 0; s < 500; ++s) counts.push_back(s * 2654435761u % 13);
  Stages stages(counts);
  std::vector<std::thread> threads;
  for (uint32_t i = 1; i < num_threads; ++i) {
    threads.emplace_back([&, i] { Walk(share, &stages, base, i); });
  }
  Walk(share, &stages, base, 0);
  for (std::thread& thread : threads) thread.join();
  for (const std::vector<int>& times_run : stages.times_run) {
    for (int times : times_run) CHECK(times == 1);
  }
}

void Check(uint32_t num_threads) {
  WorkShare share(static_cast<int>(num_threads));
  for (uint32_t n : {0u, 1u, 7u, 1000u}) {
    CHECK(share.FirstOf(0, n) == 0 && share.FirstOf(num_threads, n) == n);
  }
  WalkAll(&share, num_threads, 1);
  WalkAll(&share, num_threads, UINT32_MAX - 500);
  share.Restart();
  WalkAll(&share, num_threads, 1);
}

// One item in every stage: the second thread's part is not touched for longer than half of the
// numbers, then has an item again.
void CheckIdlePart() {
  WorkShare share(2);
  for (uint32_t stage : {1u, 0x70000000u, 0xE0000000u}) {
    uint32_t num_tried = 0;
    CHECK(share.Claim(1, stage, 1, &num_tried) == 0);
    CHECK(share.Finish(stage, 1) == 1 && share.IsDone(stage, 1));
    CHECK(share.Claim(1, stage, 1, &num_tried) == 1);
  }
  uint32_t num_tried = 0;
  CHECK(share.Claim(0, 0xE0000001u, 2, &num_tried) == 0);
  CHECK(share.Claim(0, 0xE0000001u, 2, &num_tried) == 1);
  CHECK(!share.IsDone(0xE0000001u, 2) && share.Finish(0xE0000001u, 2) == 2);
}

}  // namespace

int main() {
  for (uint32_t num_threads : {1u, 2u, 3u, 5u}) Check(num_threads);
  CheckIdlePart();
  return 0;
}
