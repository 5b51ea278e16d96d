// SPDX-License-Identifier: Apache-2.0
#include "prefix_tree.h"
