// SPDX-License-Identifier: Apache-2.0
#include "draft_length.h"
