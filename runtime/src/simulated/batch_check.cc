// SPDX-License-Identifier: Apache-2.0
#include "simulated/batch_check.h"

#include <algorithm>

#include "status.h"

namespace plansmith {
namespace simulated {
namespace {

// A step with more table entries has only those checked that it reads or writes: at a million
// blocks a walk over all of them would take longer than all the rest.
constexpr int64_t kMaxEntriesChecked = 1 << 16;

[[noreturn]] void Invalid(const std::string& what) {
  throw StatusError(PSM_ERROR_INVALID_ARGUMENT, "batch: " + what);
}

void CheckRange(const char* name, int64_t value, int64_t least, int64_t most) {
  if (value < least || value > most) {
    Invalid(Format("%s is %lld, wanted %lld to %lld", name, static_cast<long long>(value),
                   static_cast<long long>(least), static_cast<long long>(most)));
  }
}

const int32_t* TableOf(const psm_batch& batch, int32_t seq) {
  return batch.block_table +
         static_cast<size_t>(seq) * static_cast<size_t>(batch.block_table_stride);
}

}  // namespace

BatchCheck::BatchCheck(const psm_model_info& info, int32_t num_blocks)
    : info_(info), num_blocks_(num_blocks), claims_(static_cast<size_t>(num_blocks)) {}

void BatchCheck::Check(const psm_batch& batch, const std::vector<bool>& holds_adapter) {
  CheckCounts(batch);
  const bool whole = int64_t{batch.num_seqs} * batch.block_table_stride <= kMaxEntriesChecked;
  ++step_;
  int32_t token = 0;
  for (int32_t b = 0; b < batch.num_seqs; ++b) {
    CheckSequence(batch, b, token);
    CheckTable(batch, b, whole);
    ClaimWritten(batch, b);
    token += batch.query_lens[b];
  }
  if (token != batch.num_tokens || batch.cu_query_lens[batch.num_seqs] != token) {
    Invalid(
        Format("query_lens sum to %d, cu_query_lens ends with %d, num_tokens is %d; all three "
               "must be equal",
               token, batch.cu_query_lens[batch.num_seqs], batch.num_tokens));
  }
  for (int32_t b = 0; whole && b < batch.num_seqs; ++b) CheckShared(batch, b);
  CheckRows(batch);
  CheckAdapters(batch, holds_adapter);
}

void BatchCheck::CheckCounts(const psm_batch& batch) const {
  if (batch.struct_size < PSM_BATCH_SIZE_1_2) {
    Invalid(Format("struct_size is %zu, wanted at least %zu (PSM_BATCH_SIZE_1_2)",
                   batch.struct_size, PSM_BATCH_SIZE_1_2));
  }
  CheckRange("num_tokens", batch.num_tokens, 1, info_.max_num_tokens);
  CheckRange("num_seqs", batch.num_seqs, 1, std::min(info_.max_batch_size, batch.num_tokens));
  CheckRange("num_logits_rows", batch.num_logits_rows, 0,
             std::min(info_.max_logits_rows, batch.num_tokens));
  CheckRange("block_table_stride", batch.block_table_stride, 1,
             (info_.max_seq_len - 1) / info_.tokens_per_block + 1);
  if (batch.input_ids == nullptr || batch.position_ids == nullptr || batch.query_lens == nullptr ||
      batch.kv_lens == nullptr || batch.cu_query_lens == nullptr || batch.block_table == nullptr ||
      (batch.logits_rows == nullptr && batch.num_logits_rows > 0)) {
    Invalid("an array is NULL; only adapter_slots may be");
  }
}

void BatchCheck::CheckSequence(const psm_batch& batch, int32_t seq, int32_t first_token) const {
  const int32_t query_len = batch.query_lens[seq], kv_len = batch.kv_lens[seq];
  if (query_len < 1 || query_len > batch.num_tokens - first_token) {
    Invalid(Format("query_lens[%d] is %d, wanted 1 to the %d tokens that are left", seq, query_len,
                   batch.num_tokens - first_token));
  }
  if (batch.cu_query_lens[seq] != first_token) {
    Invalid(Format("cu_query_lens[%d] is %d, the query_lens before it sum to %d", seq,
                   batch.cu_query_lens[seq], first_token));
  }
  if (kv_len < query_len || kv_len > info_.max_seq_len) {
    Invalid(Format("kv_lens[%d] is %d, wanted query_lens[%d] = %d to max_seq_len = %d", seq, kv_len,
                   seq, query_len, info_.max_seq_len));
  }
  for (int32_t i = 0; i < query_len; ++i) {
    const int32_t t = first_token + i;
    if (batch.input_ids[t] < 0 || batch.input_ids[t] >= info_.vocab_size) {
      Invalid(Format("input_ids[%d] is %d, wanted 0 to %d (the vocabulary)", t, batch.input_ids[t],
                     info_.vocab_size - 1));
    }
    if (batch.position_ids[t] != kv_len - query_len + i) {
      Invalid(
          Format("position_ids[%d] is %d, wanted %d: token %d of the last %d of sequence %d's "
                 "%d positions",
                 t, batch.position_ids[t], kv_len - query_len + i, i, query_len, seq, kv_len));
    }
  }
}

void BatchCheck::CheckTable(const psm_batch& batch, int32_t seq, bool whole) const {
  const int32_t* table = TableOf(batch, seq);
  const int32_t num_columns = (batch.kv_lens[seq] - 1) / info_.tokens_per_block + 1;
  if (num_columns > batch.block_table_stride) {
    Invalid(Format("kv_lens[%d] = %d needs %d blocks of %d, block_table has %d columns", seq,
                   batch.kv_lens[seq], num_columns, info_.tokens_per_block,
                   batch.block_table_stride));
  }
  const int32_t written = (batch.kv_lens[seq] - batch.query_lens[seq]) / info_.tokens_per_block;
  for (int32_t c = whole ? 0 : written; c < num_columns; ++c) {
    if (table[c] < 0 || table[c] >= num_blocks_) {
      Invalid(Format("block_table[%d][%d] is %d, wanted a block of the pool, 0 to %d", seq, c,
                     table[c], num_blocks_ - 1));
    }
  }
  // Blocks behind the last position may be there already; nothing else than blocks and -1 may.
  for (int32_t c = num_columns; whole && c < batch.block_table_stride; ++c) {
    if (table[c] < -1 || table[c] >= num_blocks_) {
      Invalid(
          Format("block_table[%d][%d] is %d, wanted -1 or a block of the pool", seq, c, table[c]));
    }
  }
}

// A block that this step writes belongs to one column of one sequence: sharing it would be a race.
void BatchCheck::ClaimWritten(const psm_batch& batch, int32_t seq) {
  const int32_t* table = TableOf(batch, seq);
  const int32_t last = (batch.kv_lens[seq] - 1) / info_.tokens_per_block;
  int32_t c = (batch.kv_lens[seq] - batch.query_lens[seq]) / info_.tokens_per_block;
  for (; c <= last; ++c) {
    Claim& claim = claims_[static_cast<size_t>(table[c])];
    if (claim.step == step_) {
      Invalid(
          Format("block %d is written as block_table[%d][%d] and as [%d][%d]; give each its own",
                 table[c], seq, c, claim.seq, claim.column));
    }
    claim = {step_, seq, c};
  }
}

void BatchCheck::CheckShared(const psm_batch& batch, int32_t seq) const {
  const int32_t* table = TableOf(batch, seq);
  const int32_t num_columns = (batch.kv_lens[seq] - 1) / info_.tokens_per_block + 1;
  for (int32_t c = 0; c < num_columns; ++c) {
    const Claim& claim = claims_[static_cast<size_t>(table[c])];
    if (claim.step == step_ && (claim.seq != seq || claim.column != c)) {
      Invalid(
          Format("block %d is read as block_table[%d][%d] while this step writes it as "
                 "[%d][%d]; copy it before",
                 table[c], seq, c, claim.seq, claim.column));
    }
  }
}

void BatchCheck::CheckRows(const psm_batch& batch) const {
  for (int32_t r = 0; r < batch.num_logits_rows; ++r) {
    const int32_t row = batch.logits_rows[r];
    if (row < 0 || row >= batch.num_tokens || (r > 0 && row <= batch.logits_rows[r - 1])) {
      Invalid(Format("logits_rows[%d] is %d, wanted ascending rows below num_tokens = %d", r, row,
                     batch.num_tokens));
    }
  }
}

void BatchCheck::CheckAdapters(const psm_batch& batch,
                               const std::vector<bool>& holds_adapter) const {
  if (batch.adapter_slots == nullptr) return;
  for (int32_t b = 0; b < batch.num_seqs; ++b) {
    const int32_t slot = batch.adapter_slots[b];
    if (slot == -1) continue;
    if (slot < -1 || slot >= info_.max_adapters || !holds_adapter[static_cast<size_t>(slot)]) {
      Invalid(Format("adapter_slots[%d] is %d, wanted -1 or a slot below %d that holds an adapter",
                     b, slot, info_.max_adapters));
    }
  }
}

}  // namespace simulated
}  // namespace plansmith
