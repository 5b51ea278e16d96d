"""Executors: what computes the logits of a step. The built-in CPU one, and any written in Python."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ._native import native
from .batch import (
    LOGIT_EDIT,
    ROW_SAMPLE,
    SAMPLING_ROW,
    AdapterModule,
    Batch,
    BlockCopy,
    Float32Array,
    Int32Array,
    ModelInfo,
    RecordArray,
    StepSampling,
)
from .errors import ExecutorError, InvalidArgumentError, ShapeError, ShutdownError, UnsupportedError
from .profile import OpProfile, read_profile

__all__ = [
    "LOGIT_EDIT",
    "ROW_SAMPLE",
    "SAMPLING_ROW",
    "AdapterModule",
    "Batch",
    "BlockCopy",
    "Executor",
    "ExecutorModel",
    "Float32Array",
    "Int32Array",
    "LaunchingModel",
    "ModelInfo",
    "PythonExecutor",
    "RecordArray",
    "StepSampling",
    "cpu_executor",
    "simulated_executor",
]

_OK, _ERROR_EXECUTOR = 0, 8
WEIGHTS = ("auto", "mapped", "huge_pages")  # PSM_WEIGHTS_...
_OPTIONAL = ("step", "launch", "collect", "copy_blocks", "open_host", "load_adapter", "unload_adapter")


class _Model(Protocol):
    """What every Python executor implements; called by one thread at a time: describe, open, steps, close.

    It may have more methods, which the engine uses where they are:

    copy_blocks(copies: list[BlockCopy]) : copy blocks in order; without it nothing is shared inside a block, and there
        are no beams
    open_host(num_blocks: int) : allocate host blocks, after open; for host_cache_bytes
    load_adapter(slot: int, modules: list[AdapterModule]), unload_adapter(slot: int) : for LoRA
    now_ns() -> int : its own clock, in nanoseconds, never going back; from any thread
    """

    def describe(self) -> ModelInfo:
        """Return the model's sizes and limits; may be called before open."""

    def open(self, num_blocks: int) -> None:
        """Allocate pools of num_blocks KV blocks. Called once."""

    def close(self) -> None:
        """Release everything."""


class ExecutorModel(_Model, Protocol):
    """A Python executor whose step is one call."""

    def step(self, batch: Batch) -> Float32Array:
        """Run one step and return its logits, (R, V) float32."""


class LaunchingModel(_Model, Protocol):
    """A Python executor whose device works by itself: while it does, the engine makes what the step needs next."""

    def launch(self, batch: Batch) -> None:
        """Hand one step to the device and return without waiting. The batch stays valid until collect has returned.

        Whatever it raises fails the step, which is not collected then: it leaves nothing that reads the batch.
        """

    def collect(self, sampling: StepSampling | None) -> Float32Array | RecordArray:
        """Wait for the step that was launched; return its logits, or with `sampling` what was drawn from them.

        Called once for each launch that has returned, also while the engine closes.

        sampling : given only where describe says samples_rows = 1, and only when every row can be drawn so
        returns : (R, V) float32; with `sampling` (R,) of type ROW_SAMPLE
        """


class Executor:
    """A psm_executor function table with all that must live as long as it does.

    Whoever holds it closes it once; an engine takes that over when it is created on it.
    """

    def __init__(self, struct: Any) -> None:
        self.struct = struct
        self.callback_thread: int | None = None  # the thread that is inside Python code called by the core
        self.is_engine_closing = False  # no step begins from then on
        self._vocab_size: int | None = None
        self._num_launched_rows = 0

    def describe(self) -> ModelInfo:
        """Return the executor's sizes and limits."""
        info = native().new("psm_model_info")
        self._check(self.struct.describe(self.struct.self, info))
        return ModelInfo.from_struct(info)

    def open(self, num_blocks: int) -> None:
        """Allocate the pools. Not after an engine has taken the executor over."""
        self._check(self.struct.open(self.struct.self, num_blocks))

    def step(self, batch: Batch) -> Float32Array:
        """Run one step, whether it is one call or two, and return a copy of its logits, (R, V) float32."""
        if self.can("launch"):
            self.launch(batch)
            logits: Float32Array = self.collect(None)
            return logits
        out = native().ffi.new("const float**")
        self._check(self.struct.step(self.struct.self, batch.native, out))
        return self._copy_logits(out, len(batch.logits_rows))

    def launch(self, batch: Batch) -> None:
        """Hand one step to the executor; `collect` waits for it. The batch must stay valid until then."""
        self._check(self.struct.launch(self.struct.self, batch.native))
        self._num_launched_rows = len(batch.logits_rows)

    def collect(self, sampling: StepSampling | None) -> Any:
        """Wait for the step that was launched; return a copy of its logits, (R, V) float32, or with `sampling` what was
        drawn, (R,) ROW_SAMPLE.
        """
        ffi = native().ffi
        rows, out = self._num_launched_rows, ffi.new("const float**")
        if sampling is None:
            self._check(self.struct.collect(self.struct.self, ffi.NULL, ffi.NULL, out))
            return self._copy_logits(out, rows)
        samples: RecordArray = np.zeros(rows, ROW_SAMPLE)
        pointer = ffi.cast("psm_row_sample*", ffi.from_buffer(samples.view(np.uint8)))
        self._check(self.struct.collect(self.struct.self, sampling.native, pointer, out))
        return samples

    def _copy_logits(self, out: Any, rows: int) -> Float32Array:
        if self._vocab_size is None:
            self._vocab_size = self.describe().vocab_size
        if rows == 0:
            return np.empty((0, self._vocab_size), np.float32)
        data = native().ffi.buffer(out[0], rows * self._vocab_size * 4)
        logits: Float32Array = np.frombuffer(data, np.float32).reshape(rows, self._vocab_size).copy()
        return logits

    def can(self, name: str) -> bool:
        """Return whether it has an optional function of psm_executor, such as "copy_blocks"."""
        return bool(getattr(self.struct, name))

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy blocks in order, each copy seeing what those before it wrote."""
        array = native().ffi.new("psm_block_copy[]", [copy.to_tuple() for copy in copies])
        self._check(self.struct.copy_blocks(self.struct.self, array, len(copies)))

    def open_host(self, num_blocks: int) -> None:
        """Allocate host blocks, after `open`."""
        self._check(self.struct.open_host(self.struct.self, num_blocks))

    def profile(self) -> list[OpProfile]:
        """Return what each op took so far, from any thread; raises UnsupportedError where no profile is kept."""
        if not self.can("profile"):
            raise UnsupportedError(
                "the executor keeps no profile; make it with cpu_executor(..., profile=True) (others have none)"
            )
        return read_profile(
            lambda ops, capacity, num: self.struct.profile(self.struct.self, ops, capacity, num)
        )

    def close(self) -> None:
        """Release the executor. Not after an engine has taken it over."""
        self.struct.close(self.struct.self)

    def _check(self, status: int) -> None:
        core = native()
        if status != _OK:
            has_text = self.struct.last_error != core.ffi.NULL
            text = core.text(self.struct.last_error(self.struct.self)) if has_text else ""
            raise ExecutorError(text or core.text(core.lib.psm_status_text(status)))


class PythonExecutor(Executor):
    """An executor over a Python object. An exception in it fails the step with PSM_ERROR_EXECUTOR and its text."""

    def __init__(self, model: ExecutorModel | LaunchingModel) -> None:
        core = native()
        self._model: Any = model  # with more methods than the protocol names
        self._logits: Float32Array | None = None  # keeps the last step's result alive for the core
        self._rows_in_flight = 0  # of the step that was launched
        self._error_text = core.ffi.NULL
        ffi = core.ffi
        types = {name: field.type for name, field in ffi.typeof("psm_executor").fields}
        self._callbacks = {
            "close": ffi.callback(types["close"], lambda _self: model.close()),
            "last_error": ffi.callback(types["last_error"], lambda _self: self._error_text),
        }
        if hasattr(model, "now_ns"):
            self._callbacks["now_ns"] = ffi.callback(types["now_ns"], lambda _self: model.now_ns())
        for name in ("describe", "open", *(name for name in _OPTIONAL if hasattr(model, name))):
            self._callbacks[name] = ffi.callback(types[name], self._guarded(name), error=_ERROR_EXECUTOR)
        struct = core.new("psm_executor")
        for name, callback in self._callbacks.items():
            setattr(struct, name, callback)
        super().__init__(struct)

    def _guarded(self, name: str) -> Callable[..., int]:
        """Return a method as the core calls it: it must get a status whatever happens, a KeyboardInterrupt included."""
        method = getattr(self, f"_{name}")

        def call(_self: Any, *arguments: Any) -> int:
            try:
                method(*arguments)
            except BaseException as error:
                text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
                self._error_text = native().ffi.new("char[]", text.encode(errors="replace"))
                return _ERROR_EXECUTOR
            return _OK

        return call

    def _describe(self, info: Any) -> None:
        described = self._model.describe()
        self._vocab_size = described.vocab_size
        for name, value in dataclasses.asdict(described).items():
            setattr(info, name, value)

    def _open(self, num_blocks: int) -> None:
        self._model.open(num_blocks)

    def _step(self, batch_pointer: Any, out: Any) -> None:
        with self._called():
            batch = Batch.from_pointer(batch_pointer)
            self._give_logits(self._model.step(batch), len(batch.logits_rows), out)

    def _launch(self, batch_pointer: Any) -> None:
        with self._called():
            batch = Batch.from_pointer(batch_pointer)
            self._rows_in_flight = len(batch.logits_rows)
            self._model.launch(batch)

    def _collect(self, sampling_pointer: Any, samples: Any, out: Any) -> None:
        with self._called(begins=False):
            ffi = native().ffi
            rows = self._rows_in_flight
            if sampling_pointer == ffi.NULL:
                return self._give_logits(self._model.collect(None), rows, out)
            drawn = self._model.collect(StepSampling.from_pointer(sampling_pointer))
            wanted = (rows,)
            if getattr(drawn, "dtype", None) != ROW_SAMPLE or drawn.shape != wanted:
                shape = getattr(drawn, "shape", None)
                raise ShapeError(
                    f"collect was given sampling, so ROW_SAMPLE of shape {wanted} is wanted, it returned "
                    f"{type(drawn).__name__} of type {getattr(drawn, 'dtype', None)!s:.40} and shape {shape}"
                )
            ffi.memmove(samples, np.ascontiguousarray(drawn).view(np.uint8), rows * ROW_SAMPLE.itemsize)

    def _give_logits(self, logits: Any, rows: int, out: Any) -> None:
        logits = np.ascontiguousarray(logits, dtype=np.float32)
        wanted = (rows, self._vocab_size)
        if logits.shape != wanted:
            raise ShapeError(f"the executor returned logits of shape {logits.shape}, the step wants {wanted}")
        self._logits = logits
        out[0] = native().ffi.from_buffer("float[]", logits)

    def _copy_blocks(self, copies: Any, count: int) -> None:
        with self._called():
            self._model.copy_blocks([BlockCopy.from_struct(copies[i]) for i in range(count)])

    def _open_host(self, num_blocks: int) -> None:
        self._model.open_host(num_blocks)

    def _load_adapter(self, slot: int, modules: Any, count: int) -> None:
        with self._called():
            self._model.load_adapter(slot, [AdapterModule.from_struct(modules[i]) for i in range(count)])

    def _unload_adapter(self, slot: int) -> None:
        with self._called():
            self._model.unload_adapter(slot)

    @contextlib.contextmanager
    def _called(self, begins: bool = True) -> Iterator[None]:
        """Note the thread that the core waits for; refuse to begin while the engine closes."""
        self.callback_thread = threading.get_ident()
        try:
            if self.is_engine_closing and begins:
                raise ShutdownError("the engine was closed before the step")
            yield
        finally:
            self.callback_thread = None


def check_weights(weights: str) -> None:
    """Raise InvalidArgumentError for what cpu_executor does not take as `weights`."""
    if weights not in WEIGHTS:
        raise InvalidArgumentError(f"weights is {weights!r}, it must be one of {', '.join(WEIGHTS)}")


def cpu_executor(
    plan_path: Path | str,
    *,
    num_threads: int = 0,
    pin_threads: bool = False,
    isa: str | None = None,
    max_adapters: int | None = None,
    max_adapter_rank: int | None = None,
    weights: str = "auto",
    profile: bool = False,
    max_num_tokens: int = 0,
) -> Executor:
    """Map a cpu plan file and return the built-in executor over it.

    num_threads : 0 = one a core, the calling thread included
    isa : None = the best this machine has; else "portable", "avx2", "avx512vnni", "avx512bf16", "amx" or "neon"
    max_adapters, max_adapter_rank : LoRA adapters it can hold at a time, and their largest rank; None = 8 and 64
    weights : where they lie: "mapped" (shared between processes; a plan that another program cuts short meanwhile ends
        this one with a bus error), "huge_pages" (this process's own, read before this returns) or "auto" (mapped at
        once; a thread then moves what is in small pages into huge ones, while steps run)
    profile : note the time of each op, for Executor.profile and Engine.profile; costs less than 1 % of a step
    max_num_tokens : most tokens of a step, logits rows among them, for which it takes memory; 0 = the plan's
    raises EngineFileError for a damaged plan, UnsupportedError for an isa or huge pages that the machine lacks,
        InvalidArgumentError for an isa that this build does not know, and for other options out of range
    """
    check_weights(weights)
    if profile not in (False, True):
        raise InvalidArgumentError(f"profile is {profile!r}, it must be True or False")
    core = native()
    options = core.ffi.new("psm_cpu_options*")
    core.lib.psm_cpu_options_init(options)
    options.struct_size = core.struct_size("psm_cpu_options")
    options.weights = WEIGHTS.index(weights)
    options.profile = int(profile)
    options.num_threads = num_threads
    options.pin_threads = int(pin_threads)
    if max_adapters is not None:
        options.max_adapters = max_adapters
    if max_adapter_rank is not None:
        options.max_adapter_rank = max_adapter_rank
    options.max_num_tokens = max_num_tokens
    isa_text = core.ffi.NULL if isa is None else core.ffi.new("char[]", isa.encode())
    options.isa = isa_text
    struct = core.new("psm_executor")
    core.check(core.lib.psm_cpu_executor_create(str(plan_path).encode(), options, struct))
    return Executor(struct)


def simulated_executor(info: ModelInfo, **options: float) -> Executor:
    """Return the simulated executor: hashes as tokens, and a clock that advances by a GPU's cost model.

    options : the further fields of psm_simulated_options, e.g. weight_bytes, memory_bytes_per_s
    raises InvalidArgumentError for numbers it cannot take
    """
    core = native()
    struct = core.ffi.new("psm_simulated_options*")
    core.lib.psm_simulated_options_init(struct)
    struct.info.struct_size = core.struct_size("psm_model_info")
    for name, value in dataclasses.asdict(info).items():
        setattr(struct.info, name, value)
    for name, value in options.items():
        setattr(struct, name, value)
    executor = core.new("psm_executor")
    core.check(core.lib.psm_simulated_executor_create(struct, executor))
    return Executor(executor)
