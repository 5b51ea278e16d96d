// What routers are told, and how long blocks are worth keeping (which the events show).
//
// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <set>
#include <thread>
#include <vector>

#include "check.h"
#include "kv_helpers.h"

using namespace plansmith;

namespace {

// Ranges, the default between them, generated tokens: the highest of a block's positions counts.
void TestRetentionRanges() {
  KvCache kv(Pool(8));
  Retention retention = Decode(10);
  retention.num_prompt = 18;
  retention.ranges = {{0, 4, 90, -1}, {5, 6, 50, -1}, {8, 12, 20, -1}, {13, -1, 25, -1}};
  Cache(&kv, Count(0, 24), retention);
  std::vector<int32_t> priorities;
  for (const psm_kv_event& e : Take(&kv)) {
    if (e.kind == PSM_KV_STORED) priorities.push_back(e.priority);
  }
  //             0..3 4..7 8..11 12 is not in a range  16, 17 and generated  generated
  CHECK((priorities == Tokens{90, 50, 20, 35, 25, 10}));
}

void TestRetentionDuration() {
  KvCache kv(Pool(3));
  KvSequence s = Hold(&kv, Count(0, 4), Decode(90, 5), {}, 1000000);
  kv.Release(&s);
  Cache(&kv, Count(10, 4), Decode(20, 5));  // worth less, for a while
  Cache(&kv, Count(20, 4));
  KvSequence t;
  kv.SetNow(5999999);
  kv.Extend(&t, 4);
  CHECK(Match(kv, Count(10, 5)).num_blocks == 0);  // 20 goes before 35
  kv.Publish({}, Count(30, 4).data(), 4, {}, 5999999, &t);
  kv.Release(&t);
  Take(&kv);
  kv.SetNow(6000000);  // 90 is now 35, and the oldest
  const std::vector<psm_kv_event> events = Take(&kv);
  CHECK(events.size() == 1 && events[0].kind == PSM_KV_UPDATED && events[0].priority == 35);
  kv.Extend(&t, 4);
  CHECK(Match(kv, Count(0, 5)).num_blocks == 0 && Match(kv, Count(20, 5)).num_blocks == 1);
  kv.CheckInvariants({&t});
}

// Who shares a block may raise what it is worth, not lower it.
void TestRetentionOfSharedBlocks() {
  KvCache kv(Pool(4));
  Cache(&kv, Count(0, 5), Decode(60));
  Take(&kv);
  Cache(&kv, Count(0, 5), Decode(40));
  CHECK(Take(&kv).empty());
  Cache(&kv, Count(0, 5), Decode(80, 1000));
  const std::vector<psm_kv_event> events = Take(&kv);
  CHECK(events.size() == 1 && events[0].priority == 80);
  Cache(&kv, Count(0, 5), Decode(90, 0));  // for no time at all
  CHECK(Take(&kv).empty());
  // Likewise when both compute the block, and the second changes over to the first's.
  KvSequence a, b;
  kv.Extend(&a, 4);
  kv.Extend(&b, 4);
  const Tokens tokens = Count(10, 4);
  kv.Publish({}, tokens.data(), 4, Decode(50), 0, &a);
  Take(&kv);
  kv.Publish({}, tokens.data(), 4, Decode(70), 0, &b);
  const std::vector<psm_kv_event> raised = Take(&kv);
  CHECK(raised.size() == 1 && raised[0].kind == PSM_KV_UPDATED && raised[0].priority == 70);
  kv.CheckInvariants({&a, &b});
}

void TestEventsAreBounded() {
  KvCacheConfig config = Pool(20);
  config.max_kv_events = 4;
  KvCache kv(config);
  for (int32_t i = 0; i < 6; ++i) Cache(&kv, Count(10 * i, 4));
  psm_kv_event events[8];
  int32_t tokens[11];
  // CREATED and two STORED are gone; there is room for the tokens of two.
  CHECK(kv.TakeEvents(events, 8, tokens, 11) == 2);
  CHECK(events[0].event_id == 4 && events[1].event_id == 5 && events[1].first_token_idx == 4);
  CHECK(tokens[0] == 20 && tokens[4] == 30 && events[1].num_tokens == 4);
  CHECK(kv.TakeEvents(events, 1, tokens, 11) == 1 && events[0].event_id == 6);
  CHECK(kv.TakeEvents(events, 8, tokens, 3) == 0);
  CHECK(kv.TakeEvents(events, 8, tokens, 4) == 1 && events[0].event_id == 7 && tokens[0] == 50);
  CHECK(kv.TakeEvents(events, 8, tokens, 11) == 0);
  config.max_kv_events = 0;
  KvCache off(config);
  Cache(&off, Count(0, 4));
  CHECK(off.TakeEvents(events, 8, tokens, 11) == 0);
}

// Hashes tell tokens, what is before them, salt and adapter apart, and are the same in every cache.
void TestEventHashes() {
  std::set<uint64_t> seen;
  const auto hashes = [&seen](const Tokens& tokens, const PrefixKey& key) {
    KvCache kv(Pool(8));
    Cache(&kv, tokens, {}, key);
    std::vector<uint64_t> found;
    for (const psm_kv_event& e : Take(&kv)) {
      if (e.kind != PSM_KV_STORED) continue;
      CHECK(e.parent_hash == (found.empty() ? 0 : found.back()));
      CHECK(e.cache_salt == key.salt && e.adapter_id == key.adapter_id);
      found.push_back(e.block_hash);
      seen.insert(e.block_hash);
    }
    return found;
  };
  const Tokens zeros(8, 0);
  const std::vector<uint64_t> a = hashes(zeros, {});
  CHECK(a.size() == 2 && a == hashes(zeros, {}));
  hashes(zeros, {1, 0, 0});
  hashes(zeros, {0, 1, 0});
  hashes({1, 0, 0, 0, 0, 0, 0, 0}, {});
  CHECK(seen.size() == 8);
  CHECK(hashes(zeros, {0, 0, 9}).empty());  // of no use to anyone else
}

void TestEventsFromAnotherThread() {
  KvCache kv(Pool(16, 8));
  std::atomic<bool> done{false};
  uint64_t last = 0, taken = 0;
  std::thread reader([&] {
    psm_kv_event events[16];
    int32_t tokens[64];
    for (bool more = true; more;) {
      more = !done;
      const size_t n = kv.TakeEvents(events, 16, tokens, 64);
      for (size_t i = 0; i < n; ++i) {
        CHECK(events[i].event_id > last);
        last = events[i].event_id;
      }
      taken += n;
      more = more || n > 0;
    }
  });
  for (int32_t i = 0; i < 2000; ++i) Cache(&kv, Count(i * 5, 13));
  done = true;
  reader.join();
  CHECK(taken > 0 && taken <= last);
}

}  // namespace

int main() {
  TestRetentionRanges();
  TestRetentionDuration();
  TestRetentionOfSharedBlocks();
  TestEventsAreBounded();
  TestEventHashes();
  TestEventsFromAnotherThread();
  return 0;
}
