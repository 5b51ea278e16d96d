// The last iteration records, for psm_engine_iteration_stats.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <new>
#include <vector>

#include "plansmith/plansmith.h"

namespace plansmith {

// Holds up to `capacity` records (0: none); a full ring drops its oldest. The caller locks.
class IterationRing {
 public:
  explicit IterationRing(size_t capacity) : capacity_(capacity) {
    records_.reserve(std::min<size_t>(capacity, 4096));
  }

  void Push(const psm_iteration_stats& record) {
    if (capacity_ == 0) return;
    const size_t slot = (head_ + size_) % capacity_;
    if (slot < records_.size()) {
      records_[slot] = record;
    } else if (!Grow(record)) {
      return;
    }
    if (size_ < capacity_) {
      ++size_;
    } else {
      head_ = (head_ + 1) % capacity_;
    }
  }

  size_t Take(psm_iteration_stats* out, size_t max_records) {
    const size_t n = std::min(max_records, size_);
    for (size_t i = 0; i < n; ++i) out[i] = records_[(head_ + i) % capacity_];
    if (n > 0) head_ = (head_ + n) % capacity_;
    size_ -= n;
    return n;
  }

 private:
  // Slots come into use one after another, so a large capacity costs what is kept. Up to the 4096
  // that are reserved this allocates nothing; a record for which there is no memory is lost.
  bool Grow(const psm_iteration_stats& record) {
    try {
      records_.push_back(record);
      return true;
    } catch (const std::bad_alloc&) {
      return false;
    }
  }

  size_t capacity_;
  std::vector<psm_iteration_stats> records_;
  size_t head_ = 0;
  size_t size_ = 0;
};

}  // namespace plansmith
