"""plansmith bench --profile: the table, the JSON, the plot, and the grouping of ops behind them."""

from __future__ import annotations

import builtins
import dataclasses
import itertools
import json
import os
import re
import threading
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from plansmith.cli import _roofline_plot, bench
from plansmith.cli._files import check_output, whole_file
from plansmith.cli._profile import EngineProfile, engine_profile
from plansmith.cli._profile_text import profile_lines
from plansmith.runtime.errors import InvalidArgumentError
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
    return engine_profile(records, [PEAKS], stats(schedule_time_ns=5), stats(schedule_time_ns=250_005))


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
    text = "\n".join(profile_lines(known()))
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


def test_every_field_of_the_json_is_documented() -> None:
    text = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
    rows = text.partition("| field | unit | meaning |")[2].partition("\n\n")[0]
    documented = {word.rpartition(".")[2] for word in re.findall("`([a-z0-9_.\\\\[\\]]+)`", rows)}
    profile = profile_of([PEAKS, peaks(read_bytes_per_s=20e9)]).to_dict()
    names = {*profile, *profile["peaks"], *profile["warnings"][0], *profile["steps"][0]}
    names |= {*profile["steps"][0]["ops"][0]}
    containers = {"peaks", "peaks_measured", "warnings", "steps", "ops"}  # named in front of what is in them
    assert names - containers <= documented
    assert all(f"{one}[]." in rows or f"`{one}." in rows or f"`{one}[]`" in rows for one in containers)


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


def peaks(**rates: float) -> CpuPeaks:
    return dataclasses.replace(PEAKS, **rates)


def profile_of(measured: list[CpuPeaks], **fields: Any) -> EngineProfile:
    """Return a profile of one step of 1 ms with one op of 0.1 ms."""
    records = [
        op("", "step", calls=1, rows=1, time_ns=1_000_000),
        op("layers.0.o", "linear", **({"calls": 1, "time_ns": 100_000} | fields)),
    ]
    return engine_profile(records, measured, stats(), stats(), num_threads=2)


def test_peaks_that_differ_are_told() -> None:
    profile = profile_of([PEAKS, peaks(read_bytes_per_s=12.4e9)])
    assert profile.warnings == () and profile.peaks.read_bytes_per_s == 12.4e9
    profile = profile_of([PEAKS, peaks(read_bytes_per_s=20e9, int8_ops_per_s=100e9)])
    (warning,) = profile.warnings
    assert warning.kind == "peaks_differ"
    for words in ("read 10 and 20 GB/s", "int8 400 and 100 GOP/s", "run again on a quiet machine"):
        assert words in warning.text
    assert "f32" not in warning.text  # which was the same
    lines = list(profile_lines(profile))
    assert lines[1] == f"warning: {warning.text}"
    fields = profile.to_dict()
    assert fields["warnings"] == [{"kind": "peaks_differ", "text": warning.text}]
    assert [one["read_bytes_per_s"] for one in fields["peaks_measured"]] == [10e9, 20e9]
    assert fields["peaks"]["read_bytes_per_s"] == 20e9 and fields["num_threads"] == 2


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"operations": 12_000_000}, True),  # 100 GFLOP/s do 10 million in 0.1 ms
        ({"operations": 10_000_000}, False),
        ({"bytes": 1_200_000, "weights": "int8"}, True),  # 10 GB/s read 1 MB
        ({"bytes": 1_200_000, "weights": "int8", "activation_bytes": 300_000}, False),
        ({"bytes": 1_200_000}, False),  # keys and values, or rows: from a cache
        ({"operations": 12_000, "time_ns": 100}, False),  # too short to be sure of
    ],
)
def test_what_is_faster_than_the_machine_is_told(fields: dict[str, Any], told: bool) -> None:
    profile = profile_of([PEAKS], **fields)
    assert [one.kind for one in profile.warnings] == (["above_peaks"] if told else [])
    text = "\n".join(profile_lines(profile))
    assert ("120% of the roofline" in text) == told
    is_cached = fields.get("bytes", 0) > 0 and not told
    assert ("that were in caches" in text) == is_cached


def test_threads_beyond_the_cores_are_told_and_do_not_measure() -> None:
    profile = dataclasses.replace(profile_of([peaks(num_threads=1)]), num_threads=64)
    assert next(profile_lines(profile)) == (
        "This machine at most (1 thread, one a core that this process may use; the engine has 64): read 10.0 GB/s, "
        "f32 100 GFLOP/s, int8 400 GOP/s"
    )


BAD_PATHS = [
    ("--profile-plot", "p.foo", "ends in .foo; give a name that ends in .svg or .png"),
    ("--profile-plot", "p", "has no ending; give a name that ends in .svg or .png"),
    ("--profile-plot", "folder.svg", "is a directory"),
    ("--profile-plot", "absent/p.svg", "there is no directory"),
    ("--profile-json", "folder.svg", "is a directory"),
    ("--profile-json", "absent/p.json", "there is no directory"),
    ("--profile-json", "/proc/p.json", "cannot be written"),
    ("--profile-json", "a" * 300, "cannot be written: File name too long"),
    ("--profile-json", "w.json", "--profile-json and --workload are both"),
]


@pytest.mark.parametrize(("flag", "name", "words"), BAD_PATHS)
def test_a_path_that_cannot_be_written_ends_it_before_the_run(
    plansmith: Run, tmp_path: Path, flag: str, name: str, words: str
) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "folder.svg").mkdir()
    (tmp_path / "w.json").write_text("[]")
    # There is no engine either, which is found later.
    result = plansmith(
        "bench", tmp_path / "e", "--workload", tmp_path / "w.json", flag, tmp_path / name, "--json"
    )
    assert result.status == 1 and words in result.err and "bug" not in result.err
    assert json.loads(result.out)["error"]["kind"] == "InvalidArgumentError"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["folder.svg", "w.json"]


def test_a_file_without_the_right_to_write_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "p.json"
    path.write_text("mine")
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everything
    with pytest.raises(InvalidArgumentError, match="without the right to write it"):
        check_output("--profile-json", path)


def test_a_pipe_without_a_name_is_written_as_it_is() -> None:
    end, begin = os.pipe()
    path = Path(f"/dev/fd/{begin}")
    check_output("--profile-json", path)
    with whole_file(path) as given:
        given.write(b"through")
    os.close(begin)
    with os.fdopen(end) as reader:
        assert reader.read() == "through"


def test_a_named_pipe_is_written_where_somebody_reads_it(tmp_path: Path) -> None:
    """Looking at it must not be the end of what its reader gets, nor wait for one that is not there."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(InvalidArgumentError, match="it is a pipe that no program reads"):
        check_output("--profile-json", path)
    with pytest.raises(OSError, match="no program reads") as raised, whole_file(path):
        pass
    assert raised.value.filename == str(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    check_output("--profile-json", path)
    check_output("--profile-json", path)
    with pytest.raises(BlockingIOError):  # and not the end
        os.read(reader, 1)
    data = b"x" * (1 << 20)  # more than a pipe holds
    got: list[bytes] = []

    def read() -> None:
        os.set_blocking(reader, True)
        while part := os.read(reader, 1 << 16):
            got.append(part)

    thread = threading.Thread(target=read)
    thread.start()
    with whole_file(path) as out:
        out.write(data)
    thread.join()
    os.close(reader)
    assert b"".join(got) == data


def test_one_name_for_two_files_is_refused(plansmith: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "link.svg").symlink_to(tmp_path / "p.svg")
    flags = ("--profile-json", tmp_path / "p.svg", "--profile-plot", tmp_path / "link.svg")
    result = plansmith("bench", tmp_path / "e", *flags)
    assert result.status == 1 and "give two names" in result.err
    result = plansmith("bench", tmp_path / "e", "--profile-json", "-")
    assert result.status == 1 and "--profile --json" in result.err


def test_a_file_that_fails_takes_neither_the_result_nor_the_other_file_away(
    plansmith: Run, engine_dir: Path, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    flags = ("--profile-json", "/dev/full", "--profile-plot", tmp_path / "p.PNG")
    result = plansmith("bench", engine_dir, *FLAGS, *flags, "--json")
    assert result.status == 1 and "/dev/full" not in json.loads(result.out)  # one object, the result
    assert json.loads(result.out)["generated_tokens"] == 18
    assert result.err.startswith("plansmith: /dev/full: No space left")
    assert (tmp_path / "p.PNG").read_bytes().startswith(b"\x89PNG")
    assert [one.name for one in tmp_path.iterdir()] == ["p.PNG"]


def test_a_file_is_whole_or_as_it_was(tmp_path: Path) -> None:
    path, link = tmp_path / "p.json", tmp_path / "link"
    path.write_text("old")
    link.symlink_to(path)
    with pytest.raises(KeyError), whole_file(link) as partial:
        partial.write(b"half")
        raise KeyError
    assert path.read_text() == "old" and len(list(tmp_path.iterdir())) == 2
    with whole_file(link) as partial:
        partial.write(b"new")
    assert path.read_text() == "new" and link.is_symlink() and len(list(tmp_path.iterdir())) == 2


def test_no_name_covers_another() -> None:
    pytest.importorskip("matplotlib")
    alike = {"calls": 1, "time_ns": 60_000, "bytes": 10**6, "operations": 10**6}
    records = [op("", "step", calls=1, rows=1, time_ns=1_000_000)]
    records += [op(f"op{k}", "linear", **alike) for k in range(12)]
    records += [op(f"small{k}", "add", **(alike | {"time_ns": 1000})) for k in range(3)]
    figure = _roofline_plot.profile_figure(engine_profile(records, [PEAKS], stats(), stats()))
    axis = figure.axes[0]
    figure.canvas.draw()  # annotations find their places
    renderer = figure.canvas.get_renderer()
    from matplotlib.text import Text

    boxes = {text.get_text(): Text.get_window_extent(text, renderer) for text in axis.texts}
    assert sorted(boxes) == sorted(f"op{k} (linear)" for k in range(12))
    boxes["legend"] = axis.get_legend().get_window_extent(renderer)
    frame = axis.get_window_extent(renderer)
    for one, two in itertools.combinations(boxes, 2):
        assert not boxes[one].overlaps(boxes[two]), (one, two)
    assert all(frame.x0 <= box.x0 and box.x1 <= frame.x1 for box in boxes.values())
    assert "3 ops below 2% of a step" in " ".join(one.get_text() for one in axis.get_legend().get_texts())
    assert axis.get_title() == "decode steps, 1 token in each"
    _roofline_plot.pyplot().close(figure)


def test_the_help_says_that_files_turn_the_profile_on(plansmith: Run) -> None:
    text = " ".join(plansmith("bench", "--help").out.split())
    assert text.count("turns --profile on") == 2
