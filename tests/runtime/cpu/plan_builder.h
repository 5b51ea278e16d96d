// Builds cpu plan files for the tests, and float64 copies of what is in them.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <cmath>
#include <cstdlib>
#include <string>
#include <vector>

#include "check.h"
#include "cpu/kernels.h"
#include "cpu/plan.h"
#include "cpu/plan_format.h"

namespace plansmith {
namespace cpu {

// Numbers from a seed, the same on every machine.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 2654435761u + 88172645463325252ull) {}
  uint64_t Next() {
    state_ ^= state_ << 13;
    state_ ^= state_ >> 7;
    state_ ^= state_ << 17;
    return state_;
  }
  uint32_t Below(uint32_t n) { return static_cast<uint32_t>((Next() >> 20) % n); }
  float Uniform(float low, float high) {
    return low + (high - low) * static_cast<float>(Next() >> 40) / static_cast<float>(1 << 24);
  }
  std::vector<float> Floats(size_t n, float size = 1.0f) {
    std::vector<float> v(n);
    for (float& x : v) x = Uniform(-size, size);
    return v;
  }

 private:
  uint64_t state_;
};

inline uint16_t ToBf16(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof(bits));
  return static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

// A matrix packed as the plan format says, and what it stands for.
struct Packed {
  TensorRecord record = {};
  std::vector<uint8_t> data;
  std::vector<float> scales;
  std::vector<double> values;  // [N][K] after quantization

  PackedMatrix Matrix() const {
    const PaddedShape shape = PaddedShapeOf(record);
    PackedMatrix m = {};
    m.dtype = record.dtype;
    m.rows = record.rows;
    m.cols = record.cols;
    m.padded_cols = static_cast<uint32_t>(shape.cols);
    m.num_groups = static_cast<uint32_t>(shape.num_groups);
    m.group_cols = record.group_size != 0 ? record.group_size : m.padded_cols;
    m.data = data.data();
    m.scales = scales.empty() ? nullptr : scales.data();
    m.outer_scale = record.outer_scale;
    return m;
  }
};

inline Packed PackMatrix(const std::vector<float>& w, uint32_t n, uint32_t k, uint32_t dtype,
                         uint32_t group_size = 0, bool row_major = false) {
  Packed p;
  const uint32_t layouts[] = {kPackedN16, kPackedN16, kPackedN16K4, kPackedN16K8};
  p.record.dtype = dtype;
  p.record.layout = row_major ? static_cast<uint32_t>(kRowMajor) : layouts[dtype];
  p.record.rows = n;
  p.record.cols = k;
  p.record.group_size = group_size;
  p.record.outer_scale = 1;
  p.values.resize(static_cast<size_t>(n) * k);
  const PaddedShape shape = PaddedShapeOf(p.record);
  p.data.assign(DataBytesOf(p.record), dtype == kI4 ? 0x88 : 0);
  const size_t groups = shape.num_groups, padded = shape.cols;
  const size_t group = group_size == 0 ? padded : group_size;
  if (dtype >= kI8) p.scales.assign(shape.rows * groups, 0.0f);
  for (uint32_t row = 0; row < n; ++row) {
    const size_t tile = row / kTile, lane = row % kTile;
    for (size_t first = 0; first < k; first += group) {
      const size_t end = first + group < k ? first + group : k;
      float largest = 0;
      for (size_t i = first; i < end; ++i) largest = std::fmax(largest, std::fabs(w[row * k + i]));
      const float scale = dtype == kI8 ? largest / 127 : dtype == kI4 ? largest / 7 : 0;
      const size_t at = (tile * groups + first / group) * kTile + lane;
      if (dtype >= kI8) p.scales[at] = scale;
      for (size_t i = first; i < end; ++i) {
        const float x = w[row * k + i];
        const size_t float_at = row_major ? row * k + i : (tile * padded + i) * kTile + lane;
        if (dtype == kF32) {
          memcpy(p.data.data() + float_at * 4, &x, 4);
          p.values[row * k + i] = x;
        } else if (dtype == kBF16) {
          const uint16_t h = ToBf16(x);
          memcpy(p.data.data() + float_at * 2, &h, 2);
          const uint32_t bits = static_cast<uint32_t>(h) << 16;
          float back;
          memcpy(&back, &bits, 4);
          p.values[row * k + i] = back;
        } else {
          const int value = scale > 0 ? static_cast<int>(std::lrintf(x / scale)) : 0;
          p.values[row * k + i] = static_cast<double>(value) * scale;
          const size_t step = dtype == kI8 ? 4 : 8;
          uint8_t* byte =
              p.data.data() + (tile * (padded / step) + i / step) * 64 + lane * 4 + i % 4;
          if (dtype == kI8) {
            *byte = static_cast<uint8_t>(value);
          } else {
            const int shift = i % 8 < 4 ? 0 : 4;
            *byte = static_cast<uint8_t>((*byte & ~(15 << shift)) | ((value + 8) << shift));
          }
        }
      }
    }
  }
  return p;
}

// Collects slots, tensors and ops and writes the file's bytes.
class PlanBuilder {
 public:
  PlanHeader header = {};
  std::vector<SlotRecord> slots;
  std::vector<Packed> tensors;
  std::vector<OpRecord> ops;

  int32_t Slot(uint32_t rows, uint32_t width) {
    slots.push_back({rows, width});
    return static_cast<int32_t>(slots.size()) - 1;
  }
  int32_t Tensor(const std::string& name, Packed tensor) {
    tensor.record.name = String(name);
    tensors.push_back(std::move(tensor));
    return static_cast<int32_t>(tensors.size()) - 1;
  }
  OpRecord& Op(uint32_t code, const std::string& name) {
    OpRecord op = {};
    op.code = code;
    op.name = String(name);
    for (View& view : op.in) view = {-1, 0};
    op.tensors[0] = op.tensors[1] = -1;
    ops.push_back(op);
    return ops.back();
  }

  std::vector<uint8_t> Bytes() {
    std::vector<uint8_t> out(sizeof(PlanHeader));
    memcpy(header.magic, kPlanMagic, sizeof(kPlanMagic));
    header.format_version = kPlanFormatVersion;
    header.num_slots = static_cast<uint32_t>(slots.size());
    header.num_tensors = static_cast<uint32_t>(tensors.size());
    header.num_ops = static_cast<uint32_t>(ops.size());
    header.strings_bytes = strings_.size();
    header.slots_offset = Append(&out, slots.data(), slots.size() * sizeof(SlotRecord));
    const size_t tensor_bytes = tensors.size() * sizeof(TensorRecord);
    header.tensors_offset = Append(&out, nullptr, tensor_bytes);
    header.ops_offset = Append(&out, ops.data(), ops.size() * sizeof(OpRecord));
    header.strings_offset = Append(&out, strings_.data(), strings_.size());
    header.data_offset = Append(&out, nullptr, 0);
    std::vector<TensorRecord> records;
    for (Packed& t : tensors) {
      TensorRecord& r = t.record;
      r.data_bytes = t.data.size();
      r.data_offset = Append(&out, t.data.data(), r.data_bytes);
      r.scales_bytes = t.scales.size() * sizeof(float);
      r.scales_offset = r.scales_bytes ? Append(&out, t.scales.data(), r.scales_bytes) : 0;
      records.push_back(r);
    }
    if (tensor_bytes) memcpy(out.data() + header.tensors_offset, records.data(), tensor_bytes);
    header.file_bytes = out.size();
    memcpy(out.data(), &header, sizeof(header));
    Seal(&out);
    return out;
  }

  // Makes the checksums of a plan's bytes right again, as far as its header leads to its tables.
  static void Seal(std::vector<uint8_t>* bytes) {
    if (bytes->size() < sizeof(PlanHeader)) return;
    PlanHeader h;
    memcpy(&h, bytes->data(), sizeof(h));
    if (h.data_offset >= sizeof(h) && h.data_offset <= bytes->size()) {
      h.tables_crc32 = Crc32(bytes->data() + sizeof(h), h.data_offset - sizeof(h));
    }
    h.header_crc32 = 0;
    h.header_crc32 = Crc32(&h, sizeof(h));
    memcpy(bytes->data(), &h, sizeof(h));
  }

 private:
  uint32_t String(const std::string& text) {
    const uint32_t at = static_cast<uint32_t>(strings_.size());
    strings_.insert(strings_.end(), text.begin(), text.end());
    strings_.push_back('\0');
    return at;
  }
  static uint64_t Append(std::vector<uint8_t>* out, const void* data, size_t bytes) {
    out->resize((out->size() + 63) / 64 * 64);
    const uint64_t at = out->size();
    out->resize(at + bytes);
    if (data != nullptr && bytes != 0) memcpy(out->data() + at, data, bytes);
    return at;
  }

  std::vector<char> strings_;
};

// A file that is there until the end of the scope.
class TempFile {
 public:
  TempFile() {
    const char* folder = getenv("TMPDIR");
    path_ = std::string(folder != nullptr ? folder : "/tmp") + "/plansmith_test_XXXXXX";
    const int fd = mkstemp(&path_[0]);
    CHECK(fd >= 0);
    close(fd);
  }
  ~TempFile() { unlink(path_.c_str()); }
  TempFile(const TempFile&) = delete;
  TempFile& operator=(const TempFile&) = delete;
  void Write(const std::vector<uint8_t>& bytes) const {
    FILE* file = fopen(path_.c_str(), "wb");
    CHECK(file != nullptr);
    CHECK(bytes.empty() || fwrite(bytes.data(), 1, bytes.size(), file) == bytes.size());
    CHECK(fclose(file) == 0);
  }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

}  // namespace cpu
}  // namespace plansmith
