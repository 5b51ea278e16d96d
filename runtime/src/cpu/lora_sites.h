// Where in a plan an adapter's modules act: which columns of which product are which matrix.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/plan.h"
#include "plansmith/plansmith.h"

namespace plansmith {
namespace cpu {

// One matrix of one layer: columns [col, col + out_features) of a product's result.
struct LoraPart {
  int32_t layer;
  int32_t module;  // PSM_LORA_...
  uint32_t col;
  uint32_t in_features;
  uint32_t out_features;
};

// A product whose columns are matrices of a layer: parts [first_part, first_part + num_parts).
struct LoraSite {
  uint32_t rows_kind;  // SlotRows of the op's result
  size_t first_part;
  size_t num_parts;
};

// The sites of a plan, found by the names of its products ("layers.3.q|k|v"). Empty unless every
// matrix of every layer is found once with the model's widths: half an adapter would be worse than
// none. Immutable.
class LoraSites {
 public:
  explicit LoraSites(const Plan& plan);

  const std::vector<LoraSite>& sites() const { return sites_; }
  const std::vector<LoraPart>& parts() const { return parts_; }

  // The site of op `op_idx` of the plan, or -1.
  int32_t SiteOf(size_t op_idx) const;
  // The part of a matrix, or -1 when the model has no such layer or module.
  int32_t PartOf(int32_t layer, int32_t module) const;

 private:
  bool AddOp(const Plan& plan, size_t op_idx);

  std::vector<LoraSite> sites_;
  std::vector<LoraPart> parts_;
  std::vector<int32_t> site_of_op_;  // [num_ops]
  std::vector<int32_t> part_of_;     // [L * 8]
};

// "q", "down", ... of a PSM_LORA_... id; "?" for any other.
const char* LoraModuleName(int32_t module);

}  // namespace cpu
}  // namespace plansmith
