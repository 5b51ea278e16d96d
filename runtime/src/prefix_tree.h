// The prefix tree: which runs of tokens have a KV block, found by their tokens and everything
// before them.
//
// A full block is looked up in a hash table by (parent, tokens), and its tokens are compared: a
// collision costs time, never a wrong block. A partly filled block is a child like any other, but
// only FindPartial sees it. What the blocks are, who uses them and which go first is KvCache's.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#include "lazy_array.h"

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

enum class KvLevel : uint8_t { kRoot, kDevice, kHost };

// What becomes of a cached block whose memory is wanted, when there are host blocks: it is dropped;
// it moves there if that pays with the share of blocks that have come back so far; or if it pays
// for one that will surely come back (of a paused request).
enum class OnEviction : uint8_t { kDrop, kKeepIfReused, kKeep };

// A block of the tree, or the root of a key. Zero bytes are a node that is not in use.
struct PrefixNode {
  // The tree's.
  int32_t parent;
  int32_t first_child;
  int32_t next;  // siblings, the most recently used first; of an unused node: the next unused one
  int32_t prev;
  int32_t table_next;
  uint32_t tag;        // more bits of its hash than its place in the table tells
  int32_t num_tokens;  // tokens_per_block: full. Less: a tail. Of a root 0

  // KvCache's.
  int32_t block;                // of its level
  int32_t num_device_children;  // such a node stays on the device
  int32_t evict_slot;           // its place in the heap of its level, -1 = not up for eviction
  int32_t expiry_slot;          // its place in the heap of durations, -1 = none
  KvLevel level;
  uint8_t priority;  // the effective one: reset when the duration is over
  OnEviction on_eviction;
  bool pinned;  // about to be copied from
  bool has_events;
  uint64_t event_hash;
  uint64_t last_used;
  int64_t expires_ns;
};

// Nodes are numbers; 0 is none, and also what the roots hang on. Allocates only when constructed,
// and then address space.
class PrefixTree {
 public:
  // A 64-bit hash of tokens[0..n), chained on `seed`.
  using HashFn = uint64_t (*)(uint64_t seed, const int32_t* tokens, size_t n);
  static uint64_t HashTokens(uint64_t seed, const int32_t* tokens, size_t n);
  static constexpr int32_t kNone = 0;
  // Children that FindPartial looks at: bounds what a popular parent costs.
  static constexpr int32_t kMaxScan = 32;

  // For at most `max_nodes` blocks. `hash` is for tests of collisions.
  PrefixTree(int64_t max_nodes, int32_t tokens_per_block, HashFn hash = HashTokens);

  PrefixNode& operator[](int32_t id) { return nodes_[static_cast<size_t>(id)]; }
  const PrefixNode& operator[](int32_t id) const { return nodes_[static_cast<size_t>(id)]; }
  const int32_t* tokens(int32_t id) const { return &tokens_[TokenIdx(id)]; }
  const PrefixKey& key(int32_t root) const {
    return keys_[static_cast<size_t>(root - first_root_)];
  }
  int32_t num_nodes() const { return num_nodes_; }  // roots apart
  bool is_full(int32_t id) const { return (*this)[id].num_tokens == tokens_per_block_; }

  int32_t FindRoot(const PrefixKey& key) const;
  int32_t AddRoot(const PrefixKey& key);  // which has none yet
  int32_t first_root() const { return (*this)[kNone].first_child; }

  // The full child of `parent` with these tokens_per_block tokens.
  int32_t FindChild(int32_t parent, const int32_t* tokens) const;
  // The child that begins with the most of tokens[0..max_tokens), full or not; of those with the
  // same number one on the device. `on_host` = false leaves out those on the host.
  struct Partial {
    int32_t node = kNone;
    int32_t num_tokens = 0;
  };
  Partial FindPartial(int32_t parent, const int32_t* tokens, int32_t max_tokens,
                      bool on_host) const;

  // A new child of `parent`, 1 <= num_tokens <= tokens_per_block. A full one is not there yet.
  int32_t Add(int32_t parent, const int32_t* tokens, int32_t num_tokens);
  // Other tokens, at least one, for a tail; it may become full.
  void SetTokens(int32_t id, const int32_t* tokens, int32_t num_tokens);
  // Take out a node or root without children.
  void Remove(int32_t id);
  // It was used: FindPartial looks at it first.
  void MoveToFront(int32_t id);

  // The nodes below `top`, children before parents: for (n = First(top); n != top; n = next), with
  // next = After(n) taken before n is removed.
  int32_t First(int32_t top) const;
  int32_t After(int32_t id) const;

  // Throws INTERNAL unless links, table and counts agree. Linear.
  void CheckInvariants() const;

 private:
  size_t TokenIdx(int32_t id) const {
    return static_cast<size_t>(id - 1) * static_cast<size_t>(tokens_per_block_);
  }
  uint64_t ChildHash(int32_t parent, const int32_t* tokens) const;
  uint64_t KeyHash(const PrefixKey& key) const;
  int32_t& Bucket(uint64_t hash) { return table_[hash & table_mask_]; }
  int32_t Bucket(uint64_t hash) const { return table_[hash & table_mask_]; }
  uint64_t HashOf(int32_t id) const;
  void Enter(int32_t id, uint64_t hash);
  void Leave(int32_t id, uint64_t hash);
  void Link(int32_t id, int32_t parent);
  void Unlink(int32_t id);

  const int32_t tokens_per_block_;
  const int32_t first_root_;
  const HashFn hash_;
  const uint64_t secret_;        // so that nobody can choose prompts that collide
  LazyArray<PrefixNode> nodes_;  // 0, the blocks', the roots
  LazyArray<int32_t> tokens_;
  LazyArray<PrefixKey> keys_;  // of the roots
  uint64_t table_mask_;
  LazyArray<int32_t> table_;
  int32_t free_node_ = kNone;
  int32_t free_root_ = kNone;
  int32_t nodes_end_ = 1;  // those from here on have never been used
  int32_t roots_end_;
  int32_t num_nodes_ = 0;
};

}  // namespace plansmith
