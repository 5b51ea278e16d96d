// SPDX-License-Identifier: Apache-2.0
#include "cpu/lora.h"
