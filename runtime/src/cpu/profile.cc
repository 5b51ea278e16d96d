// SPDX-License-Identifier: Apache-2.0
#include "cpu/profile.h"

#include <algorithm>

#include "clock.h"

namespace plansmith {
namespace cpu {
namespace {

const char* TypeName(uint32_t dtype) {
  switch (dtype) {
    case kF32:
      return "f32";
    case kBF16:
      return "bf16";
    case kI8:
      return "int8";
    case kI4:
      return "int4";
    case kF16:
      return "f16";
    case kF8:
      return "fp8";
    case kF4:
      return "nvfp4";
    default:
      return "";
  }
}

bool HasWeights(const OpPart& part) { return part.code == kOpLinear || part.code == kOpEmbed; }

// Codes of other weights than integers are multiplied as what they stand for.
int32_t ArithmeticOf(const OpPart& product, const TensorRecord& weight) {
  const bool integers = weight.dtype == kI8 || weight.dtype == kI4;
  if (integers && product.op->i[1] != kInputFloat) return PSM_ARITHMETIC_INT8;
  return product.bf16 ? PSM_ARITHMETIC_BF16 : PSM_ARITHMETIC_F32;
}

}  // namespace

Profile::Profile(const Plan& plan, const std::vector<PhaseOps>& phases, int num_threads)
    : plan_(plan), num_threads_(num_threads), first_ticks_(Ticks()), first_ns_(NowNs()) {
  for (const PhaseOps& ops : phases) phases_.push_back(Describe(ops));
  for (const Phase& phase : phases_) {
    for (const UnitCost& cost : phase.costs) {
      const bool known = std::find(windows_.begin(), windows_.end(), cost.window) != windows_.end();
      if (!known) windows_.push_back(cost.window);
    }
  }
  lines_per_row_ = (phases_.size() + kCellsPerLine - 1) / kCellsPerLine;
  lines_ =
      std::make_unique<Line[]>(lines_per_row_ * kNumStepKinds * static_cast<size_t>(num_threads));
  for (Steps& steps : steps_) steps.seen = std::make_unique<SeenCounts[]>(windows_.size());
}

Profile::Phase Profile::Describe(const PhaseOps& ops) const {
  Phase phase = {};
  phase.name = plan_.string(ops.front().op->name);
  for (const OpPart& part : ops) {
    if (!phase.kind.empty()) phase.kind += " + ";
    phase.kind += KindOf(part.code);
    phase.costs.push_back(CostOf(part, plan_));
    if (!HasWeights(part) || !phase.weights.empty()) continue;
    const TensorRecord& weight = plan_.tensor(static_cast<size_t>(part.op->tensors[0]));
    phase.weights = TypeName(weight.dtype);
    if (part.code != kOpLinear) continue;
    phase.record.arithmetic = ArithmeticOf(part, weight);
    phase.record.out_features = static_cast<int32_t>(weight.rows);
    phase.record.in_features = static_cast<int32_t>(weight.cols);
  }
  return phase;
}

size_t Profile::WindowIdx(int32_t window) const {
  return static_cast<size_t>(std::find(windows_.begin(), windows_.end(), window) -
                             windows_.begin());
}

void Profile::BeginStep(const psm_batch& batch) {
  step_begin_ = Ticks();
  step_kind_ = batch.num_tokens == batch.num_seqs ? PSM_STEPS_DECODE : PSM_STEPS_CONTEXT;
}

void Profile::EndStep(const psm_batch& batch) {
  Steps& steps = steps_[step_kind_];
  for (size_t i = 0; i < windows_.size(); ++i) {
    const Seen seen = SeenBy(batch, windows_[i]);
    Increase(&steps.seen[i].positions, seen.positions);
    Increase(&steps.seen[i].pairs, seen.pairs);
  }
  Increase(&steps.tokens, static_cast<uint64_t>(batch.num_tokens));
  Increase(&steps.logits_rows, static_cast<uint64_t>(batch.num_logits_rows));
  Increase(&steps.logits_steps, batch.num_logits_rows > 0 ? 1 : 0);
  Increase(&steps.steps, 1);
  Increase(&steps.ticks, Ticks() - step_begin_);
}

double Profile::NsPerTick() const {
  const uint64_t ticks = Ticks() - first_ticks_;
  return ticks == 0 ? 1.0 : static_cast<double>(NowNs() - first_ns_) / static_cast<double>(ticks);
}

psm_op_profile Profile::PhaseRecord(int step_kind, size_t phase_idx, double ns_per_tick) const {
  const Phase& phase = phases_[phase_idx];
  const Steps& counts = steps_[step_kind];
  const StepSums sums = {Get(counts.steps), Get(counts.logits_steps), Get(counts.tokens),
                         Get(counts.logits_rows)};
  const bool all = phase.costs.front().rows_kind == kRowsTokens;
  psm_op_profile record = phase.record;
  record.name = phase.name.c_str();
  record.kind = phase.kind.c_str();
  record.weights = phase.weights.c_str();
  record.step_kind = step_kind;
  record.calls = all ? sums.steps : sums.logits_steps;
  record.rows = all ? sums.tokens : sums.logits_rows;
  uint64_t ran = 0, waited = 0;
  for (int i = 0; i < num_threads_; ++i) {
    const Cell& cell = *CellOf(step_kind, i, phase_idx);
    ran += Get(cell.ran);
    waited += Get(cell.waited);
  }
  const double each = ns_per_tick / num_threads_;
  record.time_ns = static_cast<uint64_t>(static_cast<double>(ran) * each);
  record.wait_ns = static_cast<uint64_t>(static_cast<double>(waited) * each);
  for (const UnitCost& unit : phase.costs) {
    const SeenCounts& seen = counts.seen[WindowIdx(unit.window)];
    const OpCost cost = Total(unit, sums, {Get(seen.positions), Get(seen.pairs)});
    record.bytes += cost.bytes;
    record.activation_bytes += cost.activation_bytes;
    record.operations += cost.operations;
  }
  return record;
}

void Profile::WriteRecords(int step_kind, double ns_per_tick, psm_op_profile* to) const {
  const Steps& counts = steps_[step_kind];
  psm_op_profile step = {};
  step.name = step.weights = "";
  step.kind = "step";
  step.step_kind = step_kind;
  step.calls = Get(counts.steps);
  step.rows = Get(counts.tokens);
  step.time_ns = static_cast<uint64_t>(static_cast<double>(Get(counts.ticks)) * ns_per_tick);
  for (size_t i = 0; i < phases_.size(); ++i) {
    to[1 + i] = PhaseRecord(step_kind, i, ns_per_tick);
    step.wait_ns += to[1 + i].wait_ns;
    step.bytes += to[1 + i].bytes;
    step.activation_bytes += to[1 + i].activation_bytes;
    step.operations += to[1 + i].operations;
  }
  to[0] = step;
}

size_t Profile::Read(psm_op_profile* ops, size_t capacity) const {
  size_t num_records = 0;
  bool was_run[kNumStepKinds];
  for (int kind = 0; kind < kNumStepKinds; ++kind) {
    was_run[kind] = Get(steps_[kind].steps) > 0;
    if (was_run[kind]) num_records += phases_.size() + 1;
  }
  if (num_records > capacity) return num_records;
  const double ns_per_tick = NsPerTick();
  for (int kind = 0; kind < kNumStepKinds; ++kind) {
    if (!was_run[kind]) continue;
    WriteRecords(kind, ns_per_tick, ops);
    ops += phases_.size() + 1;
  }
  return num_records;
}

}  // namespace cpu
}  // namespace plansmith
