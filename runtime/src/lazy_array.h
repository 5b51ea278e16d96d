// Zeroed arrays of a fixed size that cost memory only where they are touched.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "status.h"

namespace plansmith {

// `size` zeroed elements; the pages come from the system as they are written. Straight from mmap:
// calloc zeroes what it has used before, and a sanitizer's touches all of it.
template <typename T>
class LazyArray {
  static_assert(std::is_trivially_copyable<T>::value, "its elements begin as zero bytes");

 public:
  // Throws OUT_OF_MEMORY naming `what`, and what to do about it.
  LazyArray(size_t size, const char* what, const char* advice = "use fewer or larger KV blocks")
      : size_(size) {
    const bool fits = size <= SIZE_MAX / sizeof(T);
    void* base = fits ? mmap(nullptr, Bytes(), PROT_READ | PROT_WRITE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)
                      : MAP_FAILED;
    if (base == MAP_FAILED) {
      throw StatusError(PSM_ERROR_OUT_OF_MEMORY,
                        Format("cannot get %zu x %zu bytes of address space for %s; %s", size,
                               sizeof(T), what, advice));
    }
    items_ = static_cast<T*>(base);
  }
  ~LazyArray() { munmap(items_, Bytes()); }
  LazyArray(const LazyArray&) = delete;
  LazyArray& operator=(const LazyArray&) = delete;

  size_t size() const { return size_; }
  T& operator[](size_t i) { return items_[i]; }
  const T& operator[](size_t i) const { return items_[i]; }

 private:
  size_t Bytes() const { return size_ == 0 ? 1 : size_ * sizeof(T); }

  size_t size_;
  T* items_;
};

}  // namespace plansmith
