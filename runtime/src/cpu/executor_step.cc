// One step of an Executor: all threads walk through its stages together.
//
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "cpu/executor.h"
#include "status.h"

namespace plansmith {
namespace cpu {
namespace {

// Rows of one item of a matrix product: their inputs stay in L2 beside the weights.
constexpr uint32_t kMaxRowsPerItem = 128;
// Rows with which one thread ends a stage alone: their norm takes it about as long as another
// stage's begin.
constexpr uint32_t kMaxTailRows = 1;
// Tiles of a product that nothing follows: what a block of AVX-512 takes.
constexpr uint32_t kUnitTiles = 3;
// Of weights: 10 to 20 us at the speed of memory.
constexpr size_t kMaxBytesPerItem = 512 << 10;
// Stages of all steps are numbered on until here, a day of a busy server: far enough from the end
// of 32 bits for the stages of any plan.
constexpr uint32_t kMaxStepBase = 1u << 31;

}  // namespace

const float* Executor::Step(const psm_batch& batch) {
  CheckOpen();
  plan_->ThrowIfLost();
  if (profile_ != nullptr) profile_->BeginStep(batch);
  places_->Set(batch);
  lora_.SetBatch(batch);
  for (AttentionWork& work : attention_) work.Set(batch);
  batch_ = &batch;
  NumberStages();
  PlanStep();
  pool_->Run([](void* self, int idx) { static_cast<Executor*>(self)->RunStep(idx); }, this);
  batch_ = nullptr;
  candidates_.Finish(batch);
  if (profile_ != nullptr) profile_->EndStep(batch);
  step_base_ += static_cast<uint32_t>(stages_.size());
  plan_->ThrowIfLost();  // it may have read what had been cut off
  return slots_[model_.logits_slot].as<float>();
}

// The pool's threads have all left the step before, so nobody looks at a counter.
void Executor::NumberStages() {
  if (step_base_ <= kMaxStepBase) return;
  share_->Restart();
  step_base_ = 1;
}

void Executor::PlanStep() {
  for (size_t i = 0; i < stages_.size(); ++i) {
    const Stage& stage = stages_[i];
    runs_[i].first = stage.first;
    runs_[i].with_columns = runs_[i].with_rows = false;
  }
  for (size_t i = 0; i < stages_.size(); ++i) {
    const Stage& stage = stages_[i];
    StageRun& run = runs_[i];
    if (stage.tail != 0) PlanTail(stage, &run);
    const Phase& phase = phases_[stage.first];
    if (run.first > stage.last || NumRows(phase) == 0) {
      run.num_items = 0;
    } else if (phase.code == kOpLinear) {
      run.cut = CutLinear(stage, run.with_columns);
      run.num_items = run.cut.row_items * run.cut.tile_items;
    } else {
      run.num_items = NumItems(stage);
    }
  }
  candidates_.Begin(*batch_, ends_with_logits_ ? runs_.back().cut.tile_items : 0);
}

// Which of the rows behind it a product or an attention goes on with.
void Executor::PlanTail(const Stage& stage, StageRun* run) {
  if (stage.lora != 0 && lora_.NumItems(phases_[stages_[stage.lora].first].lora_site) > 0) return;
  const Phase& phase = phases_[stage.first];
  if (NumRows(phase) == 0) return;
  run->with_columns = stage.num_fused > 0;
  if (phase.code == kOpLinear) {
    run->with_columns &= SharesColumns(stage);
  } else {
    const uint32_t dim = static_cast<uint32_t>(model_.head_dim);
    run->with_columns &= attention_[phase.attention].HoldsWhole(stage.fused_cols, dim);
  }
  StageRun& tail = runs_[stage.tail];
  if (run->with_columns) tail.first += stage.num_fused;
  run->with_rows = tail.first <= stages_[stage.tail].last && NumRows(phase) <= kMaxTailRows;
  if (run->with_rows) tail.first = stages_[stage.tail].last + 1;
}

// Whether a product's units are enough for all threads: whole heads of a small model are few. Those
// of K and V are more work than those of q, unless a thread has rows of its own.
bool Executor::SharesColumns(const Stage& stage) const {
  const LinearCut cut = CutLinear(stage, true);
  const uint32_t threads = static_cast<uint32_t>(pool_->num_threads());
  const bool is_uneven = stage.writes_kv && threads > 1 &&
                         NumRows(phases_[stage.first]) > kMaxTailRows &&
                         cut.row_items < 2 * threads;
  return cut.num_units * cut.row_items >= 2 * threads && !is_uneven;
}

void Executor::RunStep(int thread_idx) {
  StepMarks marks(profile_.get(), thread_idx);
  for (size_t i = 0; i < stages_.size(); ++i) {
    const StageRun& run = runs_[i];
    if (run.num_items == 0) continue;
    const uint32_t stage = step_base_ + static_cast<uint32_t>(i);
    const uint32_t num_run = RunItems(i, thread_idx, &marks);
    uint32_t done = num_run > 0 ? share_->Finish(stage, num_run) : 0;
    uint32_t count = run.num_items;
    if (run.with_rows) {  // they count as one item more
      if (done == count++) {
        RunTail(i, &marks);
        done = share_->Finish(stage, 1);
      }
    }
    if (done == count) {
      stage_done_.Signal();
    } else {
      AwaitStage(i, count);
      marks.Waited(stages_[i].last);
    }
  }
}

// Returns how many it ran.
uint32_t Executor::RunItems(size_t stage_idx, int thread_idx, StepMarks* marks) {
  const uint32_t num_items = runs_[stage_idx].num_items;
  const uint32_t stage = step_base_ + static_cast<uint32_t>(stage_idx);
  uint32_t num_tried = 0, num_run = 0;
  for (uint32_t item; (item = share_->Claim(static_cast<uint32_t>(thread_idx), stage, num_items,
                                            &num_tried)) < num_items;) {
    RunItem(stage_idx, item, thread_idx, marks);
    ++num_run;
  }
  return num_run;
}

// The rows behind a stage that ends with them.
void Executor::RunTail(size_t stage_idx, StepMarks* marks) {
  const Stage& tail = stages_[stages_[stage_idx].tail];
  const uint32_t num_rows = NumRows(phases_[tail.first]);
  const size_t num_fused = runs_[stage_idx].with_columns ? stages_[stage_idx].num_fused : 0;
  for (size_t i = tail.first + num_fused; i <= tail.last; ++i) {
    RunRows(phases_[i], 0, num_rows, 0, phases_[i].num_units);
    marks->Ran(i);
  }
}

void Executor::AwaitStage(size_t stage_idx, uint32_t count) {
  const uint32_t stage = step_base_ + static_cast<uint32_t>(stage_idx);
  stage_done_.Await([&] { return share_->IsDone(stage, count); });
}

uint32_t Executor::NumRows(const Phase& phase) const {
  return static_cast<uint32_t>(phase.rows_kind == kRowsTokens ? batch_->num_tokens
                                                              : batch_->num_logits_rows);
}

// Some items for each thread, but no more rows than stay in L2 from phase to phase.
uint32_t Executor::RowsOfItem(const Phase& phase) const {
  const uint32_t items = 4 * static_cast<uint32_t>(pool_->num_threads());
  return std::min(16u, (NumRows(phase) + items - 1) / items);
}

// Of one half, where an item holds tiles of both.
uint32_t Executor::NumTiles(const Stage& stage, bool with_columns) const {
  const uint32_t tiles = (phases_[stage.first].linear.w.rows + kTile - 1) / kTile;
  return with_columns && stage.in_pairs ? tiles / 2 : tiles;
}

// Few items: what a kernel does in blocks of tiles is cut as little as can be, and one row's
// weights are read as long streams. Those of the logits are many all the same, so that all threads
// end together.
Executor::LinearCut Executor::CutLinear(const Stage& stage, bool with_columns) const {
  const Phase& phase = phases_[stage.first];
  const uint32_t num_rows = NumRows(phase), tiles = NumTiles(stage, with_columns);
  const uint32_t threads = static_cast<uint32_t>(pool_->num_threads());
  LinearCut cut;
  cut.row_items = (num_rows + kMaxRowsPerItem - 1) / kMaxRowsPerItem;
  cut.rows_each = (num_rows + cut.row_items - 1) / cut.row_items;
  cut.row_items = (num_rows + cut.rows_each - 1) / cut.rows_each;
  cut.unit_tiles = with_columns ? stage.fused_cols / kTile : kUnitTiles;
  cut.num_units = (tiles + cut.unit_tiles - 1) / cut.unit_tiles;
  const size_t bytes = tiles * phase.tile_bytes;
  const size_t each = num_rows == 1 ? 1 : cut.row_items == 1 ? 2 : 4;
  const uint32_t items =
      threads * static_cast<uint32_t>(std::max(each, bytes / (threads * kMaxBytesPerItem)));
  cut.tile_items = std::min(cut.num_units, (items + cut.row_items - 1) / cut.row_items);
  return cut;
}

// Of anything but a product.
uint32_t Executor::NumItems(const Stage& stage) const {
  const Phase& phase = phases_[stage.first];
  if (phase.code == kCodeLora) return lora_.NumItems(phase.lora_site);
  if (phase.code == kOpPagedAttention) return attention_[phase.attention].num_items();
  const uint32_t rows = RowsOfItem(phase);
  return (NumRows(phase) + rows - 1) / rows;
}

void Executor::RunItem(size_t stage_idx, uint32_t item, int thread_idx, StepMarks* marks) {
  const Stage& stage = stages_[stage_idx];
  const StageRun& run = runs_[stage_idx];
  const Phase& phase = phases_[stage.first];
  if (phase.code == kOpLinear) return RunLinear(stage, run, item, marks);
  if (phase.code == kOpPagedAttention) return RunAttention(stage, run, item, thread_idx, marks);
  if (phase.code == kCodeLora) {
    lora_.Run(phase.lora_site, item, phase.linear, thread_idx);
    marks->Ran(stage.first);
    return;
  }
  const uint32_t rows = RowsOfItem(phase), begin = item * rows;
  const uint32_t end = std::min(NumRows(phase), begin + rows);
  for (size_t i = run.first; i <= stage.last; ++i) {
    RunRows(phases_[i], begin, end, 0, phases_[i].num_units);
    marks->Ran(i);
  }
}

// What follows an item's rows and columns, the latter counted from the stage's first one.
void Executor::RunColumns(const Stage& stage, uint32_t row_begin, uint32_t row_end,
                          uint32_t col_begin, uint32_t col_end, StepMarks* marks) {
  const Stage& tail = stages_[stage.tail];
  for (size_t i = tail.first; i < tail.first + stage.num_fused; ++i) {
    const Phase& phase = phases_[i];
    const auto unit = [&](uint32_t col) {
      return col <= phase.unit_at
                 ? 0
                 : std::min(phase.num_units, (col - phase.unit_at) / phase.unit_cols);
    };
    const uint32_t begin = unit(col_begin), end = unit(col_end);
    if (begin == end) continue;
    RunRows(phase, row_begin, row_end, begin, end);
    marks->Ran(i);
  }
}

// Items with the same rows follow each other, so that these stay in L2.
void Executor::RunLinear(const Stage& stage, const StageRun& run, uint32_t item, StepMarks* marks) {
  const Phase& phase = phases_[stage.first];
  const LinearArgs& a = phase.linear;
  const LinearCut& cut = run.cut;
  const uint32_t row = item / cut.tile_items * cut.rows_each;
  const uint32_t row_end = std::min(NumRows(phase), row + cut.rows_each);
  const uint32_t tiles = NumTiles(stage, run.with_columns);
  const uint32_t tile = cut.FirstTile(item % cut.tile_items);
  const uint32_t tile_end = std::min(tiles, cut.FirstTile(item % cut.tile_items + 1));
  const LinearKernel kernel =
      a.f8 != nullptr ? kernels_.linear_f8
                      : (a.q != nullptr ? kernels_.linear_int8 : kernels_.linear_float)[a.w.dtype];
  kernel(a, row, row_end, tile, tile_end);
  const bool in_pairs = run.with_columns && stage.in_pairs;
  if (in_pairs) kernel(a, row, row_end, tiles + tile, tiles + tile_end);
  if (candidates_.wanted() && &stage == &stages_.back()) {
    const uint32_t end = std::min(a.w.rows, tile_end * kTile), part = item % cut.tile_items;
    for (uint32_t r = row; r < row_end; ++r) {
      candidates_.Scan(kernels_, a.out + r * a.out_stride, r, part, tile * kTile, end);
    }
  }
  marks->Ran(stage.first);
  if (!run.with_columns) return;
  const uint32_t cols = in_pairs ? tiles * kTile : a.w.rows;
  RunColumns(stage, row, row_end, tile * kTile, std::min(cols, tile_end * kTile), marks);
}

void Executor::RunAttention(const Stage& stage, const StageRun& run, uint32_t item, int thread_idx,
                            StepMarks* marks) {
  const Phase& phase = phases_[stage.first];
  const OpRecord& op = *phase.op;
  const PlanHeader& h = model_;
  AttentionArgs a = {};
  a.k_pool = KvOfLayer(op.i[3], 0);
  a.v_pool = KvOfLayer(op.i[3], 1);
  a.block_stride = KvLayout().values();
  a.k_scale = KvScale(op, 0);
  a.v_scale = KvScale(op, 1);
  a.block_size = static_cast<uint32_t>(h.tokens_per_block);
  a.head_dim = static_cast<uint32_t>(h.head_dim);
  a.q = ViewData(op.in[0]);
  a.q_stride = Stride(op.in[0]);
  a.out = ViewData(op.out);
  a.out_stride = Stride(op.out);
  a.window = op.i[4];
  a.scale = op.f[0];
  a.softcap = op.f[1];
  a.scratch = attention_scratch_[static_cast<size_t>(thread_idx)].as<float>();
  const AttentionPart part =
      attention_[phase.attention].Run(kernels_.attend[h.kv_format], *batch_, item, a);
  marks->Ran(stage.first);
  if (!run.with_columns) return;
  RunColumns(stage, part.row, part.row + part.num_rows, part.head * a.head_dim,
             (part.head + part.num_heads) * a.head_dim, marks);
}

}  // namespace cpu
}  // namespace plansmith
