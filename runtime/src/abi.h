// Reading and writing structs that begin with struct_size, across versions of this library.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <initializer_list>

#include "plansmith/plansmith.h"
#include "status.h"

namespace plansmith {

// Ends of the fields of a struct, ascending; the first is the least size that makes sense (the
// mandatory fields), the last the size this library knows.
using FieldEnds = std::initializer_list<size_t>;

#define PSM_FIELD_END(type, field) PSM_SIZE_UP_TO_(type, field)

// More than any struct of this API will ever take: a size beyond is one that nobody set, and to go
// by it would read or write where there is no struct.
constexpr size_t kMaxStructSize = 4096;

inline void CheckStructSize(const char* type, size_t struct_size, const FieldEnds& ends) {
  const size_t least = *ends.begin();
  const size_t known = *(ends.end() - 1);
  if (struct_size < least) {
    throw StatusError(
        PSM_ERROR_INVALID_ARGUMENT,
        Format(
            "%s.struct_size is %zu, at least %zu is needed; set it with the init function or its "
            "_SIZE macro",
            type, struct_size, least));
  }
  if (struct_size > kMaxStructSize) {
    throw StatusError(PSM_ERROR_INVALID_ARGUMENT,
                      Format("%s.struct_size is %zu, no version of it takes more than %zu; set it "
                             "with the init function or its _SIZE macro",
                             type, struct_size, kMaxStructSize));
  }
  if (struct_size < known && std::find(ends.begin(), ends.end(), struct_size) == ends.end()) {
    throw StatusError(
        PSM_ERROR_INVALID_ARGUMENT,
        Format("%s.struct_size is %zu, which ends inside a field; set it with the init function or "
               "its _SIZE macro",
               type, struct_size));
  }
}

// `input` as this library knows it: fields the caller does not have keep what `defaults` holds;
// fields this library does not have must be zero.
template <typename T>
T ReadStruct(const char* type, const T* input, const T& defaults, const FieldEnds& ends) {
  const size_t size = input->struct_size;
  const size_t known = *(ends.end() - 1);
  CheckStructSize(type, size, ends);
  const unsigned char* bytes = reinterpret_cast<const unsigned char*>(input);
  for (size_t i = known; i < size; ++i) {
    if (bytes[i] != 0) {
      throw StatusError(
          PSM_ERROR_INVALID_ARGUMENT,
          Format(
              "%s has a field at byte %zu that plansmith %s does not know; leave it zero or load a "
              "newer library",
              type, i, psm_version()));
    }
  }
  T result = defaults;
  std::memcpy(&result, input, std::min(size, known));
  result.struct_size = known;
  return result;
}

// Fills the fields of `*output` that its caller has; its struct_size stays, bytes beyond what this
// library knows are zeroed.
template <typename T>
void WriteStruct(const char* type, const T& value, T* output, const FieldEnds& ends) {
  const size_t size = output->struct_size;
  const size_t known = *(ends.end() - 1);
  CheckStructSize(type, size, ends);
  std::memset(static_cast<void*>(output), 0, size);
  std::memcpy(static_cast<void*>(output), &value, std::min(size, known));
  output->struct_size = size;
}

}  // namespace plansmith
