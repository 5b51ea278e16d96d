"""A profile as a picture: the roofline with a point an op, and a bar of each op's time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

from ..runtime.errors import UnsupportedError
from ..runtime.profile import ARITHMETICS, CpuPeaks
from ._plot_labels import Point, place_labels
from ._profile import EngineProfile, StepProfile
from ._profile_text import counted
from ._profile_warnings import UNITS

_COLORS = {"f32": "tab:blue", "int8": "tab:orange", "bf16": "tab:green"}
_LABELLED_SHARE = 0.02  # of a step's time: names of smaller points would only cover each other
_BAR_SHARE = 0.005  # likewise: shorter ones are one bar together
_MAX_BARS = 20
SUFFIXES = (".svg", ".png")  # that the command takes


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


def save(figure: Any, path: Path | BinaryIO, kind: str | None = None) -> None:
    """Write a figure and forget it.

    kind : "svg" or another format of matplotlib; None = what the name ends in, for a path alone
    """
    kind = kind or (path.suffix[1:] if isinstance(path, Path) else None)
    metadata = {"Date": None} if kind == "svg" else None
    try:
        figure.savefig(path, format=kind, metadata=metadata, bbox_inches="tight")
    finally:
        pyplot().close(figure)


def draw_profile(profile: EngineProfile, path: Path | BinaryIO, kind: str | None = None) -> None:
    """Write the picture of a profile: a row for each kind of step.

    kind : as `save` takes it
    raises UnsupportedError without matplotlib, OSError when the file cannot be written
    """
    save(profile_figure(profile), path, kind)


def profile_figure(profile: EngineProfile) -> Any:
    """Return that picture as a figure of matplotlib."""
    num_rows = max(1, len(profile.steps))
    figure, axes = pyplot().subplots(num_rows, 2, figsize=(15, 6 * num_rows), squeeze=False)
    points = []
    for row, step in zip(axes, profile.steps, strict=False):
        points.append(_draw_points(row[0], profile.peaks, step))
        _draw_bars(row[1], step)
    for i, warning in enumerate(profile.warnings):
        figure.text(0.01, -0.02 * (i + 1), f"warning: {warning.text}", color="tab:red", fontsize=8)
    figure.tight_layout()
    for row, some in zip(axes, points, strict=False):
        place_labels(row[0], some)  # last: it needs to know where everything else is
    return figure


def _draw_roofs(axis: Any, peaks: CpuPeaks, low: float, high: float, arithmetics: Sequence[str]) -> None:
    """Draw the memory roof and those of some kinds of arithmetic, for `low` to `high` operations a byte."""
    gb_per_s = peaks.read_bytes_per_s / 1e9
    ridges = [low]
    for arithmetic in arithmetics:
        peak = peaks.ops_per_s(arithmetic) / 1e9
        if peak == 0:
            continue
        ridges.append(min(max(peak / gb_per_s, low), high))
        label = f"{arithmetic}: {peak:.0f} {UNITS[arithmetic]}"
        axis.plot([ridges[-1], high], [peak, peak], color=_COLORS[arithmetic], label=label)
    end = max(ridges) if len(ridges) > 1 else high
    axis.plot(
        [low, end],
        [low * gb_per_s, end * gb_per_s],
        color="black",
        label=f"memory: {gb_per_s:.1f} GB/s",
    )
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel("operations a byte")
    axis.set_ylabel("GOP/s")
    axis.grid(True, which="both", alpha=0.2)


def _draw_points(axis: Any, peaks: CpuPeaks, step: StepProfile) -> list[Point]:
    """Draw one kind of step: an op is a point as large as its time. Returns the points, named from a share on."""
    groups = [one for one in step.groups if one.operations and one.bytes and one.time_ns]
    intensities = [one.intensity for one in groups] or [1.0]
    used = [name for name in ARITHMETICS if any(one.arithmetic == name for one in groups)]
    _draw_roofs(axis, peaks, min(intensities) / 3, max(*intensities, 10.0) * 3, used)
    whole = max(1, step.time_ns)
    points = []
    for group in groups:
        name = f"{group.name} ({group.kind})" if group.time_ns >= _LABELLED_SHARE * whole else ""
        x, y = group.intensity, group.operations / group.time_ns
        point = Point(x, y, 10 + 1500 * group.time_ns / whole, name)
        axis.scatter(x, y, s=point.area, color=_COLORS[group.arithmetic], alpha=0.5, edgecolors="black")
        points.append(point)
    nameless = sum(not point.name for point in points)
    if nameless:
        text = f"{counted(nameless, 'op')} below {_LABELLED_SHARE:.0%} of a step, without a name"
        axis.scatter([], [], s=10, color="white", edgecolors="black", label=text)
    axis.legend(loc="upper left", fontsize=8)
    axis.set_title(f"{step.kind} steps, {counted(step.tokens / step.steps, 'token')} in each")
    return points


def _draw_bars(axis: Any, step: StepProfile) -> None:
    """Draw each op's time of a step, running and waiting, and what of it the roofline leaves."""
    least_shown = _BAR_SHARE * step.time_ns
    shown = [group for group in step.groups[:_MAX_BARS] if group.time_ns >= least_shown]
    rest = step.groups[len(shown) :]
    unit, scale = ("ms", 1e-6) if step.time_ns >= 10e6 * step.steps else ("us", 1e-3)
    scale /= step.steps
    names = [group.label for group in shown]
    fields = ("ran_ns", "waited_ns", "least_ns")
    sums = [[getattr(one, name) for one in shown] for name in fields]
    if rest:
        names.append(counted(len(rest), "other op"))
        for numbers, name in zip(sums, fields, strict=True):
            numbers.append(sum(getattr(one, name) for one in rest))
    names.append("other: waking threads, ...")
    ran, waited, least = ([scale * ns for ns in numbers] for numbers in sums)
    ran.append(scale * step.other_ns)
    waited.append(0.0)
    places = range(len(names))
    axis.barh(places, ran, color="tab:gray", label="running")
    axis.barh(places, waited, left=ran, color="tab:red", label="waiting for threads")
    axis.scatter(least, places[:-1], marker="|", s=120, color="black", label="roofline", zorder=3)
    axis.set_yticks(places, names, fontsize=8)
    axis.invert_yaxis()
    axis.set_xlabel(f"{unit} of a step", loc="left")
    whole, roofline = step.time_ns * scale, step.least_ns * scale
    axis.set_title(f"{step.kind}: {whole:.4g} {unit} a step, roofline {roofline:.4g} {unit}")
    # Below the bars, of which any may be the longest.
    axis.legend(loc="upper right", bbox_to_anchor=(1, -0.05), ncols=3, fontsize=8)
