// Which rows behind a product or an attention its items can go on with, while what they computed is
// in their caches: found once, from the phases, when an executor is made. The plan knows nothing of
// it, and every step may still run them apart.
//
// SPDX-License-Identifier: Apache-2.0
#include <numeric>
#include <utility>

#include "cpu/executor.h"

namespace plansmith {
namespace cpu {
namespace {

// Columns of a slot that all items together read or write, each item at the same places from
// view.col on as in what it cuts.
struct Access {
  View view;
  uint32_t width;
  bool writes;
};

bool IsSame(const View& a, const View& b) { return a.slot == b.slot && a.col == b.col; }

// Whether an item can touch what another one writes, or the other way round. Not where both begin
// at the same column: each item then has its own.
bool Collide(const Access& a, const Access& b) {
  return a.view.slot == b.view.slot && a.view.col != b.view.col && (a.writes || b.writes) &&
         a.view.col < b.view.col + b.width && b.view.col < a.view.col + a.width;
}

}  // namespace

// What the items of a stage cut between them, and what they touch beside it.
class Executor::Columns {
 public:
  // Of a product or an attention: `width` columns, in whole multiples of `unit`.
  Columns(const OpRecord& owner, uint32_t width, uint32_t unit)
      : owner_(&owner),
        view_(owner.out),
        width_(width),
        unit_(unit),
        accesses_{{owner.out, width, true}} {}

  const OpRecord& owner() const { return *owner_; }
  const View& view() const { return view_; }
  uint32_t width() const { return width_; }
  uint32_t unit() const { return unit_; }
  bool in_pairs() const { return in_pairs_; }

  // An item holds columns j and width() / 2 + j from here on.
  void Halve() {
    width_ /= 2;
    in_pairs_ = true;
    const View second = {view_.slot, view_.col + width_};
    accesses_ = {{view_, width_, true}, {second, width_, true}};
  }

  // A phase reads `other` (slot -1: nothing) besides the columns and writes `out`, which takes
  // their place. Returns whether no item touches what is another's.
  bool Take(const View& other, const View& out) {
    for (const View& in : owner_->in) {
      if (in.slot == out.slot) return false;  // the owner's other items still read it
    }
    for (const Access& access : {Access{other, width_, false}, Access{out, width_, true}}) {
      for (const Access& before : accesses_) {
        if (Collide(before, access)) return false;
      }
      accesses_.push_back(access);
    }
    view_ = out;
    return true;
  }

  // A phase has units of `unit` columns from `view` on, which items then hold whole. Returns
  // whether they can: not where that leaves too few of them.
  bool Align(const View& view, uint32_t num_units, uint32_t unit, uint32_t* unit_at) {
    if (view.slot != view_.slot || view.col < view_.col) return false;
    *unit_at = view.col - view_.col;
    const uint64_t end = *unit_at + static_cast<uint64_t>(num_units) * unit;
    const uint64_t common = std::lcm(static_cast<uint64_t>(unit_), static_cast<uint64_t>(unit));
    if (end > width_ || *unit_at % unit != 0 || (common != unit_ && 2 * common > width_)) {
      return false;
    }
    unit_ = static_cast<uint32_t>(common);
    return true;
  }

 private:
  const OpRecord* owner_;
  View view_;
  uint32_t width_, unit_;
  bool in_pairs_ = false;
  std::vector<Access> accesses_;
};

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
    if (next < stages_.size() && phases_[stages_[next].first].code == kCodeLora) {
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
  Columns columns(op, is_product ? owner.linear.w.rows : static_cast<uint32_t>(op.i[0] * op.i[2]),
                  is_product ? kTile : 1);
  const Stage& tail = stages_[stage->tail];
  for (size_t i = tail.first; i <= tail.last; ++i) {
    Columns after = columns;
    if (!FusePhase(i == tail.first, &phases_[i], &after)) break;
    columns = after;
    ++stage->num_fused;
    stage->writes_kv |= phases_[i].code == kCodeWriteKv;
  }
  stage->in_pairs = columns.in_pairs();
  stage->fused_cols = columns.unit();
}

// Whether items can go on with the phase, the first one behind them or not.
bool Executor::FusePhase(bool is_first, Phase* phase, Columns* c) const {
  phase->unit_at = 0;
  phase->unit_cols = 1;
  if (phase->code == kOpGlu) return is_first && FuseGlu(*phase, c);
  return FuseElementwise(*phase, c) || FuseUnits(phase, c);
}

// Of the two halves of a product.
bool Executor::FuseGlu(const Phase& phase, Columns* c) {
  const OpRecord& op = *phase.op;
  const uint32_t half = phase.num_units;
  const View first = c->view(), second = {first.slot, first.col + half};
  const bool is_pair = (IsSame(op.in[0], first) && IsSame(op.in[1], second)) ||
                       (IsSame(op.in[1], first) && IsSame(op.in[0], second));
  if (c->owner().code != kOpLinear || !is_pair || 2 * half != c->width() || half % kTile != 0 ||
      op.out.slot == first.slot) {
    return false;
  }
  c->Halve();
  return c->Take({-1, 0}, op.out);
}

// What takes all columns, each by itself or in groups.
bool Executor::FuseElementwise(const Phase& phase, Columns* c) {
  const OpRecord& op = *phase.op;
  View in = op.in[0], other = {-1, 0};
  uint32_t group = 1, group_at;
  switch (phase.code) {
    case kOpMulVector:
      break;
    case kOpSoftcap:
    case kOpScale:
      in = op.out;
      break;
    case kOpAdd:
      other = op.in[1];
      if (!IsSame(in, c->view())) std::swap(in, other);
      break;
    case kOpRoundInput:
      if (op.i[2] == 0) return false;  // a scale of the whole row
      if (op.i[2] > 0) group = static_cast<uint32_t>(op.i[2]);
      break;
    default:
      return false;
  }
  if (!IsSame(in, c->view()) || phase.num_units != c->width()) return false;
  if (group > 1 && !c->Align(in, c->width() / group, group, &group_at)) return false;
  return c->Take(other, op.out);
}

// What has heads or groups in the columns, and leaves these where they are.
bool Executor::FuseUnits(Phase* phase, Columns* c) const {
  const OpRecord& op = *phase->op;
  View from = op.out;
  switch (phase->code) {
    case kOpRope:
    case kOpRmsNorm:
      phase->unit_cols = static_cast<uint32_t>(op.i[1]);
      if (c->in_pairs() || (phase->code == kOpRmsNorm && !IsSame(op.in[0], from))) return false;
      break;
    case kCodeWriteKv: {
      // V's columns behind K's. A NaN of either marks the whole row where the pools are int8, and
      // an attention's items still read its layer.
      phase->unit_cols = static_cast<uint32_t>(op.i[2]);
      from = op.in[1];
      const View behind = {from.slot, from.col + static_cast<uint32_t>(op.i[1]) * phase->unit_cols};
      if (c->in_pairs() || c->owner().code != kOpLinear || model_.kv_format == kKvI8 ||
          !IsSame(op.in[2], behind)) {
        return false;
      }
      break;
    }
    case kCodeQuantize: {
      const PackedMatrix& w = phase->linear.w;
      phase->unit_cols = w.cols / phase->num_units;
      from = op.in[0];
      if (phase->num_units == 1 || !IsSame(from, c->view()) || w.cols != c->width()) return false;
      break;
    }
    default:
      return false;
  }
  return c->Align(from, phase->num_units, phase->unit_cols, &phase->unit_at);
}

}  // namespace cpu
}  // namespace plansmith
