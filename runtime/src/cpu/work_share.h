// Items of stages that threads work through together: each thread has a part of every stage's items
// of its own, neighbours in memory, and helps with the others' when it is through.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

namespace plansmith {
namespace cpu {

// A stage is a number above 0; later ones are larger, and one begins when the one before it is
// done. Nothing has to be reset between stages: a counter of an older stage counts as untouched,
// however long ago that was, which is why numbers never wrap around. Taking an item costs one
// locked instruction on a line that nobody else wants as long as all work on their own parts, a
// stage one more on the line that all share.
class WorkShare {
 public:
  explicit WorkShare(int num_threads)
      : num_parts_(static_cast<uint32_t>(num_threads)), parts_(new Counter[num_parts_]) {}

  // Stages may begin at 1 again. While no thread is in one, and before who enters the next.
  void Restart() {
    for (uint32_t i = 0; i < num_parts_; ++i) parts_[i].value.store(0, std::memory_order_relaxed);
    done_.value.store(0, std::memory_order_relaxed);
  }

  // First of the items [0, num_items) that belong to a thread.
  uint32_t FirstOf(uint32_t thread_idx, uint32_t num_items) const {
    return static_cast<uint32_t>(static_cast<uint64_t>(num_items) * thread_idx / num_parts_);
  }

  // An item that nobody else has, num_items when there is none. *num_tried is 0 before a thread's
  // first call for a stage.
  uint32_t Claim(uint32_t thread_idx, uint32_t stage, uint32_t num_items, uint32_t* num_tried) {
    for (; *num_tried < num_parts_; ++*num_tried) {
      uint32_t part = thread_idx + *num_tried;
      if (part >= num_parts_) part -= num_parts_;
      const uint32_t first = FirstOf(part, num_items), end = FirstOf(part + 1, num_items);
      std::atomic<uint64_t>& counter = parts_[part].value;
      uint64_t seen = counter.load(std::memory_order_relaxed);
      for (;;) {
        if (StageOf(seen) > stage) return num_items;  // the others are ahead
        const uint32_t next = StageOf(seen) == stage ? CountOf(seen) : first;
        if (next >= end) break;
        if (counter.compare_exchange_weak(seen, Pack(stage, next + 1), std::memory_order_relaxed)) {
          return next;
        }
      }
    }
    return num_items;
  }

  // Counts `num` more as done and returns how many are. What was written before is visible to who
  // sees the count.
  uint32_t Finish(uint32_t stage, uint32_t num) {
    uint64_t seen = done_.value.load(std::memory_order_relaxed);
    uint32_t count;
    do {
      count = (StageOf(seen) == stage ? CountOf(seen) : 0) + num;
    } while (
        !done_.value.compare_exchange_weak(seen, Pack(stage, count), std::memory_order_seq_cst));
    return count;
  }

  bool IsDone(uint32_t stage, uint32_t count) const {
    const uint64_t seen = done_.value.load(std::memory_order_seq_cst);
    return StageOf(seen) == stage ? CountOf(seen) >= count : StageOf(seen) > stage;
  }

 private:
  struct alignas(128) Counter {  // two lines: they are fetched in pairs
    std::atomic<uint64_t> value{0};
  };
  static uint64_t Pack(uint32_t stage, uint32_t count) {
    return static_cast<uint64_t>(stage) << 32 | count;
  }
  static uint32_t StageOf(uint64_t value) { return static_cast<uint32_t>(value >> 32); }
  static uint32_t CountOf(uint64_t value) { return static_cast<uint32_t>(value); }

  const uint32_t num_parts_;
  std::unique_ptr<Counter[]> parts_;  // stage, next item of the part
  Counter done_;                      // stage, items
};

}  // namespace cpu
}  // namespace plansmith
