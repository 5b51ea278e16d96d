// SPDX-License-Identifier: Apache-2.0
#include "cpu/lora.h"

#include <cmath>

#include "status.h"

namespace plansmith {
namespace cpu {
namespace {

// Rows of an item: A x of them stays in L1 between the two products.
constexpr uint32_t kMaxRowsPerPiece = 16;

[[noreturn]] void Fail(psm_status code, const std::string& what) { throw StatusError(code, what); }

size_t PackedFloats(uint32_t rows, uint32_t cols) {
  return RoundUp(rows, kTile) * static_cast<size_t>(cols);
}

// A row-major [rows, cols] times `factor` as kPackedN16, into zeroed memory.
PackedMatrix Pack(const float* from, uint32_t rows, uint32_t cols, float factor, float* to) {
  for (uint32_t row = 0; row < rows; ++row) {
    float* lane = to + row / kTile * kTile * static_cast<size_t>(cols) + row % kTile;
    for (uint32_t k = 0; k < cols; ++k) lane[k * kTile] = *from++ * factor;
  }
  PackedMatrix m = {};
  m.dtype = kF32;
  m.rows = rows;
  m.cols = m.padded_cols = m.group_cols = cols;
  m.num_groups = 1;
  m.data = to;
  return m;
}

// Whether all values, times `factor`, are numbers.
bool AllFinite(const float* values, size_t count, float factor) {
  float sum = 0;  // of values times 0: NaN as soon as one is no number
  for (size_t i = 0; i < count; ++i) sum += values[i] * factor * 0.0f;
  return sum == 0;
}

std::string NameOf(const psm_lora_module* modules, size_t idx) {
  return Format("modules[%zu] (%s of layer %d)", idx, LoraModuleName(modules[idx].module),
                modules[idx].layer_idx);
}

}  // namespace

Lora::Lora(const Plan& plan, const KernelTable& kernels, LoraLimits limits, int num_threads)
    : kernels_(kernels), limits_(limits), sites_(plan) {
  if (limits.max_adapters == 0 || limits.max_rank == 0 || sites_.sites().empty()) return;
  adapters_.resize(static_cast<size_t>(limits.max_adapters));
  num_updates_.resize(sites_.sites().size());
  for (std::vector<Piece>& pieces : pieces_) {
    pieces.reserve(static_cast<size_t>(plan.header().max_num_tokens));
  }
  inner_stride_ = RoundUp(static_cast<size_t>(limits.max_rank), kTile);
  for (int i = 0; i < num_threads; ++i) {
    inner_.emplace_back(kMaxRowsPerPiece * inner_stride_ * sizeof(float),
                        "a thread's adapter scratch");
  }
}

void Lora::CheckSlot(int32_t slot) const {
  if (adapters_.empty()) {
    Fail(PSM_ERROR_UNSUPPORTED,
         sites_.sites().empty()
             ? "the plan does not name its products, so no adapter can be applied; rebuild the "
               "engine with `plansmith build`"
             : "the executor was created without adapters; create it with max_adapters and "
               "max_adapter_rank above 0");
  }
  if (slot < 0 || slot >= max_adapters()) {
    Fail(PSM_ERROR_INVALID_ARGUMENT,
         Format("slot is %d, wanted 0 to %d (max_adapters - 1)", slot, max_adapters() - 1));
  }
}

// The part of module `idx`; throws for what the model has not or what does not fit it.
size_t Lora::CheckModule(const psm_lora_module* modules, size_t idx) const {
  const psm_lora_module& m = modules[idx];
  const std::string name = NameOf(modules, idx);
  const int32_t part_idx = sites_.PartOf(m.layer_idx, m.module);
  if (part_idx < 0) {
    Fail(PSM_ERROR_INVALID_ARGUMENT,
         Format("%s: module is %d and layer_idx %d, the model has modules 1 to 7 (PSM_LORA_...) of "
                "layers 0 to %d",
                name.c_str(), m.module, m.layer_idx, sites_.parts().back().layer));
  }
  const LoraPart& part = sites_.parts()[static_cast<size_t>(part_idx)];
  if (m.rank < 1 || m.rank > limits_.max_rank) {
    Fail(PSM_ERROR_SHAPE, Format("%s: rank is %d, the executor takes 1 to %d; create it with a "
                                 "larger max_adapter_rank",
                                 name.c_str(), m.rank, limits_.max_rank));
  }
  if (m.in_features != static_cast<int32_t>(part.in_features) ||
      m.out_features != static_cast<int32_t>(part.out_features)) {
    Fail(PSM_ERROR_SHAPE,
         Format("%s: has %d in and %d out features, the model has %u and %u; the "
                "adapter was made for another model",
                name.c_str(), m.in_features, m.out_features, part.in_features, part.out_features));
  }
  if (m.a == nullptr || m.b == nullptr) {
    Fail(PSM_ERROR_INVALID_ARGUMENT, name + ": a or b is NULL");
  }
  const size_t rank = static_cast<size_t>(m.rank);
  if (!std::isfinite(m.scale) || !AllFinite(m.a, rank * part.in_features, 1) ||
      !AllFinite(m.b, rank * part.out_features, m.scale)) {
    Fail(PSM_ERROR_INVALID_ARGUMENT,
         name + ": holds a NaN or an infinity in a, b or scale; the adapter is damaged");
  }
  return static_cast<size_t>(part_idx);
}

void Lora::Load(int32_t slot, const psm_lora_module* modules, size_t num_modules) {
  CheckSlot(slot);
  if (adapters_[static_cast<size_t>(slot)].is_loaded) {
    Fail(PSM_ERROR_INVALID_ARGUMENT,
         Format("slot %d holds an adapter already; unload it first", slot));
  }
  if (modules == nullptr || num_modules == 0) {
    Fail(PSM_ERROR_INVALID_ARGUMENT, "an adapter has at least one module; got none");
  }
  Adapter adapter;
  adapter.updates.resize(sites_.parts().size());
  size_t floats = 0;
  for (size_t i = 0; i < num_modules; ++i) {
    const psm_lora_module& m = modules[i];
    Update& update = adapter.updates[CheckModule(modules, i)];
    if (update.a.rows != 0) {
      Fail(PSM_ERROR_INVALID_ARGUMENT, NameOf(modules, i) + " is there twice");
    }
    update.a.rows = static_cast<uint32_t>(m.rank);
    floats += PackedFloats(static_cast<uint32_t>(m.rank), static_cast<uint32_t>(m.in_features)) +
              PackedFloats(static_cast<uint32_t>(m.out_features), static_cast<uint32_t>(m.rank));
  }
  adapter.memory = Pages(floats * sizeof(float), "an adapter");
  float* to = adapter.memory.as<float>();
  for (size_t i = 0; i < num_modules; ++i) {
    const psm_lora_module& m = modules[i];
    const uint32_t rank = static_cast<uint32_t>(m.rank);
    Update& update = adapter.updates[static_cast<size_t>(sites_.PartOf(m.layer_idx, m.module))];
    update.a = Pack(m.a, rank, static_cast<uint32_t>(m.in_features), 1, to);
    to += PackedFloats(update.a.rows, update.a.cols);
    update.b = Pack(m.b, static_cast<uint32_t>(m.out_features), rank, m.scale, to);
    to += PackedFloats(update.b.rows, update.b.cols);
  }
  adapter.is_loaded = true;
  Count(adapter, 1);
  adapters_[static_cast<size_t>(slot)] = std::move(adapter);
}

void Lora::Unload(int32_t slot) {
  CheckSlot(slot);
  Adapter& adapter = adapters_[static_cast<size_t>(slot)];
  if (!adapter.is_loaded) {
    Fail(PSM_ERROR_NOT_FOUND, Format("slot %d holds no adapter", slot));
  }
  Count(adapter, -1);
  adapter = Adapter();
}

void Lora::Count(const Adapter& adapter, int step) {
  for (size_t i = 0; i < sites_.sites().size(); ++i) {
    const LoraSite& site = sites_.sites()[i];
    for (size_t p = 0; p < site.num_parts; ++p) {
      if (adapter.updates[site.first_part + p].a.data != nullptr) num_updates_[i] += step;
    }
  }
}

void Lora::AddRow(std::vector<Piece>* pieces, uint32_t row, int32_t slot) {
  if (slot < 0) return;
  if (!pieces->empty()) {
    Piece& last = pieces->back();
    if (last.slot == slot && last.first_row + last.num_rows == row &&
        last.num_rows < kMaxRowsPerPiece) {
      ++last.num_rows;
      return;
    }
  }
  pieces->push_back({row, 1, slot});
}

void Lora::SetBatch(const psm_batch& batch) {
  for (std::vector<Piece>& pieces : pieces_) pieces.clear();
  if (batch.adapter_slots == nullptr) return;
  int32_t row = 0;
  for (int32_t b = 0; b < batch.num_seqs; ++b) {
    const int32_t slot = batch.adapter_slots[b];
    if (slot < -1 || slot >= max_adapters() ||
        (slot >= 0 && !adapters_[static_cast<size_t>(slot)].is_loaded)) {
      Fail(
          PSM_ERROR_INVALID_ARGUMENT,
          Format("batch: adapter_slots[%d] is %d, wanted -1 or a slot that load_adapter has filled "
                 "(0 to %d)",
                 b, slot, max_adapters() - 1));
    }
    const int32_t end = batch.cu_query_lens[b + 1];
    for (int32_t t = batch.cu_query_lens[b]; t < end; ++t) {
      AddRow(&pieces_[kRowsTokens], static_cast<uint32_t>(t), slot);
    }
    for (; row < batch.num_logits_rows && batch.logits_rows[row] < end; ++row) {
      AddRow(&pieces_[kRowsLogits], static_cast<uint32_t>(row), slot);
    }
  }
}

uint32_t Lora::NumItems(size_t site) const {
  if (num_updates_[site] == 0) return 0;
  const LoraSite& s = sites_.sites()[site];
  return static_cast<uint32_t>(pieces_[s.rows_kind].size() * s.num_parts);
}

void Lora::Run(size_t site, uint32_t item, const LinearArgs& product, int thread_idx) const {
  const LoraSite& s = sites_.sites()[site];
  const Piece& piece = pieces_[s.rows_kind][item / s.num_parts];
  const size_t part_idx = s.first_part + item % s.num_parts;
  const Update& update = adapters_[static_cast<size_t>(piece.slot)].updates[part_idx];
  if (update.a.data == nullptr) return;
  LinearArgs inner = {};
  inner.w = update.a;
  inner.x = product.x + piece.first_row * product.x_stride;
  inner.x_stride = product.x_stride;
  inner.out = inner_[static_cast<size_t>(thread_idx)].as<float>();
  inner.out_stride = inner_stride_;
  LinearArgs outer = {};
  outer.w = update.b;
  outer.x = inner.out;
  outer.x_stride = inner_stride_;
  outer.out = product.out + piece.first_row * product.out_stride + sites_.parts()[part_idx].col;
  outer.out_stride = product.out_stride;
  outer.accumulate = true;
  for (const LinearArgs* args : {&inner, &outer}) {
    kernels_.linear_float[kF32](*args, 0, piece.num_rows, 0, (args->w.rows + kTile - 1) / kTile);
  }
}

}  // namespace cpu
}  // namespace plansmith
