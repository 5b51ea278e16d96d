// What this machine's cores can do at most, measured with the thread pool of the executor.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cpu/thread_pool.h"

namespace plansmith {
namespace bench {

struct Peaks {
  double read_gb_s;    // reading an array far larger than the caches
  double fma_gflop_s;  // float32 multiply-adds, two operations each
  double int8_gop_s;  // int8 products and their sums: VNNI where `vnni`, else vpmaddubsw + vpmaddwd
                      // + vpaddd
};

// Takes about two seconds. On other machines than x86-64 the last two are 0.
Peaks MeasurePeaks(cpu::ThreadPool* pool, bool avx2, bool vnni);

double Seconds();  // of a monotonic clock

}  // namespace bench
}  // namespace plansmith
