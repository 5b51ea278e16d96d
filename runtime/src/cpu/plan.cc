// SPDX-License-Identifier: Apache-2.0
#include "cpu/plan.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <utility>

#include "status.h"

namespace plansmith {
namespace cpu {
namespace {

constexpr uint64_t kAlign = 64;    // of tables and data blocks
constexpr uint32_t kF4Group = 16;  // NVFP4 has no other
constexpr uint32_t kMaxRecords = 1u << 20;
constexpr uint32_t kMaxExtent = 1u << 24;  // rows, columns: keeps products far inside 64 bits

[[noreturn]] void Fail(const std::string& path, const std::string& what) {
  throw StatusError(PSM_ERROR_ENGINE_FILE,
                    path + ": " + what + "; rebuild the engine with `plansmith build`");
}

uint64_t RoundUp(uint64_t value, uint64_t step) { return (value + step - 1) / step * step; }

uint32_t Step(uint32_t layout) {
  return layout == kPackedN16K4 ? 4 : layout == kPackedN16K8 ? 8 : 1;
}

const char* DTypeName(uint32_t dtype) {
  static const char* const names[kNumDTypes] = {"F32", "BF16", "I8", "I4", "F16", "F8", "F4"};
  return dtype < kNumDTypes ? names[dtype] : "?";
}

bool HasScales(uint32_t dtype) {
  return dtype == kI8 || dtype == kI4 || dtype == kF8 || dtype == kF4;
}

struct Fd {
  explicit Fd(int value) : value(value) {}
  ~Fd() {
    if (value >= 0) close(value);
  }
  int value;
};

}  // namespace

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

PaddedShape PaddedShapeOf(const TensorRecord& tensor) {
  if (tensor.layout == kRowMajor) return {tensor.rows, tensor.cols, 1};
  const uint64_t cols = RoundUp(tensor.cols, Step(tensor.layout));
  const uint64_t groups = tensor.group_size == 0 ? 1 : tensor.cols / tensor.group_size;
  return {RoundUp(tensor.rows, kTile), cols, groups};
}

uint64_t DataBytesOf(const TensorRecord& tensor) {
  const PaddedShape shape = PaddedShapeOf(tensor);
  const uint64_t elements = shape.rows * shape.cols;
  switch (tensor.dtype) {
    case kF32:
      return elements * 4;
    case kBF16:
    case kF16:
      return elements * 2;
    case kI8:
    case kF8:
      return elements;
    default:
      return elements / 2;
  }
}

std::unique_ptr<Plan> Plan::Open(const std::string& path) {
  const Fd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (fd.value < 0) {
    throw StatusError(PSM_ERROR_ENGINE_FILE,
                      Format("cannot open the plan %s: %s; give the path of targets/cpu/model.plan",
                             path.c_str(), strerror(errno)));
  }
  struct stat info;
  if (fstat(fd.value, &info) != 0 || !S_ISREG(info.st_mode)) Fail(path, "is not a regular file");
  const uint64_t bytes = static_cast<uint64_t>(info.st_size);
  if (bytes < sizeof(PlanHeader)) {
    Fail(path, Format("has %llu bytes, a plan's header alone has %zu",
                      static_cast<unsigned long long>(bytes), sizeof(PlanHeader)));
  }
  void* base = mmap(nullptr, bytes, PROT_READ, MAP_SHARED, fd.value, 0);
  if (base == MAP_FAILED) {
    throw StatusError(PSM_ERROR_OUT_OF_MEMORY, Format("cannot map the %llu bytes of %s: %s",
                                                      static_cast<unsigned long long>(bytes),
                                                      path.c_str(), strerror(errno)));
  }
  std::unique_ptr<Plan> plan(new Plan(path, static_cast<const uint8_t*>(base), bytes));
  plan->CheckFile();
  plan->CheckModel();
  plan->CheckTensors();
  CheckOps(*plan);
  madvise(base, bytes, MADV_WILLNEED);
  return plan;
}

Plan::~Plan() { munmap(const_cast<uint8_t*>(base_), bytes_); }

void Plan::CheckFile() const {
  const PlanHeader& h = header();
  if (memcmp(h.magic, kPlanMagic, sizeof(kPlanMagic)) != 0) {
    Fail(path_, "does not begin with PSMPLAN: it is not a plansmith cpu plan");
  }
  if (h.format_version != kPlanFormatVersion) {
    Fail(path_, Format("has plan format version %u, this library reads version %u",
                       h.format_version, kPlanFormatVersion));
  }
  PlanHeader copy = h;
  copy.header_crc32 = 0;
  if (Crc32(&copy, sizeof(copy)) != h.header_crc32) {
    Fail(path_, Format("header has crc32 %08x, it should have %08x: the file is damaged",
                       Crc32(&copy, sizeof(copy)), h.header_crc32));
  }
  if (h.file_bytes != bytes_) {
    Fail(path_, Format("has %zu bytes, its header says %llu: the file was cut or appended to",
                       bytes_, static_cast<unsigned long long>(h.file_bytes)));
  }
  for (uint32_t word : h.reserved) {
    if (word != 0) Fail(path_, "has non-zero reserved header words: a newer plansmith wrote it");
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
  if (h.data_offset > bytes_ || h.data_offset < sizeof(PlanHeader) || h.data_offset % kAlign != 0) {
    Fail(path_, Format("data begins at byte %llu, wanted a multiple of 64 within the file",
                       static_cast<unsigned long long>(h.data_offset)));
  }
  for (const auto& t : tables) {
    if (t.offset % kAlign != 0 || t.offset < sizeof(PlanHeader) || t.offset > h.data_offset) {
      Fail(path_, Format("%s begins at byte %llu, wanted a multiple of 64 between header and data",
                         t.name, static_cast<unsigned long long>(t.offset)));
    }
    if (t.count > (t.record == 1 ? bytes_ : kMaxRecords) ||
        t.count * t.record > h.data_offset - t.offset) {
      Fail(path_, Format("%s has %llu records, more than lie between it and the data", t.name,
                         static_cast<unsigned long long>(t.count)));
    }
  }
  const uint32_t crc = Crc32(base_ + sizeof(PlanHeader), h.data_offset - sizeof(PlanHeader));
  if (crc != h.tables_crc32) {
    Fail(path_, Format("tables have crc32 %08x, the header says %08x: the file is damaged", crc,
                       h.tables_crc32));
  }
  if (h.strings_bytes == 0 || base_[h.strings_offset + h.strings_bytes - 1] != 0) {
    Fail(path_, "string table does not end with a NUL");
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
      Fail(path_, Format("%s is %d, wanted %d to %d", r.name, r.value, r.low, r.high));
    }
  }
  if (h.kv_format > kKvI8) {
    Fail(path_, Format("kv_format is %u, wanted 0 (F32), 1 (F8) or 2 (I8)", h.kv_format));
  }
  if ((h.tokens_per_block & (h.tokens_per_block - 1)) != 0) {
    Fail(path_, Format("tokens_per_block is %d, wanted a power of two", h.tokens_per_block));
  }
  if (h.num_heads % h.num_kv_heads != 0) {
    Fail(path_,
         Format("num_heads %d is not a multiple of num_kv_heads %d", h.num_heads, h.num_kv_heads));
  }
  for (uint32_t i = 0; i < h.num_slots; ++i) {
    if (slot(i).rows > kRowsLogits) {
      Fail(path_, Format("slot %u has rows kind %u, wanted 0 (tokens) or 1 (logits rows)", i,
                         slot(i).rows));
    }
    if (slot(i).width == 0 || slot(i).width > kMaxExtent) {
      Fail(path_,
           Format("slot %u is %u columns wide, wanted 1 to %u", i, slot(i).width, kMaxExtent));
    }
  }
  if (h.logits_slot >= h.num_slots || slot(h.logits_slot).rows != kRowsLogits ||
      slot(h.logits_slot).width != static_cast<uint32_t>(h.vocab_size)) {
    Fail(path_, Format("logits_slot %u is not a slot of logits rows with vocab_size = %d columns",
                       h.logits_slot, h.vocab_size));
  }
}

void Plan::CheckTensors() const {
  for (uint32_t i = 0; i < header().num_tensors; ++i) {
    const TensorRecord& t = tensor(i);
    if (t.name >= header().strings_bytes) {
      Fail(path_, Format("tensor %u has its name at byte %u of %llu bytes of strings", i, t.name,
                         static_cast<unsigned long long>(header().strings_bytes)));
    }
    const std::string who = Format("tensor %u (%s) ", i, string(t.name));
    CheckShape(t, who);
    CheckSections(t, who);
  }
}

void Plan::CheckShape(const TensorRecord& t, const std::string& who) const {
  const bool pairs[kNumDTypes][4] = {// kRowMajor, N16, N16K4, N16K8
                                     {true, true, false, false},  {true, true, false, false},
                                     {false, false, true, false}, {false, false, false, true},
                                     {true, true, false, false},  {false, true, false, false},
                                     {false, false, false, true}};
  if (t.dtype >= kNumDTypes || t.layout > kPackedN16K8 || !pairs[t.dtype][t.layout]) {
    Fail(path_, who + Format("has dtype %u (%s) in layout %u, which do not go together", t.dtype,
                             DTypeName(t.dtype), t.layout));
  }
  if (t.rows == 0 || t.cols == 0 || t.rows > kMaxExtent || t.cols > kMaxExtent) {
    Fail(path_, who + Format("is %u x %u, wanted 1 to %u each way", t.rows, t.cols, kMaxExtent));
  }
  if (!HasScales(t.dtype) && t.group_size != 0) {
    Fail(path_,
         who + Format("has group_size %u, only I8, I4, F8 and F4 have groups", t.group_size));
  }
  if (t.group_size != 0 && (t.cols % t.group_size != 0 || t.group_size % Step(t.layout) != 0)) {
    Fail(path_, who + Format("has group_size %u, wanted a divisor of its %u columns that is a "
                             "multiple of %u",
                             t.group_size, t.cols, Step(t.layout)));
  }
  if (t.dtype == kF4 && t.group_size != kF4Group) {
    Fail(path_, who + Format("is F4 with group_size %u, wanted %u", t.group_size, kF4Group));
  }
  // An int32 sum of a group must not overflow: 255 * 128 * 65536 < 2^31.
  const uint64_t longest = t.group_size != 0 ? t.group_size : PaddedShapeOf(t).cols;
  if ((t.dtype == kI8 || t.dtype == kI4) && longest > 65536) {
    Fail(path_, who + Format("sums %llu products in one group, more than the 65536 that are safe "
                             "in 32 bits",
                             static_cast<unsigned long long>(longest)));
  }
  const bool scaled = t.dtype == kF4;
  if (!isfinite(t.outer_scale) || (scaled ? t.outer_scale <= 0 : t.outer_scale != 1)) {
    Fail(path_, who + Format("has outer_scale %g, wanted %s", static_cast<double>(t.outer_scale),
                             scaled ? "a number above 0" : "1: only F4 has one"));
  }
  if (t.reserved != 0) {
    Fail(path_, who + "has a non-zero reserved word: a newer plansmith wrote it");
  }
}

void Plan::CheckSections(const TensorRecord& t, const std::string& who) const {
  const PaddedShape shape = PaddedShapeOf(t);
  const uint64_t num_scales = HasScales(t.dtype) ? shape.rows * shape.num_groups : 0;
  const bool has_zeros = t.dtype == kI4 && (t.zeros_bytes != 0 || t.zeros_offset != 0);
  const struct {
    const char* name;
    uint64_t offset, bytes, wanted;
  } sections[] = {
      {"data", t.data_offset, t.data_bytes, DataBytesOf(t)},
      {"scales", t.scales_offset, t.scales_bytes, num_scales * (t.dtype == kF4 ? 1 : 4)},
      {"zero points", t.zeros_offset, t.zeros_bytes, has_zeros ? num_scales * 4 : 0},
  };
  for (const auto& b : sections) {
    if (b.wanted == 0 && b.offset == 0 && b.bytes == 0) continue;
    if (b.wanted == 0) {
      Fail(path_,
           who + Format("is %s and has %s, which do not go together", DTypeName(t.dtype), b.name));
    }
    if (b.bytes != b.wanted) {
      Fail(path_, who + Format("has %llu bytes of %s, its shape wants %llu",
                               static_cast<unsigned long long>(b.bytes), b.name,
                               static_cast<unsigned long long>(b.wanted)));
    }
    if (b.offset % kAlign != 0 || b.offset < header().data_offset || b.offset > bytes_ ||
        b.bytes > bytes_ - b.offset) {
      Fail(path_, who + Format("has %s at byte %llu, wanted a multiple of 64 with all of it in "
                               "the file's data",
                               b.name, static_cast<unsigned long long>(b.offset)));
    }
  }
}

}  // namespace cpu
}  // namespace plansmith
