"""Initializers that are read, transposed and quantized when a compiler asks for them, one weight at a time."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any, cast

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ..checkpoint import WeightSource
from ..precision import Precision
from ..scheme import FLOAT, ROW, WHOLE, QuantizedInput, QuantizedSource, QuantizedWeight, Scheme
from .arrays import check_finite, converted, transposed
from .graph_builder import GraphBuilder
from .inputs import InputRounding
from .quantize import quantize_int4, quantize_int8

Array = npt.NDArray[Any]

_CODES = {
    "int8": ir.DataType.INT8,
    "int4": ir.DataType.INT4,
    "fp8": ir.DataType.FLOAT8E4M3FN,
    "fp4": ir.DataType.FLOAT4E2M1,
}
_FLOATS = {
    "float32": ir.DataType.FLOAT,
    "float16": ir.DataType.FLOAT16,
    "bfloat16": ir.DataType.BFLOAT16,
}


_KEPT_BYTES = 1 << 16


@dataclasses.dataclass
class _Last:
    """The weight that was quantized or unpacked last: a weight's initializers share one pass.

    factors, scales : scale_2 of all weights seen, and scales that are small: those of scalars are written apart
    """

    name: str | None = None
    weight: QuantizedWeight | None = None
    factors: dict[str, float] = dataclasses.field(default_factory=dict)
    scales: dict[str, Array] = dataclasses.field(default_factory=dict)

    def keep(self, name: str, weight: QuantizedWeight) -> None:
        """Make a weight the last."""
        self.name, self.weight = name, weight
        self.factors[name] = weight.scale_2
        if weight.scale.nbytes <= _KEPT_BYTES:
            self.scales[name] = np.array(weight.scale)


class WeightLoader:
    """Puts weights into a graph. No weight is read before an initializer's data is asked for."""

    def __init__(self, g: GraphBuilder, source: WeightSource, precision: Precision) -> None:
        self.g = g
        self.precision = precision
        self._source = source
        self._inputs = InputRounding(g)
        self._last = _Last()
        self._tables: dict[str, ir.Value] = {}

    def scheme(self, name: str) -> Scheme:
        """Return how the product `name` is quantized; a tied head is a table, see there."""
        return self.precision.scheme(name, self._source.shape(f"{name}.weight")[1])

    def input(self, x: ir.Value, name: str, rows: str) -> ir.Value:
        """Return x [rows, K] as the product `name` takes it: by its factors, and rounded."""
        tied = name == "lm_head" and f"{name}.weight" not in self._source.names()
        k = self._source.shape("embed.weight" if tied else f"{name}.weight")[1]
        scheme = self.precision.scheme(name, k)
        calibrated = QuantizedInput()
        if self.precision.quantization is not None and scheme != FLOAT:
            calibrated = self._quantized_source().quantized_input(f"{name}.weight")
        return self._inputs.apply(x, name, scheme, calibrated, (rows, k))

    def matrix(self, name: str) -> ir.Value:
        """Return the weight of the product `name` as [in, out] in the compute type."""
        scheme, weight = self.scheme(name), f"{name}.weight"
        n, k = self._source.shape(weight)
        if scheme.weight == "float":
            dtype = self._stored_type()
            return self.cast(
                self.g.lazy(weight, dtype, (k, n), lambda: transposed(self._plain(weight, dtype)))
            )
        return self._dequantized(weight, scheme, n, k)

    def table(self, name: str) -> ir.Value:
        """Return the embedding table [V, E]: as it is stored, or dequantized where a head has 8 bits.

        One node whatever the number of users: a tied table is quantized once, by the scheme of the product.
        TensorRT takes a quantized constant in front of DequantizeLinear only, so rows cannot be gathered before it.
        """
        if name in self._tables:
            return self._tables[name]
        rows, cols = self._source.shape(name)
        if self.precision.head_bits > 8 or self.precision.quantization is not None:
            stored = self._stored_type()
            table = self.g.lazy(name, stored, (rows, cols), lambda: self._plain(name, stored))
        else:
            scheme = self.precision.scheme("lm_head", cols)
            held = self._scale_type()
            shape, attrs = _scale_form(scheme, rows, cols, swapped=False)
            codes = self.g.lazy(
                name, ir.DataType.INT8, (rows, cols), lambda: self._quantized(name, scheme).codes
            )
            scale = self.g.lazy(f"{name}.scale", held, shape, lambda: self._quantized(name, scheme).scale)
            table = self.g.node(
                "DequantizeLinear",
                [codes, self.cast(scale)],
                f"{name}/dq",
                self.g.compute,
                (rows, cols),
                attrs,
            )
        self._tables[name] = table
        return table

    def vector(self, name: str) -> ir.Value:
        """Return a bias in the compute type."""
        dtype = self.g.compute
        return self.g.lazy(name, dtype, self._source.shape(name), lambda: self._plain(name, dtype))

    def norm(self, name: str, offset: float) -> ir.Value:
        """Return a norm's weight in float32 with the family's offset added."""

        def read() -> Array:
            w = np.asarray(self._source.get(name))
            check_finite(w, name)
            shifted: Array = w.astype(np.float32) + np.float32(offset)
            return shifted

        return self.g.lazy(name, ir.DataType.FLOAT, self._source.shape(name), read)

    def kv_scales(self, layer: int) -> list[ir.Value]:
        """Return the scales of a layer's K and V pools; none where the pools are not quantized."""
        if self.precision.kv in ("float", "float16"):
            return []
        scales = self._quantized_source().kv_scales(layer)
        names = (f"layers.{layer}.k_scale", f"layers.{layer}.v_scale")
        return [self.g.const_f32(name, scale) for name, scale in zip(names, scales, strict=True)]

    def cast(self, stored: ir.Value) -> ir.Value:
        """Return a stored weight in the compute type."""
        if stored.dtype == self.g.compute:
            return stored
        assert stored.name is not None and stored.shape is not None
        name = f"{stored.name}/cast"
        return self.g.node(
            "Cast", [stored], name, self.g.compute, stored.shape.numpy(), {"to": int(self.g.compute)}
        )

    def _dequantized(self, name: str, scheme: Scheme, n: int, k: int) -> ir.Value:
        """Return [K, N] of a quantized weight as the nodes of decoder.py."""
        g, compute, held = self.g, self.g.compute, self._scale_type()
        kind = ir.DataType.UINT4 if scheme.zero_points else _CODES[scheme.weight]
        codes = g.lazy(name, kind, (k, n), lambda: self._codes(name, scheme, kind))
        shape, attrs = _scale_form(scheme, n, k, swapped=True)
        made_here = self.precision.quantization is None
        to_compute = {} if made_here or held == compute else {"output_dtype": int(compute)}
        inputs = [codes]
        if scheme.weight == "fp4":
            fp8 = ir.DataType.FLOAT8E4M3FN
            blocks = g.lazy(f"{name}.scale", fp8, shape, lambda: self._scale(name, scheme))
            outer = g.lazy(f"{name}.scale_2", held, (), lambda: self._scale_2(name, scheme))
            inputs.append(g.node("DequantizeLinear", [blocks, outer], f"{name}/scale_dq", held, shape))
        else:
            scale = g.lazy(f"{name}.scale", held, shape, lambda: self._scale(name, scheme))
            inputs.append(self.cast(scale) if made_here else scale)
        if scheme.zero_points:
            inputs.append(g.lazy(f"{name}.zero", kind, shape, lambda: self._zero(name, scheme)))
        w = g.node("DequantizeLinear", inputs, f"{name}/dq", compute, (k, n), attrs | to_compute)
        if scheme.fp8_grid:
            fp8 = ir.DataType.FLOAT8E4M3FN
            grid = g.lazy(f"{name}.grid", held, (), lambda: self._scale_2(name, scheme))
            zero = g.const(f"{name}.grid_zero", np.zeros((), fp8.numpy()))
            q = g.node("QuantizeLinear", [w, grid, zero], f"{name}/grid_q", fp8, (k, n))
            w = g.node("DequantizeLinear", [q, grid, zero], f"{name}/grid_dq", compute, (k, n), to_compute)
        return w

    def _codes(self, name: str, scheme: Scheme, kind: ir.DataType) -> Array:
        codes = transposed(self._quantized(name, scheme).codes)
        return codes if codes.dtype == kind.numpy() else codes.astype(kind.numpy())

    def _scale(self, name: str, scheme: Scheme) -> Array:
        """Return a weight's scales as [groups, out], in the type that they are stored in."""
        scale = self._last.scales.get(name)
        if scale is None:
            scale = self._quantized(name, scheme).scale
        kind = scale.dtype if scheme.weight == "fp4" else self._scale_type().numpy()
        stored: Array = scale.T.astype(kind, order="C")
        return stored

    def _scale_2(self, name: str, scheme: Scheme) -> Array:
        if name not in self._last.factors:
            self._quantized(name, scheme)
        return np.array(self._last.factors[name], self._scale_type().numpy())

    def _zero(self, name: str, scheme: Scheme) -> Array:
        zero = self._quantized(name, scheme).zero
        assert zero is not None
        stored: Array = zero.T.astype(ml_dtypes.uint4, order="C")
        return stored

    def _scale_type(self) -> ir.DataType:
        """Return the type of scales: float32 for a checkpoint's, which half floats may not hold.

        Those that are made here are rounded to the type before codes are made, so they lose nothing in it.
        """
        if self.precision.quantization is not None:
            return ir.DataType.FLOAT
        chosen = self.precision.scale_type
        return self.g.compute if chosen is None else _FLOATS[chosen]

    def _stored_type(self) -> ir.DataType:
        return _FLOATS[self.precision.float_type]

    def _plain(self, name: str, dtype: ir.DataType) -> Array:
        w = np.asarray(self._source.get(name))
        check_finite(w, name)
        return converted(w, dtype.numpy(), name)

    def _quantized(self, name: str, scheme: Scheme) -> QuantizedWeight:
        """Return a weight's codes and scales: the checkpoint's own, or rounded here to the nearest."""
        last = self._last
        if last.name != name or last.weight is None:
            last.name = last.weight = None  # let go before the next is read
            if self.precision.quantization is not None:
                weight = self._quantized_source().quantized(name)
            else:
                weight = self._rounded(name, scheme)
            last.keep(name, weight)
            return weight
        return last.weight

    def _rounded(self, name: str, scheme: Scheme) -> QuantizedWeight:
        w = np.asarray(self._source.get(name))
        dtype = self._scale_type().numpy()
        if scheme.weight == "int4":
            signed = self.precision.signed_scales
            made = quantize_int4(w, scheme.weight_group, signed=signed, name=name, scale_dtype=dtype)
            return QuantizedWeight(*made)
        return QuantizedWeight(*quantize_int8(w, scheme.weight_group, name=name, scale_dtype=dtype))

    def _quantized_source(self) -> QuantizedSource:
        return cast(QuantizedSource, self._source)


def _scale_form(scheme: Scheme, n: int, k: int, *, swapped: bool) -> tuple[tuple[int, ...], dict[str, int]]:
    """Return the shape of a weight's scales in the graph, and the attributes of its DequantizeLinear.

    swapped : the graph has it as [K, N], as products want it; else [N, K]
    """
    if scheme.weight_group == WHOLE:
        return (), {}
    outputs, inputs = (1, 0) if swapped else (0, 1)
    if scheme.weight_group == ROW:
        return (n,), {"axis": outputs}
    group = scheme.weight_group
    shape = (k // group, n) if swapped else (n, k // group)
    return shape, {"axis": inputs, "block_size": group}


def weight_bytes(model: ir.Model) -> dict[str, int]:
    """Return the bytes of a graph's weights by ONNX's name of their type in lower case; none is read."""
    sizes: collections.Counter[str] = collections.Counter()
    for value in model.graph.initializers.values():
        if value.const_value is not None:
            sizes[value.const_value.dtype.name.lower()] += value.const_value.nbytes
    return dict(sizes)
