// Damaged plan files: each broken rule has its own message, and thousands of random mutations with
// correct checksums either fail to open or run a step without a crash.
//
// SPDX-License-Identifier: Apache-2.0
#include <errno.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <fstream>
#include <functional>

#include "driver.h"
#include "status.h"
#include "tiny_model.h"

using namespace plansmith::cpu;

namespace {

// What the next reads of a file do instead of giving all that was asked for.
struct Reads {
  std::atomic<size_t> most_bytes{SIZE_MAX};  // of one read
  std::atomic<int> num_interrupted{0};       // these fail with EINTR
  std::atomic<size_t> end{SIZE_MAX};         // where the file ends
  std::atomic<size_t> broken_at{SIZE_MAX};   // EIO from here on
  std::atomic<int> num_reads{0};
} reads;

}  // namespace

// In place of the C library's, for all of this program.
extern "C" ssize_t pread(int fd, void* to, size_t n, off_t at) {
  const size_t from = static_cast<size_t>(at);
  ++reads.num_reads;
  if (reads.num_interrupted.load() > 0 && reads.num_interrupted-- > 0) {
    errno = EINTR;
    return -1;
  }
  n = std::min({n, reads.most_bytes.load(), reads.end - std::min(reads.end.load(), from)});
  if (from + n > reads.broken_at) {
    errno = EIO;
    return -1;
  }
  return syscall(SYS_pread64, fd, to, n, at);
}

namespace {

// Why a plan does not open; empty when it does.
std::string OpenError(const std::string& path, WeightsIn weights) {
  try {
    const auto plan = Plan::Open(path, weights);
    CHECK(plan->in_huge_pages() == (weights == WeightsIn::kHugePages));
    return "";
  } catch (const plansmith::StatusError& e) {
    return e.what();
  }
}

bool HugePagesOffered() {
  std::string text;
  std::getline(std::ifstream("/sys/kernel/mm/transparent_hugepage/enabled"), text);
  return text.find("[madvise]") != std::string::npos || text.find("[always]") != std::string::npos;
}

// A plan opens or not for the same reason, wherever its bytes are.
void CheckBothWays(const std::string& path) {
  const std::string read = OpenError(path, WeightsIn::kHugePages);
  if (HugePagesOffered()) {
    CHECK(read == OpenError(path, WeightsIn::kMapped));
  } else {
    CHECK(read.find("offers no huge pages") != std::string::npos);
  }
}

TinyShape SmallShape() {
  TinyShape shape;
  shape.layers = 1;
  shape.dtype = kI8;
  shape.group_size = 8;
  return shape;
}

// Opens the file and, if that works, runs steps with an executor over it. Returns whether it
// opened.
bool OpenAndStep(const std::string& path, bool only_open) {
  psm_executor executor;
  psm_cpu_options options = {};
  psm_cpu_options_init(&options);
  options.num_threads = 1;
  const psm_status status = psm_cpu_executor_create(path.c_str(), &options, &executor);
  if (status != PSM_OK) {
    CHECK(executor.self == nullptr && psm_last_error()[0] != '\0');
    CHECK(status == PSM_ERROR_ENGINE_FILE || status == PSM_ERROR_OUT_OF_MEMORY);
    return false;
  }
  psm_model_info info = {};
  info.struct_size = PSM_MODEL_INFO_SIZE;
  CHECK_OK(executor.describe(executor.self, &info));
  if (!only_open && executor.open(executor.self, 3) == PSM_OK) {
    const int32_t n =
        std::min({3, info.max_num_tokens, info.max_seq_len, info.tokens_per_block * 3});
    const int32_t ids[] = {0, 0, 0}, positions[] = {0, 1, 2}, cu[] = {0, n}, table[] = {1, 0, 2};
    const int32_t row = n - 1;
    psm_batch batch = {};
    batch.struct_size = PSM_BATCH_SIZE;
    batch.num_tokens = n;
    batch.num_seqs = batch.num_logits_rows = 1;
    batch.block_table_stride = 3;
    batch.input_ids = ids;
    batch.position_ids = positions;
    batch.query_lens = batch.kv_lens = &n;
    batch.cu_query_lens = cu;
    batch.block_table = table;
    batch.logits_rows = &row;
    psm_candidate candidates[4];
    batch.num_candidates = info.samples_rows == PSM_SAMPLES_CANDIDATES ? 4 : 0;
    batch.candidates = candidates;
    const float* logits = nullptr;
    if (executor.step(executor.self, &batch, &logits) == PSM_OK) {
      volatile float sum = 0;
      for (int32_t i = 0; i < info.vocab_size; ++i) sum = sum + logits[i];
      if (batch.num_candidates > 0) CHECK(candidates[0].token_id < info.vocab_size);
    }
  }
  executor.close(executor.self);
  return true;
}

void CheckRefused(const TempFile& file, const std::vector<uint8_t>& bytes,
                  const std::string& text) {
  file.Write(bytes);
  psm_executor executor;
  const psm_status status = psm_cpu_executor_create(file.path().c_str(), nullptr, &executor);
  if (status != PSM_ERROR_ENGINE_FILE || strstr(psm_last_error(), text.c_str()) == nullptr) {
    fprintf(stderr, "got %s \"%s\", wanted \"%s\"\n", psm_status_name(status), psm_last_error(),
            text.c_str());
    exit(1);
  }
  CHECK(strstr(psm_last_error(), file.path().c_str()) != nullptr);
  CheckBothWays(file.path());
}

// Edits of a valid plan and a part of the message that each must bring.
using Edits = std::vector<std::pair<std::function<void(TinyModel*)>, const char*>>;
void CheckEdits(const TinyShape& shape, const Edits& edits) {
  const TempFile file;
  for (const auto& edit : edits) {
    TinyModel model(shape);
    edit.first(&model);
    CheckRefused(file, model.plan.Bytes(), edit.second);
  }
}

void CheckRules() {
  const auto op = [](TinyModel* m, uint32_t code) -> OpRecord& {
    for (OpRecord& o : m->plan.ops) {
      if (o.code == code) return o;
    }
    exit(1);
  };
  const auto kv_scales = [&](TinyModel* m, float k, float v) {
    m->plan.header.kv_format = kKvF8;
    op(m, kOpPagedAttention).tensors[0] =
        m->plan.Tensor("kv_scales", PackMatrix({k, v}, 1, 2, kF32, 0, true));
  };
  const Edits rules = {
      {[](TinyModel* m) { m->plan.header.vocab_size = 0; }, "vocab_size is 0, wanted 1"},
      {[](TinyModel* m) { m->plan.header.num_kv_heads = 4; }, "not a multiple of num_kv_heads"},
      {[](TinyModel* m) { m->plan.header.max_input_len = 97; },
       "max_input_len is 97, wanted 1 to 96"},
      {[](TinyModel* m) { m->plan.header.tokens_per_block = 12; }, "wanted a power of two"},
      {[](TinyModel* m) { m->plan.header.kv_format = 4; }, "kv_format is 4, wanted 0 (F32)"},
      {[](TinyModel* m) { m->plan.header.logits_slot = 0; }, "logits_slot 0 is not"},
      {[](TinyModel* m) { m->plan.header.reserved[3] = 1; }, "reserved header words"},
      {[](TinyModel* m) { m->plan.slots[1].rows = 2; }, "slot 1 has rows kind 2"},
      {[](TinyModel* m) { m->plan.slots[1].width = 0; }, "slot 1 is 0 columns wide"},
      {[](TinyModel* m) { m->plan.tensors[2].record.dtype = kF32; }, "do not go together"},
      {[](TinyModel* m) { m->plan.tensors[2].record.rows = 0; }, "is 0 x 40"},
      {[](TinyModel* m) { m->plan.tensors[2].record.dtype = 7; }, "dtype 7 (?)"},
      {[](TinyModel* m) { m->plan.tensors[2].record.dtype = kF8; }, "dtype 5 (F8) in layout 2"},
      {[](TinyModel* m) { m->plan.tensors[2].record.outer_scale = 2; }, "only F4 has one"},
      {[](TinyModel* m) { m->plan.tensors[2].record.scale_dtype = kF16; },
       "is I8 with scales of dtype 4 (F16), wanted F8 of F4, else F32 or, of I8 and I4, BF16"},
      {[](TinyModel* m) { m->plan.tensors[2].record.scale_dtype = 7; }, "scales of dtype 7 (?)"},
      {[](TinyModel* m) { m->plan.tensors[0].record.scale_dtype = kBF16; },
       "is F32 with scales of dtype 1 (BF16)"},
      {[](TinyModel* m) { m->plan.tensors[2].record.scale_dtype = kBF16; },
       "bytes of scales, its shape wants"},
      {[](TinyModel* m) { m->plan.tensors[2].zeros.resize(96 * 5); },
       "is I8 and has zero points, which do not go together"},
      {[](TinyModel* m) { m->plan.tensors[0].scales.resize(4); },
       "is F32 and has scales, which do not go together"},
      {[](TinyModel* m) { m->plan.tensors[2].record.group_size = 7; },
       "group_size 7, wanted a divisor"},
      {[](TinyModel* m) { m->plan.tensors[0].record.group_size = 4; },
       "only I8, I4, F8 and F4 have groups"},
      {[](TinyModel* m) { m->plan.tensors[2].data.pop_back(); }, "bytes of data, its shape wants"},
      {[](TinyModel* m) { m->plan.tensors[2].scales.clear(); }, "has 0 bytes of scales"},
      {[&](TinyModel* m) { op(m, kOpAdd).code = 99; }, "code 99 is not known"},
      {[&](TinyModel* m) { op(m, kOpEmbed).tensors[0] = 99; }, "the embedding is tensor 99"},
      {[&](TinyModel* m) { op(m, kOpEmbed).out.slot = 99; }, "out is slot 99 of 8"},
      {[&](TinyModel* m) { op(m, kOpEmbed).out.col = 1; }, "out wants columns 1 to 41 of slot 0"},
      {[&](TinyModel* m) { op(m, kOpEmbed).out.slot = 6; }, "out does not hold token rows"},
      {[&](TinyModel* m) { op(m, kOpRmsNorm).i[0] = 0; }, "number of groups is 0"},
      {[&](TinyModel* m) { op(m, kOpRmsNorm).i[1] = 39; }, "wanted 39 columns"},
      {[&](TinyModel* m) { op(m, kOpRmsNorm).f[0] = -1; }, "epsilon is negative"},
      {[&](TinyModel* m) { op(m, kOpLinear).tensors[0] = 0; }, "the weight is row-major"},
      {[&](TinyModel* m) { op(m, kOpLinear).tensors[1] = 0; }, "the bias is 96 x 4"},
      {[&](TinyModel* m) { op(m, kOpLinear).i[0] = 2; }, "add flag is 2"},
      {[&](TinyModel* m) { op(m, kOpLinear).i[1] = 7; }, "takes its input as 7"},
      {[&](TinyModel* m) { op(m, kOpLinear).i[1] = kInputInt8Static; },
       "the input's scale is 0, wanted a number above 0"},
      {[&](TinyModel* m) { op(m, kOpLinear).in[1].slot = 99; }, "the adapters' input is slot 99"},
      {[&](TinyModel* m) { op(m, kOpLinear).in[1] = {1, 1}; },
       "the adapters' input wants columns 1 to 41"},
      {[&](TinyModel* m) { op(m, kOpLinear).in[1].slot = 6; }, "different kinds of rows"},
      {[&](TinyModel* m) { op(m, kOpLinear).in[1] = {2, 1}; }, "input and output columns overlap"},
      {[&](TinyModel* m) { op(m, kOpLinear).in[0] = {2, 1}; }, "input and output columns overlap"},
      {[&](TinyModel* m) { op(m, kOpLinear).in[0].slot = 6; }, "different kinds of rows"},
      {[&](TinyModel* m) { op(m, kOpRope).i[2] = 7; }, "rotates 7 of 8"},
      {[&](TinyModel* m) { op(m, kOpRope).tensors[1] = 2; }, "sin is not a row-major F32"},
      {[&](TinyModel* m) { m->plan.header.max_seq_len = 97; }, "at least 97 rows"},
      {[&](TinyModel* m) { op(m, kOpPagedAttention).i[1] = 3; }, "3 KV heads"},
      {[&](TinyModel* m) { op(m, kOpPagedAttention).i[3] = 1; }, "is of layer 1, the model has 1"},
      {[&](TinyModel* m) { op(m, kOpPagedAttention).i[4] = -1; }, "window is -1"},
      {[&](TinyModel* m) { op(m, kOpPagedAttention).f[0] = INFINITY; },
       "the scale is not a finite"},
      {[&](TinyModel* m) { op(m, kOpPagedAttention).f[1] = -1; }, "the soft cap is negative"},
      {[&](TinyModel* m) { op(m, kOpPagedAttention).tensors[0] = 0; }, "the pools hold floats"},
      {[&](TinyModel* m) {
         m->plan.header.kv_format = kKvF16;
         op(m, kOpPagedAttention).tensors[0] = 0;
       },
       "the pools hold floats"},
      {[](TinyModel* m) { m->plan.header.kv_format = kKvI8; },
       "the scales of K and V is tensor -1"},
      {[&](TinyModel* m) { kv_scales(m, 0, 1); }, "the scale of K is 0, wanted a number above 0"},
      {[&](TinyModel* m) { kv_scales(m, 1, NAN); }, "the scale of V is nan"},
      {[&](TinyModel* m) { kv_scales(m, 1, INFINITY); }, "the scale of V is inf"},
      {[&](TinyModel* m) { op(m, kOpPagedAttention).out = {2, 30}; }, "columns overlap"},
      {[&](TinyModel* m) { op(m, kOpGlu).i[1] = 3; }, "activation 3"},
      {[&](TinyModel* m) { op(m, kOpGlu).out = {4, 30}; }, "columns overlap"},
      {[&](TinyModel* m) { op(m, kOpAdd).in[1].col = 8; }, "in wants columns 8 to 48"},
      {[&](TinyModel* m) { op(m, kOpScale).f[0] = NAN; }, "the factor is not a finite"},
      {[&](TinyModel* m) { op(m, kOpSoftcap).f[0] = 0; }, "cap is not above 0"},
      {[&](TinyModel* m) { op(m, kOpGatherRows).out.slot = 0; }, "out logits rows"},
      {[&](TinyModel* m) { op(m, kOpAdd).name = 1 << 20; }, "has its name at byte 1048576"},
  };
  CheckEdits(SmallShape(), rules);

  TinyShape four = SmallShape();  // bits, with zero points
  four.dtype = kI4;
  four.input = kInputFloat;
  four.with_zeros = true;
  CheckEdits(
      four, {
                {[](TinyModel* m) { m->plan.tensors[2].zeros.pop_back(); }, "bytes of zero points"},
                {[&](TinyModel* m) { op(m, kOpLinear).i[1] = kInputInt8Row; },
                 "the weight is not I8 or I4 without zero points"},
            });

  TinyShape f8 = SmallShape();
  f8.dtype = kF8;
  f8.input = kInputF8Row;
  f8.group_size = 0;
  CheckEdits(f8, {
                     {[&](TinyModel* m) { op(m, kOpLinear).i[1] = kInputF8Static; },
                      "the input's scale is 0, wanted a number above 0"},
                     {[&](TinyModel* m) { op(m, kOpLinear).i[1] = kInputF8Group; },
                      "the weight has no groups"},
                     {[&](TinyModel* m) { op(m, kOpLinear).i[1] = kInputInt8Row; },
                      "the weight is not I8 or I4 without zero points"},
                 });
  f8.hidden = 42;
  CheckEdits(f8, {{[](TinyModel*) {}, "has groups of 42 columns; wanted a multiple of 4"}});
  TinyShape not_f8 = SmallShape();
  not_f8.dtype = kI8;
  CheckEdits(not_f8, {{[&](TinyModel* m) { op(m, kOpLinear).i[1] = kInputF8Row; },
                       "the weight is not F8"}});

  TinyShape rounded = SmallShape();
  rounded.dtype = kF4;
  rounded.group_size = 16;
  rounded.hidden = 48;
  rounded.inner = 64;
  rounded.pre_scale = true;
  rounded.round = kRoundF4;
  rounded.round_group = 16;
  CheckEdits(
      rounded,
      {
          {[](TinyModel* m) { m->plan.tensors[2].record.outer_scale = 0; },
           "has outer_scale 0, wanted a number above 0"},
          {[](TinyModel* m) { m->plan.tensors[2].record.outer_scale = NAN; }, "a number above 0"},
          {[](TinyModel* m) { m->plan.tensors[2].record.outer_scale = INFINITY; },
           "outer_scale inf"},
          {[](TinyModel* m) { m->plan.tensors[2].record.scale_dtype = kF32; },
           "is F4 with scales of dtype 0 (F32)"},
          {[](TinyModel* m) { m->plan.tensors[2].record.group_size = 24; },
           "is F4 with group_size 24, wanted 16"},
          {[](TinyModel* m) { m->plan.tensors[2].f8_scales.pop_back(); }, "bytes of scales"},
          {[&](TinyModel* m) { op(m, kOpLinear).i[1] = kInputInt8Row; },
           "the weight is not I8 or I4 without zero points"},
          {[&](TinyModel* m) { op(m, kOpRoundInput).i[0] = 0; }, "the width is 0"},
          {[&](TinyModel* m) { op(m, kOpRoundInput).i[1] = 3; }, "rounds to format 3"},
          {[&](TinyModel* m) { op(m, kOpRoundInput).i[1] = -1; }, "rounds to format -1"},
          {[&](TinyModel* m) { op(m, kOpRoundInput).i[2] = 7; }, "rounds in groups of 7"},
          {[&](TinyModel* m) { op(m, kOpRoundInput).i[2] = -2; }, "rounds in groups of -2"},
          {[&](TinyModel* m) { op(m, kOpRoundInput).i[2] = 48; },
           "to F4 in groups of 48, wanted 16"},
          {[&](TinyModel* m) { op(m, kOpRoundInput).f[0] = 0; }, "the scale is 0"},
          {[&](TinyModel* m) {
             op(m, kOpRoundInput).i[1] = kRoundF8;
             op(m, kOpRoundInput).i[2] = -1;
             op(m, kOpRoundInput).f[0] = -1;
           },
           "the scale is -1, wanted a number above 0"},
          {[&](TinyModel* m) { op(m, kOpRoundInput).in[0].col = 1; }, "in wants columns 1 to 49"},
          {[&](TinyModel* m) { op(m, kOpMulVector).i[0] = 40; }, "the vector is 1 x 48"},
          {[&](TinyModel* m) { op(m, kOpMulVector).tensors[0] = 2; }, "is not a row-major F32"},
          {[&](TinyModel* m) { op(m, kOpMulVector).out.slot = 99; }, "out is slot 99"},
      });
}

void CheckFileRules() {
  TinyModel model(SmallShape());
  const std::vector<uint8_t> good = model.plan.Bytes();
  const TempFile file;
  file.Write(good);
  CHECK(OpenAndStep(file.path(), false));

  const auto edited = [&](size_t at, uint32_t value, bool seal) {
    std::vector<uint8_t> bytes = good;
    memcpy(bytes.data() + at, &value, sizeof(value));
    if (seal) PlanBuilder::Seal(&bytes);
    return bytes;
  };
  CheckRefused(file, {}, "has 0 bytes");
  CheckRefused(file, std::vector<uint8_t>(good.begin(), good.begin() + 199), "has 199 bytes");
  CheckRefused(file, edited(0, 0x12345678, true), "does not begin with PSMPLAN");
  CheckRefused(file, edited(offsetof(PlanHeader, format_version), 1, true), "format version 1");
  CheckRefused(file, edited(offsetof(PlanHeader, vocab_size), 5, false), "header has crc32");
  CheckRefused(file, edited(sizeof(PlanHeader) + 56, 5, false), "tables have crc32");
  CheckRefused(file, edited(offsetof(PlanHeader, slots_offset), 1, true),
               "slot table begins at byte 1");
  CheckRefused(file, edited(offsetof(PlanHeader, num_ops), 5000, true),
               "op table has 5000 records");
  CheckRefused(file, edited(offsetof(PlanHeader, data_offset), 63, true), "data begins at byte 63");
  std::vector<uint8_t> longer = good;
  longer.push_back(0);
  CheckRefused(file, longer, "cut or appended to");
  std::vector<uint8_t> cut(good.begin(), good.end() - 64);
  CheckRefused(file, cut, "cut or appended to");
  const uint64_t new_size =
      cut.size();  // a cut that the header admits still misses the last tensor
  memcpy(cut.data() + offsetof(PlanHeader, file_bytes), &new_size, sizeof(new_size));
  PlanBuilder::Seal(&cut);
  CheckRefused(file, cut, "with all of it in the file's data");
}

// What is no file is refused by what it is, and a FIFO that nobody writes to is not waited for.
void CheckKinds() {
  const TempFile file;
  const std::string& path = file.path();
  CHECK(unlink(path.c_str()) == 0 && mkfifo(path.c_str(), 0600) == 0);
  CHECK(OpenError(path, WeightsIn::kMapped).find("is a FIFO, not a regular file") !=
        std::string::npos);
  CHECK(unlink(path.c_str()) == 0 && mkdir(path.c_str(), 0700) == 0);
  CHECK(OpenError(path, WeightsIn::kMapped).find("is a directory") != std::string::npos);
  CHECK(rmdir(path.c_str()) == 0);
  CHECK(OpenError("/dev/null", WeightsIn::kMapped).find("is a device") != std::string::npos);
}

// Bytes of the whole file as `plan` has them.
std::vector<uint8_t> BytesOf(const Plan& plan) {
  return {plan.at(0), plan.at(0) + plan.header().file_bytes};
}

bool IsMapped(const std::string& path) {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    if (line.find(path) != std::string::npos) return true;
  }
  return false;
}

// Reading into memory: in pieces, interrupted, cut and broken reads.
void CheckReading() {
  TinyShape shape;  // more than one piece of 8 MiB
  shape.vocab = 3000;
  shape.hidden = 800;
  TinyModel model(shape);
  const std::vector<uint8_t> bytes = model.plan.Bytes();
  CHECK(bytes.size() > 9u << 20);
  const TempFile file;
  file.Write(bytes);
  {
    reads.num_reads = 0;
    const auto mapped = Plan::Open(file.path(), WeightsIn::kMapped);
    CHECK(reads.num_reads == 0 && IsMapped(file.path()) && BytesOf(*mapped) == bytes);
  }
  if (!HugePagesOffered()) {
    const auto plan = Plan::Open(file.path(), WeightsIn::kAuto);
    CHECK(!plan->in_huge_pages() && BytesOf(*plan) == bytes);
    return;
  }
  const auto check_read = [&] {
    const auto plan = Plan::Open(file.path(), WeightsIn::kHugePages);
    CHECK(reinterpret_cast<uintptr_t>(plan->at(0)) % kHugePageBytes == 0);
    CHECK(!IsMapped(file.path()) && BytesOf(*plan) == bytes);
  };
  check_read();
  reads.num_interrupted = 5;
  check_read();
  CHECK(reads.num_interrupted <= 0);
  reads.most_bytes = 100003;
  check_read();
  reads.most_bytes = SIZE_MAX;

  for (size_t at : {size_t{0}, size_t{100}, sizeof(PlanHeader), bytes.size() / 2, size_t{9} << 20,
                    bytes.size() - 1}) {
    reads.end = at;
    const std::string cut = OpenError(file.path(), WeightsIn::kHugePages);
    // Several threads read: the first to see it says where it was.
    CHECK(cut.find("ends at byte ") != std::string::npos);
    CHECK(cut.find("it was cut while it was read") != std::string::npos);
    reads.end = SIZE_MAX;
    reads.broken_at = at;
    const std::string broken = OpenError(file.path(), WeightsIn::kHugePages);
    CHECK(broken.find(strerror(EIO)) != std::string::npos);
    CHECK(broken.find(file.path()) != std::string::npos);
    reads.broken_at = SIZE_MAX;
  }
  check_read();
}

// Values that break arithmetic more often than random ones.
uint32_t WildValue(Random* random) {
  const uint32_t values[] = {0,          1,          2,          3,          7,          8,
                             63,         64,         255,        0x7FFFFFFF, 0x80000000, 0xFFFFFFFF,
                             0xFFFFFFC0, 0x00010000, 0x7F800000, 0x7FC00000};
  const uint32_t n = sizeof(values) / sizeof(values[0]);
  const uint32_t pick = random->Below(n + 4);
  return pick < n ? values[pick] : static_cast<uint32_t>(random->Next() >> 13);
}

void Mutate(int count, uint64_t seed) {
  Random random(seed);
  TinyShape shape = SmallShape();
  int opened = 0;
  std::vector<uint8_t> good;
  const TempFile file;
  for (int i = 0; i < count; ++i) {
    if (i % 100 == 0) {
      shape = SmallShape();
      const int variant = i / 100;
      shape.kv_format = static_cast<uint32_t>(variant) % kNumKvFormats;
      shape.dtype = static_cast<uint32_t>(variant) % kNumDTypes;
      const bool integer = shape.dtype == kI8 || shape.dtype == kI4;
      shape.group_size = IsQuantized(shape.dtype) && variant % 2 == 0 ? 8 : 0;
      if (shape.dtype == kF4) {
        shape.group_size = 16;
        shape.hidden = 48;
        shape.inner = 64;
      }
      if (integer && variant % 3 == 0) shape.input = kInputInt8Static;
      if (integer && variant % 3 == 1) shape.input = kInputFloat;
      if (shape.dtype == kF8) shape.input = kInputF8Row + variant / 2 % 3;
      if (shape.input == kInputF8Group) shape.group_size = 8;
      shape.with_zeros = shape.dtype == kI4 && shape.input == kInputFloat;
      shape.by_group = shape.group_size != 0 && variant % 4 == 0;
      shape.pre_scale = variant % 2 == 0;
      shape.plain_logits = variant % 3 != 0;  // with candidates
      shape.split_logits = variant % 3 == 2;
      shape.round = integer ? -1 : variant % 3 == 2 ? kRoundF8 : kRoundInt8;
      if (shape.dtype == kF4) {
        shape.round = kRoundF4;
        shape.round_group = 16;
      }
      good = TinyModel(shape).plan.Bytes();
    }
    std::vector<uint8_t> bytes = good;
    PlanHeader h;
    memcpy(&h, bytes.data(), sizeof(h));
    const int edits = 1 + static_cast<int>(random.Below(3));
    for (int e = 0; e < edits; ++e) {
      // Mostly whole fields of the header and the tables; some single bits anywhere.
      if (random.Below(4) != 0) {
        const size_t words = random.Below(3) == 0 ? sizeof(PlanHeader) / 4 : h.data_offset / 4;
        const uint32_t value = WildValue(&random);
        memcpy(bytes.data() + 4 * random.Below(static_cast<uint32_t>(words)), &value,
               sizeof(value));
      } else {
        bytes[random.Below(static_cast<uint32_t>(bytes.size()))] ^=
            static_cast<uint8_t>(1u << random.Below(8));
      }
    }
    if (random.Below(10) == 0) bytes.resize(random.Below(static_cast<uint32_t>(bytes.size())));
    PlanBuilder::Seal(&bytes);
    file.Write(bytes);
    opened += OpenAndStep(file.path(), false);
    CheckBothWays(file.path());
  }
  printf("%d of %d mutated plans opened\n", opened, count);
  CHECK(opened > 0 && opened < count);
}

}  // namespace

int main(int argc, char** argv) {
  CheckRules();
  CheckFileRules();
  CheckKinds();
  CheckReading();
  Mutate(argc > 1 ? atoi(argv[1]) : 4000, argc > 2 ? strtoull(argv[2], nullptr, 10) : 1);
  return 0;
}
