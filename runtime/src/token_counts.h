// How often each token occurs in one request, kept up to date token by token for the penalties.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

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
  }
  void AddPrompt(int32_t token) { Find(token); }
  void AddOutput(int32_t token) { ++Find(token).num_output; }
  // Distinct tokens in order of first occurrence.
  const std::vector<Entry>& entries() const { return entries_; }

 private:
  Entry& Find(int32_t token) {
    // Fibonacci hashing: the high bits of the product spread neighbouring ids.
    size_t slot = (static_cast<uint32_t>(token) * 2654435769u) >> shift_;
    while (slots_[slot] >= 0) {
      Entry& entry = entries_[static_cast<size_t>(slots_[slot])];
      if (entry.token == token) return entry;
      slot = (slot + 1) & (slots_.size() - 1);
    }
    slots_[slot] = static_cast<int32_t>(entries_.size());
    entries_.push_back({token, 0});
    return entries_.back();
  }

  std::vector<int32_t> slots_;  // index into entries_, -1 = empty; 2^(32 - shift_) of them
  int shift_ = 28;
  std::vector<Entry> entries_;
};

}  // namespace plansmith
