// A model for tests of speculation, and a draft that resembles it as closely as asked.
//
// Its logits are a function of the token history it reads back through the block tables. A draft
// has the same function plus noise: with none it is the model itself, so that every draft token has
// to be accepted, and one that is not means that the draft was given wrong positions.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <vector>

#include "plansmith/plansmith.h"

namespace history {

inline uint64_t Mix(uint64_t h) {
  h = (h ^ (h >> 31)) * UINT64_C(0x7fb5d329728ea185);
  h = (h ^ (h >> 27)) * UINT64_C(0x81dadef4bc2dd44d);
  return h ^ (h >> 33);
}

// Logits in [-range, range], and up to `noise` off that.
struct Model {
  int32_t vocab_size = 97;
  float range = 4.0f;
  float noise = 0.0f;

  void Logits(const std::vector<int32_t>& tokens, float* out) const {
    uint64_t h = 3;
    for (int32_t token : tokens) h = Mix(h * 5 + static_cast<uint64_t>(token) + 1);
    for (int32_t v = 0; v < vocab_size; ++v) {
      const uint64_t x = static_cast<uint64_t>(v);
      out[v] = range * Unit(Mix(h + x)) + noise * Unit(Mix(h + x + UINT64_C(0x123456789)));
    }
  }
  static float Unit(uint64_t x) { return static_cast<float>(x >> 40) / 8388608.0f - 1.0f; }
};

// One thread. Outlives its engine.
class Executor {
 public:
  explicit Executor(Model model = {}) : model_(model) {
    info.struct_size = PSM_MODEL_INFO_SIZE;
    info.vocab_size = model.vocab_size;
    info.num_layers = info.num_heads = info.num_kv_heads = info.head_dim = 1;
    info.max_batch_size = 8;
    info.max_num_tokens = 48;
    info.max_input_len = 120;
    info.max_seq_len = 160;
    info.tokens_per_block = 4;
    info.max_logits_rows = 48;
    info.kv_bytes_per_block = 64;
  }

  psm_executor Table() {
    psm_executor table{};
    table.struct_size = PSM_EXECUTOR_SIZE;
    table.self = this;
    table.describe = [](void* self, psm_model_info* out) {
      const psm_model_info& info = static_cast<Executor*>(self)->info;
      const size_t size = out->struct_size;
      std::memcpy(out, &info, std::min(size, sizeof info));
      out->struct_size = size;
      return psm_status{PSM_OK};
    };
    table.open = [](void* self, int32_t num_blocks) {
      auto* e = static_cast<Executor*>(self);
      e->Open(num_blocks);
      return psm_status{PSM_OK};
    };
    table.step = [](void* self, const psm_batch* batch, const float** logits) {
      return static_cast<Executor*>(self)->Step(*batch, logits);
    };
    table.close = [](void* self) { ++static_cast<Executor*>(self)->num_closed; };
    table.last_error = [](void* self) -> const char* {
      return static_cast<Executor*>(self)->error;
    };
    table.copy_blocks = [](void* self, const psm_block_copy* copies, size_t n) {
      return static_cast<Executor*>(self)->Copy(copies, n);
    };
    table.open_host = [](void* self, int32_t num_blocks) {
      auto* e = static_cast<Executor*>(self);
      e->host_.assign(static_cast<size_t>(num_blocks * e->info.tokens_per_block), -1);
      return psm_status{PSM_OK};
    };
    return table;
  }

  psm_model_info info{};
  int64_t num_steps = 0;
  int64_t num_rows = 0;
  int32_t max_tokens_seen = 0;
  int32_t max_seqs_seen = 0;
  int32_t max_step_tokens = 1 << 30;  // more in a step is an error
  int64_t fail_every = 0;             // steps fail, 0 = never
  int64_t nan_every = 0;              // steps whose first row has a NaN
  // A step moves the clock by fixed_ns + per_token_ns for each token.
  int64_t* clock_ns = nullptr;
  int64_t fixed_ns = 0, per_token_ns = 0;
  int32_t num_closed = 0;
  char error[160] = "";

 private:
  psm_status Broken(const char* rule, int32_t seq) {
    std::snprintf(error, sizeof error, "broken: %s (sequence %d of step %lld)", rule, seq,
                  static_cast<long long>(num_steps));
    std::fprintf(stderr, "%s\n", error);
    return PSM_ERROR_INVALID_ARGUMENT;
  }
  int32_t* Place(const psm_batch& b, int32_t seq, int32_t position) {
    const int32_t bs = info.tokens_per_block;
    const int32_t block = b.block_table[seq * b.block_table_stride + position / bs];
    const size_t at = static_cast<size_t>(block * bs + position % bs);
    return block < 0 || at >= pool_.size() ? nullptr : &pool_[at];
  }

  // Sizes everything: a step allocates nothing.
  void Open(int32_t num_blocks) {
    pool_.assign(static_cast<size_t>(num_blocks * info.tokens_per_block), -1);
    writer_.reserve(static_cast<size_t>(num_blocks));
    history_.reserve(static_cast<size_t>(info.max_seq_len));
    logits_.reserve(static_cast<size_t>(info.max_logits_rows * info.vocab_size));
  }

  psm_status Step(const psm_batch& b, const float** logits) {
    ++num_steps;
    if (clock_ns != nullptr) *clock_ns += fixed_ns + per_token_ns * b.num_tokens;
    max_tokens_seen = std::max(max_tokens_seen, b.num_tokens);
    max_seqs_seen = std::max(max_seqs_seen, b.num_seqs);
    if (fail_every > 0 && num_steps % fail_every == 0) {
      std::snprintf(error, sizeof error, "told to fail");
      return PSM_ERROR_CUDA;
    }
    if (b.num_tokens > std::min(info.max_num_tokens, max_step_tokens) ||
        b.num_seqs > info.max_batch_size || b.num_logits_rows > info.max_logits_rows)
      return Broken("limits", -1);
    if (const psm_status status = Write(b); status != PSM_OK) return status;
    logits_.resize(static_cast<size_t>(b.num_logits_rows * model_.vocab_size));
    num_rows += b.num_logits_rows;
    int32_t seq = 0;
    for (int32_t r = 0; r < b.num_logits_rows; ++r) {
      const int32_t row = b.logits_rows[r];
      while (b.cu_query_lens[seq + 1] <= row) ++seq;
      history_.clear();
      for (int32_t p = 0; p <= b.position_ids[row]; ++p) {
        const int32_t* place = Place(b, seq, p);
        if (place == nullptr || *place < 0) return Broken("a position was never written", seq);
        history_.push_back(*place);
      }
      model_.Logits(history_, &logits_[static_cast<size_t>(r * model_.vocab_size)]);
    }
    if (nan_every > 0 && num_steps % nan_every == 0 && b.num_logits_rows > 0)
      logits_[5] = __builtin_nanf("");
    *logits = logits_.data();
    return PSM_OK;
  }

  // Nobody else's table may hold a block that is written.
  psm_status Write(const psm_batch& b) {
    const int32_t bs = info.tokens_per_block;
    writer_.assign(pool_.size() / static_cast<size_t>(bs), -1);
    for (int32_t s = 0; s < b.num_seqs; ++s) {
      const int32_t begin = b.cu_query_lens[s], n = b.query_lens[s];
      if (n < 1 || b.cu_query_lens[s + 1] != begin + n || b.kv_lens[s] > info.max_seq_len)
        return Broken("lengths", s);
      for (int32_t i = 0; i < n; ++i) {
        const int32_t p = b.position_ids[begin + i];
        int32_t* place = Place(b, s, p);
        if (p != b.kv_lens[s] - n + i || place == nullptr) return Broken("positions", s);
        writer_[static_cast<size_t>((place - pool_.data()) / bs)] = s;
        *place = b.input_ids[begin + i];
      }
    }
    for (int32_t s = 0; s < b.num_seqs; ++s) {
      for (int32_t column = 0; column < b.block_table_stride; ++column) {
        const int32_t block = b.block_table[s * b.block_table_stride + column];
        // Behind kv_lens may be blocks of drafts that were refused.
        if (column * bs >= b.kv_lens[s]) continue;
        if (block < 0) return Broken("block table", s);
        const int32_t writer = writer_[static_cast<size_t>(block)];
        if (writer >= 0 && writer != s) return Broken("another's block is written", s);
      }
    }
    return PSM_OK;
  }

  psm_status Copy(const psm_block_copy* copies, size_t n) {
    const size_t bs = static_cast<size_t>(info.tokens_per_block);
    for (size_t i = 0; i < n; ++i) {
      const psm_block_copy& c = copies[i];
      std::vector<int32_t>& from = c.kind == PSM_COPY_FROM_HOST ? host_ : pool_;
      std::vector<int32_t>& to = c.kind == PSM_COPY_TO_HOST ? host_ : pool_;
      std::copy_n(from.begin() + static_cast<ptrdiff_t>(static_cast<size_t>(c.src) * bs),
                  c.num_tokens,
                  to.begin() + static_cast<ptrdiff_t>(static_cast<size_t>(c.dst) * bs));
    }
    return PSM_OK;
  }

  Model model_;
  std::vector<int32_t> pool_, host_, writer_, history_;
  std::vector<float> logits_;
};

}  // namespace history
