// Zeroed memory straight from the operating system: pages that are never touched cost nothing.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>

#include <cstddef>
#include <utility>

#include "status.h"

namespace plansmith {
namespace cpu {

constexpr size_t kHugePageBytes = 2u << 20;  // of x86-64, and of arm64 with 4 KiB pages

inline size_t RoundUp(size_t value, size_t step) { return (value + step - 1) / step * step; }

class Pages {
 public:
  Pages() = default;
  // Throws StatusError(PSM_ERROR_OUT_OF_MEMORY) naming `what`. Aligned to a page; from the size of
  // a huge page on to that, since the system gives huge pages only where they lie whole.
  Pages(size_t bytes, const char* what) {
    if (bytes == 0) return;
    const size_t slack = bytes < kHugePageBytes ? 0 : kHugePageBytes;
    uint8_t* base = slack > SIZE_MAX - bytes ? nullptr : Map(bytes + slack);
    if (base == nullptr) {
      throw StatusError(
          PSM_ERROR_OUT_OF_MEMORY,
          Format("cannot get %zu bytes for %s: %s; free memory, or lower max_num_tokens or "
                 "kv_cache_bytes",
                 bytes, what, strerror(ENOMEM)));
    }
    const size_t skip = slack == 0 ? 0 : -reinterpret_cast<uintptr_t>(base) % kHugePageBytes;
    mapped_ = base;
    mapped_bytes_ = bytes + slack;
    base_ = base + skip;
#if defined(MADV_HUGEPAGE)
    // Fewer TLB misses; a refusal costs speed only. The slack is virtual and never touched, but for
    // what the last huge page takes of it.
    madvise(base_, mapped_bytes_ - skip, MADV_HUGEPAGE);
#endif
  }
  ~Pages() {
    if (mapped_ != nullptr) munmap(mapped_, mapped_bytes_);
  }
  Pages(Pages&& other) noexcept { *this = std::move(other); }
  Pages& operator=(Pages&& other) noexcept {
    std::swap(mapped_, other.mapped_);
    std::swap(mapped_bytes_, other.mapped_bytes_);
    std::swap(base_, other.base_);
    return *this;
  }

  // Has the system give the first `bytes` of them now; they stay zero. Where it cannot (Linux
  // before 5.14, other systems), they come when first touched.
  void Populate(size_t bytes) const {
#if defined(__linux__)
    constexpr int kPopulateWrite = 23;  // MADV_POPULATE_WRITE, which older headers lack
    if (base_ != nullptr) madvise(base_, bytes, kPopulateWrite);
#else
    static_cast<void>(bytes);
#endif
  }

  template <typename T>
  T* as() const {
    return static_cast<T*>(static_cast<void*>(base_));
  }

 private:
  static uint8_t* Map(size_t bytes) {
    void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return base == MAP_FAILED ? nullptr : static_cast<uint8_t*>(base);
  }

  uint8_t* mapped_ = nullptr;
  size_t mapped_bytes_ = 0;
  uint8_t* base_ = nullptr;
};

}  // namespace cpu
}  // namespace plansmith
