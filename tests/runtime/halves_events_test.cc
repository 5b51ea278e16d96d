// When the events of a step come, with executors whose step has two halves: they do not wait for
// anything that may take long, nor for a next step that does not come.
//
// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <chrono>
#include <thread>

#include "check.h"
#include "fake_executor.h"
#include "halves_bench.h"
#include "halves_executor.h"

namespace {

using plansmith::Ask;
using plansmith::HalvesExecutor;

// Waits, in the middle of what it does, until the tokens of all steps before have been seen.
struct WaitingDevice {
  WaitingDevice() {
    fake_executor_init(&fake);
    fake.info.max_adapters = 1, fake.info.max_adapter_rank = 8;
    inner = HalvesExecutor::Table(new HalvesExecutor(fake_executor_table(&fake)));
  }
  ~WaitingDevice() { fake_executor_free(&fake); }

  psm_executor Table() {
    psm_executor table = inner;
    table.self = this;
    table.describe = [](void* s, psm_model_info* i) {
      return At(s)->inner.describe(At(s)->inner.self, i);
    };
    table.open = [](void* s, int32_t n) { return At(s)->inner.open(At(s)->inner.self, n); };
    table.launch = [](void* s, const psm_batch* b) {
      return At(s)->inner.launch(At(s)->inner.self, b);
    };
    table.collect = [](void* s, const psm_step_sampling* sampling, psm_row_sample* samples,
                       const float** logits) {
      if (At(s)->waits_in_collect) At(s)->Wait();
      ++At(s)->num_steps;
      return At(s)->inner.collect(At(s)->inner.self, sampling, samples, logits);
    };
    table.load_adapter = [](void* s, int32_t, const psm_lora_module*, size_t) -> psm_status {
      At(s)->Wait();
      return PSM_OK;
    };
    table.unload_adapter = [](void*, int32_t) -> psm_status { return PSM_OK; };
    table.close = [](void* s) { At(s)->inner.close(At(s)->inner.self); };
    table.copy_blocks = nullptr;
    table.last_error = nullptr;
    return table;
  }

  void Wait() const {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    while (num_seen < num_steps) {
      CHECK(std::chrono::steady_clock::now() < deadline);
      std::this_thread::yield();
    }
  }

  fake_executor fake;
  psm_executor inner;
  bool waits_in_collect = true;
  std::atomic<int32_t> num_seen{0}, num_steps{0};

 private:
  static WaitingDevice* At(void* self) { return static_cast<WaitingDevice*>(self); }
};

// Polls until so many requests have ended, and lets the device see what has come.
void PollToTheEnd(psm_engine* engine, WaitingDevice* device, int32_t num_requests = 1) {
  while (num_requests > 0) {
    psm_event event;
    size_t n;
    CHECK_OK(psm_engine_poll(engine, &event, 1, 30000, &n));
    CHECK(n == 1);
    if (event.kind == PSM_EVENT_TOKEN) ++device->num_seen;
    num_requests -= event.kind == PSM_EVENT_FINISHED;
  }
}

// An adapter that is being loaded holds the engine up, but not the events of the step before.
void TestEventsComeBeforeAnAdapterIsLoaded() {
  WaitingDevice device;
  device.waits_in_collect = false;
  const psm_executor table = device.Table();
  psm_engine* engine;
  CHECK_OK(psm_engine_create(&table, nullptr, &engine));
  Ask ask;
  ask.request.max_tokens = 100;
  uint64_t request_id;
  CHECK_OK(psm_engine_submit(engine, &ask.Get(), &request_id));
  std::thread loader([&] {
    const float zeros[64] = {};
    const psm_lora_module module = {0, PSM_LORA_ATTN_Q, 1, 8, 8, 1.0f, zeros, zeros};
    for (int i = 0; i < 20; ++i) {
      CHECK_OK(psm_engine_load_adapter(engine, 1, &module, 1));
      CHECK_OK(psm_engine_unload_adapter(engine, 1));
    }
  });
  PollToTheEnd(engine, &device);
  loader.join();
  psm_engine_destroy(engine);
}

// While a step waits in collect, the events of the one before it can be polled: a client that waits
// for them before it lets the device go on is not held up.
void TestEventsComeWhileTheDeviceWorks() {
  WaitingDevice device;
  const psm_executor table = device.Table();
  psm_engine* engine;
  CHECK_OK(psm_engine_create(&table, nullptr, &engine));
  Ask ask;
  for (int round = 0; round < 3; ++round) {  // idle between them: the last events do not wait
    uint64_t id;
    CHECK_OK(psm_engine_submit(engine, &ask.Get(), &id));
    PollToTheEnd(engine, &device);
    // Whoever has seen the end sees the state behind it.
    psm_engine_stats stats;
    stats.struct_size = PSM_ENGINE_STATS_SIZE;
    CHECK_OK(psm_engine_get_stats(engine, &stats));
    CHECK(stats.num_completed_requests == static_cast<uint64_t>(round) + 1);
    CHECK(stats.num_active_requests == 0 && stats.used_num_blocks == 0);
    CHECK(stats.num_generated_tokens == 20u * static_cast<uint64_t>(round + 1));
    CHECK(psm_engine_cancel(engine, id) == PSM_ERROR_NOT_FOUND);
    psm_iteration_stats records[64];
    size_t n;
    CHECK_OK(psm_engine_iteration_stats(engine, records, 64, &n));
    CHECK(n == 20 && records[n - 1].num_completed_requests == 1);
  }
  psm_engine_destroy(engine);
}

// A guide that is asked about drafts holds the launch up, but not the events of the step before.
void TestEventsComeBeforeAGuideIsAsked() {
  WaitingDevice device;
  const psm_executor table = device.Table();
  psm_engine* engine;
  CHECK_OK(psm_engine_create(&table, nullptr, &engine));
  Ask plain, guided;
  plain.request.max_tokens = 100;
  uint64_t id;
  CHECK_OK(psm_engine_submit(engine, &plain.Get(), &id));
  while (device.num_steps == 0) std::this_thread::yield();
  psm_guide guide{};
  guide.struct_size = PSM_GUIDE_SIZE;
  guide.self = &device;
  guide.fill_mask = [](void* self, const int32_t*, int32_t, uint32_t* mask) -> psm_status {
    static_cast<const WaitingDevice*>(self)->Wait();
    for (int32_t word = 0; word < 4; ++word) mask[word] = ~uint32_t{0};
    return PSM_OK;
  };
  guide.accept = [](void*, const int32_t*, int32_t) -> psm_status { return PSM_OK; };
  guide.close = [](void*) {};
  guided.request.guide = &guide;
  guided.draft = {1, 2, 3};
  guided.end_ids = {0};
  CHECK_OK(psm_engine_submit(engine, &guided.Get(), &id));
  PollToTheEnd(engine, &device, 2);
  psm_engine_destroy(engine);
}

}  // namespace

int main() {
  TestEventsComeWhileTheDeviceWorks();
  TestEventsComeBeforeAnAdapterIsLoaded();
  TestEventsComeBeforeAGuideIsAsked();
  return 0;
}
