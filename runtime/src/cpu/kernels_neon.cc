// Kernels for NEON with dot products (ARMv8.2). Compiled with those flags, called only where the
// machine has them.
//
// 32 registers of 4 floats: a tile of 16 outputs is 4 of them, so a block is 6 rows high, 4 where
// weights are decoded or the products are of integers.
//
// SPDX-License-Identifier: Apache-2.0
#include "cpu/simd_neon.h"
// The vectors above come first: what follows is written over them.
#include "cpu/kernels_int_neon.h"
#include "cpu/kernels_table.h"
#include "cpu/kernels_weights_neon.h"

namespace plansmith {
namespace cpu {

const KernelTable kNeonKernels = TableOf(
    "neon", {{Linear<FloatBlock<F32Weights, 6, 1, 3>>, Linear<FloatBlock<Bf16Weights, 6, 1, 3>>,
              Linear<FloatBlock<I8Weights, 4, 1, 2>>,
              LinearI4<FloatBlock<I4Weights, 4, 1, 2>, FloatBlock<I4ZeroWeights, 4, 1, 2>>,
              Linear<FloatBlock<F16Weights, 6, 1, 3>>, Linear<FloatBlock<F8Weights, 4, 1, 3>>,
              Linear<FloatBlock<F4Weights, 4, 1, 1>>},
             {nullptr, nullptr, Linear<IntBlock<DotI8, 4>>, Linear<IntBlock<DotI4, 4>>, nullptr,
              nullptr, nullptr},
             Linear<FloatBlock<InPairs<F8Weights>, 4, 1, 3, CodeInput>>});

}  // namespace cpu
}  // namespace plansmith
