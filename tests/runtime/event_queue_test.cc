// Order, growth, the file descriptor's truth, waking and closing.
//
// SPDX-License-Identifier: Apache-2.0
#include "event_queue.h"

#include <poll.h>

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "check.h"

using plansmith::EventQueue;

namespace {

psm_event Event(uint64_t id, int32_t idx) {
  psm_event event{};
  event.request_id = id;
  event.output_idx = idx;
  return event;
}

bool Readable(const EventQueue& queue) {
  pollfd fd = {queue.fd(), POLLIN, 0};
  return poll(&fd, 1, 0) == 1;
}

void TestOrderAndGrowth() {
  EventQueue queue;
  std::vector<psm_event> out(1000);
  int32_t pushed = 0, taken = 0;
  for (int round = 0; round < 200; ++round) {
    std::vector<psm_event> batch;
    for (int i = 0; i < 1 + round % 23; ++i) batch.push_back(Event(1, pushed++));
    queue.Push(batch);
    CHECK(Readable(queue));
    const int64_t n = queue.Poll(out.data(), static_cast<size_t>(round % 17), 0);
    for (int64_t i = 0; i < n; ++i) CHECK(out[static_cast<size_t>(i)].output_idx == taken++);
  }
  CHECK(pushed - taken > 256);  // it has grown
  while (taken < pushed) {
    CHECK(Readable(queue));
    const int64_t n = queue.Poll(out.data(), 7, 0);
    for (int64_t i = 0; i < n; ++i) CHECK(out[static_cast<size_t>(i)].output_idx == taken++);
  }
  CHECK(!Readable(queue) && queue.Poll(out.data(), 7, 0) == 0);
  queue.Push({});
  CHECK(!Readable(queue));
}

void TestTimeoutWakeClose() {
  EventQueue queue;
  psm_event event;
  const auto begin = std::chrono::steady_clock::now();
  CHECK(queue.Poll(&event, 1, 20) == 0);
  CHECK(std::chrono::steady_clock::now() - begin >= std::chrono::milliseconds(20));
  std::atomic<int> returned{0};
  std::vector<std::thread> waiters;
  for (int i = 0; i < 3; ++i) {
    waiters.emplace_back([&] {
      psm_event mine;
      CHECK(queue.Poll(&mine, 1, -1) == 0);
      ++returned;
    });
  }
  while (returned < 3) {  // a wake before a waiter waits is not remembered: try again
    queue.Wake();
    std::this_thread::yield();
  }
  for (std::thread& waiter : waiters) waiter.join();

  std::thread waiter([&] {
    psm_event mine;
    CHECK(queue.Poll(&mine, 1, -1) == 1 && mine.output_idx == 5);
    CHECK(queue.Poll(&mine, 1, -1) == -1);
  });
  queue.Push({Event(1, 5)});
  queue.Close();
  waiter.join();
  CHECK(Readable(queue) && queue.Poll(&event, 1, 0) == -1);
}

// Logits belong to whoever took their event, and to the queue before (seen by the leak sanitizer).
void TestLogitsThatNobodyTook() {
  EventQueue queue;
  for (int32_t i = 0; i < 300; ++i) {  // it grows
    psm_event event = Event(1, i);
    event.logits = new float[3]{};
    queue.Push({event});
    if (i % 3 != 0) continue;
    CHECK(queue.Poll(&event, 1, 0) == 1);
    psm_logits_free(event.logits);
  }
}

// Two producers' worth of ids, four pollers: each event comes out once, and what one poller takes
// is in order.
void TestManyPollers() {
  EventQueue queue;
  constexpr int32_t kEvents = 20000;
  std::atomic<int64_t> sum{0};
  std::atomic<int32_t> count{0};
  std::vector<std::thread> pollers;
  for (int i = 0; i < 4; ++i) {
    pollers.emplace_back([&] {
      psm_event events[8];
      int32_t last = -1;
      for (;;) {
        const int64_t n = queue.Poll(events, 8, -1);
        if (n < 0) return;
        for (int64_t j = 0; j < n; ++j) {
          CHECK(events[j].output_idx > last);
          last = events[j].output_idx;
          sum += last;
          ++count;
        }
      }
    });
  }
  for (int32_t i = 0; i < kEvents; i += 4) {
    queue.Push({Event(1, i), Event(1, i + 1), Event(1, i + 2), Event(1, i + 3)});
  }
  queue.Close();
  for (std::thread& poller : pollers) poller.join();
  CHECK(count == kEvents && sum == int64_t{kEvents} * (kEvents - 1) / 2);
}

}  // namespace

int main() {
  TestOrderAndGrowth();
  TestTimeoutWakeClose();
  TestLogitsThatNobodyTook();
  TestManyPollers();
  return 0;
}
