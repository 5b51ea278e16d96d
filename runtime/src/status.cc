// SPDX-License-Identifier: Apache-2.0
#include "status.h"

#include <cstdarg>
#include <cstdio>
#include <vector>

namespace plansmith {
namespace {
thread_local std::string last_error;
}

std::string Format(const char* format, ...) {
  va_list args;
  va_start(args, format);
  va_list again;
  va_copy(again, args);
  const int n = std::vsnprintf(nullptr, 0, format, args);
  va_end(args);
  std::vector<char> text(static_cast<size_t>(n > 0 ? n : 0) + 1);
  std::vsnprintf(text.data(), text.size(), format, again);
  va_end(again);
  return text.data();
}

psm_status SetLastError(psm_status code, const std::string& message) {
  last_error = message;
  return code;
}

void ClearLastError() { last_error.clear(); }

}  // namespace plansmith

extern "C" {

const char* psm_last_error(void) { return plansmith::last_error.c_str(); }

const char* psm_status_name(psm_status status) {
  switch (status) {
#define PSM_CASE_(code, name, text) \
  case code:                        \
    return #name;
    PSM_STATUS_LIST(PSM_CASE_)
#undef PSM_CASE_
    default:
      return "PSM_ERROR_UNKNOWN";
  }
}

const char* psm_status_text(psm_status status) {
  switch (status) {
#define PSM_CASE_(code, name, text) \
  case code:                        \
    return text;
    PSM_STATUS_LIST(PSM_CASE_)
#undef PSM_CASE_
    default:
      return "not a plansmith status code";
  }
}

int32_t psm_abi_version(void) { return PSM_ABI_MAJOR * 1000 + PSM_ABI_MINOR; }

const char* psm_version(void) { return PLANSMITH_VERSION; }

}  // extern "C"
