"""Executors: what computes the logits of a step. The built-in CPU one, and any written in Python."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ._native import native
from .errors import ExecutorError, ShapeError, ShutdownError

Int32Array = NDArray[np.int32]
Float32Array = NDArray[np.float32]
_OK, _ERROR_EXECUTOR = 0, 8


@dataclasses.dataclass(frozen=True)
class ModelInfo:
    """What an executor is and can take; all limits inclusive."""

    vocab_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_batch_size: int
    max_num_tokens: int
    max_input_len: int
    max_seq_len: int
    tokens_per_block: int
    kv_bytes_per_block: int

    @classmethod
    def from_struct(cls, struct: Any) -> ModelInfo:
        """Return the fields of a psm_model_info."""
        return cls(**{field.name: int(getattr(struct, field.name)) for field in dataclasses.fields(cls)})


@dataclasses.dataclass(frozen=True)
class Batch:
    """One mixed step as views of the core's arrays, valid during the call only; copy what you keep.

    input_ids, position_ids : (T,) int32
    query_lens, kv_lens : (B,) int32; cu_query_lens : (B + 1,)
    block_table : (B, stride) int32, -1 where unused
    logits_rows : (R,) int32, ascending
    native : the psm_batch pointer itself, for executors that pass it on
    """

    input_ids: Int32Array
    position_ids: Int32Array
    query_lens: Int32Array
    kv_lens: Int32Array
    cu_query_lens: Int32Array
    block_table: Int32Array
    logits_rows: Int32Array
    native: Any = dataclasses.field(repr=False)

    @classmethod
    def from_pointer(cls, batch: Any) -> Batch:
        """Return views over a psm_batch."""
        num_tokens, num_seqs = batch.num_tokens, batch.num_seqs
        table = _int32_view(batch.block_table, num_seqs * batch.block_table_stride)
        return cls(
            input_ids=_int32_view(batch.input_ids, num_tokens),
            position_ids=_int32_view(batch.position_ids, num_tokens),
            query_lens=_int32_view(batch.query_lens, num_seqs),
            kv_lens=_int32_view(batch.kv_lens, num_seqs),
            cu_query_lens=_int32_view(batch.cu_query_lens, num_seqs + 1),
            block_table=table.reshape(num_seqs, batch.block_table_stride),
            logits_rows=_int32_view(batch.logits_rows, batch.num_logits_rows),
            native=batch,
        )


class ExecutorModel(Protocol):
    """What a Python executor implements; called by one thread at a time: describe, open, step..., close."""

    def describe(self) -> ModelInfo:
        """Return the model's sizes and limits; may be called before open."""

    def open(self, num_blocks: int) -> None:
        """Allocate pools of num_blocks KV blocks. Called once."""

    def step(self, batch: Batch) -> Float32Array:
        """Run one step and return its logits, (R, V) float32."""

    def close(self) -> None:
        """Release everything."""


class Executor:
    """A psm_executor function table with all that must live as long as it does.

    Whoever holds it closes it once; an engine takes that over when it is created on it.
    """

    def __init__(self, struct: Any) -> None:
        self.struct = struct
        self.callback_thread: int | None = None  # the thread that is inside Python code called by the core
        self.is_engine_closing = False  # no step begins from then on
        self._vocab_size: int | None = None

    def describe(self) -> ModelInfo:
        """Return the executor's sizes and limits."""
        info = native().new("psm_model_info")
        self._check(self.struct.describe(self.struct.self, info))
        return ModelInfo.from_struct(info)

    def open(self, num_blocks: int) -> None:
        """Allocate the pools. Not after an engine has taken the executor over."""
        self._check(self.struct.open(self.struct.self, num_blocks))

    def step(self, batch: Batch) -> Float32Array:
        """Run one step and return a copy of its logits, (R, V) float32."""
        core = native()
        if self._vocab_size is None:
            self._vocab_size = self.describe().vocab_size
        out = core.ffi.new("const float**")
        self._check(self.struct.step(self.struct.self, batch.native, out))
        rows = len(batch.logits_rows)
        if rows == 0:
            return np.empty((0, self._vocab_size), np.float32)
        data = core.ffi.buffer(out[0], rows * self._vocab_size * 4)
        logits: Float32Array = np.frombuffer(data, np.float32).reshape(rows, self._vocab_size).copy()
        return logits

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

    def __init__(self, model: ExecutorModel) -> None:
        core = native()
        self._model = model
        self._logits: Float32Array | None = None  # keeps the last step's result alive for the core
        self._error_text = core.ffi.NULL
        ffi = core.ffi
        types = {name: field.type for name, field in ffi.typeof("psm_executor").fields}
        self._callbacks = {
            "describe": ffi.callback(types["describe"], self._describe, error=_ERROR_EXECUTOR),
            "open": ffi.callback(types["open"], self._open, error=_ERROR_EXECUTOR),
            "step": ffi.callback(types["step"], self._step, error=_ERROR_EXECUTOR),
            "close": ffi.callback(types["close"], self._close),
            "last_error": ffi.callback(types["last_error"], lambda _self: self._error_text),
        }
        struct = core.new("psm_executor")
        for name, callback in self._callbacks.items():
            setattr(struct, name, callback)
        super().__init__(struct)

    def _failed(self, error: BaseException) -> int:
        text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        self._error_text = native().ffi.new("char[]", text.encode())
        return _ERROR_EXECUTOR

    # The core must get a status whatever happens in the callbacks, a KeyboardInterrupt included.
    def _describe(self, _self: Any, info: Any) -> int:
        try:
            described = self._model.describe()
            self._vocab_size = described.vocab_size
            for name, value in dataclasses.asdict(described).items():
                setattr(info, name, value)
        except BaseException as error:
            return self._failed(error)
        return _OK

    def _open(self, _self: Any, num_blocks: int) -> int:
        try:
            self._model.open(num_blocks)
        except BaseException as error:
            return self._failed(error)
        return _OK

    def _step(self, _self: Any, batch_pointer: Any, out: Any) -> int:
        self.callback_thread = threading.get_ident()
        try:
            if self.is_engine_closing:
                raise ShutdownError("the engine was closed before the step")
            batch = Batch.from_pointer(batch_pointer)
            logits = np.ascontiguousarray(self._model.step(batch), dtype=np.float32)
            wanted = (len(batch.logits_rows), self._vocab_size)
            if logits.shape != wanted:
                raise ShapeError(
                    f"the executor returned logits of shape {logits.shape}, the step wants {wanted}"
                )
            self._logits = logits
            out[0] = native().ffi.from_buffer("float[]", logits)
        except BaseException as error:
            return self._failed(error)
        finally:
            self.callback_thread = None
        return _OK

    def _close(self, _self: Any) -> None:
        self._model.close()


def cpu_executor(
    plan_path: Path | str, *, num_threads: int = 0, pin_threads: bool = False, isa: str | None = None
) -> Executor:
    """Map a cpu plan file and return the built-in executor over it.

    num_threads : 0 = one a core, the calling thread included
    isa : None = the best this machine has; else "portable", "avx2" or "avx512vnni"
    raises EngineFileError for a damaged plan, UnsupportedError for an isa the machine lacks
    """
    core = native()
    options = core.ffi.new("psm_cpu_options*")
    core.lib.psm_cpu_options_init(options)
    options.num_threads = num_threads
    options.pin_threads = int(pin_threads)
    isa_text = core.ffi.NULL if isa is None else core.ffi.new("char[]", isa.encode())
    options.isa = isa_text
    struct = core.new("psm_executor")
    core.check(core.lib.psm_cpu_executor_create(str(plan_path).encode(), options, struct))
    return Executor(struct)


def _int32_view(pointer: Any, count: int) -> Int32Array:
    if count == 0:
        return np.empty(0, np.int32)
    return np.frombuffer(native().ffi.buffer(pointer, count * 4), np.int32)
