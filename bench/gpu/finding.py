"""What a stage calls to tell what it found: each call judges one result and writes one row at once."""

from __future__ import annotations

import contextlib
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import torch
from results import DRY_RUN, MEASURED, MET, MISSED, NOTE, RIGHT, SKIPPED, WRONG, Row, append_row


class Findings:
    """Rows of one stage. One thread; `limit_s` is the time that the stage has, from its construction."""

    def __init__(self, path: Path, dry_run: bool, limit_s: float) -> None:
        """Rows go to the end of `path`, one JSON object a line."""
        self._path, self._dry_run = path, dry_run
        self._end = time.monotonic() + limit_s
        self.rows: list[Row] = []

    def seconds_left(self) -> float:
        """Return what is left of the stage's time."""
        return self._end - time.monotonic()

    def add(self, row: Row) -> None:
        """Keep a row and write it."""
        self.rows.append(row)
        append_row(self._path, row)

    def equal(self, case: str, got: torch.Tensor, want: torch.Tensor) -> None:
        """Judge a result that has to be the same, element for element (shapes too; a NaN equals a NaN)."""
        got, want = got.detach().cpu(), want.detach().cpu()
        if got.shape != want.shape:
            self.add(Row(case, WRONG, detail=f"shape {tuple(got.shape)}, expected {tuple(want.shape)}"))
            return
        same = (got == want) | ((got != got) & (want != want))
        wrong = int((~same).sum())
        detail = ""
        if wrong:
            at = tuple(int(i) for i in (~same).nonzero()[0])
            detail = f"{wrong} of {got.numel()} differ, the first at {at}: {got[at].item()}, expected {want[at].item()}"
        self.add(Row(case, WRONG if wrong else RIGHT, float(wrong), "differ", detail=detail))

    def close(self, case: str, got: torch.Tensor, want: torch.Tensor, bound: float | torch.Tensor) -> None:
        """Judge a result by its largest error over its bound, which may be each element's own; NaN never passes."""
        got, want = got.detach().cpu().double(), want.detach().cpu().double()
        if got.shape != want.shape:
            self.add(Row(case, WRONG, detail=f"shape {tuple(got.shape)}, expected {tuple(want.shape)}"))
            return
        limit = torch.as_tensor(bound, dtype=torch.float64).expand_as(want)
        share = (got - want).abs() / limit
        worst = float(share.nan_to_num(nan=float("inf")).max()) if share.numel() else 0.0
        verdict = RIGHT if worst <= 1 else WRONG
        detail = "" if verdict == RIGHT else f"error of {worst:.3g} times the bound"
        self.add(Row(case, verdict, worst, "of the bound", detail=detail))

    def rate(
        self,
        case: str,
        value: float,
        unit: str,
        peer: str = "",
        peer_value: float | None = None,
        goal: float | None = None,
        detail: str = "",
        less_is_better: bool = False,
        minor: bool = False,
    ) -> None:
        """Tell a speed and what it is beside; a goal is met where the ratio reaches it. A dry run tells none."""
        if self._dry_run:
            self.add(Row(case, DRY_RUN, unit=unit, peer=peer, minor=minor))
            return
        ratio = None
        if peer_value:
            ratio = peer_value / value if less_is_better else value / peer_value
        verdict = MEASURED
        if goal is not None and ratio is not None:
            verdict = MET if ratio >= goal else MISSED
        self.add(Row(case, verdict, value, unit, peer, peer_value, ratio, goal, detail, minor))

    def note(self, case: str, text: str, minor: bool = False) -> None:
        """Tell something in words."""
        self.add(Row(case, NOTE, detail=text, minor=minor))

    def skip(self, case: str, reason: str, minor: bool = False) -> None:
        """Tell that something was not run, and why."""
        self.add(Row(case, SKIPPED, detail=reason, minor=minor))

    @contextlib.contextmanager
    def guarded(self, case: str) -> Iterator[None]:
        """Turn an exception of the block into a wrong row, so that the cases after it run.

        Not for errors of the device itself: after one of those every later call fails as well, and says so.
        """
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.add(Row(case, WRONG, detail=f"{type(error).__name__}: {error}"[:300]))
