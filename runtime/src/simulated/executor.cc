// SPDX-License-Identifier: Apache-2.0
#include "simulated/executor.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <mutex>

#include "simulated/cost_model.h"
#include "simulated/hash_model.h"
#include "status.h"

namespace plansmith {
namespace simulated {
namespace {

constexpr int32_t kMinModule = PSM_LORA_ATTN_Q, kMaxModule = PSM_LORA_MLP_GATE;

[[noreturn]] void Invalid(const std::string& what) {
  throw StatusError(PSM_ERROR_INVALID_ARGUMENT, what);
}

void CheckCount(const char* name, int64_t value, int64_t least) {
  if (value < least) {
    Invalid(Format("info.%s is %lld, wanted at least %lld", name, static_cast<long long>(value),
                   static_cast<long long>(least)));
  }
}

void CheckNumber(const char* name, double value, bool may_be_zero) {
  if (!std::isfinite(value) || value < 0 || (value == 0 && !may_be_zero)) {
    Invalid(Format("%s is %g, wanted a finite number %s 0", name, value,
                   may_be_zero ? "of at least" : "above"));
  }
}

psm_simulated_options Checked(psm_simulated_options o) {
  CheckCount("vocab_size", o.info.vocab_size, 2);
  CheckCount("num_layers", o.info.num_layers, 0);
  CheckCount("num_heads", o.info.num_heads, 0);
  CheckCount("num_kv_heads", o.info.num_kv_heads, 0);
  CheckCount("head_dim", o.info.head_dim, 0);
  CheckCount("max_batch_size", o.info.max_batch_size, 1);
  CheckCount("max_num_tokens", o.info.max_num_tokens, 1);
  CheckCount("max_input_len", o.info.max_input_len, 1);
  CheckCount("max_seq_len", o.info.max_seq_len, o.info.max_input_len);
  CheckCount("tokens_per_block", o.info.tokens_per_block, 1);
  CheckCount("max_logits_rows", o.info.max_logits_rows, 0);
  CheckCount("max_adapters", o.info.max_adapters, 0);
  CheckCount("max_adapter_rank", o.info.max_adapter_rank, 0);
  if (o.info.kv_bytes_per_block == 0) Invalid("info.kv_bytes_per_block is 0, wanted at least 1");
  CheckNumber("flops_per_token", o.flops_per_token, true);
  CheckNumber("memory_bytes_per_s", o.memory_bytes_per_s, false);
  CheckNumber("flops_per_s", o.flops_per_s, false);
  CheckNumber("host_copy_bytes_per_s", o.host_copy_bytes_per_s, false);
  CheckNumber("overhead_us", o.overhead_us, true);
  if (!(o.draft_agreement >= 0 && o.draft_agreement <= 1)) {
    Invalid(Format("draft_agreement is %g, wanted 0 to 1", o.draft_agreement));
  }
  if (o.info.max_logits_rows == 0) o.info.max_logits_rows = o.info.max_batch_size;
  o.info.struct_size = PSM_MODEL_INFO_SIZE;
  o.info.samples_rows = 0;  // padding, for callers of before ABI 1.2
  return o;
}

bool IsDraft(const psm_simulated_options& o) {
  return o.draft_agreement != 0 || o.draft_of_seed != 0;
}

// The clocks of the models that live in this process, so that a draft finds its target's.
struct NamedClock {
  uint64_t seed;
  std::weak_ptr<VirtualClock> clock;
};

std::shared_ptr<VirtualClock> ClockFor(const psm_simulated_options& options) {
  static std::mutex mutex;
  static std::vector<NamedClock> clocks;
  const std::lock_guard<std::mutex> lock(mutex);
  clocks.erase(std::remove_if(clocks.begin(), clocks.end(),
                              [](const NamedClock& c) { return c.clock.expired(); }),
               clocks.end());
  if (IsDraft(options)) {
    for (size_t i = clocks.size(); i-- > 0;) {
      if (clocks[i].seed != options.draft_of_seed) continue;
      if (std::shared_ptr<VirtualClock> clock = clocks[i].clock.lock()) return clock;
    }
  }
  auto clock = std::make_shared<VirtualClock>();
  if (!IsDraft(options)) clocks.push_back({options.seed, clock});
  return clock;
}

}  // namespace

uint64_t AdapterPrint(const psm_lora_module* modules, size_t num_modules) {
  uint64_t print = 1;
  const auto mix_floats = [&](const float* values, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
      uint32_t bits;
      std::memcpy(&bits, values + i, sizeof bits);
      print = Mix(print, bits);
    }
  };
  for (size_t i = 0; i < num_modules; ++i) {
    const psm_lora_module& m = modules[i];
    for (int32_t field : {m.layer_idx, m.module, m.rank, m.in_features, m.out_features})
      print = Mix(print, static_cast<uint64_t>(field));
    mix_floats(&m.scale, 1);
    mix_floats(m.a, int64_t{m.rank} * m.in_features);
    mix_floats(m.b, int64_t{m.out_features} * m.rank);
  }
  return print | 1;
}

Executor::Executor(const psm_simulated_options& options)
    : options_(Checked(options)), cell_words_(IsDraft(options) ? 2 : 1), clock_(ClockFor(options)) {
  adapters_.resize(static_cast<size_t>(info().max_adapters));
  holds_adapter_.resize(static_cast<size_t>(info().max_adapters));
}

void Executor::AllocatePool(int32_t num_blocks, const char* what, Pool* pool) const {
  if (num_blocks < 1) Invalid(Format("num_blocks is %d, wanted at least 1", num_blocks));
  if (pool->num_blocks != 0) Invalid(Format("%s is open already; open it once", what));
  const size_t words = static_cast<size_t>(info().tokens_per_block) *
                       static_cast<size_t>(num_blocks) * static_cast<size_t>(cell_words_);
  pool->pages = cpu::Pages(words * sizeof(uint64_t), what);
  pool->num_blocks = num_blocks;
}

void Executor::Open(int32_t num_blocks) {
  AllocatePool(num_blocks, "the simulated KV pool", &device_);
  row_cells_.resize(static_cast<size_t>(info().max_num_tokens));
  logits_ = cpu::Pages(sizeof(float) * static_cast<size_t>(info().max_logits_rows) *
                           static_cast<size_t>(info().vocab_size),
                       "the simulated logits");
  check_ = std::make_unique<BatchCheck>(info(), num_blocks);
}

void Executor::OpenHost(int32_t num_blocks) {
  if (check_ == nullptr) Invalid("the executor is not open; call open before open_host");
  AllocatePool(num_blocks, "the simulated host pool", &host_);
}

const float* Executor::Step(const psm_batch& batch) {
  if (check_ == nullptr) Invalid("the executor is not open; call open first");
  check_->Check(batch, holds_adapter_);
  for (int32_t b = 0; b < batch.num_seqs; ++b) RunSequence(batch, b);
  FillLogits(batch);
  clock_->Advance(StepSeconds(options_, batch));
  return logits_.as<float>();
}

void Executor::RunSequence(const psm_batch& batch, int32_t seq) {
  const int32_t block_size = info().tokens_per_block;
  const int32_t* table =
      batch.block_table + static_cast<size_t>(seq) * static_cast<size_t>(batch.block_table_stride);
  const auto cell = [&](int32_t position) {
    const int32_t block = table[position / block_size];
    if (block < 0 || block >= device_.num_blocks) {  // tables of big steps are not checked before
      Invalid(Format("batch: block_table[%d][%d] is %d, wanted 0 to %d", seq, position / block_size,
                     block, device_.num_blocks - 1));
    }
    return device_.at((int64_t{block} * block_size + position % block_size) * cell_words_);
  };
  const auto read = [&](int32_t position, int64_t word) {
    const uint64_t hash = cell(position)[word];
    if (hash == 0) {
      Invalid(Format("batch: sequence %d reads position %d in block %d, which nobody has written",
                     seq, position, table[position / block_size]));
    }
    return hash;
  };
  const int32_t slot = batch.adapter_slots == nullptr ? -1 : batch.adapter_slots[seq];
  const uint64_t adapter = slot < 0 ? 0 : adapters_[static_cast<size_t>(slot)];
  for (int32_t t = batch.cu_query_lens[seq]; t < batch.cu_query_lens[seq + 1]; ++t) {
    const int32_t position = batch.position_ids[t];
    Cell now = {};
    now.own = HashAt(options_.seed, adapter, position, batch.input_ids[t],
                     [&](int32_t p) { return read(p, 0); });
    if (is_draft()) {
      now.target = HashAt(options_.draft_of_seed, adapter, position, batch.input_ids[t],
                          [&](int32_t p) { return read(p, 1); });
    }
    std::memcpy(cell(position), &now, sizeof(uint64_t) * static_cast<size_t>(cell_words_));
    row_cells_[static_cast<size_t>(t)] = now;
  }
}

void Executor::FillLogits(const psm_batch& batch) {
  float* row = logits_.as<float>();
  for (int32_t r = 0; r < batch.num_logits_rows; ++r, row += info().vocab_size) {
    const Cell& cell = row_cells_[static_cast<size_t>(batch.logits_rows[r])];
    if (is_draft()) {
      FillDraftRow(cell, row);
    } else {
      FillRow(cell.own, info().vocab_size, row);
    }
  }
}

// Where it agrees the row is the target's, so that sampled tokens agree as well; elsewhere its best
// token is another one.
void Executor::FillDraftRow(Cell cell, float* row) const {
  const bool agrees = UnitFloat(Mix(cell.own, cell.target)) < options_.draft_agreement;
  if (!agrees &&
      BestToken(cell.own, info().vocab_size) == BestToken(cell.target, info().vocab_size)) {
    cell.own += uint64_t{1} << 63;  // half a vocabulary further
  }
  FillRow(agrees ? cell.target : cell.own, info().vocab_size, row);
}

void Executor::CheckCopy(const psm_block_copy& copy) const {
  if (copy.kind != PSM_COPY_DEVICE && copy.kind != PSM_COPY_TO_HOST &&
      copy.kind != PSM_COPY_FROM_HOST) {
    Invalid(Format("copy.kind is %d, wanted PSM_COPY_DEVICE (0), _TO_HOST (1) or _FROM_HOST (2)",
                   copy.kind));
  }
  const Pool& from = copy.kind == PSM_COPY_FROM_HOST ? host_ : device_;
  const Pool& to = copy.kind == PSM_COPY_TO_HOST ? host_ : device_;
  if (copy.src < 0 || copy.src >= from.num_blocks || copy.dst < 0 || copy.dst >= to.num_blocks) {
    Invalid(Format("copy of kind %d from block %d to block %d: the pools hold %d and %d", copy.kind,
                   copy.src, copy.dst, from.num_blocks, to.num_blocks));
  }
  if (copy.kind == PSM_COPY_DEVICE && copy.src == copy.dst) {
    Invalid(Format("copy of block %d onto itself", copy.src));
  }
  if (copy.num_tokens < 1 || copy.num_tokens > info().tokens_per_block) {
    Invalid(Format("copy.num_tokens is %d, wanted 1 to tokens_per_block = %d", copy.num_tokens,
                   info().tokens_per_block));
  }
}

void Executor::CopyBlocks(const psm_block_copy* copies, size_t num_copies) {
  if (check_ == nullptr) Invalid("the executor is not open; call open first");
  const int64_t block_words = info().tokens_per_block * cell_words_;
  for (size_t i = 0; i < num_copies; ++i) {
    const psm_block_copy& copy = copies[i];
    CheckCopy(copy);
    const Pool& from = copy.kind == PSM_COPY_FROM_HOST ? host_ : device_;
    const Pool& to = copy.kind == PSM_COPY_TO_HOST ? host_ : device_;
    uint64_t* dst = to.at(copy.dst * block_words);
    const int64_t words = copy.num_tokens * cell_words_;
    std::copy_n(from.at(copy.src * block_words), words, dst);
    // What lies behind was not asked for: to read it before it is written is a mistake.
    std::fill(dst + words, dst + block_words, uint64_t{0});
    clock_->Advance(CopySeconds(options_, copy));
  }
}

void Executor::CheckSlot(int32_t slot, bool wants_loaded) const {
  if (slot < 0 || slot >= info().max_adapters) {
    Invalid(Format("slot is %d, wanted 0 to %d (max_adapters - 1)", slot, info().max_adapters - 1));
  }
  if (holds_adapter_[static_cast<size_t>(slot)] != wants_loaded) {
    Invalid(Format("slot %d holds %s", slot,
                   wants_loaded ? "no adapter; load one first" : "an adapter; unload it first"));
  }
}

void Executor::CheckModule(const psm_lora_module& m, size_t idx) const {
  if (m.module < kMinModule || m.module > kMaxModule || m.layer_idx < 0 ||
      m.layer_idx >= info().num_layers) {
    Invalid(Format("modules[%zu] is module %d of layer %d, wanted %d to %d of layers below %d", idx,
                   m.module, m.layer_idx, kMinModule, kMaxModule, info().num_layers));
  }
  if (m.rank < 1 || m.rank > info().max_adapter_rank || m.in_features < 1 || m.out_features < 1) {
    Invalid(
        Format("modules[%zu] has rank %d and shape [%d, %d], wanted rank 1 to %d and features "
               "of at least 1",
               idx, m.rank, m.out_features, m.in_features, info().max_adapter_rank));
  }
  if (m.a == nullptr || m.b == nullptr) Invalid(Format("modules[%zu] has a or b NULL", idx));
}

void Executor::LoadAdapter(int32_t slot, const psm_lora_module* modules, size_t num_modules) {
  CheckSlot(slot, false);
  if (modules == nullptr || num_modules == 0) Invalid("the adapter has no modules");
  for (size_t i = 0; i < num_modules; ++i) CheckModule(modules[i], i);
  adapters_[static_cast<size_t>(slot)] = AdapterPrint(modules, num_modules);
  holds_adapter_[static_cast<size_t>(slot)] = true;
}

void Executor::UnloadAdapter(int32_t slot) {
  CheckSlot(slot, true);
  holds_adapter_[static_cast<size_t>(slot)] = false;
}

}  // namespace simulated
}  // namespace plansmith
