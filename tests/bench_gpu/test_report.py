"""docs/gpu.md says what was measured, and no dry run can put a number into it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench" / "gpu"))

import report as report_module  # noqa: E402
import results  # noqa: E402
import stages  # noqa: E402


def made(**changes: Any) -> dict[str, Any]:
    """Return a result with one row of each kind."""
    import dataclasses

    rows = [
        results.Row("a", results.RIGHT, 0.5, "of the bound"),
        results.Row("b", results.MET, 4000.0, "GB/s", "copy", 4300.0, 0.93, 0.85),
        results.Row("sweep n64", results.MEASURED, 3000.0, "GB/s", minor=True),
        results.Row("c", results.SKIPPED, detail="no time left"),
    ]
    stage = {"status": "done", "seconds": 3.0, "rows": [dataclasses.asdict(row) for row in rows], "log": ""}
    report = {
        "version": results.VERSION,
        "dry_run": False,
        "seed": 0,
        "date": "2026-01-01",
        "goals": stages.GOALS,
        "stages": {"decode": stage},
        "seconds": 3.0,
    }
    return {**report, **changes}


def test_the_page_says_what_was_measured() -> None:
    command = [sys.executable, str(ROOT / "bench" / "gpu" / "report.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_result_fills_the_table() -> None:
    text = report_module.section(made())
    assert "| b | 4000 GB/s | copy 4300 | 0.93 | 0.85: met |" in text
    assert "sweep" not in text
    assert "| decode | 1 | 0 | 1 | done, 3.0 s |" in text


def test_the_status_line_says_whether_there_is_a_result() -> None:
    page = (ROOT / "docs" / "gpu.md").read_text()
    assert "**Measured so far: nothing.**" in report_module.filled(page, None)
    filled = report_module.filled(page, made())
    assert "**Measured** on a GPU, 2026-01-01: 1 right, 0 wrong; goals: 1 met, 0 missed;" in filled
    assert "Measured so far: nothing" not in filled and "| b | 4000 GB/s |" in filled


def test_without_a_result_nothing_is_claimed() -> None:
    text = report_module.section(None)
    assert text.count("not yet measured") == len(stages.STAGES)


def test_a_dry_run_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "dry.json"
    path.write_text(json.dumps(made(dry_run=True)))
    command = [sys.executable, str(ROOT / "bench" / "gpu" / "report.py"), "--write", "--json", str(path)]
    before = (ROOT / "docs" / "gpu.md").read_text()
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert "is a dry run's" in done.stderr
    assert (ROOT / "docs" / "gpu.md").read_text() == before


def test_wrong_results_and_stages_that_did_not_end_are_not_right() -> None:
    assert results.is_right(made())
    report = made()
    report["stages"]["decode"]["status"] = "timeout"
    assert not results.is_right(report)
    report = made()
    report["stages"]["decode"]["rows"][0]["verdict"] = results.WRONG
    assert not results.is_right(report)
    report = made()
    report["stages"]["decode"]["rows"] = []
    assert not results.is_right(report)
