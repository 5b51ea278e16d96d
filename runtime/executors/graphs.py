"""CUDA graphs of decode runs, one a bucket: run twice as usual, captured, and from then on launched as one."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from ..errors import CudaError, OutOfMemoryError
from .cuda import Context, StickyCudaError
from .runs import Bucket

_log = logging.getLogger("plansmith.gpu")
MAX_GRAPHS = 64
# A bucket that was seen once may be a step of a burst that is over: its capture would take longer than it saves.
_RUNS_BEFORE_CAPTURE = 2


class Capturable(Protocol):
    """An execution context, set up for a bucket."""

    def run(self, stream: int) -> None:
        """Hand one run to the stream, without waiting."""

    def is_capturable(self, stream: int) -> bool:
        """Return whether a run can be captured now."""

    def close(self) -> None:
        """Release it; nothing of it may be running."""


_C = TypeVar("_C", bound=Capturable)


@dataclasses.dataclass(frozen=True)
class _Captured(Generic[_C]):
    graph: Any
    context: _C
    num_bytes: int


class DecodeGraphs(Generic[_C]):
    """The graphs of an executor. All methods need the CUDA context current.

    Each graph has an execution context of its own: what a context keeps about its shapes, its graph may read.
    max_graphs : the least recently used goes where there would be more
    max_bytes : device memory they may take together
    """

    def __init__(self, context: Context, max_graphs: int = MAX_GRAPHS, max_bytes: int = 1 << 62) -> None:
        self._context = context
        self._max_graphs = max_graphs
        self._max_bytes = max_bytes
        self._graphs: OrderedDict[Bucket, _Captured[_C]] = OrderedDict()  # least recently used first
        self._num_runs: dict[Bucket, int] = {}
        self._made: tuple[_C, int] | None = None  # for the run to be captured, and what was free before
        self._dropped: list[_C] = []  # with a run that nobody could wait for
        self.failure: str | None = None  # why nothing is captured any more

    def __len__(self) -> int:
        """How many there are."""
        return len(self._graphs)

    @property
    def num_bytes(self) -> int:
        """Device memory that they took when they were made."""
        return sum(one.num_bytes for one in self._graphs.values())

    def replay(self, bucket: Bucket, stream: Any) -> bool:
        """Launch the bucket's graph over the inputs now at their addresses; False where there is none."""
        found = self._graphs.get(bucket)
        if found is None:
            return False
        self._graphs.move_to_end(bucket)
        self._context.launch_graph(found.graph, stream)
        return True

    def context(self, bucket: Bucket, make: Callable[[], _C]) -> _C | None:
        """Return a new context for a bucket's run, which after_run captures; None = it does not come often (yet).

        make : makes it; it is closed here
        """
        if self.failure is not None or self._num_runs.get(bucket, 0) + 1 < _RUNS_BEFORE_CAPTURE:
            return None
        free = self._context.memory()[0]
        if self._made is None:
            try:
                self._made = make(), free
            except StickyCudaError:
                raise
            except (CudaError, OutOfMemoryError) as error:  # the latter of TensorRT's own
                self._give_up(str(error))
                return None
        return self._made[0]

    def after_run(self, bucket: Bucket, stream: Any) -> None:
        """Note a run of a bucket, which has just been handed to the stream, and capture it if `context` gave it one."""
        self._num_runs[bucket] = self._num_runs.get(bucket, 0) + 1
        if self._made is None:
            return
        (context, free), self._made = self._made, None
        try:
            graph = self._recorded(context, stream)
        except BaseException as error:
            self._drop(context, stream)
            if isinstance(error, StickyCudaError) or not isinstance(error, CudaError | OutOfMemoryError):
                raise
            self._give_up(str(error))
            return
        used = 0
        with contextlib.suppress(CudaError):
            used = max(0, free - self._context.memory()[0])
        self._graphs[bucket] = _Captured(graph, context, used)
        self._evict(stream)

    def _drop(self, context: _C, stream: Any) -> None:
        """Close a context when its run is done; where that cannot be waited for, `close` does it."""
        try:
            self._context.wait(stream)
        except CudaError:
            self._dropped.append(context)
        else:
            context.close()

    def _give_up(self, why: str) -> None:
        self.failure = why
        _log.warning(
            "decode steps are not captured as CUDA graphs from here on, which makes them slower: %s", why
        )

    def _evict(self, stream: Any) -> None:
        while len(self._graphs) > 1 and (
            len(self._graphs) > self._max_graphs or self.num_bytes > self._max_bytes
        ):
            oldest = next(iter(self._graphs))
            self._context.wait(stream)  # a launch of it may still run
            self._release(self._graphs.pop(oldest))
            self._num_runs[oldest] = 0

    def _release(self, one: _Captured[_C]) -> None:
        with contextlib.suppress(CudaError):
            self._context.destroy_graph(one.graph)
        one.context.close()

    def _recorded(self, context: _C, stream: Any) -> Any:
        """Return the graph of the run that a context has just done; nothing is computed here."""
        if not context.is_capturable(int(stream)):
            raise CudaError("the plan's runs cannot be captured")
        self._context.begin_capture(stream)
        try:
            context.run(int(stream))
        except BaseException:
            with contextlib.suppress(CudaError):  # the stream leaves its capture, however broken that is
                self._context.destroy_graph(self._context.end_capture(stream))
            raise
        return self._context.end_capture(stream)

    def close(self) -> None:
        """Release all, when the stream's work is done. Never fails; twice is fine."""
        for one in self._graphs.values():
            self._release(one)
        self._graphs.clear()
        for context in self._dropped:
            context.close()
        self._dropped.clear()
        if self._made is not None:
            self._made[0].close()
        self._made = None
