"""One psm_engine: the C API as methods, safe to close while other threads are in it."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

from ._native import native
from .engine_options import EngineOptions
from .errors import Error, InvalidArgumentError, ShutdownError, UnsupportedError
from .events import EndEvent, Event, event_of
from .executor import Executor, ModelInfo
from .kv_events import KvEvent, KvEventReader
from .native_request import ProcessorCall, Submission, request_struct
from .profile import OpProfile, read_profile
from .stats import EngineStats, IterationStats, from_struct

__all__ = ["EngineOptions", "NativeEngine", "Submission"]


_EVENTS_A_POLL = 256


class NativeEngine:
    """A psm_engine. Any thread may call any method; only one thread polls at a time."""

    def __init__(self, executor: Executor, options: EngineOptions | None = None) -> None:
        """Start an engine on `executor`, which it owns from here on with the options' draft, also when this fails."""
        core = native()
        options = options or EngineOptions()
        self._process = os.getpid()
        self._callers: list[int] = []  # the threads that are inside a call
        self._closing = False
        self._close_once = threading.Lock()
        # Their callbacks and buffers must live as long as the engine.
        both = (executor, options.draft_executor)
        self._executors = [one for one in dict.fromkeys(both) if one is not None]
        self._processors: dict[int, ProcessorCall] = {}  # by client id, until the last event
        self._events = core.ffi.new("psm_event[]", _EVENTS_A_POLL)
        out = core.ffi.new("psm_engine**")
        try:
            core.check(core.lib.psm_engine_create(executor.struct, options.to_struct(), out))
        except BaseException:
            for one in self._executors:
                one.close()
            raise
        self._engine: Any = out[0]
        info = self.model_info()
        self._vocab_size = info.vocab_size
        self._kv_events = KvEventReader(info.tokens_per_block)
        self._kv_events_lock = threading.Lock()

    @contextlib.contextmanager
    def _call(self) -> Iterator[Any]:
        # psm_engine_destroy must not run beside any other call. A call is noted before it looks at _closing, and
        # close() sets that before it looks at the notes, so one sees the other. There is no lock to hold: the garbage
        # collector can close an engine anywhere, also on a thread that is in here.
        thread = threading.get_ident()
        try:
            self._callers.append(thread)
            if self._closing:
                raise ShutdownError("the engine is closed; open it again to submit requests")
            if os.getpid() != self._process:
                raise UnsupportedError(
                    "the engine was opened by another process and does not live on after a fork; open one here"
                )
            yield self._engine
        finally:
            with contextlib.suppress(ValueError):  # interrupted before it was noted
                self._callers.remove(thread)

    def model_info(self) -> ModelInfo:
        """Return the executor's description with the engine's narrowed limits."""
        core = native()
        info = core.new("psm_model_info")
        with self._call() as engine:
            core.check(core.lib.psm_engine_model_info(engine, info))
        return ModelInfo.from_struct(info)

    def submit(self, submission: Submission) -> int:
        """Queue a request and return its id; its client_id, which no other running one has, is in each of its events.

        raises what psm_engine_submit fails with: InvalidArgumentError, ShapeError, QueueFullError, OutOfMemoryError
        """
        core = native()
        user = submission.params.logits_processor
        processor = None if user is None else ProcessorCall(user)
        request, _keep_alive = request_struct(submission, processor)
        out = core.ffi.new("uint64_t*")
        if processor is not None:
            self._processors[submission.client_id] = (
                processor  # before: its last event may come before the id
            )
        try:
            with self._call() as engine:
                core.check(core.lib.psm_engine_submit(engine, request, out))
        except Error:  # not an interrupt: the core may have the request by then, and call the processor
            self._processors.pop(submission.client_id, None)
            raise
        return int(out[0])

    def cancel(self, request_id: int) -> None:
        """Ask for a request's end; its EndEvent follows. Raises NotFoundError when it has already ended."""
        core = native()
        with self._call() as engine:
            core.check(core.lib.psm_engine_cancel(engine, request_id))

    def step(self) -> bool:
        """Run one scheduler iteration of a manual_step engine; False when nothing could run."""
        core = native()
        out = core.ffi.new("int32_t*")
        with self._call() as engine:
            core.check(core.lib.psm_engine_step(engine, out))
        return bool(out[0])

    def poll(self, timeout_ms: int) -> list[Event]:
        """Return events, in order for each request; [] on time-out.

        timeout_ms : how long to wait for the first; 0 = not at all, -1 = until there is one
        raises ShutdownError once the engine is shut down and has no events left, or is closed
        """
        core = native()
        out = core.ffi.new("size_t*")
        with self._call() as engine:
            core.check(core.lib.psm_engine_poll(engine, self._events, _EVENTS_A_POLL, timeout_ms, out))
            events = [event_of(self._events[i], self._vocab_size) for i in range(out[0])]
            if self._closing:  # while it waited: the steps from then on failed for that alone
                raise ShutdownError("the engine was closed during the poll")
        return [self._finished(event) if isinstance(event, EndEvent) else event for event in events]

    def _finished(self, event: EndEvent) -> EndEvent:
        """Return an end with the words of the logits processor that failed, if that is why."""
        processor = self._processors.get(event.client_id)
        if processor is None:
            return event
        if event.is_final:
            del self._processors[event.client_id]
        text = processor.error_texts.get(event.sequence_idx)
        if event.error is None or text is None:
            return event
        return event._replace(error=InvalidArgumentError(text))

    def load_adapter(self, adapter_id: int, modules: Any, num_modules: int) -> None:
        """Make a LoRA adapter known under an id, which is not 0; waits for the step in progress.

        modules : a psm_lora_module[], copied
        raises InvalidArgumentError, ShapeError, OutOfMemoryError when no more fit, UnsupportedError
        """
        core = native()
        with self._call() as engine:
            core.check(core.lib.psm_engine_load_adapter(engine, adapter_id, modules, num_modules))

    def unload_adapter(self, adapter_id: int) -> None:
        """Forget an adapter and what was cached with it. Raises InvalidArgumentError while requests use it."""
        core = native()
        with self._call() as engine:
            core.check(core.lib.psm_engine_unload_adapter(engine, adapter_id))

    def kv_events(self) -> list[KvEvent]:
        """Take the changes of the prefix cache since the last call, oldest first; needs max_kv_events."""
        taken: list[KvEvent] = []
        with self._call() as engine, self._kv_events_lock:
            while events := self._kv_events.take(engine):
                taken += events
        return taken

    def event_fd(self) -> int:
        """Return a descriptor that is readable while events wait, or -1; never read or close it."""
        with self._call() as engine:
            return int(native().lib.psm_engine_event_fd(engine))

    def stats(self) -> EngineStats:
        """Return totals since the start and the state now."""
        core = native()
        stats = core.new("psm_engine_stats")
        with self._call() as engine:
            core.check(core.lib.psm_engine_get_stats(engine, stats))
        return from_struct(EngineStats, stats)

    def iteration_stats(self, max_records: int = 1000) -> list[IterationStats]:
        """Take the records of past steps, oldest first; each is given once."""
        core = native()
        records = core.ffi.new("psm_iteration_stats[]", max_records)
        out = core.ffi.new("size_t*")
        with self._call() as engine:
            core.check(core.lib.psm_engine_iteration_stats(engine, records, max_records, out))
        return [from_struct(IterationStats, records[i]) for i in range(out[0])]

    def profile(self) -> list[OpProfile]:
        """Return what each op of the executor took so far; raises UnsupportedError when it keeps no profile."""
        core = native()
        with self._call() as engine:
            if not self._executors[0].can("profile"):
                raise UnsupportedError(
                    "the engine keeps no profile; open its cpu target with Engine.open(..., profile=True), or give it "
                    "cpu_executor(..., profile=True) (executors written in Python have none)"
                )
            return read_profile(
                lambda ops, capacity, num: int(core.lib.psm_engine_profile(engine, ops, capacity, num))
            )

    def shutdown(self) -> None:
        """Refuse new requests and fail what is left, after the step in progress. The events can still be polled.

        raises InvalidArgumentError from inside a step, which it would wait for
        """
        core = native()
        with self._call() as engine:
            core.check(core.lib.psm_engine_shutdown(engine))

    @property
    def is_called_here(self) -> bool:
        """Whether this thread is inside a call of the engine or a Python function that the core waits for."""
        thread = threading.get_ident()
        executors = (one.callback_thread for one in self._executors)
        processors = (one.callback_thread for one in self._processors.copy().values())
        return thread in self._callers or thread in executors or thread in processors

    @property
    def is_of_this_process(self) -> bool:
        """False in the child of a fork, where the engine's threads are not."""
        return os.getpid() == self._process

    def close(self) -> None:
        """Stop the engine and release it with its executor; waits for the step in progress. Twice is fine.

        Called from inside a step of its own executor, it returns at once and the engine stops after that step. Nothing
        happens in the child of a fork.
        """
        if not self._close_once.acquire(blocking=False):
            return
        self._closing = True
        for executor in self._executors:
            executor.is_engine_closing = True
        if not self.is_of_this_process:
            return
        if self.is_called_here or isinstance(threading.current_thread(), threading._DummyThread):
            # A Python executor's step closes its own engine, or the garbage collector does in the middle of a call, or
            # on a thread of a core (they are not Python's own), which may be this one's: in a guide, for example. That
            # thread must return before the engine can stop.
            threading.Thread(target=self._destroy, name="plansmith-close").start()
        else:
            self._destroy()

    def _destroy(self) -> None:
        core = native()
        core.lib.psm_engine_shutdown(self._engine)  # sends the pollers home
        while self._callers:
            time.sleep(0.001)
        core.lib.psm_engine_destroy(self._engine)
        self._engine = None

    def __del__(self) -> None:
        """Release an engine that nobody closed."""
        if getattr(self, "_engine", None) is not None:
            self.close()
