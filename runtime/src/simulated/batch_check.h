// Everything that plansmith.h promises of a psm_batch, checked: the executor that is asked to find
// the scheduler's mistakes takes nothing on trust.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "plansmith/plansmith.h"

namespace plansmith {
namespace simulated {

class BatchCheck {
 public:
  BatchCheck(const psm_model_info& info, int32_t num_blocks);

  // Throws INVALID_ARGUMENT naming the entry, what it is and what was wanted; before anything ran.
  // holds_adapter[slot]: whether a slot holds an adapter.
  void Check(const psm_batch& batch, const std::vector<bool>& holds_adapter);

 private:
  void CheckCounts(const psm_batch& batch) const;
  void CheckSequence(const psm_batch& batch, int32_t seq, int32_t first_token) const;
  void CheckTable(const psm_batch& batch, int32_t seq, bool whole) const;
  void CheckRows(const psm_batch& batch) const;
  void CheckAdapters(const psm_batch& batch, const std::vector<bool>& holds_adapter) const;
  void ClaimWritten(const psm_batch& batch, int32_t seq);
  void CheckShared(const psm_batch& batch, int32_t seq) const;

  const psm_model_info info_;
  const int32_t num_blocks_;
  uint32_t step_ = 0;
  struct Claim {
    uint32_t step = 0;
    int32_t seq = 0;
    int32_t column = 0;
  };
  std::vector<Claim> claims_;  // [num_blocks] who writes a block in this step
};

}  // namespace simulated
}  // namespace plansmith
