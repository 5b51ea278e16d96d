"""A profile as text for people: the machine's peaks, a table for each kind of step, and what is outside the steps."""

from __future__ import annotations

from collections.abc import Iterator

from ..runtime.profile import ARITHMETICS
from ._profile import EngineProfile, StepProfile
from ._profile_warnings import UNITS

_STEP_TEXTS = {
    "decode": "Decode steps: one new token a sequence",
    "context": "Context steps: prompts, or drafts to verify",
}


def profile_lines(profile: EngineProfile) -> Iterator[str]:
    """Yield the lines."""
    yield _peaks_line(profile)
    for warning in profile.warnings:
        yield f"warning: {warning.text}"
    for step in profile.steps:
        yield ""
        yield from _step_lines(step)
    executor_ns = sum(step.time_ns for step in profile.steps)
    yield ""
    whole = max(1, executor_ns + profile.outside_ns + profile.draft_ns + profile.copy_ns)
    for text, ns in (
        ("in the executor", executor_ns),
        ("the core outside it: scheduling, sampling, events", profile.outside_ns),
        ("drafting", profile.draft_ns),
        ("copying blocks", profile.copy_ns),
    ):
        if ns or text.startswith(("in", "the core")):
            yield f"{text:50s}{ns / 1e6:10.1f} ms  {ns / whole:6.1%}"


def counted(count: float, noun: str, digits: int = 0) -> str:
    """Return a number with its noun: "1 thread", "2 threads", "1.0 tokens"."""
    text = f"{count:.{digits}f}"
    return f"{text} {noun}" + ("" if text == "1" else "s")


def _peaks_line(profile: EngineProfile) -> str:
    peaks = profile.peaks
    known = [name for name in ARITHMETICS if peaks.ops_per_s(name)]
    rates = "".join(f", {name} {peaks.ops_per_s(name) / 1e9:.0f} {UNITS[name]}" for name in known)
    threads = counted(peaks.num_threads, "thread")
    if profile.num_threads > peaks.num_threads:
        threads += f", one a core that this process may use; the engine has {profile.num_threads}"
    return f"This machine at most ({threads}): read {peaks.read_bytes_per_s / 1e9:.1f} GB/s{rates}"


_COLUMNS = f"{'ops':>5}{'us':>10}{'waiting':>9}{'step':>8}{'MB':>9}{'GB/s':>8}{'MOP':>11}{'GOP/s':>8}{'roofline':>10}"


def _step_lines(step: StepProfile) -> Iterator[str]:
    """Yield the table of one kind of step; times, bytes and operations are those of one step."""
    width = max(24, *(len(group.label) for group in step.groups)) + 1
    yield f"{_STEP_TEXTS[step.kind]}. {step.steps} of them, {counted(step.tokens / step.steps, 'token', 1)} in each"
    yield f"{'':{width}s}{_COLUMNS}"
    for group in step.groups:
        yield f"{group.label:{width}s}" + _numbers(
            group.num_ops,
            group.time_ns,
            group.waited_ns,
            step,
            group.bytes,
            group.operations,
            group.roofline_share,
        )
    us = step.other_ns / step.steps / 1e3
    yield f"{'other: waking threads, ...':{width}s}{'':5s}{us:10.1f}{'':9s}{step.other_ns / max(1, step.time_ns):8.1%}"
    total_bytes = sum(group.bytes for group in step.groups)
    operations = sum(group.operations for group in step.groups)
    num_ops = sum(group.num_ops for group in step.groups)
    share = step.least_ns / max(1, step.time_ns)
    yield f"{'a step':{width}s}" + _numbers(
        num_ops, step.time_ns, step.waited_ns, step, total_bytes, operations, share
    )
    yield (
        f"{'of it waiting for threads':{width}s}{'':5s}{step.waited_ns / step.steps / 1e3:10.1f}{'':9s}"
        f"{step.waited_ns / max(1, step.time_ns):8.1%}"
    )
    if any(group.certain_ns <= group.time_ns < group.least_ns for group in step.groups):
        yield "(above 100 % of the roofline: rows, keys or values that were in caches)"


def _numbers(
    num_ops: int,
    time_ns: int,
    waited_ns: int,
    step: StepProfile,
    num_bytes: int,
    operations: int,
    roofline: float,
) -> str:
    steps, ns = step.steps, max(1, time_ns)
    return (
        f"{num_ops:5d}{time_ns / steps / 1e3:10.1f}{waited_ns / steps / 1e3:9.1f}{time_ns / max(1, step.time_ns):8.1%}"
        f"{num_bytes / steps / 1e6:9.3f}{num_bytes / ns:8.1f}{operations / steps / 1e6:11.3f}{operations / ns:8.1f}"
        f"{roofline:10.0%}"
    )
