// What the others see of a step, and when: counts, the requests that have ended, events.
//
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "clock.h"
#include "engine.h"

namespace plansmith {

void Engine::PublishQueued() {
  std::lock_guard<std::mutex> lock(mutex_);
  num_waiting_ = num_waiting_of_step_ =
      static_cast<int32_t>(inbox_.size()) + scheduler_.num_queued();
}

// Forget the requests of the step that have ended; with mutex_ held. What they own goes away later,
// outside the lock: a guide's close may be anything.
void Engine::BuryRetired() {
  const auto has_ended = [](const LiveRequest* live) {
    return live->sequences.front()->group->num_live == 0;
  };
  for (const Request* request : pending_.retired) {
    --num_live_;
    num_guided_ -= request->guide != nullptr;
    num_with_drafts_ -= !request->caller_draft.empty();
    --request->group->num_live;
  }
  cancels_.erase(std::remove_if(cancels_.begin(), cancels_.end(), has_ended), cancels_.end());
  for (const Request* request : pending_.retired) {
    const auto found = requests_.find(request->group->id);
    if (found == requests_.end() || !has_ended(&found->second)) continue;
    if (request->adapter_id != 0) adapters_.Use(request->adapter_id, -1);
    dead_.push_back(std::move(found->second));
    requests_.erase(found);
  }
  NoteDrafts();
  pending_.retired.clear();  // at once: without memory for the events, they come again
}

// Ends the step: what it was is now to be published, at once or, when the next step can be launched
// first, while the device works on that.
void Engine::Publish(bool ran, int64_t begin_ns, int64_t machine_begin_ns) {
  PublishPending();
  stats_.EndStep(scheduler_, kv_, static_cast<size_t>(num_ended_requests_),
                 ran ? config_.NowNs() - begin_ns : 0, ran ? NowNs() - machine_begin_ns : 0);
  num_ended_requests_ = 0;
  pending_.record = stats_.TakeRecord();
  pending_.totals = stats_.totals();
  PublishQueued();
  pending_.record.num_queued_requests = num_waiting_of_step_;
  pending_.ran = ran;
  pending_.retired.swap(retired_);
  pending_.events.swap(new_events_);
  pending_.is_there = true;
  const bool may_wait =
      ran && config_.executor.launch != nullptr && config_.options.manual_step == 0;
  if (!may_wait) PublishPending();
}

// Makes a step visible: counts and live ids first, then its events, so that whoever has seen an
// event also sees the state behind it.
void Engine::PublishPending() {
  if (!pending_.is_there) return;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    BuryRetired();
    published_ = pending_.totals;
    if (pending_.ran) iterations_.Push(pending_.record);
    pending_.ran = false;  // without memory for the events, they come again
  }
  events_.Push(pending_.events);
  pending_.events.clear();
  pending_.is_there = false;
  dead_.clear();  // last: a guide's close may take its time
}

// Whether the engine's thread has another step to run at once, whose launch what is pending can
// wait for.
bool Engine::GoesOn() {
  std::lock_guard<std::mutex> lock(mutex_);
  return !stopping_ && num_between_steps_ == 0 && num_live_ > pending_.retired.size();
}

}  // namespace plansmith
