// The kernel tables that this machine can run.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string.h>

#include <string>
#include <vector>

#include "cpu/kernels.h"

namespace plansmith {
namespace cpu {

inline std::vector<const KernelTable*> UsableTables() {
  std::vector<const KernelTable*> tables;
  for (const char* name : {"amx", "avx512bf16", "avx512vnni", "avx2", "neon", "portable"}) {
    const std::string all = std::string(", ") + UsableIsaNames() + ",";
    if (all.find(std::string(", ") + name + ",") == std::string::npos) continue;
    tables.push_back(&ChooseKernels(name));
  }
  return tables;
}

}  // namespace cpu
}  // namespace plansmith
