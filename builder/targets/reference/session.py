"""Runs a lowered graph in ONNX Runtime and keeps its pools between steps."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ....runtime.errors import ShapeError, UnsupportedError
from ...batch import StepBatch
from ...graph import contract, save
from ...scratch import scratch_directory
from .lower import lower


class ReferenceSession:
    """A graph of build_graph, run by ONNX Runtime's CPU provider at full precision.

    model : a graph of build_graph (lowered here) or of lower
    num_blocks : blocks of the pools. They start as NaN: a result that reads what no step wrote shows at once. Quantized
        pools are float32 here, and hold the numbers of the codes
    num_threads : threads of ONNX Runtime
    raises : UnsupportedError if onnxruntime is not installed
    """

    def __init__(self, model: ir.Model, num_blocks: int, *, num_threads: int = 1) -> None:
        ort = _onnxruntime()
        if contract.OP_DOMAIN in model.graph.opset_imports:
            model = lower(model)
        self._num_blocks = num_blocks
        self._max_seq_len = int(model.metadata_props["plansmith.max_seq_len"])
        options = ort.SessionOptions()
        options.intra_op_num_threads = num_threads
        # The extended level turns Q/DQ weights into kernels that quantize the activations too: another arithmetic.
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
        options.log_severity_level = 3
        with scratch_directory("reference") as folder:
            path = folder / "model.onnx"
            save(model, path)
            self._session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self._pool_names = [str(v.name) for v in model.graph.inputs if contract.is_pool(str(v.name))]
        self._tokens_per_block = 0
        self._pools: dict[str, Any] = {}
        for value in model.graph.inputs:
            if str(value.name) in self._pool_names:
                assert value.shape is not None and value.dtype is not None
                shape = (num_blocks, *(int(d) for d in list(value.shape)[1:]))  # type: ignore[arg-type]
                self._tokens_per_block = shape[2]
                pool = np.full(shape, np.nan, value.dtype.numpy())
                self._pools[str(value.name)] = ort.OrtValue.ortvalue_from_numpy(pool)
        self._ort = ort

    def step(self, batch: StepBatch) -> npt.NDArray[np.float32]:
        """Return the logits (R, V) of one step and keep its keys and values.

        raises : ShapeError if the batch contradicts itself or reaches outside the pool or max_seq_len
        """
        batch.check(self._num_blocks, self._tokens_per_block)
        if batch.position_ids.max() >= self._max_seq_len:
            raise ShapeError(
                f"position_ids reach {batch.position_ids.max()}, the graph was built for max_seq_len "
                f"{self._max_seq_len}; build it with a larger --max_seq_len"
            )
        columns = -(-int(batch.kv_lens.max()) // self._tokens_per_block)
        batch = dataclasses.replace(batch, block_table=np.ascontiguousarray(batch.block_table[:, :columns]))
        feeds = {k: self._ort.OrtValue.ortvalue_from_numpy(v) for k, v in batch.feeds().items()}
        wanted = {i.name for i in self._session.get_inputs()}
        feeds = {k: v for k, v in {**feeds, **self._pools}.items() if k in wanted}
        outputs = [contract.LOGITS] + [contract.pool_out(name) for name in self._pool_names]
        logits, *pools = self._session.run_with_ort_values(outputs, feeds)
        self._pools = dict(zip(self._pool_names, pools, strict=True))
        result: npt.NDArray[np.float32] = logits.numpy()
        return result

    def pool(self, name: str) -> npt.NDArray[Any]:
        """Return a copy of a pool (NB, KVH, BS, D) by its input name, e.g. "k_pool.0"; NaN where no step wrote.

        Of a quantized pool it is float32: the codes, to be multiplied by the scale.
        """
        return np.array(self._pools[name].numpy())


def _onnxruntime() -> Any:
    try:
        import onnxruntime
    except ImportError:
        raise UnsupportedError(
            "the reference runs in ONNX Runtime, which is not installed; pip install 'plansmith[verify]'"
        ) from None
    return onnxruntime
