// SPDX-License-Identifier: Apache-2.0
#include "guide.h"

#include "request.h"

namespace plansmith {

Guide::Guide(const psm_guide& table, int32_t vocab_size, int32_t max_draft_len)
    : table_(table), mask_words_((vocab_size + 31) / 32), max_draft_len_(max_draft_len) {}
Guide::~Guide() { table_.close(table_.self); }
std::unique_ptr<Guide> Guide::Clone() const { return nullptr; }

struct GuideThread::Impl {};
GuideThread::GuideThread() = default;
GuideThread::~GuideThread() = default;
void GuideThread::Reserve(size_t) {}
void GuideThread::Prepare(Request*) {}
const uint32_t* GuideThread::Mask(const Request&, int32_t) { return nullptr; }
void GuideThread::Accept(Request*, int32_t) {}
const uint32_t* GuideThread::MaskAhead(Request*, const int32_t*, int32_t) { return nullptr; }
void GuideThread::Finish(Request*) {}

}  // namespace plansmith
