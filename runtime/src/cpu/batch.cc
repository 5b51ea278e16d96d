// SPDX-License-Identifier: Apache-2.0
#include "cpu/batch.h"

#include "status.h"

namespace plansmith {
namespace cpu {
namespace {

[[noreturn]] void Invalid(const std::string& what) {
  throw StatusError(PSM_ERROR_INVALID_ARGUMENT, "batch: " + what);
}
[[noreturn]] void Shape(const std::string& what) {
  throw StatusError(PSM_ERROR_SHAPE, "batch: " + what);
}

}  // namespace

BatchPlaces::BatchPlaces(const PlanHeader& model, int32_t num_blocks)
    : model_(model), num_blocks_(num_blocks) {
  places_.resize(static_cast<size_t>(model.max_num_tokens));
  claims_.resize(static_cast<size_t>(num_blocks));
}

void BatchPlaces::Set(const psm_batch& batch) {
  CheckCounts(batch);
  CheckTokens(batch);
  int32_t token = 0;
  for (int32_t b = 0; b < batch.num_seqs; ++b) {
    CheckSequence(batch, b, token);
    token += batch.query_lens[b];
  }
  if (token != batch.num_tokens || batch.cu_query_lens[batch.num_seqs] != token) {
    Shape(Format(
        "query_lens sum to %d, cu_query_lens ends with %d, num_tokens is %d; all three must be "
        "equal",
        token, batch.cu_query_lens[batch.num_seqs], batch.num_tokens));
  }
  ClaimBlocks(batch);
}

void BatchPlaces::CheckCounts(const psm_batch& batch) const {
  if (batch.struct_size < PSM_BATCH_SIZE_1_2) {
    Invalid(Format("struct_size is %zu, wanted at least %zu (PSM_BATCH_SIZE_1_2)",
                   batch.struct_size, PSM_BATCH_SIZE_1_2));
  }
  if (batch.num_tokens < 1 || batch.num_tokens > model_.max_num_tokens) {
    Shape(
        Format("num_tokens is %d, the executor takes 1 to %d; make it with another max_num_tokens, "
               "or build the plan with another --max-num-tokens",
               batch.num_tokens, model_.max_num_tokens));
  }
  if (batch.num_seqs < 1 || batch.num_seqs > model_.max_batch_size) {
    Shape(Format("num_seqs is %d, the plan takes 1 to %d; rebuild with another --max-batch-size",
                 batch.num_seqs, model_.max_batch_size));
  }
  const bool has_candidates = batch.struct_size >= PSM_BATCH_SIZE;
  if (has_candidates &&
      (batch.num_candidates < 0 || batch.num_candidates > PSM_MAX_CANDIDATES ||
       (batch.num_candidates > 0 && batch.num_logits_rows > 0 && batch.candidates == nullptr))) {
    Invalid(Format("num_candidates is %d%s, wanted 0 to %d and room for them", batch.num_candidates,
                   batch.candidates == nullptr ? " and candidates NULL" : "", PSM_MAX_CANDIDATES));
  }
  if (batch.num_logits_rows < 0 || batch.num_logits_rows > batch.num_tokens) {
    Shape(Format("num_logits_rows is %d, wanted 0 to num_tokens = %d", batch.num_logits_rows,
                 batch.num_tokens));
  }
  if (batch.input_ids == nullptr || batch.position_ids == nullptr || batch.query_lens == nullptr ||
      batch.kv_lens == nullptr || batch.cu_query_lens == nullptr || batch.block_table == nullptr ||
      (batch.logits_rows == nullptr && batch.num_logits_rows > 0)) {
    Invalid("an array is NULL; give all seven");
  }
  if (batch.block_table_stride < 1) {
    Shape(Format("block_table_stride is %d, wanted at least 1", batch.block_table_stride));
  }
}

void BatchPlaces::CheckTokens(const psm_batch& batch) const {
  for (int32_t t = 0; t < batch.num_tokens; ++t) {
    if (batch.input_ids[t] < 0 || batch.input_ids[t] >= model_.vocab_size) {
      Invalid(Format("input_ids[%d] is %d, wanted 0 to %d (the vocabulary)", t, batch.input_ids[t],
                     model_.vocab_size - 1));
    }
    if (batch.position_ids[t] < 0 || batch.position_ids[t] >= model_.max_seq_len) {
      Invalid(Format("position_ids[%d] is %d, wanted 0 to %d (max_seq_len - 1)", t,
                     batch.position_ids[t], model_.max_seq_len - 1));
    }
  }
  for (int32_t r = 0; r < batch.num_logits_rows; ++r) {
    const int32_t row = batch.logits_rows[r];
    if (row < 0 || row >= batch.num_tokens || (r > 0 && row <= batch.logits_rows[r - 1])) {
      Invalid(Format("logits_rows[%d] is %d, wanted ascending rows below num_tokens = %d", r, row,
                     batch.num_tokens));
    }
  }
}

void BatchPlaces::CheckSequence(const psm_batch& batch, int32_t seq, int32_t first_token) const {
  const int32_t query_len = batch.query_lens[seq], kv_len = batch.kv_lens[seq];
  if (query_len < 1 || query_len > batch.num_tokens - first_token) {
    Shape(Format("query_lens[%d] is %d, wanted 1 to the %d tokens that are left", seq, query_len,
                 batch.num_tokens - first_token));
  }
  if (batch.cu_query_lens[seq] != first_token) {
    Invalid(Format("cu_query_lens[%d] is %d, the query_lens before it sum to %d", seq,
                   batch.cu_query_lens[seq], first_token));
  }
  if (kv_len < query_len || kv_len > model_.max_seq_len) {
    Shape(Format("kv_lens[%d] is %d, wanted query_lens[%d] = %d to max_seq_len = %d", seq, kv_len,
                 seq, query_len, model_.max_seq_len));
  }
  const int32_t num_columns = (kv_len - 1) / model_.tokens_per_block + 1;
  if (num_columns > batch.block_table_stride) {
    Shape(Format("kv_lens[%d] = %d needs %d blocks of %d, block_table has %d columns", seq, kv_len,
                 num_columns, model_.tokens_per_block, batch.block_table_stride));
  }
  const int32_t* blocks =
      batch.block_table + static_cast<size_t>(seq) * static_cast<size_t>(batch.block_table_stride);
  for (int32_t c = 0; c < num_columns; ++c) {
    if (blocks[c] < 0 || blocks[c] >= num_blocks_) {
      Invalid(Format("block_table[%d][%d] is %d, wanted a block of the pool, 0 to %d", seq, c,
                     blocks[c], num_blocks_ - 1));
    }
  }
}

// A block that this step writes belongs to one column of one sequence: sharing it would be a race.
void BatchPlaces::ClaimBlocks(const psm_batch& batch) {
  ++step_;
  const int32_t size = model_.tokens_per_block;
  const auto row_of = [&](int32_t seq) {
    return batch.block_table +
           static_cast<size_t>(seq) * static_cast<size_t>(batch.block_table_stride);
  };
  const auto clash = [&](int32_t seq, int32_t c, const Claim& other) {
    Invalid(Format(
        "block %d is block_table[%d][%d], and this step also writes it as [%d][%d]; give each "
        "its own",
        row_of(seq)[c], seq, c, other.seq, other.column));
  };
  int32_t token = 0;
  for (int32_t b = 0; b < batch.num_seqs; ++b) {
    for (int32_t pos = batch.kv_lens[b] - batch.query_lens[b]; pos < batch.kv_lens[b]; ++pos) {
      const int32_t c = pos / size, block = row_of(b)[c];
      Claim& claim = claims_[static_cast<size_t>(block)];
      if (claim.step == step_ && (claim.seq != b || claim.column != c)) clash(b, c, claim);
      claim = {step_, b, c};
      places_[static_cast<size_t>(token++)] = {static_cast<uint32_t>(block),
                                               static_cast<uint32_t>(pos % size)};
    }
  }
  for (int32_t b = 0; b < batch.num_seqs; ++b) {
    const int32_t num_columns = (batch.kv_lens[b] - 1) / size + 1;
    for (int32_t c = 0; c < num_columns; ++c) {
      const Claim& claim = claims_[static_cast<size_t>(row_of(b)[c])];
      if (claim.step == step_ && (claim.seq != b || claim.column != c)) clash(b, c, claim);
    }
  }
}

}  // namespace cpu
}  // namespace plansmith
