"""CUDA graphs of decode runs, one a bucket: run twice as usual, captured, and from then on launched as one."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from ..errors import CudaError, OutOfMemoryError
from .cuda import Context, StickyCudaError
from .runs import Bucket

MAX_GRAPHS = 64
# A bucket that was seen once may be a step of a burst that is over: its capture would take longer than it saves.
_RUNS_BEFORE_CAPTURE = 2


class DecodeGraphs:
    """The graphs of one context. All methods need the CUDA context current.

    max_graphs : the least recently used goes where there would be more
    max_bytes : device memory they may take together
    """

    def __init__(self, context: Context, max_graphs: int = MAX_GRAPHS, max_bytes: int = 1 << 62) -> None:
        self._context = context
        self._max_graphs = max_graphs
        self._max_bytes = max_bytes
        self._graphs: OrderedDict[Bucket, tuple[Any, int]] = OrderedDict()  # least recently used first
        self._num_runs: dict[Bucket, int] = {}
        self.failure: str | None = None  # why nothing is captured any more

    def __len__(self) -> int:
        """How many there are."""
        return len(self._graphs)

    @property
    def num_bytes(self) -> int:
        """Device memory that they took when they were made."""
        return sum(size for _, size in self._graphs.values())

    def replay(self, bucket: Bucket, stream: Any) -> bool:
        """Launch the bucket's graph over the inputs now at their addresses; False where there is none."""
        found = self._graphs.get(bucket)
        if found is None:
            return False
        self._graphs.move_to_end(bucket)
        self._context.launch_graph(found[0], stream)
        return True

    def after_run(self, bucket: Bucket, run: Callable[[], None], can_capture: bool, stream: Any) -> None:
        """Note a run of a bucket, which has just been handed to the stream, and capture it when it comes often.

        run : hands the same run to the stream again; here it is recorded only, and nothing is computed
        can_capture : whether the library says that such a run may be captured
        """
        if self.failure is not None:
            return
        if not can_capture:
            self.failure = "the plan's runs cannot be captured"
            return
        count = self._num_runs[bucket] = self._num_runs.get(bucket, 0) + 1
        if count >= _RUNS_BEFORE_CAPTURE:
            self._capture(bucket, run, stream)

    def _capture(self, bucket: Bucket, run: Callable[[], None], stream: Any) -> None:
        free = self._context.memory()[0]
        try:
            graph = self._recorded(run, stream)
        except StickyCudaError:
            raise
        except (CudaError, OutOfMemoryError) as error:
            self.failure = str(error)
            return
        size = max(0, free - self._context.memory()[0])
        self._graphs[bucket] = (graph, size)
        while len(self._graphs) > 1 and (
            len(self._graphs) > self._max_graphs or self.num_bytes > self._max_bytes
        ):
            oldest = next(iter(self._graphs))
            self._context.wait(stream)  # a launch of it may still run
            self._context.destroy_graph(self._graphs.pop(oldest)[0])
            self._num_runs[oldest] = 0

    def _recorded(self, run: Callable[[], None], stream: Any) -> Any:
        self._context.begin_capture(stream)
        try:
            run()
        except BaseException:
            with contextlib.suppress(CudaError):  # the stream leaves its capture, however broken that is
                self._context.destroy_graph(self._context.end_capture(stream))
            raise
        return self._context.end_capture(stream)

    def close(self) -> None:
        """Release all, when the stream's work is done. Never fails; twice is fine."""
        for graph, _ in self._graphs.values():
            with contextlib.suppress(CudaError):
                self._context.destroy_graph(graph)
        self._graphs.clear()
