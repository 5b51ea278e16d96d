// Where a plan file's bytes are while it is used: mapped from the file, or in huge pages of this
// process's own, read before the first step or while steps already run.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cpu/pages.h"
#include "cpu/plan_prefetch.h"

namespace plansmith {
namespace cpu {

// psm_cpu_options.weights. A step reads all weights once, and with pages of 4 KiB the page walks
// alone cost it 15 to 20 %. A mapping is shared by all processes that have it and takes no time to
// make; the file system may back it with huge pages (ext4 of Linux 6.16, XFS). Memory of one's own
// always has them.
enum class WeightsIn : int32_t {
  kAuto = 0,       // mapped and read ahead while steps run; what the file system then has in small
                   // pages is moved into huge ones of one's own, piece by piece, where the system
                   // offers them and has the memory
  kMapped = 1,     // read ahead while steps run
  kHugePages = 2,  // all of it read before LoadAll returns; an error where there are none
};

// Owns file descriptor, mapping and memory. Its data never changes once it is loaded, any thread.
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
  // Whether all of it is in huge pages by now, but for kMapped, where nobody asks; in those that
  // the system gave, for it may have none left.
  bool in_huge_pages() const;

  // Makes the first `bytes` of the file readable, at most all: before it the rest of them is zeros,
  // or what the file has. Throws ENGINE_FILE when the file cannot be read or has become shorter.
  void LoadUpTo(size_t bytes);
  // Makes all of it readable: where it is read, with several threads.
  void LoadAll();
  // Brings what is mapped into memory in this order, on a thread that ends by itself or with this
  // object; of a file that is cut short, tables_bytes at its beginning are left alone. Once, after
  // LoadAll.
  void Prefetch(const std::vector<ByteRange>& order, size_t tables_bytes);
  // Throws ENGINE_FILE once that thread has found the file cut short or unreadable. Any thread.
  void ThrowIfLost() const {
    if (prefetch_ != nullptr) prefetch_->ThrowIfLost();
  }
  // NULL before Prefetch, and where nothing is to be done.
  const PlanPrefetch* prefetch() const { return prefetch_.get(); }

 private:
  void Map();
  bool WantsMemory(WeightsIn weights) const;
  void Read(size_t from, size_t to) const;

  const std::string path_;
  int fd_ = -1;
  uint8_t* base_ = nullptr;
  size_t bytes_ = 0;
  size_t loaded_ = 0;
  bool is_read_ = false;   // into memory_, before it is used
  bool is_moved_ = false;  // into huge pages, while it is, where it is in small ones
  Pages memory_;
  std::unique_ptr<PlanPrefetch> prefetch_;  // ends before the mapping does
};

}  // namespace cpu
}  // namespace plansmith
