// A heap without storage of its own: its elements are linked to each other. Every operation is
// O(log n) at worst, allocates nothing and cannot fail, and a heap is one pointer, so that there
// may be as many of them as there are things to wait for.
//
// (Leftist trees: C. A. Crane, 1972. The path along right children has at most log2(n + 1) elements
// because the left subtree is never the shallower one.)
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <utility>

namespace plansmith {

template <typename T>
struct HeapLinks {
  T* left = nullptr;
  T* right = nullptr;
  T* parent = nullptr;
  int32_t depth = 1;  // elements on the path along right children
};

// Traits::Links(T*) -> HeapLinks<T>&, Traits::Before(const T*, const T*) -> bool: a strict order.
// `root` is the first element, NULL when the heap is empty. An element is in one heap at a time.
template <typename T, typename Traits>
struct LeftistHeap {
  static void Push(T** root, T* item) {
    Links(item) = {};
    *root = Meld(*root, item);
  }

  static void Remove(T** root, T* item) {
    const HeapLinks<T> old = Links(item);
    T* rest = Meld(old.left, old.right);
    if (rest != nullptr) Links(rest).parent = old.parent;
    Links(item) = {};
    if (old.parent == nullptr) {
      *root = rest;
      return;
    }
    HeapLinks<T>& up = Links(old.parent);
    (up.left == item ? up.left : up.right) = rest;
    Repair(old.parent);
  }

  // visit(item) for all, in no particular order; it must not change the heap.
  template <typename Visit>
  static void ForEach(T* root, const Visit& visit) {
    // In post-order along the parents: no stack, however deep the left branches go.
    T* item = root == nullptr ? nullptr : Deepest(root);
    while (item != nullptr) {
      T* parent = Links(item).parent;
      T* next = parent;
      if (parent != nullptr && Links(parent).left == item && Links(parent).right != nullptr) {
        next = Deepest(Links(parent).right);
      }
      visit(item);
      item = item == root ? nullptr : next;
    }
  }

 private:
  static HeapLinks<T>& Links(T* item) { return Traits::Links(item); }
  static int32_t Depth(T* item) { return item == nullptr ? 0 : Links(item).depth; }

  static T* Deepest(T* item) {
    for (;;) {
      const HeapLinks<T>& links = Links(item);
      if (links.left == nullptr && links.right == nullptr) return item;
      item = links.left != nullptr ? links.left : links.right;
    }
  }

  // Along the right paths only, so at most log2 of both sizes deep.
  static T* Meld(T* a, T* b) {
    if (a == nullptr) return b;
    if (b == nullptr) return a;
    if (Traits::Before(b, a)) std::swap(a, b);
    HeapLinks<T>& links = Links(a);
    links.right = Meld(links.right, b);
    Links(links.right).parent = a;
    Settle(&links);
    return a;
  }

  static void Settle(HeapLinks<T>* links) {
    if (Depth(links->left) < Depth(links->right)) std::swap(links->left, links->right);
    links->depth = 1 + Depth(links->right);
  }

  // After a subtree of `item` got shallower. Depths change along right paths only, so this ends
  // after log2(n) steps.
  static void Repair(T* item) {
    while (item != nullptr) {
      HeapLinks<T>& links = Links(item);
      const int32_t before = links.depth;
      Settle(&links);
      if (links.depth == before) return;
      item = links.parent;
    }
  }
};

}  // namespace plansmith
