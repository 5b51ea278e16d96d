// The choice of an instruction set, and what needs none.
//
// SPDX-License-Identifier: Apache-2.0
#include "cpu/kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif
#include <string.h>
#if defined(PLANSMITH_HAS_AMX)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <string>

#include "cpu/small_floats.h"
#include "status.h"

namespace plansmith {
namespace cpu {
namespace {

// A table is asked for only where the machine runs it: what makes it may be of that instruction
// set.
struct Isa {
  const char* name;
  const KernelTable* table;  // NULL: not usable
};

#if defined(__x86_64__)
// Not every compiler's __builtin_cpu_supports knows the name.
bool HasF16c() {
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}
#if defined(PLANSMITH_HAS_AMX)
// Tiles and their products of int8. Linux has a process ask once for the state that they take, and
// refuses where a thread's alternate signal stack could not hold it.
bool HasAmx() {
  constexpr unsigned kAmxTile = 1u << 24, kAmxInt8 = 1u << 25, kOsxsave = 1u << 27;
  unsigned a, b, c, d;
  if (__get_cpuid(1, &a, &b, &c, &d) == 0 || (c & kOsxsave) == 0) return false;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0 || (d & kAmxTile) == 0 || (d & kAmxInt8) == 0) {
    return false;
  }
  unsigned enabled, high;
  asm("xgetbv" : "=a"(enabled), "=d"(high) : "c"(0));
  constexpr unsigned kTileState = 3u << 17;  // of the shapes and of the data
  if ((enabled & kTileState) != kTileState) return false;
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#endif
#elif defined(__aarch64__)
// sdot, which came with ARMv8.2 and became mandatory with ARMv8.4.
bool HasDotProducts() {
#if defined(__APPLE__)
  return true;  // every Mac's processor
#elif defined(__linux__)
  constexpr unsigned long kAsimdDp = 1ul << 20;  // HWCAP_ASIMDDP, which old headers lack
  return (getauxval(AT_HWCAP) & kAsimdDp) != 0;
#else
  return false;
#endif
}
#endif

// Best first.
const Isa* Isas(size_t* count) {
#if defined(__x86_64__)
  static const bool avx2 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && HasF16c();
  static const bool vnni =
      avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vnni");
#if defined(PLANSMITH_HAS_AVX512BF16)
  static const bool bf16 =
      vnni && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi");
  static const KernelTable& avx512 = bf16 ? Avx512Bf16Kernels() : kAvx512VnniKernels;
#else
  static const KernelTable& avx512 = kAvx512VnniKernels;
#endif
  static const Isa isas[] = {
#if defined(PLANSMITH_HAS_AMX)
      {"amx", vnni && HasAmx() ? &AmxKernels(avx512) : nullptr},
#endif
#if defined(PLANSMITH_HAS_AVX512BF16)
      {"avx512bf16", bf16 ? &avx512 : nullptr},
#endif
      {"avx512vnni", vnni ? &kAvx512VnniKernels : nullptr},
      {"avx2", avx2 ? &kAvx2Kernels : nullptr},
      {"portable", &kPortableKernels}};
#elif defined(__aarch64__)
  static const Isa isas[] = {{"neon", HasDotProducts() ? &kNeonKernels : nullptr},
                             {"portable", &kPortableKernels}};
#else
  static const Isa isas[] = {{"portable", &kPortableKernels}};
#endif
  *count = sizeof(isas) / sizeof(isas[0]);
  return isas;
}

float F8ToFloat(uint8_t x) { return 256 * F8ToFloat256th(x); }

float F4ToFloat(int code) {
  constexpr float kValues[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  return code >= 8 ? -kValues[code - 8] : kValues[code];
}

// Element `at` of a matrix of single values.
float Plain(const PackedMatrix& m, size_t at) {
  switch (m.dtype) {
    case kF32:
      return static_cast<const float*>(m.data)[at];
    case kBF16:
      return Bf16ToFloat(static_cast<const uint16_t*>(m.data)[at]);
    case kF16:
      return F16ToFloat(static_cast<const uint16_t*>(m.data)[at]);
    default:
      return F8ToFloat(static_cast<const uint8_t*>(m.data)[at]);
  }
}

// Column k of an output in the layouts of several k a line, without its scale.
float FromLine(const PackedMatrix& m, size_t tile, size_t lane, size_t k, float zero) {
  const size_t step = m.dtype == kI8 ? 4 : 8;
  const uint8_t* lines = static_cast<const uint8_t*>(m.data) + tile * (m.padded_cols / step) * 64;
  const uint8_t byte = lines[k / step * 64 + lane * 4 + k % 4];
  if (m.dtype == kI8) return static_cast<int8_t>(byte);
  const int code = k % 8 < 4 ? byte & 15 : byte >> 4;
  return m.dtype == kF4 ? F4ToFloat(code) : static_cast<float>(code) - zero;
}

}  // namespace

const char* UsableIsaNames() {
  static const std::string names = [] {
    std::string all;
    size_t count;
    const Isa* isas = Isas(&count);
    for (size_t i = 0; i < count; ++i) {
      if (isas[i].table == nullptr) continue;
      all += (all.empty() ? "" : ", ") + std::string(isas[i].name);
    }
    return all;
  }();
  return names.c_str();
}

const KernelTable& ChooseKernels(const char* isa) {
  size_t count;
  const Isa* isas = Isas(&count);
  for (size_t i = 0; i < count; ++i) {
    if (isa == nullptr ? isas[i].table != nullptr : strcmp(isa, isas[i].name) == 0) {
      if (isas[i].table != nullptr) return *isas[i].table;
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

size_t AttentionPartFloats(uint32_t num_queries, uint32_t head_dim) {
  const size_t padded = (static_cast<size_t>(num_queries) + 15) / 16 * 16;  // a maximum each
  return padded + num_queries * (16 + (static_cast<size_t>(head_dim) + 15) / 16 * 16);
}

size_t AttentionScratchFloats(uint32_t num_queries, uint32_t head_dim) {
  const size_t padded = (static_cast<size_t>(num_queries) + 15) / 16 * 16;
  const size_t decoded = 2 * (static_cast<size_t>(kAttentionUnit) * head_dim + 16);
  return 2 * AttentionPartFloats(num_queries, head_dim) + 2 * padded +
         num_queries * (kAttentionUnit + 16 + (static_cast<size_t>(head_dim) + 15) / 16 * 16) +
         decoded;
}

void DequantizeRow(const PackedMatrix& table, uint32_t layout, uint32_t row, float factor,
                   float* out) {
  const size_t tile = row / kTile, lane = row % kTile;
  const bool in_lines = layout == kPackedN16K4 || layout == kPackedN16K8;
  const size_t step = layout == kRowMajor ? 1 : kTile;
  const size_t first = layout == kRowMajor ? row * static_cast<size_t>(table.cols)
                                           : tile * table.padded_cols * kTile + lane;
  for (size_t k = 0; k < table.cols; ++k) {
    const size_t scale_at = (tile * table.num_groups + k / table.group_cols) * kTile + lane;
    const float zero = table.zeros == nullptr ? 8.0f : table.zeros[scale_at];
    const float value =
        in_lines ? FromLine(table, tile, lane, k, zero) : Plain(table, first + k * step);
    float scale = 1.0f;
    if (table.dtype == kF4) {
      scale = F8ToFloat(static_cast<const uint8_t*>(table.scales)[scale_at]) * table.outer_scale;
    } else if (table.scale_dtype == kBF16) {
      scale = Bf16ToFloat(static_cast<const uint16_t*>(table.scales)[scale_at]);
    } else if (table.scales != nullptr) {
      scale = static_cast<const float*>(table.scales)[scale_at];
    }
    out[k] = value * scale * factor;
  }
}

}  // namespace cpu
}  // namespace plansmith
