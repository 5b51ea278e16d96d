"""What all layers of a rectangular step share: its dimensions, shapes and masks, each made when first asked for."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from .pen import Pen

_I32, _I64, _BOOL = ir.DataType.INT32, ir.DataType.INT64, ir.DataType.BOOL


class StepValues:
    """Values computed once a step.

    ids : input_ids [B, S]; kv_lens [B]; block_table [B, MB]; block_size : BS
    """

    def __init__(
        self, pen: Pen, ids: ir.Value, kv_lens: ir.Value, block_table: ir.Value, block_size: int
    ) -> None:
        self._pen = pen
        self._ids = ids
        self._kv_lens = kv_lens
        self._block_table = block_table
        self._block_size = block_size

    def _dim(self, name: str, tensor: ir.Value, axis: int) -> ir.Value:
        """One dimension of a tensor as int64 [1]."""
        return self._pen.once(name, "Shape", [tensor], _I64, start=axis, end=axis + 1)

    def batch(self) -> ir.Value:
        """B as int64 [1]."""
        return self._dim("step/B", self._ids, 0)

    def rows(self) -> ir.Value:
        """S as int64 [1]."""
        return self._dim("step/S", self._ids, 1)

    def context(self) -> ir.Value:
        """MB * BS as int64 [1]."""
        blocks = self._dim("step/MB", self._block_table, 1)
        return self._pen.once("step/context", "Mul", [blocks, self._pen.ints([self._block_size])], _I64)

    def _shape_of(self, name: str, *parts: ir.Value) -> ir.Value:
        return self._pen.once(name, "Concat", list(parts), _I64, axis=0)

    def by_row(self, heads: int, d: int) -> ir.Value:
        """The shape [B, S, heads, d]."""
        return self._shape_of(f"step/by_row.{heads}", self.batch(), self.rows(), self._pen.ints([heads, d]))

    def by_head(self, heads: int, d: int) -> ir.Value:
        """The shape [B, heads, S, d]."""
        parts = (self.batch(), self._pen.ints([heads]), self.rows(), self._pen.ints([d]))
        return self._shape_of(f"step/by_head.{heads}", *parts)

    def scores_by_head(self, heads: int) -> ir.Value:
        """The shape [B, heads, S, MB*BS]."""
        parts = (self.batch(), self._pen.ints([heads]), self.rows(), self.context())
        return self._shape_of(f"step/scores_by_head.{heads}", *parts)

    def scores_grouped(self, kv_heads: int) -> ir.Value:
        """The shape [B, kv_heads, heads / kv_heads * S, MB*BS]."""
        parts = (self.batch(), self._pen.ints([kv_heads, -1]), self.context())
        return self._shape_of(f"step/scores_grouped.{kv_heads}", *parts)

    def _iota(self, name: str, count: ir.Value) -> ir.Value:
        """0, 1, ... count-1 as int32 [count]; count is int64 [1]."""
        limit = self._pen.once(f"{name}/limit", "Cast", [count], _I32, to=int(_I32))
        limit = self._pen.once(f"{name}/scalar", "Squeeze", [limit, self._pen.ints([0])], _I32)
        zero, one = (self._pen.const(f"int32.{n}", np.array(n, np.int32)) for n in (0, 1))
        return self._pen.once(name, "Range", [zero, limit, one], _I32)

    def held(self) -> ir.Value:
        """Whether a gathered position holds something, bool [B, 1, MB*BS, 1]."""
        key = self._iota("step/key_positions", self.context())
        lens = self._pen.once("step/kv_lens_column", "Unsqueeze", [self._kv_lens, self._pen.ints([1])], _I32)
        held = self._pen.once("step/held_rows", "Less", [key, lens], _BOOL)
        return self._pen.once("step/held", "Unsqueeze", [held, self._pen.ints([1, 3])], _BOOL)

    def mask(self, window: int) -> ir.Value:
        """Whether row s of sequence b sees key j, bool [B, 1, S, MB*BS].

        Row s is the token at kv_lens[b] - S + s. For a padding row that may be negative; it then counts as 0, so
        that no row's softmax is over nothing.
        """
        key = self._iota("step/key_positions", self.context())
        rows = self._iota("step/row_numbers", self.rows())
        count = self._pen.once("step/S_int32", "Cast", [self.rows()], _I32, to=int(_I32))
        first = self._pen.once("step/first_positions", "Sub", [self._kv_lens, count], _I32)
        first = self._pen.once("step/first_column", "Unsqueeze", [first, self._pen.ints([1])], _I32)
        at = self._pen.once("step/row_positions_raw", "Add", [first, rows], _I32)
        at = self._pen.once(
            "step/row_positions", "Max", [at, self._pen.const("int32.0", np.array(0, np.int32))], _I32
        )
        at = self._pen.once("step/row_positions_4d", "Unsqueeze", [at, self._pen.ints([1, 3])], _I32)
        seen = self._pen.once("step/causal", "LessOrEqual", [key, at], _BOOL)
        if window == 0:
            return seen
        width = self._pen.const(f"window.{window}", np.array(window, np.int32))
        before = self._pen.once(f"step/before_window.{window}", "Sub", [at, width], _I32)
        near = self._pen.once(f"step/in_window.{window}", "Greater", [key, before], _BOOL)
        return self._pen.once(f"step/mask.{window}", "And", [seen, near], _BOOL)
