"""The families as a registry of prometheus_client, for a server of our own.

prometheus_client's own writers add `_total` to the name of every counter, which the old names do not have, so
`exposition` writes the text. It is version 0.0.4 of the format for every client: OpenMetrics wants those suffixes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.utils import floatToGoString

from .collector import EngineMetrics
from .families import COUNTER, FAMILIES, Family
from .histogram import HistogramState

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def registry_of(metrics: EngineMetrics, model: str, version: str = "1") -> CollectorRegistry:
    """Return a registry that reads `metrics` whenever it is collected.

    model, version : the labels of every series
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(metrics, model, version))
    return registry


def exposition(registry: CollectorRegistry) -> bytes:
    """Return the registry's metrics as text, to be sent with CONTENT_TYPE. Any thread."""
    lines: list[str] = []
    for metric in registry.collect():
        name = _header_name(metric)
        text = metric.documentation.replace("\\", r"\\").replace("\n", r"\n")
        lines += [f"# HELP {name} {text}", f"# TYPE {name} {_TYPES.get(metric.type, metric.type)}"]
        lines += [
            f"{one.name}{_labels(one.labels)} {floatToGoString(one.value)}"
            for one in metric.samples
            if not one.name.endswith("_created")  # a part of OpenMetrics alone
        ]
    return ("\n".join(lines) + "\n").encode()


_TYPES = {"unknown": "untyped", "info": "gauge", "stateset": "gauge", "gaugehistogram": "histogram"}


class _Collector:
    """What a registry collects. Scrapes may overlap; each reads the engine by itself."""

    def __init__(self, metrics: EngineMetrics, model: str, version: str) -> None:
        self._metrics, self._model, self._version = metrics, model, version

    def collect(self) -> Iterator[Any]:
        """Yield one Metric a family."""
        made = {family.name: _empty(family) for family in FAMILIES}
        for sample in self._metrics.samples():
            labels = sample.family.labels(self._model, self._version, sample.key)
            made[sample.family.name].add_sample(sample.family.name, labels, sample.value)
        for state in self._metrics.histograms():
            self._add_histogram(made[state.family.name], state)
        yield from made.values()

    def _add_histogram(self, metric: Any, state: HistogramState) -> None:
        family = state.family
        labels = family.labels(self._model, self._version, family.keys[0])
        metric.add_sample(f"{family.name}_count", labels, state.counts[-1])
        metric.add_sample(f"{family.name}_sum", labels, state.total)
        for bound, count in state.buckets:
            metric.add_sample(f"{family.name}_bucket", {**labels, "le": bound}, count)


def _empty(family: Family) -> Any:
    # By the library's custom a counter's own name lacks the suffix that its samples have.
    name = family.name.removesuffix("_total") if family.kind == COUNTER else family.name
    return Metric(name, family.help, family.kind)


def _header_name(metric: Any) -> str:
    """Return the name of a metric's samples."""
    name = str(metric.name)
    names = {sample.name for sample in metric.samples}
    return next((made for suffix in ("_total", "_info") if (made := name + suffix) in names), name)


def _labels(labels: dict[str, str]) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escape(value)}"' for name, value in labels.items()) + "}"


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
