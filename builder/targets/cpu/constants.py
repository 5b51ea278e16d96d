"""Constants of the graph, read."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ....runtime.errors import BuildError

Array = npt.NDArray[Any]


def initializer_array(value: ir.Value) -> Array:
    """Return an initializer's values, fetched now."""
    if value.const_value is None:
        raise BuildError(f"initializer {value.name!r} has no values; give the graph a weight source")
    return value.const_value.numpy()


def small_constant(value: ir.Value | None) -> Array | None:
    """Return the values of a constant of up to 16 elements, floats as float32; None when it is none."""
    while value is not None and value.const_value is None:
        node = value.producer()
        if node is None or node.op_type != "Cast":
            return None
        value = node.inputs[0]
    if value is None or value.const_value is None or value.const_value.size > 16:
        return None
    array = value.const_value.numpy()
    return array.astype(np.float32) if array.dtype in (np.float16, ml_dtypes.bfloat16, np.float64) else array


def scalar_constant(value: ir.Value | None) -> float | None:
    """Return a constant of one element, None when it is none."""
    array = small_constant(value)
    return None if array is None or array.size != 1 else float(array.astype(np.float32).reshape(-1)[0])
