// SPDX-License-Identifier: Apache-2.0
#include "cpu/plan_memory.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "cpu/control_groups.h"
#include "cpu/plan.h"
#include "cpu/plan_prefetch.h"
#include "cpu/thread_pool.h"
#include "status.h"

namespace plansmith {
namespace cpu {
namespace {

// A thread copies a file's cached pages into fresh memory at 2-4 GB/s, most of it spent on zeroing
// that memory first, so a few threads read at once.
constexpr size_t kPieceBytes = 4 * kHugePageBytes;
constexpr size_t kMaxReaders = 8;
bool HugePagesOffered() {
  const std::string text = SmallFile("/sys/kernel/mm/transparent_hugepage/enabled");
  return text.find("[madvise]") != std::string::npos || text.find("[always]") != std::string::npos;
}

// Gives back what lies around `bytes` at begin + skip, of bytes + slack in all.
void UnmapSlack(uint8_t* begin, size_t skip, size_t bytes, size_t slack) {
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t end = RoundUp(skip + bytes, page), all = RoundUp(bytes + slack, page);
  if (skip > 0) munmap(begin, skip);
  if (end < all) munmap(begin + end, all - end);
}

// What a path is that is no regular file.
const char* KindOf(mode_t mode) {
  if (S_ISDIR(mode)) return "a directory";
  if (S_ISFIFO(mode)) return "a FIFO";
  return "a device";
}

}  // namespace

PlanMemory::PlanMemory(const std::string& path, size_t min_bytes, WeightsIn weights)
    // Without O_NONBLOCK the open of a FIFO waits for a writer; a regular file ignores it.
    : path_(path), fd_(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)) {
  if (fd_ < 0) {
    throw StatusError(PSM_ERROR_ENGINE_FILE,
                      Format("cannot open the plan %s: %s; give the path of targets/cpu/model.plan",
                             path.c_str(), strerror(errno)));
  }
  try {
    struct stat info;
    if (fstat(fd_, &info) != 0) FailPlan(path, Format("cannot be read: %s", strerror(errno)));
    if (!S_ISREG(info.st_mode)) {
      FailPlan(path, Format("is %s, not a regular file", KindOf(info.st_mode)));
    }
    bytes_ = static_cast<size_t>(info.st_size);
    if (bytes_ < min_bytes) {
      FailPlan(path, Format("has %zu bytes, a plan's header alone has %zu", bytes_, min_bytes));
    }
    const bool wants_memory = WantsMemory(weights);
    is_read_ = wants_memory && weights == WeightsIn::kHugePages;
    is_moved_ = wants_memory && !is_read_;
    if (is_read_) {
      memory_ = Pages(bytes_, "the weights");
      base_ = memory_.as<uint8_t>();
    } else {
      Map();
    }
    LoadUpTo(min_bytes);
  } catch (...) {
    close(fd_);
    throw;
  }
}

PlanMemory::~PlanMemory() {
  prefetch_.reset();
  if (fd_ >= 0) close(fd_);
  if (base_ != nullptr && !is_read_) munmap(base_, bytes_);
}

bool PlanMemory::in_huge_pages() const {
  return is_read_ || (is_moved_ && prefetch_ != nullptr &&
                      prefetch_->moved_bytes() + prefetch_->kept_bytes() == bytes_);
}

// At a multiple of a huge page, so that those of the file and our own fit in.
void PlanMemory::Map() {
  const size_t slack = bytes_ < kHugePageBytes ? 0 : kHugePageBytes;
  void* base =
      mmap(nullptr, bytes_ + slack, slack == 0 ? PROT_READ : PROT_NONE,
           slack == 0 ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS, slack == 0 ? fd_ : -1, 0);
  if (base != MAP_FAILED && slack > 0) {
    uint8_t* const begin = static_cast<uint8_t*>(base);
    const size_t skip = -reinterpret_cast<uintptr_t>(begin) % kHugePageBytes;
    base = mmap(begin + skip, bytes_, PROT_READ, MAP_SHARED | MAP_FIXED, fd_, 0);
    if (base == MAP_FAILED) munmap(begin, bytes_ + slack);
    if (base != MAP_FAILED) UnmapSlack(begin, skip, bytes_, slack);
  }
  if (base == MAP_FAILED) {
    throw StatusError(PSM_ERROR_OUT_OF_MEMORY, Format("cannot map the %zu bytes of %s: %s", bytes_,
                                                      path_.c_str(), strerror(errno)));
  }
  base_ = static_cast<uint8_t*>(base);
#if defined(MADV_HUGEPAGE)
  madvise(base_, bytes_,
          MADV_HUGEPAGE);  // what is not cached yet comes in huge pages, where it can
#endif
}

bool PlanMemory::WantsMemory(WeightsIn weights) const {
  const bool must = weights == WeightsIn::kHugePages;
  if (weights == WeightsIn::kMapped) return false;
  if (!must && bytes_ < kHugePageBytes) return false;
  if (!HugePagesOffered()) {
    if (!must) return false;
    throw StatusError(PSM_ERROR_UNSUPPORTED,
                      "this system offers no huge pages for the weights; write madvise into "
                      "/sys/kernel/mm/transparent_hugepage/enabled, or leave weights at auto");
  }
  const uint64_t available = AvailableBytes();
  if (!must && bytes_ + std::max(kSpareBytes, bytes_ / 8) > available) return false;
  if (bytes_ > available) {
    throw StatusError(
        PSM_ERROR_OUT_OF_MEMORY,
        Format("the weights of %s take %zu bytes, %llu are available; free memory, or "
               "leave weights at auto to map the file",
               path_.c_str(), bytes_, static_cast<unsigned long long>(available)));
  }
  return true;
}

void PlanMemory::Read(size_t from, size_t to) const {
  while (from < to) {
    const ssize_t n = pread(fd_, memory_.as<uint8_t>() + from, to - from, static_cast<off_t>(from));
    if (n > 0) {
      from += static_cast<size_t>(n);
    } else if (n == 0) {
      FailPlan(path_, Format("ends at byte %zu, it had %zu when it was opened: it was cut while it "
                             "was read",
                             from, bytes_));
    } else if (errno != EINTR) {
      FailPlan(path_, Format("cannot be read at byte %zu: %s", from, strerror(errno)));
    }
  }
}

void PlanMemory::LoadUpTo(size_t bytes) {
  bytes = std::min(bytes, bytes_);
  if (!is_read_ || bytes <= loaded_) return;
  Read(loaded_, bytes);
  loaded_ = bytes;
}

void PlanMemory::LoadAll() {
  if (!is_read_ || loaded_ == bytes_) return;
  std::atomic<size_t> next{loaded_ / kPieceBytes};
  std::mutex mutex;
  std::exception_ptr error;
  const auto read_pieces = [&] {
    try {
      for (size_t i; (i = next.fetch_add(1) * kPieceBytes) < bytes_;) {
        Read(std::max(i, loaded_), std::min(bytes_, i + kPieceBytes));
      }
    } catch (...) {
      next.store(bytes_);  // the others stop
      std::lock_guard<std::mutex> lock(mutex);
      if (error == nullptr) error = std::current_exception();
    }
  };
  const size_t pieces = (bytes_ + kPieceBytes - 1) / kPieceBytes;
  const size_t readers = std::min({pieces, kMaxReaders, static_cast<size_t>(NumUsableCores())});
  std::vector<std::thread> others;
  others.reserve(readers);
  try {
    while (others.size() + 1 < readers) others.emplace_back(read_pieces);
  } catch (const std::system_error&) {
    // Fewer threads read, if no more can be started.
  }
  read_pieces();
  for (std::thread& thread : others) thread.join();
  if (error != nullptr) std::rethrow_exception(error);
  loaded_ = bytes_;
}

void PlanMemory::Prefetch(const std::vector<ByteRange>& order, size_t tables_bytes) {
  if (is_read_) {
    close(fd_);
  } else if (bytes_ < kHugePageBytes) {
    madvise(base_, bytes_, MADV_WILLNEED);
    close(fd_);
  } else {
    using Into = PlanPrefetch::Into;
    prefetch_ = std::make_unique<PlanPrefetch>(path_, fd_, base_, bytes_, tables_bytes,
                                               PiecesInOrder(order, bytes_, kPieceBytes),
                                               is_moved_ ? Into::kHugePages : Into::kPageCache);
  }
  fd_ = -1;
}

}  // namespace cpu
}  // namespace plansmith
