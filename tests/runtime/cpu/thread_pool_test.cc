// The thread pool: every member runs every job, barriers order memory, threads come and go.
//
// SPDX-License-Identifier: Apache-2.0
#include "cpu/thread_pool.h"

#include <chrono>

#include "check.h"

using plansmith::cpu::ThreadPool;

namespace {

struct Shared {
  ThreadPool* pool;
  std::vector<int> values;  // plain ints: the barrier alone must make them safe
  int rounds;
};

// Everyone writes its own, waits, and reads the neighbour's.
void Job(void* context, int idx) {
  Shared* shared = static_cast<Shared*>(context);
  const int n = shared->pool->num_threads();
  for (int round = 1; round <= shared->rounds; ++round) {
    shared->values[static_cast<size_t>(idx)] = round * 100 + idx;
    shared->pool->Barrier();
    const int next = (idx + 1) % n;
    CHECK(shared->values[static_cast<size_t>(next)] == round * 100 + next);
    shared->pool->Barrier();
  }
}

}  // namespace

int main() {
  for (int threads : {1, 2, 3, 5}) {
    for (bool pin : {false, true}) {
      ThreadPool pool(threads, pin);
      Shared shared = {&pool, std::vector<int>(static_cast<size_t>(threads)), 50};
      for (int run = 0; run < 20; ++run) {
        pool.Run(Job, &shared);
        for (int i = 0; i < threads; ++i) CHECK(shared.values[static_cast<size_t>(i)] == 5000 + i);
        // Some runs find the threads asleep.
        if (run % 5 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    }
  }
  for (int i = 0; i < 200; ++i) ThreadPool pool(3, false);  // never used
  CHECK(plansmith::cpu::NumUsableCores() >= 1);
  return 0;
}
