// A guide for tests over a finite automaton, which fails where it is told to and notes every breach
// of psm_guide's contract.
//
// SPDX-License-Identifier: Apache-2.0
#ifndef PLANSMITH_TESTS_DFA_GUIDE_H_
#define PLANSMITH_TESTS_DFA_GUIDE_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <random>
#include <stdexcept>
#include <thread>
#include <vector>

#include "plansmith/plansmith.h"

constexpr int32_t kVocab = 101;  // the fake executor's
constexpr int32_t kMaskWords = (kVocab + 31) / 32;
constexpr int32_t kEnd = 0;

// A language: from a state, some tokens lead to another one; the end id may follow where it
// accepts.
struct Dfa {
  std::vector<std::map<int32_t, int32_t>> next;
  std::vector<bool> accepts;

  // State behind `tokens` from `state`; -1 when they leave the language, -2 behind the end id.
  int32_t Walk(int32_t state, const int32_t* tokens, int32_t n) const {
    for (int32_t i = 0; i < n && state != -1; ++i) {
      if (state >= 0 && tokens[i] == kEnd) {
        state = accepts[static_cast<size_t>(state)] ? -2 : -1;
        continue;
      }
      if (state < 0) return -1;
      const auto& row = next[static_cast<size_t>(state)];
      const auto found = row.find(tokens[i]);
      state = found == row.end() ? -1 : found->second;
    }
    return state;
  }
  bool Allows(int32_t state, int32_t token) const { return Walk(state, &token, 1) != -1; }
};

// Every state can go on, so that only the end id and the lengths end an output.
inline Dfa RandomDfa(uint32_t seed, int32_t num_states, int32_t most_choices,
                     int32_t accept_one_in) {
  std::mt19937 random(seed);
  Dfa dfa;
  for (int32_t s = 0; s < num_states; ++s) {
    std::map<int32_t, int32_t> row;
    const uint32_t num_choices = 1 + random() % static_cast<uint32_t>(most_choices);
    for (uint32_t i = 0; i < num_choices; ++i) {
      row[1 + static_cast<int32_t>(random() % (kVocab - 1))] =
          static_cast<int32_t>(random() % static_cast<uint32_t>(num_states));
    }
    dfa.next.push_back(row);
    dfa.accepts.push_back(random() % static_cast<uint32_t>(accept_one_in) == 0);
  }
  return dfa;
}

struct Counts {
  std::atomic<int> made{0}, closed{0}, fills{0}, accepts{0};
  std::atomic<int> inside{0};  // of all guides of the test: one thread, one call at a time
  std::atomic<bool> broke_contract{false};
};

// psm_guide over a Dfa, with ways to fail.
struct DfaGuide {
  const Dfa* dfa;
  Counts* counts;
  int32_t state = 0;
  bool is_closed = false;
  bool has_accepted = false;
  int fail_fill_at = -1, fail_accept_at = -1, fail_clone_at = -1, throw_at = -1, empty_at = -1;
  int sleep_ms = 0;
  int num_fills = 0, num_accepts = 0, num_clones = 0;

  DfaGuide(const Dfa* d, Counts* c) : dfa(d), counts(c) { ++counts->made; }

  static psm_status Fill(void* self, const int32_t* ahead, int32_t n, uint32_t* mask) {
    auto* g = static_cast<DfaGuide*>(self);
    const Inside inside(g);
    ++g->counts->fills;
    if (g->sleep_ms > 0) std::this_thread::sleep_for(std::chrono::milliseconds(g->sleep_ms));
    const int call = g->num_fills++;
    if (call == g->throw_at) throw std::runtime_error("thrown by a guide");
    if (call == g->fail_fill_at) return PSM_ERROR_INTERNAL;
    const int32_t state = g->dfa->Walk(g->state, ahead, n);
    // The engine spares a guide drafts that leave the language.
    if (state == -1) g->counts->broke_contract = true;
    for (int32_t w = 0; w < kMaskWords; ++w) mask[w] = 0;
    if (call == g->empty_at || state < 0) return PSM_OK;
    for (int32_t t = 0; t < kVocab; ++t) {
      if (g->dfa->Allows(state, t)) mask[t / 32] |= 1u << (t % 32);
    }
    mask[kMaskWords - 1] |= 1u << 31;  // behind the vocabulary: nobody's business
    return PSM_OK;
  }
  static psm_status Accept(void* self, const int32_t* tokens, int32_t n) {
    auto* g = static_cast<DfaGuide*>(self);
    const Inside inside(g);
    ++g->counts->accepts;
    if (g->num_accepts++ == g->fail_accept_at) return PSM_ERROR_INTERNAL;
    g->has_accepted = true;
    g->state = g->dfa->Walk(g->state, tokens, n);
    if (n < 1 || g->state == -1) g->counts->broke_contract = true;
    return PSM_OK;
  }
  static psm_status Clone(void* self, void** out) {
    auto* g = static_cast<DfaGuide*>(self);
    if (g->has_accepted) g->counts->broke_contract = true;
    if (g->num_clones++ == g->fail_clone_at) return PSM_ERROR_INTERNAL;
    auto* clone = new DfaGuide(g->dfa, g->counts);
    clone->fail_fill_at = g->fail_fill_at;
    *out = clone;
    return PSM_OK;
  }
  static void Close(void* self) {
    auto* g = static_cast<DfaGuide*>(self);
    if (g->is_closed) g->counts->broke_contract = true;
    ++g->counts->closed;
    delete g;
  }
  static const char* LastError(void*) { return "a test's guide fell over"; }

  psm_guide Table() { return {PSM_GUIDE_SIZE, this, Fill, Accept, Clone, Close, LastError}; }

 private:
  struct Inside {
    explicit Inside(DfaGuide* guide) : counts(guide->counts) {
      if (counts->inside.fetch_add(1) != 0) counts->broke_contract = true;
    }
    ~Inside() { --counts->inside; }
    Counts* counts;
  };
};

#endif  // PLANSMITH_TESTS_DFA_GUIDE_H_
