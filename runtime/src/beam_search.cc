// SPDX-License-Identifier: Apache-2.0
#include "beam_search.h"

#include "request.h"

namespace plansmith {

BeamSearch::BeamSearch(const BeamParams& params, int32_t vocab_size, int32_t, int32_t)
    : params_(params), vocab_size_(vocab_size) {}
void BeamSearch::Start(const float*, KvCache*, Request*) {}
void BeamSearch::Advance(const float*, KvCache*, Request*) { (void)vocab_size_; }
const std::vector<Beam>& BeamSearch::Hypotheses() { return beams_; }
void BeamSearch::Restart(KvCache*, Request*) {}
void BeamSearch::Release(KvCache*) {}

}  // namespace plansmith
