"""Initializers that are read, transposed and quantized when a compiler asks for them, one weight at a time."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ...runtime.errors import CheckpointError
from ..checkpoint import WeightSource
from ..mapped import release_pages
from ..precision import Precision, int4_group_size
from .graph_builder import GraphBuilder
from .quantize import quantize_int4, quantize_int8

Array = npt.NDArray[Any]

_SLICE_ELEMENTS = 1 << 18  # checked at a time, so that little more than the result is held


@dataclasses.dataclass
class _Last:
    """The codes and scales of the weight that was quantized last: a weight's two initializers share one pass."""

    key: tuple[str, int] | None = None
    codes: Array | None = None
    scale: Array | None = None


class WeightLoader:
    """Puts weights into a graph. Nothing is read before an initializer's data is asked for."""

    def __init__(self, g: GraphBuilder, source: WeightSource, precision: Precision) -> None:
        self.g = g
        self.precision = precision
        self._source = source
        self._last = _Last()
        self._tables: dict[str, ir.Value] = {}

    def matrix(self, name: str) -> ir.Value:
        """Return the weight as [in, out] in the compute type, at the precision's weight_bits."""
        return self._linear(name, self.precision.weight_bits)

    def head(self, name: str) -> ir.Value:
        """Return an untied logits matrix as [in, out] in the compute type, at head_bits."""
        return self._linear(name, self.precision.head_bits)

    def table(self, name: str) -> ir.Value:
        """Return the embedding table [V, E]: as it is stored at 32 and 16 bits, dequantized at 8.

        One node whatever the number of users: a tied table is quantized once, a scale for each vocabulary row.
        TensorRT takes a quantized constant in front of DequantizeLinear only, so rows cannot be gathered before it.
        """
        if name in self._tables:
            return self._tables[name]
        rows, cols = self._source.shape(name)
        if self.precision.head_bits > 8:
            stored = self._stored_type(self.precision.head_bits)
            table = self.g.lazy(name, stored, (rows, cols), lambda: self._plain(name, stored))
        else:
            codes = self.g.lazy(name, ir.DataType.INT8, (rows, cols), lambda: self._int8(name)[0])
            scale = self.g.lazy(f"{name}.scale", self.g.compute, (rows,), lambda: self._int8(name)[1])
            attrs = {"axis": 0}
            table = self.g.node(
                "DequantizeLinear", [codes, scale], f"{name}/dq", self.g.compute, (rows, cols), attrs
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
            _check_finite(w, name)
            shifted: Array = w.astype(np.float32) + np.float32(offset)
            return shifted

        return self.g.lazy(name, ir.DataType.FLOAT, self._source.shape(name), read)

    def cast(self, stored: ir.Value) -> ir.Value:
        """Return a stored weight in the compute type."""
        if stored.dtype == self.g.compute:
            return stored
        assert stored.name is not None and stored.shape is not None
        name = f"{stored.name}/cast"
        return self.g.node(
            "Cast", [stored], name, self.g.compute, stored.shape.numpy(), {"to": int(self.g.compute)}
        )

    def _linear(self, name: str, bits: int) -> ir.Value:
        n, k = self._source.shape(name)
        if bits > 8:
            dtype = self._stored_type(bits)
            return self.cast(self.g.lazy(name, dtype, (k, n), lambda: _transposed(self._plain(name, dtype))))
        if bits == 8:
            codes = self.g.lazy(name, ir.DataType.INT8, (k, n), lambda: _transposed(self._int8(name)[0]))
            scale = self.g.lazy(f"{name}.scale", self.g.compute, (n,), lambda: self._int8(name)[1])
            attrs = {"axis": 1}
        else:
            group = int4_group_size(k)
            codes = self.g.lazy(name, ir.DataType.INT4, (k, n), lambda: self._int4(name, group))
            scale = self.g.lazy(
                f"{name}.scale", self.g.compute, (k // group, n), lambda: self._quantized(name, group)[1].T
            )
            attrs = {"axis": 0, "block_size": group}
        return self.g.node("DequantizeLinear", [codes, scale], f"{name}/dq", self.g.compute, (k, n), attrs)

    def _stored_type(self, bits: int) -> ir.DataType:
        if bits == 32:
            return ir.DataType.FLOAT
        return ir.DataType.BFLOAT16 if self.precision.name == "bf16" else ir.DataType.FLOAT16

    def _plain(self, name: str, dtype: ir.DataType) -> Array:
        w = np.asarray(self._source.get(name))
        _check_finite(w, name)
        wanted = dtype.numpy()
        if w.dtype == wanted:
            return w
        with np.errstate(over="ignore"):
            out = w.astype(wanted)
        release_pages(w)
        if wanted == np.float16 and np.isinf(out).any():
            raise CheckpointError(
                f"{name} has weights beyond float16's largest number, 65504; build with --precision bf16"
            )
        return out

    def _int8(self, name: str) -> tuple[Array, Array]:
        return self._quantized(name, 0)

    def _int4(self, name: str, group: int) -> Array:
        return _transposed(self._quantized(name, group)[0]).astype(ml_dtypes.int4)

    def _quantized(self, name: str, group: int) -> tuple[Array, Array]:
        """Return codes [out, in] and scales; group 0 is int8."""
        last = self._last
        if last.key != (name, group) or last.codes is None or last.scale is None:
            last.key = last.codes = last.scale = None  # let go before the next is read
            w = np.asarray(self._source.get(name))
            dtype = self.g.compute.numpy()
            if group:
                codes, scale = quantize_int4(w, group, name=name, scale_dtype=dtype)
            else:
                codes, scale = quantize_int8(w, name=name, scale_dtype=dtype)
            last.key, last.codes, last.scale = (name, group), codes, scale
            return codes, scale
        return last.codes, last.scale


def weight_bytes(model: ir.Model) -> dict[str, int]:
    """Return the bytes of a graph's weights by ONNX's name of their type in lower case; none is read."""
    sizes: collections.Counter[str] = collections.Counter()
    for value in model.graph.initializers.values():
        if value.const_value is not None:
            sizes[value.const_value.dtype.name.lower()] += value.const_value.nbytes
    return dict(sizes)


def _check_finite(w: Array, name: str) -> None:
    """Raise CheckpointError if a weight is NaN or infinite."""
    step = max(1, _SLICE_ELEMENTS // max(1, w[:1].size))
    for i in range(0, len(w), step):
        if not _all_finite(w[i : i + step]):
            raise CheckpointError(
                f"{name} has weights that are NaN or infinite; the checkpoint is damaged or overflowed when it was "
                "converted: get it again"
            )
        release_pages(w[i : i + step])


def _all_finite(part: Array) -> bool:
    if part.itemsize != 2:
        return bool(np.isfinite(part).all())
    # numpy's own is 5 times slower on these
    exponent = np.uint16(0x7F80 if part.dtype == ml_dtypes.bfloat16 else 0x7C00)
    return bool(((part.view(np.uint16) & exponent) != exponent).all())


def _transposed(w: Array) -> Array:
    """Return a matrix [out, in] as a contiguous [in, out], a cache line of each output row at a time (4 x numpy's)."""
    out = np.empty(w.shape[::-1], w.dtype)
    stripe = max(1, 64 // w.itemsize)
    for row in range(0, w.shape[0], stripe):
        out[:, row : row + stripe] = w[row : row + stripe].T
    return out
