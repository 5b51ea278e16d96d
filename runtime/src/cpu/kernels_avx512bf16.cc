// Kernels for AVX-512 with BF16 and VBMI: those for AVX-512 with VNNI, but for FP8 weights by FP8
// inputs. Compiled with those flags, called only where the machine has them.
//
// SPDX-License-Identifier: Apache-2.0
#pragma GCC diagnostic ignored "-Wunused-function"  // kernels of rows: those of kAvx512VnniKernels
#include "cpu/kernels_bf16dot.h"

namespace plansmith {
namespace cpu {

const KernelTable& Avx512Bf16Kernels() {
  static const KernelTable table = [] {
    KernelTable t = kAvx512VnniKernels;
    t.name = "avx512bf16";
    t.linear_f8 = Linear<Bf16DotBlock<8, 3>>;
    t.has_bf16_dots = true;
    return t;
  }();
  return table;
}

}  // namespace cpu
}  // namespace plansmith
