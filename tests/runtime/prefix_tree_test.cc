// The prefix tree against a map of the same, with good hashes and with ones that all collide.
//
// SPDX-License-Identifier: Apache-2.0
#include "prefix_tree.h"

#include <stdio.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <random>
#include <utility>
#include <vector>

#include "check.h"
#include "resident_bytes.h"

using plansmith::KvLevel;
using plansmith::PrefixKey;
using plansmith::PrefixTree;
using plansmith::StatusError;

namespace {

using Tokens = std::vector<int32_t>;

uint64_t AllCollide(uint64_t, const int32_t*, size_t) { return 0; }
// The same tag and few buckets, so that only tokens and parent tell blocks apart.
uint64_t FewBuckets(uint64_t seed, const int32_t* tokens, size_t n) {
  return PrefixTree::HashTokens(seed, tokens, n) & 3;
}

// Random growth and removal; every lookup is checked against the map.
class Random {
 public:
  Random(uint32_t seed, PrefixTree::HashFn hash)
      : random_(seed), size_(1 + static_cast<int32_t>(seed % 4)), tree_(kMost, size_, hash) {}

  void Steps(int n) {
    for (int i = 0; i < n; ++i) {
      const int what = Below(10);
      if (what < 5) {
        AddOne();
      } else if (what < 6) {
        GrowTail();
      } else if (what < 8) {
        RemoveOne();
      } else {
        LookAt(AnyParent(), RandomTokens(size_));
      }
      tree_.CheckInvariants();
      CHECK(tree_.num_nodes() == static_cast<int32_t>(nodes_.size()));
    }
    for (const auto& entry : full_) {
      CHECK(tree_.FindChild(entry.first.first, entry.first.second.data()) == entry.second);
    }
  }

 private:
  static constexpr int32_t kMost = 40;
  struct Node {
    int32_t parent;
    Tokens tokens;
  };
  int Below(int n) { return static_cast<int>(random_() % static_cast<uint32_t>(n)); }
  Tokens RandomTokens(int32_t n) {
    Tokens tokens(static_cast<size_t>(n));
    for (int32_t& t : tokens) t = Below(3) - 1;
    return tokens;
  }
  int32_t AnyParent() {
    const PrefixKey key{static_cast<uint64_t>(Below(2)), static_cast<uint64_t>(Below(2)),
                        static_cast<uint64_t>(Below(2))};
    if (!nodes_.empty() && Below(3) > 0) {
      auto it = nodes_.begin();
      std::advance(it, Below(static_cast<int>(nodes_.size())));
      if (tree_.is_full(it->first)) return it->first;
    }
    const int32_t root = tree_.FindRoot(key);
    if (root == PrefixTree::kNone) return AddRoot(key);
    CHECK(tree_.key(root) == key);
    return root;
  }
  // A root comes with a child: without one the tree is not whole.
  int32_t AddRoot(const PrefixKey& key) {
    if (nodes_.size() == kMost) return tree_.first_root();
    const int32_t root = tree_.AddRoot(key);
    Insert(root, RandomTokens(1 + Below(size_)));
    return root;
  }
  void AddOne() {
    const int32_t parent = AnyParent();
    const Tokens tokens = RandomTokens(1 + Below(size_));
    if (nodes_.size() == kMost) return;
    LookAt(parent, tokens);
    if (static_cast<int32_t>(tokens.size()) < size_ || full_.count({parent, tokens}) == 0) {
      Insert(parent, tokens);
    }
  }
  void Insert(int32_t parent, const Tokens& tokens) {
    const int32_t id = tree_.Add(parent, tokens.data(), static_cast<int32_t>(tokens.size()));
    CHECK(nodes_.insert({id, {parent, tokens}}).second);
    if (tree_.is_full(id)) full_[{parent, tokens}] = id;
  }
  void GrowTail() {
    for (auto& entry : nodes_) {
      Node& node = entry.second;
      if (tree_.is_full(entry.first) || Below(2) == 0) continue;
      Tokens longer = node.tokens;
      longer.push_back(Below(3) - 1);
      const int32_t n = static_cast<int32_t>(longer.size());
      if (n == size_ && full_.count({node.parent, longer}) > 0) continue;
      tree_.SetTokens(entry.first, longer.data(), n);
      node.tokens = longer;
      if (n == size_) full_[{node.parent, longer}] = entry.first;
      return;
    }
  }
  void RemoveOne() {
    for (auto it = nodes_.begin(); it != nodes_.end(); ++it) {
      if (tree_[it->first].first_child != PrefixTree::kNone || Below(3) > 0) continue;
      const Node node = it->second;
      tree_.Remove(it->first);
      if (static_cast<int32_t>(node.tokens.size()) == size_) {
        full_.erase({node.parent, node.tokens});
      }
      nodes_.erase(it);
      if (tree_[node.parent].level == KvLevel::kRoot &&
          tree_[node.parent].first_child == PrefixTree::kNone) {
        tree_.Remove(node.parent);
      }
      return;
    }
  }
  void LookAt(int32_t parent, const Tokens& tokens) {
    if (static_cast<int32_t>(tokens.size()) == size_) {
      const auto there = full_.find({parent, tokens});
      const int32_t id = tree_.FindChild(parent, tokens.data());
      CHECK(id == (there == full_.end() ? PrefixTree::kNone : there->second));
      if (id != PrefixTree::kNone) tree_.MoveToFront(id);
    }
    int32_t most = 0, children = 0;
    for (const auto& entry : nodes_) {
      if (entry.second.parent != parent) continue;
      const Tokens& have = entry.second.tokens;
      int32_t n = 0;
      while (n < static_cast<int32_t>(std::min(have.size(), tokens.size())) &&
             have[static_cast<size_t>(n)] == tokens[static_cast<size_t>(n)]) {
        ++n;
      }
      most = std::max(most, n);
      ++children;
    }
    const PrefixTree::Partial partial =
        tree_.FindPartial(parent, tokens.data(), static_cast<int32_t>(tokens.size()), true);
    if (children <= PrefixTree::kMaxScan) CHECK(partial.num_tokens == most);
    CHECK((partial.node == PrefixTree::kNone) == (partial.num_tokens == 0));
  }

  std::mt19937 random_;
  int32_t size_;
  PrefixTree tree_;
  std::map<int32_t, Node> nodes_;
  std::map<std::pair<int32_t, Tokens>, int32_t> full_;
};

// A full table of blocks that all collide still tells every one of them apart.
void TestCollisions() {
  PrefixTree tree(64, 2, AllCollide);
  const int32_t a = tree.AddRoot({1, 0, 0}), b = tree.AddRoot({0, 1, 0});
  CHECK(tree.FindRoot({1, 0, 0}) == a && tree.FindRoot({0, 1, 0}) == b);
  CHECK(tree.FindRoot({0, 0, 1}) == PrefixTree::kNone);
  std::vector<int32_t> ids;
  for (int32_t root : {a, b}) {
    for (int32_t i = 0; i < 32; ++i) {
      const int32_t tokens[] = {i % 8, i / 8};
      CHECK(tree.FindChild(root, tokens) == PrefixTree::kNone);
      ids.push_back(tree.Add(root, tokens, 2));
    }
  }
  for (size_t k = 0; k < ids.size(); ++k) {
    const int32_t i = static_cast<int32_t>(k % 32), tokens[] = {i % 8, i / 8};
    CHECK(tree.FindChild(k < 32 ? a : b, tokens) == ids[k]);
  }
  tree.CheckInvariants();
}

// The most recently used are looked at first, and no more than kMaxScan of them.
void TestScanIsBounded() {
  PrefixTree tree(200, 2);
  const int32_t root = tree.AddRoot({});
  std::vector<int32_t> ids;
  for (int32_t i = 0; i < 100; ++i) {
    const int32_t tokens[] = {i, i};
    ids.push_back(tree.Add(root, tokens, 2));
  }
  const int32_t first[] = {0, 1};
  CHECK(tree.FindPartial(root, first, 2, true).node == PrefixTree::kNone);
  tree.MoveToFront(ids[0]);
  CHECK(tree.FindPartial(root, first, 2, true).node == ids[0]);
  // Of two that are as good the one on the device, or the only one that may be had.
  const int32_t tokens[] = {0, 2};
  tree[ids[0]].level = KvLevel::kHost;
  CHECK(tree.FindPartial(root, first, 2, false).node == PrefixTree::kNone);
  const int32_t near = tree.Add(root, tokens, 2);
  tree.MoveToFront(ids[0]);
  CHECK(tree.FindPartial(root, first, 2, true).node == near);
  CHECK(tree.FindPartial(root, tokens, 2, true).num_tokens == 2);
}

void TestChildrenBeforeParents() {
  PrefixTree tree(10, 1);
  const int32_t root = tree.AddRoot({}), other = tree.AddRoot({1, 0, 0});
  const int32_t t[] = {0, 1, 2};
  const int32_t a = tree.Add(root, &t[0], 1), b = tree.Add(root, &t[1], 1);
  const int32_t aa = tree.Add(a, &t[0], 1), aab = tree.Add(aa, &t[1], 1);
  tree.Add(other, &t[2], 1);
  std::vector<int32_t> order;
  for (int32_t id = tree.First(root); id != root; id = tree.After(id)) order.push_back(id);
  CHECK((order == std::vector<int32_t>{b, aab, aa, a}));
  CHECK(tree.First(b) == b);  // nothing below a leaf
}

void TestSizeCostsNothing() {
  const size_t before = ResidentBytes();
  PrefixTree tree(4000000, 128);
  const int32_t root = tree.AddRoot({});
  const std::vector<int32_t> tokens(128, 1);
  tree.Add(root, tokens.data(), 128);
  if (!kHasShadow) CHECK(ResidentBytes() < before + (8u << 20));
  bool refused = false;
  try {
    PrefixTree too_large(2000000000, 1);
  } catch (const StatusError& e) {
    refused = e.code() == PSM_ERROR_OUT_OF_MEMORY;
  }
  CHECK(refused);
}

}  // namespace

int main() {
  for (uint32_t seed = 1; seed <= 30; ++seed) {
    for (PrefixTree::HashFn hash : {PrefixTree::HashTokens, AllCollide, FewBuckets}) {
      Random(seed, hash).Steps(400);
    }
  }
  TestCollisions();
  TestScanIsBounded();
  TestChildrenBeforeParents();
  TestSizeCostsNothing();
  return 0;
}
