// The paged KV manager: which blocks of the executor's pools are in use, and by whom.
//
// Blocks carry reference counts, so that a later prefix tree can hold a block besides the sequences
// that read it; today every block has one holder. Only numbers live here, the bytes belong to the
// executor.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

namespace plansmith {

// The blocks of one sequence, in position order: position p lies in blocks[p / tokens_per_block].
struct KvSequence {
  std::vector<int32_t> blocks;
};

// Not thread-safe: the thread that runs the step owns it.
class KvCache {
 public:
  // num_blocks >= 1, tokens_per_block >= 1.
  KvCache(int32_t num_blocks, int32_t tokens_per_block);

  // The blocks a byte cap holds; throws OUT_OF_MEMORY when that is none.
  static int32_t BlocksInBytes(uint64_t kv_cache_bytes, uint64_t kv_bytes_per_block);

  int32_t num_blocks() const { return num_blocks_; }
  int32_t num_free() const { return num_untouched() + static_cast<int32_t>(free_.size()); }
  int32_t num_used() const { return num_blocks() - num_free(); }
  int32_t tokens_per_block() const { return tokens_per_block_; }
  uint64_t num_allocations() const { return num_allocations_; }  // since creation

  // Blocks that `num_positions` positions need.
  int32_t BlocksFor(int64_t num_positions) const {
    return static_cast<int32_t>((num_positions + tokens_per_block_ - 1) / tokens_per_block_);
  }
  // Positions `sequence` could hold if it got every free block.
  int64_t PositionsWithin(const KvSequence& sequence) const {
    return (static_cast<int64_t>(sequence.blocks.size()) + num_free()) * tokens_per_block_;
  }

  // Grow `sequence` to hold `num_positions`; returns the blocks added. The caller has checked
  // PositionsWithin: to run out here is a bug and throws INTERNAL with nothing changed.
  int32_t Extend(KvSequence* sequence, int64_t num_positions);
  // Give up all blocks of `sequence`.
  void Release(KvSequence* sequence);

  // Throws INTERNAL unless every block is either free or referenced, and the counts match the
  // references that `sequences` (all there are) hold. For tests; linear in the pool.
  void CheckInvariants(const std::vector<const KvSequence*>& sequences) const;

 private:
  int32_t num_untouched() const { return num_blocks_ - static_cast<int32_t>(ref_counts_.size()); }
  int32_t Take();
  void Drop(int32_t block);

  int32_t num_blocks_;
  int32_t tokens_per_block_;
  uint64_t num_allocations_ = 0;
  // Of the blocks that have ever been used, which are the first ones; the others cost nothing yet.
  std::vector<int32_t> ref_counts_;
  std::vector<int32_t> free_;  // a stack: what was used last is warm in the caches
};

}  // namespace plansmith
