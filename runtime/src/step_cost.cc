// SPDX-License-Identifier: Apache-2.0
#include "step_cost.h"

namespace plansmith {

void StepCost::Observe(int32_t, int64_t) { w_ += t_ + tt_ + y_ + ty_; }
bool StepCost::known() const { return false; }
double StepCost::Ns(double) const { return 0.0; }
double StepCost::PerTokenNs() const { return 0.0; }

}  // namespace plansmith
