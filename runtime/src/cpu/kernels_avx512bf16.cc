// Kernels for AVX-512 with BF16 and VBMI: those for AVX-512 with VNNI, but for FP8 weights by int8
// or FP8 inputs. Compiled with those flags, called only where the machine has them.
//
// SPDX-License-Identifier: Apache-2.0
#pragma GCC diagnostic ignored "-Wunused-function"  // kernels of rows: those of kAvx512VnniKernels
#include "cpu/kernels_bf16dot.h"

namespace plansmith {
namespace cpu {
namespace {

void LinearF8(const LinearArgs& a, uint32_t row_begin, uint32_t row_end, uint32_t tile_begin,
              uint32_t tile_end) {
  // A line is four columns of one group.
  if (a.w.num_groups > 1 && a.w.group_cols % Bf16DotBlock<8, 3>::kStep != 0) {
    kAvx512VnniKernels.linear_int8[kF8](a, row_begin, row_end, tile_begin, tile_end);
  } else {
    Linear<Bf16DotBlock<8, 3>>(a, row_begin, row_end, tile_begin, tile_end);
  }
}

}  // namespace

const KernelTable& Avx512Bf16Kernels() {
  static const KernelTable table = [] {
    KernelTable t = kAvx512VnniKernels;
    t.name = "avx512bf16";
    t.linear_int8[kF8] = LinearF8;
    return t;
  }();
  return table;
}

}  // namespace cpu
}  // namespace plansmith
