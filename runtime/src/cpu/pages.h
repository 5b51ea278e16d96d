// Zeroed memory straight from the operating system: pages that are never touched cost nothing.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <errno.h>
#include <string.h>
#include <sys/mman.h>

#include <cstddef>
#include <utility>

#include "status.h"

namespace plansmith {
namespace cpu {

class Pages {
 public:
  Pages() = default;
  // Throws StatusError(PSM_ERROR_OUT_OF_MEMORY) naming `what`. Aligned to a page.
  Pages(size_t bytes, const char* what) : bytes_(bytes) {
    if (bytes == 0) return;
    void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED) {
      bytes_ = 0;
      throw StatusError(PSM_ERROR_OUT_OF_MEMORY,
                        Format("cannot get %zu bytes for %s: %s; lower the limits or free memory",
                               bytes, what, strerror(errno)));
    }
    base_ = base;
#if defined(MADV_HUGEPAGE)
    madvise(base, bytes, MADV_HUGEPAGE);  // fewer TLB misses; a refusal costs speed only
#endif
  }
  ~Pages() {
    if (base_ != nullptr) munmap(base_, bytes_);
  }
  Pages(Pages&& other) noexcept
      : base_(std::exchange(other.base_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  Pages& operator=(Pages&& other) noexcept {
    std::swap(base_, other.base_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }

  template <typename T>
  T* as() const {
    return static_cast<T*>(base_);
  }

 private:
  void* base_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace cpu
}  // namespace plansmith
