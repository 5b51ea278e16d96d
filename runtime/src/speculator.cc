// SPDX-License-Identifier: Apache-2.0
#include "speculator.h"

#include <algorithm>

#include "draft_length.h"
#include "draft_model.h"
#include "ngram.h"

namespace plansmith {
namespace {

// What a request's acceptance is taken for before anything is known, and how many draft tokens that
// guess counts as.
constexpr float kPriorAcceptance = 0.7f;
constexpr float kPriorTrials = 4.0f;
constexpr float kMaxTrials = 24.0f;  // older ones fade
// A request (or a load) that drafting does not pay for is tried again after so many steps, each
// time twice as many.
constexpr int32_t kFirstProbe = 16;
constexpr int32_t kLastProbe = 1024;
constexpr int32_t kProbeLength = 2;
constexpr double kHopedSpeedup = 1.3;  // from a try that works out
// A prompt that the draft has to compute first is an investment; shorter ones are not weighed.
constexpr int32_t kCheapCatchUp = 64;
constexpr int32_t kFailuresInRow = 3;
constexpr int32_t kFirstRest = 64;  // steps without drafts after that, each time twice as many
constexpr int32_t kMaxRestShift = 8;

bool Generates(const Request& request) { return !request.in_context(); }

}  // namespace

struct Speculator::Impl {
  Impl(const EngineConfig& c, KvCache* kv, Sampler* sampler, GuideThread* g, const StepCost* cost)
      : config(c), guides(g), lengths(c.options.max_draft_len), target_cost(*cost) {
    const size_t most = static_cast<size_t>(c.info.max_batch_size);
    drafted_for.reserve(most);
    candidates.reserve(most);
    if (c.options.draft_mode == PSM_DRAFT_MODEL)
      model = std::make_unique<DraftModel>(c, kv, sampler, g);
  }

  int32_t Limit(const Request& request) const;
  void Collect(const std::vector<Request*>& running);
  void ChooseAdaptively();
  int32_t Probe(Request* request, const DraftCandidate& candidate, const DraftChoice& choice);
  bool WorthCatchingUp(const Request& request, const DraftChoice& choice, double rate) const;
  void LookUp(Request* request) const;
  static void HoldBackCallers(ScheduledSeq* seq, bool is_callers);
  void TakeCallers(ScheduledSeq* seq, DraftOutcome* outcome) const;
  void KeepAllowed(Request* request) const;
  void DraftNgrams(StepPlan* plan) const;
  void NoteFailure();
  int64_t NowNs() const { return model == nullptr ? config.NowNs() : model->NowNs(); }

  const EngineConfig& config;
  GuideThread* guides;
  std::unique_ptr<DraftModel> model;  // NULL = n-grams
  DraftLength lengths;
  const StepCost& target_cost;
  float prior = kPriorAcceptance;  // follows all requests' acceptance: what a new one starts with

  // The requests that may be drafted for in the coming step.
  DraftLoad load;
  std::vector<Request*> drafted_for;
  std::vector<DraftCandidate> candidates;

  int32_t load_idle_steps = 0;  // while the load is against drafting
  int32_t load_probe_after = kFirstProbe;
  int32_t num_failures = 0;  // of the draft executor, in a row
  int32_t rest_steps = 0;
};

Speculator::Speculator(const EngineConfig& config, KvCache* kv, Sampler* sampler,
                       GuideThread* guides, const StepCost* target_cost)
    : impl_(std::make_unique<Impl>(config, kv, sampler, guides, target_cost)) {}
Speculator::~Speculator() = default;

void Speculator::ReserveEdits(size_t num_requests, size_t edits_each) {
  if (impl_->model != nullptr) impl_->model->ReserveEdits(num_requests, edits_each);
}

// A step gives a token beyond the drafts, so the last one needs none.
int32_t Speculator::Impl::Limit(const Request& request) const {
  if (request.beams != nullptr || !Generates(request)) return 0;
  const int32_t most = std::min(request.max_draft_len, config.options.max_draft_len);
  return std::max(0, std::min(most, request.max_len() - request.num_tokens() - 1));
}

void Speculator::Impl::Collect(const std::vector<Request*>& running) {
  drafted_for.clear();
  candidates.clear();
  load = {};
  for (Request* request : running) {
    request->spec.want = 0;
    request->spec.is_callers = false;
    if (!Generates(*request)) {
      load.num_tokens += request->context_end - request->num_computed;
      continue;
    }
    load.num_sequences += request->width();
    if (const int32_t left = request->CallerDraftLeft(); left > 0) {
      request->spec.want = left;
      request->spec.is_callers = true;
      load.num_tokens += left;
      continue;
    }
    const int32_t limit = Limit(*request);
    if (limit == 0 || candidates.size() == candidates.capacity()) continue;
    const float acceptance = request->spec.acceptance < 0.0f ? prior : request->spec.acceptance;
    drafted_for.push_back(request);
    candidates.push_back({acceptance, limit, limit});
  }
  load.num_tokens =
      std::max(1, std::min(load.num_tokens + load.num_sequences, config.info.max_num_tokens));
}

void Speculator::PlanLengths(const std::vector<Request*>& running) {
  Impl& s = *impl_;
  s.Collect(running);
  if (s.rest_steps > 0) {
    --s.rest_steps;
    return;
  }
  if (s.config.options.adaptive_draft_len != 0) s.ChooseAdaptively();
  for (size_t i = 0; i < s.drafted_for.size(); ++i) {
    Request* request = s.drafted_for[i];
    request->spec.want = s.candidates[i].length;
    // Looked up now: rows and blocks are then taken for what there is.
    if (s.model == nullptr) s.LookUp(request);
  }
}

void Speculator::Impl::ChooseAdaptively() {
  if (candidates.empty()) return;
  const DraftChoice choice =
      lengths.Choose(target_cost, model == nullptr ? nullptr : &model->cost(), load,
                     candidates.data(), candidates.size());
  const bool probe_load = !choice.pays_if_accepted && ++load_idle_steps >= load_probe_after;
  if (choice.pays_if_accepted) {
    load_idle_steps = 0;
    load_probe_after = kFirstProbe;
  } else if (probe_load) {
    load_idle_steps = 0;
    load_probe_after = std::min(2 * load_probe_after, kLastProbe);
  }
  // The load is tried again with few requests: what is wanted is a measurement.
  size_t num_probes = probe_load ? 1 + candidates.size() / 8 : 0;
  for (size_t i = 0; i < candidates.size(); ++i) {
    DraftCandidate& c = candidates[i];
    if (c.length > 0) {
      if (!WorthCatchingUp(*drafted_for[i], choice, choice.rate)) c.length = 0;
    } else if (num_probes > 0) {
      --num_probes;
      c.length = std::min(c.limit, kProbeLength);
    } else if (choice.pays_if_accepted) {
      c.length = Probe(drafted_for[i], c, choice);
    }
  }
}

// A request whose drafts are mostly refused gets none, but for a try now and then. The try goes on
// until it has been drafted for: the draft may have to compute what it missed.
int32_t Speculator::Impl::Probe(Request* request, const DraftCandidate& candidate,
                                const DraftChoice& choice) {
  DraftState& spec = request->spec;
  if (spec.probe_after == 0) spec.probe_after = kFirstProbe;
  if (++spec.idle_steps < spec.probe_after ||
      !WorthCatchingUp(*request, choice, kHopedSpeedup * choice.rate_without))
    return 0;
  return std::min(candidate.limit, kProbeLength);
}

// The time that drafting at `rate` saves over the rest of the request against that of its prompt in
// the draft.
bool Speculator::Impl::WorthCatchingUp(const Request& request, const DraftChoice& choice,
                                       double rate) const {
  if (model == nullptr || !model->cost().known() || choice.rate_without <= 0.0) return true;
  const int32_t pending = model->Pending(request);
  if (pending <= kCheapCatchUp) return true;
  const double saved_ns = 1.0 / choice.rate_without - 1.0 / rate;
  return pending * model->cost().PerTokenNs() <
         (request.max_len() - request.num_tokens()) * saved_ns;
}

void Speculator::Impl::LookUp(Request* request) const {
  request->draft.clear();
  if (request->spec.want == 0) return;
  NgramDraft(request->tokens, config.options.ngram_max, config.options.ngram_min,
             request->spec.want, &request->draft);
  request->spec.want = static_cast<int32_t>(request->draft.size());
}

DraftOutcome Speculator::Draft(StepPlan* plan) {
  Impl& s = *impl_;
  for (ScheduledSeq& seq : plan->context) Impl::HoldBackCallers(&seq, true);
  for (ScheduledSeq& seq : plan->generation)
    Impl::HoldBackCallers(&seq, seq.request->spec.is_callers);
  const int64_t begin_ns = s.NowNs();
  DraftOutcome outcome;
  if (s.model == nullptr) {
    s.DraftNgrams(plan);
  } else {
    for (ScheduledSeq& seq : plan->generation) seq.request->draft.clear();
    outcome.failed = !s.model->Draft(&plan->generation);
    if (outcome.failed) s.NoteFailure();
  }
  for (ScheduledSeq& seq : plan->generation) {
    Request* request = seq.request;
    seq.num_draft = static_cast<int32_t>(request->draft.size());
    request->spec.base = seq.num_draft > 0 ? request->num_tokens() : -1;
    outcome.num_draft_tokens += seq.num_draft;
    outcome.num_requests += seq.num_draft > 0 ? 1 : 0;
  }
  if (outcome.num_draft_tokens > 0) s.num_failures = 0;
  for (auto* seqs : {&plan->context, &plan->generation}) {
    for (ScheduledSeq& seq : *seqs) s.TakeCallers(&seq, &outcome);
  }
  outcome.took_ns = s.NowNs() - begin_ns;
  return outcome;
}

// Whoever drafts for the others sees nothing of a sequence that has its caller's drafts.
void Speculator::Impl::HoldBackCallers(ScheduledSeq* seq, bool is_callers) {
  DraftState& spec = seq->request->spec;
  spec.is_callers = is_callers;
  spec.num_callers = is_callers ? seq->num_draft : 0;
  if (!is_callers) return;
  seq->num_draft = 0;
  seq->request->draft.clear();
}

void Speculator::Impl::TakeCallers(ScheduledSeq* seq, DraftOutcome* outcome) const {
  Request* request = seq->request;
  if (request->spec.num_callers == 0) return;
  const auto begin = request->caller_draft.begin() + request->num_output();
  request->draft.assign(begin, begin + request->spec.num_callers);
  if (request->guide != nullptr) KeepAllowed(request);
  seq->num_draft = static_cast<int32_t>(request->draft.size());
  outcome->num_draft_tokens += seq->num_draft;
  outcome->num_requests += seq->num_draft > 0 ? 1 : 0;
}

void Speculator::Impl::DraftNgrams(StepPlan* plan) const {
  for (ScheduledSeq& seq : plan->generation) {
    std::vector<int32_t>& draft = seq.request->draft;
    if (seq.num_draft == 0) draft.clear();
    if (static_cast<int32_t>(draft.size()) > seq.num_draft)
      draft.resize(static_cast<size_t>(seq.num_draft));
    if (!draft.empty() && seq.request->guide != nullptr) KeepAllowed(seq.request);
  }
}

// A row behind a token that the guide forbids would be for nothing.
void Speculator::Impl::KeepAllowed(Request* request) const {
  std::vector<int32_t>& draft = request->draft;
  size_t num_allowed = 0;
  try {
    for (; num_allowed < draft.size(); ++num_allowed) {
      const uint32_t* mask =
          guides->MaskAhead(request, draft.data(), static_cast<int32_t>(num_allowed));
      const auto token = static_cast<uint32_t>(draft[num_allowed]);
      if ((mask[token / 32] >> (token % 32) & 1) == 0) break;
    }
  } catch (...) {  // comes again, and is reported, with the target's row
  }
  draft.resize(num_allowed);
}

void Speculator::Impl::NoteFailure() {
  if (++num_failures < kFailuresInRow) return;
  rest_steps = kFirstRest << std::min(num_failures - kFailuresInRow, kMaxRestShift);
}

void Speculator::Observe(Request* request, int32_t num_drafted, int32_t num_accepted) {
  Impl& s = *impl_;
  if (num_drafted == 0 || request->spec.is_callers) return;
  if (s.model != nullptr) s.model->Observe(*request, num_drafted, num_accepted);
  DraftState& spec = request->spec;
  spec.base = -1;
  // Those behind the first refused one were not put to the test.
  const float trials = static_cast<float>(std::min(num_accepted + 1, num_drafted));
  const float share = static_cast<float>(num_accepted) / trials;
  if (spec.acceptance < 0.0f) spec.acceptance = s.prior;
  spec.num_trials = std::min(spec.num_trials + trials, kMaxTrials);
  const float weight = std::min(1.0f, trials / (spec.num_trials + kPriorTrials));
  spec.acceptance += weight * (share - spec.acceptance);
  s.prior += std::min(1.0f, 0.002f * trials) * (share - s.prior);
  if (spec.idle_steps >= spec.probe_after && spec.probe_after > 0)
    spec.probe_after = std::min(2 * spec.probe_after, kLastProbe);
  spec.idle_steps = 0;
}

}  // namespace plansmith
