// LoRA adapters of the CPU executor: y += scale * B (A x) after a product y = W x, each row with
// the adapter of its sequence.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/kernels.h"
#include "cpu/lora_sites.h"
#include "cpu/pages.h"
#include "plansmith/plansmith.h"

namespace plansmith {
namespace cpu {

// Most adapters and their largest rank; 0 of either = none at all.
struct LoraLimits {
  int32_t max_adapters;
  int32_t max_rank;
};

// Owns the adapters' weights. Load, Unload and SetBatch between steps, the rest from any thread of
// a step. A and B are packed like float32 weights and run by the same kernels, so a row's bits
// depend on the row and its adapter alone.
class Lora {
 public:
  // `plan` and `kernels` must outlive it.
  Lora(const Plan& plan, const KernelTable& kernels, LoraLimits limits, int num_threads);

  // 0 when the limits are, or when the plan's products do not tell which matrices they are.
  int32_t max_adapters() const { return static_cast<int32_t>(adapters_.size()); }
  int32_t max_rank() const { return adapters_.empty() ? 0 : limits_.max_rank; }
  int32_t SiteOf(size_t op_idx) const { return adapters_.empty() ? -1 : sites_.SiteOf(op_idx); }

  // Copies an adapter into a free slot; lets one go, its memory included. Throw StatusError that
  // names what does not fit; nothing has changed then.
  void Load(int32_t slot, const psm_lora_module* modules, size_t num_modules);
  void Unload(int32_t slot);

  // Takes the batch's adapter_slots. Throws StatusError for a slot without an adapter. Allocates
  // nothing.
  void SetBatch(const psm_batch& batch);

  // Items of a site's update in this step, 0 when no row has one.
  uint32_t NumItems(size_t site) const;
  // Runs one item: some rows of one part. `product` is the site's: x, out and their strides.
  void Run(size_t site, uint32_t item, const LinearArgs& product, int thread_idx) const;

 private:
  struct Update {
    PackedMatrix a, b;  // rank x in, out x rank, with the scale in b; a.data null = none
  };
  struct Adapter {
    bool is_loaded = false;
    Pages memory;
    std::vector<Update> updates;  // [parts]
  };
  // Neighbouring rows with one adapter.
  struct Piece {
    uint32_t first_row, num_rows;
    int32_t slot;
  };

  void CheckSlot(int32_t slot) const;
  size_t CheckModule(const psm_lora_module* modules, size_t idx) const;
  void AddRow(std::vector<Piece>* pieces, uint32_t row, int32_t slot);
  void Count(const Adapter& adapter, int step);

  const KernelTable& kernels_;
  const LoraLimits limits_;
  const LoraSites sites_;
  std::vector<Adapter> adapters_;     // [max_adapters]
  std::vector<int32_t> num_updates_;  // [sites] of all loaded adapters
  std::vector<Piece> pieces_[2];      // by SlotRows
  size_t inner_stride_ = 0;           // floats
  std::vector<Pages> inner_;          // [threads] A x of a piece's rows
};

}  // namespace cpu
}  // namespace plansmith
