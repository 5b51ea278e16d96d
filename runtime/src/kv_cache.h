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

#include "intrusive_heap.h"
#include "kv_events.h"
#include "lazy_array.h"
#include "plansmith/plansmith.h"
#include "prefix_tree.h"

namespace plansmith {

// How long the blocks of a sequence are worth keeping. A block has the highest priority of its
// tokens; a shared one the highest that anyone asked for.
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

  // The cache's own.
  int32_t num_retained = 0;              // leading blocks whose retention this sequence has set
  mutable int32_t num_draft_blocks = 0;  // leading published blocks that the draft has filled
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
  PrefixTree::HashFn hash = PrefixTree::HashTokens;  // for tests of collisions
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
  // was first with the same block, this one changes over to it. O(blocks newly filled), and once
  // those attached, for their retention. Never lowers num_free().
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

  // Give up all blocks of `sequence`. Those of the tree stay cached.
  void Release(KvSequence* sequence, OnEviction on_eviction = OnEviction::kKeepIfReused);
  // Forget what is cached of a private_id or, when key.private_id is 0, of key.adapter_id under
  // every salt. What sequences still hold stays: release them first.
  void Forget(const PrefixKey& key);
  // Forget everything cached: after copies that failed, for one.
  void ForgetAll();

  // The engine's clock, from which durations run out. Publish sets it too. Never goes back.
  void SetNow(int64_t now_ns);

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
  struct DeviceBlock {
    int32_t refs;    // sequences that hold it
    int32_t node;    // of the tree, or none
    int32_t draft;   // leading positions that the draft has filled
    uint32_t visit;  // CountDistinct's
  };
  struct HostBlock {
    int32_t node;
    int32_t draft;
  };
  struct GoesFirst {
    bool operator()(const PrefixNode* a, const PrefixNode* b) const {
      return a->priority != b->priority ? a->priority < b->priority : a->last_used < b->last_used;
    }
  };
  struct EndsFirst {
    bool operator()(const PrefixNode* a, const PrefixNode* b) const {
      return a->expires_ns < b->expires_ns;
    }
  };
  using EvictionHeap = IntrusiveHeap<PrefixNode, &PrefixNode::evict_slot, GoesFirst>;
  using ExpiryHeap = IntrusiveHeap<PrefixNode, &PrefixNode::expiry_slot, EndsFirst>;
  struct Worth {
    int32_t priority;
    int32_t duration_ms;  // -1 = for ever
  };
  struct Found {
    PrefixMatch match;
    PrefixTree::Partial partial;
  };

  DeviceBlock& device(int32_t block) { return device_[static_cast<size_t>(block)]; }
  const DeviceBlock& device(int32_t block) const { return device_[static_cast<size_t>(block)]; }
  HostBlock& host(int32_t block) { return host_[static_cast<size_t>(block)]; }
  const HostBlock& host(int32_t block) const { return host_[static_cast<size_t>(block)]; }
  int32_t IdOf(const PrefixNode* node) const { return static_cast<int32_t>(node - &tree_[0]); }
  EvictionHeap& LeavesOf(KvLevel level) {
    return level == KvLevel::kHost ? host_leaves_ : device_leaves_;
  }

  // kv_cache.cc
  Found Walk(const PrefixKey& key, const int32_t* tokens, int32_t num_tokens) const;
  void Onboard(int32_t id);
  int32_t TakeCopyOf(const PrefixTree::Partial& partial);
  void QueueCopy(int32_t kind, int32_t src, int32_t dst, int32_t num_tokens);

  // kv_fork.cc
  bool IsShared(int32_t block) const;
  int32_t DraftOf(const KvSequence& sequence, int32_t i) const {
    return device(sequence.blocks[static_cast<size_t>(i)]).draft;
  }

  // kv_publish.cc: what becomes shareable, and how long it is worth keeping
  int32_t Parent(const PrefixKey& key, const KvSequence& sequence);
  int32_t PublishBlock(int32_t parent, const int32_t* tokens, Worth worth, int32_t* block);
  void ChangeOver(int32_t id, int32_t* block);
  void TakeOver(int32_t id, int32_t block);
  int32_t AddNode(int32_t parent, const int32_t* tokens, int32_t num_tokens, int32_t block,
                  Worth worth);
  void Stored(int32_t id);
  Worth WorthOf(const Retention& retention, int32_t begin, int32_t end) const;
  int64_t Expiry(Worth worth) const;
  void SetWorth(int32_t id, Worth worth);
  void RaiseWorth(int32_t id, Worth worth);
  void Reprioritize(int32_t id, int32_t priority, int64_t expires_ns);

  // kv_evict.cc: where blocks come from and what is given up for them
  int32_t num_untouched() const { return config_.num_blocks - blocks_end_; }
  bool MustEvict() const { return free_.empty() && num_untouched() == 0; }
  int32_t Take();
  void Ref(int32_t block);
  void Drop(int32_t block, OnEviction on_eviction = OnEviction::kKeepIfReused);
  void Pin(int32_t id, bool pinned);
  void EvictOne();
  int32_t TakeHostBlock(const PrefixNode& incoming);
  bool IsWorthHost(const PrefixNode& node) const;
  bool IsWorthOnboarding() const;
  void Place(int32_t id, KvLevel level, int32_t block);
  void Unplace(int32_t id);
  void FreeIfUnused(KvLevel level, int32_t block);
  void Requeue(int32_t id);
  void Remove(int32_t id);
  void RemoveBelow(int32_t top);
  void Event(int32_t kind, const PrefixNode& node);

  // kv_check.cc
  void CheckNodes() const;
  void CheckHeaps() const;
  void CheckSequence(const KvSequence& sequence) const;

  const KvCacheConfig config_;
  PrefixTree tree_;
  KvEvents events_;
  LazyArray<DeviceBlock> device_;
  LazyArray<HostBlock> host_;
  int32_t blocks_end_ = 0;  // the device blocks from here on have never been used
  int32_t host_end_ = 0;
  std::vector<int32_t> free_;  // of the others, the empty ones: the last one used goes first
  std::vector<int32_t> host_free_;
  EvictionHeap device_leaves_;  // what EvictOne chooses from
  EvictionHeap host_leaves_;
  ExpiryHeap expiring_;
  mutable std::vector<int32_t> path_;  // Walk's
  std::vector<psm_block_copy> copies_;
  int32_t num_cached_ = 0;
  int32_t num_host_used_ = 0;
  uint64_t num_allocations_ = 0;
  uint64_t num_offloaded_ = 0;
  uint64_t num_onboarded_ = 0;
  uint64_t clock_ = 0;  // of last_used
  int64_t now_ns_ = 0;
  uint32_t visit_ = 0;
  double host_copy_ns_ = 0;
  double recompute_ns_ = 0;
};

}  // namespace plansmith
