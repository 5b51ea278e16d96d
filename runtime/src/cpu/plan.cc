// SPDX-License-Identifier: Apache-2.0
#include "cpu/plan.h"

#include <string.h>

#include <utility>

#include "status.h"

namespace plansmith {
namespace cpu {
namespace {

constexpr uint32_t kMaxRecords = 1u << 20;

}  // namespace

void FailPlan(const std::string& path, const std::string& what) {
  throw StatusError(PSM_ERROR_ENGINE_FILE,
                    path + ": " + what + "; rebuild the engine with `plansmith build`");
}

uint32_t Crc32(const void* data, size_t size) {
  static const struct Table {
    Table() {
      for (uint32_t i = 0; i < 256; ++i) {
        uint32_t c = i;
        for (int bit = 0; bit < 8; ++bit) c = (c >> 1) ^ ((c & 1) ? 0xEDB88320u : 0);
        entry[i] = c;
      }
    }
    uint32_t entry[256];
  } table;
  const uint8_t* bytes = static_cast<const uint8_t*>(data);
  uint32_t crc = 0xFFFFFFFFu;
  for (size_t i = 0; i < size; ++i) crc = table.entry[(crc ^ bytes[i]) & 255] ^ (crc >> 8);
  return ~crc;
}

std::unique_ptr<Plan> Plan::Open(const std::string& path, WeightsIn weights) {
  std::unique_ptr<Plan> plan(
      new Plan(path, std::make_unique<PlanMemory>(path, sizeof(PlanHeader), weights)));
  PlanMemory& memory = *plan->memory_;
  memory.LoadUpTo(plan->header().data_offset);  // not checked yet; at most the whole file
  plan->CheckFile();
  plan->CheckModel();
  plan->CheckTensors();
  memory.LoadAll();
  CheckOps(*plan);
  memory.Prefetch(OrderOfUse(*plan), plan->header().data_offset);
  return plan;
}

void Plan::CheckFile() const {
  const PlanHeader& h = header();
  if (memcmp(h.magic, kPlanMagic, sizeof(kPlanMagic)) != 0) {
    FailPlan(path_, "does not begin with PSMPLAN: it is not a plansmith cpu plan");
  }
  if (h.format_version != kPlanFormatVersion) {
    FailPlan(path_, Format("has plan format version %u, this library reads version %u",
                           h.format_version, kPlanFormatVersion));
  }
  PlanHeader copy = h;
  copy.header_crc32 = 0;
  if (Crc32(&copy, sizeof(copy)) != h.header_crc32) {
    FailPlan(path_, Format("header has crc32 %08x, it should have %08x: the file is damaged",
                           Crc32(&copy, sizeof(copy)), h.header_crc32));
  }
  if (h.file_bytes != bytes()) {
    FailPlan(path_, Format("has %zu bytes, its header says %llu: the file was cut or appended to",
                           bytes(), static_cast<unsigned long long>(h.file_bytes)));
  }
  for (uint32_t word : h.reserved) {
    if (word != 0)
      FailPlan(path_, "has non-zero reserved header words: a newer plansmith wrote it");
  }
  const struct {
    const char* name;
    uint64_t offset;
    uint64_t count;
    uint64_t record;
  } tables[] = {
      {"slot table", h.slots_offset, h.num_slots, sizeof(SlotRecord)},
      {"tensor table", h.tensors_offset, h.num_tensors, sizeof(TensorRecord)},
      {"op table", h.ops_offset, h.num_ops, sizeof(OpRecord)},
      {"string table", h.strings_offset, h.strings_bytes, 1},
  };
  if (h.data_offset > bytes() || h.data_offset < sizeof(PlanHeader) ||
      h.data_offset % kPlanAlign != 0) {
    FailPlan(path_, Format("data begins at byte %llu, wanted a multiple of 64 within the file",
                           static_cast<unsigned long long>(h.data_offset)));
  }
  for (const auto& t : tables) {
    if (t.offset % kPlanAlign != 0 || t.offset < sizeof(PlanHeader) || t.offset > h.data_offset) {
      FailPlan(path_,
               Format("%s begins at byte %llu, wanted a multiple of 64 between header and data",
                      t.name, static_cast<unsigned long long>(t.offset)));
    }
    if (t.count > (t.record == 1 ? bytes() : kMaxRecords) ||
        t.count * t.record > h.data_offset - t.offset) {
      FailPlan(path_, Format("%s has %llu records, more than lie between it and the data", t.name,
                             static_cast<unsigned long long>(t.count)));
    }
  }
  const uint32_t crc = Crc32(at(0) + sizeof(PlanHeader), h.data_offset - sizeof(PlanHeader));
  if (crc != h.tables_crc32) {
    FailPlan(path_, Format("tables have crc32 %08x, the header says %08x: the file is damaged", crc,
                           h.tables_crc32));
  }
  if (h.strings_bytes == 0 || at(0)[h.strings_offset + h.strings_bytes - 1] != 0) {
    FailPlan(path_, "string table does not end with a NUL");
  }
}

void Plan::CheckModel() const {
  const PlanHeader& h = header();
  const struct {
    const char* name;
    int32_t value, low, high;
  } rules[] = {
      {"vocab_size", h.vocab_size, 1, 1 << 24},
      {"hidden_size", h.hidden_size, 1, 1 << 20},
      {"num_layers", h.num_layers, 1, 4096},
      {"num_heads", h.num_heads, 1, 4096},
      {"num_kv_heads", h.num_kv_heads, 1, h.num_heads},
      {"head_dim", h.head_dim, 1, 1024},
      {"max_batch_size", h.max_batch_size, 1, 1 << 20},
      {"max_num_tokens", h.max_num_tokens, 1, 1 << 20},
      {"max_seq_len", h.max_seq_len, 1, 1 << 24},
      {"max_input_len", h.max_input_len, 1, h.max_seq_len},
      {"tokens_per_block", h.tokens_per_block, 1, 256},
  };
  for (const auto& r : rules) {
    if (r.value < r.low || r.value > r.high) {
      FailPlan(path_, Format("%s is %d, wanted %d to %d", r.name, r.value, r.low, r.high));
    }
  }
  if (h.kv_format >= kNumKvFormats) {
    FailPlan(path_,
             Format("kv_format is %u, wanted 0 (F32), 1 (F8), 2 (I8) or 3 (F16)", h.kv_format));
  }
  if ((h.tokens_per_block & (h.tokens_per_block - 1)) != 0) {
    FailPlan(path_, Format("tokens_per_block is %d, wanted a power of two", h.tokens_per_block));
  }
  if (h.num_heads % h.num_kv_heads != 0) {
    FailPlan(path_, Format("num_heads %d is not a multiple of num_kv_heads %d", h.num_heads,
                           h.num_kv_heads));
  }
  for (uint32_t i = 0; i < h.num_slots; ++i) {
    if (slot(i).rows > kRowsLogits) {
      FailPlan(path_, Format("slot %u has rows kind %u, wanted 0 (tokens) or 1 (logits rows)", i,
                             slot(i).rows));
    }
    if (slot(i).width == 0 || slot(i).width > kMaxPlanExtent) {
      FailPlan(path_, Format("slot %u is %u columns wide, wanted 1 to %u", i, slot(i).width,
                             kMaxPlanExtent));
    }
  }
  if (h.logits_slot >= h.num_slots || slot(h.logits_slot).rows != kRowsLogits ||
      slot(h.logits_slot).width != static_cast<uint32_t>(h.vocab_size)) {
    FailPlan(path_,
             Format("logits_slot %u is not a slot of logits rows with vocab_size = %d columns",
                    h.logits_slot, h.vocab_size));
  }
}

}  // namespace cpu
}  // namespace plansmith
