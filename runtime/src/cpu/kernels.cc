// The choice of an instruction set, and what needs none.
//
// SPDX-License-Identifier: Apache-2.0
#include "cpu/kernels.h"

#include <string.h>

#include <string>

#include "status.h"

namespace plansmith {
namespace cpu {
namespace {

struct Isa {
  const KernelTable* table;
  bool usable;
};

// Best first.
const Isa* Isas(size_t* count) {
#if defined(__x86_64__)
  static const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  static const bool vnni =
      avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vnni");
  static const Isa isas[] = {
      {&kAvx512VnniKernels, vnni}, {&kAvx2Kernels, avx2}, {&kPortableKernels, true}};
#else
  static const Isa isas[] = {{&kPortableKernels, true}};
#endif
  *count = sizeof(isas) / sizeof(isas[0]);
  return isas;
}

float Bf16ToFloat(uint16_t x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float r;
  memcpy(&r, &bits, sizeof(r));
  return r;
}

}  // namespace

const char* UsableIsaNames() {
  static const std::string names = [] {
    std::string all;
    size_t count;
    const Isa* isas = Isas(&count);
    for (size_t i = 0; i < count; ++i) {
      if (!isas[i].usable) continue;
      all += (all.empty() ? "" : ", ") + std::string(isas[i].table->name);
    }
    return all;
  }();
  return names.c_str();
}

const KernelTable& ChooseKernels(const char* isa) {
  size_t count;
  const Isa* isas = Isas(&count);
  for (size_t i = 0; i < count; ++i) {
    if (isa == nullptr ? isas[i].usable : strcmp(isa, isas[i].table->name) == 0) {
      if (isas[i].usable) return *isas[i].table;
      throw StatusError(PSM_ERROR_UNSUPPORTED,
                        Format("isa is \"%s\", which this machine cannot run; it can run %s", isa,
                               UsableIsaNames()));
    }
  }
  throw StatusError(
      PSM_ERROR_INVALID_ARGUMENT,
      Format("isa is \"%s\", which this library does not have; this machine can run %s", isa,
             UsableIsaNames()));
}

size_t AttentionScratchFloats(uint32_t num_queries, uint32_t head_dim) {
  const size_t padded_dim = (head_dim + 15) / 16 * 16;
  return num_queries * (padded_dim + head_dim + kAttentionUnit + 16 + 3);
}

void DequantizeRow(const PackedMatrix& table, uint32_t layout, uint32_t row, float factor,
                   float* out) {
  const size_t k = table.cols, padded = table.padded_cols;
  const size_t tile = row / kTile, lane = row % kTile;
  if (table.dtype == kF32 || table.dtype == kBF16) {
    const size_t first = layout == kRowMajor ? row * k : tile * padded * kTile + lane;
    const size_t step = layout == kRowMajor ? 1 : kTile;
    for (size_t i = 0; i < k; ++i) {
      const size_t at = first + i * step;
      out[i] = factor * (table.dtype == kF32
                             ? static_cast<const float*>(table.data)[at]
                             : Bf16ToFloat(static_cast<const uint16_t*>(table.data)[at]));
    }
    return;
  }
  const float* scales =
      static_cast<const float*>(table.scales) + tile * table.num_groups * kTile + lane;
  const size_t step = table.dtype == kI8 ? 4 : 8;  // k of one 64-byte line
  const uint8_t* lines = static_cast<const uint8_t*>(table.data) + tile * (padded / step) * 64;
  for (size_t i = 0; i < k; ++i) {
    const uint8_t byte = lines[i / step * 64 + lane * 4 + i % 4];
    const int value = table.dtype == kI8 ? static_cast<int8_t>(byte)
                      : i % step < 4     ? (byte & 15) - 8
                                         : (byte >> 4) - 8;
    out[i] = static_cast<float>(value) * scales[i / table.group_cols * kTile] * factor;
  }
}

}  // namespace cpu
}  // namespace plansmith
