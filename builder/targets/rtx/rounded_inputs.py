"""Inputs of products that are rounded first: their codes, their scales, and the numbers that both mean.

All is computed in float32: in float16 a quotient could sit on the wrong side of a tie, and 1 / s overflow.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from ...graph import contract as graph_contract
from ...scheme import FP4_GROUP, FP8_MAX, INT8_MAX
from . import contract
from .pen import Pen

_F32, _FP4, _FP8, _I8 = (
    ir.DataType.FLOAT,
    ir.DataType.FLOAT4E2M1,
    ir.DataType.FLOAT8E4M3FN,
    ir.DataType.INT8,
)
_CODES = {"int8": _I8, "fp8": _FP8}
_MAX = {"int8": INT8_MAX, "fp8": FP8_MAX}
SMALLEST_HALF = 2.0**-24  # what float16 has above 0
_ABOVE = {"int8": 128.0, "fp8": 512.0}  # the powers of two above those


@dataclasses.dataclass(frozen=True)
class RoundedInput:
    """An input that is rounded: x [T, K] before that, and how.

    group : columns that share a scale, 0 = all; of no meaning with a static scale
    scale : static, or of fp4 the factor on the blocks' scales; a constant
    """

    x: ir.Value
    columns: int
    format: str
    group: int
    scale: ir.Value | None
    name: str

    @property
    def is_static(self) -> bool:
        """Whether one calibrated scale holds for all tokens."""
        return self.scale is not None and self.format != "fp4"

    @property
    def has_row_scales(self) -> bool:
        """Whether all columns of a token share a scale."""
        return self.format != "fp4" and (self.is_static or self.group == 0)


class RoundedInputs:
    """Writes them; what several products read is made once."""

    def __init__(self, pen: Pen) -> None:
        self._pen = pen
        self._made: dict[tuple[str, str], ir.Value] = {}

    def find(self, value: ir.Value) -> RoundedInput | None:
        """Return how a product's input is rounded; None where it is as it is."""
        node = value.producer()
        if node is None:
            return None
        if (node.domain, node.op_type) == (graph_contract.OP_DOMAIN, graph_contract.ROUND_INPUT):
            kind, group = node.attributes["format"].as_string(), node.attributes["group"].as_int()
            return self._found(node, kind, group, node.inputs[1] if len(node.inputs) > 1 else None)
        quantize = (
            node.inputs[0].producer() if node.op_type == "DequantizeLinear" and node.inputs[0] else None
        )
        if quantize is None or quantize.op_type != "QuantizeLinear":
            return None
        kind = "int8" if quantize.outputs[0].dtype == _I8 else "fp8"
        return self._found(quantize, kind, 0, quantize.inputs[1])

    def _found(self, node: ir.Node, kind: str, group: int, scale: ir.Value | None) -> RoundedInput:
        x = node.inputs[0]
        assert x is not None and x.shape is not None
        return RoundedInput(x, int(x.shape[1]), kind, group, scale, str(node.name))  # type: ignore[arg-type]

    def static(self, one: RoundedInput) -> tuple[ir.Value, float]:
        """Return a statically rounded input in the compute type, as DequantizeLinear of codes, over a factor.

        The factor is what the compute type lacks of the scale, near 1 but for scales that are small.
        """
        assert one.scale is not None and one.scale.const_value is not None
        scale = float(one.scale.const_value.numpy())
        kind = self._pen.compute.numpy()
        with np.errstate(over="ignore"):
            held = np.array(scale, kind)
        if held == 0 or np.isinf(held):
            held = np.array(SMALLEST_HALF if held == 0 else 1, kind)

        def make() -> ir.Value:
            assert one.scale is not None
            pen, zero = self._pen, self._zero(one.format)
            x = pen.cast(one.x, f"{one.name}/f32", _F32)
            values = [x, self._float(one.scale), zero]
            codes = pen.node("QuantizeLinear", values, f"{one.name}/rtx", _CODES[one.format])
            unit = pen.const(f"{one.scale.name}/held", held)
            return pen.node("DequantizeLinear", [codes, unit, zero], f"{one.name}/static", pen.compute)

        return self._once(one, "static", make), scale / float(held)

    def by_row(self, one: RoundedInput) -> tuple[ir.Value, ir.Value]:
        """Return a row's codes [T, K] over the power of two above them, in the compute type, and its scales times that.

        So the numbers stay below 1, and a product with them below what float16 holds; the scales are [T, 1] float32.
        """
        assert one.group == 0 and not one.is_static
        pen, above = self._pen, _ABOVE[one.format]

        def values() -> ir.Value:
            unit = pen.const(f"unit.{one.format}", np.array(1 / above, pen.compute.numpy()))
            inputs = [self._codes(one), unit, self._zero(one.format)]
            return pen.node("DequantizeLinear", inputs, f"{one.name}/below_1", pen.compute)

        def scales() -> ir.Value:
            inputs = [self._scales(one), pen.number(above)]
            return pen.node("Mul", inputs, f"{one.name}/scale_of_1", _F32)

        return self._once(one, "below_1", values), self._once(one, "scale_of_1", scales)

    def rounded(self, one: RoundedInput) -> ir.Value:
        """Return the rounded input [T, K] in the compute type, as numbers that no product takes for codes."""

        def make() -> ir.Value:
            if one.format == "fp4":
                return self._fp4(one)
            pen, zero = self._pen, self._zero(one.format)
            codes = self._codes(one)
            values = pen.node("DequantizeLinear", [codes, pen.number(1.0), zero], f"{one.name}/dq", _F32)
            largest = pen.number(_MAX[one.format])
            values = pen.node("Min", [values, largest], f"{one.name}/numbers", _F32)
            values = pen.node("Mul", [values, self._scales(one)], f"{one.name}/rounded", _F32)
            if one.group:
                values = pen.node("Reshape", [values, pen.ints([-1, one.columns])], f"{one.name}/flat", _F32)
            return pen.cast(values, f"{one.name}/to_compute")

        return self._once(one, "rounded", make)

    def _codes(self, one: RoundedInput) -> ir.Value:
        """Return the codes, [T, K] or [T, K / group, group]."""
        pen = self._pen

        def make() -> ir.Value:
            x = pen.node("Div", [self._grouped(one), self._scales(one)], f"{one.name}/over_scale", _F32)
            inputs = [x, pen.number(1.0), self._zero(one.format)]
            return pen.node("QuantizeLinear", inputs, f"{one.name}/q", _CODES[one.format])

        return self._once(one, "codes", make)

    def _scales(self, one: RoundedInput) -> ir.Value:
        """Return the scales in float32: [] where static, else [T, 1] or [T, K / group, 1]."""
        pen, name = self._pen, one.name

        def make() -> ir.Value:
            if one.is_static:
                assert one.scale is not None
                return self._float(one.scale)
            size = pen.node("Abs", [self._grouped(one)], f"{name}/abs", _F32)
            top = pen.node("ReduceMax", [size, pen.ints([-1])], f"{name}/max", _F32, keepdims=1)
            scale = pen.node("Div", [top, pen.number(_MAX[one.format])], f"{name}/scale", _F32)
            # Zeros have no scale; any other gives zeros again.
            smallest = pen.number(float(np.finfo(np.float32).tiny))
            return pen.node("Max", [scale, smallest], f"{name}/scale_floor", _F32)

        return self._once(one, "scales", make)

    def _grouped(self, one: RoundedInput) -> ir.Value:
        pen = self._pen

        def make() -> ir.Value:
            x = pen.cast(one.x, f"{one.name}/f32", _F32)
            if not one.group:
                return x
            shape = pen.ints([-1, one.columns // one.group, one.group])
            return pen.node("Reshape", [x, shape], f"{one.name}/groups", _F32)

        return self._once(one, "grouped", make)

    def _fp4(self, one: RoundedInput) -> ir.Value:
        pen, name = self._pen, f"{one.name}/fp4"
        outer = one.scale
        assert outer is not None
        codes, blocks = pen.nodes(
            contract.FP4_DYNAMIC_QUANTIZE,
            [one.x, outer],
            name,
            (_FP4, _FP8),
            domain=contract.DOMAIN,
            axis=-1,
            block_size=FP4_GROUP,
            scale_type=int(_FP8),
        )
        scale = pen.node("DequantizeLinear", [blocks, outer], f"{name}/scales", _F32)
        values = pen.node(
            "DequantizeLinear", [codes, scale], f"{name}/dq", _F32, axis=-1, block_size=FP4_GROUP
        )
        return pen.cast(values, f"{name}/to_compute")

    def _float(self, scale: ir.Value) -> ir.Value:
        if scale.dtype == _F32:
            return scale
        return self._pen.derived(f"{scale.name}/float", _F32, scale.shape, scale, lambda values: values)

    def _zero(self, kind: str) -> ir.Value:
        return self._pen.const(f"zero.{kind}", np.zeros((), _CODES[kind].numpy()))

    def _once(self, one: RoundedInput, what: str, make: Callable[[], ir.Value]) -> ir.Value:
        key = (one.name, what)
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]
