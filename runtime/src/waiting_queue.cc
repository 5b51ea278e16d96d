// SPDX-License-Identifier: Apache-2.0
#include "waiting_queue.h"
