// How often each token occurs in one request, kept up to date token by token for the penalties.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace plansmith {

// An open-addressing set sized once for the longest the request can get: no allocation while it
// runs.
class TokenCounts {
 public:
  struct Entry {
    int32_t token;
    int32_t num_output;  // occurrences in the output; 0 = in the prompt only
  };

  // Room for `max_tokens` distinct tokens.
  void Reserve(size_t max_tokens) {
    size_t size = 16;
    shift_ = 28;
    for (; size < 2 * max_tokens; size *= 2) --shift_;
    slots_.assign(size, -1);
    entries_.reserve(max_tokens);
    order_.reserve(max_tokens);
  }
  void AddPrompt(int32_t token) {
    Find(token);
    num_of_prompt_ = entries_.size();
  }
  void AddOutput(int32_t token) { ++Find(token).num_output; }
  // Takes back the last AddOutput, of the same token.
  void UndoOutput(int32_t token) {
    Entry& entry = Find(token);
    if (--entry.num_output > 0 || &entry < entries_.data() + num_of_prompt_) return;
    // It was the first of its kind, so its entry and its slot are the newest: nothing probes past.
    slots_[SlotOf(token)] = -1;
    if (order_.size() == entries_.size()) order_.erase(PlaceOf(token));
    entries_.pop_back();
  }
  // Distinct tokens in order of first occurrence.
  const std::vector<Entry>& entries() const { return entries_; }
  // Indices of entries(), by ascending token. Sorts the first time; afterwards it costs what has
  // come since.
  const std::vector<int32_t>& Ascending() {
    const int32_t size = static_cast<int32_t>(entries_.size());
    if (order_.empty()) {
      for (int32_t i = 0; i < size; ++i) order_.push_back(i);
      std::sort(order_.begin(), order_.end(), [this](int32_t a, int32_t b) {
        return entries_[static_cast<size_t>(a)].token < entries_[static_cast<size_t>(b)].token;
      });
    }
    for (int32_t i = static_cast<int32_t>(order_.size()); i < size; ++i) {
      order_.insert(PlaceOf(entries_[static_cast<size_t>(i)].token), i);
    }
    return order_;
  }

 private:
  // Where the token is in order_, or would be.
  std::vector<int32_t>::iterator PlaceOf(int32_t token) {
    return std::lower_bound(order_.begin(), order_.end(), token, [this](int32_t i, int32_t t) {
      return entries_[static_cast<size_t>(i)].token < t;
    });
  }
  // Where the token is, or would be.
  size_t SlotOf(int32_t token) const {
    // Fibonacci hashing: the high bits of the product spread neighbouring ids.
    size_t slot = (static_cast<uint32_t>(token) * 2654435769u) >> shift_;
    while (slots_[slot] >= 0 && entries_[static_cast<size_t>(slots_[slot])].token != token) {
      slot = (slot + 1) & (slots_.size() - 1);
    }
    return slot;
  }
  Entry& Find(int32_t token) {
    const size_t slot = SlotOf(token);
    if (slots_[slot] >= 0) return entries_[static_cast<size_t>(slots_[slot])];
    slots_[slot] = static_cast<int32_t>(entries_.size());
    entries_.push_back({token, 0});
    return entries_.back();
  }

  std::vector<int32_t> slots_;  // index into entries_, -1 = empty; 2^(32 - shift_) of them
  int shift_ = 28;
  std::vector<Entry> entries_;
  size_t num_of_prompt_ = 0;
  std::vector<int32_t> order_;  // of the first so many entries; empty until it is asked for
};

}  // namespace plansmith
