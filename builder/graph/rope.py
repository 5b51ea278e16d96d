"""Rotary embeddings: one pair of cos and sin caches for each distinct RopeSpec."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ..spec import RopeSpec
from .graph_builder import TOKENS, GraphBuilder

Array = npt.NDArray[Any]


def rope_tables(rope: RopeSpec, num_positions: int) -> tuple[Array, Array]:
    """Return cos and sin (num_positions, rotary_dim / 2) in float32, mscale folded in.

    The angle is a float32 product, as transformers computes it: far out in a context the rounding of the angle is
    larger than that of its cosine, and the model was trained with it.
    """
    inv_freq = np.asarray(rope.inv_freq, np.float32)
    angle = np.arange(num_positions, dtype=np.float32)[:, None] * inv_freq[None, :]
    wide = angle.astype(np.float64)
    return (np.cos(wide) * rope.mscale).astype(np.float32), (np.sin(wide) * rope.mscale).astype(np.float32)


class Ropes:
    """The caches of a graph and the position ids in the form that RotaryEmbedding takes."""

    def __init__(
        self, g: GraphBuilder, ropes: tuple[RopeSpec, ...], num_positions: int, position_ids: ir.Value
    ) -> None:
        self._g = g
        self._ropes = ropes
        self._num_positions = num_positions
        self._position_ids = position_ids
        self._positions: ir.Value | None = None

    def rotate(self, x: ir.Value, name: str, rope_idx: int, heads: int, head_dim: int) -> ir.Value:
        """Return x [T, heads*D] with each head's first rotary_dim columns rotated as two halves."""
        g = self._g
        rope = self._ropes[rope_idx]
        cos, sin = self._caches(rope_idx)
        axis = g.ints("axis.0", [0])
        width = heads * head_dim
        attrs = {"num_heads": heads}
        if rope.rotary_dim != head_dim:
            attrs["rotary_embedding_dim"] = rope.rotary_dim
        x = g.node("Unsqueeze", [x, axis], f"{name}/unsqueeze", g.compute, (1, TOKENS, width))
        x = g.node(
            "RotaryEmbedding",
            [x, cos, sin, self._position_matrix()],
            name,
            g.compute,
            (1, TOKENS, width),
            attrs,
            out=f"{name}/rotated",
        )
        return g.node("Squeeze", [x, axis], f"{name}/squeeze", g.compute, (TOKENS, width), out=f"{name}/out")

    def _caches(self, rope_idx: int) -> tuple[ir.Value, ir.Value]:
        rope = self._ropes[rope_idx]
        dtype, shape = self._g.compute, (self._num_positions, rope.rotary_dim // 2)

        def read(which: int) -> Array:
            return rope_tables(rope, self._num_positions)[which].astype(dtype.numpy())

        cos = self._g.lazy(f"rope.{rope_idx}.cos", dtype, shape, lambda: read(0))
        sin = self._g.lazy(f"rope.{rope_idx}.sin", dtype, shape, lambda: read(1))
        return cos, sin

    def _position_matrix(self) -> ir.Value:
        """position_ids as int64 [1, T], the only type the operator knows."""
        if self._positions is None:
            g = self._g
            wide = g.node(
                "Cast", [self._position_ids], "positions/cast", ir.DataType.INT64, (TOKENS,), {"to": 7}
            )
            self._positions = g.node(
                "Unsqueeze",
                [wide, g.ints("axis.0", [0])],
                "positions/unsqueeze",
                ir.DataType.INT64,
                (1, TOKENS),
                out="positions/out",
            )
        return self._positions
