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
#include "packed.h"

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
      r.scales_bytes = t.ScaleBytes();
      r.scales_offset = r.scales_bytes ? Append(&out, t.ScaleData(), r.scales_bytes) : 0;
      r.zeros_bytes = t.zeros.size() * sizeof(float);
      r.zeros_offset = r.zeros_bytes ? Append(&out, t.zeros.data(), r.zeros_bytes) : 0;
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
