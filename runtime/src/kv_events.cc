// SPDX-License-Identifier: Apache-2.0
#include "kv_events.h"
