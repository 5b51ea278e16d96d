// The regression of step times: it finds what made the times, whatever was noise.
//
// SPDX-License-Identifier: Apache-2.0
#include "step_cost.h"

#include <cmath>
#include <random>

#include "check.h"

namespace {

using plansmith::StepCost;

bool Near(double got, double want, double share) { return std::abs(got - want) <= share * want; }

void TestNothingIsKnown() {
  StepCost cost;
  CHECK(!cost.known() && !cost.any());
  CHECK(cost.Ns(1) == 0.0 && cost.Ns(1000) == 0.0 && cost.PerTokenNs() == 0.0);
}

// One size tells nothing about others: no price of a token is made up.
void TestOneSize() {
  StepCost cost;
  for (int i = 0; i < 100; ++i) cost.Observe(8, 5000);
  CHECK(cost.any() && !cost.known());
  CHECK(Near(cost.Ns(8), 5000, 1e-9) && Near(cost.Ns(1), 5000, 1e-9));
  CHECK(Near(cost.Ns(512), 5000, 1e-9) && cost.PerTokenNs() == 0.0);
}

void TestLine() {
  for (const double per_token : {0.0, 10.0, 3000.0}) {
    std::mt19937 random(3);
    StepCost cost;
    for (int i = 0; i < 400; ++i) {
      const int32_t n = 1 + static_cast<int32_t>(random() % 64);
      const double noise = 0.9 + 0.2 * static_cast<double>(random() % 1001) / 1000.0;
      cost.Observe(n, std::llround((100000.0 + per_token * n) * noise));
    }
    CHECK(cost.known());
    for (const int32_t n : {1, 2, 5, 17, 64}) CHECK(Near(cost.Ns(n), 100000 + per_token * n, 0.1));
    if (per_token == 3000.0) CHECK(Near(cost.PerTokenNs(), 3000.0, 0.15));
  }
}

// Flat up to 64 tokens, then in proportion: both ends are right, and neither pulls at the other.
void TestRoofline() {
  StepCost cost;
  const auto time = [](double n) { return std::max(1e6, 1e6 / 64 * n); };
  std::mt19937 random(5);
  for (int i = 0; i < 2000; ++i) {
    const int32_t n = 1 << (random() % 11);
    cost.Observe(n, std::llround(time(n)));
  }
  for (const int32_t n : {1, 2, 8, 16, 32, 256, 512, 1024}) CHECK(Near(cost.Ns(n), time(n), 0.15));
  CHECK(cost.Ns(9) - cost.Ns(1) < 0.02 * cost.Ns(1));
  CHECK(Near(cost.Ns(1024) - cost.Ns(1000), time(1024) - time(1000), 0.2));
}

void TestForgets() {
  StepCost cost;
  for (int i = 0; i < 1000; ++i) cost.Observe(1 + i % 8, 1000 + 100 * (1 + i % 8));
  for (int i = 0; i < 2000; ++i) cost.Observe(1 + i % 8, 2000 + 50 * (1 + i % 8));
  CHECK(Near(cost.Ns(1), 2050, 0.02) && Near(cost.Ns(8), 2400, 0.02));
}

// A process that took the core for a thousand times as long changes an estimate by little, a
// machine that has become slower is believed after some steps.
void TestOutliers() {
  StepCost cost;
  for (int i = 0; i < 200; ++i) cost.Observe(1 + i % 8, 10000);
  cost.Observe(4, 10000000);
  CHECK(cost.Ns(4) < 1.2 * 10000);
  for (int i = 0; i < 1200; ++i) cost.Observe(1 + i % 8, 1000000);
  CHECK(Near(cost.Ns(1), 1000000, 0.05));
  CHECK(Near(cost.Ns(4), 1000000, 0.05));
}

// Times and sizes at the ends of their types, in any order: finite, never negative.
void TestAnything() {
  std::mt19937_64 random(11);
  StepCost cost;
  for (int i = 0; i < 20000; ++i) {
    const int32_t n = static_cast<int32_t>(random() >> (33 + random() % 31));
    const int64_t ns = static_cast<int64_t>(random() >> (1 + random() % 63));
    cost.Observe(n, ns);
    const double at = static_cast<double>(random() % 100000);
    CHECK(std::isfinite(cost.Ns(at)) && cost.Ns(at) >= 0.0 && cost.PerTokenNs() >= 0.0);
  }
}

}  // namespace

int main() {
  TestNothingIsKnown();
  TestOneSize();
  TestLine();
  TestRoofline();
  TestForgets();
  TestOutliers();
  TestAnything();
  return 0;
}
