// The thread pool: every member runs every job, events order memory, threads come and go.
//
// SPDX-License-Identifier: Apache-2.0
#include "cpu/thread_pool.h"

#include <fenv.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cfloat>
#include <chrono>

#include "check.h"
#include "status.h"
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

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

// Every member rounds to nearest and keeps denormals, whatever the caller has set.
void CheckEnvironment() {
  constexpr int kThreads = 3;
  struct Seen {
    int rounding[kThreads];
    float half[kThreads];
  };
  const auto job = [](void* context, int idx) {
    Seen* seen = static_cast<Seen*>(context);
    volatile float smallest = FLT_MIN;
    seen->rounding[idx] = fegetround();
    seen->half[idx] = smallest * 0.5f;
  };
  const auto set = [](bool strange) {
    fesetround(strange ? FE_UPWARD : FE_TONEAREST);
#if defined(__x86_64__)
    _mm_setcsr((_mm_getcsr() & ~0x8040u) | (strange ? 0x8040u : 0));  // FTZ and DAZ
#endif
  };
  for (bool before : {false, true}) {  // workers inherit what their creator had
    set(before);
    ThreadPool pool(kThreads, false);
    set(true);
    Seen seen = {};
    pool.Run(job, &seen);
    CHECK(fegetround() == FE_UPWARD);
#if defined(__x86_64__)
    CHECK((_mm_getcsr() & 0x8040u) == 0x8040u);
#endif
    set(false);
    for (int i = 0; i < kThreads; ++i) {
      CHECK(seen.rounding[i] == FE_TONEAREST);
      CHECK(seen.half[i] > 0);
    }
  }
}

// Without room for the threads' stacks: an error that says so. Sanitizers need the room themselves.
void CheckNoThreads() {
#if defined(__linux__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  const pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    const rlimit limit = {256u << 20, 256u << 20};
    if (setrlimit(RLIMIT_AS, &limit) != 0) _exit(1);
    try {
      ThreadPool pool(1000, false);
    } catch (const plansmith::StatusError& e) {
      _exit(e.code() == PSM_ERROR_OUT_OF_MEMORY && strstr(e.what(), " of 1000: ") ? 0 : 2);
    }
    _exit(3);
  }
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
#endif
}

}  // namespace

int main() {
  CheckNoThreads();
  CheckEnvironment();
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
