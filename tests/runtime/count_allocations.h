// Counts every allocation of the program that includes it, in one source file.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <new>

static std::atomic<int64_t> num_news{0};

// Not inlined: GCC would take malloc and free behind new and delete for a mismatch.
__attribute__((noinline)) void* operator new(size_t size) {
  ++num_news;
  void* p = std::malloc(size == 0 ? 1 : size);
  if (p == nullptr) throw std::bad_alloc();
  return p;
}
__attribute__((noinline)) void operator delete(void* p) noexcept { std::free(p); }
__attribute__((noinline)) void operator delete(void* p, size_t) noexcept { std::free(p); }
