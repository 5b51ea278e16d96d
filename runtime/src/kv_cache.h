// The paged KV manager: which blocks of the executor's pools are in use, by whom, and what the
// others still hold.
//
// Blocks carry reference counts. A filled block becomes a node of the prefix tree, keyed by its
// tokens and everything before them; whoever's tokens begin the same takes a reference to it. A
// block nobody references stays in the tree, cached, until its memory is wanted: leaves go first,
// by priority, then the least recently used. What goes may move to a host block. Only numbers live
// here; the bytes belong to the executor, which runs `copies()` before each step.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "plansmith/plansmith.h"

namespace plansmith {

// What blocks are shared under besides their tokens. private_id: 0, or what keeps the blocks of one
// request from all others (reuse switched off).
struct PrefixKey {
  uint64_t salt = 0;
  uint64_t adapter_id = 0;
  uint64_t private_id = 0;
  bool operator==(const PrefixKey& o) const {
    return salt == o.salt && adapter_id == o.adapter_id && private_id == o.private_id;
  }
};

// How long the blocks of a sequence are worth keeping.
struct Retention {
  std::vector<psm_retention_range> ranges;  // of the prompt, ascending
  int32_t num_prompt = 0;                   // positions from here on are generated
  int32_t decode_priority = PSM_DEFAULT_RETENTION;
  int32_t decode_duration_ms = -1;
};

// The blocks of one sequence, in position order: position p lies in blocks[p / tokens_per_block].
struct KvSequence {
  std::vector<int32_t> blocks;
  int32_t num_published = 0;  // leading blocks that are nodes of the tree
};

// What the cache holds of a sequence's beginning.
struct PrefixMatch {
  int32_t num_tokens = 0;          // positions that need not be computed
  int32_t num_blocks = 0;          // full blocks of them, on the device or the host
  int32_t num_host_blocks = 0;     // of num_blocks
  int32_t num_partial_tokens = 0;  // positions of one block more, to be copied
  int32_t num_blocks_taken = 0;    // by how much Attach lowers num_free()
};

struct KvCacheConfig {
  int32_t num_blocks = 0;
  int32_t tokens_per_block = 0;
  int32_t num_host_blocks = 0;  // 0 = no host tier
  int32_t host_offload_min_priority = PSM_DEFAULT_RETENTION;
  bool can_copy = false;  // the executor has copy_blocks
  bool enable_partial_reuse = true;
  int32_t max_kv_events = 0;
};

// Not thread-safe: the thread that runs the step owns it. (TakeEvents: see there.)
class KvCache {
 public:
  explicit KvCache(const KvCacheConfig& config);
  ~KvCache();
  KvCache(const KvCache&) = delete;
  KvCache& operator=(const KvCache&) = delete;

  // The blocks a byte cap holds; throws OUT_OF_MEMORY when that is none.
  static int32_t BlocksInBytes(uint64_t kv_cache_bytes, uint64_t kv_bytes_per_block);

  int32_t num_blocks() const;
  int32_t num_free() const;    // what Extend can hand out: untouched, empty and cached blocks
  int32_t num_cached() const;  // of them: hold what can be reused
  int32_t num_used() const { return num_blocks() - num_free(); }
  int32_t num_host_blocks() const;
  int32_t num_host_used() const;
  int32_t tokens_per_block() const;
  uint64_t num_allocations() const;  // since creation
  uint64_t num_offloaded() const;
  uint64_t num_onboarded() const;

  // Blocks that `num_positions` positions need.
  int32_t BlocksFor(int64_t num_positions) const {
    return static_cast<int32_t>((num_positions + tokens_per_block() - 1) / tokens_per_block());
  }
  // Positions `sequence` could hold if it got every free block.
  int64_t PositionsWithin(const KvSequence& sequence) const {
    return (static_cast<int64_t>(sequence.blocks.size()) + num_free()) * tokens_per_block();
  }

  // What of tokens[0..num_tokens) is cached. Never more than num_tokens - 1 positions: the last
  // token is wanted for its logits. Host blocks count unless recomputing them is cheaper
  // (SetCosts).
  PrefixMatch Match(const PrefixKey& key, const int32_t* tokens, int32_t num_tokens) const;
  // Take what Match found into the empty `sequence`: references, copies from the host, the copy of
  // a partial block. The caller has checked that num_blocks_taken are free. Returns its num_tokens.
  int32_t Attach(const PrefixKey& key, const int32_t* tokens, int32_t num_tokens,
                 KvSequence* sequence);

  // Grow `sequence` to hold `num_positions`; returns the blocks added. The caller has checked
  // num_free: to run out here is a bug and throws INTERNAL with nothing changed.
  int32_t Extend(KvSequence* sequence, int64_t num_positions);
  // Make the filled blocks among the first num_computed positions shareable. When another sequence
  // was first with the same block, this one changes over to it. O(blocks newly filled).
  void Publish(const PrefixKey& key, const int32_t* tokens, int32_t num_computed,
               const Retention& retention, int64_t now_ns, KvSequence* sequence);
  // Let the filled part of the last, partly filled block be copied from (it may grow on). At the
  // end of a context and of a request.
  void PublishTail(const PrefixKey& key, const int32_t* tokens, int32_t num_computed,
                   const Retention& retention, int64_t now_ns, KvSequence* sequence);

  // `to` (empty) shares all blocks of `from`.
  void Fork(const KvSequence& from, KvSequence* to);
  // Blocks that MakeWritable would take: 1 when the block of `position` is shared.
  int32_t BlocksToWrite(const KvSequence& sequence, int64_t position) const;
  // Before positions from `position` on are written into a block that others reference: replaces it
  // by a copy of its first `position % tokens_per_block` positions. Returns blocks taken.
  int32_t MakeWritable(KvSequence* sequence, int64_t position);
  // Different blocks that the sequences hold together.
  int32_t CountDistinct(const KvSequence* const* sequences, size_t num_sequences);

  // Give up all blocks of `sequence`. Those of the tree stay cached; keep_on_host = false drops
  // rather than offloads them when they are evicted.
  void Release(KvSequence* sequence, bool keep_on_host = true);
  // Forget what is cached of an adapter that no sequence uses, or of a private_id.
  void Forget(const PrefixKey& key);

  // What the executor has to copy before the next step, in order. Copies that read or write a block
  // come in the order of the calls above.
  const std::vector<psm_block_copy>& copies() const;
  void ClearCopies();

  // Draft KV: how many leading positions of `sequence` the draft's pool holds. Attach, copies and
  // sharing carry it along with the block.
  int32_t DraftPositions(const KvSequence& sequence) const;
  void SetDraftPositions(const KvSequence& sequence, int32_t num_positions);

  // Estimated times, for what is worth a host block: onboarding one, and computing one again.
  void SetCosts(double host_copy_ns_per_block, double recompute_ns_per_block);

  // Oldest events first, see psm_engine_kv_events. Any thread.
  size_t TakeEvents(psm_kv_event* events, size_t max_events, int32_t* token_ids,
                    size_t max_token_ids);

  // Throws INTERNAL unless every block is accounted for and the counts match the references that
  // `sequences` (all there are) hold. For tests; linear in the pool.
  void CheckInvariants(const std::vector<const KvSequence*>& sequences) const;

 private:
  int32_t num_untouched() const {
    return config_.num_blocks - static_cast<int32_t>(ref_counts_.size());
  }
  int32_t Take();
  void Drop(int32_t block);

  KvCacheConfig config_;
  uint64_t num_allocations_ = 0;
  // Of the blocks that have ever been used, which are the first ones; the others cost nothing yet.
  std::vector<int32_t> ref_counts_;
  std::vector<int32_t> free_;  // a stack: what was used last is warm in the caches
  std::vector<psm_block_copy> copies_;
};

}  // namespace plansmith
