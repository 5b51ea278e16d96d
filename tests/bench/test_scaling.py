"""bench/scaling.py on a tiny plan: real steps, and the rooflines beside them."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

import scaling
from plansmith.runtime.profile import CpuPeaks
from scaling import Effort, Point
from tiny_engines import build_tiny

PEAKS = CpuPeaks(1, 10e9, 5e9, 100e9, 400e9, 0.0)
SERIES = {
    "batch": [Point(1, 32), Point(2, 32), Point(4, 32)],
    "context, batch 2": [Point(2, 16), Point(2, 33), Point(2, 128)],
}


@pytest.fixture(scope="module")
def plan(tiny_checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = build_tiny(tiny_checkpoint("llama"), tmp_path_factory.mktemp("scaling") / "llama")
    return out / "targets" / "cpu" / "model.plan"


@pytest.fixture(scope="module")
def result(plan: Path) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scaling, "measure_peaks", lambda threads: PEAKS)
        return scaling.run_plan("fp32", plan, 1, SERIES, Effort(3, 5, 0.01))


def test_every_point_is_measured(result: dict[str, Any]) -> None:
    points = [(one["series"], one["batch"], one["context"]) for one in result["points"]]
    assert points == [(name, p.batch, p.context) for name, series in SERIES.items() for p in series]
    for one in result["points"]:
        assert 3 <= one["steps"] <= 5 and 0 < one["best_ms"] <= one["median_ms"]
        assert one["tokens_per_s"] == pytest.approx(1e3 * one["batch"] / one["median_ms"])
        assert one["roofline_share"] == pytest.approx(one["roofline_ms"] / one["median_ms"])
        # Each op takes the longer of two times, so their sum is no less than that of the whole step.
        whole = max(one["bytes"] / 10e9, one["operations"] / 100e9)
        assert 1e-3 * one["roofline_ms"] >= 0.999 * whole


def test_bytes_grow_with_rows_and_positions_by_arithmetic(result: dict[str, Any], plan: Path) -> None:
    points = {(one["series"], one["batch"], one["context"]): one for one in result["points"]}
    info = scaling.cpu_executor(plan, num_threads=1)
    described = info.describe()
    info.close()
    position = described.kv_bytes_per_block / described.tokens_per_block
    long, short = points["context, batch 2", 2, 128], points["context, batch 2", 2, 33]
    assert long["bytes"] - short["bytes"] == pytest.approx(2 * (128 - 33) * position)
    one, two, four = (points["batch", n, 32] for n in (1, 2, 4))
    assert four["bytes"] - two["bytes"] == pytest.approx(2 * (two["bytes"] - one["bytes"]))
    assert four["operations"] == pytest.approx(4 * one["operations"])


def test_tables_and_the_plot(result: dict[str, Any], tmp_path: Path) -> None:
    text = "\n".join(scaling.tables([result]))
    assert text.count("| fp32 |") == len(result["points"])
    scaling.draw([result], tmp_path / "s.svg")
    texts = " ".join(ET.parse(tmp_path / "s.svg").getroot().itertext())
    for words in ("fp32", "roofline", "ms of a decode step", "sequences", "context, batch 2"):
        assert words in texts


def test_points_that_need_too_much_memory_are_left_out(
    plan: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    points = [Point(1, 16), Point(8, 128)]
    assert scaling._fits(points, plan, 1 << 40) == points
    assert scaling._fits(points, plan, 1 << 14) == points[:1]
    assert "left out: Point(batch=8, context=128)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (["--precisions", ","], "--precisions ',' names none; there are fp32, bf16, int8, int4"),
        (["--precisions", "int8,int3"], "--precisions: no 'int3'; there are fp32, bf16, int8, int4"),
        (["--threads", "0"], "--threads 0: from 1 to the"),
        (["--threads", "100000"], "cores that this process may use"),
        (["--max-kv-gib", "0"], "--max-kv-gib 0.0: more than 0"),
    ],
)
def test_what_cannot_run_is_refused(given: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        scaling.parse(given)
    assert stopped.value.code == 2
    assert text in capsys.readouterr().err


def test_precisions_are_measured_once_each() -> None:
    assert scaling.parse(["--precisions", "int8, fp32,int8"]).precisions == ["int8", "fp32"]


def test_the_full_run_covers_what_it_says() -> None:
    series = scaling.series_of(quick=False)
    assert [p.batch for p in series["batch"]] == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    assert [p.context for p in series["context, batch 16"]] == [128, 256, 512, 1024, 2048, 4096, 8192]
