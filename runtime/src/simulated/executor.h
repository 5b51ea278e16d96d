// An executor that computes nothing: tokens are hashes of the history, times those of a GPU's
// bytes and operations.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "plansmith/plansmith.h"
