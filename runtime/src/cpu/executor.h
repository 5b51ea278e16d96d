// Runs a cpu plan: slots, pools, threads, and the plan's ops as phases that all threads walk
// through together.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "cpu/attention.h"
#include "cpu/batch.h"
#include "cpu/block_copy.h"
#include "cpu/kernels.h"
#include "cpu/lora.h"
#include "cpu/pages.h"
#include "cpu/plan.h"
#include "cpu/profile.h"
#include "cpu/thread_pool.h"
#include "plansmith/plansmith.h"

namespace plansmith {
namespace cpu {

// One thread at a time. Everything a step needs is allocated by the constructor and Open.
class Executor {
 public:
  // num_threads >= 1; isa as in psm_cpu_options; with_profile: note the time of each phase. Throws
  // StatusError.
  Executor(const std::string& plan_path, int num_threads, bool pin_threads, const char* isa,
           LoraLimits lora_limits, WeightsIn weights, bool with_profile);
  ~Executor();

  psm_model_info Describe() const;
  void Open(int32_t num_blocks);
  // [R, V], valid until the next call.
  const float* Step(const psm_batch& batch);
  // psm_executor.copy_blocks and open_host; after Open. Throw INVALID_ARGUMENT, OUT_OF_MEMORY.
  void CopyBlocks(const psm_block_copy* copies, size_t num_copies);
  void OpenHost(int32_t num_blocks);
  // NULL without one. Its Read from any thread.
  const Profile* profile() const { return profile_.get(); }
  // Between steps.
  Lora& lora() { return lora_; }

 private:
  // Phases that the plan does not name as ops of their own.
  static constexpr uint32_t kPhaseQuantize = kCodeQuantize;
  static constexpr uint32_t kPhaseWriteKv = kCodeWriteKv;
  static constexpr uint32_t kPhaseLora = kCodeLora;

  struct Phase {
    uint32_t code;  // OpCode or kPhase...
    const OpRecord* op;
    uint32_t rows_kind;  // SlotRows: how many rows there are
    bool by_rows;        // whole rows, one by one; else see Stage
    LinearArgs linear;   // kOpLinear, kPhaseQuantize and kPhaseLora
    size_t lora_site;    // kPhaseLora
    size_t attention;    // kOpPagedAttention: index of its AttentionWork
  };

  // Phases [first, last] between which no thread needs what another wrote: one matrix product, its
  // adapters, one attention, or some that go row by row. A stage is cut into items that threads
  // take one by one, and the next begins when all are done, not when all threads are: one that lost
  // its core to another process holds up nobody.
  struct Stage {
    size_t first, last;
  };
  // How a matrix product is cut.
  struct LinearCut {
    uint32_t rows_each, row_items, tiles_each, tile_items;
  };
  struct alignas(64) Progress {
    std::atomic<uint32_t> next{0};
    std::atomic<uint32_t> done{0};
  };

  void CheckOpen() const;
  void AllocateSlots();
  void BuildPhases();
  void BuildProfile();
  void AddPhase(const Phase& phase);
  void AddLinear(uint32_t op_idx);
  PackedMatrix Matrix(int32_t tensor) const;
  const float* TensorData(int32_t tensor) const;
  float* ViewData(const View& view) const;
  size_t Stride(const View& view) const { return strides_[static_cast<size_t>(view.slot)]; }
  void SizeQuantBuffers();
  BlockLayout KvLayout() const;
  // K or V (which = 0, 1) of a layer in block 0.
  uint8_t* KvOfLayer(int32_t layer, int which) const;
  // Of kOpPagedAttention, 1 with float pools: the scale of K or V.
  float KvScale(const OpRecord& op, int which) const;

  void RunStep(int thread_idx);
  uint32_t NumRows(const Phase& phase) const;
  uint32_t RowsOfItem(const Phase& phase) const;
  LinearCut CutLinear(const Phase& phase) const;
  uint32_t NumItems(const Stage& stage) const;
  void RunItem(const Stage& stage, uint32_t item, int thread_idx, StepMarks* marks);
  void RunRows(const Phase& phase, uint32_t row_begin, uint32_t row_end);
  void QuantizeRow(const Phase& phase, const float* in, uint32_t row);
  void RunLinear(const Phase& phase, uint32_t item);
  void RunAttention(const Phase& phase, uint32_t item, int thread_idx);

  // Order matters: the pool's threads end before what they use.
  std::unique_ptr<Plan> plan_;
  const KernelTable& kernels_;
  Lora lora_;
  std::vector<size_t> strides_;  // of slots, floats
  std::vector<Pages> slots_;
  Pages quantized_, quant_scales_, quant_sums_;
  size_t quant_stride_ = 0;          // bytes of a row
  size_t quant_scales_per_row_ = 0;  // most of any op
  // [num_blocks][L][K, V][KVH * D * BS], values of the plan's KvFormat: a block of all layers is
  // one piece of memory, so that few blocks touch few huge pages.
  Pages kv_pool_;
  std::unique_ptr<BlockCopier> copier_;   // NULL until Open
  std::vector<AttentionWork> attention_;  // one for each number of heads in the plan
  std::vector<Pages> attention_scratch_;  // [threads]
  std::vector<Phase> phases_;
  std::vector<Stage> stages_;
  std::unique_ptr<Progress[]> progress_;  // [stages]
  Event stage_done_;
  std::unique_ptr<BatchPlaces> places_;
  const psm_batch* batch_ = nullptr;  // of the step that runs
  std::unique_ptr<Profile> profile_;
  std::unique_ptr<ThreadPool> pool_;
};

}  // namespace cpu
}  // namespace plansmith
