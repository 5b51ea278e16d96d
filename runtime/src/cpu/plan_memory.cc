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
#include "cpu/thread_pool.h"
#include "status.h"

namespace plansmith {
namespace cpu {
namespace {

// A thread copies a file's cached pages into fresh memory at 2-4 GB/s, most of it spent on zeroing
// that memory first, so a few threads read at once.
constexpr size_t kPieceBytes = 4 * kHugePageBytes;
constexpr size_t kMaxReaders = 8;
// Of weights nobody insists on in memory, what is left for pools and activations, which are touched
// later.
constexpr size_t kSpareBytes = 256u << 20;

bool HugePagesOffered() {
  const std::string text = SmallFile("/sys/kernel/mm/transparent_hugepage/enabled");
  return text.find("[madvise]") != std::string::npos || text.find("[always]") != std::string::npos;
}

// Bytes that this process can still take without others losing theirs, as far as the system tells.
uint64_t AvailableBytes() {
  constexpr uint64_t kNoLimit = UINT64_MAX >> 10;
  const uint64_t kib = NumberIn(SmallFile("/proc/meminfo"), "MemAvailable:", kNoLimit);
  return std::min(kib << 10, GroupMemoryLeft(SmallFile));
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
    if (!TakeMemory(weights)) Map();
    LoadUpTo(min_bytes);
  } catch (...) {
    close(fd_);
    throw;
  }
}

PlanMemory::~PlanMemory() {
  if (fd_ >= 0) close(fd_);
  if (base_ != nullptr && !in_huge_pages()) munmap(const_cast<uint8_t*>(base_), bytes_);
}

void PlanMemory::Map() {
  void* base = mmap(nullptr, bytes_, PROT_READ, MAP_SHARED, fd_, 0);
  if (base == MAP_FAILED) {
    throw StatusError(PSM_ERROR_OUT_OF_MEMORY, Format("cannot map the %zu bytes of %s: %s", bytes_,
                                                      path_.c_str(), strerror(errno)));
  }
  base_ = static_cast<const uint8_t*>(base);
}

bool PlanMemory::TakeMemory(WeightsIn weights) {
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
  try {
    memory_ = Pages(bytes_, "the weights");
  } catch (const StatusError&) {
    if (must) throw;
    return false;
  }
  base_ = memory_.as<uint8_t>();
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
  if (!in_huge_pages() || bytes <= loaded_) return;
  Read(loaded_, bytes);
  loaded_ = bytes;
}

void PlanMemory::LoadAll() {
  if (in_huge_pages() && loaded_ < bytes_) {
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
  } else if (!in_huge_pages()) {
    madvise(const_cast<uint8_t*>(base_), bytes_, MADV_WILLNEED);
  }
  close(fd_);
  fd_ = -1;
}

}  // namespace cpu
}  // namespace plansmith
