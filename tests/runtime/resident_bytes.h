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

// 0 where the system does not tell.
inline size_t ResidentBytes() {
  FILE* file = fopen("/proc/self/statm", "r");
  size_t pages = 0, resident = 0;
  if (file == nullptr) return 0;
  CHECK(fscanf(file, "%zu %zu", &pages, &resident) == 2);
  fclose(file);
  return resident * static_cast<size_t>(sysconf(_SC_PAGESIZE));
}
