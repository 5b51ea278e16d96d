// SPDX-License-Identifier: Apache-2.0
#include "guide.h"

#include <algorithm>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>

#include "request.h"
#include "status.h"

namespace plansmith {
namespace {

std::string FailureText(const psm_guide& table, const char* call, psm_status status) {
  const char* text = table.last_error == nullptr ? nullptr : table.last_error(table.self);
  if (text == nullptr || *text == '\0') text = psm_status_text(status);
  return Format("the guide failed in %s: %s: %s", call, psm_status_name(status), text);
}

bool IsAllowed(const uint32_t* mask, int32_t vocab_size, int32_t token) {
  return token >= 0 && token < vocab_size && (mask[token / 32] >> (token % 32) & 1) != 0;
}

}  // namespace

Guide::Guide(const psm_guide& table, int32_t vocab_size, int32_t max_draft_len)
    : table_(table),
      vocab_size_(vocab_size),
      mask_words_((vocab_size + 31) / 32),
      max_draft_len_(max_draft_len),
      masks_(static_cast<size_t>(1 + max_draft_len) * static_cast<size_t>(mask_words_)) {
  to_accept_.reserve(static_cast<size_t>(1 + max_draft_len));
  draft_.reserve(static_cast<size_t>(max_draft_len));
}

Guide::~Guide() {
  if (table_.close != nullptr) table_.close(table_.self);
}

std::unique_ptr<Guide> Guide::Clone() const {
  if (table_.clone == nullptr) {
    throw StatusError(PSM_ERROR_INVALID_ARGUMENT,
                      "num_return_sequences above 1 needs a guide for each sequence, and this one "
                      "has no clone; give it one or ask for one sequence");
  }
  psm_guide table = table_;
  table.self = nullptr;
  const psm_status status = table_.clone(table_.self, &table.self);
  if (status != PSM_OK) {
    throw StatusError(PSM_ERROR_INVALID_ARGUMENT, FailureText(table_, "clone", status));
  }
  try {
    return std::make_unique<Guide>(table, vocab_size_, max_draft_len_);
  } catch (...) {
    table.close(table.self);
    throw;
  }
}

// What the thread does for one guide. Without the lock: the guide is in state kRunning.
struct GuideWork {
  static void Run(Guide* guide) {
    try {
      if (guide->error_.empty()) AcceptAll(guide);
      while (guide->error_.empty() && guide->num_known_ < guide->num_wanted_) NextMask(guide);
    } catch (const std::exception& e) {
      guide->error_ = Format("the guide threw an exception: %s", e.what());
    } catch (...) {
      guide->error_ = "the guide threw an exception; it must return a status instead";
    }
    if (!guide->error_.empty()) guide->to_accept_.clear();
  }

 private:
  static void AcceptAll(Guide* guide) {
    if (guide->to_accept_.empty()) return;
    const psm_guide& table = guide->table_;
    const psm_status status = table.accept(table.self, guide->to_accept_.data(),
                                           static_cast<int32_t>(guide->to_accept_.size()));
    guide->to_accept_.clear();
    if (status != PSM_OK) guide->error_ = FailureText(table, "accept", status);
  }

  static void NextMask(Guide* guide) {
    const int32_t row = guide->num_known_;
    const size_t words = static_cast<size_t>(guide->mask_words_);
    uint32_t* mask = guide->masks_.data() + static_cast<size_t>(row) * words;
    if (row > 0 && !IsAllowed(mask - words, guide->vocab_size_, guide->draft_[row - 1])) {
      // Behind a token that is not allowed nothing is: a guide is not asked about such drafts.
      std::fill_n(mask, words, 0u);
    } else {
      const psm_guide& table = guide->table_;
      const psm_status status = table.fill_mask(table.self, guide->draft_.data(), row, mask);
      if (status != PSM_OK) {
        guide->error_ = FailureText(table, "fill_mask", status);
        return;
      }
      if (guide->vocab_size_ % 32 != 0) mask[words - 1] &= (1u << guide->vocab_size_ % 32) - 1;
    }
    ++guide->num_known_;
  }
};

struct GuideThread::Impl {
  std::mutex mutex;
  std::condition_variable work;
  std::condition_variable done;
  std::thread thread;
  Guide* head = nullptr;  // runs next
  Guide* tail = nullptr;
  const Guide* awaited = nullptr;  // by the stepping thread
  bool stopping = false;

  void Start() noexcept;
  void Run();
  void Push(Guide* guide);
  void Unlink(Guide* guide);
  void WaitIdle(std::unique_lock<std::mutex>* lock, const Guide* guide);
  void WantRows(Guide* guide, const int32_t* draft, int32_t num_draft);
};

void GuideThread::Impl::Start() noexcept {
  if (thread.joinable()) return;
  try {
    thread = std::thread([this] { Run(); });
  } catch (const std::exception&) {
    // Push says so to each guide, whose requests fail; those without a guide go on.
  }
}

void GuideThread::Impl::Run() {
  std::unique_lock<std::mutex> lock(mutex);
  for (;;) {
    work.wait(lock, [this] { return stopping || head != nullptr; });
    if (stopping) return;
    Guide* guide = head;
    Unlink(guide);
    guide->state_ = Guide::State::kRunning;
    lock.unlock();
    GuideWork::Run(guide);
    lock.lock();
    guide->state_ = Guide::State::kIdle;
    if (awaited == guide) done.notify_one();
  }
}

void GuideThread::Impl::Push(Guide* guide) {
  if (guide->state_ == Guide::State::kQueued) return;
  Start();
  if (!thread.joinable()) {
    guide->error_ = "the thread of the guides cannot start; raise the limit of threads (ulimit -u)";
    return;
  }
  guide->state_ = Guide::State::kQueued;
  guide->previous_ = tail;
  (tail == nullptr ? head : tail->next_) = guide;
  tail = guide;
  work.notify_one();
}

void GuideThread::Impl::Unlink(Guide* guide) {
  (guide->previous_ == nullptr ? head : guide->previous_->next_) = guide->next_;
  (guide->next_ == nullptr ? tail : guide->next_->previous_) = guide->previous_;
  guide->next_ = guide->previous_ = nullptr;
}

void GuideThread::Impl::WaitIdle(std::unique_lock<std::mutex>* lock, const Guide* guide) {
  awaited = guide;
  done.wait(*lock, [guide] { return guide->state_ == Guide::State::kIdle; });
  awaited = nullptr;
}

// Rows 0..num_draft of this draft; those behind the part that it shares with the last one are made
// anew. The guide is not running.
void GuideThread::Impl::WantRows(Guide* guide, const int32_t* draft, int32_t num_draft) {
  if (num_draft > guide->max_draft_len_) {
    throw StatusError(PSM_ERROR_INTERNAL, Format("%d draft tokens for a guide with room for %d; "
                                                 "please report it",
                                                 num_draft, guide->max_draft_len_));
  }
  const int32_t num_alike =
      static_cast<int32_t>(std::min(guide->draft_.size(), static_cast<size_t>(num_draft)));
  int32_t same = 0;
  while (same < num_alike && guide->draft_[same] == draft[same]) ++same;
  if (!guide->to_accept_.empty()) guide->num_known_ = 0;
  guide->draft_.assign(draft, draft + num_draft);
  guide->num_known_ = std::min(guide->num_known_, same + 1);
  guide->num_wanted_ = num_draft + 1;
  if (guide->num_known_ < guide->num_wanted_) Push(guide);
}

GuideThread::GuideThread() : impl_(std::make_unique<Impl>()) {}

GuideThread::~GuideThread() {
  {
    std::lock_guard<std::mutex> lock(impl_->mutex);
    impl_->stopping = true;
  }
  impl_->work.notify_one();
  if (impl_->thread.joinable()) impl_->thread.join();
}

void GuideThread::Reserve(size_t num_requests) {
  std::lock_guard<std::mutex> lock(impl_->mutex);
  if (num_requests > 0) impl_->Start();
}

void GuideThread::Prepare(Request* request) {
  Guide* guide = request->guide.get();
  std::unique_lock<std::mutex> lock(impl_->mutex);
  if (guide->state_ == Guide::State::kRunning) impl_->WaitIdle(&lock, guide);
  impl_->WantRows(guide, request->draft.data(), static_cast<int32_t>(request->draft.size()));
}

const uint32_t* GuideThread::Mask(const Request& request, int32_t row) {
  const Guide* guide = request.guide.get();
  std::unique_lock<std::mutex> lock(impl_->mutex);
  impl_->WaitIdle(&lock, guide);
  if (!guide->error_.empty()) throw StatusError(PSM_ERROR_EXECUTOR, guide->error_);
  if (row >= guide->num_known_) {
    throw StatusError(PSM_ERROR_INTERNAL,
                      Format("the mask of row %d was asked for, %d are prepared; please report it",
                             row, guide->num_known_));
  }
  return guide->masks_.data() + static_cast<size_t>(row) * static_cast<size_t>(guide->mask_words_);
}

void GuideThread::Accept(Request* request, int32_t num_before) {
  Guide* guide = request->guide.get();
  const int32_t* begin = request->output() + num_before;
  const int32_t* end = request->output() + request->num_output();
  std::unique_lock<std::mutex> lock(impl_->mutex);
  impl_->WaitIdle(&lock, guide);  // not at all behind Mask
  guide->to_accept_.insert(guide->to_accept_.end(), begin, end);
}

const uint32_t* GuideThread::MaskAhead(Request* request, const int32_t* ahead, int32_t num_ahead) {
  {
    Guide* guide = request->guide.get();
    std::unique_lock<std::mutex> lock(impl_->mutex);
    if (guide->state_ == Guide::State::kRunning) impl_->WaitIdle(&lock, guide);
    impl_->WantRows(guide, ahead, num_ahead);
  }
  return Mask(*request, num_ahead);
}

void GuideThread::Finish(Request* request) {
  Guide* guide = request->guide.get();
  if (guide == nullptr) return;
  std::unique_lock<std::mutex> lock(impl_->mutex);
  if (guide->state_ == Guide::State::kQueued) {
    impl_->Unlink(guide);
    guide->state_ = Guide::State::kIdle;
  }
  impl_->WaitIdle(&lock, guide);
}

}  // namespace plansmith
