"""The TensorRT executor: steps of the core as runs of a plan, on one stream."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from ..batch import Batch, BlockCopy, Float32Array, Int32Array, ModelInfo, RecordArray, StepSampling
from ..errors import CudaError, Error, InternalError, OutOfMemoryError, ShutdownError
from ..manifest import Manifest
from . import memory, packed, rectangular, runs
from .buckets import Buckets
from .cuda import Context, PinnedMemory, StickyCudaError
from .device_sampler import DeviceSampler
from .graphs import DecodeGraphs
from .plan import Plan
from .pools import BlockShape, Pools
from .runs import Run, Step
from .staging import Staging, aligned
from .trt import TrtContext


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


@dataclasses.dataclass(frozen=True)
class Parts:
    """What opening.py made for an executor, which releases it.

    stack : closes all of it but the context, in order, with the context current
    contexts : one a profile
    logits : device memory of logits_capacity rows and one more, for what nobody wants
    buckets : None = decode runs keep their own shapes
    graphs : None = this executor captures nothing
    """

    context: Context
    stream: Any
    plan: Plan
    contexts: Sequence[TrtContext]
    logits: int
    logits_capacity: int
    buckets: Buckets | None
    graphs: DecodeGraphs | None
    sampler: DeviceSampler | None
    stack: contextlib.ExitStack


class TensorRtExecutor:
    """The core's executor over a plan (a LaunchingModel). One thread at a time; any may be it."""

    def __init__(self, manifest: Manifest, target: str, parts: Parts) -> None:
        self._parts = parts
        self._manifest = manifest
        self._shape: BlockShape = memory.block_shape(manifest, target)
        self._pools: Pools | None = None
        self._staging: Staging | None = None
        self._host_logits: PinnedMemory | None = None
        self._lost: Error | None = None  # the context is gone
        # Of the launched step: which of its rows each row of the logits buffer is.
        self._row_idx: Int32Array = np.empty(0, np.int32)
        self._num_rows = 0
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
            self._bind_pools(self._pools)

    def _bind_pools(self, pools: Pools) -> None:
        for context in self._parts.contexts:
            for one in self._parts.plan.pools:
                address = pools.address(one.layer, one.is_v)
                context.set_input(one.input, pools.tensor_shape, address)
                context.set_address(one.output, address)

    def open_host(self, num_blocks: int) -> None:
        """Allocate num_blocks host blocks, page-locked. Called once, after open."""
        with self._current():
            self._opened()[1].open_host(num_blocks)

    def launch(self, batch: Batch) -> None:
        """Hand a step to the device and return without waiting.

        raises ShapeError outside the plan's profiles, CudaError
        """
        with self._current():
            step_runs, capacity = self._runs(batch, self._parts.buckets), self._parts.logits_capacity
            if sum(_num_rows(run) for run in step_runs) > capacity:
                # Padded, more rows would be computed than there is room for: one-token chunks in a full batch.
                step_runs = self._runs(batch, None)
            row_idx, used = [np.empty(0, np.int32)], 0
            for run in step_runs:
                count = _num_rows(run)
                if used + count > capacity:
                    raise InternalError(f"a step has more than {capacity} rows of logits")
                self._launch(run, used if count else capacity)
                row_idx.append(run.logits_idx[:count])
                used += count
            self._row_idx, self._num_rows = np.concatenate(row_idx), batch.logits_rows.size

    def _runs(self, step: Step, buckets: Buckets | None) -> list[Run]:
        plan, pools = self._parts.plan, self._opened()[1]
        if plan.is_packed:
            return [packed.pack(step, self._shape.tokens_per_block, buckets)]
        return list(
            rectangular.split(
                step, pools.num_blocks, self._shape.tokens_per_block, buckets, self.num_reserve_blocks
            )
        )

    def _launch(self, run: Run, first_row: int) -> None:
        """Hand one run to the stream; its logits go to the buffer from first_row on."""
        parts, staging = self._parts, self._opened()[0]
        inputs = {name: run.inputs[name] for name in parts.plan.inputs}
        shapes = {name: array.shape for name, array in inputs.items()}
        addresses = staging.send(inputs, parts.stream)
        # A graph writes its logits where it was captured to: at the beginning, where decode runs always are.
        graphs = parts.graphs if run.bucket is not None and first_row == 0 else None
        if graphs is not None and run.bucket is not None and graphs.replay(run.bucket, parts.stream):
            return
        context = parts.contexts[parts.plan.profile_of(shapes)]
        for name, address in addresses.items():
            context.set_input(name, shapes[name], address)
        row_bytes = 4 * self._manifest.model.vocab_size
        context.set_address(runs.LOGITS, parts.logits + first_row * row_bytes)
        stream = int(parts.stream)
        context.run(stream)
        if graphs is not None and run.bucket is not None:
            can_capture = context.is_capturable(stream)
            graphs.after_run(run.bucket, lambda: context.run(stream), can_capture, parts.stream)

    def collect(self, sampling: StepSampling | None) -> Float32Array | RecordArray:
        """Wait for the step that was launched; return its logits, or with `sampling` what was drawn from them.

        returns : (R, V) float32, or (R,) ROW_SAMPLE; valid until the next launch
        raises CudaError for what went wrong in the step
        """
        parts, count = self._parts, self._row_idx.size
        with self._current():
            if sampling is None:
                logits: Float32Array = self._ordered(self._logits(count))
                return logits
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
        order = self._row_idx
        if order.size == self._num_rows and np.array_equal(order, np.arange(order.size)):
            return rows
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
        if self._is_closed:
            raise ShutdownError("the engine is closed, and with it what tells its device's memory")
        try:
            with context.current():
                free, total = context.memory()
        except CudaError as error:  # closed meanwhile, or lost
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

    @contextlib.contextmanager
    def _current(self) -> Any:
        """Make the CUDA context this thread's; once it is lost, fail with the error that lost it."""
        if self._lost is not None:
            raise StickyCudaError(f"the GPU failed before and does nothing any more: {self._lost}")
        try:
            with self._parts.context.current():
                yield
        except StickyCudaError as error:
            self._lost = error
            raise

    def _opened(self) -> tuple[Staging, Pools]:
        if self._staging is None or self._pools is None:
            raise InternalError("a step before open")
        return self._staging, self._pools


def _num_rows(run: Run) -> int:
    """Return the rows of a run's logits that take part: none where it only has its one row that nobody wants."""
    return 0 if run.bucket is None and run.logits_idx[0] < 0 else run.logits_idx.size
