"""The plugins in numpy, and a session that runs a lowered packed graph with them: the same nodes a GPU would run.

As strict as the kernels are silent: what a plugin leaves alone is NaN until another writes it, shapes and types are
asserted, and a pool's output is the very array that came in.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from plansmith.builder.batch import StepBatch
from plansmith.builder.graph import contract as graph_contract
from plansmith.builder.targets.tensorrt import contract
from plansmith.plugins.paged_attention.reference import quantize_kv
from rtx_numpy import TRT_FP4DynamicQuantize

KINDS = {np.dtype(np.int8): "int8", np.dtype(ml_dtypes.float8_e4m3fn): "fp8"}


def as_numbers(array: Any) -> Any:
    """An array that the evaluator may have handed over as bytes, in its own type."""
    return array.view(ml_dtypes.float8_e4m3fn) if array.dtype == np.uint8 else array


class Plugin(OpRun):
    """What all share."""

    op_domain = graph_contract.OP_DOMAIN

    @staticmethod
    def check(plugin_namespace: Any, plugin_version: Any, aot: Any) -> None:
        assert (plugin_namespace, plugin_version, aot) == (contract.NAMESPACE, contract.VERSION, 1)


def rows_of(cu: Any, kv_lens: Any) -> list[tuple[int, range, int]]:
    """(sequence, its rows of T, the position of the first) of the sequences with rows."""
    assert cu.dtype == kv_lens.dtype == np.int32 and cu.shape == (kv_lens.size + 1,)
    rows = [range(int(cu[b]), int(cu[b + 1])) for b in range(kv_lens.size)]
    return [(b, r, int(kv_lens[b]) - len(r)) for b, r in enumerate(rows) if len(r) and kv_lens[b]]


class KvWrite(Plugin):
    """Writes each row of k and v to its place in the pools, quantized as the pools are."""

    def _run(
        self, k: Any, v: Any, k_pool: Any, v_pool: Any, cu: Any, kv_lens: Any, table: Any, k_scale: Any, v_scale: Any,
        num_heads: Any = None, kv_num_heads: Any = None, head_dim: Any = None,
        plugin_namespace: Any = None, plugin_version: Any = None, aot: Any = None,
    ) -> tuple[Any, Any]:  # fmt: skip
        self.check(plugin_namespace, plugin_version, aot)
        k_pool, v_pool = as_numbers(k_pool).copy(), as_numbers(v_pool).copy()
        kind = KINDS.get(k_pool.dtype, "float")
        assert k_pool.shape[1::2] == (kv_num_heads, head_dim) and k.shape[1] == kv_num_heads * head_dim
        assert kind != "float" or k.dtype == k_pool.dtype
        for b, rows, past in rows_of(cu, kv_lens):
            for i, row in enumerate(rows):
                block, offset = divmod(past + i, k_pool.shape[2])
                for x, pool, scale in ((k, k_pool, k_scale), (v, v_pool, v_scale)):
                    assert scale.shape == () and scale.dtype == np.float32 and table[b, block] >= 0
                    held = quantize_kv(x[row].astype(np.float32), float(scale), kind)  # type: ignore[arg-type]
                    pool[table[b, block], :, offset] = held.reshape(kv_num_heads, head_dim).astype(pool.dtype)
        return k_pool, v_pool


class Attend:
    """A layer's attention over pools that hold everything."""

    def __init__(self, q: Any, pools: Any, table: Any, scales: Any, attrs: dict[str, Any]) -> None:
        self.heads, self.dim = attrs["num_heads"], attrs["head_dim"]
        self.group = self.heads // attrs["kv_num_heads"]
        self.attrs, self.table = attrs, table
        self.q = q.astype(np.float64).reshape(len(q), self.heads, self.dim)
        self.pools = [as_numbers(pool) for pool in pools]
        self.scales = [float(s) if self.pools[0].dtype in KINDS else 1.0 for s in scales]
        if self.pools[0].dtype not in KINDS:
            assert [float(s) for s in scales] == [1.0, 1.0]

    def held(self, pool: Any, b: int, begin: int, end: int, head: int) -> Any:
        at = np.arange(begin, end)
        size = pool.shape[2]
        return pool[self.table[b, at // size], head // self.group, at % size].astype(np.float64)

    def part(self, b: int, row: int, head: int, begin: int, end: int) -> tuple[Any, float, float]:
        """(weighted sum of values, largest score, sum of weights) over positions begin..end-1."""
        scores = self.held(self.pools[0], b, begin, end, head) @ self.q[row, head]
        scores = scores * self.scales[0] * self.attrs["scale"]
        if self.attrs["softcap"]:
            scores = self.attrs["softcap"] * np.tanh(scores / self.attrs["softcap"])
        weights = np.exp(scores - scores.max())
        return weights @ self.held(self.pools[1], b, begin, end, head), scores.max(), weights.sum()

    def low(self, position: int) -> int:
        window = self.attrs["window"]
        return max(0, position - window + 1) if window else 0


class PagedAttentionDecode(Plugin):
    """Sequences of few rows: finished where one split holds what their rows see, else partial results."""

    def _run(
        self, q: Any, k_pool: Any, v_pool: Any, cu: Any, kv_lens: Any, table: Any, k_scale: Any, v_scale: Any,
        plugin_namespace: Any = None, plugin_version: Any = None, aot: Any = None, **attrs: Any,
    ) -> tuple[Any, Any, Any]:  # fmt: skip
        self.check(plugin_namespace, plugin_version, aot)
        attend = Attend(q, (k_pool, v_pool), table, (k_scale, v_scale), attrs)
        length, most = attrs["split_len"], attrs["query_rows"]
        splits = -(-table.shape[1] * k_pool.shape[2] // length)
        out = np.full((len(q), attend.heads, attend.dim), np.nan, q.dtype)
        partials = np.full((kv_lens.size, most, attend.heads, splits, attend.dim), np.nan, np.float32)
        stats = np.full((*partials.shape[:-1], 2), np.nan, np.float32)
        for b, rows, past in rows_of(cu, kv_lens):
            if len(rows) > most:
                continue
            first, last = attend.low(past) // length, (int(kv_lens[b]) - 1) // length
            for i, row in enumerate(rows):
                for head in range(attend.heads):
                    for split in range(first, last + 1):
                        begin = max(attend.low(past + i), split * length)
                        end = min(past + i + 1, split * length + length)
                        if begin >= end:  # of another row's positions alone
                            partials[b, i, head, split], stats[b, i, head, split] = 0, (-np.inf, 0)
                            continue
                        part, largest, weight = attend.part(b, row, head, begin, end)
                        if first == last:
                            out[row, head] = part / weight * attend.scales[1]
                        else:
                            partials[b, i, head, split], stats[b, i, head, split] = part, (largest, weight)
        return out.reshape(len(q), -1), partials, stats


class PagedAttentionCombine(Plugin):
    """Puts the splits' partial results together."""

    def _run(
        self, out: Any, partials: Any, stats: Any, cu: Any, kv_lens: Any, v_scale: Any,
        plugin_namespace: Any = None, plugin_version: Any = None, aot: Any = None, **attrs: Any,
    ) -> tuple[Any]:  # fmt: skip
        self.check(plugin_namespace, plugin_version, aot)
        out = out.copy().reshape(len(out), attrs["num_heads"], attrs["head_dim"])
        length, window = attrs["split_len"], attrs["window"]
        for b, rows, past in rows_of(cu, kv_lens):
            low = max(0, past - window + 1) if window else 0
            first, end = low // length, -(-int(kv_lens[b]) // length)
            if len(rows) > attrs["query_rows"] or end - first <= 1:
                continue
            for i, row in enumerate(rows):
                part, stat = partials[b, i, :, first:end], stats[b, i, :, first:end]
                assert np.isnan(out[row]).all() and not np.isnan(part).any()
                factor = np.exp(stat[..., :1] - stat[..., :1].max(axis=1, keepdims=True)).astype(np.float64)
                total = (part * factor).sum(axis=1) / (stat[..., 1:] * factor).sum(axis=1)
                out[row] = total * float(v_scale)
        return (out.reshape(len(out), -1),)


class PagedAttentionPrefill(Plugin):
    """Sequences of many rows."""

    def _run(
        self, out: Any, q: Any, k_pool: Any, v_pool: Any, cu: Any, kv_lens: Any, table: Any, k_scale: Any,
        v_scale: Any, plugin_namespace: Any = None, plugin_version: Any = None, aot: Any = None, **attrs: Any,
    ) -> tuple[Any]:  # fmt: skip
        self.check(plugin_namespace, plugin_version, aot)
        attend = Attend(q, (k_pool, v_pool), table, (k_scale, v_scale), attrs)
        out = out.copy().reshape(len(q), attend.heads, attend.dim)
        for b, rows, past in rows_of(cu, kv_lens):
            if len(rows) <= attrs["query_rows"]:
                continue
            for i, row in enumerate(rows):
                assert np.isnan(out[row]).all()
                for head in range(attend.heads):
                    part, _, weight = attend.part(b, row, head, attend.low(past + i), past + i + 1)
                    out[row, head] = part / weight * attend.scales[1]
        return (out.reshape(len(q), -1),)


PLUGINS = (KvWrite, PagedAttentionDecode, PagedAttentionCombine, PagedAttentionPrefill)


class NumpySession:
    """A lowered graph with its pools, run step by step by the ONNX reference evaluator."""

    def __init__(self, lowered: ir.Model, num_blocks: int) -> None:
        self._run = ReferenceEvaluator(ir.to_proto(lowered), new_ops=[*PLUGINS, TRT_FP4DynamicQuantize])
        self.pools: dict[str, Any] = {}
        for value in lowered.graph.inputs:
            if graph_contract.is_pool(str(value.name)):
                assert value.shape is not None and value.dtype is not None
                shape = (num_blocks, *list(value.shape)[1:])
                kind = value.dtype.numpy()
                garbage = np.nan if kind != np.int8 else 99
                self.pools[str(value.name)] = np.full(shape, garbage, kind)

    def step(self, batch: StepBatch) -> Any:
        """Return the logits (R, V) of a packed step."""
        inputs = {name: getattr(batch, name) for name in contract.STEP_INPUTS}
        names = self._run.output_names
        outputs = dict(zip(names, self._run.run(None, {**inputs, **self.pools}), strict=True))
        for name in self.pools:
            self.pools[name] = as_numbers(outputs[graph_contract.pool_out(name)])
        return outputs[graph_contract.LOGITS]
