"""Progress on a terminal: what runs stays in sight, however many there are."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable

import pytest
from plansmith.cli import _output
from plansmith.cli._output import BuildProgress
from rich.console import Console
from rich.progress import Progress

ROWS = 12


@pytest.fixture
def progress() -> BuildProgress:
    """Return progress on a terminal of 12 rows."""
    made = BuildProgress()
    made._bars = Progress(
        console=Console(file=io.StringIO(), force_terminal=True, height=ROWS, width=100), transient=True
    )
    return made


def in_sight(progress: BuildProgress) -> set[str]:
    return {task.fields["target"] for task in progress._bars.tasks if task.visible}


def in_thread(work: Callable[[], None]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def test_what_runs_stays_in_sight(progress: BuildProgress) -> None:
    progress("slow", "compiling", 0, 0)  # of this thread, and then silent
    ends = threading.Event()

    def others() -> None:
        for n in range(40):
            progress(f"unit {n}", "compiling", 1, 10)
            assert {f"unit {n}", "slow"} <= in_sight(progress)
            assert len(in_sight(progress)) <= ROWS - 1
            progress(f"unit {n}", "compiling", 10, 10)
        ends.set()

    in_thread(others)
    assert ends.is_set()
    assert in_sight(progress) == {"slow", *(f"unit {n}" for n in range(30, 40))}


def test_a_few_are_all_in_sight(progress: BuildProgress) -> None:
    for n in range(ROWS - 1):
        progress(f"unit {n}", "compiling", 10, 10)
    assert len(in_sight(progress)) == ROWS - 1


def test_work_that_goes_on_comes_back(progress: BuildProgress) -> None:
    for n in range(40):
        progress(f"unit {n}", "compiling", 1, 10)
    assert "unit 0" not in in_sight(progress)
    progress("unit 0", "writing", 1, 10)
    assert "unit 0" in in_sight(progress)


def test_lines_without_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(_output.time, "monotonic", lambda: now[0])
    with BuildProgress() as progress:
        for now[0] in (0.0, 9.0, 10.0):
            progress("unit", "compiling", int(now[0]), 10)
    assert capsys.readouterr().err.splitlines() == [
        "plansmith: unit: compiling (0 %)",
        "plansmith: unit: compiling (100 %)",
    ]
