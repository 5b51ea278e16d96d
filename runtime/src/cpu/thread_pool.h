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

// Waits for a number that another thread bumps: spins a few microseconds, since a partner on its
// own core comes that soon, then sleeps, since a partner without a core needs this one.
class WaitPoint {
 public:
  uint32_t value() const { return value_.load(std::memory_order_acquire); }
  void Bump();
  // Returns once value() != seen.
  void Wait(uint32_t seen);

 private:
  std::atomic<uint32_t> value_{0};
  std::atomic<uint32_t> num_sleeping_{0};
  std::mutex mutex_;
  std::condition_variable woken_;
};

class ThreadPool {
 public:
  // num_threads >= 1, the caller of Run included. With `pin`, thread i runs on the i-th core that
  // this process may use (the caller's thread is pinned by its first Run).
  ThreadPool(int num_threads, bool pin);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const { return num_threads_; }

  // Calls job(context, thread_idx) once on every member and returns when all are done. One Run at a
  // time. The job must not throw.
  using Job = void (*)(void* context, int thread_idx);
  void Run(Job job, void* context);

  // Inside a job: returns when every member has come here. What they wrote before is visible after.
  void Barrier();

 private:
  void Work(int thread_idx);

  const int num_threads_;
  const bool pin_;
  bool caller_pinned_ = false;
  bool stop_ = false;
  Job job_ = nullptr;
  void* context_ = nullptr;
  WaitPoint start_;
  alignas(64) std::atomic<int> num_arrived_{0};
  WaitPoint barrier_;
  std::vector<std::thread> threads_;
};

// Cores that this process may use, at least 1.
int NumUsableCores();

}  // namespace cpu
}  // namespace plansmith
