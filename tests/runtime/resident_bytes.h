// How much memory the process holds now.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <unistd.h>

#include <cstddef>
#include <cstdio>

#include "check.h"

// ThreadSanitizer keeps a shadow of what is touched, which counts as well.
#ifdef __SANITIZE_THREAD__
constexpr bool kHasShadow = true;
#else
constexpr bool kHasShadow = false;
#endif

// Pages that it has mapped, and of them those that it holds; 0 where the system does not tell.
struct Statm {
  size_t mapped = 0, resident = 0;
};
inline Statm ReadStatm() {
  Statm pages;
  FILE* file = fopen("/proc/self/statm", "r");
  if (file == nullptr) return pages;
  CHECK(fscanf(file, "%zu %zu", &pages.mapped, &pages.resident) == 2);
  fclose(file);
  return pages;
}

inline size_t ResidentBytes() {
  return ReadStatm().resident * static_cast<size_t>(sysconf(_SC_PAGESIZE));
}

// Also what was never touched.
inline size_t MappedBytes() {
  return ReadStatm().mapped * static_cast<size_t>(sysconf(_SC_PAGESIZE));
}
