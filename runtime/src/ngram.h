// Drafts by lookup: what followed the last n tokens when they occurred before.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

namespace plansmith {

// Where the longest suffix of tokens[0..n), of at most max_n and at least min_n tokens, occurred
// before: the index behind that occurrence, 0 < index < n; the most recent one of those equally
// long. -1 = nowhere. The occurrence may overlap the suffix. Looks back kMaxNgramScan tokens.
// A scan without an index: 4 tokens a vector comparison, about 1 us for 4096 tokens, and nothing to
// keep up to date or to allocate. 1 <= min_n <= max_n.
int32_t FindNgram(const int32_t* tokens, int32_t n, int32_t max_n, int32_t min_n);
inline constexpr int32_t kMaxNgramScan = 1 << 16;

// Replaces *draft by the continuation of that occurrence, at most `want` tokens. Where it runs into
// the end of the sequence it goes on with itself: a loop is continued as a loop. Empty when nothing
// matches. Allocates nothing within draft's capacity.
void NgramDraft(const std::vector<int32_t>& tokens, int32_t max_n, int32_t min_n, int32_t want,
                std::vector<int32_t>* draft);

}  // namespace plansmith
