"""The picture of `plansmith size --plot`: memory over sequences or context, with each device's limit as a line."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..builder.targets.registry import CPU
from ..runtime.admission import room_in
from ..runtime.control_groups import available_memory_bytes
from ..runtime.errors import InvalidArgumentError
from ..sizing.memory import KV_FRACTION, Load
from ._files import check_output, whole_file
from ._roofline_plot import SUFFIXES, pyplot, save
from ._size_plans import Plan
from ._size_rows import plan_use

OVER = ("sequences", "context")
_POINTS = 48
_NAMED = 3  # devices of a curve in the legend


def check(path: Path, over: str) -> None:
    """Refuse a file that could not be written, and a variable that there is not, before any work."""
    if over not in OVER:
        raise InvalidArgumentError(f"--plot-over {over!r} is not known; choose one of {', '.join(OVER)}")
    check_output("--plot", path, SUFFIXES)
    pyplot()


def draw(
    plans: Sequence[Plan],
    load: Load,
    path: Path,
    over: str,
    max_context: int,
    memory_bytes: int | None,
    threads: int = 0,
) -> None:
    """Write the picture of plans.

    over : "sequences", up to max_batch_size, or "context", up to max_context
    memory_bytes : of the device, instead of the GPUs' own; threads : of the cpu target, 0 = one a core
    raises UnsupportedError without matplotlib, OSError when the file cannot be written
    """
    figure = size_figure(plans, load, over, max_context, memory_bytes, threads)
    with whole_file(path) as out:
        save(figure, out, path.suffix.lower()[1:])


def size_figure(
    plans: Sequence[Plan],
    load: Load,
    over: str,
    max_context: int,
    memory_bytes: int | None = None,
    threads: int = 0,
) -> Any:
    """Return that picture as a figure of matplotlib; a curve crosses a limit where the table says that no more fit."""
    figure, axis = pyplot().subplots(figsize=(10, 6))
    loads = list(_loads(load, over, max_context))
    for label, plan in _lines(plans).items():
        totals = [_needed(plan, one, threads) / 1e9 for one in loads]
        axis.plot([getattr(one, over) for one in loads], totals, label=label)
    for limit, names in _limits(plans, memory_bytes).items():
        axis.axhline(limit / 1e9, color="tab:gray", linestyle="--", linewidth=0.8)
        axis.text(
            1.01, limit / 1e9, ", ".join(names), transform=axis.get_yaxis_transform(), fontsize=7, va="center"
        )
    other = f"{load.context} tokens each" if over == "sequences" else f"{load.sequences} at a time"
    axis.set_xlabel(f"sequences ({other})" if over == "sequences" else f"tokens of a sequence ({other})")
    axis.set_ylabel("memory, GB")
    share = f"{KV_FRACTION:g}"
    axis.set_title(
        f"of a GPU's free memory the KV cache gets {share}, so it counts as 1 / {share}", fontsize=8
    )
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


def _needed(plan: Plan, load: Load, threads: int) -> float:
    """Return the memory that a device must have for a load, beside what is not an engine's on the cpu target."""
    use = plan_use(plan, load, threads)
    return use.total if plan.sku is None else use.beside_kv + use.kv / KV_FRACTION


def _lines(plans: Sequence[Plan]) -> dict[str, Plan]:
    """Return label -> plan, one for all devices on which a recipe takes the same; the label names them."""
    found: dict[tuple[str, str], list[Plan]] = {}
    for plan in plans:
        kind = CPU if plan.sku is None else "TensorRT-RTX" if plan.gathers_pages else "TensorRT"
        found.setdefault((plan.precision, kind), []).append(plan)
    if len({kind for _, kind in found}) == 1:
        return {name: same[0] for (name, _), same in found.items()}
    return {_label(name, kind, same): same[0] for (name, kind), same in found.items()}


def _label(name: str, kind: str, plans: Sequence[Plan]) -> str:
    if kind == CPU:
        return f"{name}, {kind}"
    devices = list(dict.fromkeys(plan.device for plan in plans))
    more = f" and {len(devices) - _NAMED} more" if len(devices) > _NAMED else ""
    return f"{name}, {kind} ({', '.join(devices[:_NAMED])}{more})"


def _limits(plans: Sequence[Plan], memory_bytes: int | None) -> dict[int, list[str]]:
    """Return memory -> names of the devices that have that much; of cpu what an engine may take."""
    found: dict[int, list[str]] = {}
    for plan in plans:
        if plan.sku is None:
            limit, name = room_in(memory_bytes or available_memory_bytes()), CPU
        else:
            limit = memory_bytes or plan.sku.memory_bytes
            name = plan.device if memory_bytes is None else "memory"
        if not any(name in names for names in found.values()):
            found.setdefault(limit, []).append(name)
    return found
