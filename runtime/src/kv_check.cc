// The books of the KV cache, checked from the ground up.
//
// SPDX-License-Identifier: Apache-2.0
#include <limits>

#include "kv_cache.h"
#include "status.h"

namespace plansmith {
namespace {

template <typename... Args>
void Check(bool holds, const char* format, Args... args) {
  if (!holds) throw StatusError(PSM_ERROR_INTERNAL, "KV cache: " + Format(format, args...));
}

// How often each of 0..n-1 is in `items`.
std::vector<int32_t> Count(const std::vector<int32_t>& items, int32_t n, const char* what) {
  std::vector<int32_t> counts(static_cast<size_t>(n), 0);
  for (int32_t item : items) {
    Check(item >= 0 && item < n, "no such %s block: %d", what, item);
    ++counts[static_cast<size_t>(item)];
  }
  return counts;
}

template <typename Heap, typename Before>
void CheckOrder(const Heap& heap, int32_t PrefixNode::* slot, Before before) {
  for (size_t i = 0; i < heap.size(); ++i) {
    Check(heap.items()[i]->*slot == static_cast<int32_t>(i), "a node is not at its place %zu", i);
    Check(i == 0 || !before(heap.items()[i], heap.items()[(i - 1) / 2]),
          "a heap is out of order at %zu", i);
  }
}

}  // namespace

void KvCache::CheckInvariants(const std::vector<const KvSequence*>& sequences) const {
  std::vector<int32_t> held;
  for (const KvSequence* sequence : sequences) {
    held.insert(held.end(), sequence->blocks.begin(), sequence->blocks.end());
  }
  const std::vector<int32_t> refs = Count(held, config_.num_blocks, "KV");
  const std::vector<int32_t> empty = Count(free_, blocks_end_, "empty KV");
  int32_t num_cached = 0;
  for (int32_t b = 0; b < config_.num_blocks; ++b) {
    const int32_t holders = refs[static_cast<size_t>(b)];
    const bool is_cached = device(b).refs == 0 && device(b).node != PrefixTree::kNone;
    Check(holders == device(b).refs, "block %d has count %d and %d holders", b, device(b).refs,
          holders);
    Check(device(b).draft >= 0 && device(b).draft <= config_.tokens_per_block,
          "block %d has %d draft positions", b, device(b).draft);
    if (b >= blocks_end_) {
      Check(holders == 0 && !is_cached, "block %d is used but counts as untouched", b);
    } else {
      Check(empty[static_cast<size_t>(b)] + is_cached + (holders > 0) == 1,
            "block %d: %d times empty, cached %d, %d holders", b, empty[static_cast<size_t>(b)],
            is_cached, holders);
    }
    num_cached += is_cached;
  }
  Check(num_cached == num_cached_, "%d blocks are cached, counted %d", num_cached, num_cached_);
  tree_.CheckInvariants();
  CheckNodes();
  CheckHeaps();
  for (const KvSequence* sequence : sequences) CheckSequence(*sequence);
}

// Every node has a block of its own, and its parent is on the device if it is.
void KvCache::CheckNodes() const {
  const std::vector<int32_t> empty = Count(host_free_, host_end_, "empty host");
  int32_t num_host_used = 0, num_device_children = 0, num_device = 0;
  for (int32_t id = tree_.First(PrefixTree::kNone); id != PrefixTree::kNone; id = tree_.After(id)) {
    const PrefixNode& node = tree_[id];
    num_device_children += node.num_device_children;
    Check(!node.pinned, "node %d is still pinned", id);
    if (node.level == KvLevel::kRoot) continue;
    const bool on_device = node.level == KvLevel::kDevice;
    const KvLevel parent = tree_[node.parent].level;
    Check((on_device ? device(node.block).node : host(node.block).node) == id,
          "node %d does not have the block %d that it thinks", id, node.block);
    Check(!on_device || parent != KvLevel::kHost, "node %d is above its parent", id);
    Check(!on_device || parent == KvLevel::kRoot || device(node.block).refs == 0 ||
              device(tree_[node.parent].block).refs > 0,
          "node %d is held, its parent is not", id);
    Check(on_device || empty[static_cast<size_t>(node.block)] == 0, "node %d has an empty block",
          id);
    num_device += on_device;
    num_host_used += !on_device;
  }
  int32_t num_device_nodes = 0;
  for (int32_t b = 0; b < blocks_end_; ++b) num_device_nodes += device(b).node != PrefixTree::kNone;
  Check(num_device == num_device_children && num_device == num_device_nodes,
        "%d nodes on the device, %d counted as children, %d blocks", num_device,
        num_device_children, num_device_nodes);
  Check(num_host_used == num_host_used_ &&
            num_host_used + static_cast<int32_t>(host_free_.size()) == host_end_,
        "%d host blocks in use, counted %d", num_host_used, num_host_used_);
}

// Exactly what may be evicted is in the heaps, and exactly what expires.
void KvCache::CheckHeaps() const {
  CheckOrder(device_leaves_, &PrefixNode::evict_slot, GoesFirst{});
  CheckOrder(host_leaves_, &PrefixNode::evict_slot, GoesFirst{});
  CheckOrder(expiring_, &PrefixNode::expiry_slot, EndsFirst{});
  size_t num_leaves = 0, num_expiring = 0;
  for (int32_t id = tree_.First(PrefixTree::kNone); id != PrefixTree::kNone; id = tree_.After(id)) {
    const PrefixNode& node = tree_[id];
    if (node.level == KvLevel::kRoot) continue;
    bool is_leaf = true;
    for (int32_t c = node.first_child; c != PrefixTree::kNone; c = tree_[c].next) {
      is_leaf = is_leaf && node.level == KvLevel::kDevice && tree_[c].level == KvLevel::kHost;
    }
    is_leaf = is_leaf && (node.level == KvLevel::kHost || device(node.block).refs == 0);
    Check(is_leaf == EvictionHeap::Contains(&node), "node %d may%s be evicted", id,
          is_leaf ? "" : " not");
    const bool expires = node.expires_ns != std::numeric_limits<int64_t>::max();
    Check(expires == ExpiryHeap::Contains(&node), "node %d does%s expire", id,
          expires ? "" : " not");
    Check(!expires || node.expires_ns > now_ns_, "node %d has expired", id);
    num_leaves += is_leaf;
    num_expiring += expires;
  }
  Check(
      num_leaves == device_leaves_.size() + host_leaves_.size() && num_expiring == expiring_.size(),
      "%zu nodes may be evicted, %zu expire: the heaps have others", num_leaves, num_expiring);
}

// Its published blocks are a path from a root.
void KvCache::CheckSequence(const KvSequence& sequence) const {
  Check(sequence.num_published <= static_cast<int32_t>(sequence.blocks.size()) &&
            sequence.num_retained <= sequence.num_published &&
            sequence.num_draft_blocks <= sequence.num_published,
        "a sequence has published %d of %zu blocks", sequence.num_published,
        sequence.blocks.size());
  int32_t parent = PrefixTree::kNone;
  for (int32_t i = 0; i < sequence.num_published; ++i) {
    const int32_t id = device(sequence.blocks[static_cast<size_t>(i)]).node;
    Check(id != PrefixTree::kNone && tree_.is_full(id), "published block %d is no full node", i);
    const int32_t above = tree_[id].parent;
    Check(i == 0 ? tree_[above].level == KvLevel::kRoot : above == parent,
          "published block %d hangs elsewhere", i);
    parent = id;
  }
  for (int32_t i = 0; i < sequence.num_draft_blocks; ++i) {
    Check(device(sequence.blocks[static_cast<size_t>(i)]).draft == config_.tokens_per_block,
          "block %d has lost its draft positions", i);
  }
}

}  // namespace plansmith
