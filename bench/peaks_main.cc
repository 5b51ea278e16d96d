// Prints what this machine's cores can do at most, beside which a benchmark's results are read.
//
//     bench_peaks [threads] [--json]
//
// SPDX-License-Identifier: Apache-2.0
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cpu/peaks.h"
#include "cpu/thread_pool.h"

using plansmith::cpu::MeasurePeaks;
using plansmith::cpu::NumUsableCores;
using plansmith::cpu::Peaks;
using plansmith::cpu::ThreadPool;

int main(int argc, char** argv) {
  bool json = false;
  int threads = NumUsableCores();
  for (int i = 1; i < argc; ++i) {
    if (strcmp(argv[i], "--json") == 0) {
      json = true;
    } else if ((threads = atoi(argv[i])) < 1) {
      fprintf(stderr, "bench_peaks: got \"%s\"; wanted a number of threads from 1, or --json\n",
              argv[i]);
      return 2;
    }
  }
  bool avx2 = false, vnni = false, bf16 = false;
#if defined(__x86_64__)
  avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  vnni = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vnni");
  bf16 = vnni && __builtin_cpu_supports("avx512bf16");
#endif
  const char* isa = bf16 ? "avx512bf16" : vnni ? "avx512vnni" : avx2 ? "avx2" : "portable";
  ThreadPool pool(threads, true);
  const Peaks peaks = MeasurePeaks(&pool, avx2, vnni, bf16);
  printf(json ? "{\"read_gb_s\": %.2f, \"read_sustained_gb_s\": %.2f, \"fma_gflop_s\": %.1f, "
                "\"bf16_gflop_s\": %.1f, \"int8_gop_s\": %.1f, \"isa\": \"%s\", \"threads\": %d}\n"
              : "read %.2f GB/s (%.2f sustained), float32 FMA %.1f GFLOP/s, bfloat16 %.1f GFLOP/s, "
                "int8 %.1f GOP/s; %s, %d threads\n",
         peaks.read_gb_s, peaks.read_sustained_gb_s, peaks.fma_gflop_s, peaks.bf16_gflop_s,
         peaks.int8_gop_s, isa, threads);
  return 0;
}
