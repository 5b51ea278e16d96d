// Reuse by example: whole and partial blocks, host blocks, forgetting, drafts.
//
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <vector>

#include "check.h"
#include "kv_helpers.h"

using namespace plansmith;

namespace {

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
    kv.Release(&s, keep ? OnEviction::kKeep : OnEviction::kDrop);
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

// Copies that nobody ever asks for stop when their share of returns no longer pays for them; a
// paused request's blocks go on.
void TestWhatDoesNotComeBackStaysAway() {
  const auto num_offloaded = [](OnEviction on_eviction) {
    KvCache kv(Pool(1, 1));
    kv.SetCosts(10, 30);  // 10 there, then 10 back instead of 30 for what returns: half must
    for (int32_t i = 0; i < 200; ++i) {
      const Tokens tokens = Count(4 * i, 5);
      KvSequence s;
      kv.Extend(&s, 4);
      kv.Publish({}, tokens.data(), 4, {}, 0, &s);
      kv.Release(&s, on_eviction);
      kv.ClearCopies();
    }
    kv.CheckInvariants({});
    return kv.num_offloaded();
  };
  CHECK(num_offloaded(OnEviction::kKeep) == 199);
  CHECK(num_offloaded(OnEviction::kKeepIfReused) == 64);  // 64 are trusted to come back
  CHECK(num_offloaded(OnEviction::kDrop) == 0);
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

}  // namespace

int main() {
  TestSharedWhileInUse();
  TestTheSameComputedTwice();
  TestPartial();
  TestPartialOfTheLastBlock();
  TestHostRoundTrip();
  TestWhatGoesToTheHost();
  TestWhatDoesNotComeBackStaysAway();
  TestHostIsLeftWhenRecomputingIsCheaper();
  TestForget();
  TestDraftOfDuplicates();
  return 0;
}
