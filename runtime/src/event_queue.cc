// SPDX-License-Identifier: Apache-2.0
#include "event_queue.h"

#include <algorithm>
#include <chrono>

#include "status.h"

#if defined(__linux__)
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#endif

namespace plansmith {

EventQueue::EventQueue() : ring_(256) {
#if defined(__linux__)
  fd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (fd_ < 0) {
    throw StatusError(
        PSM_ERROR_OUT_OF_MEMORY,
        Format("no event file descriptor: %s; raise the limit of open files (ulimit -n)",
               std::strerror(errno)));
  }
#endif
}

EventQueue::~EventQueue() {
  for (size_t i = 0; i < size_; ++i)
    psm_logits_free(ring_[(head_ + i) & (ring_.size() - 1)].logits);
#if defined(__linux__)
  close(fd_);
#endif
}

void EventQueue::SignalFd() {
#if defined(__linux__)
  const bool want = size_ > 0 || closed_;
  if (want == fd_set_) return;
  uint64_t one = 1;
  // Neither can block or fail: the counter is 0 before the write and 1 before the read.
  const ssize_t n = want ? write(fd_, &one, sizeof one) : read(fd_, &one, sizeof one);
  (void)n;
  fd_set_ = want;
#endif
}

void EventQueue::Grow(size_t min_capacity) {
  size_t capacity = ring_.size();
  while (capacity < min_capacity) capacity *= 2;
  std::vector<psm_event> bigger(capacity);
  for (size_t i = 0; i < size_; ++i) bigger[i] = ring_[(head_ + i) & (ring_.size() - 1)];
  ring_.swap(bigger);
  head_ = 0;
}

void EventQueue::Push(const std::vector<psm_event>& events) {
  if (events.empty()) return;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (size_ + events.size() > ring_.size()) Grow(size_ + events.size());
    for (const psm_event& event : events) ring_[(head_ + size_++) & (ring_.size() - 1)] = event;
    SignalFd();
  }
  ready_.notify_all();
}

int64_t EventQueue::Poll(psm_event* events, size_t max_events, int32_t timeout_ms) {
  std::unique_lock<std::mutex> lock(mutex_);
  const uint64_t wakes = num_wakes_;
  const auto ready = [&] { return size_ > 0 || closed_ || num_wakes_ != wakes; };
  if (timeout_ms < 0) {
    ready_.wait(lock, ready);
  } else if (timeout_ms > 0) {
    ready_.wait_for(lock, std::chrono::milliseconds(timeout_ms), ready);
  }
  if (size_ == 0) return closed_ ? -1 : 0;
  const size_t n = std::min(max_events, size_);
  for (size_t i = 0; i < n; ++i) {
    events[i] = ring_[head_];
    head_ = (head_ + 1) & (ring_.size() - 1);
  }
  size_ -= n;
  SignalFd();
  return static_cast<int64_t>(n);
}

void EventQueue::Wake() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    ++num_wakes_;
  }
  ready_.notify_all();
}

void EventQueue::Close() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    closed_ = true;
    SignalFd();
  }
  ready_.notify_all();
}

}  // namespace plansmith
