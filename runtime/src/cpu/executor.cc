// SPDX-License-Identifier: Apache-2.0
#include "cpu/executor.h"

#include <stdint.h>

#include <algorithm>

#include "status.h"

namespace plansmith {
namespace cpu {
namespace {

constexpr uint32_t kSlack = 64;  // bytes behind pools and slots, for vectors that end past them

// Of the pool, which gives out its blocks from the front: what the system does not have to find and
// zero in the midst of a step, 0.2 ms for a huge page and up to 4 ms where a virtual machine's host
// has none ready. All of a large pool would open slowly and hold what few requests never use.
constexpr size_t kPoolReadyBytes = 128u << 20;

bool IsF8(const OpRecord& linear) { return linear.i[1] >= kInputF8Row; }

// Rows of all buffers are as many as a step may have tokens, and the logits of a large vocabulary
// would take more than the weights where nobody ever asks for them.
PlanHeader Narrowed(PlanHeader model, int32_t max_num_tokens) {
  if (max_num_tokens > 0) model.max_num_tokens = std::min(model.max_num_tokens, max_num_tokens);
  return model;
}

}  // namespace

Executor::Executor(const std::string& plan_path, int num_threads, bool pin_threads, const char* isa,
                   LoraLimits lora_limits, WeightsIn weights, bool with_profile, bool fuse,
                   int32_t max_num_tokens)
    : plan_(Plan::Open(plan_path, weights)),
      model_(Narrowed(plan_->header(), max_num_tokens)),
      kernels_(ChooseKernels(isa)),
      lora_(*plan_, kernels_, lora_limits, num_threads),
      candidates_(static_cast<uint32_t>(model_.vocab_size)) {
  AllocateSlots();
  SizeQuantBuffers();
  pool_ = std::make_unique<ThreadPool>(num_threads, pin_threads);
  share_ = std::make_unique<WorkShare>(num_threads);
  BuildPhases();
  if (fuse) Fuse();
  if (with_profile) BuildProfile();
}

Executor::~Executor() = default;

psm_model_info Executor::Describe() const {
  const PlanHeader& h = model_;
  psm_model_info info = {};
  info.vocab_size = h.vocab_size;
  info.num_layers = h.num_layers;
  info.num_heads = h.num_heads;
  info.num_kv_heads = h.num_kv_heads;
  info.head_dim = h.head_dim;
  info.max_batch_size = h.max_batch_size;
  info.max_num_tokens = info.max_logits_rows = h.max_num_tokens;
  info.max_input_len = h.max_input_len;
  info.max_seq_len = h.max_seq_len;
  info.tokens_per_block = h.tokens_per_block;
  info.max_adapters = lora_.max_adapters();
  info.max_adapter_rank = lora_.max_rank();
  info.samples_rows = ends_with_logits_ ? PSM_SAMPLES_CANDIDATES : PSM_SAMPLES_NONE;
  info.kv_bytes_per_block = KvLayout().bytes();
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
  const BlockLayout layout = KvLayout();
  if (layout.bytes() > (SIZE_MAX - kSlack) / static_cast<size_t>(num_blocks)) {
    throw StatusError(
        PSM_ERROR_OUT_OF_MEMORY,
        Format("%d KV blocks of %zu bytes are more than the machine can address; open "
               "with fewer",
               num_blocks, layout.bytes()));
  }
  Pages pool(layout.bytes() * static_cast<size_t>(num_blocks) + kSlack, "the KV pool");
  places_ = std::make_unique<BatchPlaces>(model_, num_blocks);
  pool.Populate(std::min(layout.bytes() * static_cast<size_t>(num_blocks), kPoolReadyBytes));
  kv_pool_ = std::move(pool);
  copier_ = std::make_unique<BlockCopier>(layout, kv_pool_.as<uint8_t>(), num_blocks);
}

void Executor::CopyBlocks(const psm_block_copy* copies, size_t num_copies) {
  CheckOpen();
  copier_->Copy(copies, num_copies);
}

void Executor::OpenHost(int32_t num_blocks) {
  CheckOpen();
  copier_->OpenHost(num_blocks);
}

void Executor::CheckOpen() const {
  if (copier_ != nullptr) return;
  throw StatusError(PSM_ERROR_INVALID_ARGUMENT, "the executor is not open; call open first");
}

BlockLayout Executor::KvLayout() const {
  const PlanHeader& h = model_;
  return {static_cast<size_t>(h.num_layers), static_cast<size_t>(h.num_kv_heads),
          static_cast<size_t>(h.head_dim), static_cast<size_t>(h.tokens_per_block),
          KvValueBytes(h.kv_format)};
}

uint8_t* Executor::KvOfLayer(int32_t layer, int which) const {
  const BlockLayout layout = KvLayout();
  const size_t part = 2 * static_cast<size_t>(layer) + static_cast<size_t>(which);
  return kv_pool_.as<uint8_t>() + part * layout.layer_values() * layout.value_bytes;
}

float Executor::KvScale(const OpRecord& op, int which) const {
  return KvHasScales(model_.kv_format) ? TensorData(op.tensors[0])[which] : 1.0f;
}

void Executor::AllocateSlots() {
  const PlanHeader& h = model_;
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
  const PlanHeader& h = model_;
  for (uint32_t i = 0; i < h.num_ops; ++i) {
    if (plan_->op(i).code != kOpLinear) continue;
    if (plan_->op(i).i[1] == kInputFloat) continue;
    const PackedMatrix w = Matrix(plan_->op(i).tensors[0]);
    const size_t code_bytes = IsF8(plan_->op(i)) ? sizeof(uint16_t) : 1;
    quant_stride_ = std::max(quant_stride_, RoundUp(w.padded_cols * code_bytes, 64));
    quant_scales_per_row_ = std::max<size_t>(quant_scales_per_row_, w.num_groups);
  }
  const size_t rows = static_cast<size_t>(h.max_num_tokens);
  for (size_t i = 0; i < 2; ++i) {
    quantized_[i] = Pages(rows * quant_stride_, "the quantized activations");
    quant_scales_[i] =
        Pages(rows * quant_scales_per_row_ * sizeof(float), "the activations' scales");
    quant_sums_[i] = Pages(rows * quant_scales_per_row_ * sizeof(int32_t), "the activations' sums");
  }
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
  m.scales = t.scales_bytes != 0 ? plan_->at(t.scales_offset) : nullptr;
  m.zeros =
      t.zeros_bytes != 0 ? reinterpret_cast<const float*>(plan_->at(t.zeros_offset)) : nullptr;
  m.outer_scale = t.outer_scale;
  m.scale_dtype = t.scale_dtype;
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
  phases_.back().num_units = NumUnits(phase);
  const size_t idx = phases_.size() - 1;
  const Phase* before = idx > 0 ? &phases_[idx - 1] : nullptr;
  if (before != nullptr && before->by_rows && phase.by_rows &&
      before->rows_kind == phase.rows_kind && phase.code != kOpGatherRows) {
    stages_.back().last = idx;
  } else {
    stages_.push_back({});
    stages_.back().first = stages_.back().last = idx;
  }
}

void Executor::AddLinear(uint32_t op_idx) {
  const OpRecord& op = plan_->op(op_idx);
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
  const TensorRecord& weight = plan_->tensor(static_cast<size_t>(op.tensors[0]));
  phase.tile_bytes = weight.data_bytes / ((weight.rows + kTile - 1) / kTile);
  if (op.i[1] != kInputFloat) {
    const size_t quant = next_quant_;
    next_quant_ = 1 - next_quant_;
    a.q_scales = quant_scales_[quant].as<float>();
    a.q_groups = op.i[1] == kInputInt8Group || op.i[1] == kInputF8Group ? a.w.num_groups : 1;
    if (IsF8(op)) {
      a.f8 = quantized_[quant].as<uint16_t>();
      a.f8_stride = quant_stride_ / sizeof(uint16_t);
      if (op.i[1] == kInputF8Static) {
        a.q_scales = &op.f[0];
        a.q_groups = 0;
      }
    } else {
      a.q = quantized_[quant].as<int8_t>();
      a.q_stride = quant_stride_;
      a.q_sums = quant_sums_[quant].as<int32_t>();
      a.q_full_range = op.i[1] == kInputInt8Static;
    }
    Phase quantize = phase;
    quantize.code = kCodeQuantize;
    quantize.by_rows = true;
    quantize.quant = quant;
    AddPhase(quantize);
  }
  AddPhase(phase);
  if (lora_.SiteOf(op_idx) >= 0) {
    phase.code = kCodeLora;
    phase.lora_site = static_cast<size_t>(lora_.SiteOf(op_idx));
    if (op.in[1].slot >= 0) {
      phase.linear.x = ViewData(op.in[1]);
      phase.linear.x_stride = Stride(op.in[1]);
    }
    AddPhase(phase);
  }
}

void Executor::BuildPhases() {
  const PlanHeader& h = model_;
  for (uint32_t i = 0; i < h.num_ops; ++i) {
    const OpRecord& op = plan_->op(i);
    if (op.code == kOpLinear) {
      AddLinear(i);
      continue;
    }
    Phase phase = {};
    phase.code = op.code;
    phase.op = &op;
    phase.rows_kind = plan_->slot(static_cast<size_t>(op.out.slot)).rows;
    phase.by_rows = true;
    if (op.code == kOpPagedAttention) {
      Phase write = phase;
      write.code = kCodeWriteKv;
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
  runs_.resize(stages_.size());
  if (!phases_.empty()) {  // a plan without ops is one, too
    const Phase& last = phases_.back();
    ends_with_logits_ = last.code == kOpLinear && stages_.back().first == stages_.back().last &&
                        static_cast<uint32_t>(last.op->out.slot) == h.logits_slot &&
                        last.op->out.col == 0 &&
                        last.linear.w.rows == static_cast<uint32_t>(h.vocab_size);
  }
  const size_t floats =
      AttentionScratchFloats(kMaxAttentionQueries, static_cast<uint32_t>(h.head_dim));
  for (int i = 0; i < pool_->num_threads(); ++i) {
    attention_scratch_.emplace_back(floats * sizeof(float) + kSlack,
                                    "a thread's attention scratch");
  }
}

void Executor::BuildProfile() {
  std::vector<PhaseOps> phases;
  for (const Phase& phase : phases_) {
    const LinearArgs& a = phase.linear;
    const bool bf16 = kernels_.has_bf16_dots && phase.code == kOpLinear && a.f8 != nullptr;
    phases.push_back({{phase.op, phase.code, bf16}});
  }
  profile_ = std::make_unique<Profile>(*plan_, phases, pool_->num_threads());
}

}  // namespace cpu
}  // namespace plansmith
