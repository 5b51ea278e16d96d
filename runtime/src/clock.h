// The machine's clock, CLOCK_MONOTONIC. What users see is in the engine's (EngineConfig::NowNs),
// which may be the executor's own.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <time.h>

#include <cstdint>

namespace plansmith {

inline int64_t NowNs() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t{now.tv_sec} * 1000000000 + now.tv_nsec;
}

}  // namespace plansmith
