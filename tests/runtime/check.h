// A check that prints what failed and makes the test program return 1. Works from C and C++.
//
// SPDX-License-Identifier: Apache-2.0
#ifndef PLANSMITH_TESTS_CHECK_H_
#define PLANSMITH_TESTS_CHECK_H_

#include <stdio.h>
#include <stdlib.h>

#define CHECK(condition)                                                            \
  do {                                                                              \
    if (!(condition)) {                                                             \
      fprintf(stderr, "%s:%d: CHECK failed: %s\n", __FILE__, __LINE__, #condition); \
      exit(1);                                                                      \
    }                                                                               \
  } while (0)

#define CHECK_OK(call)                                                          \
  do {                                                                          \
    const psm_status check_status_ = (call);                                    \
    if (check_status_ != PSM_OK) {                                              \
      fprintf(stderr, "%s:%d: %s returned %s: %s\n", __FILE__, __LINE__, #call, \
              psm_status_name(check_status_), psm_last_error());                \
      exit(1);                                                                  \
    }                                                                           \
  } while (0)

#endif  // PLANSMITH_TESTS_CHECK_H_
