// Blocks that several sequences share: forks, copies before a write, and what the draft holds.
//
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "kv_cache.h"
#include "status.h"

namespace plansmith {
namespace {

[[noreturn]] void Broken(const std::string& what) {
  throw StatusError(PSM_ERROR_INTERNAL, "KV cache: " + what);
}

}  // namespace

void KvCache::Fork(const KvSequence& from, KvSequence* to) {
  if (!to->blocks.empty()) Broken("a sequence that holds blocks cannot become a fork");
  to->blocks.assign(from.blocks.begin(), from.blocks.end());
  to->num_published = from.num_published;
  to->num_retained = from.num_retained;
  to->num_draft_blocks = from.num_draft_blocks;
  for (int32_t block : to->blocks) Ref(block);
}

// Not to be written: another sequence, or a later one that finds it in the tree, reads it.
bool KvCache::IsShared(int32_t block) const {
  const DeviceBlock& b = device(block);
  return b.refs > 1 || (b.node != PrefixTree::kNone && tree_.is_full(b.node));
}

int32_t KvCache::BlocksToWrite(const KvSequence& sequence, int64_t position) const {
  const size_t i = static_cast<size_t>(position / config_.tokens_per_block);
  return i < sequence.blocks.size() && IsShared(sequence.blocks[i]);
}

int32_t KvCache::MakeWritable(KvSequence* sequence, int64_t position) {
  const size_t i = static_cast<size_t>(position / config_.tokens_per_block);
  const int32_t offset = static_cast<int32_t>(position % config_.tokens_per_block);
  if (i >= sequence->blocks.size()) return 0;
  const int32_t old = sequence->blocks[i];
  if (!IsShared(old)) {
    const int32_t id = device(old).node;  // a tail that claims what is to be written
    if (id != PrefixTree::kNone && tree_[id].num_tokens > offset) Remove(id);
    return 0;
  }
  if (offset > 0 && !config_.can_copy) Broken("a shared block cannot be copied by this executor");
  if (i + 1 < sequence->blocks.size() &&
      device(sequence->blocks[i + 1]).node != PrefixTree::kNone) {
    Broken("a block is to be written in front of published ones");
  }
  if (num_free() == 0) Broken("no block is free for a copy: the scheduler did not check");
  const int32_t block = Take();
  if (offset > 0) QueueCopy(PSM_COPY_DEVICE, old, block, offset);
  device(block).draft = std::min(device(old).draft, offset);
  sequence->blocks[i] = block;
  for (int32_t* n :
       {&sequence->num_published, &sequence->num_retained, &sequence->num_draft_blocks}) {
    *n = std::min(*n, static_cast<int32_t>(i));
  }
  Drop(old);
  return 1;
}

int32_t KvCache::CountDistinct(const KvSequence* const* sequences, size_t num_sequences) {
  int32_t count = 0;
  ++visit_;
  for (size_t s = 0; s < num_sequences; ++s) {
    for (int32_t block : sequences[s]->blocks) {
      count += device(block).visit != visit_;
      device(block).visit = visit_;
    }
  }
  return count;
}

int32_t KvCache::DraftPositions(const KvSequence& sequence) const {
  // What is published never loses draft positions, so it is looked at once.
  const int32_t size = config_.tokens_per_block;
  int32_t& filled = sequence.num_draft_blocks;
  while (filled < sequence.num_published && DraftOf(sequence, filled) == size) ++filled;
  const int32_t num_blocks = static_cast<int32_t>(sequence.blocks.size());
  int32_t i = filled;
  while (i < num_blocks && DraftOf(sequence, i) == size) ++i;
  return i * size + (i < num_blocks ? DraftOf(sequence, i) : 0);
}

void KvCache::SetDraftPositions(const KvSequence& sequence, int32_t num_positions) {
  const int32_t size = config_.tokens_per_block;
  int32_t i = sequence.num_draft_blocks;
  for (; i < sequence.num_published && i * size < num_positions; ++i) {
    int32_t& draft = device(sequence.blocks[static_cast<size_t>(i)]).draft;
    draft = std::max(draft, std::min(num_positions - i * size, size));
  }
  for (i = sequence.num_published; i < static_cast<int32_t>(sequence.blocks.size()); ++i) {
    device(sequence.blocks[static_cast<size_t>(i)]).draft =
        std::min(std::max(num_positions - i * size, 0), size);
  }
}

}  // namespace plansmith
