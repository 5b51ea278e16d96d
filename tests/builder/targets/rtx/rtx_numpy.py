"""TensorRT's ops in numpy, and a session that runs a lowered graph with them: the same steps a GPU would run.

The ops follow NVIDIA's published schemas (parsers/onnx custom operators: TRT_Attention, TRT_KVCacheUpdate,
TRT_FP4DynamicQuantize), are as strict as those are silent, and never hide padding: pools start as NaN and a row that
may see nothing gives NaN.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from plansmith.builder.batch import StepBatch
from plansmith.builder.graph import contract as graph_contract
from plansmith.builder.targets.rtx import contract, step_inputs


class TRT_KVCacheUpdate(OpRun):  # the class name is the op's
    """cache[b, :, write_indices[b] + i] = update[lengths[b] + i] for the tokens lengths[b] .. lengths[b+1]-1."""

    op_domain = contract.DOMAIN

    def _run(
        self,
        cache: Any,
        update: Any,
        starts: Any,
        lengths: Any,
        axis: Any = None,
        mode: Any = None,
        update_form: Any = None,
    ) -> tuple[Any]:
        assert (axis, mode, update_form) == (-2, "linear", "packed_nhd")
        num_blocks, heads, size, dim = cache.shape
        assert cache.dtype == update.dtype and starts.dtype == lengths.dtype == np.int32
        assert update.ndim == 3 and update.shape[1:] == (heads, dim)
        assert starts.shape == (num_blocks,) and lengths.shape == (num_blocks + 1,)
        assert lengths[0] == 0 and lengths[-1] == len(update), "the last length must be the number of tokens"
        assert (np.diff(lengths) >= 0).all()
        out = cache.copy()
        for block in np.flatnonzero(np.diff(lengths)):
            tokens = update[lengths[block] : lengths[block + 1]]
            end = starts[block] + len(tokens)
            assert starts[block] >= 0 and end <= size, "written past the end of a block"
            out[block, :, starts[block] : end] = tokens.transpose(1, 0, 2)
        return (out,)


class TRT_Attention(OpRun):
    """softmax(q k + mask) v in float64; q is scaled already, GQA by head groups, no dimension is reshaped."""

    op_domain = contract.DOMAIN

    def _run(
        self,
        q: Any,
        k: Any,
        v: Any,
        mask: Any = None,
        query_lengths: Any = None,
        kv_lengths: Any = None,
        TRT_decomposable: Any = None,
        causal_kind: Any = None,
        kv_form: Any = None,
        query_form: Any = None,
    ) -> tuple[Any]:
        assert (query_form, kv_form) == ("padded_bhnd", "padded_bhnd") and query_lengths is None
        assert mask is None or causal_kind == "none", "a mask excludes a causal kind"
        batch, heads, rows, dim = q.shape
        kv_heads, context = k.shape[1:3]
        assert k.shape == v.shape == (batch, kv_heads, context, dim) and heads % kv_heads == 0
        assert q.dtype == k.dtype == v.dtype
        k, v = (np.repeat(x.astype(np.float64), heads // kv_heads, axis=1) for x in (k, v))
        scores = q.astype(np.float64) @ k.swapaxes(2, 3)
        seen = np.ones((batch, 1, rows, context), bool)
        if mask is not None:
            assert mask.dtype == np.bool_ and mask.ndim == 4
            seen &= mask
        if kv_lengths is not None:
            assert kv_lengths.dtype == np.int32 and kv_lengths.shape == (batch,)
            seen &= np.arange(context) < kv_lengths[:, None, None, None]
        if causal_kind == "lower_right":
            assert kv_lengths is not None
            last = kv_lengths[:, None, None, None] - rows + np.arange(rows)[:, None]
            seen &= np.arange(context) <= last
        scores = np.where(seen, scores, -np.inf)
        with np.errstate(invalid="ignore"):
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            return ((weights / weights.sum(axis=-1, keepdims=True) @ v).astype(q.dtype),)


class TRT_FP4DynamicQuantize(OpRun):
    """Codes and scales of blocks: scale = e4m3(max|x| / (6 * outer)), code = e2m1(x / (scale * outer))."""

    op_domain = contract.DOMAIN

    def _run(
        self, x: Any, outer: Any, axis: Any = None, block_size: Any = None, scale_type: Any = None
    ) -> tuple[Any, Any]:
        assert (axis, block_size, scale_type) == (-1, 16, onnx.TensorProto.FLOAT8E4M3FN)
        assert x.dtype in (np.float32, np.float16, ml_dtypes.bfloat16) and outer.shape == ()
        rows, columns = x.shape
        blocks = x.astype(np.float32).reshape(rows, columns // 16, 16)
        outer = np.float32(outer)
        top = np.abs(blocks).max(axis=2) / (np.float32(6) * outer)
        scales = np.minimum(top, np.float32(448)).astype(ml_dtypes.float8_e4m3fn)
        width = scales.astype(np.float32)[..., None] * outer
        ratio = np.divide(blocks, width, out=np.zeros_like(blocks), where=width != 0)
        codes = np.clip(ratio, -6, 6).astype(ml_dtypes.float4_e2m1fn)
        return codes.reshape(rows, columns), scales


class NumpySession:
    """A lowered graph with its pools, run step by step by the ONNX reference evaluator."""

    def __init__(self, lowered: ir.Model, num_blocks: int) -> None:
        proto = ir.to_proto(lowered)
        self._run = ReferenceEvaluator(
            proto, new_ops=[TRT_KVCacheUpdate, TRT_Attention, TRT_FP4DynamicQuantize]
        )
        self.num_blocks = num_blocks
        self.pools: dict[str, Any] = {}
        for value in lowered.graph.inputs:
            if graph_contract.is_pool(str(value.name)):
                shape = (num_blocks, *list(value.shape)[1:])
                self.pools[str(value.name)] = np.full(shape, np.nan, value.dtype.numpy())
        self.block_size = next(iter(self.pools.values())).shape[2]
        self.vocab_size = proto.graph.output[0].type.tensor_type.shape.dim[1].dim_value

    def step(self, batch: StepBatch, *, together: bool = False) -> Any:
        """Return the logits (R, V) of a packed step, run as its rectangles; `together`: as one padded rectangle."""
        logits = np.full((batch.logits_rows.size, self.vocab_size), np.nan, np.float32)
        if together:
            everyone = list(range(batch.query_lens.size))
            parts = [step_inputs.rectangle(batch, everyone, self.num_blocks, self.block_size)]
        else:
            parts = list(step_inputs.split(batch, self.num_blocks, self.block_size))
        for part in parts:
            outputs = self.run(part.inputs)
            logits[part.logits_idx] = outputs[graph_contract.LOGITS][: part.logits_idx.size]
        return logits

    def run(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Run once, keep the new pools, return all outputs."""
        names = self._run.output_names
        outputs = dict(zip(names, self._run.run(None, {**inputs, **self.pools}), strict=True))
        for name in self.pools:
            self.pools[name] = outputs[graph_contract.pool_out(name)]
        return outputs


def names_and_types(proto: onnx.ModelProto) -> dict[str, int]:
    """Return input name -> element type."""
    return {v.name: v.type.tensor_type.elem_type for v in proto.graph.input}
