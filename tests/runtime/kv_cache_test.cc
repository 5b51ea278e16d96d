// Blocks: exact accounting, errors, and that CheckInvariants notices what it should.
//
// SPDX-License-Identifier: Apache-2.0
#include "kv_cache.h"

#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "status.h"

using plansmith::KvCache;
using plansmith::KvCacheConfig;
using plansmith::KvSequence;
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

}  // namespace

int main() {
  TestBytesToBlocks();
  TestExtendAndRelease();
  TestInvariantsNotice();
  TestRandomOperations();
  return 0;
}
