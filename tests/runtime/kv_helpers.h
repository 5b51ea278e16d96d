// What tests of the KV cache do again and again.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <numeric>
#include <vector>

#include "kv_cache.h"

namespace plansmith {

using Tokens = std::vector<int32_t>;

inline KvCacheConfig Pool(int32_t num_blocks, int32_t num_host_blocks = 0) {
  KvCacheConfig config;
  config.num_blocks = num_blocks;
  config.tokens_per_block = 4;
  config.num_host_blocks = num_host_blocks;
  config.can_copy = true;
  config.max_kv_events = 100;
  return config;
}

inline Tokens Count(int32_t from, int32_t n) {
  Tokens tokens(static_cast<size_t>(n));
  std::iota(tokens.begin(), tokens.end(), from);
  return tokens;
}

inline PrefixMatch Match(const KvCache& kv, const Tokens& tokens, const PrefixKey& key = {}) {
  return kv.Match(key, tokens.data(), static_cast<int32_t>(tokens.size()));
}

// Computes and publishes all of `tokens`, as one request would, and keeps it held.
inline KvSequence Hold(KvCache* kv, const Tokens& tokens, const Retention& retention = {},
                       const PrefixKey& key = {}, int64_t now_ns = 0) {
  KvSequence s;
  const int32_t n = static_cast<int32_t>(tokens.size());
  kv->Attach(key, tokens.data(), n, &s);
  kv->Extend(&s, n);
  kv->PublishTail(key, tokens.data(), n, retention, now_ns, &s);
  return s;
}

inline void Cache(KvCache* kv, const Tokens& tokens, const Retention& retention = {},
                  const PrefixKey& key = {}) {
  KvSequence s = Hold(kv, tokens, retention, key);
  kv->Release(&s);
  kv->ClearCopies();
}

inline Retention Decode(int32_t priority, int32_t duration_ms = -1) {
  Retention retention;
  retention.decode_priority = priority;
  retention.decode_duration_ms = duration_ms;
  return retention;
}

inline std::vector<psm_kv_event> Take(KvCache* kv) {
  std::vector<psm_kv_event> events(200);
  Tokens tokens(1000);
  events.resize(kv->TakeEvents(events.data(), events.size(), tokens.data(), tokens.size()));
  return events;
}

}  // namespace plansmith
