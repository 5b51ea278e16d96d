"""Rows of the check's result: how they are written, read, judged and shown."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

VERSION = 1
RIGHT, WRONG = "right", "WRONG"
MET, MISSED, MEASURED = "met", "missed", "measured"
DRY_RUN = "dry run"  # it ran, and what it took means nothing
SKIPPED, NOTE = "skipped", "note"
VERDICTS = (RIGHT, WRONG, MET, MISSED, MEASURED, DRY_RUN, SKIPPED, NOTE)


@dataclasses.dataclass(frozen=True)
class Row:
    """One finding.

    case : what was run, in words
    verdict : one of VERDICTS: right and WRONG are about results, met and missed about goals of speed
    value, unit : what was measured, or the largest error
    peer, peer_value : what it is beside, in the same unit
    minor : kept in the JSON and not shown in the table
    ratio : value over peer_value (of times: peer_value over value), so that more is better; None where there is no peer
    """

    case: str
    verdict: str
    value: float | None = None
    unit: str = ""
    peer: str = ""
    peer_value: float | None = None
    ratio: float | None = None
    goal: float | None = None
    detail: str = ""
    minor: bool = False


def append_row(path: Path, row: Row) -> None:
    """Add a row to a stage's file at once, so that it outlives a crash."""
    with path.open("a") as file:
        file.write(json.dumps(_finite(dataclasses.asdict(row))) + "\n")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a stage's file, without a last one that was cut off."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows


def _finite(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row with text for numbers that JSON has not."""
    return {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}


def write(report: dict[str, Any], path: Path) -> None:
    """Write the report, whole or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(report, indent=1) + "\n")
    temporary.replace(path)


def verdicts(report: dict[str, Any]) -> list[str]:
    """Return the verdicts of all rows."""
    return [row["verdict"] for stage in report["stages"].values() for row in stage["rows"]]


def is_right(report: dict[str, Any]) -> bool:
    """Return whether every stage ended, found something, and no result was wrong."""
    ended = all(stage["status"] == "done" and stage["rows"] for stage in report["stages"].values())
    return ended and WRONG not in verdicts(report)


def summary(report: dict[str, Any]) -> str:
    """Return one line: how many results were right and wrong, goals met and missed, stages that did not end."""
    found = verdicts(report)
    ends = [f"{name} ({s['status']})" for name, s in report["stages"].items() if s["status"] != "done"]
    text = f"{found.count(RIGHT)} right, {found.count(WRONG)} wrong; "
    text += f"goals: {found.count(MET)} met, {found.count(MISSED)} missed"
    text += f"; not ended: {', '.join(ends)}" if ends else ""
    return text + ("; dry run: no time here is a measurement" if report["dry_run"] else "")


HEADER = ("stage", "verdict", "case", "value", "beside", "ratio")


def table(report: dict[str, Any], most_right: int = 3) -> str:
    """Return the rows as a text table, the result of the check at a glance.

    most_right : of a stage's right rows as many are shown, the others are counted: what is wrong or measured matters
    """
    rows: list[Sequence[str]] = [HEADER]
    for name, stage in report["stages"].items():
        right = [row for row in stage["rows"] if row["verdict"] == RIGHT]
        hidden = right[most_right:] if len(right) > most_right + 1 else []
        shown = [row for row in stage["rows"] if not row["minor"] and row not in hidden]
        rows += [cells(name, row) for row in shown]
        if hidden:
            rows.append((name, RIGHT, f"... and {len(hidden)} more", "", "", ""))
        if stage["status"] != "done":
            rows.append((name, stage["status"].upper(), "the stage itself", f"{stage['seconds']} s", "", ""))
    rows = [
        (*row[:2], shortened(row[2], MOST_CASE), row[3], shortened(row[4], MOST_BESIDE), row[5])
        for row in rows
    ]
    # What stands last in its row needs no room to its right.
    widths = [max(len(row[i]) for row in rows if any(row[i + 1 :])) for i in range(len(HEADER) - 1)] + [0]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


MOST_CASE, MOST_BESIDE = 60, 34


def cells(stage: str, row: dict[str, Any]) -> tuple[str, ...]:
    """Return a row as text, in HEADER's order."""
    beside = f"{row['peer']} {number(row['peer_value'])}".strip() if row["peer"] else ""
    if row["verdict"] == WRONG and row["value"] is not None:
        beside = row["detail"]
    ratio = (
        number(row["ratio"]) + (f" (goal {row['goal']})" if row["goal"] else "")
        if row["ratio"] is not None
        else ""
    )
    value = (
        f"{number(row['value'])} {row['unit']}".strip()
        if row["value"] is not None
        else shortened(row["detail"], 50)
    )
    return (stage, row["verdict"], row["case"], value, beside, ratio)


def shortened(text: str, most: int) -> str:
    """Return a text of `most` characters at most; the whole of it is in the JSON."""
    return text if len(text) <= most else text[: most - 3] + "..."


def number(value: float | str | None) -> str:
    """Return a number with three digits that count."""
    if value is None or isinstance(value, str):
        return value or ""
    if value == 0 or 1e-2 <= abs(value) < 1e6:
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value:.1e}"
