// Random loads of everything the scheduler knows, under small budgets and pools: nothing breaks, no
// limit is exceeded, nobody computes what another one computes, everybody finishes. (What is
// checked in every step: scheduler_world.h.)
//
// SPDX-License-Identifier: Apache-2.0
#include <cstdio>
#include <map>

#include "scheduler_world.h"

using namespace plansmith;

namespace {

struct Load {
  explicit Load(uint32_t seed) : random(seed) {}
  uint32_t Pick(uint32_t n) { return static_cast<uint32_t>(random() % n); }
  int32_t Between(int32_t a, int32_t b) {
    return a + static_cast<int32_t>(Pick(static_cast<uint32_t>(b - a + 1)));
  }

  SchedulerConfig RandomConfig() {
    const int32_t tokens = Between(2, 40);
    SchedulerConfig c = Config(Pick(2) ? PSM_MAX_UTILIZATION : PSM_GUARANTEED_NO_EVICT,
                               Between(1, std::min(tokens, 12)), tokens, Pick(4) != 0);
    c.max_logits_rows = Pick(2) ? tokens : Between(c.max_batch_size, tokens);
    c.chunking_policy = Pick(2) ? PSM_CHUNK_EQUAL_PROGRESS : PSM_CHUNK_FIRST_COME_FIRST_SERVED;
    c.pause_policy = Between(PSM_PAUSE_AUTO, PSM_PAUSE_SWAP);
    c.max_tenant_share = Pick(2) ? 1.0f : 0.1f * static_cast<float>(Between(1, 9));
    c.queue_order = Pick(2) ? PSM_QUEUE_SHORTEST : PSM_QUEUE_ARRIVAL;
    return c;
  }

  KvCacheConfig RandomPool() {
    KvCacheConfig pool = Pool(Between(3, 30), Pick(3) ? 0 : Between(1, 10));
    pool.can_copy = pool.num_host_blocks > 0 || Pick(4) != 0;
    pool.enable_partial_reuse = Pick(4) != 0;
    has_beams = pool.can_copy;
    return pool;
  }

  // From a handful of trunks, so that much is shared, cut anywhere.
  std::vector<int32_t> RandomPrompt(int32_t length) {
    std::vector<int32_t> prompt;
    const int32_t trunk = Between(0, 2);
    const int32_t fork = Between(0, length);
    for (int32_t i = 0; i < length; ++i) prompt.push_back(i < fork ? trunk : Between(0, 1));
    return prompt;
  }

  std::vector<Request*> RandomRequest(World* w) {
    const int32_t longest = w->kv.num_blocks() * kBlock;
    int32_t prompt = Between(1, longest - 1);
    if (Pick(3)) prompt = Between(1, std::max(1, longest / 3));
    if (!w->config.enable_chunked_context) prompt = std::min(prompt, w->config.max_num_tokens);
    int32_t output = Between(1, longest - prompt);
    if (Pick(3)) output = Between(1, std::min(20, longest - prompt));
    const std::vector<int32_t> tokens = RandomPrompt(prompt);
    const float priority = 0.25f * static_cast<float>(Between(0, 2));
    auto group = std::make_shared<RequestGroup>();
    const int32_t n = Pick(6) ? 1 : Between(2, 5);
    const uint64_t salt = Pick(5) == 0, adapter = Pick(5) == 0, tenant = Pick(3);
    const bool wants_rows = Pick(8) == 0;
    std::vector<Request*> sequences;
    for (int32_t i = 0; i < n; ++i) {
      Request* r = w->Make(tokens, output, priority);
      if (i == 0) group->id = r->id;
      r->group = group;
      r->sequence_idx = i;
      r->prefix_key.salt = salt;
      r->prefix_key.adapter_id = adapter;
      if (reuse_off) r->prefix_key.private_id = group->id;
      r->tenant_id = tenant;
      r->return_context_logits = wants_rows;
      sequences.push_back(r);
    }
    if (n == 1 && has_beams && !wants_rows && Pick(6) == 0) TryBeams(w, sequences[0]);
    return sequences;
  }

  void TryBeams(World* w, Request* r) {
    w->GiveBeams(r, Between(2, 4));
    if (r->width() <= w->config.max_batch_size &&
        w->scheduler.FullLengthBlocks(*r) <= w->kv.num_blocks()) {
      return;
    }
    r->beams.reset();
  }

  std::mt19937 random;
  bool has_beams = false;
  bool reuse_off = false;
};

struct Totals {
  int64_t reused = 0, computed = 0, pauses = 0, put_off = 0, drafts = 0, beams = 0, finished = 0;
  int64_t overtaken = 0;
};

// Who overtakes whom in a step.
class Overtaking {
 public:
  explicit Overtaking(const World& world) : w_(world) {}

  void BeforeStep() {
    queued_.clear();
    for (const auto& r : w_.all) {
      came_.emplace(r.get(), w_.num_computed_tokens);
      if (r->state == RequestState::kQueued) queued_.push_back(r.get());
    }
  }
  // Of those that the step begins and those that it leaves waiting, alike in priority and tenant,
  // none goes first that came later, but a shorter one, in time. Returns how many of these.
  int64_t Check() const {
    int64_t count = 0;
    const bool is_shortest = w_.config.queue_order == PSM_QUEUE_SHORTEST;
    for (const Request* began : queued_) {
      if (began->state != RequestState::kRunning) continue;
      for (const auto& left : w_.all) {
        const bool waits = left->sched.bucket != nullptr && left->sched.waits_for == nullptr &&
                           left->state != RequestState::kRunning;
        if (!waits || left->sched.bucket != began->sched.bucket) continue;
        CHECK(!is_shortest || left->state != RequestState::kPaused);
        if (left->id > began->id) continue;
        CHECK(is_shortest && came_.at(began) < came_.at(left.get()) + left->num_prompt);
        ++count;
      }
    }
    return count;
  }

 private:
  const World& w_;
  std::vector<const Request*> queued_;
  std::map<const Request*, int64_t> came_;  // tokens of context computed by then
};

void RunRound(uint32_t seed, Totals* totals) {
  Load load(seed);
  const KvCacheConfig pool = load.RandomPool();
  World w(pool, load.RandomConfig());
  load.reuse_off = load.Pick(5) == 0;
  w.random.seed(seed);
  w.ends_early = [&](const Request&) { return load.Pick(25) == 0; };
  const bool guaranteed = w.config.policy == PSM_GUARANTEED_NO_EVICT;
  Overtaking overtaking(w);
  w.when_planned = [&] { totals->overtaken += overtaking.Check(); };
  int to_come = 40, steps = 0;
  while (to_come > 0 || !w.scheduler.idle()) {
    while (to_come > 0 && load.Pick(3) == 0) {
      for (Request* r : load.RandomRequest(&w)) w.scheduler.Add(r);
      --to_come;
    }
    if (load.Pick(15) == 0) {  // a cancel
      for (auto& r : w.all) {
        if (r->state == RequestState::kRetired || load.Pick(4) != 0) continue;
        w.End(r.get());
        break;
      }
    }
    for (Request* r : w.scheduler.running()) r->spec.want = load.Pick(2) ? 0 : load.Between(0, 8);
    const bool idle = w.scheduler.idle();
    overtaking.BeforeStep();
    CHECK(w.Step().empty() == idle);
    for (const auto& r : w.all) totals->put_off += r->sched.waits_for != nullptr;
    CHECK(++steps < 100000);
  }
  for (const auto& r : w.all) {
    CHECK(r->state == RequestState::kRetired);
    CHECK(!guaranteed || r->stats.num_pauses == 0);
    CHECK(r->stats.alloc_total_blocks == r->stats.alloc_new_blocks + r->stats.reused_blocks);
    totals->reused += r->stats.reused_tokens;
    totals->pauses += r->stats.num_pauses;
    totals->beams += r->beams != nullptr;
    ++totals->finished;
  }
  totals->computed += w.num_computed_tokens;
  CHECK(w.kv.num_used() == 0);
}

// A steady stream of newcomers, always more than fit: within a priority nobody is passed for long.
void TestNobodyStarves() {
  for (int32_t policy : {PSM_GUARANTEED_NO_EVICT, PSM_MAX_UTILIZATION}) {
    for (int32_t chunking : {PSM_CHUNK_FIRST_COME_FIRST_SERVED, PSM_CHUNK_EQUAL_PROGRESS}) {
      for (int32_t order : {PSM_QUEUE_ARRIVAL, PSM_QUEUE_SHORTEST}) {
        SchedulerConfig c = Config(policy, 6, 24);
        c.chunking_policy = chunking;
        c.max_tenant_share = 0.5f;
        c.queue_order = order;
        World w(24, c);
        Load load(static_cast<uint32_t>(policy * 2 + chunking));
        std::map<const Request*, int> age;
        for (int step = 0; step < 4000; ++step) {
          int waiting = 0;
          for (const auto& r : w.all) waiting += r->state != RequestState::kRetired;
          for (; waiting < 20; ++waiting) {
            const int32_t prompt = load.Between(1, 60);
            Request* r = w.Make(load.RandomPrompt(prompt), load.Between(1, 90 - prompt));
            r->tenant_id = load.Pick(3);
            w.scheduler.Add(r);
          }
          w.Step();
          for (size_t i = 0; i < w.all.size(); ++i) {
            if (w.all[i]->state == RequestState::kRetired) {
              age.erase(w.all[i].get());
              w.all.erase(w.all.begin() + static_cast<ptrdiff_t>(i--));
            } else {
              CHECK(++age[w.all[i].get()] < 1500);  // 20 requests of at most 90 steps, one by one
            }
          }
        }
      }
    }
  }
}

// Whatever the tenants' shares: while somebody waits, as many run as slots and blocks allow.
void TestNobodyIdles() {
  for (uint32_t seed = 0; seed < 200; ++seed) {
    Load load(seed);
    const int32_t batch = load.Between(1, 10);
    SchedulerConfig c = Config(PSM_GUARANTEED_NO_EVICT, batch, 100);
    c.max_tenant_share = 0.1f * static_cast<float>(load.Between(1, 9));
    const int32_t max_running = load.Pick(2) ? batch : load.Between(1, batch);
    World w(3 * max_running, c);  // 3 blocks each
    w.ends_early = [&](const Request&) { return load.Pick(4) == 0; };
    int32_t alive = 0;
    for (int step = 0; step < 200; ++step) {
      for (int32_t n = load.Between(0, 3); n > 0; --n, ++alive) {
        const int32_t prompt = load.Between(1, 8);
        const int32_t first = 100 * static_cast<int32_t>(w.next_id + 1);  // nothing is shared
        std::vector<int32_t> tokens;
        for (int32_t i = 0; i < prompt; ++i) tokens.push_back(first + i);
        Request* r = w.Make(tokens, 12 - prompt, 0.5f * static_cast<float>(load.Pick(3) == 0));
        r->tenant_id = load.Pick(4);
        w.scheduler.Add(r);
      }
      const std::string text = w.Step();
      const int32_t num_run = static_cast<int32_t>(std::count(text.begin(), text.end(), ':') +
                                                   std::count(text.begin(), text.end(), 'g'));
      CHECK(num_run == std::min(alive, max_running));
      alive = 0;
      for (const auto& r : w.all) alive += r->state != RequestState::kRetired;
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  Totals totals;
  if (argc == 2) {
    RunRound(static_cast<uint32_t>(std::stoul(argv[1])), &totals);
    return 0;
  }
  for (uint32_t seed = 0; seed < 1500; ++seed) {
    try {
      RunRound(seed, &totals);
    } catch (const std::exception& e) {
      std::fprintf(stderr, "round %u: %s\n", seed, e.what());
      return 1;
    }
  }
  TestNobodyStarves();
  TestNobodyIdles();
  // None of it was idle talk.
  CHECK(totals.reused > totals.computed / 10 && totals.pauses > 500 && totals.put_off > 1000 &&
        totals.beams > 500 && totals.overtaken > 1000);
  return 0;
}
