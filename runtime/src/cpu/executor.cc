// SPDX-License-Identifier: Apache-2.0
#include "cpu/executor.h"

#include <stdint.h>
#include <string.h>

#include <algorithm>

#include "status.h"

namespace plansmith {
namespace cpu {
namespace {

// Phases that the plan does not name as ops of their own.
constexpr uint32_t kPhaseQuantize = 1000;
constexpr uint32_t kPhaseWriteKv = 1001;

constexpr uint32_t kMaxRowsPerItem =
    128;                         // of a linear: their inputs stay in L2 beside the weights
constexpr uint32_t kSlack = 64;  // bytes behind pools and slots, for vectors that end past them

size_t RoundUp(size_t value, size_t step) { return (value + step - 1) / step * step; }

}  // namespace

struct Executor::Phase {
  uint32_t code;  // OpCode or kPhase...
  const OpRecord* op;
  uint32_t rows_kind;  // SlotRows: how many rows there are
  bool by_rows;  // a thread does whole rows, always the same ones; else items are taken one by one
  bool barrier_before;  // set by AddPhase
  LinearArgs linear;    // kOpLinear and kPhaseQuantize
  size_t attention;     // kOpPagedAttention: index of its AttentionWork
};

Executor::Executor(const std::string& plan_path, int num_threads, bool pin_threads, const char* isa)
    : plan_(Plan::Open(plan_path)), kernels_(ChooseKernels(isa)) {
  AllocateSlots();
  SizeQuantBuffers();
  pool_ = std::make_unique<ThreadPool>(num_threads, pin_threads);
  BuildPhases();
}

Executor::~Executor() = default;

psm_model_info Executor::Describe() const {
  const PlanHeader& h = plan_->header();
  psm_model_info info = {};
  info.vocab_size = h.vocab_size;
  info.num_layers = h.num_layers;
  info.num_heads = h.num_heads;
  info.num_kv_heads = h.num_kv_heads;
  info.head_dim = h.head_dim;
  info.max_batch_size = h.max_batch_size;
  info.max_num_tokens = h.max_num_tokens;
  info.max_input_len = h.max_input_len;
  info.max_seq_len = h.max_seq_len;
  info.tokens_per_block = h.tokens_per_block;
  info.kv_bytes_per_block = sizeof(float) * kv_block_floats();
  return info;
}

void Executor::Open(int32_t num_blocks) {
  if (places_ != nullptr) {
    throw StatusError(PSM_ERROR_INVALID_ARGUMENT, "the executor is open already; open it once");
  }
  if (num_blocks < 1) {
    throw StatusError(PSM_ERROR_INVALID_ARGUMENT,
                      Format("num_blocks is %d, wanted at least 1", num_blocks));
  }
  const size_t most = (SIZE_MAX - kSlack) / sizeof(float) / static_cast<size_t>(num_blocks);
  if (kv_block_floats() > most) {
    throw StatusError(
        PSM_ERROR_OUT_OF_MEMORY,
        Format("%d KV blocks of %zu bytes are more than the machine can address; open "
               "with fewer",
               num_blocks, kv_block_floats() * sizeof(float)));
  }
  const size_t floats = kv_block_floats() * static_cast<size_t>(num_blocks);
  Pages pool(floats * sizeof(float) + kSlack, "the KV pool");
  places_ = std::make_unique<BatchPlaces>(plan_->header(), num_blocks);
  kv_pool_ = std::move(pool);
}

size_t Executor::kv_layer_floats() const {
  const PlanHeader& h = plan_->header();
  return static_cast<size_t>(h.num_kv_heads) * static_cast<size_t>(h.head_dim) *
         static_cast<size_t>(h.tokens_per_block);
}

size_t Executor::kv_block_floats() const {
  return 2 * kv_layer_floats() * static_cast<size_t>(plan_->header().num_layers);
}

float* Executor::KvOfLayer(int32_t layer) const {
  return kv_pool_.as<float>() + 2 * kv_layer_floats() * static_cast<size_t>(layer);
}

void Executor::AllocateSlots() {
  const PlanHeader& h = plan_->header();
  for (uint32_t i = 0; i < h.num_slots; ++i) {
    // The logits are handed out as [R, V]; other rows begin on a cache line.
    const size_t width = plan_->slot(i).width;
    strides_.push_back(i == h.logits_slot ? width : RoundUp(width, 16));
    slots_.emplace_back(
        strides_[i] * sizeof(float) * static_cast<size_t>(h.max_num_tokens) + kSlack,
        "the activations of max_num_tokens rows");
  }
}

void Executor::SizeQuantBuffers() {
  const PlanHeader& h = plan_->header();
  for (uint32_t i = 0; i < h.num_ops; ++i) {
    if (plan_->op(i).code != kOpLinear) continue;
    const PackedMatrix w = Matrix(plan_->op(i).tensors[0]);
    if (w.scales == nullptr) continue;
    quant_stride_ = std::max(quant_stride_, RoundUp(w.padded_cols, 64));
    quant_scales_per_row_ = std::max<size_t>(quant_scales_per_row_, w.num_groups);
  }
  const size_t rows = static_cast<size_t>(h.max_num_tokens);
  quantized_ = Pages(rows * quant_stride_, "the quantized activations");
  quant_scales_ = Pages(rows * quant_scales_per_row_ * sizeof(float), "the activations' scales");
  quant_sums_ = Pages(rows * quant_scales_per_row_ * sizeof(int32_t), "the activations' sums");
}

PackedMatrix Executor::Matrix(int32_t tensor) const {
  const TensorRecord& t = plan_->tensor(static_cast<size_t>(tensor));
  const PaddedShape shape = PaddedShapeOf(t);
  PackedMatrix m = {};
  m.dtype = t.dtype;
  m.rows = t.rows;
  m.cols = t.cols;
  m.padded_cols = static_cast<uint32_t>(shape.cols);
  m.num_groups = static_cast<uint32_t>(shape.num_groups);
  m.group_cols = t.group_size != 0 ? t.group_size : m.padded_cols;
  m.data = plan_->at(t.data_offset);
  m.scales =
      t.scales_bytes != 0 ? reinterpret_cast<const float*>(plan_->at(t.scales_offset)) : nullptr;
  return m;
}

const float* Executor::TensorData(int32_t tensor) const {
  return reinterpret_cast<const float*>(
      plan_->at(plan_->tensor(static_cast<size_t>(tensor)).data_offset));
}

float* Executor::ViewData(const View& view) const {
  return slots_[static_cast<size_t>(view.slot)].as<float>() + view.col;
}

void Executor::AddPhase(const Phase& phase) {
  phases_.push_back(phase);
  Phase& added = phases_.back();
  // Threads that go through the same rows one after another need not wait for each other.
  const Phase* before = phases_.size() > 1 ? &added - 1 : nullptr;
  added.barrier_before =
      before != nullptr && !(before->by_rows && added.by_rows &&
                             before->rows_kind == added.rows_kind && added.code != kOpGatherRows);
}

void Executor::AddLinear(const OpRecord& op) {
  Phase phase = {};
  phase.code = kOpLinear;
  phase.op = &op;
  phase.rows_kind = plan_->slot(static_cast<size_t>(op.out.slot)).rows;
  LinearArgs& a = phase.linear;
  a.w = Matrix(op.tensors[0]);
  a.x = ViewData(op.in[0]);
  a.x_stride = Stride(op.in[0]);
  a.bias = op.tensors[1] < 0 ? nullptr : TensorData(op.tensors[1]);
  a.out = ViewData(op.out);
  a.out_stride = Stride(op.out);
  a.accumulate = op.i[0] == 1;
  if (a.w.scales != nullptr) {
    a.q = quantized_.as<int8_t>();
    a.q_stride = quant_stride_;
    a.q_scales = quant_scales_.as<float>();
    a.q_sums = quant_sums_.as<int32_t>();
    a.q_groups = op.i[1] == 1 ? a.w.num_groups : 1;
    Phase quantize = phase;
    quantize.code = kPhaseQuantize;
    quantize.by_rows = true;
    AddPhase(quantize);
  }
  AddPhase(phase);
}

void Executor::BuildPhases() {
  const PlanHeader& h = plan_->header();
  for (uint32_t i = 0; i < h.num_ops; ++i) {
    const OpRecord& op = plan_->op(i);
    if (op.code == kOpLinear) {
      AddLinear(op);
      continue;
    }
    Phase phase = {};
    phase.code = op.code;
    phase.op = &op;
    phase.rows_kind = plan_->slot(static_cast<size_t>(op.out.slot)).rows;
    phase.by_rows = true;
    if (op.code == kOpPagedAttention) {
      Phase write = phase;
      write.code = kPhaseWriteKv;
      AddPhase(write);
      phase.by_rows = false;
      const uint32_t heads = static_cast<uint32_t>(op.i[0]);
      while (phase.attention < attention_.size() &&
             attention_[phase.attention].num_heads() != heads) {
        ++phase.attention;
      }
      if (phase.attention == attention_.size()) {
        attention_.emplace_back(heads, h, pool_->num_threads());
      }
    }
    AddPhase(phase);
  }
  counters_ = std::make_unique<Counter[]>(phases_.size());
  const size_t floats =
      AttentionScratchFloats(kMaxAttentionQueries, static_cast<uint32_t>(h.head_dim));
  for (int i = 0; i < pool_->num_threads(); ++i) {
    attention_scratch_.emplace_back(floats * sizeof(float) + kSlack,
                                    "a thread's attention scratch");
  }
}

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
