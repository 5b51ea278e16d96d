// SPDX-License-Identifier: Apache-2.0
#include "cpu/plan_prefetch.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#if defined(__linux__)
#include <pthread.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#endif

#include <algorithm>
#include <new>
#include <system_error>
#include <utility>

#include "cpu/control_groups.h"
#include "cpu/pages.h"
#include "cpu/plan.h"
#include "status.h"

namespace plansmith {
namespace cpu {
namespace {

// The system is asked so often whether there is memory left.
constexpr size_t kCheckBytes = 64u << 20;

#if defined(__linux__)
// Of <linux/mman.h> and <linux/fs.h>, where older headers lack them.
constexpr int kPopulateRead = 22;  // MADV_POPULATE_READ
struct PageRegion {
  uint64_t start, end, categories;
};
struct ScanArguments {
  uint64_t size, flags, start, end, walk_end, regions, num_regions, max_pages;
  uint64_t category_inverted, category_mask, category_anyof_mask, return_mask;
};
constexpr unsigned long kPageMapScan = _IOWR('f', 16, ScanArguments);
constexpr uint64_t kPageIsHuge = 1 << 6;
// While copies are made, steps come first.
constexpr int kMoveNice = 10;
#endif

void Add(uint64_t begin, uint64_t bytes, std::vector<ByteRange>* ranges) {
  if (bytes > 0)
    ranges->push_back({static_cast<size_t>(begin), static_cast<size_t>(begin + bytes)});
}

void AddTensor(const TensorRecord& tensor, std::vector<ByteRange>* ranges) {
  Add(tensor.data_offset, tensor.data_bytes, ranges);
  Add(tensor.scales_offset, tensor.scales_bytes, ranges);
  Add(tensor.zeros_offset, tensor.zeros_bytes, ranges);
}

size_t RoundUpToPage(size_t bytes) {
  return RoundUp(bytes, static_cast<size_t>(sysconf(_SC_PAGESIZE)));
}

}  // namespace

uint64_t AvailableBytes() {
  constexpr uint64_t kNoLimit = UINT64_MAX >> 10;
  const uint64_t kib = NumberIn(SmallFile("/proc/meminfo"), "MemAvailable:", kNoLimit);
  return std::min(kib << 10, GroupMemoryLeft(SmallFile));
}

std::vector<ByteRange> OrderOfUse(const Plan& plan) {
  const PlanHeader& h = plan.header();
  std::vector<ByteRange> ranges = {{0, static_cast<size_t>(h.data_offset)}};
  for (const bool is_embedding : {false, true}) {
    for (uint32_t i = 0; i < h.num_ops; ++i) {
      const OpRecord& op = plan.op(i);
      if ((op.code == kOpEmbed) != is_embedding) continue;
      for (int32_t tensor : op.tensors) {
        // Of an op that takes no tensor, the number may be any.
        const uint32_t idx = static_cast<uint32_t>(tensor);
        if (idx < h.num_tensors) AddTensor(plan.tensor(idx), &ranges);
      }
    }
  }
  return ranges;
}

std::vector<ByteRange> PiecesInOrder(const std::vector<ByteRange>& order, size_t bytes,
                                     size_t most) {
  const size_t num_pages = (bytes + kHugePageBytes - 1) / kHugePageBytes;
  std::vector<bool> is_taken(num_pages);
  std::vector<ByteRange> pieces;
  const auto take = [&](const ByteRange& range) {
    const size_t end = std::min(range.end, bytes);
    for (size_t page = range.begin / kHugePageBytes; page * kHugePageBytes < end; ++page) {
      if (is_taken[page]) continue;
      is_taken[page] = true;
      const size_t from = page * kHugePageBytes, to = std::min(bytes, from + kHugePageBytes);
      if (!pieces.empty() && pieces.back().end == from && to - pieces.back().begin <= most) {
        pieces.back().end = to;
      } else {
        pieces.push_back({from, to});
      }
    }
  };
  for (const ByteRange& range : order) take(range);
  take({0, bytes});
  return pieces;
}

PlanPrefetch::PlanPrefetch(std::string path, int fd, uint8_t* base, size_t bytes,
                           size_t tables_bytes, std::vector<ByteRange> pieces, Into into)
    : path_(std::move(path)),
      fd_(fd),
      base_(base),
      bytes_(bytes),
      tables_bytes_(tables_bytes),
      pieces_(std::move(pieces)),
      into_(into),
      is_moved_(pieces_.size()) {
  try {
    thread_ = std::thread([this] {
      try {
        Run();
      } catch (const std::bad_alloc&) {
        // Without memory even to look how much there is, the mapping stays.
      }
      is_done_.store(true, std::memory_order_release);
    });
  } catch (const std::system_error&) {
    is_done_ = true;  // what steps touch is read all the same
  }
}

PlanPrefetch::~PlanPrefetch() {
  stops_ = true;
  if (thread_.joinable()) thread_.join();
  for (size_t i = 0; source_ != nullptr && i < pieces_.size(); ++i) {
    // What was moved is no longer here, and others may have memory in its place by now.
    if (is_moved_[i]) continue;
    munmap(source_ + pieces_[i].begin, RoundUpToPage(pieces_[i].end - pieces_[i].begin));
  }
  if (page_map_ >= 0) close(page_map_);
  close(fd_);
}

void PlanPrefetch::Run() {
#if defined(__linux__)
  pthread_setname_np(pthread_self(), "psm-prefetch");
#endif
  size_t num_touched = 0;
  // A file that does not fit would push itself out.
  const bool fits = bytes_ <= AvailableBytes();
  for (size_t i = 0; fits && i < pieces_.size() && !stops() && Touch(pieces_[i]); ++i) {
    ++num_touched;
  }
  if (into_ == Into::kHugePages && num_touched == pieces_.size()) MoveAll();
}

void PlanPrefetch::MoveAll() {
#if defined(__linux__)
  setpriority(PRIO_PROCESS, 0, kMoveNice);  // of this thread alone, on Linux
  page_map_ = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
  for (size_t i = 0; i < pieces_.size() && !stops(); ++i) {
    const size_t bytes = pieces_[i].end - pieces_[i].begin;
    if (IsHuge(pieces_[i])) {
      kept_bytes_.fetch_add(bytes, std::memory_order_release);
      continue;
    }
    if (source_ == nullptr && !TakeSource()) return;
    if (!Move(pieces_[i])) return;
    is_moved_[i] = true;
    moved_bytes_.fetch_add(bytes, std::memory_order_release);
  }
#endif
}

// Address space alone; pages come when they are copied into.
bool PlanPrefetch::TakeSource() {
#if defined(__linux__)
  const size_t bytes = RoundUpToPage(bytes_), with_slack = bytes + kHugePageBytes;
  void* taken = mmap(nullptr, with_slack, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (taken == MAP_FAILED) return false;
  uint8_t* const begin = static_cast<uint8_t*>(taken);
  const size_t skip = -reinterpret_cast<uintptr_t>(begin) % kHugePageBytes;
  if (skip > 0) munmap(begin, skip);
  munmap(begin + skip + bytes, kHugePageBytes - skip);
  source_ = begin + skip;
  madvise(source_, bytes, MADV_HUGEPAGE);  // a refusal costs speed only
  return true;
#else
  return false;
#endif
}

// Not readahead() or MADV_WILLNEED where it can be helped: those fill the cache with small pages,
// and a fault in a mapping that asks for huge ones with huge ones, where the file system has them.
bool PlanPrefetch::Touch(const ByteRange& piece) {
#if defined(__linux__)
  if (madvise(base_ + piece.begin, piece.end - piece.begin, kPopulateRead) == 0) return true;
  if (errno == EFAULT) {  // where an access would be a bus error
    Lose(piece.begin, EIO);
    return false;
  }
  if (errno != EINVAL) return false;  // Linux before 5.14 knows no better
#endif
  return madvise(base_ + piece.begin, piece.end - piece.begin, MADV_WILLNEED) == 0;
}

// Whether the mapping's page table has huge pages for it, as far as the system tells (Linux 6.7). A
// tail that fills none is not looked at.
bool PlanPrefetch::IsHuge(const ByteRange& piece) const {
#if defined(__linux__)
  const uint64_t whole = (piece.end - piece.begin) / kHugePageBytes * kHugePageBytes;
  if (whole == 0 || page_map_ < 0) return false;
  PageRegion found = {};
  ScanArguments scan = {};
  scan.size = sizeof(scan);
  scan.start = reinterpret_cast<uintptr_t>(base_ + piece.begin);
  scan.end = scan.start + whole;
  scan.regions = reinterpret_cast<uintptr_t>(&found);
  scan.num_regions = 1;
  scan.category_mask = scan.return_mask = kPageIsHuge;
  return ioctl(page_map_, kPageMapScan, &scan) == 1 && found.start == scan.start &&
         found.end == scan.end;
#else
  static_cast<void>(piece);
  return false;
#endif
}

bool PlanPrefetch::Move(const ByteRange& piece) {
#if defined(__linux__)
  const size_t bytes = RoundUpToPage(piece.end - piece.begin);
  uint8_t* const from = source_ + piece.begin;
  uint8_t* const to = base_ + piece.begin;
  if (!HasRoom(bytes) || !Read(piece)) return false;
  // Others fault meanwhile only to wait for the new pages: the kernel holds the whole map. It looks
  // for what may be missing (mappings, mostly) before it takes the old ones away.
  if (mprotect(from, bytes, PROT_READ) != 0) return false;
  if (mremap(from, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, to) == MAP_FAILED) {
    // Where it did take them, the file comes back; no more is moved.
    mmap(to, bytes, PROT_READ, MAP_SHARED | MAP_FIXED, fd_, static_cast<off_t>(piece.begin));
    return false;
  }
  return true;
#else
  static_cast<void>(piece);
  return false;
#endif
}

// By reading, not from the mapping, where a file that was cut short is a bus error.
bool PlanPrefetch::Read(const ByteRange& piece) {
  for (size_t at = piece.begin; at < piece.end;) {
    const ssize_t n = pread(fd_, source_ + at, piece.end - at, static_cast<off_t>(at));
    if (n > 0) {
      at += static_cast<size_t>(n);
    } else if (n == 0) {
      Lose(at, 0);
      return false;
    } else if (errno != EINTR) {
      Lose(at, errno);
      return false;
    }
  }
  return true;
}

bool PlanPrefetch::HasRoom(size_t bytes) {
  const size_t moved = moved_bytes_.load(std::memory_order_relaxed);
  if (moved != 0 && moved - checked_at_ < kCheckBytes) return true;
  checked_at_ = moved;
  return AvailableBytes() >= bytes + kSpareBytes;
}

// Notes why, then puts zeros where the file was: from here on nobody gets a bus error for it, and
// whoever sees a zero sees after it that the plan is lost.
void PlanPrefetch::Lose(size_t at, int error) {
  struct stat info;
  const bool is_cut = fstat(fd_, &info) == 0 && static_cast<size_t>(info.st_size) < bytes_;
  if (is_cut || error == 0) {
    lost_ = Format("ends at byte %zu, it had %zu when it was opened: it was cut while it was read",
                   is_cut ? static_cast<size_t>(info.st_size) : at, bytes_);
  } else {
    lost_ = Format("cannot be read at byte %zu: %s", at, strerror(error));
  }
  is_lost_.store(true, std::memory_order_release);
  const size_t tables = RoundUpToPage(tables_bytes_);  // ops are looked up there in every step
  for (size_t i = 0; i < pieces_.size(); ++i) {
    const size_t from = std::max(pieces_[i].begin, tables);
    if (is_moved_[i] || from >= pieces_[i].end) continue;
    mmap(base_ + from, RoundUpToPage(pieces_[i].end - from), PROT_READ,
         MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
  }
}

void PlanPrefetch::ThrowLost() const { FailPlan(path_, lost_); }

}  // namespace cpu
}  // namespace plansmith
