"""The engine for programs with threads: submit, stream, generate."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, cast

import numpy as np

from .engine_base import EngineBase, check_streaming, per_prompt
from .errors import Error, InternalError, InvalidArgumentError, QueueFullError, ShutdownError
from .events import Event
from .handle import Mailbox, RequestHandle, TextStream
from .native_engine import NativeEngine
from .prompts import Prompt
from .request import Completion, Delta, SequenceOutput
from .sampling import RetentionRange, SamplingParams

__all__ = [
    "Completion",
    "Delta",
    "Engine",
    "RequestHandle",
    "RetentionRange",
    "SamplingParams",
    "SequenceOutput",
]


class Engine(EngineBase):
    """An engine whose events one thread of its own distributes; every method may be called from any thread."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """See EngineBase; use Engine.open or Engine.from_executor."""
        super().__init__(*args, **kwargs)
        self._progress = threading.Condition()
        self._num_deliveries = 0  # under _progress
        self._step_lock = threading.RLock()  # of manual_step: one thread steps and polls
        self._dispatcher: threading.Thread | None = None
        if not self._options.manual_step:
            # The thread must not keep alive an engine that nobody uses or closed.
            arguments = (self._core, weakref.ref(self))
            self._dispatcher = threading.Thread(
                target=_dispatch, args=arguments, name="plansmith-events", daemon=True
            )
            self._dispatcher.start()

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        new_text: bool = False,
        on_delta: Callable[[Delta | Error], None] | None = None,
    ) -> RequestHandle:
        """Queue a request and return its handle.

        prompt : text, or token ids, which go in as they are
        new_text : the output is a text of its own (an answer), not the prompt's continuation; matters for tokenizers
            that mark spaces before words
        on_delta : gets each delta, or the error at the end, instead of the handle's reader; called on the engine's
            event thread, which it must not keep waiting, and maybe before this call returns. The final delta has the
            completion
        raises InvalidArgumentError, ShapeError for a length over the limits, QueueFullError, OutOfMemoryError when
            the KV cache is too small for it, ShutdownError on a closed engine
        """
        mailbox = Mailbox(on_delta)
        guide = self._guide(params)
        try:
            state = self._start(prompt, params, mailbox.put, new_text=new_text, guide=guide)
        except BaseException:
            if guide is not None:
                guide.close()
            raise
        return RequestHandle(self, mailbox, state)

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, new_text: bool = False
    ) -> TextStream:
        """Queue a request and return its deltas as they come. Closing or dropping the stream cancels the request.

        raises InvalidArgumentError for best_of above n: which outputs are the best is known only at the end
        """
        check_streaming(params)
        return TextStream(self.submit(prompt, params, new_text=new_text))

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        new_text: bool = False,
    ) -> list[Completion]:
        """Run all prompts together and return their completions in order. The first error cancels the others."""
        batch = _as_batch(prompts)
        handles: list[RequestHandle] = []
        try:
            for prompt, own in zip(batch, per_prompt(batch, params), strict=True):
                handles.append(self.submit_when_room(prompt, own, new_text=new_text))
            return [handle.result() for handle in handles]
        except BaseException:
            for handle in handles:
                handle.cancel()
            raise

    def submit_when_room(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        new_text: bool = False,
        on_delta: Callable[[Delta | Error], None] | None = None,
    ) -> RequestHandle:
        """Submit, waiting while the request queue is full."""
        while True:
            seen = self._num_deliveries
            try:
                return self.submit(prompt, params, new_text=new_text, on_delta=on_delta)
            except QueueFullError:
                pass
            if self._dispatcher is None:
                self.step()
                continue
            with self._progress:
                if self._num_deliveries == seen:
                    self._progress.wait(timeout=1.0)

    def step(self) -> bool:
        """Run one scheduler iteration of a manual_step engine and deliver its events; False when nothing could run."""
        if self._dispatcher is not None:
            raise InvalidArgumentError(
                "step() is for engines opened with manual_step=True; this one runs by itself"
            )
        with self._step_lock:
            did_work = self._core.step()
            while self._pump(0):
                pass
        return did_work

    def close(self) -> None:
        """Stop after the step in progress; requests still running fail with ShutdownError. Twice is fine.

        From inside a step of the engine's own Python executor it returns at once, and the engine stops after that step.
        """
        if not self._core.is_of_this_process:
            return
        if not self._core.is_called_here:
            # What the last step gave is delivered, here or by the event thread.
            with self._step_lock, contextlib.suppress(ShutdownError):
                self._core.shutdown()
                while self._dispatcher is None:
                    self._pump(0)
            if self._dispatcher is not None and self._dispatcher is not threading.current_thread():
                self._dispatcher.join()
        self._core.close()
        self._fail_all(ShutdownError("the engine was closed while the request was running"))
        self._note_delivery()

    def __enter__(self) -> Engine:
        """Close the engine at the end of the block."""
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        """Close the engine."""
        self.close()

    def _deliver(self, events: Sequence[Event]) -> None:
        """Route events, on the event thread."""
        try:
            self._route(events)
        except BaseException as error:
            self._core.close()  # or later requests would wait for events that nobody takes
            self._fail_all(InternalError(f"the event thread failed: {type(error).__name__}: {error}"))
            raise
        finally:
            self._note_delivery()

    def _note_delivery(self) -> None:
        with self._progress:
            self._num_deliveries += 1
            self._progress.notify_all()

    def _drive(self, done: Callable[[], bool]) -> None:
        """Of a manual_step engine, run steps until `done()`; others run by themselves."""
        while self._dispatcher is None and not done():
            if not self.step() and not done():
                raise InternalError("the request can not go on: no step could run")


def _dispatch(core: NativeEngine, engine_of: weakref.ref[Engine]) -> None:
    """Deliver events until the engine is closed or gone."""
    with contextlib.suppress(ShutdownError):
        while True:
            events = core.poll(-1)
            engine = engine_of()
            if engine is None:
                return
            engine._deliver(events)
            del engine


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return a list of prompts; one text or one list of ids is a batch of one."""
    if isinstance(prompts, str):
        return [prompts]
    if len(prompts) and isinstance(prompts[0], (int, np.integer)):
        return [cast("Sequence[int]", prompts)]
    return list(cast("Sequence[Prompt]", prompts))
