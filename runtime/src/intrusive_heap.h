// A binary heap of pointers whose elements know their place in it, so that one in the middle can be
// moved or taken out in O(log n).
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "reserve.h"

namespace plansmith {

// `Slot` is the member of T that keeps the place, -1 outside the heap. Before{}(a, b) is true when
// *a comes out before *b. Allocates only in Reserve and where Push outgrows it.
template <typename T, int32_t T::* Slot, typename Before>
class IntrusiveHeap {
 public:
  void Reserve(size_t n) { ReserveAtLeast(&items_, n); }
  bool empty() const { return items_.empty(); }
  size_t size() const { return items_.size(); }
  T* top() const { return items_.front(); }
  const std::vector<T*>& items() const { return items_; }  // in no particular order
  static bool Contains(const T* item) { return item->*Slot >= 0; }

  void Push(T* item) {
    items_.push_back(item);
    Up(items_.size() - 1);
  }
  void Remove(T* item) {
    const size_t at = static_cast<size_t>(item->*Slot);
    item->*Slot = -1;
    T* last = items_.back();
    items_.pop_back();
    if (last == item) return;
    Place(at, last);
    Update(last);
  }
  // After what Before compares has changed.
  void Update(T* item) {
    const size_t at = static_cast<size_t>(item->*Slot);
    if (Up(at) == at) Down(at);
  }

 private:
  void Place(size_t at, T* item) {
    items_[at] = item;
    item->*Slot = static_cast<int32_t>(at);
  }
  size_t Up(size_t at) {
    T* item = items_[at];
    for (; at > 0 && Before{}(item, items_[(at - 1) / 2]); at = (at - 1) / 2) {
      Place(at, items_[(at - 1) / 2]);
    }
    Place(at, item);
    return at;
  }
  void Down(size_t at) {
    T* item = items_[at];
    for (size_t child; (child = 2 * at + 1) < items_.size(); at = child) {
      if (child + 1 < items_.size() && Before{}(items_[child + 1], items_[child])) ++child;
      if (!Before{}(items_[child], item)) break;
      Place(at, items_[child]);
    }
    Place(at, item);
  }

  std::vector<T*> items_;
};

}  // namespace plansmith
