// SPDX-License-Identifier: Apache-2.0
#include "waiting_queue.h"

#include <algorithm>
#include <cmath>

#include "request.h"
#include "status.h"

namespace plansmith {
namespace {

struct ByRank {
  static HeapLinks<Request>& Links(Request* r) { return r->sched.links; }
  static bool Before(const Request* a, const Request* b) {
    return a->sched.rank != b->sched.rank ? a->sched.rank < b->sched.rank : a->id < b->id;
  }
};

struct ByWaitUntil {
  static HeapLinks<Request>& Links(Request* r) { return r->sched.links; }
  static bool Before(const Request* a, const Request* b) {
    return a->sched.wait_until < b->sched.wait_until;
  }
};

struct ByFirst {
  static HeapLinks<WaitingBucket>& Links(WaitingBucket* b) { return b->links; }
  static bool Before(const WaitingBucket* a, const WaitingBucket* b) {
    return ByRank::Before(a->waiting, b->waiting);
  }
};

// The first requests decide only between equals.
struct ByHeld {
  static HeapLinks<WaitingBucket>& Links(WaitingBucket* b) { return b->links; }
  static bool Before(const WaitingBucket* a, const WaitingBucket* b) {
    return a->num_held != b->num_held ? a->num_held < b->num_held : ByFirst::Before(a, b);
  }
};

struct ByPriority {
  static HeapLinks<Level>& Links(Level* l) { return l->links; }
  static bool Before(const Level* a, const Level* b) { return a->priority > b->priority; }
};

using RequestHeap = LeftistHeap<Request, ByRank>;
using PutOffHeap = LeftistHeap<Request, ByWaitUntil>;
using BucketHeap = LeftistHeap<WaitingBucket, ByFirst>;
using CappedHeap = LeftistHeap<WaitingBucket, ByHeld>;
using LevelHeap = LeftistHeap<Level, ByPriority>;

[[noreturn]] void Broken(const char* what) {
  throw StatusError(PSM_ERROR_INTERNAL, Format("waiting queue: %s", what));
}

}  // namespace

WaitingQueue::WaitingQueue(int32_t max_slots, float max_tenant_share)
    : max_slots_(std::max(
          1, static_cast<int32_t>(
                 std::ceil(static_cast<double>(max_slots) * static_cast<double>(max_tenant_share) -
                           1e-6)))),  // 0.1f * 10 is one
      by_tenant_(max_tenant_share < 1.0f) {}

void WaitingQueue::Reserve(size_t num_requests) {
  spare_buckets_.Reserve(bucket_map_, num_requests);
  spare_levels_.Reserve(level_map_, num_requests);
  spare_tenants_.Reserve(tenant_map_, by_tenant_ ? num_requests : 1);
}

void WaitingQueue::Join(Request* request) {
  const uint64_t tenant_id = by_tenant_ ? request->tenant_id : 0;
  WaitingBucket& bucket = spare_buckets_.Find(&bucket_map_, {request->priority, tenant_id});
  if (bucket.num_members++ == 0) {
    bucket.level = &spare_levels_.Find(&level_map_, request->priority);
    bucket.level->priority = request->priority;
    ++bucket.level->num_members;
    bucket.tenant = &spare_tenants_.Find(&tenant_map_, tenant_id);
    ++bucket.tenant->num_members;
  }
  request->sched.bucket = &bucket;
}

void WaitingQueue::Leave(Request* request) {
  WaitingBucket* bucket = request->sched.bucket;
  request->sched.bucket = nullptr;
  if (--bucket->num_members > 0) return;
  const uint64_t tenant_id = by_tenant_ ? request->tenant_id : 0;
  if (--bucket->level->num_members == 0) spare_levels_.Erase(&level_map_, request->priority);
  if (--bucket->tenant->num_members == 0) spare_tenants_.Erase(&tenant_map_, tenant_id);
  spare_buckets_.Erase(&bucket_map_, {request->priority, tenant_id});
}

// A bucket's place depends on who is first in it, so it is taken out, changed and put back.
void WaitingQueue::Detach(WaitingBucket* bucket) {
  if (bucket->waiting == nullptr) return;
  Level* level = bucket->level;
  if (bucket->is_capped) {
    CappedHeap::Remove(&level->capped, bucket);
  } else {
    BucketHeap::Remove(&level->open, bucket);
  }
  bucket->is_capped = false;
  if (--level->num_buckets == 0) LevelHeap::Remove(&levels_, level);
}

void WaitingQueue::Attach(WaitingBucket* bucket) {
  if (bucket->waiting == nullptr) return;
  Level* level = bucket->level;
  BucketHeap::Push(&level->open, bucket);
  if (level->num_buckets++ == 0) LevelHeap::Push(&levels_, level);
}

void WaitingQueue::Push(Request* request) {
  WaitingBucket* bucket = request->sched.bucket;
  // Behind the first nothing else moves: so it is with new requests in order of arrival.
  if (bucket->waiting != nullptr && ByRank::Before(bucket->waiting, request)) {
    RequestHeap::Push(&bucket->waiting, request);
    return;
  }
  Detach(bucket);
  RequestHeap::Push(&bucket->waiting, request);
  Attach(bucket);
}

void WaitingQueue::Remove(Request* request) {
  WaitingBucket* bucket = request->sched.bucket;
  if (bucket->waiting != request) {
    RequestHeap::Remove(&bucket->waiting, request);
    return;
  }
  Detach(bucket);
  RequestHeap::Remove(&bucket->waiting, request);
  Attach(bucket);
}

bool WaitingQueue::IsBelowShare(const WaitingBucket& bucket) const {
  const int32_t held = bucket.tenant->num_slots;
  return held == 0 || held + bucket.waiting->width() <= max_slots_;
}

void WaitingQueue::Reopen(Level* level) {
  while (level->capped != nullptr) {
    WaitingBucket* bucket = level->capped;
    CappedHeap::Remove(&level->capped, bucket);
    bucket->is_capped = false;
    BucketHeap::Push(&level->open, bucket);
  }
  level->looked_at = num_gave_;
}

void WaitingQueue::Cap(Level* level, WaitingBucket* bucket) {
  bucket->is_capped = true;
  bucket->num_held = bucket->tenant->num_slots;
  CappedHeap::Push(&level->capped, bucket);
}

Request* WaitingQueue::Next() {
  Level* level = levels_;
  if (level == nullptr) return nullptr;
  if (level->looked_at != num_gave_) Reopen(level);
  while (level->open != nullptr && !IsBelowShare(*level->open)) {
    WaitingBucket* first = level->open;
    BucketHeap::Remove(&level->open, first);
    Cap(level, first);
  }
  if (level->open != nullptr) return level->open->waiting;
  // A tenant may have taken slots for another priority since: then it stands too far ahead, so the
  // first whose number is right is the first.
  WaitingBucket* bucket = level->capped;
  while (bucket->num_held != bucket->tenant->num_slots) {
    CappedHeap::Remove(&level->capped, bucket);
    Cap(level, bucket);
    bucket = level->capped;
  }
  return bucket->waiting;
}

void WaitingQueue::AddSlots(const Request& request, int32_t num_slots) {
  request.sched.bucket->tenant->num_slots += num_slots;
  if (num_slots < 0) ++num_gave_;
}

void WaitingQueue::PutOff(Request* request, Request* other, int32_t wait_until) {
  request->sched.waits_for = other;
  request->sched.wait_until = wait_until;
  PutOffHeap::Push(&other->sched.put_off, request);
}

void WaitingQueue::Forget(Request* request) {
  PutOffHeap::Remove(&request->sched.waits_for->sched.put_off, request);
  request->sched.waits_for = nullptr;
}

void WaitingQueue::TakeBack(Request* other, bool all) {
  for (Request* first; (first = other->sched.put_off) != nullptr;) {
    if (!all && first->sched.wait_until > other->num_computed) return;
    Forget(first);
    Push(first);
  }
}

int32_t WaitingQueue::CheckLevel(const Level& level,
                                 const std::function<void(const Request*)>& visit) const {
  int32_t num_buckets = 0;
  for (WaitingBucket* root : {level.open, level.capped}) {
    BucketHeap::ForEach(root, [&](const WaitingBucket* bucket) {
      ++num_buckets;
      if (bucket->level != &level || bucket->is_capped != (root == level.capped) ||
          bucket->waiting == nullptr ||
          (bucket->is_capped && level.looked_at == num_gave_ &&
           bucket->num_held > bucket->tenant->num_slots)) {
        Broken("a bucket is in the wrong place");
      }
      RequestHeap::ForEach(bucket->waiting, [&](const Request* request) {
        if (request->sched.bucket != bucket || ByRank::Before(request, bucket->waiting))
          Broken("a request is in the wrong bucket, or not the first is first");
        visit(request);
      });
    });
  }
  return num_buckets;
}

void WaitingQueue::CheckInvariants(const std::function<void(const Request*)>& visit) const {
  int32_t num_levels = 0, num_members = 0, num_joined = 0;
  LevelHeap::ForEach(levels_, [&](const Level* level) {
    ++num_levels;
    if (level->priority > levels_->priority || CheckLevel(*level, visit) != level->num_buckets)
      Broken("the levels do not agree with their buckets");
  });
  for (const auto& entry : level_map_) {
    num_levels -= entry.second.num_buckets > 0;
    num_members += entry.second.num_members;
  }
  for (const auto& entry : tenant_map_) num_joined += entry.second.num_members;
  const int32_t num_buckets = static_cast<int32_t>(bucket_map_.size());
  if (num_levels != 0 || num_members != num_buckets || num_joined != num_buckets)
    Broken("its counts do not agree");
}

}  // namespace plansmith
