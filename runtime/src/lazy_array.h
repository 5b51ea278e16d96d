// Zeroed arrays of a fixed size that cost memory only where they are touched.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <type_traits>

#include "status.h"

namespace plansmith {

// `size` zeroed elements; the pages of a large array come from the system as they are written.
template <typename T>
class LazyArray {
  static_assert(std::is_trivially_copyable<T>::value, "its elements begin as zero bytes");

 public:
  // Throws OUT_OF_MEMORY naming `what`, and what to do about it.
  LazyArray(size_t size, const char* what, const char* advice = "use fewer or larger KV blocks")
      : size_(size), items_(static_cast<T*>(std::calloc(size == 0 ? 1 : size, sizeof(T)))) {
    if (items_ != nullptr) return;
    throw StatusError(PSM_ERROR_OUT_OF_MEMORY,
                      Format("cannot get %zu x %zu bytes of address space for %s; %s", size,
                             sizeof(T), what, advice));
  }
  size_t size() const { return size_; }
  T& operator[](size_t i) { return items_.get()[i]; }
  const T& operator[](size_t i) const { return items_.get()[i]; }

 private:
  struct Free {
    void operator()(T* items) const { std::free(items); }
  };
  size_t size_;
  std::unique_ptr<T, Free> items_;
};

}  // namespace plansmith
