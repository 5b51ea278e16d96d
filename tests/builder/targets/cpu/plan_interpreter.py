"""A plan run in numpy, op by op as plan_format.h words it: what the lowering is checked with, and the core too.

Slow, simple, and independent of the core: float64 where the core's order of sums is its own business, and exactly the
core's integers where activations are quantized.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
from plansmith.builder.batch import StepBatch
from plansmith.builder.targets.cpu import packing
from plansmith.builder.targets.cpu.plan_file import DType, Op, SlotRows, View
from plansmith.builder.targets.cpu.plan_reader import Plan, PlanTensor, read_plan


class PlanInterpreter:
    """A plan with pools of its own; `step` gives logits [R, V]."""

    def __init__(self, path: Path | str, num_blocks: int, *, quantize_activations: bool = True) -> None:
        self.plan: Plan = read_plan(path)
        self.quantize_activations = quantize_activations
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
        if self.quantize_activations and tensor.dtype in (DType.I8, DType.I4):
            x = rounded(x, tensor.cols // tensor.group_size if op.i[1] else 1)
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


def dequantized(tensor: PlanTensor) -> np.ndarray:
    """Return float64 [N, K] of a tensor, scales applied."""
    values = packing.unpack(tensor.data, tensor.dtype, tensor.layout, tensor.rows, tensor.cols)
    if not tensor.scales.size:
        return values.astype(np.float64)
    groups = tensor.cols // tensor.group_size if tensor.group_size else 1
    scales = packing.unpack_scales(tensor.scales, tensor.rows, groups)
    return values * np.repeat(scales.astype(np.float64), tensor.cols // groups, axis=1)


def rounded(x: np.ndarray, num_scales: int) -> np.ndarray:
    """Return x as the core sees it: int8 times a float32 scale, one for each of num_scales parts of a row."""
    parts = x.astype(np.float32).reshape(len(x), num_scales, -1)
    scale = np.abs(parts).max(-1, keepdims=True) / np.float32(127)
    codes = np.rint(parts / np.where(scale > 0, scale, np.float32(1)))
    return (codes * scale).astype(np.float64).reshape(len(x), -1)
