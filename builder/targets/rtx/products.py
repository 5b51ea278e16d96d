"""Quantized products, in the forms that TensorRT-RTX 1.7 computes rightly.

The listing inside its plans shows what it makes of DequantizeLinear(x) @ DequantizeLinear(w): one product of codes, the
scales behind it. That is what we want, but it gives three kinds of wrong numbers:

* With a scale an output, the sums of codes leave the product in the type of the MatMul before any scale has met them:
  float16 ends at 65504, which five products of INT8 codes can pass. A single constant is applied to the sums in float32
  instead. So the largest of the scales stands before the product, and each output's share of it, in float32, behind.
  It joins products that share an input (q, k and v), and two constants become scales an output again: they share one.
* With scales a group of a weight's inputs, it multiplies whole sums by the first group's scales. So an input that meets
  such a weight passes a Min with the largest code, which changes no number and ends the pattern: the product is one of
  floats, over the same rounded numbers.
* The divisor of a static scale is inverted in the compute type: 1 / s of float16 is infinite below 1.6e-5. So inputs
  are divided in float32.

A constant before a product is of the compute type, so what float16 lacks of a small scale is in the factor behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ....runtime.errors import CheckpointError
from ...graph.inputs import holds
from ...scheme import FP4_GROUP
from .pen import Pen
from .quantized_weights import FoundWeight, find_quantized, input_of
from .rounded_inputs import SMALLEST_HALF, RoundedInput, RoundedInputs

Array = npt.NDArray[Any]

_F32, _I4, _U4 = ir.DataType.FLOAT, ir.DataType.INT4, ir.DataType.UINT4
_LARGEST_HALF = 65504.0
_MIDDLE = 8  # codes of UINT4 less this are INT4


def lower_products(pen: Pen) -> None:
    """Rewrite the products of a graph of build_graph that have a quantized weight or a rounded input."""
    _Products(pen).run()


class _Products:
    def __init__(self, pen: Pen) -> None:
        self.pen = pen
        self.inputs = RoundedInputs(pen)
        self._sharing: dict[str, list[FoundWeight]] = {}
        self._sums: dict[tuple[ir.Value, int], ir.Value] = {}

    def run(self) -> None:
        replaced: list[ir.Node] = []
        products = []
        for node in [n for n in self.pen.graph if n.op_type == "MatMul"]:
            weight, x = find_quantized(input_of(node, 1)), self.inputs.find(input_of(node, 0))
            products.append((node, x, weight))
            if x is not None and weight is not None and self._meets_as_codes(x, weight):
                self._sharing.setdefault(x.name, []).append(weight)
        for node, x, weight in products:
            self.pen.anchor = node
            out = self._product(node, x, weight)
            if out is not None:
                self.pen.replace(node.outputs[0], out)
                replaced.append(node)
        for node in replaced:
            self.pen.graph.remove(node, safe=True)
        remove_unread(self.pen.graph)

    def _product(self, node: ir.Node, x: RoundedInput | None, weight: FoundWeight | None) -> ir.Value | None:
        """Return what takes the place of a MatMul; None where it stays."""
        name = str(node.name)
        if x is not None and weight is not None and self._meets_as_codes(x, weight):
            return self._product_of_codes(name, x, weight)
        if x is None and weight is None:
            return None
        plain = input_of(node, 0) if x is None else self.inputs.rounded(x)
        if weight is None:
            return self.pen.node("MatMul", [plain, input_of(node, 1)], f"{name}/plain", self.pen.compute)
        if weight.codes.dtype == _U4 and weight.grid is None:
            return self._with_zero_points(name, plain, weight)
        matrix = self._plain(weight)
        if x is None and matrix is input_of(node, 1):
            return None
        return self.pen.node("MatMul", [plain, matrix], f"{name}/plain", self.pen.compute)

    def _plain(self, weight: FoundWeight) -> ir.Value:
        """Return a weight in the compute type, its scales met in float32 where that costs nothing.

        INT4 has kernels of its own, which take scales of the compute type alone.
        """
        pen, node = self.pen, weight.dequantize
        if weight.format == "fp4":
            return pen.cast(self._fp4_weight(weight), f"{node.name}/to_compute")
        if weight.grid is not None:
            return pen.cast(self._on_grid(weight, self._float(weight.final_scale)), f"{node.name}/to_compute")
        if weight.scale.dtype == pen.compute:
            return node.outputs[0]
        if weight.format == "int4":
            return self._dequantize(node, weight.codes, self._held(weight), f"{node.name}/rtx", pen.compute)
        wide = self._dequantize(node, weight.codes, weight.scale, f"{node.name}/rtx", _F32)
        return pen.cast(wide, f"{node.name}/to_compute")

    def _meets_as_codes(self, x: RoundedInput, weight: FoundWeight) -> bool:
        return x.format == weight.format and x.has_row_scales and not weight.is_grouped

    def _product_of_codes(self, name: str, x: RoundedInput, weight: FoundWeight) -> ir.Value:
        pen = self.pen
        behind: list[ir.Value] = []
        rest = 1.0
        if x.is_static:
            codes, rest = self.inputs.static(x)
        else:
            codes, scale = self.inputs.by_row(x)
            behind.append(scale)
        unit = self._unit(x, self._sharing[x.name])
        behind.append(self._shares(weight, unit, rest))
        y = pen.node("MatMul", [codes, self._times_unit(weight, unit)], f"{name}/codes", pen.compute)
        y = pen.cast(y, f"{name}/f32", _F32)
        for i, factor in enumerate(behind):
            y = pen.node("Mul", [y, factor], f"{name}/scaled.{i}", _F32)
        return pen.cast(y, f"{name}/to_compute")

    def _unit(self, x: RoundedInput, sharing: Sequence[FoundWeight]) -> ir.Value:
        """Return the one constant that stands before all products of an input, in the compute type.

        It is their largest scale. With a row's scales behind them the products are then below K * max|w|. With a static
        one the sums of an output of small scales may be as large as any, and get this constant: so a 16th of it.
        raises (when it is written): CheckpointError for a scale beyond float16's range
        """
        has_one_scale = len(sharing) == 1 and sharing[0].is_whole
        pen, part = self.pen, np.float32(16 if x.is_static and not has_one_scale else 1)
        scales = [one.final_scale for one in sharing]

        def unit(_: Array) -> Array:
            largest = max(np.float32(pen.data(one).max()) for one in scales)
            _check_range(str(scales[0].name), largest, pen.compute)
            kind = pen.compute.numpy()
            found = np.asarray(largest / part, kind)
            if found == 0 and largest > 0:
                return np.asarray(SMALLEST_HALF, kind)
            return found if found > 0 else np.ones_like(found)

        return pen.derived(f"{x.name}/unit", pen.compute, ir.Shape(()), scales[0], unit)

    def _shares(self, weight: FoundWeight, unit: ir.Value, rest: float) -> ir.Value:
        """Return a weight's scales as shares of the unit, float32 like the scales, times what the input's lacks."""
        scale = weight.final_scale

        def shares(scales: Array) -> Array:
            over: Array = scales.astype(np.float32) / self.pen.data(unit).astype(np.float32)
            over *= np.float32(rest)
            return over

        return self.pen.derived(f"{scale.name}/shares", _F32, scale.shape, scale, shares)

    def _times_unit(self, weight: FoundWeight, unit: ir.Value) -> ir.Value:
        """Return a weight's codes times one constant, in the compute type."""
        if weight.grid is not None:
            return self._on_grid(weight, unit)
        return self.pen.node(
            "DequantizeLinear", [weight.codes, unit], f"{weight.dequantize.name}/rtx", self.pen.compute
        )

    def _on_grid(self, weight: FoundWeight, factor: ir.Value) -> ir.Value:
        """Return the FP8 codes that a weight is rounded to times a constant, in its type."""
        assert weight.grid is not None
        pen, node = self.pen, weight.dequantize
        quantize, dequantize = weight.grid
        codes = weight.codes if weight.codes.dtype != _U4 else self._less_zeros(weight)
        w = self._dequantize(node, codes, self._float(weight.scale), f"{node.name}/rtx", _F32)
        grid, zero = input_of(quantize, 1), input_of(quantize, 2)
        codes = pen.node("QuantizeLinear", [w, self._float(grid), zero], f"{quantize.name}/rtx", zero.dtype)
        return pen.node("DequantizeLinear", [codes, factor, zero], f"{dequantize.name}/rtx", factor.dtype)

    def _less_zeros(self, weight: FoundWeight) -> ir.Value:
        """Return UINT4 codes less their zero points, as INT8."""
        zero = input_of(weight.dequantize, 2)

        def change(codes: Array) -> Array:
            zeros = zero.const_value
            assert zeros is not None
            points = zeros.numpy().astype(np.int8)
            points = points.reshape(-1, codes.shape[1]).repeat(codes.size // points.size, axis=0)
            less: Array = codes.astype(np.int8) - points
            return less

        name = f"{weight.codes.name}/less_zeros"
        return self.pen.derived(name, ir.DataType.INT8, weight.codes.shape, weight.codes, change)

    def _dequantize(
        self, like: ir.Node, codes: ir.Value, scale: ir.Value, name: str, dtype: ir.DataType
    ) -> ir.Value:
        names = [key for key in like.attributes if key != "output_dtype"]
        attributes: dict[str, Any] = {key: like.attributes[key].as_int() for key in names}
        return self.pen.node("DequantizeLinear", [codes, scale], name, dtype, **attributes)

    def _held(self, weight: FoundWeight) -> ir.Value:
        """Return the scales of INT4 in the compute type.

        raises (when they are written): CheckpointError for scales beyond float16's range, at either end
        """
        scale, compute = weight.scale, self.pen.compute
        if scale.dtype == compute:
            return scale

        def check(scales: Array) -> Array:
            _check_range(str(scale.name), scales.max(), compute)
            if not holds(scales.max(), compute):
                raise CheckpointError(
                    f"{scale.name} has no scale above {scales.max():.3g}, of which float16 keeps too few bits; build "
                    "for cpu alone, or quantize to fp8 or int8, whose scales stay float32"
                )
            return scales

        return self.pen.derived(f"{scale.name}/held", compute, scale.shape, scale, check)

    def _float(self, scale: ir.Value) -> ir.Value:
        """Return a constant scale in float32."""
        if scale.dtype == _F32:
            return scale
        return self.pen.derived(f"{scale.name}/float", _F32, scale.shape, scale, _same)

    def _fp4_weight(self, weight: FoundWeight) -> ir.Value:
        """Return an FP4 weight in float32, so that the factor on its blocks' scales is not rounded."""
        blocks = weight.scale.producer()
        assert blocks is not None
        outer = self._float(input_of(blocks, 1))
        scale = self.pen.node("DequantizeLinear", [input_of(blocks, 0), outer], f"{blocks.name}/rtx", _F32)
        name = f"{weight.dequantize.name}/rtx"
        return self.pen.node(
            "DequantizeLinear", [weight.codes, scale], name, _F32, axis=0, block_size=FP4_GROUP
        )

    def _with_zero_points(self, name: str, x: ir.Value, weight: FoundWeight) -> ir.Value:
        """(code - zero) * scale = (code - 8) * scale + (8 - zero) * scale, whose second part is one row a group."""
        pen, node = self.pen, weight.dequantize
        shape, scale, zero = weight.codes.shape, self._held(weight), input_of(node, 2)
        assert shape is not None and scale.shape is not None
        rows, outputs = int(shape[0]), int(shape[1])  # type: ignore[arg-type]
        group = node.attributes.get_int("block_size", rows)
        codes = pen.derived(f"{weight.codes.name}/signed", _I4, shape, weight.codes, _signed)
        y = self._dequantize(node, codes, scale, f"{node.name}/rtx", pen.compute)
        y = pen.node("MatMul", [x, y], f"{name}/codes", pen.compute)

        def correction(zeros: Array) -> Array:
            scales = scale.const_value
            assert scales is not None
            left = _MIDDLE - zeros.astype(np.float32)
            return (left * scales.numpy().astype(np.float32)).reshape(-1, outputs)

        dims = ir.Shape((rows // group, outputs))
        rest = pen.derived(f"{weight.codes.name}/correction", pen.compute, dims, zero, correction)
        z = pen.node("MatMul", [self._group_sums(x, rows, group), rest], f"{name}/zeros", pen.compute)
        return pen.node("Add", [y, z], f"{name}/with_zeros", pen.compute)

    def _group_sums(self, x: ir.Value, columns: int, group: int) -> ir.Value:
        """Return the sums of x [T, K] over groups of columns, [T, K / group], made once for all that read x."""
        if (x, group) not in self._sums:
            pen, name = self.pen, f"{x.name}/sums.{group}"
            wide = pen.cast(x, f"{name}/f32", _F32)
            wide = pen.node(
                "Reshape", [wide, pen.ints([-1, columns // group, group])], f"{name}/groups", _F32
            )
            sums = pen.node("ReduceSum", [wide, pen.ints([-1])], name, _F32, keepdims=0)
            self._sums[x, group] = pen.cast(sums, f"{name}/to_compute")
        return self._sums[x, group]


def remove_unread(graph: ir.Graph) -> None:
    """Remove the nodes and initializers that nothing reads any more."""
    for node in reversed(list(graph)):
        if not any(out.uses() or out.is_graph_output() for out in node.outputs):
            graph.remove(node, safe=True)
    for name, value in list(graph.initializers.items()):
        if not value.uses():
            del graph.initializers[name]


def _check_range(name: str, largest: Any, kind: ir.DataType) -> None:
    if kind == ir.DataType.FLOAT16 and float(largest) > _LARGEST_HALF:
        raise CheckpointError(
            f"{name} has a scale of {float(largest):.3g}, float16 ends at {_LARGEST_HALF:g}; build for cpu alone"
        )


def _same(values: Array) -> Array:
    return values


def _signed(codes: Array) -> Array:
    signed: Array = codes.astype(np.int8) - np.int8(_MIDDLE)
    return signed
