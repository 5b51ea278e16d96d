// SPDX-License-Identifier: Apache-2.0
#include "kv_cache.h"

#include <algorithm>
#include <limits>

#include "status.h"

namespace plansmith {
namespace {

[[noreturn]] void Broken(const std::string& what) {
  throw StatusError(PSM_ERROR_INTERNAL, "KV cache: " + what);
}

}  // namespace

KvCache::KvCache(const KvCacheConfig& config) : config_(config) {
  // Address space only: a step allocates nothing, and a huge pool costs what is used of it.
  ref_counts_.reserve(static_cast<size_t>(config.num_blocks));
  free_.reserve(static_cast<size_t>(config.num_blocks));
}

KvCache::~KvCache() = default;

int32_t KvCache::num_blocks() const { return config_.num_blocks; }
int32_t KvCache::num_free() const { return num_untouched() + static_cast<int32_t>(free_.size()); }
int32_t KvCache::num_cached() const { return 0; }
int32_t KvCache::num_host_blocks() const { return config_.num_host_blocks; }
int32_t KvCache::num_host_used() const { return 0; }
int32_t KvCache::tokens_per_block() const { return config_.tokens_per_block; }
uint64_t KvCache::num_allocations() const { return num_allocations_; }
uint64_t KvCache::num_offloaded() const { return 0; }
uint64_t KvCache::num_onboarded() const { return 0; }

int32_t KvCache::BlocksInBytes(uint64_t kv_cache_bytes, uint64_t kv_bytes_per_block) {
  const uint64_t n = kv_cache_bytes / kv_bytes_per_block;
  if (n == 0) {
    throw StatusError(PSM_ERROR_OUT_OF_MEMORY,
                      Format("kv_cache_bytes is %llu, one KV block takes %llu; give at least that "
                             "(or 0 for the default)",
                             static_cast<unsigned long long>(kv_cache_bytes),
                             static_cast<unsigned long long>(kv_bytes_per_block)));
  }
  return static_cast<int32_t>(
      std::min<uint64_t>(n, static_cast<uint64_t>(std::numeric_limits<int32_t>::max())));
}

int32_t KvCache::Take() {
  ++num_allocations_;
  if (free_.empty()) {
    ref_counts_.push_back(1);
    return static_cast<int32_t>(ref_counts_.size()) - 1;
  }
  const int32_t block = free_.back();
  free_.pop_back();
  ref_counts_[static_cast<size_t>(block)] = 1;
  return block;
}

void KvCache::Drop(int32_t block) {
  int32_t& count = ref_counts_[static_cast<size_t>(block)];
  if (count <= 0) Broken(Format("block %d is released but nobody holds it", block));
  if (--count == 0) free_.push_back(block);
}

int32_t KvCache::Extend(KvSequence* sequence, int64_t num_positions) {
  const int32_t added = BlocksFor(num_positions) - static_cast<int32_t>(sequence->blocks.size());
  if (added <= 0) return 0;
  if (added > num_free()) {
    Broken(Format("%d blocks wanted, %d free: the scheduler did not check", added, num_free()));
  }
  for (int32_t i = 0; i < added; ++i) sequence->blocks.push_back(Take());
  return added;
}

PrefixMatch KvCache::Match(const PrefixKey&, const int32_t*, int32_t) const { return {}; }
int32_t KvCache::Attach(const PrefixKey&, const int32_t*, int32_t, KvSequence*) { return 0; }
void KvCache::Publish(const PrefixKey&, const int32_t*, int32_t, const Retention&, int64_t,
                      KvSequence*) {}
void KvCache::PublishTail(const PrefixKey&, const int32_t*, int32_t, const Retention&, int64_t,
                          KvSequence*) {}

void KvCache::Fork(const KvSequence& from, KvSequence* to) {
  to->blocks = from.blocks;
  to->num_published = from.num_published;
  for (int32_t block : to->blocks) ++ref_counts_[static_cast<size_t>(block)];
}
int32_t KvCache::BlocksToWrite(const KvSequence&, int64_t) const { return 0; }
int32_t KvCache::MakeWritable(KvSequence*, int64_t) { return 0; }
int32_t KvCache::CountDistinct(const KvSequence* const*, size_t) { return 0; }
void KvCache::Forget(const PrefixKey&) {}
const std::vector<psm_block_copy>& KvCache::copies() const { return copies_; }
void KvCache::ClearCopies() { copies_.clear(); }
int32_t KvCache::DraftPositions(const KvSequence&) const { return 0; }
void KvCache::SetDraftPositions(const KvSequence&, int32_t) {}
void KvCache::SetCosts(double, double) {}
size_t KvCache::TakeEvents(psm_kv_event*, size_t, int32_t*, size_t) { return 0; }

void KvCache::Release(KvSequence* sequence, bool) {
  // From the back: the stack then hands the blocks out again in position order.
  while (!sequence->blocks.empty()) {
    Drop(sequence->blocks.back());
    sequence->blocks.pop_back();
  }
  sequence->num_published = 0;
}

void KvCache::CheckInvariants(const std::vector<const KvSequence*>& sequences) const {
  std::vector<int32_t> references(ref_counts_.size(), 0);
  for (const KvSequence* sequence : sequences) {
    for (int32_t block : sequence->blocks) {
      if (block < 0 || static_cast<size_t>(block) >= references.size())
        Broken(Format("no such block: %d", block));
      ++references[static_cast<size_t>(block)];
    }
  }
  std::vector<bool> is_free(ref_counts_.size(), false);
  for (int32_t block : free_) {
    if (is_free[static_cast<size_t>(block)]) Broken(Format("block %d is free twice", block));
    is_free[static_cast<size_t>(block)] = true;
  }
  for (size_t b = 0; b < ref_counts_.size(); ++b) {
    if (references[b] != ref_counts_[b]) {
      Broken(Format("block %zu has count %d and %d holders", b, ref_counts_[b], references[b]));
    }
    if (is_free[b] != (ref_counts_[b] == 0)) {
      Broken(Format("block %zu has count %d but is %s", b, ref_counts_[b],
                    is_free[b] ? "free" : "neither free nor held"));
    }
  }
}

}  // namespace plansmith
