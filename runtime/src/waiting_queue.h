// Who starts next: priority first, then the tenants' shares of the slots, then rank, then arrival.
// And who is put off until a running request has computed what both need.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <utility>
#include <vector>

#include "leftist_heap.h"

namespace plansmith {

struct Request;

// The waiting requests of one tenant and one priority.
struct WaitingBucket {
  struct Level* level = nullptr;
  struct Tenant* tenant = nullptr;
  int32_t num_members = 0;     // requests that belong here, waiting or not
  Request* waiting = nullptr;  // heap by rank, then id
  bool is_capped = false;      // in level->capped
  int32_t num_held = 0;        // slots its tenant held when it was put there
  HeapLinks<WaitingBucket> links;
};

// The buckets of one priority in which somebody waits.
struct Level {
  float priority = 0.0f;
  int32_t num_members = 0;
  int32_t num_buckets = 0;          // with somebody waiting
  WaitingBucket* open = nullptr;    // heap by the first request of each
  WaitingBucket* capped = nullptr;  // their tenants hold their share: heap by how much that was;
  uint64_t looked_at = 0;           // all looked at again when one lets go of slots
  HeapLinks<Level> links;
};

struct Tenant {
  int32_t num_members = 0;
  int32_t num_slots = 0;  // its running requests hold
};

// What the scheduler notes on a request.
struct SchedulerNotes {
  int32_t list_slot = -1;           // where it is in the list of all requests
  WaitingBucket* bucket = nullptr;  // from Add to Remove
  uint64_t rank = 0;                // the lower starts first, of equal ones the lower id
  HeapLinks<Request> links;         // in bucket->waiting, or in waits_for's put_off
  Request* waits_for = nullptr;     // it is put off: until that one has computed ...
  int32_t wait_until = 0;           // ... so many positions, or is out of its context
  Request* put_off = nullptr;       // heap by wait_until of those that wait for this one
  // Blocks of its beginning that were cached when it started: what it computes that nobody has
  // begins there.
  int32_t num_known_blocks = 0;
};

// Nodes made in advance, so that inserting into `map` cannot fail.
template <typename Map>
class SpareNodes {
 public:
  // So that the map can grow to `size` entries.
  void Reserve(const Map& map, size_t size) {
    const size_t now = map.size() + nodes_.size();
    if (now >= size) return;
    size = std::max(size, 2 * now);
    nodes_.reserve(size);  // it takes back those of the map as well
    while (map.size() + nodes_.size() < size) {
      Map one;
      one.emplace();
      nodes_.push_back(one.extract(one.begin()));
    }
  }
  // The value of `key`, a new one if it is not there; reserved.
  typename Map::mapped_type& Find(Map* map, const typename Map::key_type& key) {
    const auto found = map->find(key);
    if (found != map->end()) return found->second;
    typename Map::node_type node = std::move(nodes_.back());
    nodes_.pop_back();
    node.key() = key;
    node.mapped() = {};
    return map->insert(std::move(node)).position->second;
  }
  void Erase(Map* map, const typename Map::key_type& key) { nodes_.push_back(map->extract(key)); }

 private:
  std::vector<typename Map::node_type> nodes_;
};

// Within a priority, a tenant that would get more than its share of the slots steps aside for those
// that would not; these go by rank, which does not change while a request waits. When none would,
// the one that holds the fewest slots is next: shares say who goes first and leave no slot empty. A
// tenant without a slot is always below its share. O(log n) at worst for each operation, and for
// each start at most as many looks as there are running tenants. Borrows the requests.
class WaitingQueue {
 public:
  WaitingQueue(int32_t max_slots, float max_tenant_share);

  // Room for so many requests, so that nothing below fails or allocates.
  void Reserve(size_t num_requests);
  // A request belongs to the queue from Join to Leave, whether it waits or not.
  void Join(Request* request);
  void Leave(Request* request);

  void Push(Request* request);
  void Remove(Request* request);  // one that waits
  // Who starts next, NULL when nobody waits; stays in the queue.
  Request* Next();
  bool empty() const { return levels_ == nullptr; }

  // Slots that `request` takes or gives back (negative).
  void AddSlots(const Request& request, int32_t num_slots);

  // Hang `request`, which does not wait, on `other` until that one has computed `wait_until`
  // positions.
  static void PutOff(Request* request, Request* other, int32_t wait_until);
  // Back into the queue: those put off with `other` who have what they waited for, or all of them.
  void TakeBack(Request* other, bool all);
  // One that is put off, for its removal.
  static void Forget(Request* request);

  // Throws INTERNAL when counts and links do not agree. visit(request) for each that waits.
  void CheckInvariants(const std::function<void(const Request*)>& visit) const;

 private:
  bool IsBelowShare(const WaitingBucket& bucket) const;
  void Attach(WaitingBucket* bucket);
  void Detach(WaitingBucket* bucket);
  void Reopen(Level* level);
  static void Cap(Level* level, WaitingBucket* bucket);
  int32_t CheckLevel(const Level& level, const std::function<void(const Request*)>& visit) const;

  using BucketMap = std::map<std::pair<float, uint64_t>, WaitingBucket>;
  using LevelMap = std::map<float, Level>;
  using TenantMap = std::map<uint64_t, Tenant>;

  int32_t max_slots_;        // of one tenant: its share
  bool by_tenant_;           // false: all are one tenant
  uint64_t num_gave_ = 0;    // times that slots were given back
  Level* levels_ = nullptr;  // heap of those in which somebody waits, the highest first
  BucketMap bucket_map_;
  LevelMap level_map_;
  TenantMap tenant_map_;
  SpareNodes<BucketMap> spare_buckets_;
  SpareNodes<LevelMap> spare_levels_;
  SpareNodes<TenantMap> spare_tenants_;
};

}  // namespace plansmith
