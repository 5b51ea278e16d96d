// The KV cache against a model that stores what every position of every block really holds.
//
// Random requests attach, grow, fork, publish, draft, pause and go, in pools so small that nearly
// every block is evicted, moved to the host and back. The model runs copies() as an executor would
// and writes positions as a step would; then every block of every sequence must hold exactly what
// its tokens say, in the target's pool and as far as is claimed in the draft's. What can be matched
// is compared with a replay of the KV events.
//
// SPDX-License-Identifier: Apache-2.0
#include <stdlib.h>

#include <algorithm>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "check.h"
#include "kv_cache.h"
#include "kv_model.h"

using namespace plansmith;

namespace {

struct Sequence {
  bool live = false;
  PrefixKey key;
  std::vector<int32_t> tokens;
  std::vector<Cell> cells;  // what its positions must hold
  KvSequence kv;
  int32_t computed = 0;
  int32_t wanted = 0;  // positions it is to have after the step
  Retention retention;
};

uint64_t AllCollide(uint64_t, const int32_t*, size_t) { return 7; }
uint64_t MostCollide(uint64_t seed, const int32_t* tokens, size_t n) {
  return PrefixTree::HashTokens(seed, tokens, n) % 3;
}

class Run {
 public:
  explicit Run(uint32_t seed)
      : random_(seed),
        config_(Config()),
        size_(config_.tokens_per_block),
        kv_(config_),
        executor_(static_cast<size_t>(config_.num_blocks),
                  static_cast<size_t>(config_.num_host_blocks), static_cast<size_t>(size_)),
        sequences_(7) {}

  void Steps(int num_steps) {
    for (int i = 0; i < num_steps; ++i) {
      Schedule();
      executor_.Run(kv_.copies());
      kv_.ClearCopies();
      CheckContents();
      Compute();
      Publish();
      now_ns_ += Below(3) * 1000000;
    }
    for (Sequence& s : sequences_) Release(&s);
    kv_.ForgetAll();
    Books();
    CHECK(replay_.size() == 0 && kv_.num_cached() == 0 && kv_.num_host_used() == 0);
  }
  uint64_t num_matched = 0, num_moved = 0, num_copied = 0;

 private:
  int32_t Below(int32_t n) { return static_cast<int32_t>(random_() % static_cast<uint32_t>(n)); }
  bool Chance(int32_t percent) { return Below(100) < percent; }

  KvCacheConfig Config() {
    KvCacheConfig c;
    c.tokens_per_block = 1 + Below(5);
    c.num_blocks = 5 + Below(20);
    c.can_copy = Chance(80);
    c.num_host_blocks = c.can_copy && Chance(60) ? 1 + Below(12) : 0;
    c.enable_partial_reuse = Chance(80);
    c.host_offload_min_priority = Chance(50) ? PSM_DEFAULT_RETENTION : 0;
    c.max_kv_events = 1000;
    c.hash = Chance(30) ? AllCollide : Chance(30) ? MostCollide : PrefixTree::HashTokens;
    return c;
  }

  // Every count there is, after every operation.
  void Books() {
    std::vector<const KvSequence*> all;
    std::set<int32_t> held;
    for (const Sequence& s : sequences_) {
      all.push_back(&s.kv);
      held.insert(s.kv.blocks.begin(), s.kv.blocks.end());
    }
    kv_.CheckInvariants(all);
    const int32_t num_held = static_cast<int32_t>(held.size());
    CHECK(kv_.num_free() == config_.num_blocks - num_held && kv_.num_used() == num_held);
    CHECK(kv_.CountDistinct(all.data(), all.size()) == num_held);
    replay_.Take(&kv_, config_);
  }

  // --- between steps
  void Schedule() {
    if (Chance(10)) kv_.SetCosts(Below(4), Below(4));
    if (Chance(10)) kv_.SetCosts(0, 0);
    for (Sequence& s : sequences_) {
      if (!s.live && Chance(60)) {
        Start(&s);
      } else if (s.live && Chance(12)) {
        End(&s);
      } else if (!s.live && Chance(30)) {
        ForkInto(&s);
      }
      Books();
    }
    for (Sequence& s : sequences_) {
      if (s.live && !Grow(&s)) Release(&s, Chance(70));
      Books();
    }
    if (Chance(15)) Release(&sequences_[static_cast<size_t>(Below(7))]);  // paused at once
    if (Chance(2)) kv_.Forget({0, static_cast<uint64_t>(Below(2)), 0});
    Books();
  }

  void Start(Sequence* s) {
    s->key = {static_cast<uint64_t>(Below(2)), static_cast<uint64_t>(Below(2)),
              Chance(10) ? static_cast<uint64_t>(s - sequences_.data()) + 1 : 0};
    s->tokens.clear();
    if (!history_.empty() && Chance(80)) {  // begins like an earlier one
      const Sequence& old =
          history_[static_cast<size_t>(Below(static_cast<int32_t>(history_.size())))];
      if (Chance(80)) s->key = old.key;
      s->tokens.assign(old.tokens.begin(),
                       old.tokens.begin() + Below(static_cast<int32_t>(old.tokens.size()) + 1));
    }
    while (static_cast<int32_t>(s->tokens.size()) < 1 + Below(6 * size_))
      s->tokens.push_back(Below(2));
    SetCells(s);
    s->retention = Retention{};
    s->retention.num_prompt = static_cast<int32_t>(s->tokens.size());
    if (Chance(30)) {
      s->retention.ranges = {{0, 1 + Below(3 * size_), Below(101), Chance(50) ? -1 : Below(8)}};
      s->retention.decode_priority = Below(101);
      s->retention.decode_duration_ms = Below(5) - 1;
    }
    const int32_t n = static_cast<int32_t>(s->tokens.size());
    const PrefixMatch match = kv_.Match(s->key, s->tokens.data(), n);
    CHECK(match.num_tokens <= n - 1 && match.num_partial_tokens < std::max(size_, 2));
    CHECK(match.num_tokens == match.num_blocks * size_ + match.num_partial_tokens);
    if (s->key.private_id == 0) CheckMatch(match, *s);
    if (match.num_blocks_taken > kv_.num_free()) return;
    const int32_t free_before = kv_.num_free();
    const size_t copies_before = kv_.copies().size();
    CHECK(kv_.Attach(s->key, s->tokens.data(), n, &s->kv) == match.num_tokens);
    CHECK(kv_.num_free() == free_before - match.num_blocks_taken);
    CHECK(kv_.BlocksFor(match.num_tokens) == static_cast<int32_t>(s->kv.blocks.size()));
    s->computed = s->wanted = match.num_tokens;
    s->live = true;
    num_matched += static_cast<uint64_t>(match.num_blocks);
    num_moved += static_cast<uint64_t>(match.num_host_blocks);
    num_copied += kv_.copies().size() - copies_before;
  }

  // The device part is exact; the host part is there unless it is not worth its copy.
  void CheckMatch(const PrefixMatch& match, const Sequence& s) {
    const auto there =
        replay_.Match(s.key, s.tokens, static_cast<int32_t>(s.tokens.size()) - 1, size_);
    CHECK(match.num_blocks - match.num_host_blocks == there.first - there.second);
    CHECK(match.num_host_blocks == there.second || match.num_host_blocks == 0);
  }

  void SetCells(Sequence* s) {
    s->cells.clear();
    Cell cell = Begin(s->key);
    for (int32_t token : s->tokens) s->cells.push_back(cell = Next(cell, token));
  }

  void ForkInto(Sequence* s) {
    for (const Sequence& from : sequences_) {
      if (!from.live || from.computed == 0 || !Chance(50)) continue;
      s->key = from.key;
      s->tokens = from.tokens;
      s->tokens.resize(static_cast<size_t>(from.computed));
      SetCells(s);
      s->retention = from.retention;
      kv_.Fork(from.kv, &s->kv);
      s->computed = s->wanted = from.computed;
      s->live = true;
      return;
    }
  }

  // Blocks for some more positions; false when there are none.
  bool Grow(Sequence* s) {
    s->wanted = s->computed + (Chance(70) ? 1 : Below(2 * size_ + 1));
    while (static_cast<int32_t>(s->tokens.size()) <= s->wanted) s->tokens.push_back(Below(2));
    SetCells(s);
    if (s->wanted == s->computed) return true;
    const int32_t to_write = kv_.BlocksToWrite(s->kv, s->computed);
    const int32_t to_add =
        std::max(0, kv_.BlocksFor(s->wanted) - static_cast<int32_t>(s->kv.blocks.size()));
    if (to_write + to_add > kv_.num_free()) return false;
    if (to_write > 0 && !config_.can_copy) return false;
    const int32_t free_before = kv_.num_free();
    CHECK(kv_.MakeWritable(&s->kv, s->computed) == to_write);
    CHECK(kv_.BlocksToWrite(s->kv, s->computed) == 0);
    CHECK(kv_.Extend(&s->kv, s->wanted) == to_add);
    CHECK(kv_.num_free() >= free_before - to_write - to_add);
    return true;
  }

  void End(Sequence* s) {
    if (Chance(50)) PublishTail(s);
    Release(s, Chance(80));
  }

  void Release(Sequence* s, bool keep_on_host = true) {
    if (!s->live) return;
    if (s->computed > 0) {
      if (history_.size() >= 12) history_.erase(history_.begin() + Below(12));
      history_.push_back(*s);
      history_.back().kv = KvSequence{};
    }
    kv_.Release(&s->kv, keep_on_host ? OnEviction::kKeep : OnEviction::kDrop);
    s->live = false;
    if (s->key.private_id != 0 && Chance(60)) kv_.Forget(s->key);
  }

  // --- the step
  Cell& At(Pool* pool, const Sequence& s, int32_t p) {
    return (*pool)[static_cast<size_t>(s.kv.blocks[static_cast<size_t>(p / size_)])]
                  [static_cast<size_t>(p % size_)];
  }

  void CheckContents() {
    for (const Sequence& s : sequences_) {
      if (!s.live) continue;
      for (int32_t p = 0; p < s.computed; ++p) {
        CHECK(At(&executor_.device[0], s, p) == s.cells[static_cast<size_t>(p)]);
      }
      const int32_t drafted = kv_.DraftPositions(s.kv);
      CHECK(drafted <= s.computed);
      for (int32_t p = 0; p < drafted; ++p) {
        CHECK(At(&executor_.device[1], s, p) == s.cells[static_cast<size_t>(p)]);
      }
    }
  }

  void Compute() {
    for (Sequence& s : sequences_) {
      if (!s.live || s.wanted == s.computed) continue;
      for (int32_t p = s.computed; p < kv_.BlocksFor(s.wanted) * size_; ++p) {
        const int32_t block = s.kv.blocks[static_cast<size_t>(p / size_)];
        for (const Sequence& other : sequences_) {
          CHECK(&other == &s ||
                std::count(other.kv.blocks.begin(), other.kv.blocks.end(), block) == 0);
        }
        // Behind what is accepted stands what was only tried.
        At(&executor_.device[0], s, p) = p < s.wanted ? s.cells[static_cast<size_t>(p)] : 0;
      }
      s.computed = s.wanted;
      if (Chance(40)) Draft(&s);
    }
  }

  void Draft(Sequence* s) {
    const int32_t from = kv_.DraftPositions(s->kv);
    const int32_t to = std::min(s->computed, from + 1 + Below(2 * size_));
    for (int32_t p = from; p < to; ++p) {
      At(&executor_.device[1], *s, p) = s->cells[static_cast<size_t>(p)];
    }
    kv_.SetDraftPositions(s->kv, to);
    CHECK(kv_.DraftPositions(s->kv) >= to);
  }

  void Publish() {
    for (Sequence& s : sequences_) {
      if (!s.live || !Chance(80)) continue;
      const int32_t free_before = kv_.num_free();
      if (Chance(15)) {
        PublishTail(&s);
      } else {
        kv_.Publish(s.key, s.tokens.data(), s.computed, s.retention, now_ns_, &s.kv);
      }
      CHECK(kv_.num_free() >= free_before);
      CHECK(s.kv.num_published == s.computed / size_);
      Books();
    }
  }

  void PublishTail(Sequence* s) {
    kv_.PublishTail(s->key, s->tokens.data(), s->computed, s->retention, now_ns_, &s->kv);
    // At once, all of it can be found again.
    const int32_t n = s->computed + 1;
    const PrefixMatch match = kv_.Match(s->key, s->tokens.data(), n);
    CHECK(match.num_blocks == s->computed / size_);
    if (config_.can_copy && config_.enable_partial_reuse) CHECK(match.num_tokens == s->computed);
  }

  std::mt19937 random_;
  const KvCacheConfig config_;
  const int32_t size_;
  KvCache kv_;
  Executor executor_;
  Replay replay_;
  std::vector<Sequence> sequences_;
  std::vector<Sequence> history_;
  int64_t now_ns_ = 0;
};

}  // namespace

// kv_property_test [seeds [first seed]]
int main(int argc, char** argv) {
  const uint32_t num_seeds = argc > 1 ? static_cast<uint32_t>(atoi(argv[1])) : 300;
  const uint32_t first = argc > 2 ? static_cast<uint32_t>(atoi(argv[2])) : 1;
  uint64_t matched = 0, moved = 0, copied = 0;
  for (uint32_t seed = first; seed < first + num_seeds; ++seed) {
    if (num_seeds == 1) printf("seed %u\n", seed);
    Run run(seed);
    run.Steps(120);
    matched += run.num_matched;
    moved += run.num_moved;
    copied += run.num_copied;
  }
  printf("%llu blocks matched, %llu of them from the host, %llu copies\n",
         static_cast<unsigned long long>(matched), static_cast<unsigned long long>(moved),
         static_cast<unsigned long long>(copied));
  // A run that reaches none of this proves nothing.
  if (num_seeds >= 100) {
    CHECK(matched > 50 * num_seeds && moved > 3 * num_seeds && copied > 10 * num_seeds);
  }
  return 0;
}
