// What this machine's cores can do at most, measured with the thread pool of the executor.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "cpu/thread_pool.h"

namespace plansmith {
namespace cpu {

struct Peaks {
  double read_gb_s;            // reading an array far larger than the caches: the best short try
  double read_sustained_gb_s;  // the same over a quarter of a second
  double fma_gflop_s;          // float32 multiply-adds, two operations each
  double bf16_gflop_s;         // bfloat16 dot products, where `bf16`; else 0
  double int8_gop_s;  // int8 products and their sums: tiles where `dot_tiles`, VNNI where `vnni`,
                      // else vpmaddubsw + vpmaddwd + vpaddd
};

// With the instructions that the kernels in use are made of, or the share of a peak says nothing;
// dot_tiles is KernelTable's. Takes about a second. On other machines than x86-64 all but the first
// two are 0.
Peaks MeasurePeaks(ThreadPool* pool, bool avx2, bool vnni, bool bf16 = false,
                   void (*dot_tiles)(int64_t loops) = nullptr);

double Seconds();  // of a monotonic clock

}  // namespace cpu
}  // namespace plansmith
