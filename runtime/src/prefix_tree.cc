// SPDX-License-Identifier: Apache-2.0
#include "prefix_tree.h"

#include <algorithm>
#include <cstring>
#include <random>

#include "status.h"

namespace plansmith {
namespace {

// Numbers of nodes are int32, and there may be as many roots as blocks.
constexpr int32_t kMostNodes = (1 << 30) - 2;

size_t CheckedNodes(int64_t max_nodes) {
  if (max_nodes < 0 || max_nodes > kMostNodes) {
    throw StatusError(PSM_ERROR_OUT_OF_MEMORY,
                      Format("%lld KV blocks on device and host are more than the %d that can be "
                             "counted; lower kv_cache_bytes or host_cache_bytes",
                             static_cast<long long>(max_nodes), kMostNodes));
  }
  return static_cast<size_t>(max_nodes);
}

// Twice as many places as blocks: roots and tails included, chains stay short.
size_t TableSize(size_t max_nodes) {
  size_t size = 2;
  while (size < 2 * max_nodes) size *= 2;
  return size;
}

uint64_t RandomSecret() {
  std::random_device device;
  return (uint64_t{device()} << 32) | device();
}

int32_t CommonPrefix(const int32_t* a, const int32_t* b, int32_t n) {
  return static_cast<int32_t>(std::mismatch(a, a + n, b).first - a);
}

}  // namespace

PrefixTree::PrefixTree(int64_t max_nodes, int32_t tokens_per_block, HashFn hash)
    : tokens_per_block_(tokens_per_block),
      first_root_(static_cast<int32_t>(CheckedNodes(max_nodes)) + 1),
      hash_(hash),
      secret_(RandomSecret()),
      nodes_(2 * static_cast<size_t>(max_nodes) + 1, "the prefix tree"),
      tokens_(static_cast<size_t>(max_nodes) * static_cast<size_t>(tokens_per_block),
              "the prefix tree's tokens"),
      keys_(static_cast<size_t>(max_nodes), "the prefix tree's keys"),
      table_mask_(TableSize(static_cast<size_t>(max_nodes)) - 1),
      table_(static_cast<size_t>(table_mask_) + 1, "the prefix tree's table"),
      roots_end_(first_root_) {}

uint64_t PrefixTree::HashTokens(uint64_t seed, const int32_t* tokens, size_t n) {
  uint64_t h = seed + 0xA0761D6478BD642Fu;  // a zero would swallow zeros
  for (size_t i = 0; i < n; ++i) {
    h = (h ^ static_cast<uint32_t>(tokens[i])) * 0x9E3779B97F4A7C15u;
    h ^= h >> 29;
  }
  h *= 0xBF58476D1CE4E5B9u;
  return h ^ (h >> 32);
}

uint64_t PrefixTree::ChildHash(int32_t parent, const int32_t* tokens) const {
  return hash_(secret_ + static_cast<uint64_t>(parent) * 0xD1B54A32D192ED03u, tokens,
               static_cast<size_t>(tokens_per_block_));
}

uint64_t PrefixTree::KeyHash(const PrefixKey& key) const {
  int32_t words[6];
  std::memcpy(words, &key, sizeof(words));
  return hash_(secret_, words, 6);
}

uint64_t PrefixTree::HashOf(int32_t id) const {
  const PrefixNode& node = (*this)[id];
  return node.level == KvLevel::kRoot ? KeyHash(key(id)) : ChildHash(node.parent, tokens(id));
}

void PrefixTree::Enter(int32_t id, uint64_t hash) {
  (*this)[id].tag = static_cast<uint32_t>(hash >> 32);
  int32_t& bucket = Bucket(hash);
  (*this)[id].table_next = bucket;
  bucket = id;
}

void PrefixTree::Leave(int32_t id, uint64_t hash) {
  int32_t* link = &Bucket(hash);
  while (*link != id) link = &(*this)[*link].table_next;
  *link = (*this)[id].table_next;
}

int32_t PrefixTree::FindRoot(const PrefixKey& key) const {
  const uint64_t hash = KeyHash(key);
  for (int32_t id = Bucket(hash); id != kNone; id = (*this)[id].table_next) {
    if (id >= first_root_ && this->key(id) == key) return id;
  }
  return kNone;
}

int32_t PrefixTree::FindChild(int32_t parent, const int32_t* tokens) const {
  const uint64_t hash = ChildHash(parent, tokens);
  const size_t bytes = static_cast<size_t>(tokens_per_block_) * sizeof(int32_t);
  for (int32_t id = Bucket(hash); id != kNone; id = (*this)[id].table_next) {
    const PrefixNode& node = (*this)[id];
    if (node.tag == static_cast<uint32_t>(hash >> 32) && node.parent == parent &&
        id < first_root_ && std::memcmp(this->tokens(id), tokens, bytes) == 0) {
      return id;
    }
  }
  return kNone;
}

PrefixTree::Partial PrefixTree::FindPartial(int32_t parent, const int32_t* tokens,
                                            int32_t max_tokens, bool on_host) const {
  Partial best;
  int32_t left = kMaxScan;
  for (int32_t id = (*this)[parent].first_child; id != kNone && left > 0; --left) {
    const PrefixNode& node = (*this)[id];
    const bool is_host = node.level == KvLevel::kHost;
    const int32_t n = CommonPrefix(this->tokens(id), tokens, std::min(max_tokens, node.num_tokens));
    const bool nearer =
        n == best.num_tokens && !is_host && (*this)[best.node].level == KvLevel::kHost;
    if ((n > best.num_tokens || nearer) && (on_host || !is_host)) best = {id, n};
    id = node.next;
  }
  return best;
}

void PrefixTree::Link(int32_t id, int32_t parent) {
  PrefixNode& node = (*this)[id];
  node.parent = parent;
  node.prev = kNone;
  node.next = (*this)[parent].first_child;
  if (node.next != kNone) (*this)[node.next].prev = id;
  (*this)[parent].first_child = id;
}

void PrefixTree::Unlink(int32_t id) {
  const PrefixNode& node = (*this)[id];
  if (node.next != kNone) (*this)[node.next].prev = node.prev;
  (node.prev != kNone ? (*this)[node.prev].next : (*this)[node.parent].first_child) = node.next;
}

void PrefixTree::MoveToFront(int32_t id) {
  if ((*this)[id].prev == kNone) return;
  Unlink(id);
  Link(id, (*this)[id].parent);
}

int32_t PrefixTree::AddRoot(const PrefixKey& key) {
  const int32_t id = free_root_ != kNone ? free_root_ : roots_end_++;
  if (id == free_root_) free_root_ = (*this)[id].next;
  (*this)[id] = PrefixNode{};
  (*this)[id].evict_slot = (*this)[id].expiry_slot = -1;
  keys_[static_cast<size_t>(id - first_root_)] = key;
  Link(id, kNone);
  Enter(id, KeyHash(key));
  return id;
}

int32_t PrefixTree::Add(int32_t parent, const int32_t* tokens, int32_t num_tokens) {
  const int32_t id = free_node_ != kNone ? free_node_ : nodes_end_++;
  if (id == free_node_) free_node_ = (*this)[id].next;
  (*this)[id] = PrefixNode{};
  (*this)[id].evict_slot = (*this)[id].expiry_slot = -1;
  (*this)[id].level = KvLevel::kDevice;
  Link(id, parent);
  ++num_nodes_;
  SetTokens(id, tokens, num_tokens);
  return id;
}

void PrefixTree::SetTokens(int32_t id, const int32_t* tokens, int32_t num_tokens) {
  std::copy(tokens, tokens + num_tokens, &tokens_[TokenIdx(id)]);
  (*this)[id].num_tokens = num_tokens;
  if (num_tokens == tokens_per_block_) Enter(id, ChildHash((*this)[id].parent, tokens));
}

void PrefixTree::Remove(int32_t id) {
  const bool is_root = id >= first_root_;
  if (is_root || is_full(id)) Leave(id, HashOf(id));
  Unlink(id);
  int32_t& unused = is_root ? free_root_ : free_node_;
  (*this)[id] = PrefixNode{};
  (*this)[id].next = unused;
  unused = id;
  if (!is_root) --num_nodes_;
}

int32_t PrefixTree::First(int32_t top) const {
  while ((*this)[top].first_child != kNone) top = (*this)[top].first_child;
  return top;
}

int32_t PrefixTree::After(int32_t id) const {
  const PrefixNode& node = (*this)[id];
  return node.next == kNone ? node.parent : First(node.next);
}

void PrefixTree::CheckInvariants() const {
  int32_t num_nodes = 0, num_in_table = 0, num_entered = 0;
  for (int32_t id = First(kNone); id != kNone; id = After(id)) {
    const PrefixNode& node = (*this)[id];
    const bool is_root = id >= first_root_;
    const int32_t child = node.first_child;
    const bool linked =
        (node.next == kNone || (*this)[node.next].prev == id) &&
        (node.prev == kNone ? (*this)[node.parent].first_child : (*this)[node.prev].next) == id &&
        (child == kNone || ((*this)[child].parent == id && (*this)[child].prev == kNone)) &&
        (node.next == kNone || (*this)[node.next].parent == node.parent);
    const bool sized = is_root ? node.num_tokens == 0 && node.parent == kNone && child != kNone
                               : node.num_tokens >= 1 && node.num_tokens <= tokens_per_block_;
    const bool found = is_root       ? FindRoot(key(id)) == id
                       : is_full(id) ? FindChild(node.parent, tokens(id)) == id
                                     : child == kNone;
    if (!linked || !sized || !found || (node.level == KvLevel::kRoot) != is_root) {
      throw StatusError(PSM_ERROR_INTERNAL, Format("prefix tree: node %d is %s", id,
                                                   !linked  ? "linked wrongly"
                                                   : !found ? "not in the table"
                                                            : "odd"));
    }
    num_nodes += !is_root;
    num_entered += is_root || is_full(id);
  }
  for (size_t i = 0; i <= table_mask_; ++i) {
    for (int32_t id = table_[i]; id != kNone; id = (*this)[id].table_next) ++num_in_table;
  }
  if (num_nodes != num_nodes_ || num_in_table != num_entered) {
    throw StatusError(PSM_ERROR_INTERNAL,
                      Format("prefix tree: %d nodes of %d, %d of %d in the table", num_nodes,
                             num_nodes_, num_in_table, num_entered));
  }
}

}  // namespace plansmith
