// The table of an instruction set, for the V of the file that includes it: everything but matrix
// products is the same source for all of them.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cpu/kernels_attention.h"
#include "cpu/kernels_candidates.h"
#include "cpu/kernels_linear.h"
#include "cpu/kernels_round.h"
#include "cpu/kernels_rows.h"

namespace plansmith {
namespace cpu {
namespace {

// KernelTable's linear_float and linear_int8, by DType, and linear_f8.
struct ProductKernels {
  LinearKernel float_inputs[kNumDTypes];
  LinearKernel int8_inputs[kNumDTypes];
  LinearKernel f8_inputs;
};

constexpr KernelTable TableOf(const char* name, const ProductKernels& products) {
  KernelTable table = {
      name,
      {},
      {},
      products.f8_inputs,
      false,
      nullptr,
      QuantizeRow,
      QuantizeRowStatic,
      RoundRow,
      RoundRowF8,
      Mul,
      RmsNorm,
      Rope,
      Glu,
      Add,
      Softcap,
      Scale,
      {Attend<float>, Attend<F8>, Attend<int8_t>, Attend<F16>},
      {nullptr, StoreKv<F8>, StoreKv<int8_t>, StoreKv<F16>},
      {StoreKeys<float>, StoreKeys<F8>, StoreKeys<int8_t>, StoreKeys<F16>},
      BlockMaxima,
  };
  for (uint32_t i = 0; i < kNumDTypes; ++i) {
    table.linear_float[i] = products.float_inputs[i];
    table.linear_int8[i] = products.int8_inputs[i];
  }
  return table;
}

}  // namespace
}  // namespace cpu
}  // namespace plansmith
