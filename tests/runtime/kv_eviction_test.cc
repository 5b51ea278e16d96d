// What is evicted, in which order, and what becomes of it: the cache against a model that looks
// through all blocks each time it needs one.
//
// SPDX-License-Identifier: Apache-2.0
#include <limits.h>
#include <stdint.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <vector>

#include "check.h"
#include "kv_cache.h"

using namespace plansmith;

namespace {

using Tokens = std::vector<int32_t>;

struct Block {  // the model's, keyed by all tokens up to its end
  int32_t refs = 0;
  bool on_host = false;
  bool keep_on_host = true;
  int32_t priority = PSM_DEFAULT_RETENTION;
  int64_t expires_ns = INT64_MAX;
  uint64_t used = 0;
};

class Model {
 public:
  explicit Model(const KvCacheConfig& config) : config_(config), empty_(config.num_blocks) {}

  int32_t num_free() const { return empty_ + static_cast<int32_t>(Cached(false).size()); }
  int32_t num_host_used() const {
    return static_cast<int32_t>(std::count_if(blocks_.begin(), blocks_.end(),
                                              [](const auto& b) { return b.second.on_host; }));
  }
  // Full blocks of `tokens`, device and host.
  std::pair<int32_t, int32_t> Match(const Tokens& tokens) const {
    std::pair<int32_t, int32_t> found{0, 0};
    const auto size = config_.tokens_per_block;
    for (int32_t n = size; n <= static_cast<int32_t>(tokens.size()); n += size) {
      const auto block = blocks_.find({tokens.begin(), tokens.begin() + n});
      if (block == blocks_.end()) break;
      ++found.first;
      found.second += block->second.on_host;
    }
    return found;
  }
  void Attach(const Tokens& tokens, int32_t num_blocks) {
    std::vector<Block*> path = Path(tokens, num_blocks);
    for (Block* block : path) ++block->refs;
    for (Block* block : path) {
      if (!block->on_host) continue;
      TakeBlock();
      block->on_host = false;
    }
  }
  void Extend(int32_t num_blocks) {
    for (int32_t i = 0; i < num_blocks; ++i) TakeBlock();
  }
  void Publish(const Tokens& tokens, int32_t from, int32_t to, int32_t priority,
               int64_t expires_ns) {
    for (int32_t i = 0; i < to; ++i) {
      const auto put = blocks_.insert({Prefix(tokens, i + 1), Block{}});
      Block& block = put.first->second;
      if (put.second) {
        block.priority = priority;
        block.expires_ns = expires_ns;
      } else if (priority > block.priority ||
                 (priority == block.priority && expires_ns > block.expires_ns)) {
        block.priority = priority;
        block.expires_ns = expires_ns;
      }
      if (i < from) continue;
      if (!put.second && !block.on_host) ++empty_;  // its own copy is dropped
      block.on_host = false;
      ++block.refs;
    }
  }
  void Release(const Tokens& tokens, int32_t num_published, int32_t num_others, bool keep) {
    std::vector<Block*> path = Path(tokens, num_published);
    for (; !path.empty(); path.pop_back()) {
      if (--path.back()->refs > 0) continue;
      path.back()->used = ++clock_;
      path.back()->keep_on_host = keep;
    }
    empty_ += num_others;
  }
  void SetNow(int64_t now_ns) {
    for (auto& entry : blocks_) {
      if (entry.second.expires_ns > now_ns) continue;
      entry.second.priority = PSM_DEFAULT_RETENTION;
      entry.second.expires_ns = INT64_MAX;
    }
  }
  uint64_t num_evicted = 0, num_to_host = 0;

 private:
  Tokens Prefix(const Tokens& tokens, int32_t num_blocks) const {
    return {tokens.begin(), tokens.begin() + num_blocks * config_.tokens_per_block};
  }
  std::vector<Block*> Path(const Tokens& tokens, int32_t num_blocks) {
    std::vector<Block*> path;
    for (int32_t i = 1; i <= num_blocks; ++i) path.push_back(&blocks_.at(Prefix(tokens, i)));
    return path;
  }
  std::vector<Tokens> Cached(bool on_host) const {
    std::vector<Tokens> cached;
    for (const auto& entry : blocks_) {
      if (entry.second.refs == 0 && entry.second.on_host == on_host) cached.push_back(entry.first);
    }
    return cached;
  }
  bool HasChild(const Tokens& tokens, bool on_host_too) const {
    return std::any_of(blocks_.begin(), blocks_.end(), [&](const auto& entry) {
      return entry.first.size() > tokens.size() && (on_host_too || !entry.second.on_host) &&
             std::equal(tokens.begin(), tokens.end(), entry.first.begin());
    });
  }
  // The leaf of a level that is worth least; NULL = there is none.
  const Tokens* Least(bool on_host) const {
    const Tokens* least = nullptr;
    for (const auto& entry : blocks_) {
      const Block& b = entry.second;
      if (b.refs > 0 || b.on_host != on_host || HasChild(entry.first, on_host)) continue;
      if (least == nullptr || b.priority < blocks_.at(*least).priority ||
          (b.priority == blocks_.at(*least).priority && b.used < blocks_.at(*least).used)) {
        least = &entry.first;
      }
    }
    return least;
  }
  void TakeBlock() {
    if (empty_ > 0) {
      --empty_;
      return;
    }
    const Tokens victim = *Least(false);
    Block& block = blocks_.at(victim);
    const bool needed = HasChild(victim, true);
    const bool wanted = config_.num_host_blocks > 0 && block.keep_on_host &&
                        block.priority >= config_.host_offload_min_priority;
    ++num_evicted;
    if ((needed || wanted) && MakeHostRoom(block, needed)) {
      block.on_host = true;
      ++num_to_host;
      return;
    }
    for (auto it = blocks_.begin(); it != blocks_.end();) {  // it and all below
      const bool below = it->first.size() >= victim.size() &&
                         std::equal(victim.begin(), victim.end(), it->first.begin());
      it = below ? blocks_.erase(it) : std::next(it);
    }
  }
  // What a sequence is about to take from the host is held (refs) and stays.
  bool MakeHostRoom(const Block& incoming, bool needed) {
    if (num_host_used() < config_.num_host_blocks) return true;
    const Tokens* victim = Least(true);
    if (victim == nullptr) return false;
    if (blocks_.at(*victim).priority > incoming.priority && !needed) return false;
    blocks_.erase(*victim);
    return true;
  }

  KvCacheConfig config_;
  std::map<Tokens, Block> blocks_;
  int32_t empty_;
  uint64_t clock_ = 0;
};

struct Sequence {
  KvSequence kv;
  Tokens tokens;
  int32_t published = 0;
};

// Returns evictions, and those that went to the host.
std::pair<uint64_t, uint64_t> CompareWithModel(uint32_t seed) {
  std::mt19937 random(seed);
  const auto below = [&random](int n) {
    return static_cast<int32_t>(random() % static_cast<uint32_t>(n));
  };
  KvCacheConfig config;
  config.num_blocks = 6 + below(14);
  config.tokens_per_block = 1 + below(3);
  config.can_copy = below(3) > 0;
  config.num_host_blocks = config.can_copy && below(3) > 0 ? 1 + below(10) : 0;
  config.host_offload_min_priority = below(60);
  config.enable_partial_reuse = false;
  const int32_t size = config.tokens_per_block;
  KvCache kv(config);
  Model model(config);
  std::vector<Sequence> sequences(4);
  std::set<Tokens> seen;
  int64_t now_ns = 0;
  for (int step = 0; step < 150; ++step) {
    Sequence& s = sequences[static_cast<size_t>(below(4))];
    now_ns += below(3) * 1000000;
    kv.SetNow(now_ns);
    model.SetNow(now_ns);
    if (!s.kv.blocks.empty()) {
      const bool keep = below(4) > 0;
      const int32_t held = static_cast<int32_t>(s.kv.blocks.size());
      kv.Release(&s.kv, keep ? OnEviction::kKeep : OnEviction::kDrop);
      model.Release(s.tokens, s.published, held - s.published, keep);
    } else {
      const int32_t num_blocks = 1 + below(5);
      s.tokens.clear();
      for (int32_t i = 0; i < num_blocks * size; ++i) s.tokens.push_back(below(2));
      s.tokens.push_back(9);  // all blocks before it may be reused
      const PrefixMatch match =
          kv.Match({}, s.tokens.data(), static_cast<int32_t>(s.tokens.size()));
      if (match.num_blocks_taken + num_blocks - match.num_blocks > kv.num_free()) continue;
      kv.Attach({}, s.tokens.data(), static_cast<int32_t>(s.tokens.size()), &s.kv);
      model.Attach(s.tokens, match.num_blocks);
      kv.Extend(&s.kv, num_blocks * size);
      model.Extend(num_blocks - match.num_blocks);
      s.published = below(5) > 0 ? num_blocks : match.num_blocks;
      Retention retention;
      retention.decode_priority = below(2) > 0 ? PSM_DEFAULT_RETENTION : below(101);
      retention.decode_duration_ms = below(3) > 0 ? -1 : 1 + below(20);
      const bool expires =
          retention.decode_duration_ms >= 0 && retention.decode_priority != PSM_DEFAULT_RETENTION;
      kv.Publish({}, s.tokens.data(), s.published * size, retention, now_ns, &s.kv);
      model.Publish(s.tokens, match.num_blocks, s.published, retention.decode_priority,
                    expires ? now_ns + retention.decode_duration_ms * 1000000 : INT64_MAX);
      s.tokens.pop_back();
      seen.insert(s.tokens);
    }
    kv.ClearCopies();
    kv.CheckInvariants({&sequences[0].kv, &sequences[1].kv, &sequences[2].kv, &sequences[3].kv});
    CHECK(kv.num_free() == model.num_free() && kv.num_host_used() == model.num_host_used());
    for (const Tokens& tokens : seen) {
      Tokens longer = tokens;
      longer.push_back(9);
      const PrefixMatch match = kv.Match({}, longer.data(), static_cast<int32_t>(longer.size()));
      CHECK(model.Match(tokens) == std::make_pair(match.num_blocks, match.num_host_blocks));
    }
  }
  return {model.num_evicted, model.num_to_host};
}

}  // namespace

int main() {
  uint64_t evicted = 0, to_host = 0;
  for (uint32_t seed = 1; seed <= 200; ++seed) {
    const auto counts = CompareWithModel(seed);
    evicted += counts.first;
    to_host += counts.second;
  }
  CHECK(evicted > 5000 && to_host > 2000);
  return 0;
}
