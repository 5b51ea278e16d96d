"""What a quantization says of the time that is left."""

from __future__ import annotations

import pytest
from plansmith.calibration import progress as module
from plansmith.calibration.progress import Progress, duration_text


def test_time_left_follows_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    told: list[tuple[str, int, int]] = []
    progress = Progress(lambda who, phase, done, total: told.append((phase, done, total)))
    progress.stage("searching")
    now += 50  # before the first step, e.g. imports: not counted
    step = progress.counter(4)
    for _ in range(4):
        step()
        now += 20
    assert told[0] == ("searching", 0, 0) and told[1] == ("searching", 0, 4)
    assert told[2] == ("searching, about 1 min 0 s left", 1, 4)
    assert told[4] == ("searching, about 20 s left", 3, 4)
    progress.counter(4)()  # a second pass begins anew
    assert told[5] == ("searching", 0, 4)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (59.4, "59 s"), (200, "3 min 20 s"), (3900, "1 h 5 min")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text
