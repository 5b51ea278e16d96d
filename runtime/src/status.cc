// SPDX-License-Identifier: Apache-2.0
#include "status.h"

#include <cstdarg>
#include <cstdio>
#include <vector>

namespace plansmith {
namespace {
thread_local std::string last_error;               // what message points to, if there was memory
thread_local const char* last_error_message = "";  // never NULL

}  // namespace

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

psm_status SetLastError(psm_status code, const char* message) noexcept {
  try {
    last_error = message;
    last_error_message = last_error.c_str();
  } catch (const std::bad_alloc&) {
    last_error_message = psm_status_text(code);
  }
  return code;
}

void ClearLastError() noexcept { last_error_message = ""; }

}  // namespace plansmith

extern "C" {

const char* psm_last_error(void) { return plansmith::last_error_message; }

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
