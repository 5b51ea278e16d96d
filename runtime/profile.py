"""Where the time of an executor's steps went, op by op, and what the machine could do in it at most."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import Any

from ._native import native

__all__ = ["CpuPeaks", "OpProfile", "best_peaks", "measure_peaks", "read_profile", "since"]

STEP_KINDS = ("decode", "context")  # PSM_STEPS_...
ARITHMETICS = ("f32", "int8", "bf16")  # PSM_ARITHMETIC_...
_BUFFER_TOO_SMALL = 10
MAX_THREADS = 1024  # of a pool


@dataclasses.dataclass(frozen=True)
class OpProfile:
    """What one op took in all steps of one kind, as psm_op_profile has it.

    name : of the plan's op, such as "layers.0.qkv"; "" of a whole step
    kind : what it does, such as "linear", or several that run as one joined by " + "; "step" = the steps themselves
    weights : type of a product's or a table's weights; "" without any
    step_kind : "decode" (one new token a sequence) or "context" (the others)
    arithmetic : what its operations are: "f32", "int8" or "bf16"
    out_features, in_features : of a product; 0
    calls, rows : steps it ran in, and the rows it worked on, summed over them
    time_ns, wait_ns : running, and waiting for other threads behind it; mean of the threads. Of a step: from its call
        to its return, and all waits
    bytes, operations : by arithmetic; bytes count once what has to be moved. activation_bytes of them are rows that
        stay in the caches where they fit
    """

    name: str
    kind: str
    weights: str
    step_kind: str
    arithmetic: str
    out_features: int
    in_features: int
    calls: int
    rows: int
    time_ns: int
    wait_ns: int
    bytes: int
    activation_bytes: int
    operations: int

    @property
    def is_step(self) -> bool:
        """Whether it is of whole steps."""
        return self.kind == "step"

    def since(self, before: OpProfile | None) -> OpProfile:
        """Return what came to an earlier record of the same op."""
        if before is None:
            return self
        return dataclasses.replace(
            self, **{name: getattr(self, name) - getattr(before, name) for name in _COUNTS}
        )


_COUNTS = ("calls", "rows", "time_ns", "wait_ns", "bytes", "activation_bytes", "operations")


def since(after: list[OpProfile], before: list[OpProfile]) -> list[OpProfile]:
    """Return what came between two profiles of one executor: records with at least one call, in its order."""
    key = _keys()
    earlier = {key(record): record for record in before}
    key = _keys()
    found = [record.since(earlier.get(key(record))) for record in after]
    return [record for record in found if record.calls > 0]


def _keys() -> Callable[[OpProfile], tuple[str, int]]:
    """Return a function that gives each record of one profile its place among those of its kind of step."""
    places: dict[str, int] = {}

    def key(record: OpProfile) -> tuple[str, int]:
        places[record.step_kind] = places.get(record.step_kind, -1) + 1
        return record.step_kind, places[record.step_kind]

    return key


def read_profile(call: Callable[[Any, int, Any], int]) -> list[OpProfile]:
    """Return the records of a C function that takes an array, its length and a place for the number of records.

    raises what its status stands for
    """
    core = native()
    num = core.ffi.new("size_t*")
    capacity, records = 0, core.ffi.NULL
    while (status := call(records, capacity, num)) == _BUFFER_TOO_SMALL:  # the first prompt doubles them
        capacity = int(num[0])
        records = core.ffi.new("psm_op_profile[]", capacity)
    core.check(status)
    return [_record(records[i]) for i in range(num[0])]


def _record(struct: Any) -> OpProfile:
    core = native()
    fields = {field.name: getattr(struct, field.name) for field in dataclasses.fields(OpProfile)}
    fields |= {name: core.text(fields[name]) for name in ("name", "kind", "weights")}
    fields["step_kind"] = STEP_KINDS[struct.step_kind]
    fields["arithmetic"] = ARITHMETICS[struct.arithmetic]
    return OpProfile(**fields)


@dataclasses.dataclass(frozen=True)
class CpuPeaks:
    """What the cores reach at most, together, as psm_cpu_measure_peaks found it; 0 = not known on this machine."""

    num_threads: int
    read_bytes_per_s: float
    read_sustained_bytes_per_s: float
    f32_ops_per_s: float
    int8_ops_per_s: float
    bf16_ops_per_s: float

    def ops_per_s(self, arithmetic: str) -> float:
        """Return the rate of "f32", "int8" or "bf16"."""
        return float(getattr(self, f"{arithmetic}_ops_per_s"))

    def least_s(self, record: OpProfile) -> float:
        """Return the least time that an op's bytes and operations take: the roofline."""
        rate = self.ops_per_s(record.arithmetic)
        arithmetic_s = record.operations / rate if rate else 0.0
        return max(record.bytes / self.read_bytes_per_s, arithmetic_s)


def best_peaks(measured: Sequence[CpuPeaks]) -> CpuPeaks:
    """Return the best of each rate: what a machine did once it can do, whatever its neighbours did at other times."""
    names = [field.name for field in dataclasses.fields(CpuPeaks)]
    return CpuPeaks(**{name: max(getattr(one, name) for one in measured) for name in names})


def measure_peaks(num_threads: int = 0, isa: str | None = None) -> CpuPeaks:
    """Measure what the cores can do at most; takes about a second.

    num_threads : 0 = one a core; more than this process may use would take each other's time and reach no more, for
        minutes, so at most one a core measures, and num_threads of the result says how many
    isa : as cpu_executor takes it
    raises InvalidArgumentError, UnsupportedError for an isa that the machine lacks, OutOfMemoryError
    """
    core = native()
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if usable < num_threads <= MAX_THREADS:  # beyond that the core refuses it
        num_threads = usable
    peaks = core.new("psm_cpu_peaks")
    text = core.ffi.NULL if isa is None else core.ffi.new("char[]", isa.encode())
    core.check(core.lib.psm_cpu_measure_peaks(num_threads, text, peaks))
    return CpuPeaks(**{field.name: getattr(peaks, field.name) for field in dataclasses.fields(CpuPeaks)})
