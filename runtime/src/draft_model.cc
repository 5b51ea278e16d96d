// SPDX-License-Identifier: Apache-2.0
#include "draft_model.h"

#include <algorithm>
#include <new>

#include "status.h"

namespace plansmith {
namespace {

// Ranges of so many tokens are what a running draft has to make up (after all drafts were accepted:
// two); they go before longer ones.
constexpr int32_t kShortRange = 4;

// Nobody reads the log-probabilities of a draft.
class WithoutLogProbs {
 public:
  explicit WithoutLogProbs(SamplingParams* params)
      : params_(params), num_logprobs_(params->num_logprobs) {
    params->num_logprobs = 0;
  }
  ~WithoutLogProbs() { params_->num_logprobs = num_logprobs_; }
  WithoutLogProbs(const WithoutLogProbs&) = delete;
  WithoutLogProbs& operator=(const WithoutLogProbs&) = delete;

 private:
  SamplingParams* params_;
  int32_t num_logprobs_;
};

bool AnyAllowed(const uint32_t* mask, int32_t vocab_size) {
  const int32_t num_words = (vocab_size + 31) / 32;
  return std::any_of(mask, mask + num_words, [](uint32_t word) { return word != 0; });
}

}  // namespace

DraftModel::DraftModel(const EngineConfig& config, KvCache* kv, Sampler* sampler,
                       GuideThread* guides)
    : config_(config),
      kv_(kv),
      sampler_(sampler),
      guides_(guides),
      batch_(config.draft_info.max_batch_size, config.draft_info.max_num_tokens,
             kv->BlocksFor(config.info.max_seq_len)),
      claims_(static_cast<size_t>(kv->num_blocks())) {
  ranges_.reserve(static_cast<size_t>(config.draft_info.max_batch_size));
  if (config.draft_info.samples_rows == PSM_SAMPLES_ALL) {
    sampling_ =
        std::make_unique<SamplingRows>(config.info.vocab_size, config.draft_info.max_batch_size);
  }
}

bool DraftModel::Draft(std::vector<ScheduledSeq>* sequences) {
  CollectCatchUp(sequences);
  bool ok = true;
  for (size_t round = 1; ok && !ranges_.empty(); ++round) {
    ok = RunRound();
    if (ok && round == 1) NoteComputed();
    CollectRound(sequences, round);
  }
  for (ScheduledSeq& seq : *sequences) {
    Request* request = seq.request;
    for (size_t i = 0; i < request->draft.size(); ++i) request->PopToken();
    if (!ok) request->draft.clear();
  }
  return ok;
}

// The first round: every request's positions that the draft has not computed. The short ones first,
// then the others as far as one step of the draft goes: nobody waits longer for another's prompt
// than for a chunk of it in the target.
void DraftModel::CollectCatchUp(std::vector<ScheduledSeq>* sequences) {
  ranges_.clear();
  num_range_tokens_ = 0;
  ++catch_up_id_;
  for (const bool is_short : {true, false}) {
    for (ScheduledSeq& seq : *sequences) {
      if (seq.num_draft == 0) continue;
      Request* request = seq.request;
      const int32_t end = request->num_tokens();
      // The last token is computed again if need be, for its row.
      const int32_t begin = std::min(kv_->DraftPositions(request->kv), end - 1);
      if ((end - begin <= kShortRange) == is_short) AddRange(request, begin, end);
    }
  }
  // A batch has its contexts first.
  std::partition(ranges_.begin(), ranges_.end(),
                 [](const DraftRange& r) { return r.end - r.begin > 1; });
}

void DraftModel::AddRange(Request* request, int32_t begin, int32_t end) {
  const psm_model_info& limits = config_.draft_info;
  const int32_t room = limits.max_num_tokens - num_range_tokens_;
  if (room == 0 || ranges_.size() == static_cast<size_t>(limits.max_batch_size)) return;
  const DraftRange range{request, begin, std::min(end, begin + room)};
  if (!ClaimBlocks(range)) return;
  ranges_.push_back(range);
  num_range_tokens_ += range.end - range.begin;
}

// Requests may share blocks that the draft has not computed. The first one does; the others find
// them computed in the next step.
bool DraftModel::ClaimBlocks(const DraftRange& range) {
  const int32_t first = range.begin / kv_->tokens_per_block();
  const int32_t end = kv_->BlocksFor(range.end);
  const auto claim = [&](int32_t i) -> uint32_t& {
    return claims_[static_cast<size_t>(range.request->kv.blocks[static_cast<size_t>(i)])];
  };
  for (int32_t i = first; i < end; ++i) {
    if (claim(i) == catch_up_id_) return false;
  }
  for (int32_t i = first; i < end; ++i) claim(i) = catch_up_id_;
  return true;
}

// The further rounds: the token that the last one drew.
void DraftModel::CollectRound(std::vector<ScheduledSeq>* sequences, size_t round) {
  ranges_.clear();
  num_range_tokens_ = 0;
  for (ScheduledSeq& seq : *sequences) {
    Request* request = seq.request;
    if (request->draft.size() != round || seq.num_draft <= static_cast<int32_t>(round)) continue;
    // Nothing comes after a token that ends the request.
    if (FinishReason(*request) != PSM_FINISH_NOT_FINISHED) continue;
    ranges_.push_back({request, request->num_tokens() - 1, request->num_tokens()});
    ++num_range_tokens_;
  }
}

bool DraftModel::RunRound() {
  const int64_t begin_ns = NowNs();
  Rows rows;
  if (!Step(&rows)) return false;
  DrawAll(rows);
  cost_.Observe(num_range_tokens_, NowNs() - begin_ns);
  return true;
}

bool DraftModel::Step(Rows* rows) {
  const psm_batch& batch = batch_.Build(ranges_, kv_->tokens_per_block());
  const StepOutcome outcome = RunStep(config_.draft, batch, config_.info.vocab_size, [&] {
    return batch.num_logits_rows == 0 ? nullptr : DescribeRows();
  });
  *rows = outcome.rows;
  if (outcome.status != PSM_OK) return false;
  return batch.num_logits_rows == 0 || rows->samples != nullptr || rows->logits != nullptr;
}

// How the round's rows are to be drawn, while the device computes them; NULL = from their logits.
// What a request wants of the target's logits does not matter here, but beams are never drafted
// for.
SamplingRows* DraftModel::DescribeRows() {
  if (sampling_ == nullptr) return nullptr;
  const auto has_row = [](const DraftRange& r) { return r.end == r.request->num_tokens(); };
  const auto cannot = [&](const DraftRange& r) {
    return has_row(r) && !SamplingRows::CanDescribe(*r.request);
  };
  if (std::any_of(ranges_.begin(), ranges_.end(), cannot)) return nullptr;
  sampling_->Clear();
  try {
    for (const DraftRange& range : ranges_) {
      if (!has_row(range)) continue;
      const uint32_t* mask = nullptr;
      try {
        mask = MaskOf(range.request);
      } catch (const StatusError&) {  // comes again in DrawOne
      }
      sampling_->Add(range.request, mask, false);
    }
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
  return sampling_.get();
}

// NULL = free.
const uint32_t* DraftModel::MaskOf(Request* request) {
  if (request->guide == nullptr) return nullptr;
  return guides_->MaskAhead(request, request->draft.data(),
                            static_cast<int32_t>(request->draft.size()));
}

void DraftModel::NoteComputed() {
  for (const DraftRange& range : ranges_) kv_->SetDraftPositions(range.request->kv, range.end);
}

void DraftModel::DrawAll(Rows rows) {
  for (const DraftRange& range : ranges_) {
    if (range.end < range.request->num_tokens()) continue;
    DrawOne(rows, range.request);
    rows.Skip(1);
  }
}

// What goes wrong here goes wrong again in the target's row, where it is reported; a draft only
// ends.
void DraftModel::DrawOne(const Rows& row, Request* request) {
  Sample sample;
  const WithoutLogProbs without(&request->params);
  try {
    const uint32_t* mask = MaskOf(request);
    if (mask != nullptr && !AnyAllowed(mask, config_.info.vocab_size)) return;
    if (row.samples != nullptr) {
      TakeSample(*row.samples, *request, mask, config_.info.vocab_size, &sample);
    } else {
      sampler_->Draw(row.logits, *request, mask, &sample);
    }
  } catch (...) {
    return;
  }
  request->draft.push_back(sample.token);
  request->PushToken(sample.token);
}

// A draft was computed as a position when it was the input of the round after it: all but the last.
void DraftModel::Observe(const Request& request, int32_t num_drafted, int32_t num_accepted) {
  if (request.spec.base < 0 || request.kv.blocks.empty()) return;
  kv_->SetDraftPositions(request.kv, request.spec.base + std::min(num_accepted, num_drafted - 1));
}

int64_t DraftModel::NowNs() const {
  return config_.draft.now_ns != nullptr ? config_.draft.now_ns(config_.draft.self)
                                         : config_.NowNs();
}

}  // namespace plansmith
