// What a KV cache's numbers stand for: blocks with contents, copied as an executor would, and what
// the KV events say is cached.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>
#include <vector>

#include "check.h"
#include "kv_cache.h"

namespace plansmith {

// What a position holds: a hash of its token and everything before it. Never 0.
using Cell = uint64_t;
using Pool = std::vector<std::vector<Cell>>;  // [block][position]

inline Cell Next(Cell before, int32_t token) {
  return PrefixTree::HashTokens(before + 1, &token, 1) | 1;
}

inline Cell Begin(const PrefixKey& key) {
  return (key.salt * 31 + key.adapter_id) * 1000003 + key.private_id * 7919;
}

// The pools of target and draft, device and host.
class Executor {
 public:
  Executor(size_t num_blocks, size_t num_host_blocks, size_t size) {
    for (Pool& p : device) p.assign(num_blocks, std::vector<Cell>(size, 0));
    for (Pool& p : host) p.assign(num_host_blocks, std::vector<Cell>(size, 0));
  }
  void Run(const std::vector<psm_block_copy>& copies) {
    for (const psm_block_copy& c : copies) {
      CHECK(c.num_tokens >= 1);
      for (int which : {0, 1}) {
        const Pool& from = c.kind == PSM_COPY_FROM_HOST ? host[which] : device[which];
        Pool& to = c.kind == PSM_COPY_TO_HOST ? host[which] : device[which];
        const std::vector<Cell> source = from.at(static_cast<size_t>(c.src));
        std::copy(source.begin(), source.begin() + c.num_tokens,
                  to.at(static_cast<size_t>(c.dst)).begin());
      }
    }
  }
  Pool device[2];  // target, draft
  Pool host[2];
};

// What the events say is cached.
class Replay {
 public:
  void Take(KvCache* kv, const KvCacheConfig& config) {
    std::vector<psm_kv_event> events(64);
    std::vector<int32_t> tokens(16 * static_cast<size_t>(config.tokens_per_block));
    size_t n;
    while ((n = kv->TakeEvents(events.data(), events.size(), tokens.data(), tokens.size())) > 0) {
      for (size_t i = 0; i < n; ++i) Apply(events[i], tokens.data(), config);
    }
  }
  // Full blocks of tokens[0..limit), and how many of them on the host.
  std::pair<int32_t, int32_t> Match(const PrefixKey& key, const std::vector<int32_t>& tokens,
                                    int32_t limit, int32_t size) const {
    std::pair<int32_t, int32_t> found{0, 0};
    Place at{key.salt, key.adapter_id, 0, {}};
    for (int32_t p = 0; p + size <= limit; p += size) {
      at.tokens.assign(tokens.begin() + p, tokens.begin() + p + size);
      const auto hit = blocks_.find(at);
      if (hit == blocks_.end()) break;
      ++found.first;
      found.second += hit->second.level;
      at.parent = hit->second.hash;
    }
    return found;
  }
  size_t size() const { return blocks_.size(); }

 private:
  struct Place {
    uint64_t salt, adapter, parent;
    std::vector<int32_t> tokens;
    bool operator<(const Place& o) const {
      return std::tie(salt, adapter, parent, tokens) <
             std::tie(o.salt, o.adapter, o.parent, o.tokens);
    }
  };
  struct Stored {
    uint64_t hash;
    int32_t level, priority;
  };
  void Apply(const psm_kv_event& e, const int32_t* tokens, const KvCacheConfig& config) {
    CHECK(e.event_id == ++last_id_);
    if (e.kind == PSM_KV_CREATED) {
      CHECK(e.num_blocks == (e.level == 0 ? config.num_blocks : config.num_host_blocks));
    } else if (e.kind == PSM_KV_STORED) {
      CHECK(e.num_tokens == config.tokens_per_block && e.block_hash != 0);
      CHECK(e.parent_hash == 0 || places_.count(e.parent_hash) == 1);
      const int32_t* t = tokens + e.first_token_idx;
      const Place place{e.cache_salt, e.adapter_id, e.parent_hash, {t, t + e.num_tokens}};
      CHECK(blocks_.insert({place, {e.block_hash, e.level, e.priority}}).second);
      CHECK(places_.insert({e.block_hash, place}).second);
    } else {
      const auto place = places_.find(e.block_hash);
      CHECK(place != places_.end());
      Stored& stored = blocks_.at(place->second);
      if (e.kind == PSM_KV_UPDATED) {
        CHECK(stored.level != e.level || stored.priority != e.priority);
        stored.level = e.level;
        stored.priority = e.priority;
        return;
      }
      CHECK(e.kind == PSM_KV_REMOVED);
      blocks_.erase(place->second);
      places_.erase(place);
    }
  }
  std::map<Place, Stored> blocks_;
  std::map<uint64_t, Place> places_;
  uint64_t last_id_ = 0;
};

}  // namespace plansmith
