// An executor that computes nothing: tokens are hashes of the history, times those of a GPU's
// bytes and operations.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "cpu/pages.h"
#include "plansmith/plansmith.h"
#include "simulated/batch_check.h"

namespace plansmith {
namespace simulated {

// Simulated time. A draft shares its target's, so that drafting costs what it would.
class VirtualClock {
 public:
  int64_t now_ns() const { return now_ns_.load(std::memory_order_relaxed); }
  void Advance(double seconds) {
    now_ns_.fetch_add(static_cast<int64_t>(seconds * 1e9), std::memory_order_relaxed);
  }

 private:
  // Not 0, which means "did not happen" in the statistics.
  std::atomic<int64_t> now_ns_{1000000000};
};

// What an adapter is known by: a hash of all its numbers, which goes into those of its sequences.
uint64_t AdapterPrint(const psm_lora_module* modules, size_t num_modules);

// One thread at a time, but for now_ns.
class Executor {
 public:
  // Throws INVALID_ARGUMENT naming the option.
  explicit Executor(const psm_simulated_options& options);

  const psm_model_info& info() const { return options_.info; }
  int64_t now_ns() const { return clock_->now_ns(); }
  void Open(int32_t num_blocks);
  void OpenHost(int32_t num_blocks);
  // [R, V], valid until the next call. Throws INVALID_ARGUMENT for a batch that breaks a rule or
  // reads a position that nobody has written.
  const float* Step(const psm_batch& batch);
  void CopyBlocks(const psm_block_copy* copies, size_t num_copies);
  void LoadAdapter(int32_t slot, const psm_lora_module* modules, size_t num_modules);
  void UnloadAdapter(int32_t slot);

 private:
  // What the pools hold of a position: this model's hash, and for a draft that of its target.
  struct Cell {
    uint64_t own;
    uint64_t target;
  };
  // A pool [num_blocks][tokens_per_block]; a Cell is `cell_words` words.
  struct Pool {
    cpu::Pages pages;
    int32_t num_blocks = 0;
    uint64_t* at(int64_t word) const { return pages.as<uint64_t>() + word; }
  };

  void RunSequence(const psm_batch& batch, int32_t seq);
  void FillLogits(const psm_batch& batch);
  void FillDraftRow(Cell cell, float* row) const;
  void AllocatePool(int32_t num_blocks, const char* what, Pool* pool) const;
  void CheckCopy(const psm_block_copy& copy) const;
  void CheckSlot(int32_t slot, bool wants_loaded) const;
  void CheckModule(const psm_lora_module& module, size_t idx) const;
  bool is_draft() const { return cell_words_ == 2; }

  const psm_simulated_options options_;
  const int64_t cell_words_;
  std::shared_ptr<VirtualClock> clock_;
  Pool device_, host_;
  std::unique_ptr<BatchCheck> check_;  // NULL until Open
  std::vector<Cell> row_cells_;        // [max_num_tokens] of this step's tokens
  cpu::Pages logits_;                  // [max_logits_rows][V]
  std::vector<uint64_t> adapters_;     // [max_adapters] what is mixed in; 0 = none
  std::vector<bool> holds_adapter_;    // [max_adapters]
};

}  // namespace simulated
}  // namespace plansmith
