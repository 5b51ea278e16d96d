"""What the formats with 4-bit integers share: whole rows as groups, codes around zero, order of activations."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from .module import I32, Module

Array = npt.NDArray[Any]


def row_group(columns: int) -> int:
    """Return the groups in which int4 with one scale a row is held: compilers take int4 in groups alone.

    The largest of 128, 64 and 32 that divides the row, else the row.
    """
    return next((group for group in (128, 64, 32) if columns % group == 0), columns)


def spread(groups: Array, count: int) -> Array:
    """Return (N, count) of (N, G): each scale or zero point as often as it takes; G divides count."""
    return np.repeat(groups, count // groups.shape[1], axis=1) if groups.shape[1] != count else groups


def check_order(module: Module, leaf: str, group: int, needed_by: str = "") -> None:
    """Check g_idx, which group each input belongs to: only neighbours in order can be read.

    needed_by : what the config says that reorders inputs, "" for nothing; one group of all has no order
    """
    if not module.has(leaf):
        if needed_by and group < module.columns:
            raise module.error(
                f"has no {leaf!r}, and the config says {needed_by}: which group an input belongs to is not known then; "
                "download the checkpoint again, or quantize it with desc_act false (actorder null or weight)"
            )
        return
    order = module.take(leaf, I32, (module.columns,))()
    if not np.array_equal(order, np.arange(module.columns) // group):
        raise module.error(
            f"has inputs in an order of their own ({leaf!r}: desc_act or actorder), which groups of neighbours cannot "
            "hold; quantize it with desc_act false (actorder null or weight)"
        )
