"""One psm_engine: the C API as methods, safe to close while other threads are in it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ._native import native
from .errors import InvalidArgumentError, ShutdownError, UnsupportedError
from .events import Event, event_of
from .executor import Executor, Int32Array, ModelInfo
from .sampling import SamplingParams
from .stats import EngineStats, IterationStats, from_struct

_POLICIES = {"guaranteed_no_evict": 0, "max_utilization": 1}
_EVENTS_A_POLL = 256


@dataclasses.dataclass(frozen=True)
class EngineOptions:
    """Options of an engine; 0 stands for the default in each.

    max_batch_size, max_num_tokens : 0 = the executor's; they only narrow
    scheduler_policy : "guaranteed_no_evict" or "max_utilization"
    enable_chunked_context : cut prompts to fit the token budget of a step
    max_queue_size : requests waiting; 0 = 1024
    kv_cache_bytes : hard cap of the KV pools; 0 = max_batch_size x max_seq_len, at most 1 GiB
    iter_stats_max_iterations : step records kept
    manual_step : no thread; the caller runs every step
    """

    max_batch_size: int = 0
    max_num_tokens: int = 0
    scheduler_policy: str = "guaranteed_no_evict"
    enable_chunked_context: bool = True
    max_queue_size: int = 0
    kv_cache_bytes: int = 0
    iter_stats_max_iterations: int = 1000
    manual_step: bool = False

    def to_struct(self) -> Any:
        """Return a psm_engine_options.

        raises InvalidArgumentError for an unknown policy or a negative size
        """
        if self.scheduler_policy not in _POLICIES:
            raise InvalidArgumentError(
                f"scheduler_policy is {self.scheduler_policy!r}, it must be one of {', '.join(_POLICIES)}"
            )
        core = native()
        options = core.ffi.new("psm_engine_options*")
        core.lib.psm_engine_options_init(options)
        for name, most in (
            ("max_batch_size", 2**31),
            ("max_num_tokens", 2**31),
            ("max_queue_size", 2**31),
            ("kv_cache_bytes", 2**63),
            ("iter_stats_max_iterations", 2**31),
        ):
            value = getattr(self, name)
            if not 0 <= value < most:
                raise InvalidArgumentError(f"{name} is {value}, it must be between 0 and {most - 1}")
            setattr(options, name, value)
        options.scheduler_policy = _POLICIES[self.scheduler_policy]
        options.enable_chunked_context = int(self.enable_chunked_context)
        options.manual_step = int(self.manual_step)
        return options


class NativeEngine:
    """A psm_engine. Any thread may call any method; only one thread polls at a time."""

    def __init__(self, executor: Executor, options: EngineOptions | None = None) -> None:
        """Start an engine on `executor`, which it owns from here on, also when this fails."""
        core = native()
        self._process = os.getpid()
        self._callers: list[int] = []  # the threads that are inside a call
        self._closing = False
        self._close_once = threading.Lock()
        self._executor = executor  # its callbacks and buffers must live as long as the engine
        self._events = core.ffi.new("psm_event[]", _EVENTS_A_POLL)
        out = core.ffi.new("psm_engine**")
        try:
            core.check(
                core.lib.psm_engine_create(executor.struct, (options or EngineOptions()).to_struct(), out)
            )
        except BaseException:
            executor.close()
            raise
        self._engine: Any = out[0]

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

    def submit(
        self,
        prompt_ids: Int32Array,
        params: SamplingParams,
        *,
        max_tokens: int,
        end_ids: Sequence[int] = (),
        bad_words: Sequence[Sequence[int]] = (),
        client_id: int = 0,
    ) -> int:
        """Queue a request and return its id; `client_id` comes back in each of its events.

        raises what psm_engine_submit fails with: InvalidArgumentError, ShapeError, QueueFullError, OutOfMemoryError
        """
        core = native()
        request, _keep_alive = _request_struct(prompt_ids, params, max_tokens, end_ids, bad_words)
        request.client_id = client_id
        out = core.ffi.new("uint64_t*")
        with self._call() as engine:
            core.check(core.lib.psm_engine_submit(engine, request, out))
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
            if self._closing:  # while it waited: the steps from then on failed for that alone
                raise ShutdownError("the engine was closed during the poll")
            return [event_of(self._events[i]) for i in range(out[0])]

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

    def shutdown(self) -> None:
        """Refuse new requests and fail what is left, after the step in progress. The events can still be polled.

        raises InvalidArgumentError from inside a step, which it would wait for
        """
        core = native()
        with self._call() as engine:
            core.check(core.lib.psm_engine_shutdown(engine))

    @property
    def is_called_here(self) -> bool:
        """Whether this thread is inside a call of the engine or a step of its Python executor."""
        thread = threading.get_ident()
        return thread in self._callers or self._executor.callback_thread == thread

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
        self._executor.is_engine_closing = True
        if not self.is_of_this_process:
            return
        if self.is_called_here:
            # A Python executor's step closes its own engine, or the garbage collector does in the middle of a call:
            # this thread must return before the engine can stop.
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


def _request_struct(
    prompt_ids: Int32Array,
    params: SamplingParams,
    max_tokens: int,
    end_ids: Sequence[int],
    bad_words: Sequence[Sequence[int]],
) -> tuple[Any, list[Any]]:
    """Return a psm_request and the arrays it points to, which the caller keeps until it is submitted."""
    core = native()
    request = core.ffi.new("psm_request*")
    core.lib.psm_request_init(request)
    keep_alive: list[Any] = []

    def array(kind: str, values: Any) -> Any:
        data = core.ffi.new(f"{kind}[]", list(values))
        keep_alive.append(data)
        return data

    keep_alive.append(prompt_ids)
    request.prompt_ids = core.ffi.from_buffer("int32_t[]", prompt_ids)
    request.num_prompt_ids = len(prompt_ids)
    request.max_tokens = max_tokens
    for name in (
        "min_tokens",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "priority",
    ):
        setattr(request, name, getattr(params, name))
    request.seed = params.seed_or_random()
    # The core gives the chosen token's log-probability from one candidate on.
    request.num_logprobs = 0 if params.logprobs is None else max(1, params.logprobs)
    request.allotted_time_ms = params.timeout_ms or 0
    request.end_ids, request.num_end_ids = array("int32_t", end_ids), len(end_ids)
    request.num_logit_bias = len(params.logit_bias)
    request.logit_bias_ids = array("int32_t", params.logit_bias.keys())
    request.logit_bias_values = array("float", params.logit_bias.values())
    if bad_words:
        request.bad_words.ids = array("int32_t", [token for word in bad_words for token in word])
        request.bad_words.ends = array("int32_t", np.cumsum([len(word) for word in bad_words]).tolist())
        request.bad_words.num_lists = len(bad_words)
    return request, keep_alive
