// Kernels for AVX-512 with VNNI. Compiled with those flags, called only where the machine has them.
//
// Matrix products keep MR rows x NT tiles of 16 outputs in registers and read each weight vector
// once for MR rows. At one row they are bound by reading the weights, from about 6 rows by
// arithmetic (one 512-bit product a cycle on Zen 4, one or two on Intel).
//
// SPDX-License-Identifier: Apache-2.0
#include "cpu/simd_avx512.h"
// The vectors above come first: what follows is written over them.
#include "cpu/kernels_int_avx512.h"
#include "cpu/kernels_table.h"
#include "cpu/kernels_weights_avx512.h"

namespace plansmith {
namespace cpu {

const KernelTable kAvx512VnniKernels =
    TableOf("avx512vnni",
            {{Linear<FloatBlock<F32Weights, 8, 3, 1>>, Linear<FloatBlock<Bf16Weights, 8, 3, 3>>,
              Linear<FloatBlock<I8Weights, 8, 3, 4>>,
              LinearI4<FloatBlock<I4Weights, 8, 3, 4>, FloatBlock<I4ZeroWeights, 8, 3, 4>>,
              Linear<FloatBlock<F16Weights, 8, 3, 3>>, Linear<FloatBlock<F8Weights, 8, 3, 4>>,
              Linear<FloatBlock<F4Weights, 8, 3, 4>>},
             {nullptr, nullptr, LinearInt<DotI8>, LinearInt<DotI4>, nullptr, nullptr, nullptr},
             Linear<FloatBlock<InPairs<F8Weights>, 8, 3, 4, CodeInput>>});

}  // namespace cpu
}  // namespace plansmith
