"""A profile of the cpu target: ops of all layers together, beside what the machine could do at most."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator, Sequence
from typing import Any

from ..runtime.profile import CpuPeaks, OpProfile, best_peaks
from ..runtime.stats import EngineStats
from ._profile_warnings import ProfileWarning, differing_peaks, impossible_times

_LAYER = re.compile(r"\b(layers?|blocks?|h)\.\d+\.")
# An op that counts nothing, such as adapters where no request has one, is shown from this share of a step on.
_LEAST_SHARE = 1e-3


@dataclasses.dataclass(frozen=True)
class OpGroup:
    """Ops of one kind and shape over all layers, summed; times are the mean of the threads.

    name : without the layer, such as "gate|up"
    num_ops : how many of the plan
    ran_ns, waited_ns : running, and waiting behind them for other threads
    least_ns : what bytes and operations take at the machine's peaks, op by op
    certain_ns : the part of it that no cache shortens: operations, and the bytes of weights
    """

    name: str
    kind: str
    weights: str
    arithmetic: str
    out_features: int
    in_features: int
    num_ops: int
    calls: int
    rows: int
    ran_ns: int
    waited_ns: int
    bytes: int
    activation_bytes: int
    operations: int
    least_ns: float
    certain_ns: float

    @property
    def time_ns(self) -> int:
        """The time it took of a step."""
        return self.ran_ns + self.waited_ns

    @property
    def label(self) -> str:
        """Its name, what it does, and its shape: "gate|up, linear int8 3072x576"."""
        shape = f" {self.out_features}x{self.in_features}" if self.out_features else ""
        weights = f" {self.weights}" if self.weights else ""
        return f"{self.name}, {self.kind}{weights}{shape}"

    @property
    def roofline_share(self) -> float:
        """The least time over the time it took; above 1 where rows were read from caches rather than memory."""
        return self.least_ns / self.time_ns if self.time_ns else 0.0

    @property
    def intensity(self) -> float:
        """Operations a byte."""
        return self.operations / self.bytes if self.bytes else 0.0


@dataclasses.dataclass(frozen=True)
class StepProfile:
    """Steps of one kind.

    time_ns : in the executor, in all; ran_ns + waited_ns + other_ns. other_ns is what is no op's: waking the threads,
        the step's arrays, ops that are not worth a line
    groups : by time, longest first
    """

    kind: str
    steps: int
    tokens: int
    time_ns: int
    groups: tuple[OpGroup, ...]

    @property
    def ran_ns(self) -> int:
        """Running ops."""
        return sum(group.ran_ns for group in self.groups)

    @property
    def waited_ns(self) -> int:
        """Threads waiting for each other between ops."""
        return sum(group.waited_ns for group in self.groups)

    @property
    def other_ns(self) -> int:
        """Neither."""
        return max(0, self.time_ns - self.ran_ns - self.waited_ns)

    @property
    def least_ns(self) -> float:
        """What all ops take at the machine's peaks, one after another."""
        return sum(group.least_ns for group in self.groups)


@dataclasses.dataclass(frozen=True)
class EngineProfile:
    """What was measured: the machine's peaks, the steps of each kind, and the core outside its executor.

    measured : the machine's peaks, as often as they were measured: before the run, and behind it
    num_threads : of the engine; the peaks' own number is less where these are more than the process has cores
    outside_ns : scheduling, packing, sampling, events, while there was work; draft models and copies of blocks beside
        it in draft_ns and copy_ns
    """

    measured: tuple[CpuPeaks, ...]
    num_threads: int
    steps: tuple[StepProfile, ...]
    outside_ns: int
    draft_ns: int
    copy_ns: int

    @functools.cached_property
    def peaks(self) -> CpuPeaks:
        """What the machine can do at most."""
        return best_peaks(self.measured)

    @functools.cached_property
    def warnings(self) -> tuple[ProfileWarning, ...]:
        """What makes the shares of the roofline doubtful."""
        return (*differing_peaks(self.measured), *impossible_times(self.steps))

    def to_dict(self) -> dict[str, Any]:
        """Return it for JSON, as docs/serving.md describes it: times in microseconds, all per step but the counts."""
        return {
            "num_threads": self.num_threads,
            "peaks": dataclasses.asdict(self.peaks),
            "peaks_measured": [dataclasses.asdict(one) for one in self.measured],
            "warnings": [dataclasses.asdict(one) for one in self.warnings],
            "steps": [_step_dict(step) for step in self.steps],
            "outside_executor_ms": self.outside_ns / 1e6,
            "drafting_ms": self.draft_ns / 1e6,
            "copying_ms": self.copy_ns / 1e6,
        }


def engine_profile(
    records: Sequence[OpProfile],
    measured: Sequence[CpuPeaks],
    before: EngineStats,
    after: EngineStats,
    num_threads: int = 0,
) -> EngineProfile:
    """Return a profile of what came between two moments of an engine, with ops of all layers together.

    records : what came between them, as runtime.profile.since returns it
    measured : the machine's peaks, as often as they were measured
    num_threads : of the engine; 0 = one a core
    """
    return EngineProfile(
        tuple(measured),
        num_threads or measured[0].num_threads,
        tuple(_step_profiles(records, best_peaks(measured))),
        after.schedule_time_ns - before.schedule_time_ns,
        after.draft_time_ns - before.draft_time_ns,
        after.copy_time_ns - before.copy_time_ns,
    )


def _step_profiles(records: Sequence[OpProfile], peaks: CpuPeaks) -> Iterator[StepProfile]:
    for whole in records:
        if not whole.is_step:
            continue
        ops = [r for r in records if r.step_kind == whole.step_kind and not r.is_step]
        groups = sorted(_groups(ops, peaks), key=lambda group: -group.time_ns)
        least = _LEAST_SHARE * whole.time_ns
        shown = (one for one in groups if one.bytes or one.operations or one.time_ns >= least)
        yield StepProfile(whole.step_kind, whole.calls, whole.rows, whole.time_ns, tuple(shown))


def _groups(ops: Sequence[OpProfile], peaks: CpuPeaks) -> Iterator[OpGroup]:
    together: dict[tuple[Any, ...], list[OpProfile]] = {}
    for op in ops:
        name = _LAYER.sub("", op.name)
        key = (name, op.kind, op.weights, op.arithmetic, op.out_features, op.in_features)
        together.setdefault(key, []).append(op)
    for key, members in together.items():
        yield OpGroup(
            *key,
            num_ops=len(members),
            calls=sum(op.calls for op in members),
            rows=sum(op.rows for op in members),
            ran_ns=sum(op.time_ns for op in members),
            waited_ns=sum(op.wait_ns for op in members),
            bytes=sum(op.bytes for op in members),
            activation_bytes=sum(op.activation_bytes for op in members),
            operations=sum(op.operations for op in members),
            least_ns=sum(1e9 * peaks.least_s(op) for op in members),
            certain_ns=sum(1e9 * peaks.least_s(_from_memory(op)) for op in members),
        )


def _from_memory(op: OpProfile) -> OpProfile:
    """Return the op with those bytes alone that are in no cache: weights, where the last-level cache has not all."""
    return dataclasses.replace(op, bytes=op.bytes - op.activation_bytes if op.weights else 0)


def _step_dict(step: StepProfile) -> dict[str, Any]:
    n = step.steps
    return {
        "kind": step.kind,
        "steps": n,
        "tokens": step.tokens,
        "time_us": step.time_ns / n / 1e3,
        "run_us": step.ran_ns / n / 1e3,
        "wait_us": step.waited_ns / n / 1e3,
        "other_us": step.other_ns / n / 1e3,
        "roofline_us": step.least_ns / n / 1e3,
        "ops": [_group_dict(group, n) for group in step.groups],
    }


def _group_dict(group: OpGroup, steps: int) -> dict[str, Any]:
    names = ("name", "kind", "weights", "arithmetic", "out_features", "in_features", "num_ops")
    return {name: getattr(group, name) for name in names} | {
        "rows": group.rows / max(1, group.calls),
        "time_us": group.time_ns / steps / 1e3,
        "run_us": group.ran_ns / steps / 1e3,
        "wait_us": group.waited_ns / steps / 1e3,
        "bytes": group.bytes / steps,
        "activation_bytes": group.activation_bytes / steps,
        "operations": group.operations / steps,
        "gb_per_s": group.bytes / max(1, group.time_ns),
        "gop_per_s": group.operations / max(1, group.time_ns),
        "roofline_us": group.least_ns / steps / 1e3,
        "roofline_share": group.roofline_share,
    }
