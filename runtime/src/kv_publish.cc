// What becomes shareable, and how long it is worth keeping.
//
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>
#include <limits>

#include "kv_cache.h"
#include "status.h"

namespace plansmith {
namespace {

constexpr int64_t kNever = std::numeric_limits<int64_t>::max();

// The same in every engine, so that a router can compare them.
uint64_t EventHash(uint64_t seed, const int32_t* tokens, size_t n) {
  const uint64_t hash = PrefixTree::HashTokens(seed, tokens, n);
  return hash == 0 ? 1 : hash;  // 0 = no parent
}

}  // namespace

void KvCache::Publish(const PrefixKey& key, const int32_t* tokens, int32_t num_computed,
                      const Retention& retention, int64_t now_ns, KvSequence* sequence) {
  SetNow(now_ns);
  const int32_t size = config_.tokens_per_block;
  const int32_t end = std::min(num_computed / size, static_cast<int32_t>(sequence->blocks.size()));
  for (int32_t i = sequence->num_retained; i < sequence->num_published; ++i) {
    RaiseWorth(device(sequence->blocks[static_cast<size_t>(i)]).node,
               WorthOf(retention, i * size, (i + 1) * size));
  }
  if (sequence->num_published < end) {
    int32_t at = Parent(key, *sequence);
    for (int32_t i = sequence->num_published; i < end; ++i) {
      at = PublishBlock(at, tokens + i * size, WorthOf(retention, i * size, (i + 1) * size),
                        &sequence->blocks[static_cast<size_t>(i)]);
      ++sequence->num_published;
    }
  }
  sequence->num_retained = sequence->num_published;
}

void KvCache::PublishTail(const PrefixKey& key, const int32_t* tokens, int32_t num_computed,
                          const Retention& retention, int64_t now_ns, KvSequence* sequence) {
  Publish(key, tokens, num_computed, retention, now_ns, sequence);
  const int32_t begin = sequence->num_published * config_.tokens_per_block;
  const int32_t filled = num_computed - begin;
  if (filled <= 0 || filled >= config_.tokens_per_block) return;
  if (!config_.can_copy || !config_.enable_partial_reuse) return;
  const Worth worth = WorthOf(retention, begin, num_computed);
  const int32_t block = sequence->blocks[static_cast<size_t>(sequence->num_published)];
  const int32_t own = device(block).node;
  if (own != PrefixTree::kNone) {
    if (filled > tree_[own].num_tokens) tree_.SetTokens(own, tokens + begin, filled);
    SetWorth(own, worth);
    return;
  }
  const int32_t parent = Parent(key, *sequence);
  const PrefixTree::Partial there =
      tree_.FindPartial(parent, tokens + begin, filled, IsWorthOnboarding());
  if (there.num_tokens < filled) AddNode(parent, tokens + begin, filled, block, worth);
}

// What the next block of `sequence` hangs on.
int32_t KvCache::Parent(const PrefixKey& key, const KvSequence& sequence) {
  if (sequence.num_published > 0) {
    return device(sequence.blocks[static_cast<size_t>(sequence.num_published - 1)]).node;
  }
  const int32_t there = tree_.FindRoot(key);
  if (there != PrefixTree::kNone) return there;
  const int32_t root = tree_.AddRoot(key);
  tree_[root].has_events = events_.on() && key.private_id == 0;
  int32_t words[6];
  std::memcpy(words, &key, sizeof(words));
  tree_[root].event_hash = EventHash(0, words, 6);
  return root;
}

// Makes *block, or the block that already holds the same, the child of `parent` with these tokens.
int32_t KvCache::PublishBlock(int32_t parent, const int32_t* tokens, Worth worth, int32_t* block) {
  const int32_t id = tree_.FindChild(parent, tokens);
  const int32_t own = device(*block).node;
  if (own != PrefixTree::kNone && own != id &&
      (tree_.is_full(own) || tree_[own].parent != parent)) {
    throw StatusError(PSM_ERROR_INTERNAL,
                      Format("KV cache: block %d is published as what it is not", *block));
  }
  if (id == PrefixTree::kNone && own == PrefixTree::kNone) {
    return AddNode(parent, tokens, config_.tokens_per_block, *block, worth);
  }
  if (id == PrefixTree::kNone) {  // a tail that has filled
    tree_.SetTokens(own, tokens, config_.tokens_per_block);
    SetWorth(own, worth);
    Stored(own);
    return own;
  }
  if (id != own) {
    if (own != PrefixTree::kNone) Remove(own);  // a tail, now of less use than what is there
    ChangeOver(id, block);
  }
  tree_.MoveToFront(id);
  RaiseWorth(id, worth);
  return id;
}

// *block holds what the node `id` has already: one of the two is given up. num_free() never falls.
void KvCache::ChangeOver(int32_t id, int32_t* block) {
  const DeviceBlock& mine = device(*block);
  if (tree_[id].level == KvLevel::kHost) {
    TakeOver(id, *block);
    return;
  }
  const int32_t theirs = tree_[id].block;
  const bool has_more_draft = mine.draft > device(theirs).draft;
  if (device(theirs).refs == 0 && (has_more_draft || mine.refs > 1)) {
    TakeOver(id, *block);
    return;
  }
  if (has_more_draft && config_.can_copy) {
    QueueCopy(PSM_COPY_DEVICE, *block, theirs, config_.tokens_per_block);
    device(theirs).draft = mine.draft;
  }
  Ref(theirs);
  Drop(*block);
  *block = theirs;
}

// The node `id`, which nobody uses, goes on with `block` instead of its own.
void KvCache::TakeOver(int32_t id, int32_t block) {
  const KvLevel level = tree_[id].level;
  const int32_t old = tree_[id].block;
  Unplace(id);
  FreeIfUnused(level, old);
  Place(id, KvLevel::kDevice, block);
  if (level == KvLevel::kHost) Event(PSM_KV_UPDATED, tree_[id]);
}

int32_t KvCache::AddNode(int32_t parent, const int32_t* tokens, int32_t num_tokens, int32_t block,
                         Worth worth) {
  const int32_t id = tree_.Add(parent, tokens, num_tokens);
  tree_[id].priority = PSM_DEFAULT_RETENTION;
  tree_[id].expires_ns = kNever;
  tree_[id].on_eviction = OnEviction::kKeepIfReused;
  Place(id, KvLevel::kDevice, block);
  SetWorth(id, worth);
  if (tree_.is_full(id)) Stored(id);
  return id;
}

void KvCache::Stored(int32_t id) {
  PrefixNode& node = tree_[id];
  const PrefixNode& parent = tree_[node.parent];
  if (!parent.has_events) return;
  node.has_events = true;
  node.event_hash =
      EventHash(parent.event_hash, tree_.tokens(id), static_cast<size_t>(config_.tokens_per_block));
  psm_kv_event event{};
  event.kind = PSM_KV_STORED;
  event.block_hash = node.event_hash;
  event.priority = node.priority;
  if (parent.level != KvLevel::kRoot) event.parent_hash = parent.event_hash;
  int32_t root = node.parent;
  while (tree_[root].level != KvLevel::kRoot) root = tree_[root].parent;
  event.cache_salt = tree_.key(root).salt;
  event.adapter_id = tree_.key(root).adapter_id;
  events_.Add(event, tree_.tokens(id));
}

// The highest priority of the positions begin..end, and its duration: of equals the longest.
KvCache::Worth KvCache::WorthOf(const Retention& retention, int32_t begin, int32_t end) const {
  Worth worth{-1, 0};
  const auto consider = [&worth](int32_t priority, int32_t duration_ms) {
    const auto length = [](int32_t ms) { return static_cast<uint32_t>(ms); };  // -1 is longest
    if (priority > worth.priority ||
        (priority == worth.priority && length(duration_ms) > length(worth.duration_ms))) {
      worth = {priority, duration_ms};
    }
  };
  const int32_t prompt_end = std::min(end, retention.num_prompt);
  int32_t num_uncovered = std::max(prompt_end - begin, 0);
  auto range = std::upper_bound(
      retention.ranges.begin(), retention.ranges.end(), begin,
      [](int32_t p, const psm_retention_range& r) { return r.end < 0 || p < r.end; });
  if (num_uncovered == 0) range = retention.ranges.end();
  for (; range != retention.ranges.end() && range->start < prompt_end; ++range) {
    const int32_t last = range->end < 0 ? prompt_end : std::min(range->end, prompt_end);
    num_uncovered -= last - std::max(range->start, begin);
    consider(range->priority, range->duration_ms);
  }
  if (num_uncovered > 0) consider(PSM_DEFAULT_RETENTION, -1);
  if (end > retention.num_prompt) consider(retention.decode_priority, retention.decode_duration_ms);
  return worth;
}

int64_t KvCache::Expiry(Worth worth) const {
  return worth.duration_ms < 0 ? kNever : now_ns_ + int64_t{worth.duration_ms} * 1000000;
}

void KvCache::SetWorth(int32_t id, Worth worth) { Reprioritize(id, worth.priority, Expiry(worth)); }

void KvCache::RaiseWorth(int32_t id, Worth worth) {
  const PrefixNode& node = tree_[id];
  const int64_t expires_ns = Expiry(worth);
  if (expires_ns <= now_ns_) return;
  if (worth.priority > node.priority ||
      (worth.priority == node.priority && expires_ns > node.expires_ns)) {
    Reprioritize(id, worth.priority, expires_ns);
  }
}

void KvCache::Reprioritize(int32_t id, int32_t priority, int64_t expires_ns) {
  PrefixNode& node = tree_[id];
  if (expires_ns <= now_ns_) priority = PSM_DEFAULT_RETENTION;
  if (priority == PSM_DEFAULT_RETENTION) expires_ns = kNever;
  const bool changes = priority != node.priority;
  node.priority = static_cast<uint8_t>(priority);
  node.expires_ns = expires_ns;
  if (ExpiryHeap::Contains(&node)) expiring_.Remove(&node);
  if (expires_ns != kNever) expiring_.Push(&node);
  if (!changes) return;
  Requeue(id);
  Event(PSM_KV_UPDATED, node);
}

void KvCache::SetNow(int64_t now_ns) {
  now_ns_ = std::max(now_ns_, now_ns);
  while (!expiring_.empty() && expiring_.top()->expires_ns <= now_ns_) {
    Reprioritize(IdOf(expiring_.top()), PSM_DEFAULT_RETENTION, kNever);
  }
}

}  // namespace plansmith
