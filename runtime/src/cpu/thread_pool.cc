// SPDX-License-Identifier: Apache-2.0
#include "cpu/thread_pool.h"

#include <fenv.h>
#if defined(__linux__)
#include <sched.h>
#endif

#include <chrono>
#include <system_error>

#include "cpu/control_groups.h"
#include "status.h"

namespace plansmith {
namespace cpu {
namespace {

// Time between two products of a small model's step is 5-50 us; a futex sleep and wake costs about
// 10-50.
constexpr auto kSpinTime = std::chrono::microseconds(40);
constexpr int kPausesPerLook = 64;

void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

void PinTo(int thread_idx) {
#if defined(__linux__)
  cpu_set_t usable;
  if (sched_getaffinity(0, sizeof(usable), &usable) != 0) return;
  const int num_usable = CPU_COUNT(&usable);
  if (num_usable == 0) return;
  int skip = thread_idx % num_usable;
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (!CPU_ISSET(core, &usable) || skip-- > 0) continue;
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(core, &one);
    sched_setaffinity(0, sizeof(one), &one);  // a refusal costs speed only
    return;
  }
#else
  (void)thread_idx;
#endif
}

}  // namespace

bool Event::Spin(bool (*ready)(void*), void* context) {
  const auto start = std::chrono::steady_clock::now();
  do {
    for (int i = 0; i < kPausesPerLook; ++i) {
      if (ready(context)) return true;
      Pause();
    }
  } while (std::chrono::steady_clock::now() - start < kSpinTime);
  return false;
}

void Event::Signal() {
  if (num_sleeping_.load(std::memory_order_seq_cst) == 0) return;
  std::lock_guard<std::mutex> lock(mutex_);
  woken_.notify_all();
}

ThreadPool::ThreadPool(int num_threads, bool pin) : num_threads_(num_threads), pin_(pin) {
  threads_.reserve(static_cast<size_t>(num_threads - 1));
  try {
    for (int i = 1; i < num_threads; ++i) threads_.emplace_back([this, i] { Work(i); });
  } catch (const std::system_error& e) {
    const size_t num_started = threads_.size() + 1;
    StopAndJoin();
    throw StatusError(PSM_ERROR_OUT_OF_MEMORY,
                      Format("cannot start thread %zu of %d: %s; set a lower num_threads or raise "
                             "the process's limits",
                             num_started + 1, num_threads, e.what()));
  } catch (...) {
    StopAndJoin();
    throw;
  }
}

ThreadPool::~ThreadPool() { StopAndJoin(); }

void ThreadPool::StopAndJoin() {
  job_ = nullptr;
  num_runs_.fetch_add(1, std::memory_order_seq_cst);
  started_.Signal();
  for (std::thread& thread : threads_) thread.join();
}

void ThreadPool::Run(Job job, void* context) {
  if (pin_ && !caller_pinned_) {
    PinTo(0);
    caller_pinned_ = true;
  }
  job_ = job;
  context_ = context;
  num_finished_.store(0, std::memory_order_relaxed);
  num_runs_.fetch_add(1, std::memory_order_seq_cst);
  started_.Signal();
  fenv_t callers;
  fegetenv(&callers);
  fesetenv(FE_DFL_ENV);
  job(context, 0);
  fesetenv(&callers);
  finished_.Await(
      [this] { return num_finished_.load(std::memory_order_seq_cst) == num_threads_ - 1; });
}

void ThreadPool::Work(int thread_idx) {
  if (pin_) PinTo(thread_idx);
  fesetenv(FE_DFL_ENV);  // a thread begins with its creator's
  for (uint32_t seen = 0;; ++seen) {
    started_.Await([&] { return num_runs_.load(std::memory_order_seq_cst) != seen; });
    if (job_ == nullptr) return;
    job_(context_, thread_idx);
    if (num_finished_.fetch_add(1, std::memory_order_seq_cst) == num_threads_ - 2) {
      finished_.Signal();
    }
  }
}

int NumUsableCores() {
  const unsigned n = std::thread::hardware_concurrency();
  int cores = n > 0 ? static_cast<int>(n) : 1;
#if defined(__linux__)
  cpu_set_t usable;
  if (sched_getaffinity(0, sizeof(usable), &usable) == 0 && CPU_COUNT(&usable) > 0) {
    cores = CPU_COUNT(&usable);
  }
#endif
  return QuotaCores(SmallFile, cores);
}

}  // namespace cpu
}  // namespace plansmith
