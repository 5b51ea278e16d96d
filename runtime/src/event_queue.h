// Events on their way out: one producer (the step), any number of pollers, and a file descriptor
// for event loops.
//
// The queue is unbounded: a client that does not poll costs memory for what its requests produce
// (at most max_tokens + 1 events for each sequence or beam, one for each position of a prompt whose
// rows it wants, and the logits of both), and never stalls the step.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

#include "plansmith/plansmith.h"

namespace plansmith {

class EventQueue {
 public:
  EventQueue();
  ~EventQueue();  // frees the logits of the events that nobody took
  EventQueue(const EventQueue&) = delete;
  EventQueue& operator=(const EventQueue&) = delete;

  // Append in order. Allocates only while the ring grows to its high-water mark.
  void Push(const std::vector<psm_event>& events);
  // Take up to `max_events`; waits for the first up to timeout_ms (-1 = for ever), for Wake or for
  // Close. Returns the number taken, or -1 when the queue is closed and empty.
  int64_t Poll(psm_event* events, size_t max_events, int32_t timeout_ms);
  // Make every thread that waits in Poll return.
  void Wake();
  // No more events will come.
  void Close();
  // Readable exactly while events wait (or the queue is closed); -1 if the platform has none.
  int fd() const { return fd_; }

 private:
  void Grow(size_t min_capacity);
  void SignalFd();  // with mutex_ held: make the descriptor tell whether there is something to poll

  std::mutex mutex_;
  std::condition_variable ready_;
  std::vector<psm_event> ring_;  // capacity a power of two
  size_t head_ = 0;
  size_t size_ = 0;
  uint64_t num_wakes_ = 0;
  bool closed_ = false;
  bool fd_set_ = false;
  int fd_ = -1;
};

}  // namespace plansmith
