// SPDX-License-Identifier: Apache-2.0
#include "step_cost.h"

#include <algorithm>
#include <cmath>

namespace plansmith {
namespace {

constexpr double kForget = 1.0 - 1.0 / 32;
// An octave counts this much less for each octave it is away: its neighbours give the slope, the
// far ends of the curve hardly pull.
constexpr double kNear = 1.0 / 8;
constexpr double kOutlier = 3.0;
constexpr int32_t kOutliersInRow = 2;

size_t OctaveOf(double num_tokens, size_t num_octaves) {
  const int octave = std::ilogb(std::max(1.0, num_tokens));
  return std::min(static_cast<size_t>(octave), num_octaves - 1);
}

}  // namespace

void StepCost::Moments::Add(const Moments& o, double scale) {
  w += scale * o.w;
  t += scale * o.t;
  tt += scale * o.tt;
  y += scale * o.y;
  ty += scale * o.ty;
}

void StepCost::Observe(int32_t num_tokens, int64_t took_ns) {
  const double tokens = static_cast<double>(std::max(1, num_tokens));
  double ns = static_cast<double>(std::max<int64_t>(0, took_ns));
  const size_t octave = OctaveOf(tokens, octaves_.size());
  Moments& m = octaves_[octave];
  // Only against its own octave: what is merely extrapolated is no reason to disbelieve. Several in
  // a row are no outliers.
  const double most = kOutlier * Ns(tokens);
  const bool is_outlier = m.w >= 4.0 && ns > most;
  num_outliers_[octave] = is_outlier ? num_outliers_[octave] + 1 : 0;
  if (is_outlier && num_outliers_[octave] <= kOutliersInRow) ns = most;
  Moments next{1.0, tokens, tokens * tokens, ns, tokens * ns};
  next.Add(m, kForget);
  m = next;
  min_tokens_ = num_observed_ == 0 ? num_tokens : std::min(min_tokens_, num_tokens);
  max_tokens_ = std::max(max_tokens_, num_tokens);
  ++num_observed_;
}

StepCost::Line StepCost::Fit(const Moments& m) {
  if (m.w <= 0.0) return {};
  const double mean_t = m.t / m.w, mean_y = m.y / m.w;
  const double var = m.tt / m.w - mean_t * mean_t;
  // Below this all steps had one size but for rounding.
  if (var <= 1e-9 * mean_t * mean_t) return {mean_y, 0.0};
  const double slope = (m.ty / m.w - mean_t * mean_y) / var;
  if (slope <= 0.0) return {mean_y, 0.0};
  const double fixed = mean_y - slope * mean_t;
  if (fixed < 0.0) return {0.0, m.ty / m.tt};
  return {fixed, slope};
}

double StepCost::Ns(double num_tokens) const {
  const double tokens = std::max(1.0, num_tokens);
  const auto at = static_cast<int>(OctaveOf(tokens, octaves_.size()));
  Moments near;
  double scale = 1.0;
  // Each octave as one observation, so that the busiest does not drown what is near.
  const auto add = [&](int octave) {
    if (octave < 0 || octave >= static_cast<int>(octaves_.size())) return;
    const Moments& m = octaves_[static_cast<size_t>(octave)];
    if (m.w > 0.0) near.Add(m, scale / m.w);
  };
  add(at);
  for (int away = 1; away < static_cast<int>(octaves_.size()); ++away) {
    scale *= kNear;
    add(at - away);
    add(at + away);
  }
  const Line line = Fit(near);
  return line.fixed + line.per_token * tokens;
}

double StepCost::PerTokenNs() const {
  Moments all;
  for (const Moments& m : octaves_) {
    if (m.w > 0.0) all.Add(m, 1.0 / m.w);
  }
  return Fit(all).per_token;
}

}  // namespace plansmith
