// Tokens that would repeat an n-gram.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

namespace plansmith {

// Sets the logit of each token to -infinity that followed an earlier occurrence of the last
// n - 1 tokens, so that no n-gram comes twice: transformers' rule. n = 1 forbids every token there
// is; 0 none. O(tokens), one pass.
void ForbidRepeatedNgrams(const std::vector<int32_t>& tokens, int32_t n, float* logits);

}  // namespace plansmith
