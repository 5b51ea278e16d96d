// The largest logits of each row (psm_batch.candidates), looked for by whoever has just computed a
// part of the row, while it is in cache.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cpu/kernels.h"
#include "cpu/pages.h"
#include "plansmith/plansmith.h"

namespace plansmith {
namespace cpu {

// Begin, then Scan for each row and part of its columns, by any threads, each part by one; then
// Finish. Allocates nothing but in the constructor.
class CandidateSearch {
 public:
  explicit CandidateSearch(uint32_t vocab_size);

  // Whether the batch wants any; parts: how many pieces a row comes in.
  bool Begin(const psm_batch& batch, uint32_t num_parts);
  bool wanted() const { return k_ > 0; }
  // Columns [begin, end) of the row at `logits`.
  void Scan(const KernelTable& kernels, const float* logits, uint32_t row, uint32_t part,
            uint32_t begin, uint32_t end);
  // The parts' lists joined, into the batch's arrays.
  void Finish(const psm_batch& batch);

 private:
  // A part's list: num <= k_ entries, best first; kBad when it has what is not finite.
  static constexpr uint32_t kBad = ~0u;

  psm_candidate* ListOf(uint32_t row, uint32_t part) const {
    return entries_.as<psm_candidate>() + (static_cast<size_t>(row) * num_parts_ + part) * k_;
  }
  uint32_t* NumOf(uint32_t row, uint32_t part) const {
    return nums_.as<uint32_t>() + static_cast<size_t>(row) * num_parts_ + part;
  }
  void JoinRow(uint32_t row, psm_candidate* out) const;

  uint32_t vocab_size_;
  uint32_t k_ = 0, num_parts_ = 0;
  Pages entries_, nums_;
};

}  // namespace cpu
}  // namespace plansmith
