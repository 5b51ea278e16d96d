// The last iteration records, for psm_engine_iteration_stats.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "plansmith/plansmith.h"

namespace plansmith {

// Holds up to `capacity` records (0: none); a full ring drops its oldest. The caller locks.
class IterationRing {
 public:
  explicit IterationRing(size_t capacity) : records_(capacity) {}

  void Push(const psm_iteration_stats& record) {
    if (records_.empty()) return;
    records_[(head_ + size_) % records_.size()] = record;
    if (size_ < records_.size()) {
      ++size_;
    } else {
      head_ = (head_ + 1) % records_.size();
    }
  }

  size_t Take(psm_iteration_stats* out, size_t max_records) {
    const size_t n = std::min(max_records, size_);
    for (size_t i = 0; i < n; ++i) out[i] = records_[(head_ + i) % records_.size()];
    if (n > 0) head_ = (head_ + n) % records_.size();
    size_ -= n;
    return n;
  }

 private:
  std::vector<psm_iteration_stats> records_;
  size_t head_ = 0;
  size_t size_ = 0;
};

}  // namespace plansmith
