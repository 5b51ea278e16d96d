// A small decoder as a plan, with every op in it, and its forward pass in float64.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "kv_codes.h"
#include "plan_builder.h"

namespace plansmith {
namespace cpu {

// Sizes; the defaults have tails everywhere.
struct TinyShape {
  uint32_t vocab = 83, hidden = 40, layers = 2, heads = 6, kv_heads = 2, dim = 8, inner = 56;
  uint32_t block = 8, max_tokens = 64, max_batch = 8, max_len = 96;
  uint32_t dtype = kF32, group_size = 0;
  uint32_t scale_dtype = kF32;
  bool by_group = false;
  int32_t input = -1;  // LinearInput; -1: int8 by row (or group) for I8 and I4, floats for others
  bool with_zeros = false;
  bool pre_scale = false;  // q, k and v, and gate and up, take their input times a vector,
  int32_t round = -1;      // rounded to this RoundFormat (-1: not)
  int32_t round_group = 0;
  uint32_t kv_format = kKvF32;
  bool gather_early = false;  // only rows with logits go through what follows the last attention
  bool plain_logits = false;  // those of the last product: neither scaled nor capped,
  bool split_logits = false;  // and of two products
};

constexpr float kStaticScale = 0.03f;  // of inputs and, with F4, of their scales

class TinyModel {
 public:
  explicit TinyModel(const TinyShape& shape, uint64_t seed = 1) : s(shape), random_(seed) {
    Build();
  }

  // Adds to the result `out` of product `op_idx` of row `x`.
  using Update = std::function<void(size_t op_idx, const double* x, double* out)>;
  // Logits of every token of a sequence, [n][vocab], in float64 with the stored weights.
  std::vector<double> Forward(const std::vector<int32_t>& ids, const Update& update = {}) const;

  PlanBuilder plan;
  const TinyShape s;

 private:
  using Rows = std::vector<double>;  // [n][width]

  int32_t Vector(const char* name, uint32_t n) {
    std::vector<float> v(n);
    for (float& x : v) x = random_.Uniform(0.5f, 1.5f);
    return plan.Tensor(name, PackMatrix(v, 1, n, kF32, 0, true));
  }
  int32_t Weight(const char* name, uint32_t n, uint32_t k, float size) {
    return plan.Tensor(name, PackMatrix(random_.Floats(static_cast<size_t>(n) * k, size), n, k,
                                        s.dtype, s.group_size, false, s.with_zeros, s.scale_dtype));
  }
  // What a product takes in place of `in`.
  View Prepared(View in, uint32_t width) {
    if (!s.pre_scale && s.round < 0) return in;
    const uint32_t rows = plan.slots[static_cast<size_t>(in.slot)].rows;
    const View out = {plan.Slot(rows, width), 0};
    if (s.pre_scale) {
      const int32_t factors = Vector("factors", width);
      OpRecord& op = plan.Op(kOpMulVector, "factors");
      op.in[0] = in;
      op.out = out;
      op.tensors[0] = factors;
      op.i[0] = static_cast<int32_t>(width);
    }
    if (s.round >= 0) {
      OpRecord& op = plan.Op(kOpRoundInput, "round");
      op.in[0] = s.pre_scale ? out : in;
      op.out = out;
      op.i[0] = static_cast<int32_t>(width);
      op.i[1] = s.round;
      op.i[2] = s.round_group;
      op.f[0] = kStaticScale;
    }
    return out;
  }
  void Linear(const std::string& name, View in, int32_t weight, int32_t bias, View out, bool add,
              View adapters = {-1, 0}) {
    OpRecord& op = plan.Op(kOpLinear, name);
    op.in[0] = in;
    op.in[1] = adapters;
    op.out = out;
    op.tensors[0] = weight;
    op.tensors[1] = bias;
    op.i[0] = add;
    op.i[1] = s.input >= 0                       ? s.input
              : s.dtype != kI8 && s.dtype != kI4 ? kInputFloat
              : s.by_group                       ? kInputInt8Group
                                                 : kInputInt8Row;
    if (op.i[1] == kInputInt8Static || op.i[1] == kInputF8Static) op.f[0] = kStaticScale;
  }
  void Norm(const char* name, View in, View out, uint32_t groups, uint32_t width) {
    const int32_t weight = Vector(name, width);
    OpRecord& op = plan.Op(kOpRmsNorm, name);
    op.in[0] = in;
    op.out = out;
    op.tensors[0] = weight;
    op.i[0] = static_cast<int32_t>(groups);
    op.i[1] = static_cast<int32_t>(width);
    op.f[0] = 1e-5f;
  }
  void Pointwise(uint32_t code, View out, uint32_t width, float f) {
    OpRecord& op = plan.Op(code, "pointwise");
    op.out = out;
    op.i[0] = static_cast<int32_t>(width);
    op.f[0] = f;
  }
  void Build();
  void Layer(int32_t layer);
  void RunOp(const OpRecord& op, const std::vector<int32_t>& ids, std::vector<Rows>* slots) const;
  void RunAttention(const OpRecord& op, size_t n, std::vector<Rows>* slots) const;
  static void RoundGroup(const OpRecord& op, const double* x, uint32_t n, double* out);

  Random random_;
  void GatherRows(int32_t* slot, uint32_t width);

  int32_t x_ = 0, normed_ = 0, qkv_ = 0, attended_ = 0, gate_up_ = 0, inner_ = 0, logits_ = 0;
  int32_t cos_ = 0, sin_ = 0;
};

inline void TinyModel::Build() {
  PlanHeader& h = plan.header;
  h.vocab_size = static_cast<int32_t>(s.vocab);
  h.hidden_size = static_cast<int32_t>(s.hidden);
  h.num_layers = static_cast<int32_t>(s.layers);
  h.num_heads = static_cast<int32_t>(s.heads);
  h.num_kv_heads = static_cast<int32_t>(s.kv_heads);
  h.head_dim = static_cast<int32_t>(s.dim);
  h.max_batch_size = static_cast<int32_t>(s.max_batch);
  h.max_num_tokens = static_cast<int32_t>(s.max_tokens);
  h.max_input_len = static_cast<int32_t>(s.max_len);
  h.max_seq_len = static_cast<int32_t>(s.max_len);
  h.tokens_per_block = static_cast<int32_t>(s.block);
  h.kv_format = s.kv_format;
  const uint32_t q = s.heads * s.dim, kv = s.kv_heads * s.dim;
  x_ = plan.Slot(kRowsTokens, s.hidden);
  normed_ = plan.Slot(kRowsTokens, s.hidden);
  qkv_ = plan.Slot(kRowsTokens, q + 2 * kv);
  attended_ = plan.Slot(kRowsTokens, q);
  gate_up_ = plan.Slot(kRowsTokens, 2 * s.inner);
  inner_ = plan.Slot(kRowsTokens, s.inner);
  logits_ = plan.Slot(kRowsLogits, s.vocab);
  h.logits_slot = static_cast<uint32_t>(logits_);
  const uint32_t half = s.dim / 2;
  std::vector<float> cos, sin;
  for (uint32_t p = 0; p < s.max_len; ++p) {
    for (uint32_t i = 0; i < half; ++i) {
      const double angle = p * std::pow(100.0, -static_cast<double>(i) / half);
      cos.push_back(static_cast<float>(std::cos(angle)));
      sin.push_back(static_cast<float>(std::sin(angle)));
    }
  }
  cos_ = plan.Tensor("cos", PackMatrix(cos, s.max_len, half, kF32, 0, true));
  sin_ = plan.Tensor("sin", PackMatrix(sin, s.max_len, half, kF32, 0, true));
  const int32_t table = Weight("embed", s.vocab, s.hidden, 1);
  OpRecord& embed = plan.Op(kOpEmbed, "embed");
  embed.out = {x_, 0};
  embed.tensors[0] = table;
  embed.f[0] = 1.5f;
  for (uint32_t layer = 0; layer < s.layers; ++layer) Layer(static_cast<int32_t>(layer));
  if (!s.gather_early) GatherRows(&x_, s.hidden);
  Norm("norm", {x_, 0}, {x_, 0}, 1, s.hidden);
  if (s.split_logits) {
    const uint32_t low = kTile;
    Linear("lm_head/low", {x_, 0}, Weight("low", low, s.hidden, 1), -1, {logits_, 0}, false);
    const int32_t high = Weight("high", s.vocab - low, s.hidden, 1);
    Linear("lm_head/high", {x_, 0}, high, -1, {logits_, low}, false);
  } else {
    Linear("lm_head", {x_, 0}, table, -1, {logits_, 0}, false);
  }
  if (s.plain_logits) return;
  Pointwise(kOpScale, {logits_, 0}, s.vocab, 0.7f);
  Pointwise(kOpSoftcap, {logits_, 0}, s.vocab, 30);
}

// What follows goes on with the rows of *slot that have logits.
inline void TinyModel::GatherRows(int32_t* slot, uint32_t width) {
  OpRecord& gather = plan.Op(kOpGatherRows, "rows");
  gather.in[0] = {*slot, 0};
  *slot = plan.Slot(kRowsLogits, width);
  gather.out = {*slot, 0};
  gather.i[0] = static_cast<int32_t>(width);
}

inline void TinyModel::Layer(int32_t layer) {
  const std::string prefix = "layers." + std::to_string(layer) + ".";
  const uint32_t q = s.heads * s.dim, kv = s.kv_heads * s.dim;
  const float size = 1 / std::sqrt(static_cast<float>(s.hidden));
  Norm("input_norm", {x_, 0}, {normed_, 0}, 1, s.hidden);
  const int32_t qkv = Weight("qkv", q + 2 * kv, s.hidden, size),
                bias = Vector("qkv_bias", q + 2 * kv);
  Linear(prefix + "q|k|v", Prepared({normed_, 0}, s.hidden), qkv, bias, {qkv_, 0}, false,
         {normed_, 0});
  Norm("q_norm", {qkv_, 0}, {qkv_, 0}, s.heads, s.dim);
  for (int part = 0; part < 2; ++part) {
    OpRecord& rope = plan.Op(kOpRope, part == 0 ? "rope_q" : "rope_k");
    rope.out = {qkv_, part == 0 ? 0 : q};
    rope.tensors[0] = cos_;
    rope.tensors[1] = sin_;
    rope.i[0] = static_cast<int32_t>(part == 0 ? s.heads : s.kv_heads);
    rope.i[1] = rope.i[2] = static_cast<int32_t>(s.dim);
  }
  // Codes of an 8-bit pool reach a little farther than the values do.
  const float kv_scales[] = {s.kv_format == kKvF8 ? 0.01f : 0.03f, 0.02f};
  const int32_t scales =
      KvHasScales(s.kv_format)
          ? plan.Tensor("kv_scales", PackMatrix({kv_scales[0], kv_scales[1]}, 1, 2, kF32, 0, true))
          : -1;
  OpRecord& attention = plan.Op(kOpPagedAttention, "attention");
  attention.tensors[0] = scales;
  attention.in[0] = {qkv_, 0};
  attention.in[1] = {qkv_, q};
  attention.in[2] = {qkv_, q + kv};
  attention.out = {attended_, 0};
  attention.i[0] = static_cast<int32_t>(s.heads);
  attention.i[1] = static_cast<int32_t>(s.kv_heads);
  attention.i[2] = static_cast<int32_t>(s.dim);
  attention.i[3] = layer;
  attention.i[4] = layer % 2 == 1 ? 20 : 0;  // odd layers have a window
  attention.f[0] = 1 / std::sqrt(static_cast<float>(s.dim));
  attention.f[1] = layer % 2 == 1 ? 10.0f : 0.0f;
  if (s.gather_early && layer + 1 == static_cast<int32_t>(s.layers)) {
    GatherRows(&attended_, q);
    GatherRows(&x_, s.hidden);
    normed_ = plan.Slot(kRowsLogits, s.hidden);
    gate_up_ = plan.Slot(kRowsLogits, 2 * s.inner);
    inner_ = plan.Slot(kRowsLogits, s.inner);
  }
  const int32_t o = Weight("o", s.hidden, q, size);
  Linear(prefix + "o", {attended_, 0}, o, -1, {normed_, 0}, false);
  OpRecord& add = plan.Op(kOpAdd, "residual");
  add.in[0] = {x_, 0};
  add.in[1] = {normed_, 0};
  add.out = {x_, 0};
  add.i[0] = static_cast<int32_t>(s.hidden);
  Norm("mlp_norm", {x_, 0}, {normed_, 0}, 1, s.hidden);
  const int32_t gate_up = Weight("gate_up", 2 * s.inner, s.hidden, size);
  Linear(prefix + "gate|up", Prepared({normed_, 0}, s.hidden), gate_up, -1, {gate_up_, 0}, false,
         {normed_, 0});
  OpRecord& glu = plan.Op(kOpGlu, "glu");
  glu.in[0] = {gate_up_, 0};
  glu.in[1] = {gate_up_, s.inner};
  glu.out = {inner_, 0};
  glu.i[0] = static_cast<int32_t>(s.inner);
  glu.i[1] = layer % 3;
  const int32_t down = Weight("down", s.hidden, s.inner, size);
  Linear(prefix + "down", {inner_, 0}, down, -1, {x_, 0}, true);
}

inline std::vector<double> TinyModel::Forward(const std::vector<int32_t>& ids,
                                              const Update& update) const {
  std::vector<Rows> slots;
  for (const SlotRecord& slot : plan.slots) slots.emplace_back(ids.size() * slot.width);
  for (size_t i = 0; i < plan.ops.size(); ++i) {
    const OpRecord& op = plan.ops[i];
    RunOp(op, ids, &slots);
    if (op.code != kOpLinear || !update) continue;
    const View& adapters = op.in[op.in[1].slot >= 0 ? 1 : 0];
    const size_t in = static_cast<size_t>(adapters.slot), out = static_cast<size_t>(op.out.slot);
    for (size_t t = 0; t < ids.size(); ++t) {
      update(i, slots[in].data() + t * plan.slots[in].width + adapters.col,
             slots[out].data() + t * plan.slots[out].width + op.out.col);
    }
  }
  return slots[static_cast<size_t>(logits_)];
}

inline void TinyModel::RunOp(const OpRecord& op, const std::vector<int32_t>& ids,
                             std::vector<Rows>* slots) const {
  if (op.code == kOpPagedAttention) return RunAttention(op, ids.size(), slots);
  const auto at = [&](const View& view, size_t row) {
    const size_t slot = static_cast<size_t>(view.slot);
    return (*slots)[slot].data() + row * plan.slots[slot].width + view.col;
  };
  const auto tensor = [&](int idx) -> const Packed& {
    return plan.tensors[static_cast<size_t>(op.tensors[idx])];
  };
  const uint32_t width = static_cast<uint32_t>(op.i[0]);
  for (size_t t = 0; t < ids.size(); ++t) {
    double* out = at(op.out, t);
    const double* a = op.in[0].slot >= 0 ? at(op.in[0], t) : nullptr;
    switch (op.code) {
      case kOpEmbed:
        for (uint32_t k = 0; k < s.hidden; ++k) {
          out[k] = op.f[0] * tensor(0).values[static_cast<size_t>(ids[t]) * s.hidden + k];
        }
        break;
      case kOpRmsNorm:
        for (uint32_t g = 0; g < width; ++g) {
          const uint32_t n = static_cast<uint32_t>(op.i[1]);
          double squares = 0;
          for (uint32_t i = 0; i < n; ++i) squares += a[g * n + i] * a[g * n + i];
          const double factor = 1 / std::sqrt(squares / n + op.f[0]);
          for (uint32_t i = 0; i < n; ++i)
            out[g * n + i] = a[g * n + i] * factor * tensor(0).values[i];
        }
        break;
      case kOpLinear: {
        const TensorRecord& r = tensor(0).record;
        std::vector<double> taken(a, a + r.cols);
        if (op.i[1] == kInputInt8Static) {
          for (double& x : taken) x = NearestValue(kRoundInt8, x / op.f[0], -128) * op.f[0];
        } else if (op.i[1] >= kInputF8Row) {
          OpRecord round = op;
          round.i[1] = kRoundF8;
          round.i[2] = op.i[1] == kInputF8Static ? -1 : 0;
          const uint32_t group = op.i[1] == kInputF8Group ? r.group_size : r.cols;
          for (uint32_t k = 0; k < r.cols; k += group) RoundGroup(round, a + k, group, &taken[k]);
        }
        for (uint32_t n = 0; n < r.rows; ++n) {
          double sum = op.i[0] ? out[n] : 0;
          if (op.tensors[1] >= 0) sum += tensor(1).values[n];
          for (uint32_t k = 0; k < r.cols; ++k) {
            sum += taken[k] * tensor(0).values[static_cast<size_t>(n) * r.cols + k];
          }
          out[n] = sum;
        }
        break;
      }
      case kOpRope:
        for (uint32_t head = 0; head < width; ++head) {
          const uint32_t half = static_cast<uint32_t>(op.i[2]) / 2;
          double* x = out + head * static_cast<uint32_t>(op.i[1]);
          for (uint32_t i = 0; i < half; ++i) {
            const double c = tensor(0).values[t * half + i], d = tensor(1).values[t * half + i];
            const double x1 = x[i], x2 = x[half + i];
            x[i] = x1 * c - x2 * d;
            x[half + i] = x2 * c + x1 * d;
          }
        }
        break;
      case kOpGlu: {
        const double* up = at(op.in[1], t);
        for (uint32_t i = 0; i < width; ++i) {
          const double x = a[i];
          const double cubic = std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x);
          const double act = op.i[1] == 0   ? x / (1 + std::exp(-x))
                             : op.i[1] == 1 ? 0.5 * x * (1 + std::tanh(cubic))
                                            : 0.5 * x * (1 + std::erf(x / std::sqrt(2.0)));
          out[i] = act * up[i];
        }
        break;
      }
      case kOpAdd: {
        const double* b = at(op.in[1], t);
        for (uint32_t i = 0; i < width; ++i) out[i] = a[i] + b[i];
        break;
      }
      case kOpMulVector:
        for (uint32_t i = 0; i < width; ++i) out[i] = a[i] * tensor(0).values[i];
        break;
      case kOpRoundInput: {
        const uint32_t group = op.i[2] > 0 ? static_cast<uint32_t>(op.i[2]) : width;
        for (uint32_t i = 0; i < width; i += group) RoundGroup(op, a + i, group, out + i);
        break;
      }
      case kOpSoftcap:
        for (uint32_t i = 0; i < width; ++i) out[i] = op.f[0] * std::tanh(out[i] / op.f[0]);
        break;
      case kOpScale:
        for (uint32_t i = 0; i < width; ++i) out[i] *= op.f[0];
        break;
      default:  // kOpGatherRows: all rows are wanted
        for (uint32_t i = 0; i < width; ++i) out[i] = a[i];
    }
  }
}

inline void TinyModel::RoundGroup(const OpRecord& op, const double* x, uint32_t n, double* out) {
  double largest = 0;
  for (uint32_t i = 0; i < n; ++i) largest = std::fmax(largest, std::fabs(x[i]));
  double s = op.f[0];
  if (op.i[1] == kRoundF4) {
    s *= NearestValue(kRoundF8, largest / (6 * s), 0);
  } else if (op.i[2] >= 0) {
    s = largest / (op.i[1] == kRoundInt8 ? 127 : 448);
  }
  for (uint32_t i = 0; i < n; ++i) {
    out[i] = s == 0 ? 0 : NearestValue(op.i[1], x[i] / s, op.i[2] < 0 ? -128 : -127) * s;
  }
}

inline void TinyModel::RunAttention(const OpRecord& op, size_t n, std::vector<Rows>* slots) const {
  const auto at = [&](const View& view, size_t row) {
    const size_t slot = static_cast<size_t>(view.slot);
    return (*slots)[slot].data() + row * plan.slots[slot].width + view.col;
  };
  for (int part = 0; part < 2 && s.kv_format != kKvF32; ++part) {
    const double scale =
        KvHasScales(s.kv_format)
            ? plan.tensors[static_cast<size_t>(op.tensors[0])].values[static_cast<size_t>(part)]
            : 1;
    for (size_t t = 0; t < n; ++t) {
      double* x = at(op.in[1 + part], t);
      for (uint32_t i = 0; i < s.kv_heads * s.dim; ++i)
        x[i] = HeldKv(s.kv_format, static_cast<float>(x[i]), static_cast<float>(scale));
    }
  }
  for (size_t t = 0; t < n; ++t) {
    const size_t window = static_cast<size_t>(op.i[4]);
    const size_t from = window > 0 && t + 1 > window ? t + 1 - window : 0;
    for (uint32_t h = 0; h < s.heads; ++h) {
      const size_t kv = h / (s.heads / s.kv_heads) * s.dim;
      std::vector<double> p;
      double sum = 0;
      for (size_t j = from; j <= t; ++j) {
        double dot = 0;
        for (uint32_t d = 0; d < s.dim; ++d)
          dot += at(op.in[0], t)[h * s.dim + d] * at(op.in[1], j)[kv + d];
        dot *= op.f[0];
        if (op.f[1] > 0) dot = op.f[1] * std::tanh(dot / op.f[1]);
        p.push_back(std::exp(dot));
        sum += p.back();
      }
      for (uint32_t d = 0; d < s.dim; ++d) {
        double value = 0;
        for (size_t j = from; j <= t; ++j) value += p[j - from] / sum * at(op.in[2], j)[kv + d];
        at(op.out, t)[h * s.dim + d] = value;
      }
    }
  }
}

}  // namespace cpu
}  // namespace plansmith
