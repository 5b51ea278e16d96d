// One step of an Executor: all threads walk through its phases together.
//
// SPDX-License-Identifier: Apache-2.0
#include <string.h>

#include <algorithm>

#include "cpu/executor.h"
#include "status.h"

namespace plansmith {
namespace cpu {
namespace {

// Rows of one item of a matrix product: their inputs stay in L2 beside the weights.
constexpr uint32_t kMaxRowsPerItem = 128;

}  // namespace

const float* Executor::Step(const psm_batch& batch) {
  CheckOpen();
  if (profile_ != nullptr) profile_->BeginStep(batch);
  places_->Set(batch);
  lora_.SetBatch(batch);
  for (AttentionWork& work : attention_) work.Set(batch);
  for (size_t i = 0; i < stages_.size(); ++i) {
    progress_[i].next.store(0, std::memory_order_relaxed);
    progress_[i].done.store(0, std::memory_order_relaxed);
  }
  batch_ = &batch;
  pool_->Run([](void* self, int idx) { static_cast<Executor*>(self)->RunStep(idx); }, this);
  batch_ = nullptr;
  if (profile_ != nullptr) profile_->EndStep(batch);
  return slots_[plan_->header().logits_slot].as<float>();
}

void Executor::RunStep(int thread_idx) {
  StepMarks marks(profile_.get(), thread_idx);
  for (size_t i = 0; i < stages_.size(); ++i) {
    Progress& progress = progress_[i];
    const uint32_t num_items = NumItems(stages_[i]);
    const auto all_done = [&] {
      return progress.done.load(std::memory_order_seq_cst) == num_items;
    };
    if (all_done()) continue;  // the others were here long ago
    for (uint32_t item;
         (item = progress.next.fetch_add(1, std::memory_order_relaxed)) < num_items;) {
      RunItem(stages_[i], item, thread_idx, &marks);
      if (progress.done.fetch_add(1, std::memory_order_seq_cst) == num_items - 1) {
        stage_done_.Signal();
      }
    }
    stage_done_.Await(all_done);
    marks.Waited(stages_[i].last);
  }
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

Executor::LinearCut Executor::CutLinear(const Phase& phase) const {
  const uint32_t num_rows = NumRows(phase);
  const uint32_t tiles = (phase.linear.w.rows + kTile - 1) / kTile;
  LinearCut cut;
  cut.row_items = (num_rows + kMaxRowsPerItem - 1) / kMaxRowsPerItem;
  cut.rows_each = (num_rows + cut.row_items - 1) / cut.row_items;
  cut.row_items = (num_rows + cut.rows_each - 1) / cut.rows_each;
  // About 4 items a thread, of a multiple of 3 tiles: what a block of AVX-512 takes.
  const uint32_t items = 4 * static_cast<uint32_t>(pool_->num_threads());
  cut.tiles_each = std::min(tiles, std::max(3u, tiles * cut.row_items / items / 3 * 3));
  cut.tile_items = (tiles + cut.tiles_each - 1) / cut.tiles_each;
  return cut;
}

uint32_t Executor::NumItems(const Stage& stage) const {
  const Phase& phase = phases_[stage.first];
  const uint32_t num_rows = NumRows(phase);
  if (num_rows == 0) return 0;
  if (phase.code == kOpLinear) {
    const LinearCut cut = CutLinear(phase);
    return cut.row_items * cut.tile_items;
  }
  if (phase.code == kPhaseLora) return lora_.NumItems(phase.lora_site);
  if (phase.code == kOpPagedAttention) return attention_[phase.attention].num_items();
  const uint32_t rows = RowsOfItem(phase);
  return (num_rows + rows - 1) / rows;
}

void Executor::RunItem(const Stage& stage, uint32_t item, int thread_idx, StepMarks* marks) {
  const Phase& phase = phases_[stage.first];
  if (phase.by_rows) {
    const uint32_t rows = RowsOfItem(phase), begin = item * rows;
    const uint32_t end = std::min(NumRows(phase), begin + rows);
    for (size_t i = stage.first; i <= stage.last; ++i) {
      RunRows(phases_[i], begin, end);
      marks->Ran(i);
    }
    return;
  }
  if (phase.code == kOpLinear) {
    RunLinear(phase, item);
  } else if (phase.code == kPhaseLora) {
    lora_.Run(phase.lora_site, item, phase.linear, thread_idx);
  } else {
    RunAttention(phase, item, thread_idx);
  }
  marks->Ran(stage.first);
}

void Executor::RunLinear(const Phase& phase, uint32_t item) {
  const LinearCut cut = CutLinear(phase);
  const LinearArgs& a = phase.linear;
  const uint32_t row = item / cut.tile_items * cut.rows_each;
  const uint32_t tile = item % cut.tile_items * cut.tiles_each;
  const LinearKernel* kernels = a.q != nullptr ? kernels_.linear_int8 : kernels_.linear_float;
  kernels[a.w.dtype](a, row, std::min(NumRows(phase), row + cut.rows_each), tile,
                     std::min((a.w.rows + kTile - 1) / kTile, tile + cut.tiles_each));
}

void Executor::RunAttention(const Phase& phase, uint32_t item, int thread_idx) {
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
  attention_[phase.attention].Run(kernels_.attend[h.kv_format], *batch_, item, a);
}

void Executor::QuantizeRow(const Phase& phase, const float* in, uint32_t row) {
  const LinearArgs& a = phase.linear;
  const uint32_t padded = static_cast<uint32_t>(a.q_stride);
  int8_t* q = quantized_.as<int8_t>() + row * a.q_stride;
  float* scales = quant_scales_.as<float>() + row * static_cast<size_t>(a.q_groups);
  int32_t* sums = quant_sums_.as<int32_t>() + row * static_cast<size_t>(a.w.num_groups);
  if (phase.op->i[1] == kInputInt8Static) {
    kernels_.quantize_row_static(in, a.w.cols, padded, phase.op->f[0], a.w.num_groups, q, scales,
                                 sums);
  } else {
    kernels_.quantize_row(in, a.w.cols, padded, a.q_groups, a.w.num_groups, q, scales, sums);
  }
}

void Executor::RunRows(const Phase& phase, uint32_t row_begin, uint32_t row_end) {
  const OpRecord& op = *phase.op;
  const uint32_t width = static_cast<uint32_t>(op.i[0]);  // of the elementwise ops
  const size_t out_stride = Stride(op.out);
  float* out = ViewData(op.out) + row_begin * out_stride;
  // Views that an op does not use were not checked.
  const bool has_input = phase.code == kPhaseQuantize || phase.code == kOpRmsNorm ||
                         phase.code == kOpGlu || phase.code == kOpAdd ||
                         phase.code == kOpGatherRows || phase.code == kOpRoundInput ||
                         phase.code == kOpMulVector;
  const size_t in_stride = has_input ? Stride(op.in[0]) : 0;
  const float* in = has_input ? ViewData(op.in[0]) + row_begin * in_stride : nullptr;
  if (phase.code == kPhaseWriteKv) {
    const PlanHeader& h = plan_->header();
    const KvWriteArgs a = {ViewData(op.in[1]),
                           Stride(op.in[1]),
                           ViewData(op.in[2]),
                           Stride(op.in[2]),
                           h.kv_format,
                           KvScale(op, 0),
                           KvScale(op, 1),
                           KvOfLayer(op.i[3], 0),
                           KvOfLayer(op.i[3], 1),
                           KvLayout().values(),
                           ViewData(op.in[0]),
                           Stride(op.in[0]),
                           static_cast<uint32_t>(h.num_kv_heads),
                           static_cast<uint32_t>(h.head_dim),
                           static_cast<uint32_t>(h.tokens_per_block)};
    WriteKv(kernels_, a, *places_, row_begin, row_end);
    return;
  }
  for (uint32_t row = row_begin; row < row_end; ++row, out += out_stride, in += in_stride) {
    switch (phase.code) {
      case kOpEmbed: {
        const TensorRecord& table = plan_->tensor(static_cast<size_t>(op.tensors[0]));
        DequantizeRow(Matrix(op.tensors[0]), table.layout,
                      static_cast<uint32_t>(batch_->input_ids[row]), op.f[0], out);
        break;
      }
      case kPhaseQuantize:
        QuantizeRow(phase, in, row);
        break;
      case kOpRmsNorm:
        for (uint32_t g = 0; g < width; ++g) {
          const uint32_t n = static_cast<uint32_t>(op.i[1]);
          const size_t at = static_cast<size_t>(g) * n;
          kernels_.rms_norm(in + at, TensorData(op.tensors[0]), n, op.f[0], out + at);
        }
        break;
      case kOpRope:
        for (uint32_t head = 0; head < width; ++head) {
          const uint32_t half = static_cast<uint32_t>(op.i[2]) / 2;
          const size_t at = static_cast<size_t>(batch_->position_ids[row]) * half;
          kernels_.rope(out + static_cast<size_t>(head) * static_cast<size_t>(op.i[1]),
                        TensorData(op.tensors[0]) + at, TensorData(op.tensors[1]) + at, half);
        }
        break;
      case kOpGlu:
        kernels_.glu(in, ViewData(op.in[1]) + row * Stride(op.in[1]), width, op.i[1], out);
        break;
      case kOpAdd:
        kernels_.add(in, ViewData(op.in[1]) + row * Stride(op.in[1]), width, out);
        break;
      case kOpRoundInput:
        kernels_.round_row(in, width, op.i[1], op.i[2], op.f[0], out);
        break;
      case kOpMulVector:
        kernels_.mul(in, TensorData(op.tensors[0]), width, out);
        break;
      case kOpSoftcap:
        kernels_.softcap(out, width, op.f[0]);
        break;
      case kOpScale:
        kernels_.scale(out, width, op.f[0]);
        break;
      case kOpGatherRows:
        memcpy(out, ViewData(op.in[0]) + static_cast<size_t>(batch_->logits_rows[row]) * in_stride,
               width * sizeof(float));
        break;
      default:
        break;
    }
  }
}

}  // namespace cpu
}  // namespace plansmith
