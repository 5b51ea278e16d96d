// SPDX-License-Identifier: Apache-2.0
#include "cpu/peaks.h"

#include <stdint.h>
#include <string.h>
#include <time.h>

#include <algorithm>

#include "cpu/pages.h"
#if defined(__x86_64__)
#if !defined(__clang__)
// GCC 12's own AVX-512 header reads variables that it means to leave undefined (GCC bug 105593).
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#endif

namespace plansmith {
namespace cpu {
namespace {

constexpr int kTries = 100;
constexpr size_t kReadBytes = 256 << 20;
constexpr size_t kReadWords = 2 << 20;  // 16 MiB a try
constexpr double kSustainedSeconds = 0.25;
volatile float sink;

#if defined(__x86_64__)
constexpr int kSums = 12;  // independent chains: latency 4-5 cycles x up to 2 a cycle, and a margin
// Short enough to fit into a time slice, so that the best try is one without other processes.
constexpr int64_t kLoops = 100000;
constexpr int64_t kTileLoops = 10000;  // of four products of 16 cycles
constexpr double kTileOperations = 4 * 2.0 * 16 * 16 * 64;

#define PSM_TARGET(isa) __attribute__((target(isa)))

PSM_TARGET("avx2,fma") void FmaAvx2(int64_t loops) {
  __m256 sum[kSums], x = _mm256_set1_ps(1e-9f), y = _mm256_set1_ps(0.5f);
  for (__m256& s : sum) s = x;
  for (int64_t i = 0; i < loops; ++i) {
#pragma GCC unroll 12
    for (__m256& s : sum) s = _mm256_fmadd_ps(s, y, x);
  }
  for (__m256 s : sum) sink = _mm256_cvtss_f32(s);
}

PSM_TARGET("avx512f") void FmaAvx512(int64_t loops) {
  __m512 sum[kSums], x = _mm512_set1_ps(1e-9f), y = _mm512_set1_ps(0.5f);
  for (__m512& s : sum) s = x;
  for (int64_t i = 0; i < loops; ++i) {
#pragma GCC unroll 12
    for (__m512& s : sum) s = _mm512_fmadd_ps(s, y, x);
  }
  for (__m512 s : sum) sink = _mm512_cvtss_f32(s);
}

PSM_TARGET("avx2") void Int8Avx2(int64_t loops) {
  __m256i sum[kSums], x = _mm256_set1_epi8(3), one = _mm256_set1_epi16(1);
  for (__m256i& s : sum) s = x;
  for (int64_t i = 0; i < loops; ++i) {
#pragma GCC unroll 12
    for (__m256i& s : sum) {
      s = _mm256_add_epi32(s, _mm256_madd_epi16(_mm256_maddubs_epi16(x, s), one));
    }
  }
  for (__m256i s : sum) sink = static_cast<float>(_mm256_extract_epi32(s, 0));
}

PSM_TARGET("avx512f,avx512vnni") void Int8Vnni(int64_t loops) {
  __m512i sum[kSums], x = _mm512_set1_epi8(3);
  for (__m512i& s : sum) s = x;
  for (int64_t i = 0; i < loops; ++i) {
#pragma GCC unroll 12
    for (__m512i& s : sum) s = _mm512_dpbusd_epi32(s, x, x);
  }
  for (__m512i s : sum) sink = static_cast<float>(_mm_cvtsi128_si32(_mm512_castsi512_si128(s)));
}

PSM_TARGET("avx512f,avx512bf16") void Bf16Avx512(int64_t loops) {
  __m512 sum[kSums], x = _mm512_set1_ps(1e-9f);
  const __m512bh half = (__m512bh)_mm512_set1_epi16(0x3f00);  // 0.5
  for (__m512& s : sum) s = x;
  for (int64_t i = 0; i < loops; ++i) {
#pragma GCC unroll 12
    for (__m512& s : sum) s = _mm512_dpbf16_ps(s, half, half);
  }
  for (__m512 s : sum) sink = _mm512_cvtss_f32(s);
}
#endif

struct Work {
  void (*kernel)(int64_t);
  int64_t loops;
  const uint64_t* data;
  int num_threads;
};

#if defined(__x86_64__)
void RunKernel(void* context, int) {
  const Work& work = *static_cast<Work*>(context);
  work.kernel(work.loops);
}
#endif

void Read(void* context, int idx) {
  const Work& work = *static_cast<Work*>(context);
  const size_t n = kReadWords / static_cast<size_t>(work.num_threads);
  const uint64_t* p = work.data + static_cast<size_t>(idx) * n;
  uint64_t sums[16] = {};
  for (size_t i = 0; i + 16 <= n; i += 16) {
    for (size_t j = 0; j < 16; ++j) sums[j] += p[i + j];
  }
  for (uint64_t s : sums) sink = static_cast<float>(s);
}

// GB/s of going on reading for a while.
double Sustained(ThreadPool* pool, Work* work, const uint64_t* data) {
  const double start = Seconds();
  size_t tries = 0;
  for (; tries == 0 || Seconds() - start < kSustainedSeconds; ++tries) {
    work->data = data + tries * kReadWords % (kReadBytes / sizeof(uint64_t));
    pool->Run(Read, work);
  }
  return 8e-9 * static_cast<double>(kReadWords * tries) / (Seconds() - start);
}

double Best(ThreadPool* pool, ThreadPool::Job job, Work* work, const uint64_t* data) {
  double best = 1e9;
  for (size_t i = 0; i < kTries; ++i) {
    if (data != nullptr) work->data = data + i * kReadWords % (kReadBytes / sizeof(uint64_t));
    const double start = Seconds();
    pool->Run(job, work);
    best = std::min(best, Seconds() - start);
  }
  return best;
}

}  // namespace

double Seconds() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

Peaks MeasurePeaks(ThreadPool* pool, bool avx2, bool vnni, bool bf16,
                   void (*dot_tiles)(int64_t loops)) {
  Peaks peaks = {};
  const double threads = pool->num_threads();
  {
    const Pages data(kReadBytes, "data to read");
    memset(data.as<char>(), 1, kReadBytes);
    Work work = {nullptr, 0, nullptr, pool->num_threads()};
    peaks.read_gb_s =
        8e-9 * static_cast<double>(kReadWords) / Best(pool, Read, &work, data.as<uint64_t>());
    peaks.read_sustained_gb_s = Sustained(pool, &work, data.as<uint64_t>());
  }
#if defined(__x86_64__)
  const auto rate = [&](void (*kernel)(int64_t), int64_t loops, double operations) {
    Work work = {kernel, loops, nullptr, pool->num_threads()};
    const double all = threads * operations * static_cast<double>(loops);
    return 1e-9 * all / Best(pool, RunKernel, &work, nullptr);
  };
  if (avx2) {
    peaks.fma_gflop_s = rate(vnni ? FmaAvx512 : FmaAvx2, kLoops, 2 * kSums * (vnni ? 16 : 8));
    peaks.int8_gop_s = rate(vnni ? Int8Vnni : Int8Avx2, kLoops, 2 * kSums * (vnni ? 64 : 32));
  }
  if (bf16) peaks.bf16_gflop_s = rate(Bf16Avx512, kLoops, 2 * kSums * 32);
  if (dot_tiles != nullptr) peaks.int8_gop_s = rate(dot_tiles, kTileLoops, kTileOperations);
#else
  (void)avx2;
  (void)vnni;
  (void)bf16;
  (void)dot_tiles;
  (void)threads;
#endif
  return peaks;
}

}  // namespace cpu
}  // namespace plansmith
