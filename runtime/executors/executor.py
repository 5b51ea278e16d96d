"""The TensorRT executor: steps of the core as runs of a plan, on one stream."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterable, Sequence
from typing import Any, cast

import numpy as np

from ..batch import (
    ROW_SAMPLE,
    Batch,
    BlockCopy,
    Float32Array,
    Int32Array,
    ModelInfo,
    RecordArray,
    StepSampling,
)
from ..errors import CudaError, Error, InternalError, OutOfMemoryError, ShutdownError
from ..manifest import Manifest
from . import memory, packed, rectangular
from .cuda import PinnedMemory, StickyCudaError
from .launching import Launcher, Parts
from .pools import BlockShape, Pools
from .runs import Run, Step
from .staging import Staging, aligned


@dataclasses.dataclass(frozen=True)
class DeviceUse:
    """What an executor holds and what its GPU has, in bytes.

    pinned : page-locked host memory of this executor
    """

    name: str
    used: int
    free: int
    total: int
    pinned: int


class TensorRtExecutor:
    """The core's executor over a plan (a LaunchingModel). One thread at a time; any may be it."""

    def __init__(self, manifest: Manifest, target: str, parts: Parts) -> None:
        self._parts = parts
        self._manifest = manifest
        self._shape: BlockShape = memory.block_shape(manifest, target)
        self._pools: Pools | None = None
        self._staging: Staging | None = None
        self._launcher: Launcher | None = None
        self._host_logits: PinnedMemory | None = None
        self._lost: Error | None = None  # the context is gone
        # Of the launched step: which of its rows each row of the logits buffer is, and whether they come first there,
        # in order.
        self._row_idx: Int32Array = np.empty(0, np.int32)
        self._num_rows = 0
        self._is_in_order = True
        self._iota = np.arange(parts.logits_capacity, dtype=np.int32)
        self._use = threading.Lock()  # held while the context is used by others than the engine
        self._is_closed = False
        buckets = parts.buckets
        is_padded = buckets is not None and not parts.plan.is_packed
        self.num_reserve_blocks = (
            buckets.num_reserve_blocks(self._shape.tokens_per_block) if buckets and is_padded else 0
        )

    def describe(self) -> ModelInfo:
        """Return the plan's sizes and limits."""
        model, limits = self._manifest.model, self._manifest.limits
        return ModelInfo(
            vocab_size=model.vocab_size,
            num_layers=model.num_layers,
            num_heads=model.num_heads,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            max_batch_size=limits.max_batch_size,
            max_num_tokens=limits.max_num_tokens,
            max_input_len=limits.max_input_len,
            max_seq_len=limits.max_seq_len,
            tokens_per_block=limits.tokens_per_block,
            kv_bytes_per_block=self._shape.block_bytes,
            max_logits_rows=self._parts.plan.max_logits_rows,
            samples_rows=int(self._parts.sampler is not None),
        )

    def kv_budget(self, fraction: float, kv_cache_bytes: int, draft: TensorRtExecutor | None = None) -> int:
        """Return the bytes that the core may make KV blocks of, by what is free on the device now.

        fraction : of what is free, where kv_cache_bytes is 0
        draft : shares the budget on the same device: each block of the core has one of its pools too
        raises OutOfMemoryError
        """
        with self._current():
            free = self._parts.context.memory()[0]
        both = [self] if draft is None else [self, draft]
        per_block = sum(one._shape.block_bytes for one in both)
        staging = sum(one._staging_bytes(free // per_block + 1) for one in both)
        return memory.kv_budget(
            free - staging,
            fraction,
            kv_cache_bytes,
            per_block,
            sum(one._reserve_bytes for one in both),
            min(one._max_blocks for one in both),
        )

    def _staging_bytes(self, num_blocks: int) -> int:
        return sum(aligned(size) for size in self._parts.plan.staging_bytes(num_blocks))

    @property
    def _reserve_bytes(self) -> int:
        """Pools beyond what the core's blocks take: those of padding, and what planes are rounded up by."""
        shape = self._shape
        return shape.pool_bytes(self.num_reserve_blocks) + shape.pool_bytes(1)

    @property
    def _max_blocks(self) -> int:
        """The most blocks that the core may have."""
        return self._parts.plan.max_pool_blocks - self.num_reserve_blocks

    def open(self, num_blocks: int) -> None:
        """Allocate pools of num_blocks KV blocks, and bind them. Called once.

        raises OutOfMemoryError, which tells how much is free
        """
        parts = self._parts
        most = self._max_blocks
        if num_blocks > most:
            raise OutOfMemoryError(
                f"{num_blocks} KV blocks are asked for, the plan takes pools of at most {most}; lower kv_cache_bytes "
                f"to {most * self._shape.block_bytes}"
            )
        with self._current():
            free = parts.context.memory()[0]
            try:
                total = num_blocks + self.num_reserve_blocks
                self._staging = Staging(parts.context, self._staging_bytes(total))
                parts.stack.callback(self._staging.close)
                self._pools = Pools(
                    parts.context, self._shape, num_blocks, self.num_reserve_blocks, parts.stream
                )
                parts.stack.callback(self._pools.close)
            except OutOfMemoryError as error:
                raise OutOfMemoryError(
                    f"KV pools of {num_blocks} blocks take {memory.size_text(self._shape.pool_bytes(total))} of "
                    f"{parts.context.device.name}, {memory.size_text(free)} are free ({error}); lower kv_cache_bytes "
                    "or kv_cache_free_gpu_mem_fraction"
                ) from error
            self._launcher = Launcher(parts, self._staging, self._pools, 4 * self._manifest.model.vocab_size)

    def open_host(self, num_blocks: int) -> None:
        """Allocate num_blocks host blocks, page-locked. Called once, after open."""
        with self._current():
            self._opened()[1].open_host(num_blocks)

    def launch(self, batch: Batch) -> None:
        """Hand a step to the device and return without waiting.

        raises ShapeError outside the plan's profiles, CudaError
        """
        with self._current():
            launcher, capacity = self._opened()[0], self._parts.logits_capacity
            given: list[Int32Array] = []
            used = 0
            for run in self._runs(batch):
                count = _num_rows(run)
                if used + count > capacity:
                    raise InternalError(f"a step has more than {capacity} rows of logits")
                launcher.launch(run, used if count else capacity)
                given.append(run.logits_idx[:count])
                used += count
            row_idx = given[0] if len(given) == 1 else np.concatenate(given)
            self._row_idx, self._num_rows = row_idx, batch.logits_rows.size
            first = row_idx[: self._num_rows]
            self._is_in_order = bool((first == self._iota[: first.size]).all())

    def _runs(self, step: Step) -> Iterable[Run]:
        """Return a step's runs. A rectangular plan's are made one by one, while the device works on those before."""
        parts, pools = self._parts, self._opened()[1]
        block_size, buckets = self._shape.tokens_per_block, parts.buckets
        if parts.plan.is_packed:
            return [packed.pack(step, block_size, buckets)]
        if buckets is not None and rectangular.num_rows(step, buckets) > parts.logits_capacity:
            buckets = None  # too many of the rows are for nobody: chunks of one token in a full batch
        return rectangular.split(step, pools.num_blocks, block_size, buckets, self.num_reserve_blocks)

    def collect(self, sampling: StepSampling | None) -> Float32Array | RecordArray:
        """Wait for the step that was launched; return its logits, or with `sampling` what was drawn from them.

        returns : (R, V) float32, or (R,) ROW_SAMPLE; valid until the next launch
        raises CudaError for what went wrong in the step
        """
        parts = self._parts
        # What is in order is all there at the beginning; rows behind it are nobody's.
        count = self._num_rows if self._is_in_order else self._row_idx.size
        with self._current():
            if sampling is None or count == 0:
                logits: Float32Array = self._ordered(self._logits(count))
                return logits if sampling is None else np.empty(0, ROW_SAMPLE)
            if parts.sampler is None:
                raise InternalError(
                    "rows are to be drawn on the device, and the engine has no kernels for it"
                )
            parts.sampler.launch(parts.logits, self._row_idx, sampling, parts.stream)
            samples: RecordArray = self._ordered(parts.sampler.collect(count, parts.stream))
            return samples

    def step(self, batch: Batch) -> Float32Array:
        """Run one step and return its logits, (R, V) float32, valid until the next step."""
        self.launch(batch)
        logits = self.collect(None)
        return cast(Float32Array, logits)

    def _logits(self, count: int) -> Float32Array:
        """Return the rows of logits as the runs gave them, (count, V) in pinned memory."""
        parts, vocab_size = self._parts, self._manifest.model.vocab_size
        num_bytes = 4 * count * vocab_size
        if count:
            if self._host_logits is None:
                # Only steps that are not drawn on the device need it.
                self._host_logits = parts.context.alloc_pinned(4 * parts.logits_capacity * vocab_size)
                parts.stack.callback(self._free_host_logits)
            parts.context.copy_to_host(self._host_logits.address, parts.logits, num_bytes, parts.stream)
        parts.context.wait(parts.stream)
        if self._host_logits is None:
            return np.empty((0, vocab_size), np.float32)
        return self._host_logits.bytes[:num_bytes].view(np.float32).reshape(count, vocab_size)

    def _free_host_logits(self) -> None:
        if self._host_logits is not None:
            with contextlib.suppress(CudaError):
                self._parts.context.free_pinned(self._host_logits)
        self._host_logits = None

    def _ordered(self, rows: Any) -> Any:
        """Return rows of the runs in the step's order, without those that nobody wants."""
        if self._is_in_order:
            return rows
        order = self._row_idx
        positions = np.empty(self._num_rows, np.intp)
        wanted = np.flatnonzero(order >= 0)
        positions[order[wanted]] = wanted
        return rows[positions]

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy blocks, one after another, each copy seeing what those before it wrote."""
        with self._current():
            self._opened()[1].copy(copies, self._parts.stream)

    def device_use(self) -> DeviceUse:
        """Return what the device has and what is used of it, by anybody. Any thread, until it is closed."""
        context = self._parts.context
        with self._use:  # close waits: the context must not go while another thread is in it
            if self._is_closed:
                raise ShutdownError("the engine is closed, and with it what tells its device's memory")
            try:
                with context.current():
                    free, total = context.memory()
            except CudaError as error:  # lost
                raise ShutdownError(f"the device does not tell its memory: {error}") from error
        pinned = 0 if self._staging is None else self._staging.pinned_bytes
        pinned += 0 if self._pools is None else self._pools.host_bytes
        pinned += 0 if self._host_logits is None else self._host_logits.bytes.size
        return DeviceUse(context.device.name, total - free, free, total, pinned)

    @property
    def failure(self) -> str | None:
        """Why the device does nothing any more in this process; None while it does. Any thread."""
        return None if self._lost is None else str(self._lost)

    def close(self) -> None:
        """Release everything, in order. Never fails; twice is fine."""
        with self._use:
            if self._is_closed:
                return
            self._is_closed = True
        with contextlib.ExitStack() as stack:
            stack.callback(self._parts.context.close)
            with contextlib.suppress(Error):  # of a lost context
                stack.enter_context(self._parts.context.current())
            with contextlib.suppress(Error):
                self._parts.context.wait(self._parts.stream)  # before anything that its work uses goes
            self._parts.stack.close()

    def _current(self) -> _Current:
        return _Current(self)

    def _opened(self) -> tuple[Launcher, Pools]:
        if self._launcher is None or self._pools is None:
            raise InternalError("a step before open")
        return self._launcher, self._pools


class _Current(contextlib.AbstractContextManager[None]):
    """Makes an executor's CUDA context this thread's; once it is lost, fails with the error that lost it."""

    def __init__(self, executor: TensorRtExecutor) -> None:
        self._executor = executor
        self._context = executor._parts.context.current()

    def __enter__(self) -> None:
        lost = self._executor._lost
        if lost is not None:
            raise StickyCudaError(f"the GPU failed before and does nothing any more: {lost}")
        try:
            self._context.__enter__()
        except StickyCudaError as error:
            self._executor._lost = error
            raise

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._context.__exit__(kind, error, trace)
        if isinstance(error, StickyCudaError):
            self._executor._lost = error


def _num_rows(run: Run) -> int:
    """Return the rows of a run's logits that take part: none where it only has its one row that nobody wants."""
    return 0 if run.bucket is None and run.logits_idx[0] < 0 else run.logits_idx.size
