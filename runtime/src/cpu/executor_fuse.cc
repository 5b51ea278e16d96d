// Which rows behind a product or an attention its items can go on with, while what they computed is
// in their caches: found once, from the phases, when an executor is made. The plan knows nothing of
// it, and every step may still run them apart.
//
// SPDX-License-Identifier: Apache-2.0
#include <numeric>

#include "cpu/executor.h"

namespace plansmith {
namespace cpu {
namespace {

// The columns that a stage's items cut between them, as the phases so far leave them.
struct Columns {
  View view;
  uint32_t width;
  uint32_t unit;  // items hold whole multiples of it
};

bool IsSame(const View& a, const View& b) { return a.slot == b.slot && a.col == b.col; }

// The phase has units of `unit` columns from `view` on within `c`, which items then hold whole.
// Returns whether they can: not where that leaves too few of them.
bool Align(Columns* c, const View& view, uint32_t num_units, uint32_t unit, uint32_t* unit_at) {
  if (view.slot != c->view.slot || view.col < c->view.col) return false;
  *unit_at = view.col - c->view.col;
  const uint64_t end = *unit_at + static_cast<uint64_t>(num_units) * unit;
  const uint64_t common = std::lcm(static_cast<uint64_t>(c->unit), static_cast<uint64_t>(unit));
  if (end > c->width || *unit_at % unit != 0 || (common != c->unit && 2 * common > c->width)) {
    return false;
  }
  c->unit = static_cast<uint32_t>(common);
  return true;
}

}  // namespace

size_t Executor::num_fused() const {
  size_t num = 0;
  for (const Stage& stage : stages_) num += stage.num_fused;
  return num;
}

void Executor::Fuse() {
  for (size_t i = 0; i < stages_.size(); ++i) {
    Stage& stage = stages_[i];
    const Phase& phase = phases_[stage.first];
    if (phase.code != kOpLinear && phase.code != kOpPagedAttention) continue;
    size_t next = i + 1;
    if (next < stages_.size() && phases_[stages_[next].first].code == kPhaseLora) {
      stage.lora = next++;
    }
    if (next == stages_.size()) continue;
    const Phase& behind = phases_[stages_[next].first];
    if (!behind.by_rows || behind.rows_kind != phase.rows_kind) continue;
    stage.tail = next;
    FuseTail(&stage);
  }
}

void Executor::FuseTail(Stage* stage) {
  const Phase& owner = phases_[stage->first];
  const OpRecord& op = *owner.op;
  const bool is_product = owner.code == kOpLinear;
  Columns c = {op.out, 0, 1};
  if (is_product) {
    c.width = owner.linear.w.rows;
    c.unit = kTile;
  } else {
    c.width = static_cast<uint32_t>(op.i[0] * op.i[2]);
  }
  // Other items still read what the stage reads.
  const auto may_write = [&](const View& view) {
    for (const View& in : op.in) {
      if (in.slot == view.slot) return false;
    }
    return true;
  };
  // Over all columns, each by itself or in groups of `unit`; out is what goes on.
  const auto elementwise = [&](const Phase& phase, const View& in, const View& out, uint32_t unit) {
    uint32_t at;
    if (!IsSame(in, c.view) || phase.num_units != c.width || !may_write(out)) return false;
    if (unit > 1 && !Align(&c, in, c.width / unit, unit, &at)) return false;
    c.view = out;
    return true;
  };
  const auto fits = [&](Phase* phase) {
    const OpRecord& o = *phase->op;
    phase->unit_at = 0;
    phase->unit_cols = 1;
    switch (phase->code) {
      case kOpRope:
        phase->unit_cols = static_cast<uint32_t>(o.i[1]);
        return !stage->in_pairs &&
               Align(&c, o.out, phase->num_units, phase->unit_cols, &phase->unit_at);
      case kOpRmsNorm:
        phase->unit_cols = static_cast<uint32_t>(o.i[1]);
        return !stage->in_pairs && IsSame(o.in[0], o.out) &&
               Align(&c, o.out, phase->num_units, phase->unit_cols, &phase->unit_at);
      case kPhaseWriteKv: {
        // V's columns behind K's. A NaN of either marks the whole row where the pools are int8.
        const uint32_t dim = phase->unit_cols = static_cast<uint32_t>(o.i[2]);
        return !stage->in_pairs && plan_->header().kv_format != kKvI8 &&
               IsSame(o.in[2], {o.in[1].slot, o.in[1].col + static_cast<uint32_t>(o.i[1]) * dim}) &&
               Align(&c, o.in[1], phase->num_units, dim, &phase->unit_at);
      }
      case kOpGlu: {
        const uint32_t half = c.width / 2;
        const View second = {c.view.slot, c.view.col + half};
        const bool is_pair = (IsSame(o.in[0], c.view) && IsSame(o.in[1], second)) ||
                             (IsSame(o.in[1], c.view) && IsSame(o.in[0], second));
        if (!is_product || phase != &phases_[stages_[stage->tail].first] || !is_pair ||
            phase->num_units != half || 2 * half != c.width || half % kTile != 0 ||
            o.out.slot == c.view.slot || !may_write(o.out)) {
          return false;
        }
        stage->in_pairs = true;
        c.view = o.out;
        c.width = half;
        return true;
      }
      case kOpAdd: {
        const bool first = IsSame(o.in[0], c.view);
        const View& other = o.in[first ? 1 : 0];
        return other.slot != c.view.slot && elementwise(*phase, o.in[first ? 0 : 1], o.out, 1);
      }
      case kOpSoftcap:
      case kOpScale:
        return elementwise(*phase, o.out, o.out, 1);
      case kOpMulVector:
        return elementwise(*phase, o.in[0], o.out, 1);
      case kOpRoundInput:
        return o.i[2] != 0 &&
               elementwise(*phase, o.in[0], o.out, o.i[2] > 0 ? static_cast<uint32_t>(o.i[2]) : 1);
      case kPhaseQuantize: {
        const PackedMatrix& w = phase->linear.w;
        phase->unit_cols = w.cols / phase->num_units;
        return phase->num_units > 1 && IsSame(o.in[0], c.view) && w.cols == c.width &&
               Align(&c, o.in[0], phase->num_units, phase->unit_cols, &phase->unit_at);
      }
      default:
        return false;
    }
  };
  const Stage& tail = stages_[stage->tail];
  for (size_t i = tail.first; i <= tail.last && fits(&phases_[i]); ++i) {
    ++stage->num_fused;
    stage->writes_kv |= phases_[i].code == kPhaseWriteKv;
  }
  stage->fused_cols = c.unit;
}

}  // namespace cpu
}  // namespace plansmith
