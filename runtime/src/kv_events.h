// What happened to the cached blocks, for routers: a bounded ring that the stepping thread fills
// and any thread empties.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>

#include "lazy_array.h"
#include "plansmith/plansmith.h"

namespace plansmith {

class KvEvents {
 public:
  // Keeps the last `max_events`; 0 = off: nothing is made, nothing kept.
  KvEvents(int32_t max_events, int32_t tokens_per_block);

  bool on() const { return max_events_ > 0; }
  // Numbers the event and keeps it, with tokens_per_block `tokens` if it is a STORED one. When the
  // ring is full the oldest goes.
  void Add(psm_kv_event event, const int32_t* tokens = nullptr);
  // Oldest first; stops before a STORED event whose tokens have no room left.
  size_t Take(psm_kv_event* events, size_t max_events, int32_t* token_ids, size_t max_token_ids);

 private:
  const size_t max_events_;
  const size_t tokens_per_block_;
  std::mutex mutex_;  // guards what follows
  LazyArray<psm_kv_event> events_;
  LazyArray<int32_t> tokens_;
  size_t first_ = 0;
  size_t size_ = 0;
  uint64_t next_id_ = 1;
};

}  // namespace plansmith
