// Any executor as one whose step has two halves, and which draws its rows itself: an independent
// reading of psm_step_sampling's masks and edits, then the core's draw. It holds the engine to the
// rules of launch and collect.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cmath>
#include <limits>
#include <memory>
#include <thread>
#include <vector>

#include "check.h"
#include "plansmith/plansmith.h"
#include "request.h"
#include "sampler.h"

namespace plansmith {

// The arrays of a batch, to see that they stay as they were.
struct BatchCopy {
  explicit BatchCopy(const psm_batch& b) {
    const auto add = [this](const int32_t* x, int32_t n) {
      for (int32_t i = 0; x != nullptr && i < n; ++i) words.push_back(x[i]);
    };
    add(&b.num_tokens, 1), add(&b.num_seqs, 1), add(&b.num_logits_rows, 1);
    add(b.input_ids, b.num_tokens), add(b.position_ids, b.num_tokens);
    add(b.query_lens, b.num_seqs), add(b.kv_lens, b.num_seqs);
    add(b.cu_query_lens, b.num_seqs + 1), add(b.logits_rows, b.num_logits_rows);
    add(b.block_table, b.num_seqs * b.block_table_stride), add(b.adapter_slots, b.num_seqs);
  }
  std::vector<int32_t> words;
};

// Closes its inner executor and itself.
class HalvesExecutor {
 public:
  explicit HalvesExecutor(const psm_executor& inner) : inner_(inner) {}

  bool draws = true;             // samples_rows
  bool is_async = false;         // the device is a thread; else the work is done in collect
  int64_t fail_launch = 0;       // so many launches on, one fails; 0 = none
  int64_t fail_collect = 0;      // likewise
  bool checks_rules = true;      // off where a test counts allocations
  int64_t* num_drawn = nullptr;  // rows drawn here, rows given as logits; outlive the executor
  int64_t* num_given = nullptr;
  void (*between)(void* context) = nullptr;  // called at the end of launch
  void* between_context = nullptr;
  void (*behind)() = nullptr;  // called at the beginning of collect

  static psm_executor Table(HalvesExecutor* self) {
    psm_executor e = self->inner_;
    e.struct_size = PSM_EXECUTOR_SIZE;
    e.self = self;
    e.step = nullptr;
    e.describe = [](void* s, psm_model_info* info) {
      const psm_status status = At(s)->inner_.describe(At(s)->inner_.self, info);
      info->samples_rows = At(s)->draws;
      At(s)->vocab_size_ = info->vocab_size;
      return status;
    };
    e.open = [](void* s, int32_t n) { return At(s)->inner_.open(At(s)->inner_.self, n); };
    e.launch = [](void* s, const psm_batch* batch) { return At(s)->Launch(*batch); };
    e.collect = [](void* s, const psm_step_sampling* sampling, psm_row_sample* samples,
                   const float** logits) { return At(s)->Collect(sampling, samples, logits); };
    e.close = [](void* s) {
      At(s)->inner_.close(At(s)->inner_.self);
      delete At(s);
    };
    if (e.last_error != nullptr) {
      e.last_error = [](void* s) {
        return At(s)->text_ != nullptr ? At(s)->text_
                                       : At(s)->inner_.last_error(At(s)->inner_.self);
      };
    }
    if (e.copy_blocks != nullptr) {
      e.copy_blocks = [](void* s, const psm_block_copy* copies, size_t n) {
        CHECK(!At(s)->in_flight_);
        return At(s)->inner_.copy_blocks(At(s)->inner_.self, copies, n);
      };
    }
    if (e.open_host != nullptr) {
      e.open_host = [](void* s, int32_t n) {
        return At(s)->inner_.open_host(At(s)->inner_.self, n);
      };
    }
    if (e.load_adapter != nullptr) {
      e.load_adapter = [](void* s, int32_t slot, const psm_lora_module* m, size_t n) {
        CHECK(!At(s)->in_flight_);
        return At(s)->inner_.load_adapter(At(s)->inner_.self, slot, m, n);
      };
      e.unload_adapter = [](void* s, int32_t slot) {
        CHECK(!At(s)->in_flight_);
        return At(s)->inner_.unload_adapter(At(s)->inner_.self, slot);
      };
    }
    if (e.now_ns != nullptr) {
      e.now_ns = [](void* s) { return At(s)->inner_.now_ns(At(s)->inner_.self); };
    }
    return e;
  }

 private:
  static HalvesExecutor* At(void* self) { return static_cast<HalvesExecutor*>(self); }

  psm_status Fail(const char* text) {
    text_ = text;
    return PSM_ERROR_CUDA;
  }

  psm_status Launch(const psm_batch& batch) {
    CHECK(!in_flight_);
    text_ = nullptr;
    if (fail_launch > 0 && --fail_launch == 0) return Fail("the launch fell over");
    batch_ = &batch;
    if (checks_rules) copy_ = BatchCopy(batch).words;
    thread_id_ = std::this_thread::get_id();
    in_flight_ = true;
    if (is_async) device_ = std::thread([this] { RunInner(); });
    if (between != nullptr) between(between_context);
    return PSM_OK;
  }

  void RunInner() { status_ = inner_.step(inner_.self, batch_, &logits_); }

  psm_status Collect(const psm_step_sampling* sampling, psm_row_sample* samples,
                     const float** logits) {
    CHECK(in_flight_ && thread_id_ == std::this_thread::get_id());
    if (behind != nullptr) behind();
    if (is_async) {
      device_.join();
    } else {
      RunInner();
    }
    in_flight_ = false;
    if (checks_rules) CHECK(BatchCopy(*batch_).words == copy_);
    if (fail_collect > 0 && --fail_collect == 0) return Fail("the device was lost");
    CHECK((sampling == nullptr) == (samples == nullptr));
    if (status_ != PSM_OK) return status_;
    if (sampling == nullptr) {
      *logits = logits_;
      if (num_given != nullptr) *num_given += batch_->num_logits_rows;
      return PSM_OK;
    }
    CHECK(draws && sampling->num_rows == batch_->num_logits_rows && sampling->num_rows > 0);
    CheckSampling(*sampling);
    for (int32_t i = 0; i < sampling->num_rows; ++i) {
      Draw(*sampling, sampling->rows[i], logits_ + static_cast<size_t>(i) * V(), &samples[i]);
    }
    if (num_drawn != nullptr) *num_drawn += sampling->num_rows;
    return PSM_OK;
  }

  size_t V() const { return static_cast<size_t>(vocab_size_); }

  void CheckSampling(const psm_step_sampling& s) const {
    CHECK(s.struct_size == PSM_STEP_SAMPLING_SIZE && s.mask_words == (vocab_size_ + 31) / 32);
    int32_t num_edits = 0, num_masks = 0;
    for (int32_t i = 0; i < s.num_rows; ++i) {
      const psm_sampling_row& row = s.rows[i];
      CHECK(row.edit_begin == num_edits && row.edit_end >= num_edits);
      for (int32_t e = row.edit_begin; e < row.edit_end; ++e) {
        CHECK(s.edits[e].id >= 0 && s.edits[e].id < vocab_size_);
        CHECK(e == row.edit_begin || s.edits[e - 1].id < s.edits[e].id);
      }
      num_edits = row.edit_end;
      if (row.mask_idx >= 0) CHECK(row.mask_idx == num_masks++);
      CHECK(row.mask_idx >= -1 && row.reserved == 0 && row.output_idx >= 0);
    }
    CHECK(num_edits == s.num_edits && num_masks == s.num_masks);
  }

  static bool IsBad(float x) { return std::isnan(x) || (std::isinf(x) && x > 0); }

  void Draw(const psm_step_sampling& s, const psm_sampling_row& row, const float* logits,
            psm_row_sample* out) {
    if (sampler_ == nullptr) sampler_ = std::make_unique<Sampler>(vocab_size_);
    *out = psm_row_sample{};
    edited_.assign(logits, logits + V());
    for (float x : edited_) {
      if (IsBad(x)) {
        out->token = PSM_ROW_BAD_LOGITS;
        return;
      }
    }
    for (int32_t id = 0; row.mask_idx >= 0 && id < vocab_size_; ++id) {
      const uint32_t word = s.masks[row.mask_idx * s.mask_words + id / 32];
      if ((word >> (id % 32) & 1) == 0) edited_[id] = -std::numeric_limits<float>::infinity();
    }
    for (int32_t e = row.edit_begin; e < row.edit_end; ++e) {
      float& x = edited_[static_cast<size_t>(s.edits[e].id)];
      x = x > 0 ? x / s.edits[e].factor : x * s.edits[e].factor;
      x = x - s.edits[e].minus;
      x = x + s.edits[e].plus;
    }
    bool any = false;
    for (float x : edited_) {
      if (IsBad(x)) {
        out->token = PSM_ROW_OVERFLOW;
        return;
      }
      any = any || !std::isinf(x);
    }
    if (!any) {
      out->token = PSM_ROW_FORBIDDEN;
      return;
    }
    request_.num_prompt = -row.output_idx;  // so that num_output() is it
    request_.params.seed = row.seed;
    request_.params.temperature = row.temperature;
    request_.params.top_k = row.top_k;
    request_.params.top_p = row.top_p;
    request_.params.min_p = row.min_p;
    Sample sample;
    sampler_->Draw(edited_.data(), request_, nullptr, &sample);
    out->token = sample.token;
    if (row.num_logprobs == 0) return;
    sampler_->RowLogProbs(logits, request_, sample.token, row.num_logprobs, &sample);
    out->logprob = sample.logprob;
    out->num_top = sample.num_top;
    std::copy_n(sample.top_ids, sample.num_top, out->top_ids);
    std::copy_n(sample.top_logprobs, sample.num_top, out->top_logprobs);
  }

  psm_executor inner_;
  int32_t vocab_size_ = 0;
  const psm_batch* batch_ = nullptr;
  std::vector<int32_t> copy_;
  std::thread::id thread_id_;
  bool in_flight_ = false;
  std::thread device_;
  psm_status status_ = PSM_OK;
  const float* logits_ = nullptr;
  const char* text_ = nullptr;
  std::unique_ptr<Sampler> sampler_;
  std::vector<float> edited_;
  Request request_;
};

}  // namespace plansmith
