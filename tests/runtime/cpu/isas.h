// The kernel tables that this machine can run, or the one that PLANSMITH_TEST_ISA names.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <stdlib.h>

#include <algorithm>
#include <string>
#include <vector>

#include "cpu/kernels.h"

namespace plansmith {
namespace cpu {

inline std::vector<const KernelTable*> UsableTables() {
  if (const char* only = getenv("PLANSMITH_TEST_ISA")) return {&ChooseKernels(only)};
  std::vector<const KernelTable*> tables;
  const std::string names = UsableIsaNames();
  for (size_t at = 0; at < names.size();) {
    const size_t end = std::min(names.find(", ", at), names.size());
    tables.push_back(&ChooseKernels(names.substr(at, end - at).c_str()));
    at = end + 2;
  }
  return tables;
}

}  // namespace cpu
}  // namespace plansmith
