// Who is next, against a naive model; the heap underneath.
//
// SPDX-License-Identifier: Apache-2.0
#include "waiting_queue.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <vector>

#include "check.h"
#include "request.h"

using namespace plansmith;

namespace {

struct Item {
  int32_t value = 0;
  HeapLinks<Item> links;
};

struct ByValue {
  static HeapLinks<Item>& Links(Item* item) { return item->links; }
  static bool Before(const Item* a, const Item* b) { return a->value < b->value; }
};
using Heap = LeftistHeap<Item, ByValue>;

void TestHeap() {
  std::mt19937 random(5);
  for (int round = 0; round < 50; ++round) {
    std::vector<Item> items(300);
    for (size_t i = 0; i < items.size(); ++i) items[i].value = static_cast<int32_t>(i);
    std::shuffle(items.begin(), items.end(), random);
    std::set<int32_t> in;
    Item* root = nullptr;
    for (int step = 0; step < 2000; ++step) {
      Item* item = &items[random() % items.size()];
      if (in.insert(item->value).second) {
        Heap::Push(&root, item);
      } else {
        in.erase(item->value);
        Heap::Remove(&root, item);
      }
      CHECK((root == nullptr) == in.empty() && (in.empty() || root->value == *in.begin()));
      // log2 of what is in it.
      CHECK(root == nullptr || (1u << root->links.depth) <= 2 * (in.size() + 1));
      if (step % 50 != 0) continue;
      std::set<int32_t> seen;
      Heap::ForEach(root, [&](const Item* i) { CHECK(seen.insert(i->value).second); });
      CHECK(seen == in);
    }
  }
}

// Arrival order is the common case: it must not make a heap deep for what walks it.
void TestHeapOfMany() {
  std::vector<Item> items(200000);
  Item* root = nullptr;
  for (size_t i = 0; i < items.size(); ++i) {
    items[i].value = static_cast<int32_t>(i);
    Heap::Push(&root, &items[i]);
  }
  size_t n = 0;
  Heap::ForEach(root, [&](const Item*) { ++n; });
  CHECK(n == items.size());
  for (size_t i = 0; i < items.size(); ++i) {
    CHECK(root == &items[i]);
    Heap::Remove(&root, root);
  }
  CHECK(root == nullptr);
}

struct Model {
  Model(int32_t slots, float share)
      : max_slots(std::max(1, static_cast<int32_t>(std::ceil(slots * share - 1e-6f)))),
        by_tenant(share < 1.0f) {}

  uint64_t Tenant(const Request& r) const { return by_tenant ? r.tenant_id : 0; }

  // The rule, word for word.
  Request* Next() {
    std::vector<Request*> top;
    for (Request* r : waiting) {
      if (!top.empty() && r->priority < top[0]->priority) continue;
      if (!top.empty() && r->priority > top[0]->priority) top.clear();
      top.push_back(r);
    }
    std::sort(top.begin(), top.end(), [](Request* a, Request* b) {
      return std::make_pair(a->sched.rank, a->id) < std::make_pair(b->sched.rank, b->id);
    });
    std::map<uint64_t, Request*> first_of;
    for (Request* r : top) first_of.emplace(Tenant(*r), r);
    Request* fewest = nullptr;
    for (Request* r : top) {
      const uint64_t tenant = Tenant(*r);
      if (first_of[tenant] != r) continue;
      const int32_t held = slots[tenant];
      if (held == 0 || held + r->width() <= max_slots) return r;
      if (fewest == nullptr || held < slots[Tenant(*fewest)]) fewest = r;
    }
    return fewest;
  }

  int32_t max_slots;
  bool by_tenant;
  std::set<Request*> waiting;
  std::map<uint64_t, int32_t> slots;
};

std::unique_ptr<Request> MakeRequest(uint64_t id, std::mt19937* random) {
  auto request = std::make_unique<Request>();
  request->id = id;
  request->priority = 0.5f * static_cast<float>((*random)() % 3);
  request->tenant_id = (*random)() % 4;
  if ((*random)() % 8 == 0) {
    BeamParams params;
    params.width = 3;
    request->beams = std::make_unique<BeamSearch>(params, 4, 1, 1, 0);
  }
  return request;
}

// has_ranks: not by arrival alone.
void TestAgainstModel(float share, bool has_ranks, uint32_t seed) {
  std::mt19937 random(seed);
  WaitingQueue queue(8, share);
  Model model(8, share);
  std::vector<std::unique_ptr<Request>> all;
  std::vector<Request*> running;
  uint64_t next_id = 0;
  const auto forget = [&](Request* r) {
    queue.Leave(r);
    all.erase(std::find_if(all.begin(), all.end(), [&](const auto& p) { return p.get() == r; }));
  };
  const auto stop = [&](size_t i) {
    Request* r = running[i];
    running.erase(running.begin() + static_cast<ptrdiff_t>(i));
    queue.AddSlots(*r, -r->width());
    model.slots[model.Tenant(*r)] -= r->width();
    return r;
  };
  for (int step = 0; step < 3000; ++step) {
    const uint32_t what = static_cast<uint32_t>(random() % 8);
    Request* next = queue.Next();
    CHECK(next == model.Next() && queue.empty() == model.waiting.empty());
    if (what < 3 && all.size() < 40) {
      all.push_back(MakeRequest(++next_id, &random));
      if (has_ranks) all.back()->sched.rank = 1 + next_id / 4 + random() % 10;
      queue.Reserve(all.size());
      queue.Join(all.back().get());
      queue.Push(all.back().get());
      model.waiting.insert(all.back().get());
    } else if (what < 5 && next != nullptr && running.size() < 8) {
      queue.Remove(next);
      model.waiting.erase(next);
      queue.AddSlots(*next, next->width());
      model.slots[model.Tenant(*next)] += next->width();
      running.push_back(next);
    } else if (what == 5 && !running.empty()) {
      forget(stop(random() % running.size()));
    } else if (what == 6 && !running.empty()) {  // a pause
      Request* r = stop(random() % running.size());
      r->sched.rank = 0;
      queue.Push(r);
      model.waiting.insert(r);
    } else if (what == 7 && !model.waiting.empty()) {  // a cancel
      auto at = model.waiting.begin();
      std::advance(at, random() % model.waiting.size());
      Request* r = *at;
      model.waiting.erase(at);
      queue.Remove(r);
      forget(r);
    }
    size_t num_waiting = 0;
    queue.CheckInvariants([&](const Request* r) {
      ++num_waiting;
      CHECK(model.waiting.count(const_cast<Request*>(r)) == 1);
    });
    CHECK(num_waiting == model.waiting.size());
  }
}

// Those put off come back when their part is there, in whatever order they came.
void TestPutOff() {
  std::mt19937 random(1);
  WaitingQueue queue(8, 1.0f);
  std::vector<std::unique_ptr<Request>> all;
  for (uint64_t id = 1; id <= 21; ++id) {
    all.push_back(MakeRequest(id, &random));
    queue.Reserve(all.size());
    queue.Join(all.back().get());
  }
  Request* maker = all[0].get();
  std::vector<int32_t> until;
  for (int32_t i = 1; i <= 20; ++i) until.push_back(i * 4);
  std::shuffle(until.begin(), until.end(), random);
  for (size_t i = 1; i <= 20; ++i) WaitingQueue::PutOff(all[i].get(), maker, until[i - 1]);
  WaitingQueue::Forget(all[7].get());
  const auto waiting = [&] {
    std::set<const Request*> found;
    queue.CheckInvariants([&](const Request* r) { found.insert(r); });
    return found;
  };
  for (int32_t computed : {3, 4, 41}) {
    maker->num_computed = computed;
    queue.TakeBack(maker, false);
    std::set<const Request*> expected;
    for (size_t i = 1; i <= 20; ++i) {
      if (i != 7 && until[i - 1] <= computed) expected.insert(all[i].get());
    }
    CHECK(waiting() == expected);
  }
  queue.TakeBack(maker, true);
  CHECK(waiting().size() == 19 && maker->sched.put_off == nullptr);
}

// Who comes back from being put off is where it would be had it waited: rank first, then arrival.
void TestPutOffKeepsRank() {
  WaitingQueue queue(8, 1.0f);
  queue.Reserve(6);
  std::vector<std::unique_ptr<Request>> all;
  for (const uint64_t rank : {9, 4, 7, 4, 2, 7}) {
    all.push_back(std::make_unique<Request>());
    all.back()->id = all.size();
    all.back()->sched.rank = rank;
    queue.Join(all.back().get());
    queue.Push(all.back().get());
  }
  Request* maker = all[4].get();
  queue.Remove(maker);
  for (const size_t i : {1u, 5u}) {
    queue.Remove(all[i].get());
    WaitingQueue::PutOff(all[i].get(), maker, 8);
  }
  CHECK(queue.Next() == all[3].get());
  queue.TakeBack(maker, true);
  for (const size_t i : {1u, 3u, 2u, 5u, 0u}) {
    CHECK(queue.Next() == all[i].get());
    queue.Remove(all[i].get());
  }
  CHECK(queue.empty());
}

}  // namespace

int main() {
  TestHeap();
  TestHeapOfMany();
  uint32_t seed = 0;
  for (float share : {0.1f, 0.3f, 0.5f, 0.99f, 1.0f}) {
    for (int i = 0; i < 10; ++i) TestAgainstModel(share, i % 2 == 0, ++seed);
  }
  TestPutOff();
  TestPutOffKeepsRank();
  return 0;
}
