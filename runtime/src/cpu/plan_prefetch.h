// Fills the mapping of a plan while steps already read it: from the disk, in the order of use, and
// where asked for into huge pages of this process's own.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

namespace plansmith {
namespace cpu {

class Plan;

// What is left for pools and activations, which are touched later, where nobody insists on having
// the weights in memory.
constexpr size_t kSpareBytes = 256u << 20;

// Bytes that this process can still take without others losing theirs, as far as the system tells.
uint64_t AvailableBytes();

// Bytes [begin, end) of a file.
struct ByteRange {
  size_t begin, end;
};

// What steps read of a checked plan, in the order in which they do: its tables, each op's tensors,
// then the embeddings, of which a step reads some rows only, unless a product uses them as well.
std::vector<ByteRange> OrderOfUse(const Plan& plan);

// A file of `bytes` as pieces that begin at multiples of a huge page and have at most `most` bytes,
// a multiple of that: those that `order` touches as it does, then the others. Each byte is in one.
std::vector<ByteRange> PiecesInOrder(const std::vector<ByteRange>& order, size_t bytes,
                                     size_t most);

// A thread that goes through the pieces of a mapped file and ends by itself. The bytes at `base`
// are right at every moment, on all threads, but for a file that is cut short meanwhile.
class PlanPrefetch {
 public:
  enum class Into {
    kPageCache,  // reads all pieces into the system's cache and maps them
    kHugePages,  // then has what the file system did not map in huge pages itself copied into ones
                 // of this process, which take the mapping's place: the kernel moves the entries of
                 // the page table
  };

  // `base` is where all `bytes` of the file at fd are mapped, readable, aligned to a huge page, and
  // stays so until this object is gone; the file is closed with it. Of a file that is cut short,
  // `tables_bytes` at the beginning are left alone. Without memory for copies, or another thread,
  // the mapping stays as it is.
  PlanPrefetch(std::string path, int fd, uint8_t* base, size_t bytes, size_t tables_bytes,
               std::vector<ByteRange> pieces, Into into);
  // Waits for the piece at hand at most.
  ~PlanPrefetch();
  PlanPrefetch(const PlanPrefetch&) = delete;
  PlanPrefetch& operator=(const PlanPrefetch&) = delete;

  // Throws StatusError(PSM_ERROR_ENGINE_FILE) once the file was found cut short or unreadable: from
  // then on zeros are in its place.
  void ThrowIfLost() const {
    if (is_lost_.load(std::memory_order_acquire)) ThrowLost();
  }
  // Whether the thread has ended.
  bool is_done() const { return is_done_.load(std::memory_order_acquire); }
  // Of kHugePages: bytes that were moved by now, and those left, being in huge pages as they are.
  size_t moved_bytes() const { return moved_bytes_.load(std::memory_order_acquire); }
  size_t kept_bytes() const { return kept_bytes_.load(std::memory_order_acquire); }

 private:
  void Run();
  void MoveAll();
  bool TakeSource();
  bool Touch(const ByteRange& piece);
  bool IsHuge(const ByteRange& piece) const;
  bool Move(const ByteRange& piece);
  bool Read(const ByteRange& piece);
  bool HasRoom(size_t bytes);
  void Lose(size_t at, int error);
  [[noreturn]] void ThrowLost() const;
  bool stops() const { return stops_.load(std::memory_order_relaxed); }

  const std::string path_;
  const int fd_;
  uint8_t* const base_;
  const size_t bytes_;
  const size_t tables_bytes_;
  const std::vector<ByteRange> pieces_;
  const Into into_;
  std::vector<bool> is_moved_;  // [pieces]
  // Where copies are made, each byte of the file at its own distance from the start: what is moved
  // from there is one mapping again.
  uint8_t* source_ = nullptr;
  int page_map_ = -1;      // /proc/self/pagemap
  size_t checked_at_ = 0;  // moved bytes at which memory was looked at last
  std::atomic<bool> stops_{false};
  std::atomic<bool> is_lost_{false};
  std::atomic<bool> is_done_{false};
  std::atomic<size_t> moved_bytes_{0}, kept_bytes_{0};
  std::string lost_;  // why, before is_lost_
  std::thread thread_;
};

}  // namespace cpu
}  // namespace plansmith
