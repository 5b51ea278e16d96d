"""What a quantized product's input goes through first: a vector of factors, and rounding."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ..scheme import FP4_GROUP, QuantizedInput, Scheme
from . import contract
from .graph_builder import GraphBuilder, value

_CODES = {"int8": ir.DataType.INT8, "fp8": ir.DataType.FLOAT8E4M3FN}

Array = npt.NDArray[Any]

_Key = tuple[ir.Value, str, int, float, bytes | None]


class InputRounding:
    """Rounds inputs of products. Products that round one input alike share the nodes: q, k and v; gate and up."""

    def __init__(self, g: GraphBuilder) -> None:
        self._g = g
        self._made: dict[_Key, ir.Value] = {}

    def apply(
        self, x: ir.Value, name: str, scheme: Scheme, calibrated: QuantizedInput, shape: tuple[int | str, ...]
    ) -> ir.Value:
        """Return x [rows, K] as the product `name` takes it, x itself where the scheme leaves it alone.

        calibrated : of the input; not looked at where the scheme is dynamic and has no pre_scale
        """
        if not scheme.pre_scale:
            calibrated = dataclasses.replace(calibrated, pre_scale=None)
        if not scheme.is_static:
            calibrated = dataclasses.replace(calibrated, scale=1.0)
        factors = None if calibrated.pre_scale is None else calibrated.pre_scale.tobytes()
        key = (x, scheme.input, scheme.input_group, calibrated.scale, factors)
        if key not in self._made:
            self._made[key] = self._add(x, name, scheme, calibrated, shape)
        return self._made[key]

    def _add(
        self, x: ir.Value, name: str, scheme: Scheme, calibrated: QuantizedInput, shape: tuple[int | str, ...]
    ) -> ir.Value:
        g = self._g
        if calibrated.pre_scale is not None:
            x = self._times(x, name, calibrated.pre_scale, shape)
        if scheme.input == "float":
            return x
        if scheme.input == "fp4" or not scheme.is_static:
            scales = [] if scheme.input != "fp4" else [g.const_f32(f"{name}.input.scale", calibrated.scale)]
            rounded = value(f"{name}/round/out", g.compute, shape)
            group = FP4_GROUP if scheme.input == "fp4" else scheme.input_group
            attributes = {"format": scheme.input, "group": group}
            g.add(
                contract.ROUND_INPUT,
                [x, *scales],
                [rounded],
                f"{name}/round",
                attributes,
                domain=contract.OP_DOMAIN,
            )
            return rounded
        codes = _CODES[scheme.input]
        scale = g.const_f32(f"{name}.input.scale", calibrated.scale)
        to_compute = {} if g.compute == ir.DataType.FLOAT else {"output_dtype": int(g.compute)}
        zero = g.const(f"{name}.input.zero", np.zeros((), codes.numpy()))
        q = g.node("QuantizeLinear", [x, scale, zero], f"{name}/input_q", codes, shape)
        return g.node("DequantizeLinear", [q, scale, zero], f"{name}/input_dq", g.compute, shape, to_compute)

    def _times(self, x: ir.Value, name: str, factors: Array, shape: tuple[int | str, ...]) -> ir.Value:
        """Return x times the factors, in float32 where the compute type does not hold them."""
        g, wide, kind = self._g, ir.DataType.FLOAT, self._g.compute
        if holds(factors, kind):
            held = g.const(f"{name}.input.pre_scale", factors.astype(kind.numpy()))
            return g.node("Mul", [x, held], f"{name}/pre_scale", kind, shape)
        held = g.const(f"{name}.input.pre_scale", factors.astype(np.float32))
        x = g.node("Cast", [x], f"{name}/pre_scale/to_f32", wide, shape, {"to": int(wide)})
        x = g.node("Mul", [x, held], f"{name}/pre_scale", wide, shape)
        return g.node("Cast", [x], f"{name}/pre_scale/to_compute", kind, shape, {"to": int(kind)})


def holds(numbers: Array, kind: ir.DataType) -> bool:
    """Return whether a float type holds all numbers to 2^-9 of each (bfloat16: to 2^-8, as it holds any number)."""
    share = 2.0**-8 if kind == ir.DataType.BFLOAT16 else 2.0**-9
    wanted = np.asarray(numbers, np.float64)
    with np.errstate(over="ignore"):
        found = np.asarray(numbers).astype(kind.numpy()).astype(np.float64)
    return bool((np.abs(found - wanted) <= np.abs(wanted) * share).all())
