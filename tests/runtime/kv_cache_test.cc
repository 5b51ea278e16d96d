// Blocks: exact accounting, forks, errors, no allocation in a steady step, and that CheckInvariants
// notices what it should.
//
// SPDX-License-Identifier: Apache-2.0
#include "kv_cache.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <atomic>
#include <new>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "count_allocations.h"
#include "resident_bytes.h"
#include "status.h"

using plansmith::KvCache;
using plansmith::KvCacheConfig;
using plansmith::KvSequence;
using plansmith::OnEviction;
using plansmith::PrefixKey;
using plansmith::PrefixMatch;
using plansmith::Retention;
using plansmith::StatusError;

namespace {

KvCacheConfig Pool(int32_t num_blocks, int32_t tokens_per_block) {
  KvCacheConfig config;
  config.num_blocks = num_blocks;
  config.tokens_per_block = tokens_per_block;
  return config;
}

template <typename Body>
psm_status CodeOf(Body body) {
  try {
    body();
    return PSM_OK;
  } catch (const StatusError& e) {
    return e.code();
  }
}

void TestBytesToBlocks() {
  CHECK(KvCache::BlocksInBytes(1000, 100) == 10);
  CHECK(KvCache::BlocksInBytes(1099, 100) == 10);
  CHECK(KvCache::BlocksInBytes(100, 100) == 1);
  CHECK(CodeOf([] { KvCache::BlocksInBytes(99, 100); }) == PSM_ERROR_OUT_OF_MEMORY);
  CHECK(KvCache::BlocksInBytes(~uint64_t{0}, 1) == 2147483647);
}

void TestExtendAndRelease() {
  KvCache kv(Pool(5, 4));
  KvSequence a, b;
  CHECK(kv.Extend(&a, 1) == 1 && kv.Extend(&a, 4) == 0 && kv.Extend(&a, 5) == 1);
  CHECK(kv.Extend(&b, 12) == 3);
  CHECK(kv.num_free() == 0 && kv.num_used() == 5 && kv.num_allocations() == 5);
  CHECK(kv.PositionsWithin(a) == 8);
  kv.CheckInvariants({&a, &b});
  CHECK(CodeOf([&] { kv.Extend(&a, 9); }) == PSM_ERROR_INTERNAL);
  CHECK(a.blocks.size() == 2);  // nothing changed
  kv.Release(&b);
  CHECK(kv.num_free() == 3 && b.blocks.empty());
  kv.CheckInvariants({&a});
  CHECK(kv.PositionsWithin(a) == 20);
  CHECK(kv.Extend(&a, 20) == 3 && kv.num_allocations() == 8);
  kv.Release(&a);
  kv.CheckInvariants({});
}

// A checker that never complains would prove nothing.
void TestInvariantsNotice() {
  KvCache kv(Pool(4, 4));
  KvSequence a;
  kv.Extend(&a, 8);
  CHECK(CodeOf([&] { kv.CheckInvariants({}); }) == PSM_ERROR_INTERNAL);        // a lost holder
  CHECK(CodeOf([&] { kv.CheckInvariants({&a, &a}); }) == PSM_ERROR_INTERNAL);  // one too many
  KvSequence stolen = a;
  kv.Release(&stolen);
  CHECK(CodeOf([&] { kv.CheckInvariants({&a}); }) == PSM_ERROR_INTERNAL);  // held but free
  CHECK(CodeOf([&] { kv.Release(&a); }) == PSM_ERROR_INTERNAL);            // released twice
  KvSequence wild;
  wild.blocks = {9};
  CHECK(CodeOf([&] { kv.CheckInvariants({&wild}); }) == PSM_ERROR_INTERNAL);
}

void TestRandomOperations() {
  std::mt19937 random(1);
  KvCache kv(Pool(37, 3));
  std::vector<KvSequence> sequences(9);
  std::vector<int64_t> lengths(9, 0);
  std::vector<const KvSequence*> all;
  for (const KvSequence& sequence : sequences) all.push_back(&sequence);
  for (int i = 0; i < 5000; ++i) {
    const size_t s = random() % sequences.size();
    if (random() % 5 == 0) {
      kv.Release(&sequences[s]);
      lengths[s] = 0;
    } else {
      const int64_t wanted = lengths[s] + random() % 7;
      if (wanted <= kv.PositionsWithin(sequences[s])) {
        kv.Extend(&sequences[s], wanted);
        lengths[s] = wanted;
      }
    }
    int32_t used = 0;
    for (size_t j = 0; j < sequences.size(); ++j) {
      CHECK(static_cast<int32_t>(sequences[j].blocks.size()) == kv.BlocksFor(lengths[j]));
      used += kv.BlocksFor(lengths[j]);
    }
    CHECK(kv.num_used() == used);
    kv.CheckInvariants(all);
  }
}

// Forks share until one writes; the last one writes in place.
void TestForks() {
  KvCacheConfig config = Pool(8, 4);
  config.can_copy = true;
  KvCache kv(config);
  KvSequence a, b, c;
  kv.Extend(&a, 6);
  kv.Fork(a, &b);
  kv.Fork(a, &c);
  const KvSequence* all[] = {&a, &b, &c};
  CHECK(kv.num_used() == 2 && kv.CountDistinct(all, 3) == 2);
  CHECK(kv.BlocksToWrite(b, 6) == 1 && kv.BlocksToWrite(b, 8) == 0);  // a block it does not have
  CHECK(kv.MakeWritable(&b, 6) == 1 && kv.MakeWritable(&b, 6) == 0);
  CHECK(kv.copies().size() == 1 && kv.copies()[0].kind == PSM_COPY_DEVICE);
  CHECK(kv.copies()[0].src == a.blocks[1] && kv.copies()[0].dst == b.blocks[1]);
  CHECK(kv.copies()[0].num_tokens == 2);
  CHECK(b.blocks[0] == a.blocks[0] && kv.num_used() == 3 && kv.CountDistinct(all, 3) == 3);
  CHECK(kv.MakeWritable(&a, 6) == 1 && kv.MakeWritable(&c, 6) == 0);  // c is alone by now
  kv.CheckInvariants({&a, &b, &c});
  CHECK(kv.MakeWritable(&c, 4) == 0);  // nothing to copy on a boundary of its own block
  CHECK(kv.MakeWritable(&c, 0) == 1 && kv.copies().size() == 2);  // nor of a shared one
  for (KvSequence* s : {&a, &b, &c}) kv.Release(s);
  CHECK(kv.num_used() == 0);
}

// What is published is not written to, not even by the only one that holds it.
void TestPublishedIsReadOnly() {
  KvCacheConfig config = Pool(8, 4);
  config.can_copy = true;
  KvCache kv(config);
  const std::vector<int32_t> tokens = {1, 2, 3, 4, 5, 6, 7, 8, 9};
  KvSequence a;
  kv.Extend(&a, 7);
  kv.PublishTail({}, tokens.data(), 7, {}, 0, &a);
  CHECK(a.num_published == 1 && kv.BlocksToWrite(a, 3) == 1);
  CHECK(kv.BlocksToWrite(a, 7) == 0);  // its tail grows on in place
  CHECK(kv.Match({}, tokens.data(), 9).num_tokens == 7);
  CHECK(kv.MakeWritable(&a, 6) == 0);  // taken back into the tail: it claims less
  CHECK(kv.Match({}, tokens.data(), 9).num_tokens == 4);
  kv.CheckInvariants({&a});
  KvSequence b;
  kv.SetDraftPositions(a, 4);
  CHECK(kv.Attach({}, tokens.data(), 9, &b) == 4 && kv.DraftPositions(b) == 4);
  CHECK(kv.MakeWritable(&b, 2) == 1 && b.num_published == 0 && kv.DraftPositions(b) == 2);
  kv.CheckInvariants({&a, &b});
  CHECK(kv.Match({}, tokens.data(), 9).num_blocks == 1);
}

void TestMisuse() {
  const std::vector<int32_t> tokens = {1, 2, 3, 4, 5, 6, 7, 8, 9};
  KvCache kv(Pool(3, 4));  // cannot copy
  KvSequence a, b;
  kv.Extend(&a, 8);
  kv.Fork(a, &b);
  CHECK(CodeOf([&] { kv.Fork(a, &b); }) == PSM_ERROR_INTERNAL);
  CHECK(CodeOf([&] { kv.Attach({}, tokens.data(), 9, &b); }) == PSM_ERROR_INTERNAL);
  CHECK(CodeOf([&] { kv.MakeWritable(&b, 6); }) == PSM_ERROR_INTERNAL);
  kv.Publish({}, tokens.data(), 8, {}, 0, &a);
  CHECK(CodeOf([&] { kv.MakeWritable(&b, 0); }) == PSM_ERROR_INTERNAL);  // leaves a child behind
  b.num_published = 0;
  const std::vector<int32_t> others(9, 7);
  CHECK(CodeOf([&] { kv.Publish({}, others.data(), 8, {}, 0, &b); }) == PSM_ERROR_INTERNAL);
  kv.CheckInvariants({&a, &b});
  KvCacheConfig config = Pool(8, 4);
  config.num_host_blocks = 8;
  KvCache without(config);  // host blocks are of no use without copies
  CHECK(without.num_host_blocks() == 0);
}

// Requests come and go over a full pool with a full host, forks, drafts, retention and events.
void TestSteadyStateAllocatesNothing() {
  KvCacheConfig config = Pool(44, 4);
  config.can_copy = true;
  config.num_host_blocks = 16;
  config.max_kv_events = 64;
  KvCache kv(config);
  std::mt19937 random(3);
  std::vector<KvSequence> sequences(6);
  KvSequence fork;
  for (KvSequence& s : sequences) s.blocks.reserve(16);
  fork.blocks.reserve(16);
  std::vector<int32_t> tokens(26);
  Retention retention;
  retention.num_prompt = 20;
  retention.ranges = {{0, 8, 80, 5}, {8, -1, 20, -1}};
  int64_t news_before = 0;
  for (int step = 0; step < 4000; ++step) {
    if (step == 1000) news_before = num_news;
    KvSequence& s = sequences[random() % sequences.size()];
    kv.Release(&s, random() % 4 > 0 ? OnEviction::kKeep : OnEviction::kDrop);
    for (int32_t& t : tokens) t = static_cast<int32_t>(random() % 2);
    const PrefixKey key{0, random() % 2, random() % 8 == 0 ? uint64_t{7} : 0};
    kv.Attach(key, tokens.data(), 26, &s);
    kv.Extend(&s, 25);
    kv.Fork(s, &fork);
    kv.Release(&fork);
    kv.SetDraftPositions(s, static_cast<int32_t>(random() % 25));
    kv.PublishTail(key, tokens.data(), 25, retention, step * int64_t{1000000}, &s);
    if (key.private_id != 0) kv.Forget(key);
    kv.ClearCopies();
  }
  CHECK(num_news == news_before);
  CHECK(kv.num_offloaded() > 100 && kv.num_onboarded() > 100);
}

void TestSizeCostsNothing() {
  const size_t before = ResidentBytes();
  KvCacheConfig config = Pool(1000000, 64);
  config.can_copy = true;
  config.num_host_blocks = 1000000;
  config.max_kv_events = 100000;
  KvCache kv(config);
  KvSequence a;
  const std::vector<int32_t> tokens(641, 5);
  kv.Extend(&a, 641);
  kv.Publish({}, tokens.data(), 641, {}, 0, &a);
  if (!kHasShadow) CHECK(ResidentBytes() < before + (16u << 20));
}

}  // namespace

int main() {
  TestForks();
  TestPublishedIsReadOnly();
  TestMisuse();
  TestSteadyStateAllocatesNothing();
  TestSizeCostsNothing();
  TestBytesToBlocks();
  TestExtendAndRelease();
  TestInvariantsNotice();
  TestRandomOperations();
  return 0;
}
