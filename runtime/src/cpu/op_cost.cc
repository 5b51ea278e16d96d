// SPDX-License-Identifier: Apache-2.0
#include "cpu/op_cost.h"

#include <algorithm>

#include "cpu/attention.h"

namespace plansmith {
namespace cpu {
namespace {

constexpr uint64_t kFloat = sizeof(float);

// Operations on one value, an exp, a tanh and a division counted as one each.
constexpr uint64_t kRmsNormOperations = 4;   // square, sum, two factors
constexpr uint64_t kRopeOperations = 3;      // of two values: four products, two sums
constexpr uint64_t kGluOperations = 5;       // sign, exp, 1 +, division, times `up`
constexpr uint64_t kSoftcapOperations = 3;   // division, tanh, product
constexpr uint64_t kQuantizeOperations = 3;  // largest, product, rounding
constexpr uint64_t kRoundOperations = 4;     // the same, and the way back

uint64_t Of(int32_t value) { return static_cast<uint64_t>(value); }

uint64_t WeightBytes(const TensorRecord& t) {
  return t.data_bytes + t.scales_bytes + t.zeros_bytes;
}

const TensorRecord& Tensor(const Plan& plan, int32_t idx) {
  return plan.tensor(static_cast<size_t>(idx));
}

// Bytes of a row of int8 codes, or of E4M3 ones as bfloat16, with their scales.
uint64_t CodeBytes(const OpRecord& op, const TensorRecord& weight) {
  const bool by_group = op.i[1] == kInputInt8Group || op.i[1] == kInputF8Group;
  const uint64_t scales = by_group ? PaddedShapeOf(weight).num_groups : 1;
  const uint64_t code = op.i[1] >= kInputF8Row ? 2 : 1;
  return code * weight.cols + scales * kFloat;
}

UnitCost LinearCost(const OpRecord& op, const Plan& plan) {
  const TensorRecord& weight = Tensor(plan, op.tensors[0]);
  UnitCost cost;
  cost.step_bytes = WeightBytes(weight);
  if (op.tensors[1] >= 0) cost.step_bytes += weight.rows * kFloat;  // the bias
  const uint64_t in = op.i[1] == kInputFloat ? weight.cols * kFloat : CodeBytes(op, weight);
  const uint64_t writes = op.i[0] == 1 ? 2 : 1;  // what is added to is read
  cost.row_bytes = in + writes * weight.rows * kFloat;
  cost.row_operations = 2 * uint64_t{weight.rows} * weight.cols;
  return cost;
}

UnitCost QuantizeCost(const OpRecord& op, const Plan& plan) {
  const TensorRecord& weight = Tensor(plan, op.tensors[0]);
  UnitCost cost;
  cost.row_bytes = weight.cols * kFloat + CodeBytes(op, weight);
  cost.row_operations = kQuantizeOperations * weight.cols;
  return cost;
}

UnitCost EmbedCost(const OpRecord& op, const Plan& plan) {
  const TensorRecord& table = Tensor(plan, op.tensors[0]);
  UnitCost cost;
  cost.row_bytes = WeightBytes(table) / PaddedShapeOf(table).rows + table.cols * kFloat;
  cost.row_operations = table.cols;
  return cost;
}

// `values` of a row, each read from `reads` rows and written once.
UnitCost ValuesCost(uint64_t values, uint64_t reads, uint64_t operations) {
  UnitCost cost;
  cost.row_bytes = (reads + 1) * values * kFloat;
  cost.row_operations = operations * values;
  return cost;
}

UnitCost RmsNormCost(const OpRecord& op) {
  UnitCost cost = ValuesCost(Of(op.i[0]) * Of(op.i[1]), 1, kRmsNormOperations);
  cost.step_bytes = Of(op.i[1]) * kFloat;
  return cost;
}

UnitCost RopeCost(const OpRecord& op) {
  UnitCost cost = ValuesCost(Of(op.i[0]) * Of(op.i[2]), 1, kRopeOperations);
  cost.row_bytes += Of(op.i[2]) * kFloat;  // cos and sin of the position, half as many each
  return cost;
}

uint64_t KvPositionBytes(const OpRecord& op, const Plan& plan) {
  const uint64_t value = KvValueBytes(plan.header().kv_format);
  return 2 * Of(op.i[1]) * Of(op.i[2]) * value;
}

UnitCost AttentionCost(const OpRecord& op, const Plan& plan) {
  const uint64_t width = Of(op.i[0]) * Of(op.i[2]);
  UnitCost cost = ValuesCost(width, 1, 0);
  cost.window = op.i[4];
  cost.position_bytes = KvPositionBytes(op, plan);
  cost.pair_operations = 4 * width;
  return cost;
}

UnitCost WriteKvCost(const OpRecord& op, const Plan& plan) {
  const uint64_t values = 2 * Of(op.i[1]) * Of(op.i[2]);
  UnitCost cost;
  cost.row_bytes = values * kFloat + KvPositionBytes(op, plan);
  const uint32_t format = plan.header().kv_format;
  cost.row_operations = format == kKvF32 ? 0 : (KvHasScales(format) ? 2 : 1) * values;
  return cost;
}

UnitCost MulVectorCost(const OpRecord& op) {
  UnitCost cost = ValuesCost(Of(op.i[0]), 1, 1);
  cost.step_bytes = Of(op.i[0]) * kFloat;
  return cost;
}

UnitCost CostOfCode(const OpPart& part, const Plan& plan) {
  const OpRecord& op = *part.op;
  switch (part.code) {
    case kOpEmbed:
      return EmbedCost(op, plan);
    case kOpRmsNorm:
      return RmsNormCost(op);
    case kOpLinear:
      return LinearCost(op, plan);
    case kOpRope:
      return RopeCost(op);
    case kOpPagedAttention:
      return AttentionCost(op, plan);
    case kOpGlu:
      return ValuesCost(Of(op.i[0]), 2, kGluOperations);
    case kOpAdd:
      return ValuesCost(Of(op.i[0]), 2, 1);
    case kOpSoftcap:
      return ValuesCost(Of(op.i[0]), 1, kSoftcapOperations);
    case kOpGatherRows:
      return ValuesCost(Of(op.i[0]), 1, 0);
    case kOpScale:
      return ValuesCost(Of(op.i[0]), 1, 1);
    case kOpRoundInput:
      return ValuesCost(Of(op.i[0]), 1, kRoundOperations);
    case kOpMulVector:
      return MulVectorCost(op);
    case kCodeQuantize:
      return QuantizeCost(op, plan);
    case kCodeWriteKv:
      return WriteKvCost(op, plan);
    default:
      return {};
  }
}

}  // namespace

Seen SeenBy(const psm_batch& batch, int32_t window) {
  Seen seen;
  for (int32_t b = 0; b < batch.num_seqs; ++b) {
    const uint64_t rows = Of(batch.query_lens[b]), held = Of(batch.kv_lens[b]);
    const uint64_t most = window == 0 ? held : std::min(held, Of(window));
    const uint64_t first = held - rows;  // position of the first row, which sees first + 1
    // Rows before position most - 1 see all there are, one more each; those behind see `most`.
    const uint64_t growing = first + 1 < most ? std::min(rows, most - first - 1) : 0;
    seen.pairs += growing * (first + 1) + growing * (growing - 1) / 2 + (rows - growing) * most;
    seen.positions += std::min(held, most + rows - 1);
  }
  return seen;
}

UnitCost CostOf(const OpPart& part, const Plan& plan) {
  UnitCost cost = CostOfCode(part, plan);
  cost.rows_kind = plan.slot(static_cast<size_t>(part.op->out.slot)).rows;
  return cost;
}

OpCost Total(const UnitCost& cost, const StepSums& steps, const Seen& seen) {
  const bool all = cost.rows_kind == kRowsTokens;
  const uint64_t rows = all ? steps.tokens : steps.logits_rows;
  OpCost total;
  total.activation_bytes = cost.row_bytes * rows;
  total.bytes = cost.step_bytes * (all ? steps.steps : steps.logits_steps) +
                cost.position_bytes * seen.positions + total.activation_bytes;
  total.operations = cost.row_operations * rows + cost.pair_operations * seen.pairs;
  return total;
}

const char* KindOf(uint32_t code) {
  switch (code) {
    case kOpEmbed:
      return "embed";
    case kOpRmsNorm:
      return "rms_norm";
    case kOpLinear:
      return "linear";
    case kOpRope:
      return "rope";
    case kOpPagedAttention:
      return "attention";
    case kOpGlu:
      return "glu";
    case kOpAdd:
      return "add";
    case kOpSoftcap:
      return "softcap";
    case kOpGatherRows:
      return "gather";
    case kOpScale:
      return "scale";
    case kOpRoundInput:
      return "round";
    case kOpMulVector:
      return "mul";
    case kCodeQuantize:
      return "quantize";
    case kCodeWriteKv:
      return "write_kv";
    case kCodeLora:
      return "lora";
    default:
      return "other";
  }
}

}  // namespace cpu
}  // namespace plansmith
