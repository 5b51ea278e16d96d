"""Fills the table and the status line of docs/gpu.md from docs/results/gpu_check.json: they say what was measured.

    python bench/gpu/report.py --write              puts the table in
    python bench/gpu/report.py --check              exit status 1 where the page says anything else
    python bench/gpu/report.py --write --json FILE  takes a new result first: keeps it as docs/results/gpu_check.json

Without a result the table has stages, goals and "not yet measured". A dry run measures nothing and is refused.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import results
import stages

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "gpu.md"
RESULT = ROOT / "docs" / "results" / "gpu_check.json"
BEGIN = "<!-- measured: made by bench/gpu/report.py -->"
END = "<!-- measured: end -->"
STATUS_BEGIN = "<!-- status: made by bench/gpu/report.py -->"
STATUS_END = "<!-- status: end -->"
SPEEDS = (results.MET, results.MISSED, results.MEASURED)
GOAL_WORDS = {
    "decode": "at least 0.85 of the device's own copy at batch 64, context 4096",
    "prefill": "at least 0.9 of torch's fastest attention",
    "sampling": "faster than torch's operations",
    "step": "at least 1.3 times transformers' fastest",
}


def load(path: Path) -> dict[str, Any] | None:
    """Return a result, None where there is none. ValueError: it is a dry run's, or of another version."""
    if not path.exists():
        return None
    report: dict[str, Any] = json.loads(path.read_text())
    if report["dry_run"]:
        raise ValueError(
            f"{path} is a dry run's: nothing in it was measured; run bench/gpu_check.sh on a GPU"
        )
    if report["version"] != results.VERSION:
        raise ValueError(f"{path} has version {report['version']}, this report reads {results.VERSION}")
    return report


def status(report: dict[str, Any] | None) -> str:
    """Return in one line what was measured, for the page's top."""
    if report is None:
        return "**Measured so far: nothing.** The check has not run on a GPU; its goals are [in a table](#measured)."
    notes = {row["case"]: row["detail"] for row in report["stages"].get("environment", {}).get("rows", [])}
    what = f"{report['date']}: {results.summary(report)}; [more](#measured)."
    return f"**Measured** on {notes.get('GPU', 'a GPU')}, {what}"


def section(report: dict[str, Any] | None) -> str:
    """Return the page's measured part."""
    if report is None:
        rows = [
            (stage.title, GOAL_WORDS.get(stage.name, "right"), "not yet measured") for stage in stages.STAGES
        ]
        return table(("what", "goal", "result"), rows)
    notes = {row["case"]: row["detail"] for row in report["stages"].get("environment", {}).get("rows", [])}
    versions = ", ".join(
        f"{name} {notes[name]}" for name in ("torch", "triton", "transformers") if name in notes
    )
    lines = [f"{notes.get('GPU', 'a GPU')}, {versions}, {report['date']}. {results.summary(report)}.", ""]
    lines.append(table(("stage", "results right", "wrong", "not run", "ended"), stage_rows(report)))
    for name, stage in report["stages"].items():
        speeds = [
            row for row in stage["rows"] if row["verdict"] in SPEEDS and not row["case"].startswith("sweep")
        ]
        if speeds:
            lines += [
                "",
                table((name, "value", "beside", "ratio", "goal"), [speed_row(row) for row in speeds]),
            ]
    return "\n".join(lines)


def stage_rows(report: dict[str, Any]) -> list[tuple[object, ...]]:
    """Return a row a stage: how many results were right, wrong, not run, and how it ended."""
    rows: list[tuple[object, ...]] = []
    for name, stage in report["stages"].items():
        found = [row["verdict"] for row in stage["rows"]]
        counts = [found.count(verdict) for verdict in (results.RIGHT, results.WRONG, results.SKIPPED)]
        rows.append((name, *counts, f"{stage['status']}, {stage['seconds']} s"))
    return rows


def speed_row(row: dict[str, Any]) -> tuple[object, ...]:
    """Return what was measured as cells."""
    _, verdict, case, value, beside, _ = results.cells("", row)
    ratio = results.number(row["ratio"]) if row["ratio"] is not None else ""
    return case, value, beside, ratio, f"{row['goal']}: {verdict}" if row["goal"] else ""


def table(header: tuple[str, ...], rows: list[Any]) -> str:
    """Return a markdown table."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows])


def filled(page: str, report: dict[str, Any] | None) -> str:
    """Return the page with its measured parts replaced. ValueError: the marks are not there once each."""
    parts = ((STATUS_BEGIN, STATUS_END, status(report)), (BEGIN, END, section(report)))
    for begin, end, text in parts:
        if page.count(begin) != 1 or page.count(end) != 1:
            raise ValueError(f"{PAGE} has to have one line {begin!r} and one {end!r}")
        before, rest = page.split(begin)
        page = f"{before}{begin}\n\n{text}\n\n{end}{rest.split(end)[1]}"
    return page


def main() -> int:
    """Write or check the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--write", action="store_true")
    action.add_argument("--check", action="store_true")
    parser.add_argument("--json", type=Path, help="a result to keep first")
    options = parser.parse_args()
    try:
        if options.json and load(options.json) is not None:
            RESULT.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(options.json, RESULT)
        page = PAGE.read_text()
        wanted = filled(page, load(RESULT))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    if options.write:
        PAGE.write_text(wanted)
    elif page != wanted:
        print(
            "docs/gpu.md does not say what was measured; run python bench/gpu/report.py --write",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
