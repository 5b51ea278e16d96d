"""A plan run in numpy, op by op as plan_format.h words it: what the lowering is checked with, and the core too.

Slow, simple, and independent of the core: float64 where the core's order of sums is its own business, and exactly the
core's codes where activations and the KV pools are quantized.
"""

from __future__ import annotations

import math
from pathlib import Path

import ml_dtypes
import numpy as np
from plansmith.builder.batch import StepBatch
from plansmith.builder.targets.cpu import packing
from plansmith.builder.targets.cpu.plan_file import KvFormat, LinearInput, Op, RoundFormat, SlotRows, View
from plansmith.builder.targets.cpu.plan_reader import Plan, PlanTensor, read_plan


class PlanInterpreter:
    """A plan with pools of its own; `step` gives logits [R, V]."""

    def __init__(self, path: Path | str, num_blocks: int) -> None:
        self.plan: Plan = read_plan(path)
        m = self.plan.model
        shape = (m["num_layers"], num_blocks, m["num_kv_heads"], m["tokens_per_block"], m["head_dim"])
        self.k_pools, self.v_pools = np.full(shape, np.nan), np.full(shape, np.nan)
        self._floats: dict[int, np.ndarray] = {}

    def step(self, batch: StepBatch) -> np.ndarray:
        """Return the logits of one step."""
        self.batch = batch
        counts = {SlotRows.TOKENS: batch.input_ids.size, SlotRows.LOGITS: batch.logits_rows.size}
        # NaN: an op that reads columns which no op wrote shows in the logits.
        self.slots = [np.full((counts[s.rows], s.width), np.nan) for s in self.plan.slots]
        for op in self.plan.ops:
            getattr(self, f"_{op.code.name.lower()}")(op)
        return self.slots[self.plan.logits_slot].astype(np.float32)

    def matrix(self, index: int) -> np.ndarray:
        """Return a tensor as float64 [N, K], scales applied."""
        if index not in self._floats:
            self._floats[index] = dequantized(self.plan.tensors[index])
        return self._floats[index]

    def view(self, view: View, width: int) -> np.ndarray:
        assert view.col + width <= self.plan.slots[view.slot].width
        return self.slots[view.slot][:, view.col : view.col + width]

    def _embed(self, op: Op) -> None:
        table = self.matrix(op.tensors[0])
        self.view(op.out, table.shape[1])[:] = table[self.batch.input_ids] * op.f[0]

    def _rms_norm(self, op: Op) -> None:
        groups, width = op.i[:2]
        x = self.view(op.ins[0], groups * width)
        x = x.reshape(len(x), groups, width)
        x = x / np.sqrt((x * x).mean(-1, keepdims=True) + op.f[0]) * self.matrix(op.tensors[0])[0]
        self.view(op.out, groups * width)[:] = x.reshape(len(x), -1)

    def _linear(self, op: Op) -> None:
        tensor = self.plan.tensors[op.tensors[0]]
        x = self.view(op.ins[0], tensor.cols)
        kind = LinearInput(op.i[1])
        if kind is not LinearInput.FLOAT:
            to, group = kind.name.split("_")
            columns = {"STATIC": -1, "ROW": 0, "GROUP": tensor.group_size}[group]
            x = rounded(x, RoundFormat[to], columns, op.f[0])
        y = x @ self.matrix(op.tensors[0]).T
        if op.tensors[1] >= 0:
            y = y + self.matrix(op.tensors[1])[0]
        out = self.view(op.out, tensor.rows)
        out[:] = out + y if op.i[0] else y

    def _rope(self, op: Op) -> None:
        heads, width, rotated = op.i[:3]
        x = self.view(op.out, heads * width)
        cos, sin = (self.matrix(t)[self.batch.position_ids][:, None] for t in op.tensors)
        h = x.reshape(len(x), heads, width).copy()
        a, b = h[..., : rotated // 2].copy(), h[..., rotated // 2 : rotated].copy()
        h[..., : rotated // 2], h[..., rotated // 2 : rotated] = a * cos - b * sin, b * cos + a * sin
        x[:] = h.reshape(len(x), -1)

    def _paged_attention(self, op: Op) -> None:
        heads, kv_heads, width, layer, window = op.i[:5]
        q = self.view(op.ins[0], heads * width).reshape(-1, heads, width)
        k, v = (self.view(op.ins[n], kv_heads * width).reshape(-1, kv_heads, width) for n in (1, 2))
        out = self.view(op.out, heads * width)
        size = self.plan.model["tokens_per_block"]
        b = self.batch
        for seq, (first, last) in enumerate(zip(b.cu_query_lens[:-1], b.cu_query_lens[1:], strict=True)):
            held = int(b.kv_lens[seq])
            at = np.arange(held)
            blocks, offsets = b.block_table[seq, at // size], at % size
            new = slice(held - (last - first), held)
            k[first:last], v[first:last] = self._as_held(op, k[first:last], v[first:last])
            self.k_pools[layer, blocks[new], :, offsets[new]] = k[first:last]
            self.v_pools[layer, blocks[new], :, offsets[new]] = v[first:last]
            keys, values = (p[layer, blocks, :, offsets] for p in (self.k_pools, self.v_pools))
            for row in range(first, last):
                position = held - (last - row)
                low = max(0, position - window + 1) if window else 0
                for head in range(heads):
                    kv = head * kv_heads // heads
                    s = keys[low : position + 1, kv] @ q[row, head] * op.f[0]
                    s = op.f[1] * np.tanh(s / op.f[1]) if op.f[1] else s
                    p = np.exp(s - s.max())
                    out[row, head * width : (head + 1) * width] = p / p.sum() @ values[low : position + 1, kv]

    def _as_held(self, op: Op, *sides: np.ndarray) -> list[np.ndarray]:
        """Return the step's K and V as the pools hold them."""
        form = self.plan.kv_format
        if form is KvFormat.F32:
            assert op.tensors[0] == -1
            return list(sides)
        if form is KvFormat.F16:
            assert op.tensors[0] == -1
            return [x.astype(np.float32).astype(np.float16).astype(x.dtype) for x in sides]
        kind = RoundFormat.F8 if form is KvFormat.F8 else RoundFormat.INT8
        scales = self.matrix(op.tensors[0])
        assert scales.shape == (1, 2)
        return [
            rounded(x.reshape(len(x), -1), kind, -1, scale).reshape(x.shape)
            for x, scale in zip(sides, scales[0], strict=True)
        ]

    def _glu(self, op: Op) -> None:
        gate, up = (self.view(v, op.i[0]) for v in op.ins[:2])
        if op.i[1] == 0:
            act = gate / (1 + np.exp(-gate))
        elif op.i[1] == 1:
            act = 0.5 * gate * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
        else:
            act = 0.5 * gate * (1 + np.vectorize(math.erf, otypes=[float])(gate / math.sqrt(2)))
        self.view(op.out, op.i[0])[:] = act * up

    def _add(self, op: Op) -> None:
        self.view(op.out, op.i[0])[:] = self.view(op.ins[0], op.i[0]) + self.view(op.ins[1], op.i[0])

    def _softcap(self, op: Op) -> None:
        x = self.view(op.out, op.i[0])
        x[:] = op.f[0] * np.tanh(x / op.f[0])

    def _gather_rows(self, op: Op) -> None:
        self.view(op.out, op.i[0])[:] = self.view(op.ins[0], op.i[0])[self.batch.logits_rows]

    def _scale(self, op: Op) -> None:
        self.view(op.out, op.i[0])[:] *= op.f[0]

    def _mul_vector(self, op: Op) -> None:
        self.view(op.out, op.i[0])[:] = self.view(op.ins[0], op.i[0]) * self.matrix(op.tensors[0])[0]

    def _round_input(self, op: Op) -> None:
        width, kind, group = op.i[:3]
        self.view(op.out, width)[:] = rounded(self.view(op.ins[0], width), RoundFormat(kind), group, op.f[0])


def dequantized(tensor: PlanTensor) -> np.ndarray:
    """Return float64 [N, K] of a tensor, scales applied."""
    has_zeros = bool(tensor.zeros.size)
    values = packing.unpack(
        tensor.data, tensor.dtype, tensor.layout, tensor.rows, tensor.cols, zero_points=has_zeros
    ).astype(np.float64)
    if not tensor.scales.size:
        return values
    groups = tensor.cols // tensor.group_size if tensor.group_size else 1

    def wide(section: np.ndarray) -> np.ndarray:
        by_group = packing.unpack_scales(section, tensor.rows, groups).astype(np.float64)
        return np.repeat(by_group, tensor.cols // groups, axis=1)

    if has_zeros:
        values -= wide(tensor.zeros)
    return values * wide(tensor.scales) * tensor.outer_scale


def rounded(x: np.ndarray, kind: RoundFormat, group: int, given: float = 1.0) -> np.ndarray:
    """Return x as the core sees it: codes times float32 scales, as plan_format.h words kOpRoundInput.

    group : columns that share a scale; 0 = the row, -1 = all, by the scale `given`
    """
    parts = x.astype(np.float32).reshape(len(x), -1, group if group > 0 else x.shape[1])
    largest = np.abs(parts).max(-1, keepdims=True)
    if group == -1:
        scale = np.full_like(largest, given)
    elif kind is RoundFormat.F4:
        outer = np.float32(given)
        scale = (
            np.minimum(largest / (6 * outer), 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * outer
        )
    else:
        scale = largest / np.float32(127 if kind is RoundFormat.INT8 else 448)
    codes = parts / np.where(scale > 0, scale, np.float32(1))
    if kind is RoundFormat.INT8:
        codes = np.clip(np.rint(codes), -128, 127)
    elif kind is RoundFormat.F8:
        codes = np.clip(codes, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    else:
        codes = np.clip(codes, -6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
    return (codes * np.where(scale > 0, scale, 0)).astype(np.float64).reshape(len(x), -1)
