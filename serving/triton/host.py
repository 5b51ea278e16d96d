"""The engine of the model `tensorrt_llm` and all its requests: taken, stopped, cancelled, sent."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Sequence

from ...runtime.completion import Completion
from ...runtime.engine import Engine
from ...runtime.errors import (
    Error,
    InternalError,
    InvalidArgumentError,
    OutOfMemoryError,
    QueueFullError,
    ShutdownError,
    UnsupportedError,
)
from ...runtime.sampling import SamplingParams
from .cancel_watch import CancelWatch
from .delta_text import PrefixRule
from .lora_cache import LoraCache
from .observer import Nobody, Observer, observe_end
from .outbox import Outbox
from .request import Reply, Request
from .request_ids import stopped_by
from .row import Row
from .settings import Settings
from .stream import RowStream, last_tokens
from .write import PREFIX_LEN

__all__ = ["EngineHost", "Reply"]

_NUM_PREPARING_THREADS = 2
_NUM_LOADING_THREADS = 4
_MAX_PREPARING = (
    1024  # requests whose grammar or adapter is being made ready, where max_queue_size says nothing
)
_CANCEL_WAIT_S = 2.0


class EngineHost:
    """Runs requests on an engine, which it owns. Every method may be called from any thread.

    observer : None = nobody counts
    """

    def __init__(self, engine: Engine, settings: Settings, observer: Observer | None = None) -> None:
        self._engine, self._settings = engine, settings
        self._observer: Observer = observer or Nobody()
        tokenizer = engine.tokenizer
        self._keep_prefix = last_tokens if tokenizer is None else PrefixRule(tokenizer, PREFIX_LEN).keep
        self._adapters = LoraCache(
            engine,
            settings.max_adapters,
            host_memory_bytes=settings.lora_host_memory_bytes,
            prefetch_dir=settings.lora_prefetch_dir,
        )
        interval_ms = settings.stream_interval_ms
        self._outbox = Outbox(interval_s=None if interval_ms is None else interval_ms / 1e3)
        self._watch = CancelWatch(settings.cancellation_check_period_ms / 1e3, on_round=self._outbox.relieve)
        self._preparing = concurrent.futures.ThreadPoolExecutor(
            _NUM_PREPARING_THREADS, thread_name_prefix="plansmith-prepare"
        )
        # Apart from those, as these may wait for other requests to end.
        self._loading = concurrent.futures.ThreadPoolExecutor(
            _NUM_LOADING_THREADS, thread_name_prefix="plansmith-adapter"
        )
        self._changed = threading.Condition()
        self._by_id: dict[str, set[Request]] = {}  # whose last answer is not yet on its way
        self._open: set[Request] = set()
        self._num_preparing = 0
        self._is_closing = False

    @property
    def num_open_requests(self) -> int:
        """How many requests have not had their last answer yet."""
        return len(self._open)

    def submit(self, rows: Sequence[Row], reply: Reply) -> None:
        """Start a request. Does not wait; every error goes to `reply`, also later ones.

        InvalidArgumentError for a batch or a stream where a request has one answer only. Ids need not differ.
        """
        request = Request(
            rows,
            reply,
            self._outbox.wake,
            logits_dtype=self._settings.logits_dtype,
            is_stacked=not self._settings.is_decoupled,
            keep_prefix=self._keep_prefix,
            on_answered=self._forget_id,
            on_end=self._ended,
        )
        try:
            self._check(rows)
            self._register(request)
        except Exception as error:
            self._observer.observe_error(error)
            reply.fail(error)
            return
        try:
            reply.acknowledge()
        except Exception as error:
            request.fail(error)
            return
        self._watch.add(request)
        if all(self._is_ready(request, row) for row in rows):
            self._start(request)
        else:
            self._prepare(request)

    def stop(self, request_id: str) -> None:
        """End the running requests of an id, which answer with what they have. Nothing for an id that does not run.

        raises InvalidArgumentError for the empty id
        """
        if not request_id:
            raise InvalidArgumentError(
                "a stop request has no id; send it with the request id of the one that is to end"
            )
        with self._changed:
            named = list(self._by_id.get(request_id, ()))
        for request in named:
            request.cancel()

    def close(self, drain_s: float = 0.0) -> None:
        """Refuse new requests, wait for the open ones, cancel what is left, and close the engine. Twice is fine.

        drain_s : seconds for requests to end by themselves
        """
        with self._changed:
            self._is_closing = True
            self._changed.wait_for(lambda: not self._open, drain_s)
            left = list(self._open)
        for request in left:
            request.cancel()
        with self._changed:
            self._changed.wait_for(lambda: not self._open, _CANCEL_WAIT_S)
        pools = (self._preparing, self._loading)
        for threads in pools:
            threads.shutdown(wait=False, cancel_futures=True)
        self._engine.close()  # what still runs fails, and says so
        for threads in pools:  # and what is still being made ready, once it is
            threads.shutdown(wait=True)
        self._watch.stop()
        self._outbox.stop()

    def _check(self, rows: Sequence[Row]) -> None:
        if not self._settings.is_decoupled and len(rows) > 1:
            raise InvalidArgumentError(
                f"the request has {len(rows)} rows, which are answered one by one; send one a request, or set the "
                "model's decoupled mode"
            )
        if not self._settings.is_decoupled and any(row.streaming for row in rows):
            raise InvalidArgumentError(
                "streaming needs several answers a request; leave it out, or set the model's decoupled mode"
            )
        if self._settings.guided_backend == "off" and any(row.params.get("guided") for row in rows):
            raise UnsupportedError(
                "guided_decoding_guide_type was sent, and guided_decoding_backend of the model is off; set it to "
                "llguidance"
            )

    def _register(self, request: Request) -> None:
        with self._changed:
            if self._is_closing:
                raise _shutting_down()
            for name in stopped_by(request.id):  # clients that do not know of each other may choose the same
                self._by_id.setdefault(name, set()).add(request)
            self._open.add(request)
        self._outbox.open(request)

    def _is_ready(self, request: Request, row: Row) -> bool:
        """Return whether a row starts without waiting, with its adapter, if it has one, held for it."""
        if row.lora is not None:
            adapter = self._adapters.acquire_loaded(row.lora)
            if adapter is None:
                return False
            request.hold(row.row_idx, adapter)
        return row.params.get("guided") is None

    def _prepare(self, request: Request) -> None:
        """Start a request on a thread that may wait."""
        with self._changed:
            limit = self._settings.options.get("max_queue_size") or _MAX_PREPARING
            is_full = self._num_preparing >= limit
            self._num_preparing += not is_full
        if is_full:
            request.fail(
                QueueFullError(
                    f"{limit} requests wait for their grammars or adapters already; try again later, or raise "
                    "max_queue_size"
                )
            )
            return
        needs_adapter = any(
            stream.row.lora and stream.row.row_idx not in request.adapters for stream in request.rows
        )
        threads = self._loading if needs_adapter else self._preparing
        try:
            future = threads.submit(self._start, request)
        except RuntimeError:  # closed meanwhile
            self._prepared(request, is_dropped=True)
        else:
            future.add_done_callback(lambda one: self._prepared(request, is_dropped=one.cancelled()))

    def _prepared(self, request: Request, *, is_dropped: bool) -> None:
        with self._changed:
            self._num_preparing -= 1
        if is_dropped:
            request.fail(_shutting_down())

    def _start(self, request: Request) -> None:
        try:
            for stream in request.rows:
                if request.is_cancelled:
                    stream.abandon()
                else:
                    self._submit(request, stream)
            if request.is_cancelled:
                self._outbox.wake(request, True)
        except Error as error:
            request.fail(error)
        except Exception as error:
            request.fail(InternalError(f"the request could not be started: {type(error).__name__}: {error}"))

    def _submit(self, request: Request, stream: RowStream) -> None:
        row = stream.row
        if row.lora is not None and row.row_idx not in request.adapters and not self._load(request, row):
            stream.abandon()
            return
        params = SamplingParams(**{**row.params, "adapter": request.adapters.get(row.row_idx)})
        request.started(self._engine.submit(row.prompt_ids.tolist(), params, on_delta=stream.on_delta))

    def _load(self, request: Request, row: Row) -> bool:
        """Hold a row's adapter, which may mean to wait until another is no longer used; False when nobody cares."""
        assert row.lora is not None
        try:
            # Two requests that hold an adapter and wait for another's could wait for each other.
            adapter = self._adapters.acquire(row.lora, lambda: not (request.adapters or request.is_cancelled))
        except OutOfMemoryError:
            if request.is_cancelled:
                return False
            raise
        if not request.hold(row.row_idx, adapter):
            self._adapters.release(adapter)
            return False
        return True

    def _forget_id(self, request: Request) -> None:
        self._watch.remove(request)
        with self._changed:
            for name in stopped_by(request.id):
                named = self._by_id.get(name, set())
                named.discard(request)
                if not named:
                    self._by_id.pop(name, None)

    def _ended(self, request: Request, completions: list[Completion], error: BaseException | None) -> None:
        self._outbox.close(request)
        try:
            for adapter in request.let_go():
                self._adapters.release(adapter)
            observe_end(self._observer, completions, error)
        finally:  # counted before: close() lets the metrics end once nothing is open
            with self._changed:
                self._open.discard(request)
                self._changed.notify_all()


def _shutting_down() -> ShutdownError:
    return ShutdownError("the model is shutting down; send the request to another server")
