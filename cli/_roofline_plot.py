"""A profile as a picture: the roofline with a point an op, and a bar of each op's time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..runtime.errors import UnsupportedError
from ..runtime.profile import ARITHMETICS, CpuPeaks
from ._profile import UNITS, EngineProfile, OpGroup, StepProfile

_COLORS = {"f32": "tab:blue", "int8": "tab:orange", "bf16": "tab:green"}
_LABELLED_SHARE = 0.02  # of a step's time: names of smaller points would only cover each other
_MAX_BARS = 20


def pyplot() -> Any:
    """Return matplotlib's pyplot, set to draw into files with text as text; UnsupportedError without matplotlib."""
    try:
        import matplotlib
    except ImportError as error:
        raise UnsupportedError(
            "plots need matplotlib, which is not installed; run: pip install 'plansmith[plot]'"
        ) from error
    matplotlib.use("agg")
    # Names can be searched and the file of equal data is equal.
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "plansmith"})
    import matplotlib.pyplot

    return matplotlib.pyplot


def save(figure: Any, path: Path) -> None:
    """Write a figure in the format that the name's ending says, and forget it."""
    metadata = {"Date": None} if path.suffix == ".svg" else None
    try:
        figure.savefig(path, metadata=metadata, bbox_inches="tight")
    finally:
        pyplot().close(figure)


def draw_profile(profile: EngineProfile, path: Path) -> None:
    """Write the picture of a profile: a row for each kind of step.

    path : .svg, or another format of matplotlib
    raises UnsupportedError without matplotlib, OSError when the file cannot be written
    """
    plt = pyplot()
    num_rows = max(1, len(profile.steps))
    figure, axes = plt.subplots(num_rows, 2, figsize=(15, 6 * num_rows), squeeze=False)
    for row, step in zip(axes, profile.steps, strict=False):
        draw_points(row[0], profile.peaks, step)
        _draw_bars(row[1], step)
    figure.tight_layout()
    save(figure, path)


def draw_roofs(axis: Any, peaks: CpuPeaks, low: float, high: float, arithmetics: Sequence[str]) -> None:
    """Draw the memory roof and those of some kinds of arithmetic, for `low` to `high` operations a byte."""
    gb_per_s = peaks.read_bytes_per_s / 1e9
    for arithmetic in arithmetics:
        peak = peaks.ops_per_s(arithmetic) / 1e9
        if peak == 0:
            continue
        ridge = min(max(peak / gb_per_s, low), high)
        points = [low, ridge, high]
        label = f"{arithmetic}: {peak:.0f} {UNITS[arithmetic]}"
        axis.plot(points, [min(peak, x * gb_per_s) for x in points], color=_COLORS[arithmetic], label=label)
    axis.plot([], [], color="black", label=f"memory: {gb_per_s:.1f} GB/s")
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel("operations a byte")
    axis.set_ylabel("GOP/s")
    axis.grid(True, which="both", alpha=0.2)


def draw_points(axis: Any, peaks: CpuPeaks, step: StepProfile) -> None:
    """Draw one kind of step: an op is a point as large as its time."""
    groups = [one for one in step.groups if one.operations and one.bytes and one.time_ns]
    intensities = [one.intensity for one in groups] or [1.0]
    used = [name for name in ARITHMETICS if any(one.arithmetic == name for one in groups)]
    draw_roofs(axis, peaks, min(intensities) / 3, max(*intensities, 10.0) * 3, used)
    whole = max(1, step.time_ns)
    for group in groups:
        x, y = group.intensity, group.operations / group.time_ns
        size = 10 + 1500 * group.time_ns / whole
        axis.scatter(x, y, s=size, color=_COLORS[group.arithmetic], alpha=0.5, edgecolors="black")
        if group.time_ns >= _LABELLED_SHARE * whole:
            axis.annotate(_short(group), (x, y), xytext=(6, 6), textcoords="offset points", fontsize=8)
    axis.legend(loc="lower right", fontsize=8)
    axis.set_title(f"{step.kind} steps, {step.tokens / step.steps:.0f} tokens in each")


def _short(group: OpGroup) -> str:
    return f"{group.name} ({group.kind})"


def _draw_bars(axis: Any, step: StepProfile) -> None:
    """Draw each op's time of a step, running and waiting, and what of it the roofline leaves."""
    shown, rest = step.groups[:_MAX_BARS], step.groups[_MAX_BARS:]
    us = 1e-3 / step.steps
    names = [group.label for group in shown]
    ran = [group.ran_ns * us for group in shown]
    waited = [group.waited_ns * us for group in shown]
    least = [group.least_ns * us for group in shown]
    if rest:
        names.append(f"{len(rest)} others")
        ran.append(sum(group.ran_ns for group in rest) * us)
        waited.append(sum(group.waited_ns for group in rest) * us)
        least.append(sum(group.least_ns for group in rest) * us)
    names.append("other: waking threads, ...")
    ran.append(step.other_ns * us)
    waited.append(0.0)
    least.append(0.0)
    places = range(len(names))
    axis.barh(places, ran, color="tab:gray", label="running")
    axis.barh(places, waited, left=ran, color="tab:red", label="waiting for threads")
    axis.scatter(least, places, marker="|", s=120, color="black", label="roofline", zorder=3)
    axis.set_yticks(places, names, fontsize=8)
    axis.invert_yaxis()
    axis.set_xlabel("us of a step")
    axis.set_title(
        f"{step.kind}: {step.time_ns * us / 1e3:.2f} ms a step, roofline {step.least_ns * us / 1e3:.2f} ms"
    )
    axis.legend(loc="lower right", fontsize=8)
