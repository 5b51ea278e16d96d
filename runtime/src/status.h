// Errors inside the core are exceptions that carry a status code; Guard() turns them into codes at the C API.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <new>
#include <stdexcept>
#include <string>
#include <utility>

#include "plansmith/plansmith.h"

namespace plansmith {

class StatusError : public std::runtime_error {
 public:
  StatusError(psm_status code, const std::string& message)
      : std::runtime_error(message), code_(code) {}
  psm_status code() const { return code_; }

 private:
  psm_status code_;
};

// printf into a std::string.
std::string Format(const char* format, ...) __attribute__((format(printf, 1, 2)));

// Keeps `message` for psm_last_error() of this thread and returns `code`.
psm_status SetLastError(psm_status code, const std::string& message);
void ClearLastError();

// Runs `body`, which may throw; returns the status and sets the thread's last error.
template <typename Body>
psm_status Guard(Body&& body) {
  ClearLastError();
  try {
    body();
    return PSM_OK;
  } catch (const StatusError& e) {
    return SetLastError(e.code(), e.what());
  } catch (const std::bad_alloc&) {
    return SetLastError(PSM_ERROR_OUT_OF_MEMORY,
                        "the host has no memory left for this call; free some or lower the limits");
  } catch (const std::exception& e) {
    return SetLastError(PSM_ERROR_INTERNAL, std::string("unexpected: ") + e.what());
  }
}

}  // namespace plansmith
