// The kernels of the CPU executor as one table of functions for each instruction set.
//
// This header holds declarations only: an inline function here would be compiled with AVX-512 in
// one file and picked by the linker for all.
//
// Every kernel is row-invariant: an output row depends on its input row alone, bit for bit,
// whatever the number of rows, the tile it falls in or the thread. So each element is accumulated
// in one fixed order.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "cpu/plan_format.h"

namespace plansmith {
namespace cpu {

// A packed weight [N, K] (layouts in plan_format.h).
struct PackedMatrix {
  uint32_t dtype;        // DType
  uint32_t rows;         // N, before padding
  uint32_t cols;         // K, before padding
  uint32_t padded_cols;  // K as it lies in memory
  uint32_t num_groups;   // >= 1
  uint32_t group_cols;   // columns of one group; padded_cols when there is one
  const void* data;
  const void* scales;    // [N/16][num_groups][16] of scale_dtype; null for F32, BF16 and F16
  const float* zeros;    // likewise, of I4 with zero points; null otherwise
  float outer_scale;     // of F4; 1 otherwise
  uint32_t scale_dtype;  // F32 or BF16, of F4 F8
};

// out[r, n] = x[r, :] . w[n, :] (+ bias[n]) (+ out[r, n]).
struct LinearArgs {
  PackedMatrix w;
  const float* x;  // of linear_float: [rows][x_stride]
  size_t x_stride;
  // Of linear_int8: x as q * scale, rounded by quantize_row or quantize_row_static.
  const int8_t* q;        // [rows][q_stride], zero from K to padded_cols
  size_t q_stride;        // bytes, a multiple of 64
  const float* q_scales;  // [rows][q_groups]
  const int32_t* q_sums;  // [rows][w.num_groups] sums of q over a group
  uint32_t q_groups;      // 1, w.num_groups, or of linear_f8 also 0: all rows share one
  bool q_full_range;      // q may be -128 (quantize_row_static), not only -127..127
  // Of linear_f8: x as f8 * q_scales, rounded by round_row_f8.
  const uint16_t* f8;  // [rows][f8_stride] bfloat16, each an E4M3 number or NaN
  size_t f8_stride;
  const float* bias;  // [N] or null
  float* out;         // [rows][out_stride]
  size_t out_stride;
  bool accumulate;
};

struct AttentionArgs {
  // One layer's part of block 0, values of KvFormat; that of the next block lies block_stride
  // values behind it.
  const void* k_pool;  // [KVH][D][BS], so that 16 positions of one d are a vector
  const void* v_pool;  // [KVH][BS][D]
  size_t block_stride;
  float k_scale, v_scale;  // 1 for F32 and F16 pools
  const int32_t* blocks;   // block of each block_size positions of the sequence
  uint32_t block_size;     // BS, a power of two
  uint32_t head_dim;       // D
  uint32_t kv_head;
  const float*
      q;  // first query row of the tile, its first head; heads follow at +D, rows at +q_stride
  size_t q_stride;
  float* out;  // like q
  size_t out_stride;
  uint32_t num_rows;
  uint32_t num_heads;  // query heads of this KV head that are in the tile
  int32_t first_pos;   // position of the first row
  int32_t window;      // 0 = all
  float scale;
  float softcap;   // 0 = none
  float* scratch;  // AttentionScratchFloats(num_rows * num_heads, D) floats, 64-byte aligned
  // Units [first_unit, end_unit) of the context, out of those that the rows see.
  uint32_t first_unit, end_unit;
  // Null: these are all units, and out is written. Else each unit's part of the result lies here,
  // AttentionPartFloats(num_rows * num_heads, D) floats each, 64-byte aligned: written, or with
  // `join` read and joined in order, to out; these are all units then.
  float* parts;
  bool join;
};

// Logits that are looked at as one for the largest of them.
constexpr uint32_t kCandidateBlock = 256;

enum Activation : int32_t { kSilu = 0, kGeluTanh = 1, kGeluErf = 2 };

using LinearKernel = void (*)(const LinearArgs& args, uint32_t row_begin, uint32_t row_end,
                              uint32_t tile_begin, uint32_t tile_end);

struct KernelTable {
  const char* name;
  // Rows [row_begin, row_end) and tiles of 16 outputs [tile_begin, tile_end), by DType: float
  // inputs by any weight, decoded as it is read; int8 inputs by I8 and I4 without zero points (null
  // for others).
  LinearKernel linear_float[kNumDTypes];
  LinearKernel linear_int8[kNumDTypes];
  // E4M3 inputs by F8; columns, and those of a group, are a multiple of kF8Step. The products of
  // two codes are exact, and added in float32 one after another in the order of bfloat16 dot
  // products, each pair of columns the odd one first: the same bits whether a machine has these or
  // not.
  LinearKernel linear_f8;
  bool has_bf16_dots;  // linear_f8 is made of them
  // Where linear_int8 is made of products of whole tiles, 16 x 16 x 64: four of them, `loops`
  // times, which is how their peak is measured. Else NULL.
  void (*dot_tiles)(int64_t loops);
  // q[0..padded) = round(x / scale), scale = max|x| / 127 of each of num_scales equal parts of
  // x[0..n); sums over each of num_sums equal parts. Zero beyond n. A part whose scale is 0 has
  // zeros, one with a NaN or an infinity gets scale NaN (and any q and sums), so that every product
  // with it is NaN.
  void (*quantize_row)(const float* x, uint32_t n, uint32_t padded, uint32_t num_scales,
                       uint32_t num_sums, int8_t* q, float* scales, int32_t* sums);
  // The same with one given scale for all of x, q within -128..127; scales gets one number, NaN
  // when x has one.
  void (*quantize_row_static)(const float* x, uint32_t n, uint32_t padded, float scale,
                              uint32_t num_sums, int8_t* q, float* scales, int32_t* sums);
  // kOpRoundInput of a row: group 0 = the row, -1 = `scale` is given; of F4 (group 16) `scale` is
  // the outer one. out may be x.
  void (*round_row)(const float* x, uint32_t n, int32_t format, int32_t group, float scale,
                    float* out);
  // The codes of round_row to kRoundF8, as bfloat16, and the scale of each group, of which there is
  // none for group -1.
  void (*round_row_f8)(const float* x, uint32_t n, int32_t group, float scale, uint16_t* f8,
                       float* scales);
  void (*mul)(const float* a, const float* b, uint32_t n, float* out);
  void (*rms_norm)(const float* x, const float* weight, uint32_t n, float epsilon, float* out);
  // x[0..half) and x[half..2 half) rotated by cos, sin [half].
  void (*rope)(float* x, const float* cos, const float* sin, uint32_t half);
  void (*glu)(const float* gate, const float* up, uint32_t n, int32_t activation, float* out);
  void (*add)(const float* a, const float* b, uint32_t n, float* out);
  void (*softcap)(float* x, uint32_t n, float cap);
  void (*scale)(float* x, uint32_t n, float factor);
  void (*attend[kNumKvFormats])(const AttentionArgs& args);  // by KvFormat
  // n values into a pool: out[i * stride] = code of x[i] / scale, saturated; out counts in values
  // of the KvFormat. Null for F32; F16 takes no heed of the scale.
  void (*store_kv[kNumKvFormats])(const float* x, uint32_t n, float scale, size_t stride,
                                  void* out);
  // n values of each of num_rows >= 1 rows to neighbouring positions of a pool of a KvFormat:
  // out[d * block_size + i] = x[i * x_stride + d], of formats other than F32 as by store_kv; out
  // counts in values of the KvFormat.
  void (*store_keys[kNumKvFormats])(const float* x, size_t x_stride, uint32_t num_rows, uint32_t n,
                                    float scale, size_t block_size, void* out);
  // maxima[b] = the largest of x[b * kCandidateBlock ..], the last block as long as is left. False,
  // and maxima worth nothing, when any of x is not finite.
  bool (*block_maxima)(const float* x, uint32_t n, float* maxima);
};

// Positions whose softmax is taken together, at multiples of that; the parts are joined in order.
// Part of a row's arithmetic, so the same on every path.
constexpr uint32_t kAttentionUnit = 128;
// Queries (rows x heads) that share a read of K and V.
constexpr uint32_t kMaxAttentionQueries = 48;
size_t AttentionPartFloats(uint32_t num_queries, uint32_t head_dim);
size_t AttentionScratchFloats(uint32_t num_queries, uint32_t head_dim);

extern const KernelTable kPortableKernels;
#if defined(__x86_64__)
extern const KernelTable kAvx2Kernels;
extern const KernelTable kAvx512VnniKernels;
const KernelTable& Avx512Bf16Kernels();  // where PLANSMITH_HAS_AVX512BF16
// Where PLANSMITH_HAS_AMX: the compiler knows it. `others`: those for AVX-512 that the machine
// runs.
const KernelTable& AmxKernels(const KernelTable& others);
#elif defined(__aarch64__)
extern const KernelTable kNeonKernels;
#endif

// The table of an instruction set by name, or the best one for NULL. Throws
// StatusError(PSM_ERROR_UNSUPPORTED or INVALID_ARGUMENT) that names what this machine has.
const KernelTable& ChooseKernels(const char* isa);

// Names that this machine can run, best first, e.g. "avx512vnni, avx2, portable".
const char* UsableIsaNames();

// out[0..K) = row `row` of a table times factor; layout as in plan_format.h. For embeddings.
void DequantizeRow(const PackedMatrix& table, uint32_t layout, uint32_t row, float factor,
                   float* out);

}  // namespace cpu
}  // namespace plansmith
