// A psm_batch, checked, with what every layer needs worked out once.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/plan_format.h"
#include "plansmith/plansmith.h"

namespace plansmith {
namespace cpu {

// Where the K and V of a token go: position `offset` of pool block `block`.
struct KvPlace {
  uint32_t block;
  uint32_t offset;
};

// Owns its arrays, which are sized once for the model's limits. One step at a time.
class BatchPlaces {
 public:
  BatchPlaces(const PlanHeader& model, int32_t num_blocks);

  // Throws StatusError (INVALID_ARGUMENT or SHAPE) naming the entry that is wrong; nothing was run
  // then.
  void Set(const psm_batch& batch);

  const KvPlace& place(uint32_t token) const { return places_[token]; }

 private:
  void CheckCounts(const psm_batch& batch) const;
  void CheckTokens(const psm_batch& batch) const;
  void CheckSequence(const psm_batch& batch, int32_t seq, int32_t first_token) const;
  void ClaimBlocks(const psm_batch& batch);

  const PlanHeader model_;
  const int32_t num_blocks_;
  std::vector<KvPlace> places_;  // [max_num_tokens]
  struct Claim {
    uint64_t step = 0;
    int32_t seq = 0;
    int32_t column = 0;
  };
  std::vector<Claim> claims_;  // [num_blocks] who writes a block in this step
  uint64_t step_ = 0;
};

}  // namespace cpu
}  // namespace plansmith
