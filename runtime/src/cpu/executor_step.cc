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
  if (places_ == nullptr) {
    throw StatusError(PSM_ERROR_INVALID_ARGUMENT, "the executor is not open; call open first");
  }
  places_->Set(batch);
  for (AttentionWork& work : attention_) work.Set(batch);
  for (size_t i = 0; i < phases_.size(); ++i) {
    counters_[i].next.store(0, std::memory_order_relaxed);
  }
  batch_ = &batch;
  pool_->Run([](void* self, int idx) { static_cast<Executor*>(self)->RunStep(idx); }, this);
  batch_ = nullptr;
  return slots_[plan_->header().logits_slot].as<float>();
}

void Executor::RunStep(int thread_idx) {
  for (const Phase& phase : phases_) {
    if (phase.barrier_before) pool_->Barrier();
    RunPhase(phase, thread_idx);
  }
}

void Executor::RunPhase(const Phase& phase, int thread_idx) {
  const uint32_t num_rows = static_cast<uint32_t>(
      phase.rows_kind == kRowsTokens ? batch_->num_tokens : batch_->num_logits_rows);
  if (num_rows == 0) return;
  if (phase.by_rows) {
    const uint32_t threads = static_cast<uint32_t>(pool_->num_threads());
    const uint32_t idx = static_cast<uint32_t>(thread_idx);
    // Member 0 is the first to be there, so the odd rows are its.
    const uint32_t each = num_rows / threads, more = num_rows % threads;
    const uint32_t begin = idx * each + std::min(idx, more);
    RunRows(phase, begin, begin + each + (idx < more ? 1 : 0));
  } else if (phase.code == kOpLinear) {
    RunLinear(phase, num_rows);
  } else {
    RunAttention(phase, thread_idx);
  }
}

void Executor::RunLinear(const Phase& phase, uint32_t num_rows) {
  const LinearArgs& a = phase.linear;
  const uint32_t tiles = (a.w.rows + kTile - 1) / kTile;
  const uint32_t threads = static_cast<uint32_t>(pool_->num_threads());
  const uint32_t row_items = (num_rows + kMaxRowsPerItem - 1) / kMaxRowsPerItem;
  const uint32_t rows_each = (num_rows + row_items - 1) / row_items;
  // About 4 items a thread, of a multiple of 3 tiles: what a block of AVX-512 takes.
  const uint32_t wanted = tiles * row_items / (4 * threads) / 3 * 3;
  const uint32_t tiles_each = std::min(tiles, std::max(3u, wanted));
  const uint32_t tile_items = (tiles + tiles_each - 1) / tiles_each;
  std::atomic<uint32_t>& next = counters_[static_cast<size_t>(&phase - phases_.data())].next;
  for (uint32_t item;
       (item = next.fetch_add(1, std::memory_order_relaxed)) < row_items * tile_items;) {
    const uint32_t row = item / tile_items * rows_each, tile = item % tile_items * tiles_each;
    if (row >= num_rows) continue;
    kernels_.linear[a.w.dtype](a, row, std::min(num_rows, row + rows_each), tile,
                               std::min(tiles, tile + tiles_each));
  }
}

void Executor::RunAttention(const Phase& phase, int thread_idx) {
  const OpRecord& op = *phase.op;
  const PlanHeader& h = plan_->header();
  AttentionArgs a = {};
  a.k_pool = KvOfLayer(op.i[3]);
  a.v_pool = a.k_pool + kv_layer_floats();
  a.block_stride = kv_block_floats();
  a.block_size = static_cast<uint32_t>(h.tokens_per_block);
  a.head_dim = static_cast<uint32_t>(h.head_dim);
  a.num_kv_heads = static_cast<uint32_t>(h.num_kv_heads);
  a.q = ViewData(op.in[0]);
  a.q_stride = Stride(op.in[0]);
  a.out = ViewData(op.out);
  a.out_stride = Stride(op.out);
  a.window = op.i[4];
  a.scale = op.f[0];
  a.softcap = op.f[1];
  a.scratch = attention_scratch_[static_cast<size_t>(thread_idx)].as<float>();
  const AttentionWork& work = attention_[phase.attention];
  std::atomic<uint32_t>& next = counters_[static_cast<size_t>(&phase - phases_.data())].next;
  for (uint32_t item; (item = next.fetch_add(1, std::memory_order_relaxed)) < work.num_items();) {
    work.Run(kernels_, *batch_, item, a);
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
                         phase.code == kOpGatherRows;
  const size_t in_stride = has_input ? Stride(op.in[0]) : 0;
  const float* in = has_input ? ViewData(op.in[0]) + row_begin * in_stride : nullptr;
  if (phase.code == kPhaseWriteKv) {
    const PlanHeader& h = plan_->header();
    float* pool = KvOfLayer(op.i[3]);
    const KvWriteArgs a = {ViewData(op.in[1]),
                           Stride(op.in[1]),
                           ViewData(op.in[2]),
                           Stride(op.in[2]),
                           pool,
                           pool + kv_layer_floats(),
                           kv_block_floats(),
                           static_cast<uint32_t>(h.num_kv_heads),
                           static_cast<uint32_t>(h.head_dim),
                           static_cast<uint32_t>(h.tokens_per_block)};
    WriteKv(a, *places_, row_begin, row_end);
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
      case kPhaseQuantize: {
        const LinearArgs& a = phase.linear;
        kernels_.quantize_row(
            in, a.w.cols, static_cast<uint32_t>(a.q_stride), a.q_groups, a.w.num_groups,
            quantized_.as<int8_t>() + row * a.q_stride,
            quant_scales_.as<float>() + row * static_cast<size_t>(a.q_groups),
            quant_sums_.as<int32_t>() + row * static_cast<size_t>(a.w.num_groups));
        break;
      }
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
