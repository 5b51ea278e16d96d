// The AMX kernels against those for AVX-512 with VNNI, bit for bit, at odd sizes. Where the machine
// has no tiles, their instructions are done by a handler (amx_trap.h); it has to have AVX-512.
//
// SPDX-License-Identifier: Apache-2.0
#include <sys/mman.h>

#include "amx_trap.h"
#include "plan_builder.h"

using namespace plansmith::cpu;

namespace {

struct Case {
  uint32_t dtype, n, k, group_size;
  LinearInput input;
};

// Bytes that end where a page without access begins.
class Fenced {
 public:
  explicit Fenced(size_t bytes) : mapped_((bytes + kPage - 1) / kPage * kPage) {
    void* at =
        mmap(nullptr, mapped_ + kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(at != MAP_FAILED);
    start_ = static_cast<uint8_t*>(at);
    CHECK(mprotect(start_ + mapped_, kPage, PROT_NONE) == 0);
    data_ = start_ + mapped_ - bytes;
  }
  ~Fenced() { munmap(start_, mapped_ + kPage); }
  Fenced(const Fenced&) = delete;
  Fenced& operator=(const Fenced&) = delete;
  uint8_t* data() { return data_; }

 private:
  static constexpr size_t kPage = 4096;
  size_t mapped_;
  uint8_t *start_, *data_;
};

// A weight of any bytes at all, also behind its last column. With strange_scales some of its scales
// are 0 or below it.
struct Weight {
  Weight(const Case& c, Random* random, bool strange_scales = false)
      : packed(PackMatrix(random->Floats(size_t{c.n} * c.k), c.n, c.k, c.dtype, c.group_size, false,
                          false, c.group_size != 0 ? kBF16 : kF32)),
        bytes(packed.data.size()) {
    for (size_t i = 0; i < packed.data.size(); ++i) {
      bytes.data()[i] = static_cast<uint8_t>(random->Below(256));
    }
    for (size_t i = 0; strange_scales && i < packed.scales.size(); ++i) {
      const float factor = static_cast<float>(i % 3) - 1;
      packed.scales[i] *= factor;
      if (!packed.bf16_scales.empty()) packed.bf16_scales[i] = ToBf16(packed.scales[i]);
    }
    matrix = packed.Matrix();
    matrix.data = bytes.data();
  }
  Packed packed;
  Fenced bytes;
  PackedMatrix matrix;
};

// Inputs of both kernels; behind the last column of the weight lies what must not matter.
struct Inputs {
  // Every zero_rows-th row is all 0; 0: none.
  Inputs(const Case& c, const PackedMatrix& w, uint32_t rows, Random* random, uint32_t zero_rows)
      : stride((w.padded_cols + 63) / 64 * 64),
        groups(c.input == kInputInt8Group ? w.num_groups : 1),
        q(rows * stride),
        scales(rows * groups),
        sums(rows * w.num_groups) {
    memset(q.data(), 77, rows * stride);
    for (uint32_t r = 0; r < rows; ++r) {
      const bool is_zero = zero_rows != 0 && r % zero_rows == 0;
      const std::vector<float> x = random->Floats(c.k, is_zero ? 0.0f : 3.0f);
      int8_t* to = reinterpret_cast<int8_t*>(q.data() + r * stride);
      float* to_scales = &scales[r * groups];
      int32_t* to_sums = &sums[r * w.num_groups];
      if (c.input == kInputInt8Static) {  // beyond +-2.5 to -128 or 127
        kAvx512VnniKernels.quantize_row_static(x.data(), c.k, w.padded_cols, 0.02f, w.num_groups,
                                               to, to_scales, to_sums);
      } else {
        kAvx512VnniKernels.quantize_row(x.data(), c.k, w.padded_cols, groups, w.num_groups, to,
                                        to_scales, to_sums);
      }
    }
  }
  size_t stride;
  uint32_t groups;
  Fenced q;
  std::vector<float> scales;
  std::vector<int32_t> sums;
};

void CheckRows(const Case& c, const Weight& weight, uint32_t rows, bool bias, bool accumulate,
               Random* random, uint32_t zero_rows = 0) {
  const PackedMatrix& w = weight.matrix;
  Inputs in(c, w, rows, random, zero_rows);
  const std::vector<float> biases = random->Floats(c.n);
  const size_t out_stride = c.n + 3;
  const std::vector<float> before = random->Floats(rows * out_stride);
  LinearArgs args = {};
  args.w = w;
  args.q = reinterpret_cast<const int8_t*>(in.q.data());
  args.q_stride = in.stride;
  args.q_scales = in.scales.data();
  args.q_sums = in.sums.data();
  args.q_groups = in.groups;
  args.q_full_range = c.input == kInputInt8Static;
  args.bias = bias ? biases.data() : nullptr;
  args.out_stride = out_stride;
  args.accumulate = accumulate;
  const uint32_t tiles = (c.n + kTile - 1) / kTile;
  // All, and a part: rows and tiles beside it stay as they are.
  const uint32_t row_begin = rows / 3, tile_begin = tiles / 2;
  for (bool whole : {true, false}) {
    std::vector<float> want = before, got = before;
    for (auto* out : {&want, &got}) {
      args.out = out->data();
      const KernelTable& kernels =
          out == &want ? kAvx512VnniKernels : AmxKernels(kAvx512VnniKernels);
      kernels.linear_int8[c.dtype](args, whole ? 0 : row_begin, rows, whole ? 0 : tile_begin,
                                   tiles);
    }
    CHECK(!AmxTrap::is_configured());
    for (size_t i = 0; i < want.size(); ++i) {
      if (memcmp(&want[i], &got[i], sizeof(float)) == 0) continue;
      fprintf(stderr,
              "amx dtype %u input %d %ux%u group %u, %u rows: [%zu,%zu] is %.9g, wanted %.9g\n",
              c.dtype, c.input, c.n, c.k, c.group_size, rows, i / out_stride, i % out_stride,
              got[i], want[i]);
      exit(1);
    }
  }
}

// Whether products of so many rows go through tiles, by what the handler counted.
bool UsesTiles(const Case& c, uint32_t rows) {
  Random random(3);
  const Weight weight(c, &random);
  const uint64_t before = AmxTrap::num_dots();
  CheckRows(c, weight, rows, false, false, &random);
  return AmxTrap::num_dots() != before;
}

// Products that are 0 have the same sign whatever computes them: of inputs that are all 0, of
// scales that are 0 or below it.
void CheckZeros(Random* random) {
  for (const Case& c :
       {Case{kI8, 40, 64, 0, kInputInt8Row}, Case{kI8, 40, 128, 64, kInputInt8Group},
        Case{kI4, 40, 64, 0, kInputInt8Row}, Case{kI4, 40, 96, 32, kInputInt8Group}}) {
    const Weight weight(c, random, true);
    for (uint32_t rows : {4u, 7u, 20u}) CheckRows(c, weight, rows, false, false, random, 2);
  }
}

// What the peak is measured with: four products a loop, and no tiles left behind.
void CheckPeakKernel() {
  const uint64_t before = AmxTrap::num_dots();
  AmxKernels(kAvx512VnniKernels).dot_tiles(3);
  CHECK(AmxTrap::num_dots() == before + 12 && !AmxTrap::is_configured());
  CHECK(kAvx512VnniKernels.dot_tiles == nullptr);
}

}  // namespace

int main() {
  const std::string usable = UsableIsaNames();
  if (usable.find("avx512vnni") == std::string::npos) {
    printf("skipped: the AMX kernels need AVX-512 besides tiles, and this machine has %s\n",
           usable.c_str());
    return 0;
  }
  const bool has_tiles = usable.find("amx") != std::string::npos;
  if (!has_tiles) AmxTrap::Install();
  const LinearInput kRow = kInputInt8Row, kGroup = kInputInt8Group, kStatic = kInputInt8Static;
  const Case cases[] = {
      {kI8, 50, 37, 0, kRow},       {kI8, 112, 64, 0, kStatic},   {kI8, 17, 3, 0, kRow},
      {kI8, 33, 580, 0, kStatic},   {kI8, 40, 96, 32, kGroup},    {kI8, 48, 256, 64, kGroup},
      {kI8, 30, 256, 128, kStatic}, {kI8, 20, 96, 48, kRow},      {kI8, 40, 96, 12, kGroup},
      {kI8, 20, 192, 96, kGroup},   {kI4, 50, 37, 0, kRow},       {kI4, 113, 64, 0, kStatic},
      {kI4, 17, 3, 0, kRow},        {kI4, 33, 840, 0, kStatic},   {kI4, 40, 96, 32, kGroup},
      {kI4, 48, 256, 64, kGroup},   {kI4, 30, 256, 128, kStatic}, {kI4, 20, 80, 40, kRow},
      {kI4, 21, 72, 24, kGroup},    {kI4, 20, 1024, 512, kGroup},
  };
  Random random(7);
  for (const Case& c : cases) {
    const Weight weight(c, &random);
    for (uint32_t rows = 1; rows <= 40; ++rows) {
      CheckRows(c, weight, rows, rows % 2 == 0, rows % 3 == 0, &random);
    }
    for (uint32_t rows : {63, 64, 65, 67, 81, 130}) {
      CheckRows(c, weight, rows, true, rows % 2 == 1, &random);
    }
  }
  CheckZeros(&random);
  if (!has_tiles) {
    CHECK(!UsesTiles({kI8, 16, 64, 0, kRow}, 3) && UsesTiles({kI8, 16, 64, 0, kRow}, 4));
    CheckPeakKernel();
    CHECK(UsesTiles({kI4, 16, 128, 32, kGroup}, 8) && !UsesTiles({kI4, 16, 48, 24, kGroup}, 8));
    printf("%llu products of tiles by a handler\n",
           static_cast<unsigned long long>(AmxTrap::num_dots()));
  }
  printf("amx: ok\n");
  return 0;
}
