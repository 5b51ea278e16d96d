// The cpu plan file: a small linear program and its packed weights, made to be mapped and run in
// place.
//
// SPDX-License-Identifier: Apache-2.0
//
//   [PlanHeader][SlotRecord x num_slots][TensorRecord x num_tensors][OpRecord x num_ops][strings]
//   pad [data]
//
// Little-endian. Every table starts at a multiple of 64 bytes, every data block at a multiple of 64
// bytes from the start of the file. Offsets are from the start of the file. `tables_crc32` (zlib's
// crc32) covers all bytes from the end of PlanHeader to data_offset, `header_crc32` covers
// PlanHeader with that field zero. The data is covered by the sha256 in manifest.json, checked on
// demand.
//
// builder/targets/cpu/plan_file.py mirrors these records;
// tests/builder/targets/cpu/test_plan_file.py compares them.
#pragma once

#include <cstdint>

namespace plansmith {
namespace cpu {

constexpr char kPlanMagic[8] = {'P', 'S', 'M', 'P', 'L', 'A', 'N', '\0'};
constexpr uint32_t kPlanFormatVersion = 3;
constexpr uint32_t kTile = 16;  // outputs that are packed side by side in every packed layout

struct PlanHeader {
  char magic[8];
  uint32_t format_version;
  uint32_t header_crc32;
  uint32_t tables_crc32;
  uint32_t num_slots;
  uint32_t num_tensors;
  uint32_t num_ops;
  uint64_t slots_offset;
  uint64_t tensors_offset;
  uint64_t ops_offset;
  uint64_t strings_offset;
  uint64_t strings_bytes;
  uint64_t data_offset;
  uint64_t file_bytes;
  // The model, as psm_model_info wants it.
  int32_t vocab_size;
  int32_t hidden_size;
  int32_t num_layers;
  int32_t num_heads;
  int32_t num_kv_heads;
  int32_t head_dim;
  int32_t max_batch_size;
  int32_t max_num_tokens;
  int32_t max_input_len;
  int32_t max_seq_len;
  int32_t tokens_per_block;
  uint32_t logits_slot;  // slot that holds the result, rows = R
  uint32_t kv_format;    // KvFormat
  uint32_t reserved[15];
};
static_assert(sizeof(PlanHeader) == 200, "plan_file.py mirrors this");

// A buffer of float32 rows, row-major, `width` columns. The executor owns one allocation for each.
enum SlotRows : uint32_t { kRowsTokens = 0 /* max_num_tokens */, kRowsLogits = 1 /* R */ };
struct SlotRecord {
  uint32_t rows;   // SlotRows
  uint32_t width;  // float32 columns
};
static_assert(sizeof(SlotRecord) == 8, "");

enum DType : uint32_t { kF32 = 0, kBF16 = 1, kI8 = 2, kI4 = 3, kF16 = 4, kF8 = 5, kF4 = 6 };
constexpr uint32_t kNumDTypes = 7;  // F8 is E4M3 (no infinities), F4 is E2M1: NVFP4

// What the KV pools hold: F8 and I8 a byte a value beside a scale of the layer's K, and one of its
// V; F32 and F16 (IEEE half floats) the values as they are.
enum KvFormat : uint32_t { kKvF32 = 0, kKvF8 = 1, kKvI8 = 2, kKvF16 = 3 };
constexpr uint32_t kNumKvFormats = 4;
constexpr bool KvHasScales(uint32_t kv_format) { return kv_format == kKvF8 || kv_format == kKvI8; }

// How a matrix [rows N, cols K] lies in memory. Packed layouts pad N to a multiple of kTile and K
// to a multiple of the k step with zeros (an int4 zero is the nibble 8).
//
//   kRowMajor     [N][K]              vectors (norm weights, biases: N = 1), tables (cos, sin)
//   kPackedN16    [N/16][K][16]       F32, BF16, F16, F8: one vector of 16 outputs for each k
//   kPackedN16K4  [N/16][K/4][16][4]  I8: four k of an output side by side (a 32-bit lane)
//   kPackedN16K8  [N/16][K/8][16][4]  I4, F4: byte j of an output holds k0+j (low nibble) and
//                                     k0+4+j (high nibble); I4 stored as value + 8 (0..15), with
//                                     zero points as the code itself, F4 as its bits
//
// Scales are [N/16][num_groups][16]; num_groups is 1 (per output channel, group_size 0) or
// K / group_size. I8, I4, F8 and F4 have them, in the type scale_dtype: F32, or of I8 and I4 BF16,
// which holds what was rounded to it before the codes were made. Those of F4 are F8 (group_size
// 16), times outer_scale. The codes of an F8 weight are numbers: its NaNs (0x7F, 0xFF) are not
// looked for, and count as 480. Zero points, of I4 alone and only where it has them, are float32
// (0..15), placed like scales: w = (code - zero) * scale. Without them an I4 weight is (code - 8) *
// scale.
enum Layout : uint32_t { kRowMajor = 0, kPackedN16 = 1, kPackedN16K4 = 2, kPackedN16K8 = 3 };

struct TensorRecord {
  uint32_t dtype;       // DType
  uint32_t layout;      // Layout
  uint32_t rows;        // N, before padding
  uint32_t cols;        // K, before padding
  uint32_t group_size;  // 0 = one group
  uint32_t name;        // offset into strings (NUL-terminated)
  uint64_t data_offset, data_bytes;
  uint64_t scales_offset, scales_bytes;  // 0, 0 when there are none
  uint64_t zeros_offset, zeros_bytes;    // likewise
  float outer_scale;                     // of F4; 1 otherwise
  uint32_t scale_dtype;                  // DType; 0 without scales
};
static_assert(sizeof(TensorRecord) == 80, "");

// A view of columns [col, ...) of a slot.
struct View {
  int32_t slot;  // -1 = unused
  uint32_t col;
};

// What a product takes its input as. I8 and I4 weights meet integers in integer arithmetic, F8 ones
// E4M3 numbers; any weight meets floats, decoded on the way.
enum LinearInput : int32_t {
  kInputFloat = 0,       // as it is
  kInputInt8Row = 1,     // rounded to int8 as kOpRoundInput does, scale = max|x| / 127 over the row
  kInputInt8Group = 2,   // the same over each group_size columns of the weight
  kInputInt8Static = 3,  // the scale is f[0]
  // F8 weights meet E4M3 numbers: the codes of kOpRoundInput to F8, and their scales once the
  // products of a group are added. Columns, and those of a group, are a multiple of kF8Step.
  kInputF8Row = 4,     // scale = max|x| / 448 over the row
  kInputF8Group = 5,   // over each group_size columns of the weight
  kInputF8Static = 6,  // the scale is f[0]
};

constexpr uint32_t kF8Step = 4;

// What kOpRoundInput rounds to.
enum RoundFormat : int32_t { kRoundInt8 = 0, kRoundF8 = 1, kRoundF4 = 2 };

enum OpCode : uint32_t {
  // out[t, 0..E) = row input_ids[t] of tensors[0] (any layout, dequantized) * f[0];
  // E = tensors[0].cols
  kOpEmbed = 1,
  // For each row and each of i[0] groups of i[1] columns of in[0]:
  // out = x / sqrt(mean(x^2) + f[0]) * tensors[0][i[1]]. Weights that the family adds 1 to have it
  // added at build. out may be in[0].
  kOpRmsNorm = 2,
  // out[r, 0..N) (+)= in[0][r, 0..K) . tensors[0]^T + tensors[1] (bias, F32 [1, N], -1 = none).
  // i[0] = 1: add to out instead of writing. i[1]: LinearInput; int8 for I8 and I4 without zero
  // points only, F8 for F8. in[1]: what adapters (LoRA) take, where the product's own input
  // was rounded or multiplied first; slot -1 = in[0].
  kOpLinear = 3,
  // In place on out: i[0] heads of i[1] columns; the first i[2] columns of each head are rotated as
  // two halves (x1 cos - x2 sin, x2 cos + x1 sin) with row position_ids[t] of tensors[0] (cos) and
  // tensors[1] (sin), F32 [P, i[2]/2].
  kOpRope = 4,
  // Write k (in[1]) and v (in[2]) of the step's tokens into layer i[3]'s part of the pool, then
  // attend with q (in[0]). i[0] heads, i[1] KV heads, i[2] head size, i[4] window (a query at p
  // sees p-window+1..p; 0 = all), f[0] scale of q.k, f[1] soft cap (0 = none: s -> cap * tanh(s /
  // cap)). tensors[0]: F32 [1, 2], the scales of K and V, with F8 and I8 pools: these hold
  // round(k / scale), saturated; -1 otherwise. F16 pools hold round(k), to nearest even: a number
  // beyond 65504 becomes 65504, an infinity or a NaN stays what it is.
  kOpPagedAttention = 5,
  // out = act(in[0]) * in[1] over i[0] columns; i[1]: 0 SiLU, 1 GELU (tanh), 2 GELU (erf)
  kOpGlu = 6,
  // out = in[0] + in[1] over i[0] columns; out may be either
  kOpAdd = 7,
  // In place on out over i[0] columns: x = f[0] * tanh(x / f[0])
  kOpSoftcap = 8,
  // out (a kRowsLogits slot) row r = in[0] (a kRowsTokens slot) row logits_rows[r], i[0] columns
  kOpGatherRows = 9,
  // In place on out over i[0] columns: x *= f[0]
  kOpScale = 10,
  // out = round(in[0] / s) * s over i[0] columns; out may be in[0]. i[1]: RoundFormat; i[2]:
  // columns that share s, 0 = the row, -1 = all rows: s is f[0]. int8: s = max|x| / 127, round to
  // nearest even within -127..127 (static: -128..127); F8: max|x| / 448; F4: groups of 16,
  // s = e4m3(max|x| / (6 * f[0])) * f[0]. Each operation is float32, and x / s a true division, as
  // QuantizeLinear's is. 0 where s is 0; a NaN stays, and it or an infinity makes NaN of all that
  // share an s taken from them.
  kOpRoundInput = 11,
  // out = in[0] * tensors[0] (F32 [1, i[0]]) over i[0] columns; out may be in[0]
  kOpMulVector = 12,
};

struct OpRecord {
  uint32_t code;  // OpCode
  uint32_t name;  // offset into strings, e.g. "layers.0.qkv"
  View in[3];
  View out;
  int32_t tensors[2];  // -1 = unused
  int32_t i[6];
  float f[2];
};
static_assert(sizeof(OpRecord) == 80, "");

}  // namespace cpu
}  // namespace plansmith
