"""A cpu plan run step by step from Python, for checking: the core's executor behind the interface of StepBatch."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import numpy.typing as npt

from ....runtime._native import native
from ....runtime.executor import Batch, Executor, ModelInfo, cpu_executor
from ...batch import StepBatch


class CpuSession:
    """An opened plan with its own pools; use it as a context manager or call close. One thread at a time.

    plan_path : a file of compile_plan
    num_blocks : blocks of the pools
    num_threads : threads of the pool, the caller's included; 0 = one a core
    isa : None = the best there is; else "portable", "avx2", "avx512vnni", "avx512bf16", "amx" or "neon"
    weights : where they lie, as cpu_executor takes it
    raises : EngineFileError for a damaged plan, UnsupportedError for an isa that this machine lacks
    """

    def __init__(
        self,
        plan_path: str | os.PathLike[str],
        num_blocks: int,
        *,
        num_threads: int = 1,
        isa: str | None = None,
        weights: str = "auto",
    ) -> None:
        self._executor: Executor | None = cpu_executor(
            os.fspath(plan_path), num_threads=num_threads, isa=isa, weights=weights
        )
        try:
            self.info: ModelInfo = self._executor.describe()
            self._executor.open(num_blocks)
        except BaseException:
            self.close()
            raise
        self._num_blocks = num_blocks

    def step(self, batch: StepBatch) -> npt.NDArray[np.float32]:
        """Return the logits (R, V) of one step and keep its keys and values.

        logits_rows may come in any order here; the core takes them ascending.
        raises : ShapeError if the batch contradicts itself or reaches outside the pool, ExecutorError from the core
        """
        batch.check(self._num_blocks, self.info.tokens_per_block)
        assert self._executor is not None, "the session is closed"
        order = np.argsort(batch.logits_rows, kind="stable")
        arrays = {name: np.ascontiguousarray(a, np.int32) for name, a in batch.feeds().items()}
        arrays["logits_rows"] = np.ascontiguousarray(batch.logits_rows[order])
        struct = _struct(arrays)
        out = np.empty((len(order), self.info.vocab_size), np.float32)
        out[order] = self._executor.step(Batch.from_pointer(struct))
        return out

    def close(self) -> None:
        """Release the plan and the pools; a second call does nothing."""
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.close()

    def __enter__(self) -> CpuSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _struct(arrays: dict[str, npt.NDArray[np.int32]]) -> Any:
    """Return a psm_batch over arrays that the caller keeps alive."""
    core = native()
    struct = core.new("psm_batch")
    struct.num_tokens = arrays["input_ids"].size
    struct.num_seqs, struct.block_table_stride = arrays["block_table"].shape
    struct.num_logits_rows = arrays["logits_rows"].size
    for name, array in arrays.items():
        # An empty array has no address that cffi takes.
        setattr(struct, name, core.ffi.from_buffer("int32_t[]", array) if array.size else core.ffi.NULL)
    return struct
