// Beam search against a naive one that sorts every candidate there is, over a model whose logits
// are a hash of the history that is read back through each beam's own block table: a wrong parent,
// a wrong share or a missing copy of a block shows as other tokens.
//
// SPDX-License-Identifier: Apache-2.0
#include "beam_search.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <memory>
#include <new>
#include <random>
#include <vector>

#include "check.h"
#include "request.h"
#include "sampler.h"
#include "status.h"

using plansmith::Beam;
using plansmith::BeamParams;
using plansmith::BeamSearch;
using plansmith::KvCache;
using plansmith::KvCacheConfig;
using plansmith::KvSequence;
using plansmith::Request;
using plansmith::Sampler;
using plansmith::StatusError;

static size_t num_allocations = 0;

// Not inlined: the compiler then sees malloc paired with operator delete and objects.
__attribute__((noinline)) void* operator new(size_t size) {
  ++num_allocations;
  if (void* p = std::malloc(size)) return p;
  throw std::bad_alloc();
}
__attribute__((noinline)) void* operator new(size_t size, const std::nothrow_t&) noexcept {
  ++num_allocations;
  return std::malloc(size);
}
__attribute__((noinline)) void operator delete(void* p) noexcept { std::free(p); }
__attribute__((noinline)) void operator delete(void* p, size_t) noexcept { std::free(p); }

namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

// Everything a search depends on.
struct Case {
  uint64_t model_seed = 1;
  int32_t vocab_size = 40;
  float spread = 6.0f;     // of the logits
  float end_boost = 0.0f;  // added to the logits of end ids
  std::vector<int32_t> prompt = {1, 2, 3};
  int32_t max_tokens = 8;
  BeamParams beams;
  plansmith::SamplingParams params;
};

uint64_t Mix(uint64_t x) {
  x ^= x >> 30;
  x *= 0xbf58476d1ce4e5b9u;
  x ^= x >> 27;
  x *= 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

std::vector<float> Logits(const Case& c, const std::vector<int32_t>& history) {
  uint64_t h = c.model_seed;
  for (int32_t token : history) h = Mix(h * 31 + static_cast<uint64_t>(token) + 1);
  std::vector<float> logits(static_cast<size_t>(c.vocab_size));
  for (float& x : logits) {
    h = Mix(h + 0x9e3779b97f4a7c15u);
    x = c.spread * static_cast<float>(h >> 40) / static_cast<float>(1 << 24);
  }
  for (int32_t id : c.params.end_ids) logits[static_cast<size_t>(id)] += c.end_boost;
  return logits;
}

// ---------------------------------------------------------------- the naive search

struct NaiveBeam {
  std::vector<int32_t> output;
  std::vector<double> logprobs;
  double cum = 0.0;
  double score = -1e9;
  int32_t reason = PSM_FINISH_NOT_FINISHED;
};

std::vector<double> LogSoftmax(const std::vector<float>& logits) {
  double max = -kInf, sum = 0.0;
  for (float x : logits) max = std::max(max, static_cast<double>(x));
  for (float x : logits) sum += std::exp(static_cast<double>(x) - max);
  std::vector<double> out;
  for (float x : logits) out.push_back(static_cast<double>(x) - max - std::log(sum));
  return out;
}

bool EndsWith(const std::vector<int32_t>& tokens, const int32_t* word, int32_t n) {
  return n <= static_cast<int32_t>(tokens.size()) && std::equal(word, word + n, tokens.end() - n);
}

std::vector<double> Process(const Case& c, const std::vector<int32_t>& output,
                            std::vector<double> l) {
  const auto& p = c.params;
  std::vector<int32_t> history = c.prompt;
  history.insert(history.end(), output.begin(), output.end());
  for (int32_t id = 0; id < c.vocab_size; ++id) {
    double& x = l[static_cast<size_t>(id)];
    const auto n = std::count(output.begin(), output.end(), id);
    if (std::count(history.begin(), history.end(), id) > 0) {
      x = x > 0 ? x / static_cast<double>(p.repetition_penalty)
                : x * static_cast<double>(p.repetition_penalty);
    }
    if (n > 0) {
      x -= static_cast<double>(p.presence_penalty) +
           static_cast<double>(p.frequency_penalty) * static_cast<double>(n);
    }
  }
  for (const auto& [id, bias] : p.logit_bias)
    l[static_cast<size_t>(id)] += static_cast<double>(bias);
  for (size_t i = 0; i < p.bad_words.size(); ++i) {
    const auto [word, n] = p.bad_words.word(i);
    if (EndsWith(history, word, n - 1)) l[static_cast<size_t>(word[n - 1])] = -kInf;
  }
  if (static_cast<int32_t>(output.size()) < p.min_tokens) {
    for (int32_t id : p.end_ids) l[static_cast<size_t>(id)] = -kInf;
  }
  return l;
}

int32_t Reason(const Case& c, const std::vector<int32_t>& output) {
  const auto& p = c.params;
  if (std::count(p.end_ids.begin(), p.end_ids.end(), output.back()) > 0) return PSM_FINISH_END_ID;
  for (size_t i = 0; i < p.stop_words.size(); ++i) {
    const auto [word, n] = p.stop_words.word(i);
    if (static_cast<int32_t>(output.size()) >= p.min_tokens && EndsWith(output, word, n)) {
      return PSM_FINISH_STOP_WORDS;
    }
  }
  return static_cast<int32_t>(output.size()) >= c.max_tokens ? PSM_FINISH_LENGTH
                                                             : PSM_FINISH_NOT_FINISHED;
}

double Scaled(const Case& c, double cum, size_t length) {
  return cum / std::pow(static_cast<double>(length), static_cast<double>(c.beams.length_penalty));
}

struct NaiveCandidate {
  double rank_score;
  NaiveBeam beam;
};

// Every beam with every token, best first.
std::vector<NaiveCandidate> AllCandidates(const Case& c, const std::vector<NaiveBeam>& running) {
  std::vector<NaiveCandidate> all;
  for (const NaiveBeam& beam : running) {
    std::vector<int32_t> history = c.prompt;
    history.insert(history.end(), beam.output.begin(), beam.output.end());
    const std::vector<double> own = LogSoftmax(Logits(c, history));
    const std::vector<double> l = Process(c, beam.output, own);
    for (size_t id = 0; id < l.size(); ++id) {
      if (l[id] == -kInf) continue;
      NaiveCandidate candidate{0.0, beam};
      candidate.beam.cum += l[id];
      const auto rank = std::count_if(l.begin(), l.end(), [&](double x) { return x > l[id]; });
      candidate.rank_score = candidate.beam.cum - static_cast<double>(c.beams.diversity_rate) *
                                                      static_cast<double>(rank);
      candidate.beam.output.push_back(static_cast<int32_t>(id));
      candidate.beam.logprobs.push_back(own[id]);
      candidate.beam.reason = Reason(c, candidate.beam.output);
      all.push_back(candidate);
    }
  }
  std::stable_sort(all.begin(), all.end(), [](const NaiveCandidate& a, const NaiveCandidate& b) {
    return a.rank_score > b.rank_score;
  });
  return all;
}

// max_steps: cut after so many tokens, as a cancel would; the running beams then count.
std::vector<NaiveBeam> NaiveSearch(const Case& c, int32_t max_steps = 1 << 30) {
  const size_t width = static_cast<size_t>(c.beams.width);
  const auto better = [](const NaiveBeam& a, const NaiveBeam& b) { return a.score > b.score; };
  std::vector<NaiveBeam> running(1), finished;
  for (int32_t step = 1;; ++step) {
    std::vector<NaiveBeam> next;
    const std::vector<NaiveCandidate> all = AllCandidates(c, running);
    for (size_t i = 0; i < all.size(); ++i) {
      NaiveBeam beam = all[i].beam;
      beam.score = Scaled(c, beam.cum, beam.output.size());
      if (beam.reason == PSM_FINISH_NOT_FINISHED && next.size() < width) next.push_back(beam);
      if (beam.reason != PSM_FINISH_NOT_FINISHED && i < width) finished.push_back(beam);
    }
    std::stable_sort(finished.begin(), finished.end(), better);
    if (finished.size() > width) finished.resize(width);
    running = next;
    if (running.empty()) break;
    double best = -kInf;
    for (const NaiveBeam& beam : running) best = std::max(best, beam.cum);
    const bool full = finished.size() == width;
    const bool ahead =
        c.beams.early_stopping == PSM_EARLY_STOPPING_NEVER && c.beams.length_penalty > 0.0f;
    const double hope = Scaled(c, best, static_cast<size_t>(ahead ? c.max_tokens : step));
    if (full && (c.beams.early_stopping == PSM_EARLY_STOPPING_YES || hope <= finished.back().score))
      break;
    if (step == max_steps) {
      finished.insert(finished.end(), running.begin(), running.end());
      std::stable_sort(finished.begin(), finished.end(), better);
      if (finished.size() > width) finished.resize(width);
      break;
    }
  }
  while (finished.size() < width) finished.push_back(finished.back());
  return finished;
}

// ---------------------------------------------------------------- what the engine does

// The pool holds tokens where an executor holds K and V.
class Driver {
 public:
  explicit Driver(const Case& c, int32_t tokens_per_block = 4)
      : case_(c),
        tokens_per_block_(tokens_per_block),
        kv_(Config(tokens_per_block)),
        sampler_(c.vocab_size),
        pool_(static_cast<size_t>(kNumBlocks * tokens_per_block), -1) {
    request_.id = 7;
    request_.num_prompt = static_cast<int32_t>(c.prompt.size());
    request_.max_tokens = c.max_tokens;
    request_.params = c.params;
    request_.tokens = c.prompt;
    request_.tokens.reserve(c.prompt.size() + static_cast<size_t>(c.max_tokens));
    request_.counts.Reserve(c.prompt.size() + static_cast<size_t>(c.max_tokens));
    for (int32_t token : c.prompt) request_.counts.AddPrompt(token);
    request_.beams = std::make_unique<BeamSearch>(
        c.beams, c.vocab_size, c.max_tokens, kv_.BlocksFor(request_.max_len()),
        static_cast<int32_t>(c.params.end_ids.size() + c.params.stop_words.size()));
  }

  BeamSearch& search() { return *request_.beams; }
  Request& request() { return request_; }
  size_t num_step_allocations() const { return num_step_allocations_; }

  void Context() {
    kv_.Extend(&request_.kv, request_.num_prompt);
    for (int32_t p = 0; p < request_.num_prompt; ++p) {
      Slot(request_.kv, p) = case_.prompt[static_cast<size_t>(p)];
    }
    request_.num_computed = request_.num_prompt;
    const std::vector<float> row = Logits(case_, ReadBack(request_.kv));
    search().Start(row.data(), &sampler_, &kv_, &request_);
    CheckBooks();
  }

  void Step() {
    const int32_t position = request_.num_computed;
    std::vector<float> rows;
    for (Beam& beam : search().beams()) {
      CHECK(static_cast<int32_t>(beam.tokens.size()) == request_.num_output());
      kv_.Extend(&beam.kv, position + 1);
      kv_.MakeWritable(&beam.kv, position);
    }
    RunCopies();
    for (Beam& beam : search().beams()) Slot(beam.kv, position) = beam.tokens.back();
    ++request_.num_computed;
    for (Beam& beam : search().beams()) {
      const std::vector<float> row = Logits(case_, ReadBack(beam.kv));
      rows.insert(rows.end(), row.begin(), row.end());
    }
    const size_t before = num_allocations;
    search().Advance(rows.data(), &sampler_, &kv_, &request_);
    num_step_allocations_ += num_allocations - before;
    CheckBooks();
  }

  void Pause() {
    search().Restart(&kv_, &request_);
    request_.num_computed = 0;
    CHECK(request_.tokens == case_.prompt);
    CHECK(!search().running() && !search().done());
    CheckBooks();
    CHECK(kv_.num_free() == kv_.num_blocks());
  }

  // Runs to the end; all blocks must come back.
  std::vector<Beam> Run() {
    Context();
    while (!search().done()) Step();
    return End();
  }
  std::vector<Beam> End() {
    search().Release(&kv_);
    kv_.Release(&request_.kv);
    CheckBooks();
    CHECK(kv_.num_free() == kv_.num_blocks());
    return search().Hypotheses();
  }

 private:
  static constexpr int32_t kNumBlocks = 600;

  static KvCacheConfig Config(int32_t tokens_per_block) {
    KvCacheConfig config;
    config.num_blocks = kNumBlocks;
    config.tokens_per_block = tokens_per_block;
    config.can_copy = true;
    return config;
  }

  int32_t& Slot(const KvSequence& sequence, int32_t position) {
    const int32_t block = sequence.blocks[static_cast<size_t>(position / tokens_per_block_)];
    return pool_[static_cast<size_t>(block * tokens_per_block_ + position % tokens_per_block_)];
  }
  std::vector<int32_t> ReadBack(const KvSequence& sequence) {
    std::vector<int32_t> history;
    for (int32_t p = 0; p < request_.num_computed; ++p) history.push_back(Slot(sequence, p));
    return history;
  }
  void RunCopies() {
    for (const psm_block_copy& copy : kv_.copies()) {
      CHECK(copy.kind == PSM_COPY_DEVICE);
      std::copy_n(pool_.begin() + copy.src * tokens_per_block_, copy.num_tokens,
                  pool_.begin() + copy.dst * tokens_per_block_);
    }
    kv_.ClearCopies();
  }
  void CheckBooks() {
    std::vector<const KvSequence*> sequences = {&request_.kv};
    for (const Beam& beam : search().beams()) sequences.push_back(&beam.kv);
    kv_.CheckInvariants(sequences);
  }

  Case case_;
  int32_t tokens_per_block_;
  KvCache kv_;
  Sampler sampler_;
  Request request_;
  std::vector<int32_t> pool_;
  size_t num_step_allocations_ = 0;
};

bool Near(double a, double b) { return std::fabs(a - b) <= 1e-4 * (1.0 + std::fabs(b)); }

void CheckSame(const std::vector<Beam>& got, const std::vector<NaiveBeam>& wanted) {
  CHECK(got.size() == wanted.size());
  for (size_t i = 0; i < got.size(); ++i) {
    CHECK(Near(got[i].score, wanted[i].score));
    CHECK(Near(got[i].cum_logprob, wanted[i].cum));
    CHECK(got[i].tokens == wanted[i].output);
    CHECK(got[i].finish_reason == wanted[i].reason);
    CHECK(got[i].logprobs.size() == got[i].tokens.size());
    for (size_t j = 0; j < got[i].logprobs.size(); ++j) {
      CHECK(Near(static_cast<double>(got[i].logprobs[j]), wanted[i].logprobs[j]));
    }
  }
}

void AddWord(plansmith::WordList* words, std::vector<int32_t> word) {
  words->ids.insert(words->ids.end(), word.begin(), word.end());
  words->ends.push_back(static_cast<int32_t>(words->ids.size()));
}

// ---------------------------------------------------------------- the tests

Case RandomCase(std::mt19937_64* rng) {
  const auto pick = [&](int32_t low, int32_t high) {
    return std::uniform_int_distribution<int32_t>(low, high)(*rng);
  };
  const auto chance = [&] { return pick(0, 2) == 0; };
  Case c;
  c.model_seed = (*rng)();
  c.vocab_size = pick(12, 90);
  c.spread = static_cast<float>(pick(1, 8));
  c.prompt.resize(static_cast<size_t>(pick(1, 11)));
  for (int32_t& token : c.prompt) token = pick(0, c.vocab_size - 1);
  c.max_tokens = pick(1, 16);
  c.beams.width = pick(1, 6);
  const float penalties[] = {-1.0f, 0.0f, 0.6f, 1.0f, 2.0f};
  c.beams.length_penalty = penalties[pick(0, 4)];
  c.beams.early_stopping = pick(0, 2);
  if (chance()) c.beams.diversity_rate = 0.25f * static_cast<float>(pick(1, 6));
  for (int32_t n = pick(0, 3); n > 0; --n) c.params.end_ids.push_back(pick(0, c.vocab_size - 1));
  c.end_boost = static_cast<float>(pick(0, 3));
  if (chance()) c.params.min_tokens = pick(0, c.max_tokens);
  if (chance()) c.params.repetition_penalty = 1.4f;
  if (chance()) c.params.presence_penalty = 0.7f;
  if (chance()) c.params.frequency_penalty = 0.3f;
  if (chance()) c.params.logit_bias.emplace_back(pick(0, c.vocab_size - 1), 2.5f);
  if (chance()) {
    AddWord(&c.params.bad_words, {pick(0, c.vocab_size - 1)});
    AddWord(&c.params.bad_words, {pick(0, c.vocab_size - 1), pick(0, c.vocab_size - 1)});
  }
  if (chance()) {
    AddWord(&c.params.stop_words, {pick(0, c.vocab_size - 1)});
    AddWord(&c.params.stop_words, {pick(0, c.vocab_size - 1), pick(0, c.vocab_size - 1)});
  }
  return c;
}

void TestRandomSearchesEqualTheNaiveOne(int32_t num_cases) {
  std::mt19937_64 rng(20240607);
  const int32_t block_sizes[] = {1, 2, 4, 16};
  for (int32_t i = 0; i < num_cases; ++i) {
    const Case c = RandomCase(&rng);
    Driver driver(c, block_sizes[i % 4]);
    CheckSame(driver.Run(), NaiveSearch(c));
    CHECK(driver.num_step_allocations() == 0);
  }
}

void TestAPauseChangesNothing() {
  std::mt19937_64 rng(5);
  for (int32_t i = 0; i < 200; ++i) {
    const Case c = RandomCase(&rng);
    Driver driver(c);
    for (int32_t pauses = 0; pauses < 3; ++pauses) {
      driver.Context();
      for (uint64_t steps = rng() % 6; steps > 0 && !driver.search().done(); --steps) driver.Step();
      driver.Pause();
    }
    CheckSame(driver.Run(), NaiveSearch(c));
  }
}

void TestACutSearchGivesWhatItHas() {
  std::mt19937_64 rng(6);
  for (int32_t i = 0; i < 200; ++i) {
    const Case c = RandomCase(&rng);
    const int32_t max_steps = static_cast<int32_t>(1 + rng() % 6);
    Driver driver(c);
    driver.Context();
    for (int32_t n = 1; n < max_steps && !driver.search().done(); ++n) driver.Step();
    CheckSame(driver.End(), NaiveSearch(c, max_steps));
    CheckSame(driver.search().Hypotheses(), NaiveSearch(c, max_steps));  // again is the same
  }
  Case c;
  c.beams.width = 3;
  Driver driver(c);  // cut before its first token
  CHECK(driver.search().Hypotheses().size() == 3);
  for (const Beam& beam : driver.search().Hypotheses()) {
    CHECK(beam.tokens.empty() && beam.finish_reason == PSM_FINISH_NOT_FINISHED);
  }
}

// As wide as there are sequences, beam search is exhaustive: the best of all.
void TestWideEnoughIsExhaustive() {
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    Case c;
    c.model_seed = seed;
    c.vocab_size = 5;
    c.max_tokens = 3;
    c.beams.width = 125;
    c.beams.length_penalty = 0.6f;
    c.beams.early_stopping = PSM_EARLY_STOPPING_NEVER;
    c.params.end_ids = {2};
    double best = -kInf;
    std::vector<NaiveBeam> open(1);
    while (!open.empty()) {
      const NaiveBeam beam = open.back();
      open.pop_back();
      for (const NaiveCandidate& next : AllCandidates(c, {beam})) {
        if (next.beam.reason == PSM_FINISH_NOT_FINISHED) {
          open.push_back(next.beam);
        } else {
          best = std::max(best, Scaled(c, next.beam.cum, next.beam.output.size()));
        }
      }
    }
    CHECK(Near(Driver(c).Run()[0].score, best));
  }
}

void TestMoreBeamsThanTokens() {
  Case c;
  c.vocab_size = 3;
  c.beams.width = 8;
  c.max_tokens = 2;
  c.params.logit_bias = {{0, -std::numeric_limits<float>::infinity()}};
  // 4 different sequences exist; the last is repeated.
  const std::vector<Beam> got = Driver(c).Run();
  CHECK(got.size() == 8);
  for (size_t i = 1; i < 4; ++i) CHECK(got[i].tokens != got[i - 1].tokens);
  for (size_t i = 4; i < 8; ++i) CHECK(got[i].tokens == got[3].tokens);
  // The same with every beam ending at once, and with a search that is cut while most are dead.
  c.params.end_ids = {1, 2};
  CHECK(Driver(c).Run()[1].tokens.size() == 1);
  c.params.end_ids.clear();
  Driver cut(c);
  cut.Context();
  CHECK(cut.End()[7].tokens.size() == 1);
}

void TestOneBeamIsGreedy() {
  Case c;
  c.beams.width = 1;
  c.max_tokens = 12;
  std::vector<int32_t> history = c.prompt;
  const std::vector<Beam> got = Driver(c).Run();
  for (int32_t token : got[0].tokens) {
    const std::vector<float> logits = Logits(c, history);
    CHECK(token == std::max_element(logits.begin(), logits.end()) - logits.begin());
    history.push_back(token);
  }
  CHECK(history.size() == c.prompt.size() + 12);
}

// With a high rate every beam's best goes before any beam's second.
void TestDiversityPrefersOtherParents() {
  Case c;
  c.beams.width = 4;
  c.max_tokens = 6;
  c.beams.diversity_rate = 1000.0f;
  Driver driver(c);
  driver.Context();
  std::vector<int32_t> first;
  for (const Beam& beam : driver.search().beams()) first.push_back(beam.tokens[0]);
  while (!driver.search().done()) driver.Step();
  std::vector<int32_t> last;
  for (const Beam& beam : driver.End()) last.push_back(beam.tokens[0]);
  std::sort(first.begin(), first.end());
  std::sort(last.begin(), last.end());
  CHECK(first == last);
}

void TestEqualLogitsGoByBeamAndToken() {
  Case c;
  c.spread = 0.0f;
  c.beams.width = 3;
  c.max_tokens = 2;
  const std::vector<Beam> got = Driver(c).Run();
  for (int32_t i = 0; i < 3; ++i) {
    CHECK((got[static_cast<size_t>(i)].tokens == std::vector<int32_t>{0, i}));
  }
  c.max_tokens = 1;
  c.beams.diversity_rate = 0.5f;  // by rank: of equal tokens, too
  const std::vector<Beam> ranked = Driver(c).Run();
  for (int32_t i = 0; i < 3; ++i) CHECK(ranked[static_cast<size_t>(i)].tokens[0] == i);
}

// Writes down the histories it is called with and forbids whatever was there last.
psm_status NoRepeat(void* self, uint64_t, int32_t, const int32_t* tokens, int32_t n, float* logits,
                    int32_t) {
  static_cast<std::vector<std::vector<int32_t>>*>(self)->emplace_back(tokens, tokens + n);
  logits[tokens[n - 1]] = -std::numeric_limits<float>::infinity();
  return PSM_OK;
}

void TestTheProcessorSeesEachBeamsHistory() {
  Case c;
  c.beams.width = 3;
  c.max_tokens = 5;
  std::vector<std::vector<int32_t>> seen;
  c.params.logits_processor = NoRepeat;
  c.params.logits_processor_self = &seen;
  Driver driver(c);
  driver.Context();
  CHECK(seen.size() == 1 && seen[0] == c.prompt);
  while (!driver.search().done()) {
    std::vector<std::vector<int32_t>> wanted;
    for (const Beam& beam : driver.search().beams()) {
      wanted.push_back(c.prompt);
      wanted.back().insert(wanted.back().end(), beam.tokens.begin(), beam.tokens.end());
    }
    seen.clear();
    driver.Step();
    CHECK(seen == wanted);
  }
  for (const Beam& beam : driver.End()) {
    for (size_t i = 1; i < beam.tokens.size(); ++i) CHECK(beam.tokens[i] != beam.tokens[i - 1]);
  }
}

psm_status StartCode(const Case& c, const std::vector<float>* row = nullptr) {
  Driver driver(c);
  try {
    if (row == nullptr) {
      driver.Context();
    } else {
      KvCacheConfig config;
      config.num_blocks = config.tokens_per_block = 4;
      KvCache kv(config);
      Sampler sampler(c.vocab_size);
      driver.search().Start(row->data(), &sampler, &kv, &driver.request());
    }
  } catch (const StatusError& e) {
    return e.code();
  }
  return PSM_OK;
}

void TestBadRows() {
  Case c;
  c.beams.width = 2;
  CHECK(StartCode(c) == PSM_OK);
  std::vector<float> row(40, 0.0f);
  row[17] = std::numeric_limits<float>::quiet_NaN();
  CHECK(StartCode(c, &row) == PSM_ERROR_EXECUTOR);
  row[17] = std::numeric_limits<float>::infinity();
  CHECK(StartCode(c, &row) == PSM_ERROR_EXECUTOR);
  row.assign(40, -std::numeric_limits<float>::infinity());
  CHECK(StartCode(c, &row) == PSM_ERROR_INVALID_ARGUMENT);
  row[3] = 1.0f;  // the others get nothing
  CHECK(StartCode(c, &row) == PSM_OK);
  for (int32_t id = 0; id < 40; ++id) {
    c.params.logit_bias.emplace_back(id, -std::numeric_limits<float>::infinity());
  }
  CHECK(StartCode(c) == PSM_ERROR_INVALID_ARGUMENT);
  c.params.logit_bias = {{3, std::numeric_limits<float>::max()}};
  c.params.presence_penalty = -std::numeric_limits<float>::max();
  c.params.frequency_penalty = -std::numeric_limits<float>::max();
  Driver driver(c);
  driver.Context();
  psm_status code = PSM_OK;
  try {
    driver.Step();
  } catch (const StatusError& e) {
    code = e.code();
  }
  CHECK(code == PSM_ERROR_INVALID_ARGUMENT);
  driver.End();  // whatever happened, the blocks come back
}

}  // namespace

int main(int argc, char** argv) {
  TestRandomSearchesEqualTheNaiveOne(argc > 1 ? std::atoi(argv[1]) : 1200);
  TestAPauseChangesNothing();
  TestACutSearchGivesWhatItHas();
  TestWideEnoughIsExhaustive();
  TestMoreBeamsThanTokens();
  TestOneBeamIsGreedy();
  TestDiversityPrefersOtherParents();
  TestEqualLogitsGoByBeamAndToken();
  TestTheProcessorSeesEachBeamsHistory();
  TestBadRows();
  return 0;
}
