// A fixed team of threads that runs one job together; the calling thread is member 0.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace plansmith {
namespace cpu {

// Waiting for what another thread does: spins for some tens of microseconds, since a partner on its
// own core comes that soon, then sleeps, since a partner without a core needs this one.
class Event {
 public:
  // Returns once ready(), which reads atomics, is true.
  template <typename Ready>
  void Await(Ready ready) {
    if (Spin([](void* r) { return (*static_cast<Ready*>(r))(); }, &ready)) return;
    // The sleeper announces itself before its last look, the other side changes what is looked at
    // before it looks for sleepers; both in one total order.
    num_sleeping_.fetch_add(1, std::memory_order_seq_cst);
    {
      std::unique_lock<std::mutex> lock(mutex_);
      woken_.wait(lock, ready);
    }
    num_sleeping_.fetch_sub(1, std::memory_order_seq_cst);
  }

  // To be called after each change (std::memory_order_seq_cst) that may make a ready() true.
  void Signal();

 private:
  static bool Spin(bool (*ready)(void*), void* context);

  std::atomic<uint32_t> num_sleeping_{0};
  std::mutex mutex_;
  std::condition_variable woken_;
};

class ThreadPool {
 public:
  // num_threads >= 1, the caller of Run included. Throws StatusError (OUT_OF_MEMORY) where the
  // system gives no more threads. With `pin`, thread i runs on the i-th core that this process may
  // use (the caller's thread is pinned by its first Run).
  ThreadPool(int num_threads, bool pin);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const { return num_threads_; }

  // Calls job(context, thread_idx) once on every member and returns when all are done; what they
  // wrote is visible then. One Run at a time. The job must not throw. It runs in the default
  // floating-point environment on all members, whatever rounding or flushing of denormals a thread
  // of the host has set: who computes a number must not change its bits.
  using Job = void (*)(void* context, int thread_idx);
  void Run(Job job, void* context);

 private:
  void Work(int thread_idx);
  void StopAndJoin();

  const int num_threads_;
  const bool pin_;
  bool caller_pinned_ = false;
  Job job_ = nullptr;  // null: end
  void* context_ = nullptr;
  alignas(64) std::atomic<uint32_t> num_runs_{0};
  alignas(64) std::atomic<int> num_finished_{0};  // workers, in this run
  Event started_, finished_;
  std::vector<std::thread> threads_;
};

// Cores that this process may use, at least 1: those it may run on, but no more than its control
// groups' quotas pay for.
int NumUsableCores();

}  // namespace cpu
}  // namespace plansmith
