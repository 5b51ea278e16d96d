// The profile of a cpu executor through the C API: counts that are exact, times that fit into the
// steps', the same logits with and without, and tables and options of older callers.
//
// SPDX-License-Identifier: Apache-2.0
#include "cpu/profile.h"

#include <string.h>

#include <atomic>
#include <cmath>
#include <string>
#include <thread>

#include "clock.h"
#include "count_allocations.h"
#include "driver.h"
#include "isas.h"
#include "tiny_model.h"

using namespace plansmith::cpu;

namespace {

using Sequences = std::vector<Driver::Sequence>;

std::vector<psm_op_profile> Read(const psm_executor& executor) {
  size_t num = 0;
  const psm_status status = executor.profile(executor.self, nullptr, 0, &num);
  CHECK(status == (num == 0 ? PSM_OK : PSM_ERROR_BUFFER_TOO_SMALL));
  std::vector<psm_op_profile> ops(num);
  CHECK_OK(executor.profile(executor.self, ops.data(), ops.size(), &num));
  CHECK(num == ops.size());
  return ops;
}

Sequences TwoSequences() {
  Sequences sequences(2);
  for (int32_t i = 0; i < 40; ++i) {
    for (auto& s : sequences) s.ids.push_back((7 * i) % 83);
  }
  return sequences;
}

// A prompt of 25 and one of 9, then three steps of one token each.
void RunSteps(Driver* driver, Sequences* sequences) {
  driver->Step(sequences, {25, 9}, true);
  for (int i = 0; i < 3; ++i) driver->Step(sequences, {1, 1});
}

const psm_op_profile& StepOf(const std::vector<psm_op_profile>& ops, int32_t kind) {
  for (const psm_op_profile& op : ops) {
    if (op.step_kind == kind && strcmp(op.kind, "step") == 0) return op;
  }
  CHECK(false);
  return ops[0];
}

// What all ops of the plan take by arithmetic, whatever phases they run in.
OpCost CostOfPlan(const std::string& path, const StepSums& steps, const Seen& all,
                  const Seen& window) {
  const auto plan = Plan::Open(path);
  OpCost sum;
  const auto add = [&](const OpRecord& op, uint32_t code) {
    const UnitCost unit = CostOf({&op, code}, *plan);
    const OpCost cost = Total(unit, steps, unit.window == 0 ? all : window);
    sum.bytes += cost.bytes;
    sum.activation_bytes += cost.activation_bytes;
    sum.operations += cost.operations;
  };
  for (uint32_t i = 0; i < plan->header().num_ops; ++i) {
    const OpRecord& op = plan->op(i);
    add(op, op.code);
    if (op.code == kOpLinear && op.i[1] != kInputFloat) add(op, kCodeQuantize);
    if (op.code == kOpPagedAttention) add(op, kCodeWriteKv);
  }
  return sum;
}

void CheckStep(const psm_op_profile& step, const OpCost& want, uint64_t calls, uint64_t rows) {
  CHECK(step.calls == calls && step.rows == rows);
  CHECK(step.bytes == want.bytes && step.operations == want.operations);
  CHECK(step.activation_bytes == want.activation_bytes);
}

void TestCountsAreExact(const std::string& path) {
  Driver driver(path, nullptr, 2, 40, 1, 1);
  Sequences sequences = TwoSequences();
  CHECK(Read(driver.executor).empty());
  RunSteps(&driver, &sequences);
  const std::vector<psm_op_profile> ops = Read(driver.executor);
  // Positions 0..24 see 1..25 each, 0..8 see 1..9; with a window of 20 the last 5 see 20.
  CheckStep(StepOf(ops, PSM_STEPS_CONTEXT),
            CostOfPlan(path, {1, 1, 34, 2}, {25 + 9, 25 * 26 / 2 + 9 * 10 / 2},
                       {25 + 9, 20 * 21 / 2 + 5 * 20 + 9 * 10 / 2}),
            1, 34);
  const uint64_t held = 26 + 27 + 28 + 10 + 11 + 12, in_window = 3 * 20 + 10 + 11 + 12;
  CheckStep(StepOf(ops, PSM_STEPS_DECODE),
            CostOfPlan(path, {3, 3, 6, 6}, {held, held}, {in_window, in_window}), 3, 6);
}

void TestRecordsSayWhatTheyAre(const std::string& path) {
  Driver driver(path, nullptr, 1, 40, 1, 1);
  Sequences sequences = TwoSequences();
  RunSteps(&driver, &sequences);
  const std::vector<psm_op_profile> ops = Read(driver.executor);
  CHECK(strcmp(ops[0].kind, "step") == 0 && ops[0].name[0] == '\0');
  size_t num_products = 0;
  for (const psm_op_profile& op : ops) {
    if (op.out_features == 0) continue;
    CHECK(strstr(op.kind, "linear") != nullptr && strcmp(op.weights, "int8") == 0);
    CHECK(op.arithmetic == PSM_ARITHMETIC_INT8);
    if (strcmp(op.name, "layers.1.down") == 0) {
      CHECK(op.out_features == 40 && op.in_features == 56);
      ++num_products;
    }
    // What is behind the gather runs on the rows with logits.
    if (strcmp(op.name, "lm_head") == 0) {
      CHECK(op.rows == (op.step_kind == PSM_STEPS_DECODE ? 6 : 2));
    }
  }
  CHECK(num_products >= 2);  // of each kind of step
}

void TestTimesFitIntoTheSteps(const std::string& path) {
  for (int32_t threads : {1, 2, 3}) {
    Driver driver(path, nullptr, threads, 40, 1, 1);
    Sequences sequences = TwoSequences();
    const int64_t begin = plansmith::NowNs();
    RunSteps(&driver, &sequences);
    const std::vector<psm_op_profile> ops = Read(driver.executor);
    const double wall = static_cast<double>(plansmith::NowNs() - begin);
    double all_steps = 0;
    for (int32_t kind : {PSM_STEPS_DECODE, PSM_STEPS_CONTEXT}) {
      const psm_op_profile& step = StepOf(ops, kind);
      double ran = 0, waited = 0;
      for (const psm_op_profile& op : ops) {
        if (op.step_kind != kind || &op == &step) continue;
        ran += static_cast<double>(op.time_ns);
        waited += static_cast<double>(op.wait_ns);
      }
      CHECK(ran > 0 && step.time_ns > 0);
      CHECK(static_cast<double>(step.wait_ns) == waited);
      // All marks of a thread lie within the step; 1 % for counters that are not quite one.
      CHECK(ran + waited <= 1.01 * static_cast<double>(step.time_ns));
      all_steps += static_cast<double>(step.time_ns);
    }
    CHECK(all_steps <= 1.01 * wall);
  }
}

void TestLogitsAreTheSame(const std::string& path) {
  std::vector<float> logits[2];
  for (int32_t profile : {0, 1}) {
    Driver driver(path, nullptr, 2, 40, 1, profile);
    CHECK((driver.executor.profile != nullptr) == (profile == 1));
    Sequences sequences = TwoSequences();
    RunSteps(&driver, &sequences);
    logits[profile] = sequences[0].logits;
  }
  CHECK(logits[0].size() == logits[1].size());
  CHECK(memcmp(logits[0].data(), logits[1].data(), logits[0].size() * sizeof(float)) == 0);
}

void TestReadingWhileStepsRun(const std::string& path) {
  Driver driver(path, nullptr, 2, 40, 1, 1);
  std::atomic<bool> stop{false};
  std::thread reader([&] {
    uint64_t last = 0;
    std::vector<psm_op_profile> ops(500);
    while (!stop) {
      size_t num = 0;
      CHECK_OK(driver.executor.profile(driver.executor.self, ops.data(), ops.size(), &num));
      if (num == 0) continue;
      CHECK(ops[0].calls >= last || ops[0].step_kind == PSM_STEPS_DECODE);
      if (ops[0].step_kind == PSM_STEPS_DECODE) last = std::max(last, ops[0].calls);
    }
  });
  for (int i = 0; i < 20; ++i) {
    Sequences sequences = TwoSequences();
    RunSteps(&driver, &sequences);
    for (auto& s : sequences) driver.Free(&s);
  }
  stop = true;
  reader.join();
  CHECK(StepOf(Read(driver.executor), PSM_STEPS_DECODE).calls == 60);
}

void TestAStepThatFailsDoesNotCount(const std::string& path) {
  Driver driver(path, nullptr, 1, 40, 1, 1);
  Sequences sequences = TwoSequences();
  RunSteps(&driver, &sequences);
  psm_batch batch = {};
  batch.struct_size = PSM_BATCH_SIZE;
  batch.num_tokens = batch.num_seqs = 1 << 20;
  const float* logits;
  CHECK(driver.executor.step(driver.executor.self, &batch, &logits) != PSM_OK);
  CHECK(StepOf(Read(driver.executor), PSM_STEPS_DECODE).calls == 3);
}

void TestItAllocatesWhenItIsMadeAlone(const std::string& path) {
  const auto plan = Plan::Open(path);
  std::vector<PhaseOps> phases;
  for (uint32_t i = 0; i < plan->header().num_ops; ++i) {
    phases.push_back({{&plan->op(i), plan->op(i).code}});
  }
  Profile profile(*plan, phases, 2);
  std::vector<psm_op_profile> ops(2 * (phases.size() + 1));
  const int32_t one = 1;
  psm_batch batch = {};
  batch.num_tokens = batch.num_seqs = batch.num_logits_rows = 1;
  batch.query_lens = batch.kv_lens = &one;
  const int64_t before = num_news;
  for (int i = 0; i < 3; ++i) {
    profile.BeginStep(batch);
    for (size_t phase = 0; phase < phases.size(); ++phase) {
      profile.Add(0, phase, 100);
      profile.Add(1, phase, 300);
      profile.AddWait(0, phase, 200);
    }
    profile.EndStep(batch);
  }
  CHECK(profile.Read(ops.data(), ops.size()) == phases.size() + 1);
  CHECK(num_news == before);
  // Ticks of both threads, over their number; 200 each in three steps, and half the waits.
  CHECK(ops[1].time_ns > 0 && ops[1].calls == 3);
  const double ratio = static_cast<double>(ops[1].wait_ns) / static_cast<double>(ops[1].time_ns);
  CHECK(std::abs(ratio - 0.5) < 0.1);  // whole nanoseconds of some 200
}

void TestArguments(const std::string& path) {
  Driver driver(path, nullptr, 1, 40, 1, 1);
  const psm_executor& e = driver.executor;
  Sequences sequences = TwoSequences();
  RunSteps(&driver, &sequences);
  size_t num = 7;
  CHECK(e.profile(e.self, nullptr, 3, &num) == PSM_ERROR_INVALID_ARGUMENT && num == 0);
  CHECK(e.profile(e.self, nullptr, 0, nullptr) == PSM_ERROR_INVALID_ARGUMENT);
  CHECK(e.profile(e.self, nullptr, 0, &num) == PSM_ERROR_BUFFER_TOO_SMALL && num > 2);
  std::vector<psm_op_profile> ops(num);
  memset(ops.data(), 0x55, num * sizeof(psm_op_profile));
  const psm_op_profile untouched = ops[0];
  CHECK(e.profile(e.self, ops.data(), ops.size() - 1, &num) == PSM_ERROR_BUFFER_TOO_SMALL);
  CHECK(num == ops.size() && memcmp(&ops[0], &untouched, sizeof(untouched)) == 0);
  // It is not the steps' failure.
  CHECK(e.last_error(e.self) == nullptr);
}

// Tables of callers that were compiled before there was a profile end before it.
void TestOlderCallers(const std::string& path) {
  psm_cpu_options options;
  memset(&options, 0x55, sizeof(options));
  psm_cpu_options_init(&options);
  const size_t old_options = PSM_SIZE_UP_TO_(psm_cpu_options, max_adapter_rank);
  CHECK(options.struct_size == old_options && options.profile == 0x55555555);
  psm_executor executor;
  memset(&executor, 0x55, sizeof(executor));
  const psm_executor before = executor;
  const size_t old_table = PSM_SIZE_UP_TO_(psm_executor, now_ns);
  const psm_cpu_options* given[] = {nullptr, &options};
  for (const psm_cpu_options* one : given) {
    CHECK_OK(psm_cpu_executor_create(path.c_str(), one, &executor));
    CHECK(executor.struct_size == old_table);
    CHECK(memcmp(reinterpret_cast<const char*>(&executor) + old_table,
                 reinterpret_cast<const char*>(&before) + old_table,
                 sizeof(executor) - old_table) == 0);
    executor.close(executor.self);
  }
  options.struct_size = PSM_SIZE_UP_TO_(psm_cpu_options, profile);
  options.weights = PSM_WEIGHTS_MAPPED;
  options.profile = 0;
  CHECK_OK(psm_cpu_executor_create(path.c_str(), &options, &executor));
  CHECK(executor.struct_size == PSM_EXECUTOR_SIZE && executor.profile == nullptr);
  CHECK(executor.launch == nullptr && executor.collect == nullptr);
  executor.close(executor.self);
  options.profile = 2;
  CHECK(psm_cpu_executor_create(path.c_str(), &options, &executor) == PSM_ERROR_INVALID_ARGUMENT);
  CHECK(strstr(psm_last_error(), "profile is 2") != nullptr);
  options.profile = 1;
  options.weights = 3;
  CHECK(psm_cpu_executor_create(path.c_str(), &options, &executor) == PSM_ERROR_INVALID_ARGUMENT);
  CHECK(strstr(psm_last_error(), "weights is 3") != nullptr);
}

void TestTheEngineHandsItOut(const std::string& path) {
  psm_cpu_options options = {};
  psm_cpu_options_init(&options);
  options.struct_size = PSM_CPU_OPTIONS_SIZE;
  options.weights = PSM_WEIGHTS_AUTO;
  for (int32_t profile : {0, 1}) {
    options.profile = profile;
    psm_executor executor;
    psm_engine* engine;
    CHECK_OK(psm_cpu_executor_create(path.c_str(), &options, &executor));
    psm_engine_options engine_options;
    psm_engine_options_init(&engine_options);
    engine_options.manual_step = 1;
    CHECK_OK(psm_engine_create(&executor, &engine_options, &engine));
    psm_request request;
    psm_request_init(&request);
    const int32_t ids[] = {1, 2, 3};
    request.prompt_ids = ids;
    request.num_prompt_ids = 3;
    request.max_tokens = 4;
    uint64_t id;
    CHECK_OK(psm_engine_submit(engine, &request, &id));
    for (int32_t did_work = 1; did_work != 0;) CHECK_OK(psm_engine_step(engine, &did_work));
    std::vector<psm_op_profile> ops(500);
    size_t num = 9;
    const psm_status status = psm_engine_profile(engine, ops.data(), ops.size(), &num);
    CHECK(psm_engine_profile(nullptr, ops.data(), 1, &num) == PSM_ERROR_INVALID_ARGUMENT);
    if (profile == 0) {
      CHECK(status == PSM_ERROR_UNSUPPORTED);
    } else {
      CHECK_OK(psm_engine_profile(engine, ops.data(), ops.size(), &num));
      ops.resize(num);
      CHECK(StepOf(ops, PSM_STEPS_CONTEXT).calls == 1);
      CHECK(StepOf(ops, PSM_STEPS_DECODE).calls == 3);
      CHECK(psm_engine_profile(engine, ops.data(), 1, &num) == PSM_ERROR_BUFFER_TOO_SMALL);
      CHECK(num == ops.size() && strstr(psm_last_error(), "the array takes 1") != nullptr);
      CHECK(psm_engine_profile(engine, nullptr, 1, &num) == PSM_ERROR_INVALID_ARGUMENT);
      CHECK(psm_engine_profile(engine, ops.data(), 1, nullptr) == PSM_ERROR_INVALID_ARGUMENT);
    }
    psm_engine_destroy(engine);
  }
}

psm_status FailToProfile(void*, psm_op_profile*, size_t, size_t* num_ops) {
  *num_ops = 3;
  return PSM_ERROR_INTERNAL;
}

// An executor of somebody else's may fail as it likes: that is the executor's failure.
void TestAnotherExecutorsFailure(const std::string& path) {
  psm_executor executor;
  psm_cpu_options options = {};
  psm_cpu_options_init(&options);
  options.struct_size = PSM_CPU_OPTIONS_SIZE;
  options.weights = PSM_WEIGHTS_AUTO;
  options.profile = 0;
  CHECK_OK(psm_cpu_executor_create(path.c_str(), &options, &executor));
  executor.profile = FailToProfile;
  psm_engine* engine;
  CHECK_OK(psm_engine_create(&executor, nullptr, &engine));
  psm_op_profile op;
  size_t num;
  CHECK(psm_engine_profile(engine, &op, 1, &num) == PSM_ERROR_EXECUTOR);
  CHECK(psm_last_error()[0] != '\0');
  psm_engine_destroy(engine);
}

void TestPeaks() {
  psm_cpu_peaks peaks = {};
  CHECK(psm_cpu_measure_peaks(1, nullptr, nullptr) == PSM_ERROR_INVALID_ARGUMENT);
  CHECK(psm_cpu_measure_peaks(1, nullptr, &peaks) == PSM_ERROR_INVALID_ARGUMENT);  // no size
  peaks.struct_size = PSM_CPU_PEAKS_SIZE;
  CHECK(psm_cpu_measure_peaks(-1, nullptr, &peaks) == PSM_ERROR_INVALID_ARGUMENT);
  CHECK(psm_cpu_measure_peaks(1, "sse9", &peaks) == PSM_ERROR_INVALID_ARGUMENT);
  CHECK(peaks.read_bytes_per_s == 0);
  for (const KernelTable* kernels : UsableTables()) {  // what a table has no use for is no peak
    CHECK_OK(psm_cpu_measure_peaks(1, kernels->name, &peaks));
    CHECK((peaks.bf16_ops_per_s > 0) == kernels->has_bf16_dots);
  }
  CHECK_OK(psm_cpu_measure_peaks(1, nullptr, &peaks));
  CHECK(peaks.num_threads == 1 && peaks.struct_size == PSM_CPU_PEAKS_SIZE);
  CHECK(peaks.read_bytes_per_s > 0 && peaks.read_sustained_bytes_per_s > 0);
  CHECK(peaks.f32_ops_per_s >= 0 && peaks.int8_ops_per_s >= 0 && peaks.bf16_ops_per_s >= 0);
}

}  // namespace

int main() {
  TinyShape shape;
  shape.dtype = kI8;
  TinyModel model(shape);
  const TempFile file;
  file.Write(model.plan.Bytes());
  TestCountsAreExact(file.path());
  TestRecordsSayWhatTheyAre(file.path());
  TestTimesFitIntoTheSteps(file.path());
  TestLogitsAreTheSame(file.path());
  TestReadingWhileStepsRun(file.path());
  TestAStepThatFailsDoesNotCount(file.path());
  TestItAllocatesWhenItIsMadeAlone(file.path());
  TestArguments(file.path());
  TestOlderCallers(file.path());
  TestTheEngineHandsItOut(file.path());
  TestAnotherExecutorsFailure(file.path());
  TestPeaks();
  return 0;
}
