"""The picture of `plansmith size --plot`: memory over sequences or context, with each device's limit as a line."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..runtime.errors import InvalidArgumentError
from ..sizing.memory import Load
from ._files import check_output, whole_file
from ._roofline_plot import SUFFIXES, pyplot, save
from ._size_plans import Plan
from ._size_rows import plan_use

OVER = ("sequences", "context")
_POINTS = 48


def check(path: Path, over: str) -> None:
    """Refuse a file that could not be written, and a variable that there is not, before any work."""
    if over not in OVER:
        raise InvalidArgumentError(f"--plot-over {over!r} is not known; choose one of {', '.join(OVER)}")
    check_output("--plot", path, SUFFIXES)
    pyplot()


def draw(
    plans: Sequence[Plan], load: Load, path: Path, over: str, max_context: int, memory_bytes: int | None
) -> None:
    """Write the picture of plans.

    over : "sequences", up to max_batch_size, or "context", up to max_context
    memory_bytes : of the device, instead of the GPUs' own
    raises UnsupportedError without matplotlib, OSError when the file cannot be written
    """
    figure = size_figure(plans, load, over, max_context, memory_bytes)
    with whole_file(path) as out:
        save(figure, out, path.suffix.lower()[1:])


def size_figure(
    plans: Sequence[Plan], load: Load, over: str, max_context: int, memory_bytes: int | None = None
) -> Any:
    """Return that picture as a figure of matplotlib."""
    figure, axis = pyplot().subplots(figsize=(10, 6))
    loads = list(_loads(load, over, max_context))
    for label, plan in _lines(plans).items():
        totals = [plan_use(plan, one).total / 1e9 for one in loads]
        axis.plot([getattr(one, over) for one in loads], totals, label=label)
    for limit, names in _limits(plans, memory_bytes).items():
        axis.axhline(limit / 1e9, color="tab:gray", linestyle="--", linewidth=0.8)
        axis.text(
            1.01, limit / 1e9, ", ".join(names), transform=axis.get_yaxis_transform(), fontsize=7, va="center"
        )
    other = f"{load.context} tokens each" if over == "sequences" else f"{load.sequences} at a time"
    axis.set_xlabel(f"sequences ({other})" if over == "sequences" else f"tokens of a sequence ({other})")
    axis.set_ylabel("memory, GB")
    axis.set_ylim(bottom=0)
    axis.legend(loc="upper left")
    figure.tight_layout()
    return figure


def _loads(load: Load, over: str, max_context: int) -> Iterator[Load]:
    """Yield loads along the axis, evenly, the ends included."""
    first, last = (1, load.max_batch_size) if over == "sequences" else (load.tokens_per_block, max_context)
    steps = min(_POINTS, max(1, last - first))
    for value in dict.fromkeys(first + (last - first) * n // steps for n in range(steps + 1)):
        changed = {over: value} if over == "sequences" else {over: value, "max_seq_len": 0}
        yield dataclasses.replace(load, **changed)


def _lines(plans: Sequence[Plan]) -> dict[str, Plan]:
    """Return label -> plan, one for all devices on which a recipe takes the same."""
    found: dict[tuple[str, str], Plan] = {}
    for plan in plans:
        kind = "cpu" if plan.sku is None else "TensorRT-RTX" if plan.gathers_pages else "TensorRT"
        found.setdefault((plan.precision, kind), plan)
    several = len({kind for _, kind in found}) > 1
    return {f"{name}, {kind}" if several else name: plan for (name, kind), plan in found.items()}


def _limits(plans: Sequence[Plan], memory_bytes: int | None) -> dict[int, list[str]]:
    """Return memory -> names of the GPUs that have that much."""
    if memory_bytes is not None:
        return {memory_bytes: ["memory"]}
    found: dict[int, list[str]] = {}
    for plan in plans:
        if plan.sku is not None and plan.device not in found.setdefault(plan.sku.memory_bytes, []):
            found[plan.sku.memory_bytes].append(plan.device)
    return found
