// Which running requests are about to fill which blocks, so that nobody computes them twice.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "kv_cache.h"
#include "request.h"

namespace plansmith {

// The contexts of one step, found by the next full block that they fill and by their group. Sized
// once: a step allocates nothing.
class PrefixMakers {
 public:
  struct Found {
    Request* maker = nullptr;  // NULL = nobody
    int32_t until = 0;         // positions it has to have computed
  };

  PrefixMakers(int32_t max_requests, int32_t tokens_per_block)
      : block_(tokens_per_block), slots_(TableSize(max_requests)) {}

  void Clear() { ++step_; }

  // `request` is running and in context.
  void Add(Request* request) {
    const int32_t next = std::max(request->num_computed / block_, request->sched.num_known_blocks);
    if (int64_t{next + 1} * block_ <= request->context_end) {
      Insert(HashBlock(*request, next), request);
    }
    if (LeadsGroup(*request)) Insert(HashGroup(request->group.get()), request);
  }

  // Who computes what `request` needs next, of which `num_cached` positions are there: their common
  // whole blocks, or for the other sequences of its own request the whole context, whose last,
  // partly filled block they then copy.
  Found Find(const Request& request, int32_t num_cached) const {
    const int32_t usable = request.num_tokens() - 1;  // the last token is computed in any case
    if (request.group != nullptr && num_cached < usable) {
      for (const Slot* slot = First(HashGroup(request.group.get())); slot != nullptr;
           slot = Following(slot)) {
        if (slot->maker->group == request.group && slot->maker != &request)
          return {slot->maker, slot->maker->context_end};
      }
    }
    const int32_t next = num_cached / block_;
    if (int64_t{next + 1} * block_ > usable) return {};
    for (const Slot* slot = First(HashBlock(request, next)); slot != nullptr;
         slot = Following(slot)) {
      const int32_t common = CommonTokens(*slot->maker, request, usable);
      if (common >= (next + 1) * block_) return {slot->maker, common - common % block_};
    }
    return {};
  }

 private:
  struct Slot {
    uint64_t step = 0;
    uint64_t hash = 0;
    Request* maker = nullptr;
  };

  // Two entries a request, at most half full.
  static size_t TableSize(int32_t max_requests) {
    size_t size = 4;
    while (size < 4 * static_cast<size_t>(max_requests)) size *= 2;
    return size;
  }

  // The one sequence of a group that the others wait for. (Once one has filled the prompt, what
  // there is to share is in the cache.)
  static bool LeadsGroup(const Request& request) {
    return request.group != nullptr && request.sequence_idx == 0 &&
           request.context_end == request.num_prompt;
  }

  static uint64_t Mix(uint64_t hash, uint64_t value) {
    hash = (hash ^ value) * 0x9E3779B97F4A7C15u;
    return hash ^ (hash >> 29);
  }
  static uint64_t HashGroup(const RequestGroup* group) {
    return Mix(1, reinterpret_cast<uintptr_t>(group));
  }
  uint64_t HashBlock(const Request& request, int32_t block) const {
    const PrefixKey& key = request.prefix_key;
    uint64_t hash = Mix(Mix(key.salt, key.adapter_id), key.private_id);
    hash = Mix(hash, static_cast<uint64_t>(block));
    const int32_t* tokens = request.tokens.data() + int64_t{block} * block_;
    for (int32_t i = 0; i < block_; ++i) hash = Mix(hash, static_cast<uint64_t>(tokens[i]));
    return hash;
  }

  // 0 under different keys.
  static int32_t CommonTokens(const Request& maker, const Request& request, int32_t most) {
    if (&maker == &request || !(maker.prefix_key == request.prefix_key)) return 0;
    const int32_t n = std::min(maker.context_end, most);
    const int32_t* tokens = request.tokens.data();
    return static_cast<int32_t>(std::mismatch(tokens, tokens + n, maker.tokens.data()).first -
                                tokens);
  }

  void Insert(uint64_t hash, Request* maker) {
    size_t at = hash & (slots_.size() - 1);
    while (slots_[at].step == step_) at = (at + 1) & (slots_.size() - 1);
    slots_[at] = {step_, hash, maker};
  }
  const Slot* First(uint64_t hash) const { return Look(hash & (slots_.size() - 1), hash); }
  const Slot* Following(const Slot* slot) const {
    const size_t at = static_cast<size_t>(slot - slots_.data()) + 1;
    return Look(at & (slots_.size() - 1), slot->hash);
  }
  const Slot* Look(size_t at, uint64_t hash) const {
    for (; slots_[at].step == step_; at = (at + 1) & (slots_.size() - 1)) {
      if (slots_[at].hash == hash) return &slots_[at];
    }
    return nullptr;
  }

  int32_t block_;
  uint64_t step_ = 1;
  std::vector<Slot> slots_;
};

}  // namespace plansmith
