// How long a GPU would take, from bytes and operations (the roofline of Williams et al., CACM
// 2009).
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>

#include "plansmith/plansmith.h"

namespace plansmith {
namespace simulated {

// Read: all weights once, and the K and V of every sequence (shared blocks once for each that
// shares them, as paged attention does). Written: the new positions. Arithmetic: the products of
// every token, and 4 * H * D a layer for each pair of a query and a key (2 for q k, 2 for p v).
inline double StepSeconds(const psm_simulated_options& options, const psm_batch& batch) {
  const psm_model_info& info = options.info;
  double positions = batch.num_tokens;  // read or written
  double pairs = 0;
  for (int32_t b = 0; b < batch.num_seqs; ++b) {
    const double q = batch.query_lens[b], kv = batch.kv_lens[b];
    positions += kv;
    pairs += q * (kv - q) + q * (q + 1) / 2;
  }
  const double bytes_per_position =
      static_cast<double>(info.kv_bytes_per_block) / info.tokens_per_block;
  const double bytes = static_cast<double>(options.weight_bytes) + positions * bytes_per_position;
  const double flops = options.flops_per_token * batch.num_tokens +
                       pairs * 4.0 * info.num_heads * info.head_dim * info.num_layers;
  return std::max(bytes / options.memory_bytes_per_s, flops / options.flops_per_s) +
         options.overhead_us * 1e-6;
}

// A copy on the device reads and writes its bytes; one to or from the host is limited by the link.
inline double CopySeconds(const psm_simulated_options& options, const psm_block_copy& copy) {
  const double bytes = static_cast<double>(options.info.kv_bytes_per_block) * copy.num_tokens /
                       options.info.tokens_per_block;
  return copy.kind == PSM_COPY_DEVICE ? 2 * bytes / options.memory_bytes_per_s
                                      : bytes / options.host_copy_bytes_per_s;
}

}  // namespace simulated
}  // namespace plansmith
