// Errors inside the core are exceptions that carry a status code; Guard() turns them into codes at
// the C API.
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
// Without memory for it, the code's own text takes its place.
psm_status SetLastError(psm_status code, const char* message) noexcept;
void ClearLastError() noexcept;

// Runs `body`, which may throw; returns the status and sets the thread's last error. Throws
// nothing.
template <typename Body>
psm_status Guard(Body&& body) noexcept {
  ClearLastError();
  try {
    body();
    ClearLastError();  // what a call inside has left there
    return PSM_OK;
  } catch (const StatusError& e) {
    return SetLastError(e.code(), e.what());
  } catch (const std::bad_alloc&) {
    return SetLastError(PSM_ERROR_OUT_OF_MEMORY,
                        "the host has no memory left for this call; free some, or lower "
                        "max_num_tokens or kv_cache_bytes");
  } catch (const std::length_error&) {
    return SetLastError(PSM_ERROR_OUT_OF_MEMORY,
                        "the limits ask for more memory than a machine can have; lower them");
  } catch (const std::exception& e) {
    return SetLastError(PSM_ERROR_INTERNAL, e.what());
  } catch (...) {
    return SetLastError(PSM_ERROR_EXECUTOR,
                        "the executor threw an exception; it must return a status instead");
  }
}

}  // namespace plansmith
