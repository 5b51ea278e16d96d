// The thread pool: every member runs every job, events order memory, threads come and go.
//
// SPDX-License-Identifier: Apache-2.0
#include "cpu/thread_pool.h"

#include <chrono>

#include "check.h"

using plansmith::cpu::Event;
using plansmith::cpu::ThreadPool;

namespace {

struct Shared {
  int num_threads;
  int rounds;
  std::vector<int> values;                // plain ints: Event and Run alone must make them safe
  std::vector<std::atomic<int>> arrived;  // [rounds]
  Event event;

  Shared(int threads, int num_rounds)
      : num_threads(threads),
        rounds(num_rounds),
        values(static_cast<size_t>(threads)),
        arrived(static_cast<size_t>(num_rounds)) {}
  void Arrive(int round) {
    std::atomic<int>& count = arrived[static_cast<size_t>(round)];
    if (count.fetch_add(1) == num_threads - 1) event.Signal();
    event.Await([&] { return count.load() == num_threads; });
  }
};

// Everyone writes its own, waits for all, and reads the neighbour's.
void Job(void* context, int idx) {
  Shared* shared = static_cast<Shared*>(context);
  for (int round = 0; round < shared->rounds; round += 2) {
    shared->values[static_cast<size_t>(idx)] = round * 100 + idx;
    shared->Arrive(round);
    const int next = (idx + 1) % shared->num_threads;
    CHECK(shared->values[static_cast<size_t>(next)] == round * 100 + next);
    shared->Arrive(round + 1);
  }
}

}  // namespace

int main() {
  for (int threads : {1, 2, 3, 5}) {
    for (bool pin : {false, true}) {
      ThreadPool pool(threads, pin);
      for (int run = 0; run < 20; ++run) {
        Shared shared(threads, 100);
        pool.Run(Job, &shared);
        for (int i = 0; i < threads; ++i) CHECK(shared.values[static_cast<size_t>(i)] == 9800 + i);
        // Some runs find the threads asleep.
        if (run % 5 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    }
  }
  for (int i = 0; i < 200; ++i) ThreadPool pool(3, false);  // never used
  CHECK(plansmith::cpu::NumUsableCores() >= 1);
  return 0;
}
