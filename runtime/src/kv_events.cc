// SPDX-License-Identifier: Apache-2.0
#include "kv_events.h"

#include <algorithm>

namespace plansmith {
namespace {

constexpr char kAdvice[] = "lower max_kv_events";

}  // namespace

KvEvents::KvEvents(int32_t max_events, int32_t tokens_per_block)
    : max_events_(static_cast<size_t>(std::max(max_events, 0))),
      tokens_per_block_(static_cast<size_t>(tokens_per_block)),
      events_(max_events_, "the KV events", kAdvice),
      tokens_(max_events_ * tokens_per_block_, "the tokens of the KV events", kAdvice) {}

void KvEvents::Add(psm_kv_event event, const int32_t* tokens) {
  if (!on()) return;
  std::lock_guard<std::mutex> lock(mutex_);
  if (size_ == max_events_) {
    first_ = (first_ + 1) % max_events_;
    --size_;
  }
  const size_t slot = (first_ + size_++) % max_events_;
  event.event_id = next_id_++;
  event.num_tokens = tokens == nullptr ? 0 : static_cast<int32_t>(tokens_per_block_);
  events_[slot] = event;
  if (tokens != nullptr) {
    std::copy(tokens, tokens + tokens_per_block_, &tokens_[slot * tokens_per_block_]);
  }
}

size_t KvEvents::Take(psm_kv_event* events, size_t max_events, int32_t* token_ids,
                      size_t max_token_ids) {
  std::lock_guard<std::mutex> lock(mutex_);
  size_t taken = 0, num_tokens = 0;
  for (; taken < max_events && size_ > 0; ++taken) {
    psm_kv_event& event = events[taken];
    const size_t n = static_cast<size_t>(events_[first_].num_tokens);
    if (n > max_token_ids - num_tokens) break;
    event = events_[first_];
    event.first_token_idx = static_cast<int32_t>(num_tokens);
    if (n > 0) {
      const int32_t* tokens = &tokens_[first_ * tokens_per_block_];
      std::copy(tokens, tokens + n, token_ids + num_tokens);
    }
    num_tokens += n;
    first_ = (first_ + 1) % max_events_;
    --size_;
  }
  return taken;
}

}  // namespace plansmith
