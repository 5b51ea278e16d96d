// The rules that each op of a plan must obey, so that running it needs no checks.
//
// SPDX-License-Identifier: Apache-2.0
#include <math.h>

#include "cpu/plan.h"
#include "status.h"

namespace plansmith {
namespace cpu {
namespace {

class OpChecker {
 public:
  OpChecker(const Plan& plan, uint32_t idx) : plan_(plan), op_(plan.op(idx)), idx_(idx) {}

  void Check() {
    if (op_.name >= plan_.header().strings_bytes) {
      FailPlan(plan_.path(),
               Format("op %u has its name at byte %u of the strings, which have %llu", idx_,
                      op_.name, static_cast<unsigned long long>(plan_.header().strings_bytes)));
    }
    switch (op_.code) {
      case kOpEmbed:
        return Embed();
      case kOpRmsNorm:
        return RmsNorm();
      case kOpLinear:
        return Linear();
      case kOpRope:
        return Rope();
      case kOpPagedAttention:
        return PagedAttention();
      case kOpGlu:
        if (op_.i[1] < 0 || op_.i[1] > 2) Fail(Format("activation %d is not 0, 1 or 2", op_.i[1]));
        return Elementwise(2);
      case kOpAdd:
        return Elementwise(2);
      case kOpSoftcap:
        if (!(op_.f[0] > 0)) Fail("cap is not above 0");
        return Elementwise(0);
      case kOpGatherRows:
        return GatherRows();
      case kOpScale:
        return Elementwise(0);
      case kOpRoundInput:
        return RoundInput();
      case kOpMulVector:
        return MulVector();
      default:
        Fail(Format("code %u is not known to this library", op_.code));
    }
  }

 private:
  [[noreturn]] void Fail(const std::string& what) {
    FailPlan(plan_.path(), Format("op %u (%s, code %u): %s", idx_, plan_.string(op_.name), op_.code,
                                  what.c_str()));
  }

  int64_t Positive(const char* name, int32_t value) {
    if (value <= 0) Fail(Format("%s is %d, wanted at least 1", name, value));
    return value;
  }

  void Finite(const char* name, float value) {
    if (!isfinite(value)) Fail(Format("%s is not a finite number", name));
  }

  void PositiveNumber(const char* name, float value) {
    if (!isfinite(value) || value <= 0) {
      Fail(Format("%s is %g, wanted a number above 0", name, static_cast<double>(value)));
    }
  }

  // The view must hold `width` columns. Returns its slot's rows kind.
  uint32_t CheckView(const char* name, const View& view, int64_t width) {
    if (view.slot < 0 || static_cast<uint32_t>(view.slot) >= plan_.header().num_slots) {
      Fail(Format("%s is slot %d of %u", name, view.slot, plan_.header().num_slots));
    }
    const SlotRecord& slot = plan_.slot(static_cast<size_t>(view.slot));
    if (view.col > slot.width || width > static_cast<int64_t>(slot.width - view.col)) {
      Fail(Format("%s wants columns %u to %lld of slot %d, which has %u", name, view.col,
                  static_cast<long long>(view.col + width), view.slot, slot.width));
    }
    return slot.rows;
  }

  void SameRows(uint32_t a, uint32_t b) {
    if (a != b) Fail("input and output slots have different kinds of rows");
  }

  // Threads write `out` while others read `in`: the two may be the same view only where a thread
  // reads just what it overwrites.
  void NoOverlap(const View& in, int64_t in_width, int64_t out_width, bool same_is_fine) {
    if (in.slot != op_.out.slot) return;
    const int64_t a = in.col, b = op_.out.col;
    if (same_is_fine && a == b) return;
    if (a < b + out_width && b < a + in_width) Fail("input and output columns overlap");
  }

  const TensorRecord& Tensor(const char* name, int32_t idx) {
    if (idx < 0 || static_cast<uint32_t>(idx) >= plan_.header().num_tensors) {
      Fail(Format("%s is tensor %d of %u", name, idx, plan_.header().num_tensors));
    }
    return plan_.tensor(static_cast<size_t>(idx));
  }

  const TensorRecord& F32Table(const char* name, int32_t idx, int64_t min_rows, int64_t cols) {
    const TensorRecord& t = Tensor(name, idx);
    if (t.dtype != kF32 || t.layout != kRowMajor) Fail(Format("%s is not a row-major F32", name));
    if (t.rows < min_rows || t.cols != cols) {
      Fail(Format("%s is %u x %u, wanted %lld columns and at least %lld rows", name, t.rows, t.cols,
                  static_cast<long long>(cols), static_cast<long long>(min_rows)));
    }
    return t;
  }

  void Embed() {
    const TensorRecord& table = Tensor("the embedding", op_.tensors[0]);
    if (table.rows < static_cast<uint32_t>(plan_.header().vocab_size)) {
      Fail(Format("the embedding has %u rows, vocab_size is %d", table.rows,
                  plan_.header().vocab_size));
    }
    Finite("the factor", op_.f[0]);
    if (CheckView("out", op_.out, table.cols) != kRowsTokens) Fail("out does not hold token rows");
  }

  void RmsNorm() {
    const int64_t groups = Positive("the number of groups", op_.i[0]);
    const int64_t width = Positive("the group width", op_.i[1]);
    F32Table("the weight", op_.tensors[0], 1, width);
    if (!(op_.f[0] >= 0) || !isfinite(op_.f[0])) Fail("epsilon is negative or not finite");
    SameRows(CheckView("in", op_.in[0], groups * width), CheckView("out", op_.out, groups * width));
    NoOverlap(op_.in[0], groups * width, groups * width, true);
  }

  void Linear() {
    const TensorRecord& weight = Tensor("the weight", op_.tensors[0]);
    if (weight.layout == kRowMajor) Fail("the weight is row-major, wanted a packed layout");
    if (op_.tensors[1] != -1) F32Table("the bias", op_.tensors[1], 1, weight.rows);
    if (op_.i[0] < 0 || op_.i[0] > 1) Fail(Format("the add flag is %d, wanted 0 or 1", op_.i[0]));
    CheckInput(weight);
    SameRows(CheckView("in", op_.in[0], weight.cols), CheckView("out", op_.out, weight.rows));
    NoOverlap(op_.in[0], weight.cols, weight.rows, false);
    if (op_.in[1].slot == -1) return;
    SameRows(CheckView("the adapters' input", op_.in[1], weight.cols),
             CheckView("out", op_.out, weight.rows));
    NoOverlap(op_.in[1], weight.cols, weight.rows, false);
  }

  // How the product takes its input must suit the weight.
  void CheckInput(const TensorRecord& weight) {
    const int32_t input = op_.i[1];
    if (input < kInputFloat || input > kInputF8Static) {
      Fail(Format("takes its input as %d, wanted 0 (float) to 6 (F8, static)", input));
    }
    if (input == kInputFloat) return;
    const bool is_static = input == kInputInt8Static || input == kInputF8Static;
    if (is_static) PositiveNumber("the input's scale", op_.f[0]);
    if ((input == kInputInt8Group || input == kInputF8Group) && weight.group_size == 0) {
      Fail("the input is to be rounded by group, the weight has no groups");
    }
    if (input >= kInputF8Row) return CheckF8Input(weight);
    if ((weight.dtype != kI8 && weight.dtype != kI4) || weight.zeros_bytes != 0) {
      Fail("the input is to be rounded to int8, the weight is not I8 or I4 without zero points");
    }
  }

  void CheckF8Input(const TensorRecord& weight) {
    if (weight.dtype != kF8) Fail("the input is to be rounded to F8, the weight is not F8");
    const uint32_t columns = weight.group_size != 0 ? weight.group_size : weight.cols;
    if (columns % kF8Step != 0) {
      Fail(
          Format("the input is to be rounded to F8, the weight has groups of %u columns; wanted a "
                 "multiple of %u",
                 columns, kF8Step));
    }
  }

  void Rope() {
    const int64_t heads = Positive("the number of heads", op_.i[0]);
    const int64_t width = Positive("the head size", op_.i[1]);
    const int64_t rotated = Positive("the rotated width", op_.i[2]);
    if (rotated > width || rotated % 2 != 0) {
      Fail(Format("rotates %d of %d columns, wanted an even number within the head", op_.i[2],
                  op_.i[1]));
    }
    F32Table("cos", op_.tensors[0], plan_.header().max_seq_len, rotated / 2);
    F32Table("sin", op_.tensors[1], plan_.header().max_seq_len, rotated / 2);
    if (CheckView("out", op_.out, heads * width) != kRowsTokens)
      Fail("out does not hold token rows");
  }

  void PagedAttention() {
    const PlanHeader& h = plan_.header();
    const int64_t heads = Positive("the number of heads", op_.i[0]);
    const int64_t kv_heads = Positive("the number of KV heads", op_.i[1]);
    const int64_t head_dim = Positive("the head size", op_.i[2]);
    if (kv_heads != h.num_kv_heads || head_dim != h.head_dim || heads > 4096 ||
        heads % kv_heads != 0) {
      Fail(Format("has %d heads, %d KV heads, head size %d; the model has %d, %d, %d", op_.i[0],
                  op_.i[1], op_.i[2], h.num_heads, h.num_kv_heads, h.head_dim));
    }
    if (op_.i[3] < 0 || op_.i[3] >= h.num_layers) {
      Fail(Format("is of layer %d, the model has %d", op_.i[3], h.num_layers));
    }
    KvScales();
    if (op_.i[4] < 0) Fail(Format("window is %d, wanted 0 (all) or more", op_.i[4]));
    Finite("the scale", op_.f[0]);
    if (!(op_.f[1] >= 0) || !isfinite(op_.f[1])) Fail("the soft cap is negative or not finite");
    const int64_t q_width = heads * head_dim, kv_width = kv_heads * head_dim;
    uint32_t rows = CheckView("q", op_.in[0], q_width);
    rows |= CheckView("k", op_.in[1], kv_width) | CheckView("v", op_.in[2], kv_width);
    rows |= CheckView("out", op_.out, q_width);
    if (rows != kRowsTokens) Fail("q, k, v and out must hold token rows");
    NoOverlap(op_.in[0], q_width, q_width, true);
    NoOverlap(op_.in[1], kv_width, q_width, false);
    NoOverlap(op_.in[2], kv_width, q_width, false);
  }

  // 8-bit pools have a scale of K and one of V.
  void KvScales() {
    if (!KvHasScales(plan_.header().kv_format)) {
      if (op_.tensors[0] != -1) Fail("has scales of K and V, the pools hold floats");
      return;
    }
    const TensorRecord& t = F32Table("the scales of K and V", op_.tensors[0], 1, 2);
    const float* scales = reinterpret_cast<const float*>(plan_.at(t.data_offset));
    for (int i = 0; i < 2; ++i) {
      if (isfinite(scales[i]) && scales[i] > 0) continue;
      Fail(Format("the scale of %s is %g, wanted a number above 0", i == 0 ? "K" : "V",
                  static_cast<double>(scales[i])));
    }
  }

  void Elementwise(int num_inputs) {
    const int64_t width = Positive("the width", op_.i[0]);
    if (op_.code != kOpGlu && op_.code != kOpAdd) Finite("the factor", op_.f[0]);
    InPlace(width, num_inputs);
  }

  void RoundInput() {
    const int64_t width = Positive("the width", op_.i[0]);
    const int32_t format = op_.i[1], group = op_.i[2];
    if (format < kRoundInt8 || format > kRoundF4) {
      Fail(Format("rounds to format %d, wanted 0 (int8), 1 (F8) or 2 (F4)", format));
    }
    if (group < -1 || (group > 0 && width % group != 0)) {
      Fail(Format("rounds in groups of %d, wanted a divisor of its %lld columns, 0 or -1", group,
                  static_cast<long long>(width)));
    }
    if (format == kRoundF4 && group != 16) {
      Fail(Format("rounds to F4 in groups of %d, wanted 16", group));
    }
    if (format == kRoundF4 || group == -1) PositiveNumber("the scale", op_.f[0]);
    InPlace(width, 1);
  }

  void MulVector() {
    F32Table("the vector", op_.tensors[0], 1, Positive("the width", op_.i[0]));
    InPlace(op_.i[0], 1);
  }

  // Inputs that `out` may be, row by row.
  void InPlace(int64_t width, int num_inputs) {
    const uint32_t rows = CheckView("out", op_.out, width);
    for (int i = 0; i < num_inputs; ++i) {
      SameRows(rows, CheckView("in", op_.in[i], width));
      NoOverlap(op_.in[i], width, width, true);
    }
  }

  void GatherRows() {
    const int64_t width = Positive("the width", op_.i[0]);
    if (CheckView("in", op_.in[0], width) != kRowsTokens ||
        CheckView("out", op_.out, width) != kRowsLogits) {
      Fail("in must hold token rows and out logits rows");
    }
  }

  const Plan& plan_;
  const OpRecord& op_;
  uint32_t idx_;
};

}  // namespace

void CheckOps(const Plan& plan) {
  for (uint32_t i = 0; i < plan.header().num_ops; ++i) OpChecker(plan, i).Check();
}

}  // namespace cpu
}  // namespace plansmith
