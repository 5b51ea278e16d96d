// Where blocks come from: those that hold nothing, then what is cached, the least worth first. What
// the device gives up may go to the host, which gives up its own in the same way.
//
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "kv_cache.h"
#include "status.h"

namespace plansmith {
namespace {

// Blocks copied to the host before their share of returns says something.
constexpr double kTrustedCopies = 64.0;

[[noreturn]] void Broken(const std::string& what) {
  throw StatusError(PSM_ERROR_INTERNAL, "KV cache: " + what);
}

}  // namespace

int32_t KvCache::Take() {
  if (MustEvict()) EvictOne();
  ++num_allocations_;
  int32_t block = blocks_end_;
  if (free_.empty()) {
    ++blocks_end_;
  } else {  // before one that was never used, which would cost memory
    block = free_.back();
    free_.pop_back();
  }
  device(block) = {1, PrefixTree::kNone, 0, 0};
  return block;
}

void KvCache::Ref(int32_t block) {
  DeviceBlock& b = device(block);
  if (b.refs++ > 0) return;
  --num_cached_;
  Requeue(b.node);
}

void KvCache::Drop(int32_t block, OnEviction on_eviction) {
  DeviceBlock& b = device(block);
  if (b.refs <= 0) Broken(Format("block %d is released but nobody holds it", block));
  if (--b.refs > 0) return;
  if (b.node == PrefixTree::kNone) {
    free_.push_back(block);
    return;
  }
  ++num_cached_;
  tree_[b.node].on_eviction = on_eviction;
  tree_[b.node].last_used = ++clock_;
  Requeue(b.node);
}

void KvCache::Pin(int32_t id, bool pinned) {
  tree_[id].pinned = pinned;
  tree_[id].last_used = ++clock_;
  Requeue(id);
}

// One cached block of the device becomes an empty one.
void KvCache::EvictOne() {
  if (device_leaves_.empty()) Broken("no block can be evicted: its books are wrong");
  const PrefixNode& node = *device_leaves_.top();
  const int32_t id = IdOf(&node), block = node.block;
  // What is on the host below it is of no use without it.
  const bool is_needed = node.first_child != PrefixTree::kNone && IsWorthOnboarding();
  const int32_t to = is_needed || IsWorthHost(node) ? TakeHostBlock(node) : -1;
  if (to < 0) {
    RemoveBelow(id);
    Remove(id);
    return;
  }
  QueueCopy(PSM_COPY_TO_HOST, block, to, node.num_tokens);
  host(to).draft = std::min(device(block).draft, node.num_tokens);
  Unplace(id);
  FreeIfUnused(KvLevel::kDevice, block);
  Place(id, KvLevel::kHost, to);
  Event(PSM_KV_UPDATED, node);
  ++num_offloaded_;
}

bool KvCache::IsWorthOnboarding() const {
  return recompute_ns_ <= 0 || host_copy_ns_ < recompute_ns_;
}

bool KvCache::IsWorthHost(const PrefixNode& node) const {
  if (config_.num_host_blocks == 0 || node.on_eviction == OnEviction::kDrop) return false;
  if (node.priority < config_.host_offload_min_priority) return false;
  if (recompute_ns_ <= 0) return true;
  // The way there is paid at once, the way back and what it saves only if somebody asks for it. As
  // long as little has been copied, everything counts as asked for.
  const double comes_back =
      node.on_eviction == OnEviction::kKeep
          ? 1.0
          : std::min(1.0, (static_cast<double>(num_onboarded_) + kTrustedCopies) /
                              (static_cast<double>(num_offloaded_) + kTrustedCopies));
  return host_copy_ns_ + comes_back * host_copy_ns_ < comes_back * recompute_ns_;
}

// A host block for `incoming`, or -1 when all of them hold what is worth more.
int32_t KvCache::TakeHostBlock(const PrefixNode& incoming) {
  if (host_free_.empty()) {
    if (host_end_ < config_.num_host_blocks) return host_end_++;
    if (host_leaves_.empty()) return -1;
    const PrefixNode& victim = *host_leaves_.top();
    const bool has_children = incoming.first_child != PrefixTree::kNone;
    if (victim.priority > incoming.priority && !has_children) return -1;
    Remove(IdOf(&victim));
  }
  const int32_t block = host_free_.back();
  host_free_.pop_back();
  return block;
}

// The node `id`, which has no block, gets `block`.
void KvCache::Place(int32_t id, KvLevel level, int32_t block) {
  PrefixNode& node = tree_[id];
  node.level = level;
  node.block = block;
  if (level == KvLevel::kDevice) {
    device(block).node = id;
    num_cached_ += device(block).refs == 0;
    ++tree_[node.parent].num_device_children;
    Requeue(node.parent);
  } else {
    host(block).node = id;
    ++num_host_used_;
  }
  Requeue(id);
}

// It no longer has a block: it is to get another, or to be removed.
void KvCache::Unplace(int32_t id) {
  PrefixNode& node = tree_[id];
  if (EvictionHeap::Contains(&node)) LeavesOf(node.level).Remove(&node);
  if (node.level == KvLevel::kDevice) {
    device(node.block).node = PrefixTree::kNone;
    num_cached_ -= device(node.block).refs == 0;
    --tree_[node.parent].num_device_children;
    Requeue(node.parent);
  } else {
    host(node.block).node = PrefixTree::kNone;
    --num_host_used_;
  }
}

void KvCache::FreeIfUnused(KvLevel level, int32_t block) {
  if (level == KvLevel::kHost) {
    host_free_.push_back(block);
  } else if (device(block).refs == 0) {
    free_.push_back(block);
  }
}

// After whatever decides whether, or when, `id` is evicted has changed.
void KvCache::Requeue(int32_t id) {
  PrefixNode& node = tree_[id];
  if (node.level == KvLevel::kRoot) return;
  const bool is_leaf = node.level == KvLevel::kHost
                           ? node.first_child == PrefixTree::kNone
                           : device(node.block).refs == 0 && node.num_device_children == 0;
  const bool wanted = is_leaf && !node.pinned;
  EvictionHeap& leaves = LeavesOf(node.level);
  if (wanted && EvictionHeap::Contains(&node)) {
    leaves.Update(&node);
  } else if (wanted) {
    leaves.Push(&node);
  } else if (EvictionHeap::Contains(&node)) {
    leaves.Remove(&node);
  }
}

// `id`, which has no children, is no longer cached; sequences that hold its block keep it.
void KvCache::Remove(int32_t id) {
  PrefixNode& node = tree_[id];
  const int32_t parent = node.parent, block = node.block;
  const KvLevel level = node.level;
  Event(PSM_KV_REMOVED, node);
  if (ExpiryHeap::Contains(&node)) expiring_.Remove(&node);
  Unplace(id);
  FreeIfUnused(level, block);
  tree_.Remove(id);
  if (tree_[parent].level == KvLevel::kRoot && tree_[parent].first_child == PrefixTree::kNone) {
    tree_.Remove(parent);
  } else {
    Requeue(parent);
  }
}

// Everything below `top` that no sequence holds.
void KvCache::RemoveBelow(int32_t top) {
  for (int32_t id = tree_.First(top), next; id != top; id = next) {
    next = tree_.After(id);
    const PrefixNode& node = tree_[id];
    if (node.level == KvLevel::kHost || device(node.block).refs == 0) Remove(id);
  }
}

void KvCache::Forget(const PrefixKey& key) {
  if (key.private_id != 0) {
    const int32_t root = tree_.FindRoot(key);
    if (root != PrefixTree::kNone) RemoveBelow(root);
    return;
  }
  for (int32_t root = tree_.first_root(), next; root != PrefixTree::kNone; root = next) {
    next = tree_[root].next;
    if (tree_.key(root).adapter_id == key.adapter_id) RemoveBelow(root);
  }
}

void KvCache::ForgetAll() {
  for (int32_t root = tree_.first_root(), next; root != PrefixTree::kNone; root = next) {
    next = tree_[root].next;
    RemoveBelow(root);
  }
}

void KvCache::Event(int32_t kind, const PrefixNode& node) {
  if (!node.has_events) return;
  psm_kv_event event{};
  event.kind = kind;
  event.level = node.level == KvLevel::kHost;
  event.block_hash = node.event_hash;
  event.priority = node.priority;
  events_.Add(event);
}

}  // namespace plansmith
