// The bytes and operations of each op against numbers worked out by hand, and what attention sees
// against counting it.
//
// SPDX-License-Identifier: Apache-2.0
#include "cpu/op_cost.h"

#include <algorithm>
#include <memory>

#include "check.h"
#include "tiny_model.h"

using namespace plansmith::cpu;

namespace {

struct OpenedPlan {
  explicit OpenedPlan(const TinyShape& shape) : model(shape) {
    file.Write(model.plan.Bytes());
    plan = Plan::Open(file.path());
  }
  // The cost of the first op (or part) of this code, of those behind `skip` others.
  UnitCost Cost(uint32_t op_code, uint32_t code, int skip = 0) const {
    for (uint32_t i = 0; i < plan->header().num_ops; ++i) {
      if (plan->op(i).code == op_code && skip-- == 0) return CostOf({&plan->op(i), code}, *plan);
    }
    CHECK(false);
    return {};
  }
  UnitCost Cost(uint32_t code, int skip = 0) const { return Cost(code, code, skip); }

  TinyModel model;
  const TempFile file;
  std::unique_ptr<Plan> plan;
};

void CheckCost(const UnitCost& cost, uint64_t step_bytes, uint64_t row_bytes,
               uint64_t row_operations) {
  CHECK(cost.step_bytes == step_bytes);
  CHECK(cost.row_bytes == row_bytes);
  CHECK(cost.row_operations == row_operations);
}

// 40 columns wide, 6 heads and 2 KV heads of 8, 56 inside, 83 tokens; products in groups of 8
// columns. Rows of weights are padded to a multiple of 16.
void TestOpsOfAnInt8Plan() {
  TinyShape shape;
  shape.dtype = kI8;
  shape.group_size = 8;
  shape.by_group = true;
  const OpenedPlan p(shape);
  // A row of the table is 40 codes and 5 scales; 40 floats are written.
  CheckCost(p.Cost(kOpEmbed), 0, 40 + 5 * 4 + 40 * 4, 40);
  CheckCost(p.Cost(kOpRmsNorm), 40 * 4, 2 * 40 * 4, 4 * 40);
  CheckCost(p.Cost(kOpRmsNorm, 1), 8 * 4, 2 * 48 * 4, 4 * 48);  // of q's heads
  // q, k and v: codes, 5 scales an output, a bias; codes with their scales in, floats out.
  CheckCost(p.Cost(kOpLinear), 80 * 40 + 80 * 5 * 4 + 80 * 4, 40 + 5 * 4 + 80 * 4, 2 * 80 * 40);
  CheckCost(p.Cost(kOpLinear, kCodeQuantize), 0, 40 * 4 + 40 + 5 * 4, 3 * 40);
  CheckCost(p.Cost(kOpLinear, kCodeLora), 0, 0, 0);
  // Down is added to what is there, which is read, too: 40 outputs are 48 in memory.
  CheckCost(p.Cost(kOpLinear, 3), 48 * 56 + 48 * 7 * 4, 56 + 7 * 4 + 2 * 40 * 4, 2 * 40 * 56);
  CheckCost(p.Cost(kOpRope), 0, 2 * 48 * 4 + 8 * 4, 3 * 48);
  CheckCost(p.Cost(kOpRope, 1), 0, 2 * 16 * 4 + 8 * 4, 3 * 16);
  CheckCost(p.Cost(kOpAdd), 0, 3 * 40 * 4, 40);
  CheckCost(p.Cost(kOpGlu), 0, 3 * 56 * 4, 5 * 56);
  CheckCost(p.Cost(kOpGatherRows), 0, 2 * 40 * 4, 0);
  CheckCost(p.Cost(kOpScale), 0, 2 * 83 * 4, 83);
  CheckCost(p.Cost(kOpSoftcap), 0, 2 * 83 * 4, 3 * 83);
  CHECK(p.Cost(kOpLinear).rows_kind == kRowsTokens);
  CHECK(p.Cost(kOpSoftcap).rows_kind == kRowsLogits);
  CHECK(p.Cost(kOpGatherRows).rows_kind == kRowsLogits);
}

void TestOtherTypesOfWeights() {
  TinyShape shape;
  OpenedPlan f32(shape);
  CheckCost(f32.Cost(kOpLinear), 80 * 40 * 4 + 80 * 4, 40 * 4 + 80 * 4, 2 * 80 * 40);
  shape.dtype = kI8;  // one scale an output and a row
  OpenedPlan i8(shape);
  CheckCost(i8.Cost(kOpLinear), 80 * 40 + 80 * 4 + 80 * 4, 40 + 4 + 80 * 4, 2 * 80 * 40);
  shape.group_size = 8;
  shape.scale_dtype = kBF16;
  OpenedPlan small(shape);
  CheckCost(small.Cost(kOpEmbed), 0, 40 + 5 * 2 + 40 * 4, 40);
  CheckCost(small.Cost(kOpLinear), 80 * 40 + 80 * 5 * 2 + 80 * 4, 40 + 4 + 80 * 4, 2 * 80 * 40);
  shape.scale_dtype = kF32;
  shape.dtype = kI4;
  shape.with_zeros = true;
  shape.input = kInputFloat;
  OpenedPlan i4(shape);
  CheckCost(i4.Cost(kOpLinear), 80 * 40 / 2 + 2 * 80 * 5 * 4 + 80 * 4, 40 * 4 + 80 * 4,
            2 * 80 * 40);
  shape = {};
  shape.pre_scale = true;
  shape.round = kRoundInt8;
  OpenedPlan rounded(shape);
  CheckCost(rounded.Cost(kOpMulVector), 40 * 4, 2 * 40 * 4, 40);
  CheckCost(rounded.Cost(kOpRoundInput), 0, 2 * 40 * 4, 4 * 40);
}

void TestAttention() {
  TinyShape shape;
  const OpenedPlan f32(shape);
  const UnitCost cost = f32.Cost(kOpPagedAttention);
  CheckCost(cost, 0, 2 * 48 * 4, 0);
  CHECK(cost.window == 0 && f32.Cost(kOpPagedAttention, 1).window == 20);
  CHECK(cost.position_bytes == 2 * 2 * 8 * 4);  // K and V of both KV heads
  CHECK(cost.pair_operations == 4 * 8 * 6);
  CheckCost(f32.Cost(kOpPagedAttention, kCodeWriteKv), 0, 2 * 2 * 8 * 4 * 2, 0);
  shape.kv_format = kKvF16;
  const OpenedPlan f16(shape);
  CHECK(f16.Cost(kOpPagedAttention).position_bytes == 2 * 2 * 8 * 2);
  CheckCost(f16.Cost(kOpPagedAttention, kCodeWriteKv), 0, 2 * 2 * 8 * 6, 2 * 2 * 8);
  shape.kv_format = kKvI8;
  const OpenedPlan i8(shape);
  CHECK(i8.Cost(kOpPagedAttention).position_bytes == 2 * 2 * 8);
  CheckCost(i8.Cost(kOpPagedAttention, kCodeWriteKv), 0, 2 * 2 * 8 * 5, 2 * 2 * 2 * 8);
}

psm_batch BatchOf(const std::vector<int32_t>& query_lens, const std::vector<int32_t>& kv_lens) {
  psm_batch batch = {};
  batch.num_seqs = static_cast<int32_t>(query_lens.size());
  batch.query_lens = query_lens.data();
  batch.kv_lens = kv_lens.data();
  return batch;
}

void TestWhatIsSeen() {
  const std::vector<int32_t> rows = {1, 3}, held = {5, 7};
  const psm_batch batch = BatchOf(rows, held);
  CHECK(SeenBy(batch, 0).pairs == 5 + (5 + 6 + 7) && SeenBy(batch, 0).positions == 5 + 7);
  CHECK(SeenBy(batch, 4).pairs == 4 + 3 * 4 && SeenBy(batch, 4).positions == 4 + 6);
  for (int32_t window = 0; window <= 12; ++window) {
    for (int32_t n = 1; n <= 10; ++n) {
      for (int32_t q = 1; q <= n; ++q) {
        uint64_t pairs = 0, positions = 0;
        for (int32_t p = 0; p < n; ++p) {  // key p, and the rows that see it
          uint64_t seen_by = 0;
          for (int32_t row = n - q; row < n; ++row) {
            if (p <= row && (window == 0 || p > row - window)) ++seen_by;
          }
          pairs += seen_by;
          positions += seen_by > 0;
        }
        const std::vector<int32_t> one_q = {q}, one_n = {n};
        const Seen seen = SeenBy(BatchOf(one_q, one_n), window);
        CHECK(seen.pairs == pairs && seen.positions == positions);
      }
    }
  }
}

void TestTotals() {
  UnitCost cost;
  cost.step_bytes = 1000;
  cost.row_bytes = 10;
  cost.row_operations = 7;
  const StepSums steps = {3, 2, 20, 5};
  OpCost total = Total(cost, steps, {});
  CHECK(total.bytes == 3 * 1000 + 20 * 10 && total.activation_bytes == 200);
  CHECK(total.operations == 140);
  cost.rows_kind = kRowsLogits;  // in the steps that have such rows alone
  total = Total(cost, steps, {});
  CHECK(total.bytes == 2 * 1000 + 5 * 10 && total.operations == 35);
  UnitCost attention;
  attention.position_bytes = 128;
  attention.pair_operations = 192;
  total = Total(attention, steps, {6, 11});
  CHECK(total.bytes == 6 * 128 && total.activation_bytes == 0 && total.operations == 11 * 192);
}

}  // namespace

int main() {
  TestOpsOfAnInt8Plan();
  TestOtherTypesOfWeights();
  TestAttention();
  TestWhatIsSeen();
  TestTotals();
  return 0;
}
