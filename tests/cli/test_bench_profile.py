"""plansmith bench --profile: the table, the JSON, the plot, and the grouping of ops behind them."""

from __future__ import annotations

import builtins
import dataclasses
import json
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from plansmith.cli import bench
from plansmith.cli._profile import EngineProfile, engine_profile
from plansmith.runtime.profile import CpuPeaks, OpProfile
from plansmith.runtime.stats import EngineStats

Run = Callable[..., Any]
PEAKS = CpuPeaks(2, 10e9, 5e9, 100e9, 400e9, 0.0)
FLAGS = ("--requests", 3, "--input-len", 9, "--output-len", 6, "--threads", 1)


@pytest.fixture(autouse=True)
def quick_peaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take known peaks for the machine's: measuring them is tested elsewhere, and takes a second each time."""
    monkeypatch.setattr(bench, "measure_peaks", lambda threads, isa: PEAKS)


def op(name: str, kind: str, **fields: Any) -> OpProfile:
    zero = OpProfile(name, kind, "", "decode", "f32", 0, 0, *[0] * 7)
    return dataclasses.replace(zero, **fields)


def stats(**fields: int) -> EngineStats:
    return EngineStats(**({field.name: 0 for field in dataclasses.fields(EngineStats)} | fields))


def known() -> EngineProfile:
    """Return a profile of round numbers: 10 steps of 100 us."""
    product = {"weights": "int8", "arithmetic": "int8", "out_features": 8, "in_features": 4, "calls": 10}
    records = [
        op("", "step", calls=10, rows=20, time_ns=1_000_000),
        op(
            "layers.0.o", "linear", **product, time_ns=200_000, wait_ns=100_000, bytes=10**6, operations=10**6
        ),
        op("layers.11.o", "linear", **product, time_ns=100_000, bytes=10**6, operations=3 * 10**7),
        op("lm_head", "linear", **product, time_ns=300_000, bytes=2 * 10**6, operations=10**6),
        op("layers.0.o", "lora", calls=10),
    ]
    return engine_profile(records, PEAKS, stats(schedule_time_ns=5), stats(schedule_time_ns=250_005))


def test_ops_of_all_layers_are_one_line() -> None:
    (step,) = known().steps
    assert (step.steps, step.tokens, step.time_ns) == (10, 20, 1_000_000)
    assert [(one.name, one.num_ops, one.ran_ns, one.waited_ns) for one in step.groups] == [
        ("o", 2, 300_000, 100_000),
        ("lm_head", 1, 300_000, 0),
    ]
    assert (step.ran_ns, step.waited_ns, step.other_ns) == (600_000, 100_000, 300_000)
    # 1 MB takes 100 us of 10 GB/s, twice; 30 MOP take 75 us of 400 GOP/s, which is less.
    assert step.groups[0].least_ns == pytest.approx(200_000)
    assert step.groups[0].roofline_share == pytest.approx(0.5)
    assert step.groups[0].intensity == pytest.approx(15.5)


def test_the_table_says_what_a_step_takes() -> None:
    text = "\n".join(known().lines())
    line = next(one for one in text.splitlines() if one.startswith("o, linear int8 8x4"))
    assert line.split()[4:] == ["2", "40.0", "10.0", "40.0%", "0.200", "5.0", "3.100", "77.5", "50%"]
    words = {one.split("  ")[0]: one.split() for one in text.splitlines()}
    assert words["other: waking threads, ..."][-2:] == ["30.0", "30.0%"]
    assert words["of it waiting for threads"][-2:] == ["10.0", "10.0%"]
    assert words["a step"][2:5] == ["3", "100.0", "10.0"]  # ops, us, waiting
    outside = next(one for one in text.splitlines() if one.startswith("the core outside it"))
    assert outside.split()[-3:] == ["0.2", "ms", "20.0%"]  # 0.25 of 1.25 ms
    assert "lora" not in text and "drafting" not in text


def test_the_table_of_a_real_run(plansmith: Run, engine_dir: Path) -> None:
    result = plansmith("bench", engine_dir, *FLAGS, "--profile")
    assert result.status == 0
    for words in (
        "generated tokens/s",
        "Decode steps: one new token a sequence. ",
        "Context steps: prompts",
        "lm_head, linear",
        "attn, ",
        "roofline",
        "of it waiting for threads",
        "the core outside it",
        "int8 400 GOP/s",
    ):
        assert words in result.out


def test_json_beside_the_result_and_in_a_file(plansmith: Run, engine_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    result = plansmith("bench", engine_dir, *FLAGS, "--profile-json", path, "--json")
    fields = json.loads(result.out)
    assert result.status == 0 and fields["profile"] == json.loads(path.read_text())
    steps = {one["kind"]: one for one in fields["profile"]["steps"]}
    assert sum(one["steps"] for one in steps.values()) == fields["steps"]
    assert sum(one["tokens"] for one in steps.values()) == 27 + 3 * 5
    for step in steps.values():
        parts = step["run_us"] + step["wait_us"] + step["other_us"]
        assert parts == pytest.approx(step["time_us"], rel=0.02)
        assert sum(one["run_us"] for one in step["ops"]) == pytest.approx(step["run_us"])
        assert step["roofline_us"] == pytest.approx(sum(one["roofline_us"] for one in step["ops"]))
    assert "profile" not in json.loads(plansmith("bench", engine_dir, *FLAGS, "--json").out)


def test_the_plot_is_xml_and_names_the_ops(plansmith: Run, engine_dir: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "p.svg"
    result = plansmith("bench", engine_dir, *FLAGS, "--profile-plot", path)
    assert result.status == 0 and "Decode steps" in result.out
    texts = " ".join(ET.parse(path).getroot().itertext())
    for words in (
        "lm_head, linear",
        "attn, ",
        "decode steps",
        "context steps",
        "memory: 10.0 GB/s",
        "roofline",
    ):
        assert words in texts


def test_without_matplotlib_nothing_is_run(
    plansmith: Run, engine_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def missing(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.split(".")[0] == "matplotlib":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    result = plansmith("bench", engine_dir, *FLAGS, "--profile-plot", tmp_path / "p.svg")
    assert result.status == 1 and "pip install 'plansmith[plot]'" in result.err and result.out == ""


def test_weights_are_where_the_flag_says(plansmith: Run, engine_dir: Path) -> None:
    assert plansmith("bench", engine_dir, *FLAGS, "--weights", "mapped").status == 0
    wrong = plansmith("bench", engine_dir, *FLAGS, "--weights", "nowhere")
    assert wrong.status == 1 and "auto, mapped, huge_pages" in wrong.err
