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
constexpr uint32_t kItemsPerThread = 8;
constexpr size_t kLineBytes = 64;
// Of the weights that a thread reads next, while it waits: what comes from memory in that time.
constexpr size_t kPrefetchBytes = 64 << 10;

}  // namespace

const float* Executor::Step(const psm_batch& batch) {
  CheckOpen();
  if (profile_ != nullptr) profile_->BeginStep(batch);
  places_->Set(batch);
  lora_.SetBatch(batch);
  for (AttentionWork& work : attention_) work.Set(batch);
  batch_ = &batch;
  PlanStep();
  pool_->Run([](void* self, int idx) { static_cast<Executor*>(self)->RunStep(idx); }, this);
  batch_ = nullptr;
  if (profile_ != nullptr) profile_->EndStep(batch);
  step_base_ += static_cast<uint32_t>(stages_.size());
  return slots_[plan_->header().logits_slot].as<float>();
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
      run.cut = CutLinear(stage);
      run.num_items = run.cut.row_items * run.cut.tile_items;
    } else {
      run.num_items = NumItems(stage);
    }
  }
}

// Which of the rows behind it a product or an attention goes on with.
void Executor::PlanTail(const Stage& stage, StageRun* run) {
  if (stage.lora != 0 && lora_.NumItems(phases_[stages_[stage.lora].first].lora_site) > 0) return;
  const Phase& phase = phases_[stage.first];
  run->with_columns = stage.num_fused > 0;
  if (phase.code == kOpPagedAttention) {
    const uint32_t dim = static_cast<uint32_t>(plan_->header().head_dim);
    run->with_columns &= attention_[phase.attention].HoldsWhole(stage.fused_cols, dim);
  }
  StageRun& tail = runs_[stage.tail];
  if (run->with_columns) tail.first += stage.num_fused;
  run->with_rows = tail.first <= stages_[stage.tail].last && NumRows(phase) <= kMaxTailRows;
  if (run->with_rows) tail.first = stages_[stage.tail].last + 1;
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
      AwaitStage(i, count, thread_idx);
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

void Executor::AwaitStage(size_t stage_idx, uint32_t count, int thread_idx) {
  const uint32_t stage = step_base_ + static_cast<uint32_t>(stage_idx);
  const auto is_done = [&] { return share_->IsDone(stage, count); };
  if (is_done()) return;
  PrefetchAfter(stage_idx, thread_idx);
  stage_done_.Await(is_done);
}

// Weights do not depend on what is being waited for: the first ones of the thread's part of the
// next product come into L2 meanwhile.
void Executor::PrefetchAfter(size_t stage_idx, int thread_idx) const {
  size_t next = stage_idx + 1;
  while (next < stages_.size() &&
         (runs_[next].num_items == 0 || phases_[stages_[next].first].code != kOpLinear)) {
    ++next;
  }
  if (next == stages_.size()) return;
  const Phase& phase = phases_[stages_[next].first];
  const StageRun& run = runs_[next];
  const uint32_t item = share_->FirstOf(static_cast<uint32_t>(thread_idx), run.num_items);
  const uint32_t tile = item / run.cut.row_items * run.cut.tiles_each;
  const char* data = static_cast<const char*>(phase.linear.w.data) + tile * phase.tile_bytes;
  const size_t bytes = std::min(kPrefetchBytes, run.cut.tiles_each * phase.tile_bytes);
  for (size_t at = 0; at < bytes; at += kLineBytes) __builtin_prefetch(data + at, 0, 2);
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

Executor::LinearCut Executor::CutLinear(const Stage& stage) const {
  const Phase& phase = phases_[stage.first];
  const uint32_t num_rows = NumRows(phase);
  const bool fused = runs_[static_cast<size_t>(&stage - stages_.data())].with_columns;
  uint32_t tiles = (phase.linear.w.rows + kTile - 1) / kTile;
  if (fused && stage.in_pairs) tiles /= 2;
  LinearCut cut;
  cut.row_items = (num_rows + kMaxRowsPerItem - 1) / kMaxRowsPerItem;
  cut.rows_each = (num_rows + cut.row_items - 1) / cut.row_items;
  cut.row_items = (num_rows + cut.rows_each - 1) / cut.rows_each;
  // Some items a thread, of a multiple of 3 tiles where it can be: what a block of AVX-512 takes.
  const uint32_t items = kItemsPerThread * static_cast<uint32_t>(pool_->num_threads());
  const uint32_t unit = fused ? stage.fused_cols / kTile : 1;
  const uint32_t block = unit % 3 == 0 ? unit : 3 * unit;
  const uint32_t wanted = tiles * cut.row_items / items;
  cut.tiles_each = wanted >= block || unit == 1 ? std::max(block, wanted / block * block)
                                                : std::max(unit, wanted / unit * unit);
  cut.tiles_each = std::min(tiles, cut.tiles_each);
  cut.tile_items = (tiles + cut.tiles_each - 1) / cut.tiles_each;
  return cut;
}

// Of anything but a product.
uint32_t Executor::NumItems(const Stage& stage) const {
  const Phase& phase = phases_[stage.first];
  if (phase.code == kPhaseLora) return lora_.NumItems(phase.lora_site);
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
  if (phase.code == kPhaseLora) {
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

// Items with the same weights follow each other, so that these stay in L2.
void Executor::RunLinear(const Stage& stage, const StageRun& run, uint32_t item, StepMarks* marks) {
  const Phase& phase = phases_[stage.first];
  const LinearArgs& a = phase.linear;
  const LinearCut& cut = run.cut;
  const uint32_t row = item % cut.row_items * cut.rows_each;
  const uint32_t row_end = std::min(NumRows(phase), row + cut.rows_each);
  const bool in_pairs = run.with_columns && stage.in_pairs;
  const uint32_t all_tiles = (a.w.rows + kTile - 1) / kTile;
  const uint32_t tiles = in_pairs ? all_tiles / 2 : all_tiles;
  const uint32_t tile = item / cut.row_items * cut.tiles_each;
  const uint32_t tile_end = std::min(tiles, tile + cut.tiles_each);
  const LinearKernel kernel =
      (a.q != nullptr ? kernels_.linear_int8 : kernels_.linear_float)[a.w.dtype];
  kernel(a, row, row_end, tile, tile_end);
  if (in_pairs) kernel(a, row, row_end, tiles + tile, tiles + tile_end);
  marks->Ran(stage.first);
  if (!run.with_columns) return;
  const uint32_t cols = in_pairs ? tiles * kTile : a.w.rows;
  RunColumns(stage, row, row_end, tile * kTile, std::min(cols, tile_end * kTile), marks);
}

void Executor::RunAttention(const Stage& stage, const StageRun& run, uint32_t item, int thread_idx,
                            StepMarks* marks) {
  const Phase& phase = phases_[stage.first];
  const OpRecord& op = *phase.op;
  const PlanHeader& h = plan_->header();
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
