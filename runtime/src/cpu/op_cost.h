// The bytes and operations that ops take by arithmetic: beside the time they took they say how near
// the machine's limits they come.
//
// A cost is linear in what a step holds, so costs are kept for one unit of each and steps are
// summed: a profile does a few additions a step, however many ops the plan has.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cpu/plan.h"
#include "plansmith/plansmith.h"

namespace plansmith {
namespace cpu {

// Parts of the plan's ops that run as phases of their own, beside OpCode.
enum PhaseCode : uint32_t {
  kCodeQuantize = 1000,  // of kOpLinear: its rows as int8, or as E4M3 in bfloat16
  kCodeWriteKv = 1001,   // of kOpPagedAttention: k and v into the pool
  kCodeLora = 1002,      // of kOpLinear: the rows' adapters
};

// One op, or a part of one, that a phase runs.
struct OpPart {
  const OpRecord* op;
  uint32_t code;      // OpCode or PhaseCode
  bool bf16 = false;  // of kOpLinear: its products are bf16 dot products
};

// What attention with one window (0 = all) sees in a step.
struct Seen {
  uint64_t positions = 0;  // of each sequence, those that some row of the step sees
  uint64_t pairs = 0;      // (row, position)
};
Seen SeenBy(const psm_batch& batch, int32_t window);

// Steps, summed.
struct StepSums {
  uint64_t steps = 0;
  uint64_t logits_steps = 0;  // with R > 0: what is behind the gather runs in these alone
  uint64_t tokens = 0;        // T
  uint64_t logits_rows = 0;   // R
};

// Of one unit of each. Bytes are those an op has to move once: weights with their scales and zero
// points as they lie in the file, rows of activations that it reads and writes, K and V.
struct UnitCost {
  uint32_t rows_kind = kRowsTokens;  // SlotRows
  int32_t window = 0;                // of attention
  uint64_t step_bytes = 0;           // weights
  uint64_t row_bytes = 0;            // activations and, of an embedding, its row
  uint64_t row_operations = 0;
  uint64_t position_bytes = 0;  // K and V of a position, all KV heads
  uint64_t pair_operations = 0;
};

// Cost of a part. A product is 2 N K operations a row, attention 4 D a head and pair; what goes
// value by value counts a few for each (kept in op_cost.cc). Adapters count nothing.
UnitCost CostOf(const OpPart& part, const Plan& plan);

struct OpCost {
  uint64_t bytes = 0;
  uint64_t activation_bytes = 0;  // of them: rows, which stay in the caches where they fit
  uint64_t operations = 0;
};
OpCost Total(const UnitCost& cost, const StepSums& steps, const Seen& seen);

// "linear", "quantize", "attention", ...: psm_op_profile.kind of one part.
const char* KindOf(uint32_t code);

}  // namespace cpu
}  // namespace plansmith
