// A cpu plan file in memory, checked: what Plan::Open returns can be run without another look.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "cpu/plan_format.h"
#include "cpu/plan_memory.h"

namespace plansmith {
namespace cpu {

constexpr uint64_t kPlanAlign = 64;            // bytes, of tables and data blocks
constexpr uint32_t kMaxPlanExtent = 1u << 24;  // rows, columns: keeps products far inside 64 bits

// Throws StatusError(PSM_ERROR_ENGINE_FILE): which rule the plan breaks, and what to do.
[[noreturn]] void FailPlan(const std::string& path, const std::string& what);

// The crc of zlib (polynomial 0xEDB88320), as the header holds it.
uint32_t Crc32(const void* data, size_t size);

// Columns and rows of a matrix as they lie in the file.
struct PaddedShape {
  uint64_t rows;        // N, a multiple of kTile for packed layouts
  uint64_t cols;        // K, a multiple of the layout's k step
  uint64_t num_groups;  // of scales; 1 unless group_size is set
};
PaddedShape PaddedShapeOf(const TensorRecord& tensor);

// Bytes of the data block of a tensor of these (padded) extents; plan_tensors.cc has both.
uint64_t DataBytesOf(const TensorRecord& tensor);

// Owns the file's bytes; everything it hands out lives as long as it does. Immutable, any thread.
class Plan {
 public:
  // Throws StatusError: ENGINE_FILE that names the violated rule; OUT_OF_MEMORY and UNSUPPORTED as
  // PlanMemory does.
  static std::unique_ptr<Plan> Open(const std::string& path, WeightsIn weights = WeightsIn::kAuto);
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;

  const PlanHeader& header() const { return *reinterpret_cast<const PlanHeader*>(at(0)); }
  const SlotRecord& slot(size_t idx) const { return Table<SlotRecord>(header().slots_offset)[idx]; }
  const TensorRecord& tensor(size_t idx) const {
    return Table<TensorRecord>(header().tensors_offset)[idx];
  }
  const OpRecord& op(size_t idx) const { return Table<OpRecord>(header().ops_offset)[idx]; }
  const char* string(uint32_t offset) const {
    return reinterpret_cast<const char*>(at(header().strings_offset + offset));
  }
  const uint8_t* at(uint64_t offset) const { return memory_->base() + offset; }
  const std::string& path() const { return path_; }
  bool in_huge_pages() const { return memory_->in_huge_pages(); }
  const PlanPrefetch* prefetch() const { return memory_->prefetch(); }
  // Throws ENGINE_FILE once its file was found cut short while it was being read: what was computed
  // until now may be wrong.
  void ThrowIfLost() const { memory_->ThrowIfLost(); }

 private:
  Plan(std::string path, std::unique_ptr<PlanMemory> memory)
      : path_(std::move(path)), memory_(std::move(memory)) {}
  size_t bytes() const { return memory_->bytes(); }
  template <typename Record>
  const Record* Table(uint64_t offset) const {
    return reinterpret_cast<const Record*>(at(offset));
  }
  void CheckFile() const;
  void CheckModel() const;
  void CheckTensors() const;
  void CheckShape(const TensorRecord& tensor, const std::string& who) const;
  void CheckSections(const TensorRecord& tensor, const std::string& who) const;

  std::string path_;
  std::unique_ptr<PlanMemory> memory_;
};

// Checks every op against the slots, tensors and the model (plan_check.cc). Throws like Open.
void CheckOps(const Plan& plan);

}  // namespace cpu
}  // namespace plansmith
