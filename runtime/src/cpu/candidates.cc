// SPDX-License-Identifier: Apache-2.0
#include "cpu/candidates.h"

#include <algorithm>

namespace plansmith {
namespace cpu {
namespace {

// Of all lists of a step. A step with more goes without: its rows are drawn from their logits.
constexpr size_t kMaxEntries = size_t{1} << 20;
constexpr size_t kMaxLists = size_t{1} << 16;
constexpr uint32_t kScanColumns = 16 * kCandidateBlock;

bool Better(const psm_candidate& a, const psm_candidate& b) {
  return a.logit != b.logit ? a.logit > b.logit : a.token_id < b.token_id;
}

// The k best of what is offered; of equal logits the lower id has to come first.
class BestK {
 public:
  BestK(psm_candidate* list, uint32_t k) : list_(list), k_(k) {}

  // A later token must be larger, not as large.
  bool Wants(float logit) const { return num_ < k_ || logit > list_[0].logit; }
  // A heap with the worst on top, once it is full.
  void Offer(float logit, int32_t id) {
    if (!Wants(logit)) return;
    if (num_ == k_) std::pop_heap(list_, list_ + num_--, Better);
    list_[num_++] = {logit, id};
    std::push_heap(list_, list_ + num_, Better);
  }
  uint32_t Sort() {
    std::sort_heap(list_, list_ + num_, Better);
    return num_;
  }

 private:
  psm_candidate* list_;
  uint32_t k_, num_ = 0;
};

}  // namespace

CandidateSearch::CandidateSearch(uint32_t vocab_size)
    : vocab_size_(vocab_size),
      entries_(kMaxEntries * sizeof(psm_candidate), "the candidates of a step's rows"),
      nums_(kMaxLists * sizeof(uint32_t), "the candidates of a step's rows") {}

bool CandidateSearch::Begin(const psm_batch& batch, uint32_t num_parts) {
  k_ = 0;
  if (batch.struct_size < PSM_BATCH_SIZE || batch.num_candidates <= 0) return false;
  const size_t k = static_cast<size_t>(batch.num_candidates);
  const size_t lists = static_cast<size_t>(batch.num_logits_rows) * num_parts;
  for (int32_t row = 0; row < batch.num_logits_rows; ++row) {
    batch.candidates[static_cast<size_t>(row) * k].token_id = -1;
  }
  if (num_parts == 0 || lists > kMaxLists || lists * k > kMaxEntries) return false;
  k_ = static_cast<uint32_t>(k);
  num_parts_ = num_parts;
  return true;
}

void CandidateSearch::Scan(const KernelTable& kernels, const float* logits, uint32_t row,
                           uint32_t part, uint32_t begin, uint32_t end) {
  BestK best(ListOf(row, part), k_);
  end = std::min(end, vocab_size_);
  for (uint32_t from = begin; from < end; from += kScanColumns) {
    const uint32_t n = std::min(kScanColumns, end - from);
    float maxima[kScanColumns / kCandidateBlock];
    if (!kernels.block_maxima(logits + from, n, maxima)) {
      *NumOf(row, part) = kBad;
      return;
    }
    for (uint32_t b = 0; b * kCandidateBlock < n; ++b) {
      if (!best.Wants(maxima[b])) continue;
      const uint32_t block_end = std::min(n, (b + 1) * kCandidateBlock);
      for (uint32_t i = b * kCandidateBlock; i < block_end; ++i) {
        best.Offer(logits[from + i], static_cast<int32_t>(from + i));
      }
    }
  }
  *NumOf(row, part) = best.Sort();
}

void CandidateSearch::JoinRow(uint32_t row, psm_candidate* out) const {
  for (uint32_t part = 0; part < num_parts_; ++part) {
    if (*NumOf(row, part) == kBad) return;
  }
  // Equal logits are offered with the lower id first, as BestK wants them: lists have them so, and
  // the ids of a part are below those of the next.
  BestK best(out, k_);
  for (uint32_t part = 0; part < num_parts_; ++part) {
    const psm_candidate* list = ListOf(row, part);
    for (uint32_t i = 0; i < *NumOf(row, part) && best.Wants(list[i].logit); ++i) {
      best.Offer(list[i].logit, list[i].token_id);
    }
  }
  const uint32_t num = best.Sort();
  if (num < k_) out[num].token_id = -1;
}

void CandidateSearch::Finish(const psm_batch& batch) {
  if (k_ == 0) return;
  for (int32_t row = 0; row < batch.num_logits_rows; ++row) {
    JoinRow(static_cast<uint32_t>(row), batch.candidates + static_cast<size_t>(row) * k_);
  }
  k_ = 0;
}

}  // namespace cpu
}  // namespace plansmith
