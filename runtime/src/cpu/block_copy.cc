// SPDX-License-Identifier: Apache-2.0
#include "cpu/block_copy.h"

#include <cstring>

#include "status.h"

namespace plansmith {
namespace cpu {
namespace {

[[noreturn]] void Invalid(const std::string& what) {
  throw StatusError(PSM_ERROR_INVALID_ARGUMENT, what);
}

}  // namespace

void CopyPositions(const BlockLayout& layout, const uint8_t* src, size_t num_tokens, uint8_t* dst) {
  if (num_tokens == layout.block_size) {
    std::memcpy(dst, src, layout.bytes());
    return;
  }
  const size_t half = layout.layer_values() * layout.value_bytes;
  const size_t row_bytes = layout.block_size * layout.value_bytes;
  const size_t token_bytes = layout.head_dim * layout.value_bytes;
  for (size_t layer = 0; layer < layout.num_layers; ++layer, src += 2 * half, dst += 2 * half) {
    for (size_t row = 0; row < half; row += row_bytes)
      std::memcpy(dst + row, src + row, num_tokens * layout.value_bytes);
    for (size_t head = half; head < 2 * half; head += token_bytes * layout.block_size)
      std::memcpy(dst + head, src + head, num_tokens * token_bytes);
  }
}

void BlockCopier::OpenHost(int32_t num_blocks) {
  if (num_host_blocks_ != 0) Invalid("the host blocks are open already; open them once");
  if (num_blocks < 1) Invalid(Format("num_blocks is %d, wanted at least 1", num_blocks));
  const size_t block_bytes = layout_.bytes();
  if (block_bytes > SIZE_MAX / static_cast<size_t>(num_blocks)) {
    throw StatusError(PSM_ERROR_OUT_OF_MEMORY,
                      Format("%d host blocks of %zu bytes are more than the machine can address; "
                             "lower host_cache_bytes",
                             num_blocks, block_bytes));
  }
  host_ = Pages(block_bytes * static_cast<size_t>(num_blocks), "the host KV blocks");
  num_host_blocks_ = num_blocks;
}

BlockCopier::Side BlockCopier::Source(const psm_block_copy& copy) const {
  return copy.kind == PSM_COPY_FROM_HOST ? Side{host_.as<uint8_t>(), num_host_blocks_, "host"}
                                         : Side{pool_, num_blocks_, "device"};
}

BlockCopier::Side BlockCopier::Target(const psm_block_copy& copy) const {
  return copy.kind == PSM_COPY_TO_HOST ? Side{host_.as<uint8_t>(), num_host_blocks_, "host"}
                                       : Side{pool_, num_blocks_, "device"};
}

void BlockCopier::Check(const psm_block_copy& copy, size_t idx) const {
  if (copy.kind != PSM_COPY_DEVICE && copy.kind != PSM_COPY_TO_HOST &&
      copy.kind != PSM_COPY_FROM_HOST) {
    Invalid(
        Format("copies[%zu].kind is %d, wanted PSM_COPY_DEVICE (0), PSM_COPY_TO_HOST (1) or "
               "PSM_COPY_FROM_HOST (2)",
               idx, copy.kind));
  }
  if (copy.kind != PSM_COPY_DEVICE && num_host_blocks_ == 0) {
    Invalid(
        Format("copies[%zu] is to or from the host, and no host blocks are open; call "
               "open_host first",
               idx));
  }
  const Side from = Source(copy), to = Target(copy);
  if (copy.src < 0 || copy.src >= from.num_blocks) {
    Invalid(Format("copies[%zu].src is %d, wanted a %s block, 0 to %d", idx, copy.src, from.name,
                   from.num_blocks - 1));
  }
  if (copy.dst < 0 || copy.dst >= to.num_blocks) {
    Invalid(Format("copies[%zu].dst is %d, wanted a %s block, 0 to %d", idx, copy.dst, to.name,
                   to.num_blocks - 1));
  }
  if (copy.kind == PSM_COPY_DEVICE && copy.src == copy.dst) {
    Invalid(Format("copies[%zu] copies block %d onto itself", idx, copy.src));
  }
  if (copy.num_tokens < 1 || static_cast<size_t>(copy.num_tokens) > layout_.block_size) {
    Invalid(Format("copies[%zu].num_tokens is %d, wanted 1 to tokens_per_block = %zu", idx,
                   copy.num_tokens, layout_.block_size));
  }
}

void BlockCopier::Copy(const psm_block_copy* copies, size_t num_copies) {
  if (copies == nullptr && num_copies > 0) Invalid("copies is NULL");
  for (size_t i = 0; i < num_copies; ++i) Check(copies[i], i);
  for (size_t i = 0; i < num_copies; ++i) {
    const psm_block_copy& copy = copies[i];
    CopyPositions(layout_, Source(copy).base + static_cast<size_t>(copy.src) * layout_.bytes(),
                  static_cast<size_t>(copy.num_tokens),
                  Target(copy).base + static_cast<size_t>(copy.dst) * layout_.bytes());
  }
}

}  // namespace cpu
}  // namespace plansmith
