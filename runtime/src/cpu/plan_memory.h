// Where a plan file's bytes are while it is used: mapped from the file, or read into huge pages.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "cpu/pages.h"

namespace plansmith {
namespace cpu {

// psm_cpu_options.weights. A step reads all weights once, and with pages of 4 KiB the page walks
// alone cost it 15 to 20 %. A mapping is shared by all processes that have it and takes no time to
// make; memory of one's own is this process's.
enum class WeightsIn : int32_t {
  kAuto = 0,       // huge pages where the system offers them and has the memory, else the mapping
  kMapped = 1,     //
  kHugePages = 2,  // an error where there are none
};

// Owns file descriptor, mapping and memory. Immutable once its data is loaded, any thread.
class PlanMemory {
 public:
  // Opens the file and makes its first min_bytes readable. Throws StatusError: ENGINE_FILE for a
  // file that cannot be opened, is none or is shorter; OUT_OF_MEMORY; UNSUPPORTED for kHugePages
  // where the system offers none.
  PlanMemory(const std::string& path, size_t min_bytes, WeightsIn weights);
  ~PlanMemory();
  PlanMemory(const PlanMemory&) = delete;
  PlanMemory& operator=(const PlanMemory&) = delete;

  const uint8_t* base() const { return base_; }
  size_t bytes() const { return bytes_; }
  bool in_huge_pages() const { return memory_.as<uint8_t>() != nullptr; }

  // Makes the first `bytes` of the file readable, at most all: before it the rest of them is zeros,
  // or what the file has. Throws ENGINE_FILE when the file cannot be read or has become shorter.
  void LoadUpTo(size_t bytes);
  // All of it, with several threads, and closes the file.
  void LoadAll();

 private:
  void Map();
  bool TakeMemory(WeightsIn weights);
  void Read(size_t from, size_t to) const;

  const std::string path_;
  int fd_ = -1;
  const uint8_t* base_ = nullptr;
  size_t bytes_ = 0;
  size_t loaded_ = 0;
  Pages memory_;
};

}  // namespace cpu
}  // namespace plansmith
