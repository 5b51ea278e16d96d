"""GatherLast in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


def gather_last(hidden: npt.NDArray[Any], rows: npt.NDArray[np.int32]) -> npt.NDArray[Any]:
    """Return hidden[rows], (R, E); zeros where a row is not in 0..T-1."""
    out = np.zeros((len(rows), hidden.shape[1]), hidden.dtype)
    inside = (rows >= 0) & (rows < len(hidden))
    out[inside] = hidden[rows[inside]]
    return out
