"""The families on Triton's port, kept up to date from the model that hosts the engine."""

from __future__ import annotations

import collections
import ctypes
import threading
import time
from typing import Any

import triton_python_backend_utils as pb_utils

from ...runtime.engine_base import EngineBase
from ...runtime.stats import RequestStats
from .collector import EngineMetrics, Observation, Sample
from .families import COUNTER, FAMILIES, GAUGE, HISTOGRAM, Family

_STOP_WAIT_S = 5.0
# Each costs about 20 us of the updating thread; more than these wait only if the server no longer answers.
_MAX_WAITING_OBSERVATIONS = 100_000
_GAUGES_TRUSTED_S = 2.0


class TritonMetrics:
    """The metrics of one engine as Triton's own. A metric that fails is logged once and never hurts serving.

    metrics : what they are read from
    """

    def __init__(self, engine: EngineBase, model: str, version: str, period_ms: int = 1000) -> None:
        """Make the metrics without showing them yet.

        model, version : the labels of every series
        period_ms : between two updates, at least 1
        """
        self.metrics = EngineMetrics(engine)
        self._labels = (model, version)
        self._period_s = max(1, period_ms) / 1e3
        self._series: dict[tuple[str, str | None], Any] = {}
        self._sent: dict[tuple[str, str | None], float] = {}
        self._gauges_until = 0.0  # until when `_sent` is trusted for gauges
        self._waiting: collections.deque[Observation] = collections.deque(maxlen=_MAX_WAITING_OBSERVATIONS)
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._complaints: set[str] = set()

    def start(self) -> None:
        """Show every family, at 0 where nothing has happened, and begin to update them. Once, in `initialize`."""
        for family in FAMILIES:
            try:
                self._show(family)
            except Exception as error:  # another model's metric of that name, or a server that is too old
                self._complain(family.name, error)
        self._update()
        self._thread = threading.Thread(target=self._run, name="plansmith-metrics", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop updating: totals stay, what tells the state becomes 0. In `finalize`; twice is fine."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._stopping.set()
        thread.join(_STOP_WAIT_S)
        if thread.is_alive():
            return  # the server does not answer
        self._update()
        self._forget_gauges()
        for family in FAMILIES:
            for key in family.keys if family.kind == GAUGE else ():
                self._send(Sample(family, key, 0.0))

    def observe(self, stats: RequestStats, reason: str = "stop", *, num_sequences: int = 1) -> None:
        """Count a request that ended with an answer; see EngineMetrics.observe. Any thread; does not wait or raise."""
        try:
            self._waiting.extend(self.metrics.observe(stats, reason, num_sequences=num_sequences))
        except Exception as error:
            self._complain("observe", error)

    def observe_cancelled(self) -> None:
        """Count a request that was cancelled before the engine had it. Any thread; does not wait or raise."""
        try:
            self.metrics.observe_cancelled()
        except Exception as error:
            self._complain("observe_cancelled", error)

    def observe_error(self, error: BaseException) -> None:
        """Count a request that was refused or ended with an error. Any thread; does not wait or raise."""
        try:
            self.metrics.observe_error(error)
        except Exception as failure:
            self._complain("observe_error", failure)

    def _run(self) -> None:
        while not self._stopping.wait(self._period_s):
            self._update()

    def _update(self) -> None:
        try:
            samples = self.metrics.samples()
        except Exception as error:
            return self._complain("samples", error)
        if time.monotonic() > self._gauges_until:
            self._gauges_until = time.monotonic() + _GAUGES_TRUSTED_S
            self._forget_gauges()
        for sample in samples:
            self._send(sample)
        for _ in range(len(self._waiting)):
            family, value = self._waiting.popleft()
            self._call(family, family.keys[0], "observe", value)

    def _forget_gauges(self) -> None:
        """Send all again: after a reload the old instance may have set the same series to 0 when it ended."""
        for family in FAMILIES:
            for key in family.keys if family.kind == GAUGE else ():
                self._sent.pop((family.name, key), None)

    def _send(self, sample: Sample) -> None:
        family, key, value = sample
        place = (family.name, key)
        if family.kind != COUNTER:
            if self._sent.get(place) != value and self._call(family, key, "set", value):
                self._sent[place] = value
            return
        # The server's total lives on while a model is loaded anew, and this engine's begins at 0.
        grown = value - self._sent.get(place, 0.0)
        if grown > 0 and self._call(family, key, "increment", grown):
            self._sent[place] = value

    def _call(self, family: Family, key: str | None, method: str, value: float) -> bool:
        series = self._series.get((family.name, key))
        if series is None:
            return False
        try:
            getattr(series, method)(value)
        except Exception as error:
            self._complain(family.name, error)
            return False
        return True

    def _show(self, family: Family) -> None:
        """Make a family and its series, and keep them for ever.

        tritonserver shares a series between all objects of the same name and labels, but counts its users in each
        family object by itself: when one is deleted, the others' next call is a crash of the whole server. A model
        that is loaded anew while its old instance drains has two. So none is ever deleted.
        """
        kinds = pb_utils.MetricFamily
        kind = {GAUGE: kinds.GAUGE, COUNTER: kinds.COUNTER}.get(family.kind)
        if family.kind == HISTOGRAM:
            kind = kinds.HISTOGRAM  # old servers have none
        made = _keep(kinds(name=family.name, description=family.help, kind=kind))
        for key in family.keys:
            labels = family.labels(*self._labels, key)
            buckets = {"buckets": list(family.bounds)} if family.bounds else {}
            self._series[family.name, key] = _keep(made.Metric(labels=labels, **buckets))

    def _complain(self, what: str, error: Exception) -> None:
        if what in self._complaints:
            return
        self._complaints.add(what)
        pb_utils.Logger.log_warn(
            f"plansmith: the metric {what} failed and is not shown ({type(error).__name__}: {error}); serving goes on"
        )


def _keep(made: Any) -> Any:
    """Return `made`, which is never deleted from here on, not even when the interpreter ends."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(made))
    return made
