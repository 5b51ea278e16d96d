// SPDX-License-Identifier: Apache-2.0
#include "speculator.h"

namespace plansmith {

struct Speculator::Impl {};
Speculator::Speculator(const EngineConfig&, KvCache*, Sampler*, GuideThread*) {}
Speculator::~Speculator() = default;
void Speculator::PlanLengths(const std::vector<Request*>&) {}
DraftOutcome Speculator::Draft(StepPlan*) { return {}; }
void Speculator::Observe(Request*, int32_t, int32_t) {}
void Speculator::ObserveStep(int32_t, int64_t) {}

}  // namespace plansmith
