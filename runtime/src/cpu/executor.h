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
#include "cpu/candidates.h"
#include "cpu/kernels.h"
#include "cpu/lora.h"
#include "cpu/op_cost.h"
#include "cpu/pages.h"
#include "cpu/plan.h"
#include "cpu/profile.h"
#include "cpu/thread_pool.h"
#include "cpu/work_share.h"
#include "plansmith/plansmith.h"

namespace plansmith {
namespace cpu {

// One thread at a time. Everything a step needs is allocated by the constructor and Open.
class Executor {
 public:
  // num_threads >= 1; isa and max_num_tokens as in psm_cpu_options; with_profile: note the time of
  // each phase. Without `fuse` no phase is run by another's items, which gives the same bits: for
  // tests. Throws StatusError.
  Executor(const std::string& plan_path, int num_threads, bool pin_threads, const char* isa,
           LoraLimits lora_limits, WeightsIn weights, bool with_profile, bool fuse = true,
           int32_t max_num_tokens = 0);
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
  // Phases that items of a stage before theirs can run, by columns. For tests.
  size_t num_fused() const;
  // Between steps.
  Lora& lora() { return lora_; }
  // What the next step's first stage is numbered, as after days of steps. For tests.
  void NumberStagesFrom(uint32_t stage) { step_base_ = stage; }

 private:
  struct Phase {
    uint32_t code;  // OpCode or PhaseCode
    const OpRecord* op;
    uint32_t rows_kind;  // SlotRows: how many rows there are
    bool by_rows;        // whole rows, one by one; else see Stage
    LinearArgs linear;   // kOpLinear, kCodeQuantize and kCodeLora
    size_t tile_bytes;   // of the weight
    size_t quant;        // kCodeQuantize: which of the buffers
    size_t lora_site;    // kCodeLora
    size_t attention;    // kOpPagedAttention: index of its AttentionWork
    // By rows: how many parts a row has that do not need each other: heads, groups or columns.
    uint32_t num_units;
    // Fused: unit 0 begins at column unit_at of what the stage's items cut, and is unit_cols wide.
    uint32_t unit_at, unit_cols;
  };

  // Phases [first, last] between which no thread needs what another wrote: one matrix product, its
  // adapters, one attention, or some that go row by row. A stage is cut into items that threads
  // take one by one, and the next begins when all are done, not when all threads are: one that lost
  // its core to another process holds up nobody.
  struct Stage {
    size_t first, last;
    // Of a product or an attention, 0 = none: the stage of its adapters, and the rows behind it
    // that its items can go on with (executor_fuse.cc).
    size_t lora, tail;
    size_t num_fused;     // phases of the tail that run by columns, the first ones
    uint32_t fused_cols;  // whole multiples of which an item has to hold for that
    bool writes_kv;       // by columns
    bool in_pairs;        // an item holds the same columns of both halves of the product
  };
  // How a matrix product is cut: blocks of rows, and for each of them tile_items runs of units of
  // tiles, as equal as can be.
  struct LinearCut {
    uint32_t rows_each, row_items, unit_tiles, num_units, tile_items;
    uint32_t FirstTile(uint32_t tile_item) const {
      return static_cast<uint32_t>(static_cast<uint64_t>(num_units) * tile_item / tile_items) *
             unit_tiles;
    }
  };
  // What a stage is in one step.
  struct StageRun {
    uint32_t num_items;  // 0: nothing to do
    size_t first;        // phase
    LinearCut cut;
    bool with_columns;  // its items go on with the tail's fused phases
    bool with_rows;     // and who ends the last item with the rest of them
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

  // executor_fuse.cc
  void Fuse();
  class Columns;
  void FuseTail(Stage* stage);
  bool FusePhase(bool is_first, Phase* phase, Columns* columns) const;
  static bool FuseGlu(const Phase& phase, Columns* columns);
  static bool FuseElementwise(const Phase& phase, Columns* columns);
  bool FuseUnits(Phase* phase, Columns* columns) const;
  uint32_t NumUnits(const Phase& phase) const;

  void NumberStages();
  void PlanStep();
  void PlanTail(const Stage& stage, StageRun* run);
  bool SharesColumns(const Stage& stage) const;
  void RunStep(int thread_idx);
  uint32_t RunItems(size_t stage_idx, int thread_idx, StepMarks* marks);
  void AwaitStage(size_t stage_idx, uint32_t count);
  uint32_t NumRows(const Phase& phase) const;
  uint32_t RowsOfItem(const Phase& phase) const;
  uint32_t NumTiles(const Stage& stage, bool with_columns) const;
  LinearCut CutLinear(const Stage& stage, bool with_columns) const;
  uint32_t NumItems(const Stage& stage) const;
  void RunItem(size_t stage_idx, uint32_t item, int thread_idx, StepMarks* marks);
  void RunColumns(const Stage& stage, uint32_t row_begin, uint32_t row_end, uint32_t col_begin,
                  uint32_t col_end, StepMarks* marks);
  void RunTail(size_t stage_idx, StepMarks* marks);
  void RunLinear(const Stage& stage, const StageRun& run, uint32_t item, StepMarks* marks);
  void RunAttention(const Stage& stage, const StageRun& run, uint32_t item, int thread_idx,
                    StepMarks* marks);

  // executor_rows.cc: units [unit_begin, unit_end) of rows [row_begin, row_end).
  void RunRows(const Phase& phase, uint32_t row_begin, uint32_t row_end, uint32_t unit_begin,
               uint32_t unit_end);
  void RunRow(const Phase& phase, uint32_t row, uint32_t unit_begin, uint32_t unit_end);
  uint32_t QuantizeUnits(const Phase& phase) const;
  void QuantizeRow(const Phase& phase, uint32_t row, uint32_t group_begin, uint32_t group_end);
  void RoundRowF8(const Phase& phase, const float* in, uint32_t row, uint32_t unit_begin,
                  uint32_t unit_end);
  void WriteKvRows(const Phase& phase, uint32_t row_begin, uint32_t row_end, uint32_t head_begin,
                   uint32_t head_end);

  // Order matters: the pool's threads end before what they use.
  std::unique_ptr<Plan> plan_;
  const PlanHeader model_;  // the plan's, with this executor's max_num_tokens
  const KernelTable& kernels_;
  Lora lora_;
  std::vector<size_t> strides_;  // of slots, floats
  std::vector<Pages> slots_;
  // Two of each, taken in turn: a product's items may round the next one's input while others
  // still read this one's.
  Pages quantized_[2], quant_scales_[2], quant_sums_[2];
  size_t next_quant_ = 0;
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
  std::vector<StageRun> runs_;  // [stages] of the step that runs
  uint32_t step_base_ = 1;      // number of its stage 0, see NumberStages
  std::unique_ptr<WorkShare> share_;
  Event stage_done_;
  std::unique_ptr<BatchPlaces> places_;
  const psm_batch* batch_ = nullptr;  // of the step that runs
  std::unique_ptr<Profile> profile_;
  bool ends_with_logits_ = false;  // the last stage is the product whose rows are the logits
  CandidateSearch candidates_;
  std::unique_ptr<ThreadPool> pool_;
};

}  // namespace cpu
}  // namespace plansmith
