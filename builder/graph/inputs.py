"""What a quantized product's input goes through first: a vector of factors, and rounding."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir

from ..scheme import FP4_GROUP, QuantizedInput, Scheme
from . import contract
from .graph_builder import GraphBuilder, value

_CODES = {"int8": ir.DataType.INT8, "fp8": ir.DataType.FLOAT8E4M3FN}

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
            factors = g.const(f"{name}.input.pre_scale", calibrated.pre_scale.astype(g.compute.numpy()))
            x = g.node("Mul", [x, factors], f"{name}/pre_scale", g.compute, shape)
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
        scale = g.scalar(f"{name}.input.scale", calibrated.scale)
        zero = g.const(f"{name}.input.zero", np.zeros((), codes.numpy()))
        q = g.node("QuantizeLinear", [x, scale, zero], f"{name}/input_q", codes, shape)
        return g.node("DequantizeLinear", [q, scale, zero], f"{name}/input_dq", g.compute, shape)
