// What an Executor runs row by row: whole rows, or the units of them (heads, groups, columns) that
// belong to an item of the product before.
//
// SPDX-License-Identifier: Apache-2.0
#include <string.h>

#include <algorithm>

#include "cpu/executor.h"

namespace plansmith {
namespace cpu {

// 1 where a row is one whole.
uint32_t Executor::NumUnits(const Phase& phase) const {
  switch (phase.code) {
    case kCodeQuantize:
      return QuantizeUnits(phase);
    case kCodeWriteKv:  // those of K, then those of V
      return 2 * static_cast<uint32_t>(model_.num_kv_heads);
    case kOpRmsNorm:
    case kOpRope:
    case kOpGlu:
    case kOpAdd:
    case kOpSoftcap:
    case kOpScale:
    case kOpRoundInput:
    case kOpMulVector:
      return static_cast<uint32_t>(phase.op->i[0]);
    default:
      return 1;
  }
}

// Groups that have a scale each; where it is given, tiles of E4M3 codes. Of int8 ones a NaN marks
// the whole row.
uint32_t Executor::QuantizeUnits(const Phase& phase) const {
  const PackedMatrix& w = phase.linear.w;
  switch (phase.op->i[1]) {
    case kInputInt8Group:
    case kInputF8Group:
      return w.num_groups;
    case kInputF8Static:
      return w.cols % kTile == 0 ? w.cols / kTile : 1;
    default:
      return 1;
  }
}

void Executor::QuantizeRow(const Phase& phase, uint32_t row, uint32_t group_begin,
                           uint32_t group_end) {
  const LinearArgs& a = phase.linear;
  const float* in = a.x + row * a.x_stride;
  if (a.f8 != nullptr) {
    RoundRowF8(phase, in, row, group_begin, group_end);
    return;
  }
  const uint32_t padded = static_cast<uint32_t>(a.q_stride);
  int8_t* q = quantized_[phase.quant].as<int8_t>() + row * a.q_stride;
  float* scales = quant_scales_[phase.quant].as<float>() + row * static_cast<size_t>(a.q_groups);
  int32_t* sums =
      quant_sums_[phase.quant].as<int32_t>() + row * static_cast<size_t>(a.w.num_groups);
  if (phase.op->i[1] == kInputInt8Static) {
    kernels_.quantize_row_static(in, a.w.cols, padded, phase.op->f[0], a.w.num_groups, q, scales,
                                 sums);
  } else if (phase.op->i[1] == kInputInt8Row) {
    kernels_.quantize_row(in, a.w.cols, padded, 1, a.w.num_groups, q, scales, sums);
  } else {
    const uint32_t cols = a.w.cols / a.w.num_groups, at = group_begin * cols;
    const uint32_t num = group_end - group_begin;
    const uint32_t end = group_end == a.w.num_groups ? padded : at + num * cols;
    kernels_.quantize_row(in + at, num * cols, end - at, num, num, q + at, scales + group_begin,
                          sums + group_begin);
  }
}

void Executor::RoundRowF8(const Phase& phase, const float* in, uint32_t row, uint32_t unit_begin,
                          uint32_t unit_end) {
  const LinearArgs& a = phase.linear;
  const uint32_t cols = a.w.cols / phase.num_units;
  const uint32_t at = unit_begin * cols, n = (unit_end - unit_begin) * cols;
  uint16_t* f8 = quantized_[phase.quant].as<uint16_t>() + row * a.f8_stride + at;
  if (phase.op->i[1] == kInputF8Static) {
    kernels_.round_row_f8(in + at, n, -1, phase.op->f[0], f8, nullptr);
    return;
  }
  float* scales = quant_scales_[phase.quant].as<float>() + row * static_cast<size_t>(a.q_groups);
  kernels_.round_row_f8(in + at, n, static_cast<int32_t>(cols), 1.0f, f8, scales + unit_begin);
}

void Executor::WriteKvRows(const Phase& phase, uint32_t row_begin, uint32_t row_end,
                           uint32_t head_begin, uint32_t head_end) {
  const OpRecord& op = *phase.op;
  const PlanHeader& h = model_;
  const KvWriteArgs all = {ViewData(op.in[1]),
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
  if (head_end - head_begin == phase.num_units) {
    WriteKv(kernels_, all, *places_, row_begin, row_end);
    return;
  }
  // Some heads of K, and some of V.
  const size_t head_values = static_cast<size_t>(h.head_dim);
  const size_t head_bytes =
      head_values * static_cast<size_t>(h.tokens_per_block) * KvValueBytes(h.kv_format);
  const uint32_t heads = all.num_kv_heads;
  if (head_begin < heads) {
    KvWriteArgs k = all;
    k.v = nullptr;
    k.k += head_begin * head_values;
    k.k_pool = static_cast<uint8_t*>(k.k_pool) + head_begin * head_bytes;
    k.num_kv_heads = std::min(heads, head_end) - head_begin;
    WriteKv(kernels_, k, *places_, row_begin, row_end);
  }
  if (head_end > heads) {
    const uint32_t first = std::max(heads, head_begin) - heads;
    KvWriteArgs v = all;
    v.k = nullptr;
    v.v += first * head_values;
    v.v_pool = static_cast<uint8_t*>(v.v_pool) + first * head_bytes;
    v.num_kv_heads = head_end - heads - first;
    WriteKv(kernels_, v, *places_, row_begin, row_end);
  }
}

void Executor::RunRows(const Phase& phase, uint32_t row_begin, uint32_t row_end,
                       uint32_t unit_begin, uint32_t unit_end) {
  if (phase.code == kCodeWriteKv) {
    WriteKvRows(phase, row_begin, row_end, unit_begin, unit_end);
  } else {
    for (uint32_t row = row_begin; row < row_end; ++row) RunRow(phase, row, unit_begin, unit_end);
  }
}

void Executor::RunRow(const Phase& phase, uint32_t row, uint32_t unit_begin, uint32_t unit_end) {
  const OpRecord& op = *phase.op;
  const size_t begin = unit_begin;  // column, of what goes by columns
  const uint32_t n = unit_end - unit_begin;
  // Views that an op does not use were not checked.
  const auto row_of = [&](const View& view) {
    return ViewData(view) + static_cast<size_t>(row) * Stride(view);
  };
  switch (phase.code) {
    case kCodeQuantize:
      QuantizeRow(phase, row, unit_begin, unit_end);
      break;
    case kOpEmbed: {
      const TensorRecord& table = plan_->tensor(static_cast<size_t>(op.tensors[0]));
      DequantizeRow(Matrix(op.tensors[0]), table.layout,
                    static_cast<uint32_t>(batch_->input_ids[row]), op.f[0], row_of(op.out));
      break;
    }
    case kOpRmsNorm: {
      const uint32_t width = static_cast<uint32_t>(op.i[1]);
      const float *in = row_of(op.in[0]), *weight = TensorData(op.tensors[0]);
      float* out = row_of(op.out);
      for (size_t g = unit_begin; g < unit_end; ++g) {
        kernels_.rms_norm(in + g * width, weight, width, op.f[0], out + g * width);
      }
      break;
    }
    case kOpRope: {
      const uint32_t half = static_cast<uint32_t>(op.i[2]) / 2;
      const size_t at = static_cast<size_t>(batch_->position_ids[row]) * half;
      const float *cos = TensorData(op.tensors[0]) + at, *sin = TensorData(op.tensors[1]) + at;
      float* out = row_of(op.out);
      for (size_t head = unit_begin; head < unit_end; ++head) {
        kernels_.rope(out + head * static_cast<size_t>(op.i[1]), cos, sin, half);
      }
      break;
    }
    case kOpGlu:
      kernels_.glu(row_of(op.in[0]) + begin, row_of(op.in[1]) + begin, n, op.i[1],
                   row_of(op.out) + begin);
      break;
    case kOpAdd:
      kernels_.add(row_of(op.in[0]) + begin, row_of(op.in[1]) + begin, n, row_of(op.out) + begin);
      break;
    case kOpRoundInput:
      kernels_.round_row(row_of(op.in[0]) + begin, n, op.i[1], op.i[2], op.f[0],
                         row_of(op.out) + begin);
      break;
    case kOpMulVector:
      kernels_.mul(row_of(op.in[0]) + begin, TensorData(op.tensors[0]) + begin, n,
                   row_of(op.out) + begin);
      break;
    case kOpSoftcap:
      kernels_.softcap(row_of(op.out) + begin, n, op.f[0]);
      break;
    case kOpScale:
      kernels_.scale(row_of(op.out) + begin, n, op.f[0]);
      break;
    case kOpGatherRows:
      memcpy(row_of(op.out),
             ViewData(op.in[0]) + static_cast<size_t>(batch_->logits_rows[row]) * Stride(op.in[0]),
             static_cast<uint32_t>(op.i[0]) * sizeof(float));
      break;
    default:
      break;
  }
}

}  // namespace cpu
}  // namespace plansmith
