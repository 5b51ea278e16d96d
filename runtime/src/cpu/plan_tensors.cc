// The rules that each tensor of a plan must obey: its type, its extents, and where its bytes lie.
//
// SPDX-License-Identifier: Apache-2.0
#include <math.h>

#include "cpu/plan.h"
#include "status.h"

namespace plansmith {
namespace cpu {
namespace {

constexpr uint32_t kF4Group = 16;  // NVFP4 has no other

uint32_t Step(uint32_t layout) {
  return layout == kPackedN16K4 ? 4 : layout == kPackedN16K8 ? 8 : 1;
}

const char* DTypeName(uint32_t dtype) {
  static const char* const names[kNumDTypes] = {"F32", "BF16", "I8", "I4", "F16", "F8", "F4"};
  return dtype < kNumDTypes ? names[dtype] : "?";
}

bool HasScales(uint32_t dtype) {
  return dtype == kI8 || dtype == kI4 || dtype == kF8 || dtype == kF4;
}

// Whether a matrix may have scales of a type; without any it is 0.
bool TakesScales(const TensorRecord& t) {
  if (t.dtype == kF4) return t.scale_dtype == kF8;
  const bool integer = t.dtype == kI8 || t.dtype == kI4;
  return t.scale_dtype == kF32 || (integer && t.scale_dtype == kBF16);
}

uint64_t ScaleBytes(uint32_t dtype) { return dtype == kF8 ? 1 : dtype == kBF16 ? 2 : 4; }

}  // namespace

PaddedShape PaddedShapeOf(const TensorRecord& tensor) {
  if (tensor.layout == kRowMajor) return {tensor.rows, tensor.cols, 1};
  const uint64_t cols = RoundUp(tensor.cols, Step(tensor.layout));
  const uint64_t groups = tensor.group_size == 0 ? 1 : tensor.cols / tensor.group_size;
  return {RoundUp(tensor.rows, kTile), cols, groups};
}

uint64_t DataBytesOf(const TensorRecord& tensor) {
  const PaddedShape shape = PaddedShapeOf(tensor);
  const uint64_t elements = shape.rows * shape.cols;
  switch (tensor.dtype) {
    case kF32:
      return elements * 4;
    case kBF16:
    case kF16:
      return elements * 2;
    case kI8:
    case kF8:
      return elements;
    default:
      return elements / 2;
  }
}

void Plan::CheckTensors() const {
  for (uint32_t i = 0; i < header().num_tensors; ++i) {
    const TensorRecord& t = tensor(i);
    if (t.name >= header().strings_bytes) {
      FailPlan(path_, Format("tensor %u has its name at byte %u of %llu bytes of strings", i,
                             t.name, static_cast<unsigned long long>(header().strings_bytes)));
    }
    const std::string who = Format("tensor %u (%s) ", i, string(t.name));
    CheckShape(t, who);
    CheckSections(t, who);
  }
}

void Plan::CheckShape(const TensorRecord& t, const std::string& who) const {
  const bool pairs[kNumDTypes][4] = {// kRowMajor, N16, N16K4, N16K8
                                     {true, true, false, false},  {true, true, false, false},
                                     {false, false, true, false}, {false, false, false, true},
                                     {true, true, false, false},  {false, true, false, false},
                                     {false, false, false, true}};
  if (t.dtype >= kNumDTypes || t.layout > kPackedN16K8 || !pairs[t.dtype][t.layout]) {
    FailPlan(path_, who + Format("has dtype %u (%s) in layout %u, which do not go together",
                                 t.dtype, DTypeName(t.dtype), t.layout));
  }
  if (t.rows == 0 || t.cols == 0 || t.rows > kMaxPlanExtent || t.cols > kMaxPlanExtent) {
    FailPlan(path_,
             who + Format("is %u x %u, wanted 1 to %u each way", t.rows, t.cols, kMaxPlanExtent));
  }
  if (!HasScales(t.dtype) && t.group_size != 0) {
    FailPlan(path_,
             who + Format("has group_size %u, only I8, I4, F8 and F4 have groups", t.group_size));
  }
  if (t.group_size != 0 && (t.cols % t.group_size != 0 || t.group_size % Step(t.layout) != 0)) {
    FailPlan(path_, who + Format("has group_size %u, wanted a divisor of its %u columns that is a "
                                 "multiple of %u",
                                 t.group_size, t.cols, Step(t.layout)));
  }
  if (t.dtype == kF4 && t.group_size != kF4Group) {
    FailPlan(path_, who + Format("is F4 with group_size %u, wanted %u", t.group_size, kF4Group));
  }
  // An int32 sum of a group must not overflow: 255 * 128 * 65536 < 2^31.
  const uint64_t longest = t.group_size != 0 ? t.group_size : PaddedShapeOf(t).cols;
  if ((t.dtype == kI8 || t.dtype == kI4) && longest > 65536) {
    FailPlan(path_,
             who + Format("sums %llu products in one group, more than the 65536 that are safe "
                          "in 32 bits",
                          static_cast<unsigned long long>(longest)));
  }
  const bool scaled = t.dtype == kF4;
  if (!isfinite(t.outer_scale) || (scaled ? t.outer_scale <= 0 : t.outer_scale != 1)) {
    FailPlan(path_,
             who + Format("has outer_scale %g, wanted %s", static_cast<double>(t.outer_scale),
                          scaled ? "a number above 0" : "1: only F4 has one"));
  }
  if (!TakesScales(t)) {
    FailPlan(path_,
             who + Format("is %s with scales of dtype %u (%s), wanted F8 of F4, else F32 or, "
                          "of I8 and I4, BF16",
                          DTypeName(t.dtype), t.scale_dtype, DTypeName(t.scale_dtype)));
  }
}

void Plan::CheckSections(const TensorRecord& t, const std::string& who) const {
  const PaddedShape shape = PaddedShapeOf(t);
  const uint64_t num_scales = HasScales(t.dtype) ? shape.rows * shape.num_groups : 0;
  const bool has_zeros = t.dtype == kI4 && (t.zeros_bytes != 0 || t.zeros_offset != 0);
  const struct {
    const char* name;
    uint64_t offset, bytes, wanted;
  } sections[] = {
      {"data", t.data_offset, t.data_bytes, DataBytesOf(t)},
      {"scales", t.scales_offset, t.scales_bytes, num_scales * ScaleBytes(t.scale_dtype)},
      {"zero points", t.zeros_offset, t.zeros_bytes, has_zeros ? num_scales * 4 : 0},
  };
  for (const auto& b : sections) {
    if (b.wanted == 0 && b.offset == 0 && b.bytes == 0) continue;
    if (b.wanted == 0) {
      FailPlan(path_, who + Format("is %s and has %s, which do not go together", DTypeName(t.dtype),
                                   b.name));
    }
    if (b.bytes != b.wanted) {
      FailPlan(path_, who + Format("has %llu bytes of %s, its shape wants %llu",
                                   static_cast<unsigned long long>(b.bytes), b.name,
                                   static_cast<unsigned long long>(b.wanted)));
    }
    if (b.offset % kPlanAlign != 0 || b.offset < header().data_offset || b.offset > bytes() ||
        b.bytes > bytes() - b.offset) {
      FailPlan(path_, who + Format("has %s at byte %llu, wanted a multiple of 64 with all of it in "
                                   "the file's data",
                                   b.name, static_cast<unsigned long long>(b.offset)));
    }
  }
}

}  // namespace cpu
}  // namespace plansmith
