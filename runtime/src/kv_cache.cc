// SPDX-License-Identifier: Apache-2.0
#include "kv_cache.h"

#include <algorithm>
#include <limits>

#include "status.h"

namespace plansmith {
namespace {

[[noreturn]] void Broken(const std::string& what) {
  throw StatusError(PSM_ERROR_INTERNAL, "KV cache: " + what);
}

KvCacheConfig Settled(KvCacheConfig config) {
  if (!config.can_copy) config.num_host_blocks = 0;
  return config;
}

}  // namespace

// Address space only: a step allocates nothing, and a huge pool costs what is used of it.
KvCache::KvCache(const KvCacheConfig& config)
    : config_(Settled(config)),
      tree_(int64_t{config_.num_blocks} + config_.num_host_blocks, config_.tokens_per_block,
            config_.hash),
      events_(config_.max_kv_events, config_.tokens_per_block),
      device_(static_cast<size_t>(config_.num_blocks), "the KV blocks"),
      host_(static_cast<size_t>(config_.num_host_blocks), "the host's KV blocks") {
  const size_t num_blocks = device_.size(), num_host_blocks = host_.size();
  free_.reserve(num_blocks);
  host_free_.reserve(num_host_blocks);
  device_leaves_.Reserve(num_blocks);
  host_leaves_.Reserve(num_host_blocks);
  expiring_.Reserve(num_blocks + num_host_blocks);
  path_.reserve(num_blocks + num_host_blocks);
  if (config_.can_copy) copies_.reserve(2 * num_blocks);
  for (int32_t level : {0, 1}) {
    if (level == 1 && num_host_blocks == 0) break;
    psm_kv_event event{};
    event.kind = PSM_KV_CREATED;
    event.level = level;
    event.num_blocks = level == 0 ? config_.num_blocks : config_.num_host_blocks;
    events_.Add(event);
  }
}

KvCache::~KvCache() = default;

int32_t KvCache::num_blocks() const { return config_.num_blocks; }
int32_t KvCache::num_free() const {
  return num_untouched() + static_cast<int32_t>(free_.size()) + num_cached_;
}
int32_t KvCache::num_cached() const { return num_cached_; }
int32_t KvCache::num_host_blocks() const { return config_.num_host_blocks; }
int32_t KvCache::num_host_used() const { return num_host_used_; }
int32_t KvCache::tokens_per_block() const { return config_.tokens_per_block; }
uint64_t KvCache::num_allocations() const { return num_allocations_; }
uint64_t KvCache::num_offloaded() const { return num_offloaded_; }
uint64_t KvCache::num_onboarded() const { return num_onboarded_; }
const std::vector<psm_block_copy>& KvCache::copies() const { return copies_; }
void KvCache::ClearCopies() { copies_.clear(); }

int32_t KvCache::BlocksInBytes(uint64_t kv_cache_bytes, uint64_t kv_bytes_per_block) {
  const uint64_t n = kv_cache_bytes / kv_bytes_per_block;
  if (n == 0) {
    throw StatusError(PSM_ERROR_OUT_OF_MEMORY,
                      Format("kv_cache_bytes is %llu, one KV block takes %llu; give at least that "
                             "(or 0 for the default)",
                             static_cast<unsigned long long>(kv_cache_bytes),
                             static_cast<unsigned long long>(kv_bytes_per_block)));
  }
  return static_cast<int32_t>(
      std::min<uint64_t>(n, static_cast<uint64_t>(std::numeric_limits<int32_t>::max())));
}

// Match, with the nodes of its full blocks in path_.
KvCache::Found KvCache::Walk(const PrefixKey& key, const int32_t* tokens,
                             int32_t num_tokens) const {
  Found found;
  PrefixMatch& match = found.match;
  path_.clear();
  int32_t at = num_tokens > 1 ? tree_.FindRoot(key) : PrefixTree::kNone;
  if (at == PrefixTree::kNone) return found;
  const int32_t size = config_.tokens_per_block, limit = num_tokens - 1;
  const bool on_host = IsWorthOnboarding();
  int32_t next = PrefixTree::kNone;  // the child whose tokens follow in full
  for (; match.num_tokens + size <= num_tokens; match.num_tokens += size) {
    next = tree_.FindChild(at, tokens + match.num_tokens);
    const bool is_host = tree_[next].level == KvLevel::kHost;
    if (is_host && !on_host) next = PrefixTree::kNone;
    if (next == PrefixTree::kNone || match.num_tokens + size > limit) break;
    path_.push_back(at = next);
    next = PrefixTree::kNone;
    ++match.num_blocks;
    match.num_host_blocks += is_host;
    match.num_blocks_taken += is_host || device(tree_[at].block).refs == 0;
  }
  if (!config_.can_copy || !config_.enable_partial_reuse) return found;
  const int32_t most = std::min(size, limit - match.num_tokens);
  found.partial = next != PrefixTree::kNone
                      ? PrefixTree::Partial{next, most}
                      : tree_.FindPartial(at, tokens + match.num_tokens, most, on_host);
  match.num_partial_tokens = found.partial.num_tokens;
  match.num_tokens += match.num_partial_tokens;
  match.num_blocks_taken += match.num_partial_tokens > 0;
  return found;
}

PrefixMatch KvCache::Match(const PrefixKey& key, const int32_t* tokens, int32_t num_tokens) const {
  return Walk(key, tokens, num_tokens).match;
}

int32_t KvCache::Attach(const PrefixKey& key, const int32_t* tokens, int32_t num_tokens,
                        KvSequence* sequence) {
  if (!sequence->blocks.empty()) Broken("a sequence that holds blocks cannot attach");
  const Found found = Walk(key, tokens, num_tokens);
  const PrefixMatch& match = found.match;
  if (match.num_blocks_taken > num_free()) {
    Broken(Format("%d blocks wanted by a prefix, %d free: the scheduler did not check",
                  match.num_blocks_taken, num_free()));
  }
  // Held first, copied then: what is taken for the copies must evict none of them.
  if (match.num_partial_tokens > 0) Pin(found.partial.node, true);
  for (int32_t id : path_) {
    tree_.MoveToFront(id);
    if (tree_[id].level == KvLevel::kHost) {
      Pin(id, true);
    } else {
      Ref(tree_[id].block);
    }
  }
  for (int32_t id : path_) {
    if (tree_[id].level == KvLevel::kHost) Onboard(id);
    sequence->blocks.push_back(tree_[id].block);
  }
  sequence->num_published = match.num_blocks;
  if (match.num_partial_tokens > 0) sequence->blocks.push_back(TakeCopyOf(found.partial));
  return match.num_tokens;
}

void KvCache::QueueCopy(int32_t kind, int32_t src, int32_t dst, int32_t num_tokens) {
  copies_.push_back({kind, src, dst, num_tokens});
}

void KvCache::Onboard(int32_t id) {
  const int32_t from = tree_[id].block, to = Take();
  QueueCopy(PSM_COPY_FROM_HOST, from, to, config_.tokens_per_block);
  device(to).draft = host(from).draft;
  Unplace(id);
  FreeIfUnused(KvLevel::kHost, from);
  Place(id, KvLevel::kDevice, to);
  Pin(id, false);
  Event(PSM_KV_UPDATED, tree_[id]);
  ++num_onboarded_;
}

// A block for a sequence of its own that begins like the pinned node `partial`.
int32_t KvCache::TakeCopyOf(const PrefixTree::Partial& partial) {
  const PrefixNode& from = tree_[partial.node];
  const bool is_host = from.level == KvLevel::kHost;
  const int32_t block = from.block, n = partial.num_tokens;
  const int32_t draft = is_host ? host(block).draft : device(block).draft;
  tree_.MoveToFront(partial.node);
  // When it is the last block that can be had, it is evicted itself and simply changes hands.
  const bool is_last = MustEvict() && device_leaves_.empty();
  if (is_last) Pin(partial.node, false);
  const int32_t to = Take();
  if (is_host || to != block) {
    QueueCopy(is_host ? PSM_COPY_FROM_HOST : PSM_COPY_DEVICE, block, to, n);
  }
  device(to).draft = std::min(draft, n);
  if (!is_last) Pin(partial.node, false);
  return to;
}

int32_t KvCache::Extend(KvSequence* sequence, int64_t num_positions) {
  const int32_t added = BlocksFor(num_positions) - static_cast<int32_t>(sequence->blocks.size());
  if (added <= 0) return 0;
  if (added > num_free()) {
    Broken(Format("%d blocks wanted, %d free: the scheduler did not check", added, num_free()));
  }
  for (int32_t i = 0; i < added; ++i) sequence->blocks.push_back(Take());
  return added;
}

void KvCache::Release(KvSequence* sequence, OnEviction on_eviction) {
  // From the back: what lies deeper in the tree then counts as older, and empty blocks are handed
  // out again in position order.
  while (!sequence->blocks.empty()) {
    Drop(sequence->blocks.back(), on_eviction);
    sequence->blocks.pop_back();
  }
  sequence->num_published = sequence->num_retained = sequence->num_draft_blocks = 0;
}

void KvCache::SetCosts(double host_copy_ns_per_block, double recompute_ns_per_block) {
  host_copy_ns_ = host_copy_ns_per_block;
  recompute_ns_ = recompute_ns_per_block;
}

size_t KvCache::TakeEvents(psm_kv_event* events, size_t max_events, int32_t* token_ids,
                           size_t max_token_ids) {
  return events_.Take(events, max_events, token_ids, max_token_ids);
}

}  // namespace plansmith
