// Who runs, with how many tokens, step by step, without an executor.
//
// SPDX-License-Identifier: Apache-2.0
#include "scheduler_world.h"

using namespace plansmith;

namespace {

// A step must be planned as `text` says (World::Describe).
#define STEP(world, text)                                                        \
  do {                                                                           \
    const std::string step_text_ = (world).Step();                               \
    if (step_text_ != (text)) {                                                  \
      fprintf(stderr, "%s:%d: planned \"%s\", not \"%s\"\n", __FILE__, __LINE__, \
              step_text_.c_str(), (text));                                       \
      exit(1);                                                                   \
    }                                                                            \
  } while (0)

void TestChunks() {
  World w(100, Config(PSM_GUARANTEED_NO_EVICT, 4, 10));
  w.Add(19, 3);
  w.Add(5, 3);
  STEP(w, "c1:8");  // 10 rounded down to a block boundary
  STEP(w, "c1:8");
  STEP(w, "c1:3 c2:5");  // final chunks are not rounded
  STEP(w, "g1 g2");
  w.Add(30, 2);
  STEP(w, "c3:8 g1 g2");  // generation first in the budget: 8 left
  STEP(w, "c3:8");
  STEP(w, "c3:8");
  STEP(w, "c3:6");
  STEP(w, "g3");
  CHECK(w.scheduler.idle() && w.kv.num_used() == 0);
}

// A budget below a block still makes progress, and later chunks return to block boundaries when
// they can.
void TestTinyBudget() {
  World w(100, Config(PSM_GUARANTEED_NO_EVICT, 3, 3));
  w.Add(5, 1);
  STEP(w, "c1:3");
  STEP(w, "c1:2");
  World v(100, Config(PSM_GUARANTEED_NO_EVICT, 3, 6));
  v.Add(1, 2);
  v.Add(1, 3);
  v.Add(1, 3);
  STEP(v, "c1:1 c2:1 c3:1");
  STEP(v, "g1 g2 g3");
  v.Add(13, 1);
  STEP(v, "c4:4 g2 g3");
  STEP(v, "c4:4");
  STEP(v, "c4:5");
}

void TestUnchunked() {
  World w(100, Config(PSM_GUARANTEED_NO_EVICT, 4, 10, false));
  w.Add(7, 2);
  w.Add(6, 2);
  w.Add(2, 2);
  STEP(w, "c1:7");          // 6 more do not fit, and the third may not overtake
  STEP(w, "c2:6 c3:2 g1");  // 1 + 6 + 2
  STEP(w, "g2 g3");
}

void TestBatchLimitAndPriority() {
  World w(100, Config(PSM_GUARANTEED_NO_EVICT, 2, 10));
  w.Add(2, 2, 0.5f);
  w.Add(2, 2, 0.1f);
  w.Add(2, 2, 0.9f);
  w.Add(2, 2, 0.5f);
  STEP(w, "c3:2 c1:2");
  STEP(w, "g3 g1");
  STEP(w, "c4:2 c2:2");
}

// Reserved to the full length, allocated as it fills; the head of the line stops those behind it.
void TestGuaranteedNoEvict() {
  World w(10, Config(PSM_GUARANTEED_NO_EVICT, 8, 32));
  w.Add(4, 16);                  // 5 blocks
  Request* big = w.Add(4, 20);   // 6 blocks: 5 + 6 > 10
  Request* small = w.Add(1, 1);  // would fit, but waits its turn
  STEP(w, "c1:4");
  CHECK(w.kv.num_used() == 1);
  CHECK(w.scheduler.num_queued() == 2);
  for (int i = 0; i < 15; ++i) STEP(w, "g1");
  STEP(w, "c2:4 c3:1");
  CHECK(big->state == RequestState::kRunning && small->state == RequestState::kRetired);
}

void TestMaxUtilization() {
  World w(6, Config(PSM_MAX_UTILIZATION, 8, 32));
  Request* first = w.Add(8, 12);   // 2 blocks, at most 5
  Request* second = w.Add(8, 12);  // together they outgrow 6
  STEP(w, "c1:8 c2:8");
  STEP(w, "g1 g2");  // positions 9: the third block each
  for (int i = 0; i < 3; ++i) STEP(w, "g1 g2");
  CHECK(w.kv.num_free() == 0);
  STEP(w, "g1");  // position 13 does not fit twice: the last started gives way
  CHECK(second->state == RequestState::kPaused && second->kv.blocks.empty());
  CHECK(second->stats.num_pauses == 1 && w.scheduler.num_paused() == 1);
  CHECK(second->num_output() == 5);
  while (first->state != RequestState::kRetired) STEP(w, "g1");
  // 8 prompt tokens and 5 generated ones, as context; the first block of them is still there.
  STEP(w, "c2:9");
  CHECK(second->stats.reused_tokens == 4);
  STEP(w, "g2");
  while (!w.scheduler.idle()) w.Step();
  CHECK(second->num_output() == 12 && w.kv.num_used() == 0);
}

// A context waits for the blocks of all of it, not of its first chunk.
void TestContextStartsWhole() {
  World w(6, Config(PSM_MAX_UTILIZATION, 8, 8));
  w.Add(8, 6);
  w.Add(20, 4);  // 5 blocks, in chunks of 2
  STEP(w, "c1:8");
  for (int i = 0; i < 5; ++i) STEP(w, "g1");  // 4 or fewer blocks are free
  STEP(w, "c2:8");
}

// The victim is the lowest priority, whoever started last.
void TestPausesByPriority() {
  World w(6, Config(PSM_MAX_UTILIZATION, 8, 32));
  Request* low = w.Add(8, 12, 0.2f);
  STEP(w, "c1:8");
  Request* high = w.Add(8, 12, 0.8f);
  STEP(w, "c2:8 g1");
  while (low->state == RequestState::kRunning) w.Step();
  CHECK(high->state == RequestState::kRunning && low->stats.num_pauses == 1);
  World v(6, Config(PSM_MAX_UTILIZATION, 8, 32));
  low = v.Add(8, 12, 0.2f);
  high = v.Add(8, 12, 0.8f);
  while (low->state == RequestState::kRunning || low->state == RequestState::kQueued) v.Step();
  CHECK(high->state == RequestState::kRunning);
}

// A recomputed context may exceed the budget that its prompt had to respect; it is cut even with
// chunking off.
void TestRecomputeOutgrowsBudget() {
  World w(8, Config(PSM_MAX_UTILIZATION, 8, 10, false));
  Request* first = w.Add(8, 20);
  Request* second = w.Add(8, 20);
  int steps = 0;
  while (!w.scheduler.idle()) {
    w.Step();
    CHECK(++steps < 500);
  }
  CHECK(first->num_output() == 20 && second->num_output() == 20);
  CHECK(second->stats.num_pauses >= 1);
}

std::vector<int32_t> Tokens(int32_t n, int32_t first = 0) {
  std::vector<int32_t> tokens;
  for (int32_t i = 0; i < n; ++i) tokens.push_back(first + i);
  return tokens;
}

// Block boundaries, parts of blocks, and the last token, which is always computed.
void TestBeginsWithTheCached() {
  World w(40, Config(PSM_GUARANTEED_NO_EVICT, 4, 64));
  w.Add(Tokens(18), 1);
  STEP(w, "c1:18");
  Request* same = w.Add(Tokens(18), 1);
  STEP(w, "c2:1");
  CHECK(same->stats.reused_blocks == 4 && same->stats.reused_tokens == 17);
  CHECK(same->stats.missed_blocks == 0 && same->stats.alloc_total_blocks == 5);
  CHECK(same->stats.alloc_new_blocks == 1);  // the copied part
  Request* longer = w.Add(Tokens(30), 1);
  STEP(w, "c3:12");
  CHECK(longer->stats.missed_blocks == 3);
  w.Add(Tokens(8), 1);
  STEP(w, "c4:1");
  Request* salted = w.Make(Tokens(18), 1);
  salted->prefix_key.salt = 1;
  w.scheduler.Add(salted);
  STEP(w, "c5:18");
}

// All rows of its prompt are wanted: it takes nothing, but it gives.
void TestContextRowsComputeAll() {
  SchedulerConfig config = Config(PSM_MAX_UTILIZATION, 4, 64);
  config.max_logits_rows = 10;
  World w(40, config);
  w.Add(Tokens(18), 1);
  STEP(w, "c1:18");
  Request* rows = w.Make(Tokens(26), 3);
  rows->num_prompt_logprobs = 0;
  w.scheduler.Add(rows);
  STEP(w, "c2:8");       // 10 rows, cut at a block
  w.Add(Tokens(26), 2);  // shares what nobody has yet: waits for it
  w.Add(Tokens(18), 2);  // shares what is there
  STEP(w, "c2:8");
  STEP(w, "c2:10");  // no row is left for the fourth's last token
  STEP(w, "c3:1 c4:1 g2");
  CHECK(rows->stats.reused_tokens == 0 && rows->num_context_rows == 26);
  // With its rows out it may take from the cache like everybody.
  World v(40, config);
  rows = v.Make(Tokens(9), 3);
  rows->return_context_logits = true;
  rows->num_context_rows = 9;
  v.Add(Tokens(9), 1);
  v.Step();
  v.scheduler.Add(rows);
  STEP(v, "c1:1");
}

// Unchunked, and more rows wanted than a step gives: cut all the same, or it could never run.
void TestRowsBeyondTheLimit() {
  SchedulerConfig config = Config(PSM_GUARANTEED_NO_EVICT, 2, 32, false);
  config.max_logits_rows = 4;
  World w(40, config);
  Request* rows = w.Make(Tokens(10), 2);
  rows->num_prompt_logprobs = 2;
  w.scheduler.Add(rows);
  STEP(w, "c1:4");
  STEP(w, "c1:4");
  STEP(w, "c1:2");
  STEP(w, "g1");
  ;
}

void TestPutOff() {
  World w(100, Config(PSM_GUARANTEED_NO_EVICT, 8, 16));
  Request* first = w.Add(Tokens(40), 2);
  STEP(w, "c1:16");
  Request* half = w.Add(Tokens(21), 2);  // 20 in common
  std::vector<int32_t> fork = Tokens(30);
  fork[26] = 99;
  Request* forked = w.Add(fork, 2);  // 26 in common: 24 in whole blocks
  w.Add(10, 4);                      // nothing
  STEP(w, "c1:16");                  // the budget ends here: nobody looked at the others
  CHECK(half->sched.waits_for == nullptr);
  STEP(w, "c1:8 c2:1 c3:4 c4:3");  // 32 were computed: nothing to wait for; 26 of them copied
  CHECK(first->num_output() == 1 && forked->stats.reused_tokens == 26);
}

// Those behind the ones that are put off go on, and rank comes back with them.
void TestPutOffDoesNotHoldUp() {
  World w(100, Config(PSM_GUARANTEED_NO_EVICT, 8, 64));
  Request* first = w.Add(Tokens(40), 3);
  Request* second = w.Add(Tokens(40), 3);
  Request* third = w.Add(Tokens(10), 3);
  w.Add(7, 3);
  STEP(w, "c1:40 c4:7");
  CHECK(second->sched.waits_for == first && third->sched.waits_for == first);
  CHECK(w.scheduler.num_queued() == 2);
  w.Add(3, 3);
  STEP(w, "c2:1 c3:1 c5:3 g1 g4");
  CHECK(second->stats.reused_tokens == 39 && third->stats.reused_tokens == 9);
}

// The one that is waited for is cancelled half-way; one that waits is cancelled.
void TestPutOffWithOneThatEnds() {
  World w(100, Config(PSM_GUARANTEED_NO_EVICT, 8, 24));
  Request* first = w.Add(Tokens(20), 3);
  std::vector<int32_t> longer = Tokens(60);
  Request* second = w.Add(longer, 3);
  Request* third = w.Add(longer, 3);
  STEP(w, "c1:20");
  CHECK(second->sched.waits_for == first && third->sched.waits_for == first);
  STEP(w, "c2:20 g1");  // 24 - 1, to a block
  CHECK(third->sched.waits_for == nullptr);
  w.End(second);
  STEP(w, "c3:20 g1");  // begins with the 40 that the second leaves
  World v(100, Config(PSM_GUARANTEED_NO_EVICT, 8, 64));
  v.Add(Tokens(20), 3);
  second = v.Add(Tokens(20), 3);
  STEP(v, "c1:20");
  CHECK(second->sched.waits_for != nullptr);
  v.End(second);
  v.scheduler.CheckInvariants();
  STEP(v, "g1");
  STEP(v, "g1");
  CHECK(v.scheduler.idle());
}

// The sequences of one request: the first computes the prompt, the others copy its last block.
void TestGroup() {
  World w(100, Config(PSM_GUARANTEED_NO_EVICT, 8, 64));
  auto group = std::make_shared<RequestGroup>();
  for (int32_t i = 0; i < 4; ++i) {
    Request* r = w.Make(Tokens(3), 2);  // less than a block
    r->group = group;
    r->sequence_idx = i;
    w.scheduler.Add(r);
  }
  STEP(w, "c1:3");
  STEP(w, "c2:1 c3:1 c4:1 g1");
  // Without copies the last block is computed by each, but not one after the other.
  KvCacheConfig pool = Pool(100);
  pool.can_copy = false;
  World v(pool, Config(PSM_GUARANTEED_NO_EVICT, 8, 64));
  for (int32_t i = 0; i < 4; ++i) {
    Request* r = v.Make(Tokens(6), 2);
    r->group = group;
    r->sequence_idx = i;
    v.scheduler.Add(r);
  }
  STEP(v, "c1:6");
  STEP(v, "c2:2 c3:2 c4:2 g1");
}

void TestEqualProgress() {
  SchedulerConfig config = Config(PSM_GUARANTEED_NO_EVICT, 4, 16);
  config.chunking_policy = PSM_CHUNK_EQUAL_PROGRESS;
  World w(100, config);
  w.Add(20, 2);
  w.Add(6, 2);
  STEP(w, "c1:8 c2:6");  // 2 tokens are left, less than a block
  w.Add(20, 2);
  STEP(w, "c1:8 c3:4 g2");  // 15: 4 each, then 4 more
  w.Add(9, 2);
  STEP(w, "c1:4 c3:8 c4:4");
  config = Config(PSM_GUARANTEED_NO_EVICT, 4, 8);
  config.chunking_policy = PSM_CHUNK_EQUAL_PROGRESS;
  World v(100, config);
  v.Add(12, 1);
  v.Add(12, 1);
  STEP(v, "c1:4 c2:4");
  v.Add(12, 1);
  STEP(v, "c1:4 c2:4");
  STEP(v, "c1:4 c2:4");
  STEP(v, "c3:8");
  config = Config(PSM_GUARANTEED_NO_EVICT, 4, 7);
  config.chunking_policy = PSM_CHUNK_EQUAL_PROGRESS;
  World u(100, config);
  u.Add(6, 1);
  u.Add(20, 1);
  STEP(u, "c1:6");  // 3 are left for the second: less than a block, so it does not start
  CHECK(u.scheduler.running().empty());
  STEP(u, "c2:4");
}

// Contexts that wait for each other's blocks: the last started gives way.
void TestHalfReadContexts() {
  SchedulerConfig config = Config(PSM_MAX_UTILIZATION, 8, 9);
  config.chunking_policy = PSM_CHUNK_EQUAL_PROGRESS;
  World w(12, config);
  w.Add(2, 30);
  for (int i = 0; i < 3; ++i) w.Add(14, 20);
  int steps = 0;
  while (!w.scheduler.idle()) {
    w.Step();
    CHECK(++steps < 1000);
  }
}

void TestDrafts() {
  SchedulerConfig config = Config(PSM_GUARANTEED_NO_EVICT, 4, 12);
  World w(100, config);
  Request* r[3];
  for (Request*& each : r) each = w.Add(4, 20);
  STEP(w, "c1:4 c2:4 c3:4");
  r[0]->spec.want = 5;
  STEP(w, "g1+5 g2 g3");
  for (Request* each : r) each->spec.want = 8;
  STEP(w, "g1+3 g2+3 g3+3");  // 12 - 3
  r[0]->spec.want = 1;
  STEP(w, "g1+1 g2+4 g3+4");
  w.Add(7, 2);
  r[0]->spec.want = 0;
  STEP(w, "c4:7 g1 g2+1 g3+1");  // tokens, then contexts, then drafts
  // Rows limit them, too, and so does the length: the last token needs no draft.
  config.max_logits_rows = 5;
  World v(100, config);
  Request* last = v.Add(4, 4);
  v.Add(4, 9);
  STEP(v, "c1:4 c2:4");
  for (Request* each : v.scheduler.running()) each->spec.want = 8;
  CHECK(last->num_output() == 1);
  STEP(v, "g1+2 g2+1");
}

// A draft never takes a block that somebody may need in the next step.
void TestDraftsLeaveBlocks() {
  World w(6, Config(PSM_MAX_UTILIZATION, 4, 32));
  Request* first = w.Add(7, 10);
  w.Add(7, 10);
  STEP(w, "c1:7 c2:7");
  CHECK(w.kv.num_free() == 2);
  first->spec.want = 8;
  w.scheduler.running()[1]->spec.want = 8;
  STEP(w, "g1 g2");  // both blocks are full after this token, the 2 free ones stay
}

void TestBeams() {
  World w(30, Config(PSM_GUARANTEED_NO_EVICT, 4, 16));
  Request* beams = w.Make(Tokens(10), 6);
  w.GiveBeams(beams, 3);
  // 2 shared and 3 times 2 of their own.
  CHECK(w.scheduler.FullLengthBlocks(*beams) == 8);
  w.scheduler.Add(beams);
  w.Add(4, 3);
  w.Add(4, 3);  // 3 + 1 slots are taken
  STEP(w, "c1:10 c2:4");
  CHECK(w.kv.num_used() == 3 + 1);
  STEP(w, "g1 g2");
  // 3 blocks of their own when the step ran; beams that were dropped after it have given theirs up.
  CHECK(w.kv.num_used() > 2 + 2 && w.kv.num_used() <= 2 + 3 + 2);
  CHECK(beams->stats.alloc_new_blocks == 3 + 2);
  while (beams->state == RequestState::kRunning) w.Step();
  CHECK(w.kv.num_used() <= 2);
}

// Beams that do not fit begin again from the prompt, and the pool of exactly their size is enough.
void TestBeamsUnderPressure() {
  int num_pauses = 0, steps = 0;
  for (uint32_t seed = 0; seed < 20; ++seed) {  // how much beams share is a matter of luck
    World w(9, Config(PSM_MAX_UTILIZATION, 8, 32));
    w.random.seed(seed);
    w.Add(4, 20);
    Request* beams = w.Make(Tokens(11), 5);  // 2 blocks + 3 * 2
    w.GiveBeams(beams, 3);
    w.scheduler.Add(beams);
    for (steps = 0; !w.scheduler.idle(); ++steps) {
      CHECK(steps < 100);
      w.Step();
      if (beams->state != RequestState::kPaused) continue;
      CHECK(beams->num_tokens() == 11 && !beams->beams->running() && beams->num_computed == 0);
    }
    num_pauses += beams->stats.num_pauses;
  }
  CHECK(num_pauses > 0);
  World v(8, Config(PSM_MAX_UTILIZATION, 8, 32));
  Request* beams = v.Make(Tokens(11), 5);
  v.GiveBeams(beams, 3);
  CHECK(v.scheduler.FullLengthBlocks(*beams) == 8);
  v.scheduler.Add(beams);
  for (steps = 0; !v.scheduler.idle(); ++steps) v.Step();
  CHECK(steps == 5 && beams->stats.num_pauses == 0);
}

void TestTenants() {
  SchedulerConfig config = Config(PSM_GUARANTEED_NO_EVICT, 4, 64);
  config.max_tenant_share = 0.5f;
  World w(100, config);
  for (int i = 0; i < 6; ++i) w.Add(4, 3);  // all of tenant 0: no other waits, so it takes 4 slots
  STEP(w, "c1:4 c2:4 c3:4 c4:4");
  Request* other = w.Make(Tokens(4), 9);
  other->tenant_id = 7;
  w.scheduler.Add(other);
  w.Step();
  w.Step();
  STEP(w, "c5:4 c6:4 c7:4");
  // Queued behind, but the first tenant has its half.
  World v(100, config);
  for (int i = 0; i < 4; ++i) v.Add(4, 2);
  other = v.Make(Tokens(4), 2);
  other->tenant_id = 7;
  v.scheduler.Add(other);
  STEP(v, "c1:4 c2:4 c5:4 c3:4");  // once the other runs, nobody else waits
  // Both have their quarter and both still wait: the rest goes to whoever holds the fewest.
  config.max_tenant_share = 0.25f;
  World u(100, config);
  for (int i = 0; i < 6; ++i) {
    Request* r = u.Make(Tokens(4), i == 3 ? 9 : 3);
    r->tenant_id = i < 3 ? 0 : 7;
    u.scheduler.Add(r);
  }
  STEP(u, "c1:4 c4:4 c2:4 c5:4");
  u.Step();
  u.Step();
  STEP(u, "c3:1 c6:1 g4");  // the first tenant holds none, then both hold one
}

SchedulerConfig Shortest(int32_t policy, int32_t batch, int32_t tokens) {
  SchedulerConfig config = Config(policy, batch, tokens);
  config.queue_order = PSM_QUEUE_SHORTEST;
  return config;
}

void TestShortestOfABurst() {
  const auto add = [](World* w) {
    for (int32_t num_prompt : {9, 5, 5, 1}) w->Add(num_prompt, 1);
  };
  World w(100, Shortest(PSM_GUARANTEED_NO_EVICT, 4, 8));
  add(&w);
  STEP(w, "c4:1 c2:5 c3:2");
  STEP(w, "c3:3 c1:4");
  STEP(w, "c1:5");
  World v(100, Config(PSM_GUARANTEED_NO_EVICT, 4, 8));
  add(&v);
  STEP(v, "c1:8");
  STEP(v, "c1:1 c2:5 c3:2");
  STEP(v, "c3:3 c4:1");
}

// Who has begun goes on first, however short those are that come after it.
void TestShortestBehindTheHalfRead() {
  World w(100, Shortest(PSM_GUARANTEED_NO_EVICT, 4, 8));
  w.Add(20, 1);
  STEP(w, "c1:8");
  w.Add(3, 1);
  w.Add(1, 1);
  STEP(w, "c1:8");
  STEP(w, "c1:4 c3:1 c2:3");
}

// Overtaken by those that come before as many tokens have been computed as it has, not after.
void TestShortestWithinItsLength() {
  World w(100, Shortest(PSM_GUARANTEED_NO_EVICT, 1, 8));
  w.Add(4, 1);
  w.Add(20, 1);  // at 0: until 20
  STEP(w, "c1:4");
  w.Add(15, 1);  // at 4: until 19
  w.Add(16, 1);  // at 4: until 20, but it came later
  STEP(w, "c3:8");
  STEP(w, "c3:7");
  w.Add(1, 1);  // at 19: until 20, likewise
  STEP(w, "c2:8");
  w.Add(1, 1);  // at 27
  STEP(w, "c2:8");
  STEP(w, "c2:4");
  STEP(w, "c4:8");
  STEP(w, "c4:8");
  STEP(w, "c5:1");
  STEP(w, "c6:1");
}

// However long it is: by at most so many tokens.
void TestShortestAtMost() {
  World w(20000, Shortest(PSM_GUARANTEED_NO_EVICT, 1, 4096));
  w.Add(8192, 1);
  STEP(w, "c1:4096");
  w.Add(30000, 1);  // at 4096: until 12288
  w.Add(20000, 1);  // the same: by arrival
  STEP(w, "c1:4096");
  w.Add(4096, 1);  // at 8192: until 12288, but it came later
  w.Add(4095, 1);  // at 8192: until 12287
  STEP(w, "c5:4095");
  for (int i = 0; i < 7; ++i) STEP(w, "c2:4096");
  STEP(w, "c2:1328");
  for (int i = 0; i < 4; ++i) STEP(w, "c3:4096");
  STEP(w, "c3:3616");
  STEP(w, "c4:4096");
}

// A stream of short ones that alone would fill every step holds a long one up for its own length.
void TestShortestStarvesNobody() {
  for (const int32_t num_prompt : {8, 30, 100, 300}) {
    World w(1000, Shortest(PSM_GUARANTEED_NO_EVICT, 4, 8));
    const auto fill = [&] {
      while (w.scheduler.num_queued() < 10) w.Add(3, 2);
    };
    fill();
    for (int i = 0; i < 10; ++i, fill()) w.Step();
    const int64_t came = w.num_computed_tokens;
    Request* last_before = w.all.back().get();
    Request* lone = w.Add(num_prompt, 1);
    std::vector<Request*> after;  // that came when it was no longer to be overtaken
    while (lone->state == RequestState::kQueued) {
      if (w.num_computed_tokens >= came + num_prompt) after.push_back(w.Add(1, 2));
      w.Step();
      fill();
    }
    // Those that waited when its turn had come, and a step more.
    CHECK(w.num_computed_tokens <= came + num_prompt + 10 * 3 + 2 * 8);
    CHECK(w.num_computed_tokens >= came + num_prompt - 2 * 8);
    for (const Request* r : after) CHECK(r->state == RequestState::kQueued);
    CHECK(last_before->state == RequestState::kRetired || num_prompt < 30);
    CHECK(w.all.size() > static_cast<size_t>(num_prompt) / 6);
  }
}

// Priority and the tenants' shares come first.
void TestShortestWithinPriorityAndShare() {
  SchedulerConfig config = Shortest(PSM_GUARANTEED_NO_EVICT, 4, 64);
  World w(100, config);
  w.Add(1, 1, 0.2f);
  w.Add(9, 1, 0.8f);
  w.Add(2, 1, 0.5f);
  w.Add(5, 1, 0.8f);
  STEP(w, "c4:5 c2:9 c3:2 c1:1");
  config.max_tenant_share = 0.5f;
  World v(100, config);
  for (const int32_t num_prompt : {4, 3, 2, 1, 9, 7}) {
    Request* r = v.Make(Tokens(num_prompt, 100 * num_prompt), 1);
    r->tenant_id = num_prompt > 4;
    v.scheduler.Add(r);
  }
  STEP(v, "c4:1 c3:2 c6:7 c5:9");  // two each, and the shortest of each
  STEP(v, "c2:3 c1:4");
}

// Its prompt counts, not its beams; the first in line that finds no slots stops the others.
void TestShortestWithBeams() {
  World w(100, Shortest(PSM_GUARANTEED_NO_EVICT, 4, 64));
  w.Add(6, 3);
  w.Add(5, 2);
  Request* beams = w.Make(Tokens(4), 3);
  w.GiveBeams(beams, 3);
  w.scheduler.Add(beams);
  STEP(w, "c3:4 c2:5");  // 3 + 1 slots
  STEP(w, "g3 g2");
  Request* wide = w.Make(Tokens(2, 50), 2);
  w.GiveBeams(wide, 4);
  w.scheduler.Add(wide);
  while (beams->state == RequestState::kRunning) w.Step();
  STEP(w, "g1");
}

// What is cached need not be computed, so it does not count.
void TestShortestToCompute() {
  World w(100, Shortest(PSM_GUARANTEED_NO_EVICT, 1, 64));
  w.Add(Tokens(16), 1);
  STEP(w, "c1:16");
  w.Add(6, 1);
  w.Add(Tokens(20), 1);
  Request* rows = w.Make(Tokens(18), 1);  // computes all of its own
  rows->return_context_logits = true;
  w.scheduler.Add(rows);
  STEP(w, "c3:4");
  STEP(w, "c2:6");
  STEP(w, "c4:18");
}

// Put off behind a shorter one that computes what it needs, and back in its place.
void TestShortestAndPutOff() {
  World w(100, Shortest(PSM_GUARANTEED_NO_EVICT, 3, 8));
  w.Add(Tokens(12), 1);
  w.Add(Tokens(9), 1);
  w.Add(11, 1);
  w.Add(13, 1);
  STEP(w, "c2:8");
  STEP(w, "c2:1 c3:4");
  STEP(w, "c3:7 c1:1");
  STEP(w, "c1:2 c4:4");  // 9 of its 12 were the shorter one's
}

// Who was paused goes on before anybody starts, and nobody slips in while it waits for its blocks.
void TestShortestBehindThePaused() {
  World w(6, Shortest(PSM_MAX_UTILIZATION, 8, 32));
  Request* first = w.Add(8, 12);
  Request* second = w.Add(8, 12);
  STEP(w, "c1:8 c2:8");
  while (second->state == RequestState::kRunning) w.Step();
  w.Add(1, 1);
  while (first->state != RequestState::kRetired) STEP(w, "g1");
  STEP(w, "c2:9 c3:1");
  while (!w.scheduler.idle()) w.Step();
  CHECK(second->num_output() == 12 && w.kv.num_used() == 0);
}

// The first in line does not fit: it is looked at again as soon as something has changed.
void TestBlockedHead() {
  World w(10, Config(PSM_GUARANTEED_NO_EVICT, 8, 32));
  Request* first = w.Add(4, 16);
  w.Add(4, 20);
  STEP(w, "c1:4");
  STEP(w, "g1");
  ;
  w.Add(4, 4, 0.9f);  // outranks it, and fits
  STEP(w, "c3:4 g1");
  w.End(first);
  STEP(w, "c2:4 g3");
}

// GUARANTEED_NO_EVICT counts what is shared once: 12 requests fit where 3 would without sharing.
void TestSharedBlocksCountOnce() {
  World w(30, Config(PSM_GUARANTEED_NO_EVICT, 12, 64));
  std::vector<int32_t> prompt = Tokens(32);
  w.Add(prompt, 4);
  STEP(w, "c1:32");
  for (int i = 0; i < 11; ++i) {
    std::vector<int32_t> own = prompt;
    own.push_back(100 + i);
    w.Add(own, 3);
  }
  w.Step();
  CHECK(w.scheduler.running().size() == 12 && w.scheduler.num_queued() == 0);
  while (!w.scheduler.idle()) w.Step();
}

// What generating requests may need later is promised to nobody, but what a context needs is: one
// of lower rank gives way rather than take it.
void TestContextKeepsItsBlocks() {
  World w(10, Config(PSM_MAX_UTILIZATION, 8, 8));
  Request* low = w.Add(7, 20, 0.1f);
  STEP(w, "c1:7");
  Request* high = w.Add(27, 4, 0.9f);  // 7 blocks; 8 are free
  for (int i = 0; i < 5; ++i) STEP(w, "c2:4 g1");
  CHECK(w.kv.num_free() == 2);  // its last two
  STEP(w, "c2:7");              // position 12 of the other would take one of them
  CHECK(low->state == RequestState::kPaused && high->stats.num_pauses == 0);
  while (high->state != RequestState::kRetired) STEP(w, "g2");
  CHECK(w.Step().substr(0, 2) == "c1");
}

// If blocks went missing all the same, contexts would not wait for each other for ever.
void TestMissingBlocks() {
  SchedulerConfig config = Config(PSM_MAX_UTILIZATION, 8, 8);
  config.chunking_policy = PSM_CHUNK_EQUAL_PROGRESS;
  World w(8, config);
  w.Add(12, 2);
  w.Add(12, 2);
  STEP(w, "c1:4 c2:4");
  KvSequence thief;
  w.kv.Extend(&thief, 6 * kBlock);
  const StepPlan& plan = w.scheduler.Next();
  CHECK(plan.num_paused == 1 && plan.context.size() == 1 && plan.context[0].request->id == 1);
  CHECK(plan.context[0].num_tokens == 4);
  w.kv.Release(&thief);
}

// What the first in line needs has become less, since another one computed it.
void TestBlockedHeadFindsItsPrefix() {
  World w(20, Config(PSM_GUARANTEED_NO_EVICT, 8, 64));
  Request* short_one = w.Add(4, 12);  // 4 blocks
  w.Add(4, 28);                       // 8
  w.Add(Tokens(32), 4, 0.1f);         // 9, and 8 are left
  STEP(w, "c1:4 c2:4");
  w.Add(Tokens(24), 4, 0.9f);  // 7
  STEP(w, "c4:24 g1 g2");
  STEP(w, "g4 g1 g2");
  w.End(short_one);
  STEP(w, "c3:8 g4 g2");  // 5 are free, fewer than when it did not fit; it needs 3
}

// One that computes cached blocks again, for its rows, is at work on what follows them all the
// same.
void TestWaitsForWhatFollowsTheCached() {
  World w(40, Config(PSM_GUARANTEED_NO_EVICT, 4, 64));
  w.Add(Tokens(18), 1);
  STEP(w, "c1:18");
  Request* rows = w.Make(Tokens(26), 3);
  rows->return_context_logits = true;
  w.scheduler.Add(rows);
  Request* same = w.Add(Tokens(26), 2);
  STEP(w, "c2:26");
  CHECK(same->sched.waits_for == rows);
  STEP(w, "c3:1 g2");
}

// Less than a block for each: whose turn it was not comes next.
void TestTurns() {
  SchedulerConfig config = Config(PSM_GUARANTEED_NO_EVICT, 4, 8);
  config.chunking_policy = PSM_CHUNK_EQUAL_PROGRESS;
  World w(100, config);
  w.Add(Tokens(5), 1);
  STEP(w, "c1:5");
  for (int i = 1; i <= 3; ++i) {  // three tokens are copied, so that one fills the first block
    std::vector<int32_t> prompt = Tokens(16);
    prompt[3] = -i;
    w.Add(prompt, 1);
  }
  STEP(w, "c2:5 c3:1 c4:1");
  STEP(w, "c2:4 c3:4");
  STEP(w, "c4:4 c2:4");
  STEP(w, "c4:4 c3:4");  // the second is done
}

// A context that could not place its first token would be paused at once.
void TestStartsWithItsFirstToken() {
  World w(4, Config(PSM_MAX_UTILIZATION, 8, 32));
  w.Add(5, 3);
  w.Add(8, 4);  // 2 blocks, and one for position 8
  STEP(w, "c1:5");
  STEP(w, "g1");
  STEP(w, "g1");
  STEP(w, "c2:8");
}

// RECOMPUTE: a paused request's blocks are dropped when their memory is wanted, not moved.
void TestPausePolicy() {
  for (int32_t policy : {PSM_PAUSE_AUTO, PSM_PAUSE_SWAP, PSM_PAUSE_RECOMPUTE}) {
    SchedulerConfig config = Config(PSM_MAX_UTILIZATION, 8, 32);
    config.pause_policy = policy;
    World w(Pool(6, 6), config);
    w.kv.SetCosts(1.0, 100.0);
    Request* first = w.Add(8, 12);
    Request* second = w.Add(8, 12);
    while (first->state != RequestState::kRetired) w.Step();
    CHECK(second->stats.num_pauses == 1);
    CHECK((w.kv.num_offloaded() == 0) == (policy == PSM_PAUSE_RECOMPUTE));
    while (!w.scheduler.idle()) w.Step();
    CHECK(second->stats.reused_blocks == (policy == PSM_PAUSE_RECOMPUTE ? 1 : 3));
  }
}

// A step does not look through a long line of those who wait for the same.
void TestPutsOffSoManyInAStep() {
  World w(100, Config(PSM_GUARANTEED_NO_EVICT, 3, 64));
  for (int i = 0; i < 10; ++i) w.Add(Tokens(20), 4);
  const auto num_put_off = [&] {
    int n = 0;
    for (const auto& request : w.all) n += request->sched.waits_for != nullptr;
    return n;
  };
  STEP(w, "c1:20");
  CHECK(num_put_off() == 3);
  STEP(w, "c2:1 c3:1 g1");
  CHECK(num_put_off() == 0 && w.scheduler.num_queued() == 7);
}

void TestForEachRemoves() {
  World w(100, Config(PSM_GUARANTEED_NO_EVICT, 2, 64));
  for (int i = 0; i < 3; ++i) w.Add(Tokens(9), 3);
  w.Add(5, 3);
  w.Add(5, 3);
  w.Step();
  CHECK(w.scheduler.running().size() == 2);
  int n = 0;
  w.scheduler.ForEach([&](Request* r) {
    ++n;
    w.End(r);
    w.scheduler.CheckInvariants();
  });
  CHECK(n == 5 && w.scheduler.idle() && w.Step().empty() && w.kv.num_used() == 0);
}

}  // namespace

int main() {
  TestChunks();
  TestTinyBudget();
  TestUnchunked();
  TestBatchLimitAndPriority();
  TestGuaranteedNoEvict();
  TestMaxUtilization();
  TestContextStartsWhole();
  TestPausesByPriority();
  TestRecomputeOutgrowsBudget();
  TestBeginsWithTheCached();
  TestContextRowsComputeAll();
  TestRowsBeyondTheLimit();
  TestPutOff();
  TestPutOffDoesNotHoldUp();
  TestPutOffWithOneThatEnds();
  TestGroup();
  TestEqualProgress();
  TestHalfReadContexts();
  TestDrafts();
  TestDraftsLeaveBlocks();
  TestBeams();
  TestBeamsUnderPressure();
  TestTenants();
  TestShortestOfABurst();
  TestShortestBehindTheHalfRead();
  TestShortestWithinItsLength();
  TestShortestAtMost();
  TestShortestStarvesNobody();
  TestShortestWithinPriorityAndShare();
  TestShortestWithBeams();
  TestShortestToCompute();
  TestShortestAndPutOff();
  TestShortestBehindThePaused();
  TestBlockedHead();
  TestSharedBlocksCountOnce();
  TestContextKeepsItsBlocks();
  TestMissingBlocks();
  TestBlockedHeadFindsItsPrefix();
  TestWaitsForWhatFollowsTheCached();
  TestTurns();
  TestStartsWithItsFirstToken();
  TestPausePolicy();
  TestPutsOffSoManyInAStep();
  TestForEachRemoves();
  return 0;
}
