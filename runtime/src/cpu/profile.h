// Where the time of an executor's steps goes: ticks of each phase on each thread.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <time.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cpu/op_cost.h"
#include "cpu/plan.h"
#include "plansmith/plansmith.h"
#if defined(__x86_64__)
#include <x86intrin.h>
#endif

namespace plansmith {
namespace cpu {

// A counter that takes some 10 ns to read and runs at one rate on all cores.
inline uint64_t Ticks() {
#if defined(__x86_64__)
  return __rdtsc();
#elif defined(__aarch64__)
  uint64_t ticks;
  asm volatile("mrs %0, cntvct_el0" : "=r"(ticks));
  return ticks;
#else
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<uint64_t>(t.tv_sec) * 1000000000u + static_cast<uint64_t>(t.tv_nsec);
#endif
}

// The ops that a phase runs, first to last; the first gives it its name.
using PhaseOps = std::vector<OpPart>;

// Allocates in its constructor alone. Each thread of a step writes its own row, without locks; Read
// may run beside a step.
class Profile {
 public:
  // `phases` in the executor's order. The plan must outlive it.
  Profile(const Plan& plan, const std::vector<PhaseOps>& phases, int num_threads);

  // On the thread that runs the step: first of all, and when every thread is through. A step that
  // failed between them does not count. `batch` as psm_executor.step got it.
  void BeginStep(const psm_batch& batch);
  void EndStep(const psm_batch& batch);

  // Between them, on member thread_idx of the pool: it ran (an item of) a phase, or waited for the
  // others behind one.
  void Add(int thread_idx, size_t phase_idx, uint64_t ticks) {
    Increase(&CellOf(thread_idx, phase_idx)->ran, ticks);
  }
  void AddWait(int thread_idx, size_t phase_idx, uint64_t ticks) {
    Increase(&CellOf(thread_idx, phase_idx)->waited, ticks);
  }

  // Returns how many records there are, for each kind of step that was run one of the whole step,
  // then one a phase; writes them unless they are more than `capacity`. Any thread.
  size_t Read(psm_op_profile* ops, size_t capacity) const;

 private:
  using Count = std::atomic<uint64_t>;
  static constexpr int kNumStepKinds = 2;  // PSM_STEPS_...

  struct Cell {
    Count ran{0}, waited{0};  // ticks
  };
  static constexpr size_t kCellsPerLine = 4;
  struct alignas(64) Line {
    Cell cells[kCellsPerLine];
  };
  struct Phase {
    std::string name, kind, weights;
    psm_op_profile record;  // what does not change
    std::vector<UnitCost> costs;
  };
  struct SeenCounts {
    Count positions{0}, pairs{0};
  };
  // Written by the thread that runs the steps.
  struct Steps {
    Count steps{0}, logits_steps{0}, tokens{0}, logits_rows{0}, ticks{0};
    std::unique_ptr<SeenCounts[]> seen;  // [windows]
  };

  // Only one thread writes a count, so no locked instruction is needed.
  static void Increase(Count* count, uint64_t by) {
    count->store(count->load(std::memory_order_relaxed) + by, std::memory_order_relaxed);
  }
  static uint64_t Get(const Count& count) { return count.load(std::memory_order_relaxed); }
  Cell* CellOf(int thread_idx, size_t phase_idx) {
    return CellOf(step_kind_, thread_idx, phase_idx);
  }
  Cell* CellOf(int step_kind, int thread_idx, size_t phase_idx) const {
    const size_t row = static_cast<size_t>(thread_idx * kNumStepKinds + step_kind);
    return &lines_[row * lines_per_row_ + phase_idx / kCellsPerLine]
                .cells[phase_idx % kCellsPerLine];
  }
  Phase Describe(const PhaseOps& ops) const;
  size_t WindowIdx(int32_t window) const;
  void WriteRecords(int step_kind, double ns_per_tick, psm_op_profile* to) const;
  psm_op_profile PhaseRecord(int step_kind, size_t phase_idx, double ns_per_tick) const;
  double NsPerTick() const;

  const Plan& plan_;
  const int num_threads_;
  const uint64_t first_ticks_;
  const int64_t first_ns_;
  std::vector<int32_t> windows_;  // of attention, each once
  std::vector<Phase> phases_;
  size_t lines_per_row_ = 0;
  std::unique_ptr<Line[]> lines_;  // [threads][step kinds][lines_per_row_]
  Steps steps_[kNumStepKinds];
  int step_kind_ = 0;        // of the step that runs
  uint64_t step_begin_ = 0;  // ticks
};

// A thread's way through a step: the time since its last mark goes to what is named. Costs nothing
// but a branch without a profile.
class StepMarks {
 public:
  StepMarks(Profile* profile, int thread_idx)
      : profile_(profile), thread_idx_(thread_idx), last_(profile == nullptr ? 0 : Ticks()) {}
  void Ran(size_t phase_idx) {
    if (profile_ != nullptr) profile_->Add(thread_idx_, phase_idx, SinceLast());
  }
  void Waited(size_t phase_idx) {
    if (profile_ != nullptr) profile_->AddWait(thread_idx_, phase_idx, SinceLast());
  }

 private:
  uint64_t SinceLast() {
    const uint64_t now = Ticks(), passed = now - last_;
    last_ = now;
    return passed;
  }

  Profile* const profile_;
  const int thread_idx_;
  uint64_t last_;
};

}  // namespace cpu
}  // namespace plansmith
