// Copied blocks of the CPU executor: element by element against the layout written out as indices,
// and through the executor, whose logits over copied blocks must not change by a bit.
//
// SPDX-License-Identifier: Apache-2.0
#include "cpu/block_copy.h"

#include <algorithm>
#include <cstring>

#include "driver.h"
#include "isas.h"
#include "tiny_model.h"

using namespace plansmith::cpu;

namespace {

std::vector<uint8_t> RandomBytes(Random* random, size_t n) {
  std::vector<uint8_t> bytes(n);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random->Below(256));
  return bytes;
}

// Copies where the layout says that a position lies, and nothing else changes.
void TestPositions() {
  Random random(3);
  const BlockLayout layouts[] = {{1, 1, 1, 1, 4},  {2, 3, 5, 4, 4}, {3, 2, 8, 16, 4},
                                 {1, 4, 64, 7, 4}, {1, 1, 1, 1, 1}, {2, 3, 5, 4, 1},
                                 {3, 2, 8, 16, 1}, {1, 4, 64, 7, 1}};
  for (const BlockLayout& l : layouts) {
    const std::vector<uint8_t> src = RandomBytes(&random, l.bytes());
    const std::vector<uint8_t> old = RandomBytes(&random, l.bytes());
    for (size_t n = 1; n <= l.block_size; ++n) {
      std::vector<uint8_t> want = old, got = old;
      for (size_t layer = 0; layer < l.num_layers; ++layer) {
        for (size_t head = 0; head < l.num_kv_heads; ++head) {
          for (size_t d = 0; d < l.head_dim; ++d) {
            for (size_t p = 0; p < n; ++p) {
              const size_t k =
                  2 * layer * l.layer_values() + (head * l.head_dim + d) * l.block_size + p;
              const size_t v =
                  (2 * layer + 1) * l.layer_values() + (head * l.block_size + p) * l.head_dim + d;
              for (const size_t at : {k, v}) {
                std::memcpy(&want[at * l.value_bytes], &src[at * l.value_bytes], l.value_bytes);
              }
            }
          }
        }
      }
      CopyPositions(l, src.data(), n, got.data());
      CHECK(got == want);
    }
  }
}

void Copy(Driver* driver, const std::vector<psm_block_copy>& copies) {
  const psm_executor& e = driver->executor;
  const psm_status status = e.copy_blocks(e.self, copies.data(), copies.size());
  if (status != PSM_OK) fprintf(stderr, "%s\n", e.last_error(e.self));
  CHECK(status == PSM_OK);
}

// A sequence goes on over copies of its blocks (through the host and within the pool, the last one
// partly filled) with the logits it would have had.
void TestThroughExecutor(const char* isa, uint32_t kv_format) {
  TinyShape shape;
  shape.kv_format = kv_format;
  TinyModel model{shape};
  const TempFile file;
  file.Write(model.plan.Bytes());
  const int32_t size = static_cast<int32_t>(model.s.block);
  Random random(4);
  for (int32_t length = 1; length < 3 * size; ++length) {
    Driver driver(file.path(), isa, 2, 40);
    CHECK_OK(driver.executor.open_host(driver.executor.self, 4));
    std::vector<Driver::Sequence> pair(2);
    for (Driver::Sequence& s : pair) {
      for (int32_t i = 0; i < length + 5; ++i)
        s.ids.push_back(static_cast<int32_t>(random.Below(model.s.vocab)));
    }
    driver.Step(&pair, {length, length});  // the second one's blocks hold other tokens
    pair[1].ids = pair[0].ids;
    pair[1].logits = pair[0].logits;
    for (size_t c = 0; c < pair[0].blocks.size(); ++c) {
      const int32_t from = pair[0].blocks[c], to = pair[1].blocks[c];
      const int32_t held = std::min(size, length - static_cast<int32_t>(c) * size);
      if (c % 2 == 0) {
        Copy(&driver, {{PSM_COPY_TO_HOST, from, 3, held}, {PSM_COPY_FROM_HOST, 3, to, held}});
      } else {
        Copy(&driver, {{PSM_COPY_DEVICE, from, to, held}});
      }
    }
    driver.Step(&pair, {5, 0});
    driver.Step(&pair, {0, 5});
    CHECK(pair[0].logits.size() == pair[1].logits.size());
    CHECK(std::memcmp(pair[0].logits.data(), pair[1].logits.data(),
                      pair[0].logits.size() * sizeof(float)) == 0);
  }
}

void TestBadCopies() {
  TinyModel model{TinyShape()};
  const TempFile file;
  file.Write(model.plan.Bytes());
  psm_executor unopened;
  CHECK_OK(psm_cpu_executor_create(file.path().c_str(), nullptr, &unopened));
  const psm_block_copy fine = {PSM_COPY_DEVICE, 0, 1, 1};
  CHECK(unopened.copy_blocks(unopened.self, &fine, 1) == PSM_ERROR_INVALID_ARGUMENT);
  CHECK(unopened.open_host(unopened.self, 1) == PSM_ERROR_INVALID_ARGUMENT);
  unopened.close(unopened.self);

  Driver driver(file.path(), nullptr, 1, 10);
  const psm_executor& e = driver.executor;
  const auto fails = [&](const psm_block_copy& copy, const char* text) {
    const psm_block_copy both[] = {fine, copy};
    CHECK(e.copy_blocks(e.self, both, 2) == PSM_ERROR_INVALID_ARGUMENT);
    if (std::strstr(e.last_error(e.self), text) == nullptr) {
      fprintf(stderr, "wanted '%s', got '%s'\n", text, e.last_error(e.self));
      CHECK(false);
    }
  };
  fails({PSM_COPY_TO_HOST, 0, 0, 1}, "no host blocks are open");
  CHECK(e.open_host(e.self, 0) == PSM_ERROR_INVALID_ARGUMENT);
  CHECK_OK(driver.executor.copy_blocks(e.self, nullptr, 0));
  CHECK(e.copy_blocks(e.self, nullptr, 1) == PSM_ERROR_INVALID_ARGUMENT);
  const int32_t size = static_cast<int32_t>(model.s.block);
  fails({3, 0, 1, 1}, "copies[1].kind is 3");
  fails({PSM_COPY_DEVICE, -1, 1, 1}, "copies[1].src is -1, wanted a device block, 0 to 9");
  fails({PSM_COPY_DEVICE, 0, 10, 1}, "copies[1].dst is 10");
  fails({PSM_COPY_DEVICE, 4, 4, 1}, "block 4 onto itself");
  fails({PSM_COPY_DEVICE, 0, 1, 0}, "num_tokens is 0");
  fails({PSM_COPY_DEVICE, 0, 1, size + 1}, "num_tokens is 9, wanted 1 to tokens_per_block = 8");
}

void TestHostLimits() {
  TinyModel model{TinyShape()};
  const TempFile file;
  file.Write(model.plan.Bytes());
  Driver driver(file.path(), nullptr, 1, 10);
  const psm_executor& e = driver.executor;
  CHECK_OK(e.open_host(e.self, 2));
  CHECK(e.open_host(e.self, 2) == PSM_ERROR_INVALID_ARGUMENT);
  const psm_block_copy beyond = {PSM_COPY_TO_HOST, 0, 2, 1};
  CHECK(e.copy_blocks(e.self, &beyond, 1) == PSM_ERROR_INVALID_ARGUMENT);
  CHECK(std::strstr(e.last_error(e.self), "wanted a host block, 0 to 1") != nullptr);
}

}  // namespace

int main() {
  TestPositions();
  for (const KernelTable* table : UsableTables()) {
    for (uint32_t format : {kKvF32, kKvF16, kKvF8, kKvI8}) TestThroughExecutor(table->name, format);
  }
  TestBadCopies();
  TestHostLimits();
  return 0;
}
