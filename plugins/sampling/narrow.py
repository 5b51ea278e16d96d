"""Selection by narrowing: the smallest number at which a count or a sum reaches its target, 4 bits a look."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, attr-defined"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def cuts(low, high):
    """Return 16 numbers, the last of each 16th of low..high, int32; those behind high are high."""
    step = (high - low) // 16 + 1
    return tl.minimum(low + step * (tl.arange(0, 16) + 1) - 1, high)


@triton.jit
def narrowed(low, high, sums, target):
    """Return the (low, high) of the first 16th whose last number reaches the target.

    sums : [16], of what is at most each of cuts(low, high); the last one is taken to reach it
    """
    step = (high - low) // 16 + 1
    index = tl.minimum(tl.sum((sums < target).to(tl.int32), axis=0), 15)
    return low + step * index, tl.minimum(low + step * (index + 1) - 1, high)
