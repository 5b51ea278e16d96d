// Growth ahead of time, so that what follows cannot fail.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

namespace plansmith {

// Room for `size` elements at least, growing by doubling as push_back does.
template <typename T>
void ReserveAtLeast(std::vector<T>* v, size_t size) {
  if (v->capacity() < size) v->reserve(std::max(size, 2 * v->capacity()));
}

}  // namespace plansmith
