// Reuse by example: whole and partial blocks, host blocks, retention, forgetting, drafts, events.
//
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <atomic>
#include <map>
#include <numeric>
#include <set>
#include <thread>
#include <vector>

#include "check.h"
#include "kv_cache.h"

using namespace plansmith;

namespace {

using Tokens = std::vector<int32_t>;

KvCacheConfig Pool(int32_t num_blocks, int32_t num_host_blocks = 0) {
  KvCacheConfig config;
  config.num_blocks = num_blocks;
  config.tokens_per_block = 4;
  config.num_host_blocks = num_host_blocks;
  config.can_copy = true;
  config.max_kv_events = 100;
  return config;
}

Tokens Count(int32_t from, int32_t n) {
  Tokens tokens(static_cast<size_t>(n));
  std::iota(tokens.begin(), tokens.end(), from);
  return tokens;
}

PrefixMatch Match(const KvCache& kv, const Tokens& tokens, const PrefixKey& key = {}) {
  return kv.Match(key, tokens.data(), static_cast<int32_t>(tokens.size()));
}

// Computes and publishes all of `tokens`, as one request would, and keeps it held.
KvSequence Hold(KvCache* kv, const Tokens& tokens, const Retention& retention = {},
                const PrefixKey& key = {}, int64_t now_ns = 0) {
  KvSequence s;
  const int32_t n = static_cast<int32_t>(tokens.size());
  kv->Attach(key, tokens.data(), n, &s);
  kv->Extend(&s, n);
  kv->PublishTail(key, tokens.data(), n, retention, now_ns, &s);
  return s;
}

void Cache(KvCache* kv, const Tokens& tokens, const Retention& retention = {},
           const PrefixKey& key = {}) {
  KvSequence s = Hold(kv, tokens, retention, key);
  kv->Release(&s);
  kv->ClearCopies();
}

Retention Decode(int32_t priority, int32_t duration_ms = -1) {
  Retention retention;
  retention.decode_priority = priority;
  retention.decode_duration_ms = duration_ms;
  return retention;
}

std::vector<psm_kv_event> Take(KvCache* kv) {
  std::vector<psm_kv_event> events(200);
  Tokens tokens(1000);
  events.resize(kv->TakeEvents(events.data(), events.size(), tokens.data(), tokens.size()));
  return events;
}

void TestSharedWhileInUse() {
  KvCache kv(Pool(8));
  const Tokens tokens = Count(0, 12);
  const KvSequence a = Hold(&kv, tokens);
  const PrefixMatch match = Match(kv, Count(0, 13));
  CHECK(match.num_blocks == 3 && match.num_tokens == 12 && match.num_blocks_taken == 0);
  // The last token is always left: here by a copy of three positions.
  CHECK(Match(kv, tokens).num_tokens == 11 && Match(kv, tokens).num_blocks == 2);
  CHECK(Match(kv, {0}).num_tokens == 0 && Match(kv, {}).num_tokens == 0);
  KvSequence b;
  CHECK(kv.Attach({}, tokens.data(), 12, &b) == 11);
  CHECK(std::equal(a.blocks.begin(), a.blocks.begin() + 2, b.blocks.begin()));
  CHECK(a.blocks[2] != b.blocks[2] && kv.num_used() == 4 && kv.copies().size() == 1);
  kv.CheckInvariants({&a, &b});
  // Nothing is shared under another salt, adapter or private id.
  for (const PrefixKey& key : {PrefixKey{1, 0, 0}, PrefixKey{0, 1, 0}, PrefixKey{0, 0, 1}}) {
    CHECK(Match(kv, tokens, key).num_tokens == 0);
  }
}

void TestTheSameComputedTwice() {
  KvCache kv(Pool(8));
  const Tokens tokens = Count(0, 9);
  KvSequence a, b;
  kv.Extend(&a, 9);
  kv.Extend(&b, 9);
  kv.Publish({}, tokens.data(), 8, {}, 0, &a);
  CHECK(kv.num_used() == 6);
  kv.Publish({}, tokens.data(), 8, {}, 0, &b);
  CHECK(kv.num_used() == 4 && a.blocks[0] == b.blocks[0] && a.blocks[1] == b.blocks[1]);
  CHECK(a.blocks[2] != b.blocks[2] && kv.copies().empty());
  kv.CheckInvariants({&a, &b});
}

void TestPartial() {
  for (int what = 0; what < 3; ++what) {
    KvCacheConfig config = Pool(8);
    config.enable_partial_reuse = what != 1;
    config.can_copy = what != 2;
    KvCache kv(config);
    Cache(&kv, Count(0, 7));
    CHECK(kv.num_cached() == (what == 0 ? 2 : 1));
    CHECK(Match(kv, Count(0, 12)).num_tokens == (what == 0 ? 7 : 4));
    CHECK(Match(kv, {0, 1, 2, 3, 4, 5, 9, 9}).num_tokens == (what == 0 ? 6 : 4));
    CHECK(Match(kv, {0, 1, 9, 9}).num_tokens == (what == 0 ? 2 : 0));
  }
}

// The only block there is is the one to copy from: it changes hands.
void TestPartialOfTheLastBlock() {
  KvCache kv(Pool(1));
  Cache(&kv, Count(0, 3));
  const Tokens tokens = {0, 1, 9, 9};
  CHECK(Match(kv, tokens).num_tokens == 2 && Match(kv, tokens).num_blocks_taken == 1);
  KvSequence s;
  CHECK(kv.Attach({}, tokens.data(), 4, &s) == 2 && s.blocks[0] == 0);
  CHECK(kv.copies().empty() && kv.num_cached() == 0);
  kv.CheckInvariants({&s});
}

void TestHostRoundTrip() {
  KvCache kv(Pool(2, 2));
  const Tokens first = Count(0, 9), second = Count(50, 9);
  KvSequence s;
  kv.Extend(&s, 8);
  kv.SetDraftPositions(s, 6);
  kv.Publish({}, first.data(), 8, {}, 0, &s);
  const std::vector<int32_t> blocks = s.blocks;
  kv.Release(&s);
  kv.Extend(&s, 8);  // evicts both, the leaf first
  CHECK(kv.num_host_used() == 2 && kv.num_offloaded() == 2 && kv.copies().size() == 2);
  CHECK(kv.copies()[0].kind == PSM_COPY_TO_HOST && kv.copies()[0].src == blocks[1]);
  CHECK(Match(kv, first).num_host_blocks == 2 && Match(kv, first).num_blocks_taken == 2);
  kv.Publish({}, second.data(), 8, {}, 0, &s);
  kv.Release(&s);
  kv.ClearCopies();
  // Both ways in one step: the first block that comes in leaves room for the last that goes out.
  CHECK(kv.Attach({}, first.data(), 9, &s) == 8);
  std::vector<int32_t> kinds;
  for (const psm_block_copy& copy : kv.copies()) kinds.push_back(copy.kind);
  CHECK((kinds == Tokens{PSM_COPY_FROM_HOST, PSM_COPY_TO_HOST, PSM_COPY_FROM_HOST}));
  CHECK(kv.copies()[1].dst == kv.copies()[0].src && kv.copies()[2].dst == kv.copies()[1].src);
  CHECK(kv.num_onboarded() == 2 && kv.DraftPositions(s) == 6);
  kv.CheckInvariants({&s});
  CHECK(Match(kv, second).num_blocks == 1 && Match(kv, second).num_host_blocks == 1);
}

void TestWhatGoesToTheHost() {
  const Tokens tokens = Count(0, 5);
  const auto offloaded = [&tokens](int32_t priority, bool keep, double copy, double recompute) {
    KvCache kv(Pool(1, 1));
    kv.SetCosts(copy, recompute);
    KvSequence s;
    kv.Extend(&s, 4);
    kv.Publish({}, tokens.data(), 4, Decode(priority), 0, &s);
    kv.Release(&s, keep);
    kv.Extend(&s, 1);
    kv.CheckInvariants({&s});
    CHECK(Match(kv, tokens).num_blocks == static_cast<int32_t>(kv.num_offloaded()));
    return kv.num_offloaded() == 1;
  };
  CHECK(offloaded(35, true, 0, 0));
  CHECK(!offloaded(34, true, 0, 0));   // below host_offload_min_priority
  CHECK(!offloaded(35, false, 0, 0));  // released as not worth it
  CHECK(offloaded(35, true, 4, 9));    // there and back in less time than to compute it
  CHECK(!offloaded(35, true, 5, 10));  // not less
  CHECK(!offloaded(100, true, 20, 10));
}

void TestHostIsLeftWhenRecomputingIsCheaper() {
  KvCache kv(Pool(2, 2));
  Cache(&kv, Count(0, 8));
  KvSequence s;
  kv.Extend(&s, 8);
  kv.Release(&s);
  CHECK(Match(kv, Count(0, 9)).num_host_blocks == 2);
  kv.SetCosts(10, 5);
  CHECK(Match(kv, Count(0, 9)).num_blocks == 0);
  // Computed again, the block on the host becomes that on the device.
  KvSequence t = Hold(&kv, Count(0, 4));
  CHECK(kv.num_host_used() == 1 && Match(kv, Count(0, 9)).num_blocks == 1);
  kv.SetCosts(0, 0);
  CHECK(Match(kv, Count(0, 9)).num_blocks == 2);
  kv.CheckInvariants({&t});
}

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
}

void TestForget() {
  KvCache kv(Pool(20, 4));
  Cache(&kv, Count(0, 9), {}, {0, 5, 0});
  Cache(&kv, Count(0, 9), {}, {3, 5, 0});
  Cache(&kv, Count(0, 9), {}, {3, 0, 0});
  Cache(&kv, Count(0, 9), {}, {3, 5, 77});
  KvSequence held = Hold(&kv, Count(100, 6), {}, {3, 0, 0});
  kv.Forget({3, 5, 77});
  CHECK(Match(kv, Count(0, 9), {3, 5, 77}).num_tokens == 0);
  CHECK(Match(kv, Count(0, 9), {3, 5, 0}).num_tokens == 8);
  kv.Forget({0, 5, 0});  // the adapter under every salt
  CHECK(Match(kv, Count(0, 9), {0, 5, 0}).num_tokens == 0);
  CHECK(Match(kv, Count(0, 9), {3, 5, 0}).num_tokens == 0);
  CHECK(Match(kv, Count(0, 9), {3, 0, 0}).num_tokens == 8);
  kv.ForgetAll();
  CHECK(Match(kv, Count(0, 9), {3, 0, 0}).num_tokens == 0);
  CHECK(Match(kv, Count(100, 9), {3, 0, 0}).num_tokens == 6);  // in use
  kv.Release(&held);
  kv.Forget({3, 0, 0});
  CHECK(kv.num_cached() == 0 && kv.num_free() == 20);
  kv.CheckInvariants({});
}

// A duplicate whose draft positions the tree lacks hands them over.
void TestDraftOfDuplicates() {
  KvCache kv(Pool(8));
  const Tokens tokens = Count(0, 5);
  KvSequence a, b;
  kv.Extend(&a, 4);
  kv.Publish({}, tokens.data(), 4, {}, 0, &a);
  kv.Extend(&b, 4);
  const int32_t own = b.blocks[0];
  kv.SetDraftPositions(b, 3);
  kv.Publish({}, tokens.data(), 4, {}, 0, &b);
  CHECK(b.blocks[0] == a.blocks[0] && kv.DraftPositions(a) == 3 && kv.copies().size() == 1);
  CHECK(kv.copies()[0].src == own && kv.copies()[0].dst == a.blocks[0]);
  // Nobody uses the one in the tree: it is replaced without a copy.
  kv.Release(&a);
  kv.Release(&b);
  kv.ClearCopies();
  kv.Extend(&b, 4);
  const int32_t better = b.blocks[0];
  kv.SetDraftPositions(b, 4);
  kv.Publish({}, tokens.data(), 4, {}, 0, &b);
  CHECK(b.blocks[0] == better && kv.copies().empty() && kv.DraftPositions(b) == 4);
  CHECK(kv.num_cached() == 0);
  // What is published is not lost to one who has less.
  kv.SetDraftPositions(b, 1);
  CHECK(kv.DraftPositions(b) == 4);
  kv.CheckInvariants({&b});
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
  TestSharedWhileInUse();
  TestTheSameComputedTwice();
  TestPartial();
  TestPartialOfTheLastBlock();
  TestHostRoundTrip();
  TestWhatGoesToTheHost();
  TestHostIsLeftWhenRecomputingIsCheaper();
  TestRetentionRanges();
  TestRetentionDuration();
  TestRetentionOfSharedBlocks();
  TestForget();
  TestDraftOfDuplicates();
  TestEventsAreBounded();
  TestEventHashes();
  TestEventsFromAnotherThread();
  return 0;
}
