"""Pages of mapped checkpoint files: a build touches every weight once and lets go of it."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def release_pages(array: Array) -> None:
    """Let go of the pages of a mapped, read-only file that an array shows.

    Does nothing for arrays of other memory. A later read maps the pages again.
    """
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    if not isinstance(base, mmap.mmap) or array.flags.writeable or not hasattr(mmap, "MADV_DONTNEED"):
        return
    if not array.size or min(array.strides) < 0:
        return
    offset = array.ctypes.data - np.frombuffer(base, np.uint8).ctypes.data
    extent = array.itemsize + sum((n - 1) * s for n, s in zip(array.shape, array.strides, strict=True))
    first = offset // mmap.PAGESIZE * mmap.PAGESIZE
    base.madvise(mmap.MADV_DONTNEED, first, offset + extent - first)
