// Values of the KV pools in registers, by the type that stands for a KvFormat: float, F16,
// F8 or int8_t. Over the V of the file that includes it.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <type_traits>

#include "cpu/kernels.h"
#include "cpu/kernels_rows.h"

namespace plansmith {
namespace cpu {
namespace {

enum class F8 : uint8_t {};    // an E4M3 code
enum class F16 : uint16_t {};  // the bits of a half float

// What LoadKv gives times this is what the pool holds.
template <typename T>
constexpr float kKvFactor = 1.0f;
template <>
constexpr float kKvFactor<F8> = 256.0f;

// kLanes values; reads sizeof(T) * kLanes bytes.
inline V LoadKv(const float* p) { return VLoad(p); }
inline V LoadKv(const F16* p) { return VLoadF16(reinterpret_cast<const uint16_t*>(p)); }
inline V LoadKv(const F8* p) { return VLoadF8(reinterpret_cast<const uint8_t*>(p)); }
inline V LoadKv(const int8_t* p) { return VLoadI8(p); }

inline V Bound(V v, float low, float high) {  // NaN stays
  return VMax(VSet1(low), VMin(VSet1(high), v));
}
// A large number becomes the largest; an infinity, which tells that something went wrong, stays.
inline void StoreCodes(V v, uint32_t lanes, F16* codes) {
  const V finite = Bound(v, -65504.0f, 65504.0f);
  VStoreF16(reinterpret_cast<uint16_t*>(codes),
            VSelectLess(VAbs(v), VSet1(__builtin_inff()), finite, v), lanes);
}
inline void StoreCodes(V v, uint32_t lanes, F8* codes) {
  VStoreF8(reinterpret_cast<uint8_t*>(codes), Bound(v, -448.0f, 448.0f), lanes);
}
inline void StoreCodes(V v, uint32_t lanes, int8_t* codes) {
  VStoreI8(codes, VRound(Bound(v, -128.0f, 127.0f)), lanes);
}

// What is stored of v; F16 has no scale.
template <typename T>
inline V Scaled(V v, float scale) {
  if constexpr (std::is_same<T, F16>::value) return v;
  return VDiv(v, VSet1(scale));
}

// out[i * stride] = code of x[i] / scale, values of T; F16 has no scale. Writes those and no
// others: their neighbours are other threads'. A NaN becomes F16's or F8's NaN, and any int8.
template <typename T>
void StoreKv(const float* x, uint32_t n, float scale, size_t stride, void* out) {
  T* const to = static_cast<T*>(out);
  ForVectors(n, [&](uint32_t i, uint32_t lanes) {
    const V v = Scaled<T>(LoadUpTo(x + i, lanes), scale);
    if (stride == 1) return StoreCodes(v, lanes, to + i);
    T codes[kLanes];
    StoreCodes(v, lanes, codes);
    for (uint32_t j = 0; j < lanes; ++j) to[(i + j) * stride] = codes[j];
  });
}

inline void StoreKey(V v, uint32_t lanes, float, float* out) { StoreUpTo(out, v, lanes); }
template <typename T>
inline void StoreKey(V v, uint32_t lanes, float scale, T* out) {
  StoreCodes(Scaled<T>(v, scale), lanes, out);
}
inline void StoreOneKey(const float* x, uint32_t n, float, size_t stride, float* out) {
  for (size_t i = 0; i < n; ++i) out[i * stride] = x[i];
}
template <typename T>
inline void StoreOneKey(const float* x, uint32_t n, float scale, size_t stride, T* out) {
  StoreKv<T>(x, n, scale, stride, out);
}

// kLanes rows by kLanes values at a time, turned in registers: a store is a whole vector of
// positions. Writes the values asked for and no others.
template <typename T>
void StoreKeys(const float* x, size_t x_stride, uint32_t num_rows, uint32_t n, float scale,
               size_t block_size, void* out) {
  T* const keys = static_cast<T*>(out);
  if (num_rows == 1) return StoreOneKey(x, n, scale, block_size, keys);
  ForVectors(num_rows, [&](uint32_t row, uint32_t rows) {
    ForVectors(n, [&](uint32_t d, uint32_t lanes) {
      V v[kLanes];
      for (uint32_t i = 0; i < kLanes; ++i) {
        v[i] = i < rows ? LoadUpTo(x + (row + i) * x_stride + d, lanes) : VSet1(0.0f);
      }
      VTranspose(v);
      for (uint32_t j = 0; j < lanes; ++j) {
        StoreKey(v[j], rows, scale, keys + (d + j) * block_size + row);
      }
    });
  });
}

}  // namespace
}  // namespace cpu
}  // namespace plansmith
