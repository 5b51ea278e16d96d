"""Kernels compiled ahead of time, really, in processes of their own: this one has triton as an interpreter."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import pytest
from plansmith.plugins import aot, compile_catalog
from plansmith.plugins.catalog import catalog
from plansmith.plugins.kernel import Kernel
from plansmith.plugins.resources import Resources
from plansmith.runtime.errors import BuildError, OutOfMemoryError, UnsupportedError

pytest.importorskip("triton")

EVERY = {kernel.name: kernel for kernel in catalog(80)}
COMBINE = EVERY["attention_combine_bf16_same_d128"]  # small; bf16 begins with sm80
LOGPROBS = EVERY["sampling_logprobs"]
GATHER_LAST = EVERY["gather_last_fp16"]  # the smallest
SMS = (75, 90)


@pytest.fixture
def scratch(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """Return the folder of temporary files; it must be empty when a test has ended."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    assert list(folder.iterdir()) == []


told: list[tuple[str, int, int, int]] = []


@pytest.fixture(scope="module")
def compiled() -> list[aot.CompiledKernel]:
    return aot.compile_kernels([COMBINE, LOGPROBS], SMS, progress=lambda *step: told.append(step))


def test_each_kernel_for_each_sm_that_it_runs_on(compiled: list[aot.CompiledKernel]) -> None:
    assert [(one.kernel.name, one.sm) for one in compiled] == [
        (COMBINE.name, 90),
        (LOGPROBS.name, 75),
        (LOGPROBS.name, 90),
    ]
    for one in compiled:
        assert one.cubin[:4] == b"\x7fELF" and one.symbol.encode() in one.cubin
        assert f".target sm_{one.sm}" in one.ptx and f".entry {one.symbol}(" in one.ptx
        assert one.num_warps == one.kernel.num_warps
        assert 16 <= one.resources.registers <= 255 and not one.resources.spills
        assert 0 <= one.shared_bytes <= 64 << 10
        entry = re.search(r"\.entry \w+\(([^)]*)\)", one.ptx)
        assert entry is not None and entry[1].count(".param") == len(one.kernel.signature) + 2
    assert "fma" not in next(one.ptx for one in compiled if one.kernel is LOGPROBS)  # fp_fusion is off


def test_the_same_bytes_wherever_it_is_compiled(
    compiled: list[aot.CompiledKernel], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in ("TRITON_INTERPRET", "DISABLE_PTXAS_OPT", "TRITON_DEBUG", "USE_IR_LOC"):
        monkeypatch.setenv(name, "1")
    again = aot.compile_kernels([COMBINE, LOGPROBS], SMS, jobs=1)
    assert [(one.cubin, one.ptx, one.resources) for one in again] == [
        (one.cubin, one.ptx, one.resources) for one in compiled
    ]
    places = [pathlib.Path(aot.__file__).parents[2], sys.prefix, tempfile.gettempdir(), pathlib.Path.home()]
    for one in compiled:
        for place in map(str, places):
            assert place not in one.ptx and place.encode() not in one.cubin
        assert ".file" not in one.ptx and ".loc" not in one.ptx


def test_progress_counts_all(compiled: list[aot.CompiledKernel]) -> None:
    assert [step[2:] for step in told] == [(1, 3), (2, 3), (3, 3)]
    assert sorted(step[:2] for step in told) == sorted((one.kernel.name, one.sm) for one in compiled)


def test_a_kept_result_is_not_compiled_again(tmp_path: pathlib.Path, scratch: pathlib.Path) -> None:
    first = aot.compile_kernels([GATHER_LAST], [80], cache_dir=tmp_path / "cache")
    assert aot.compile_kernels([GATHER_LAST], [80], cache_dir=tmp_path / "cache", python="/none") == first
    other = dataclasses.replace(GATHER_LAST, num_warps=8)
    with pytest.raises(FileNotFoundError):
        aot.compile_kernels([other], [80], cache_dir=tmp_path / "cache", python="/none")
    (kept,) = (tmp_path / "cache").iterdir()
    whole = kept.read_bytes()
    cubin = whole.index(b'"cubin": "') + 1000
    changed = whole[:cubin] + (b"B" if whole[cubin : cubin + 1] == b"A" else b"A") + whole[cubin + 1 :]
    aot.compile_kernels([other], [80], cache_dir=tmp_path / "cache")
    (others,) = set((tmp_path / "cache").iterdir()) - {kept}
    foreign = others.read_bytes()  # whole, and of another kernel
    others.unlink()
    for damaged in (whole[:100], b"{}", b"[]", b"7", b"[" * 200_000, changed, foreign):
        kept.write_bytes(damaged)
        with pytest.raises(FileNotFoundError):
            aot.compile_kernels([GATHER_LAST], [80], cache_dir=tmp_path / "cache", python="/none")
    kept.unlink()
    os.mkfifo(kept)
    with pytest.raises(FileNotFoundError):
        aot.compile_kernels([GATHER_LAST], [80], cache_dir=tmp_path / "cache", python="/none")
    kept.unlink()
    kept.mkdir()  # cannot be replaced by a file, as on a disk that is full
    (again,) = aot.compile_kernels([GATHER_LAST], [80], cache_dir=tmp_path / "cache")
    assert again.cubin == first[0].cubin
    assert list((tmp_path / "cache").iterdir()) == [kept]
    (tmp_path / "file").touch()
    (again,) = aot.compile_kernels([GATHER_LAST], [80], cache_dir=tmp_path / "file" / "cache")
    assert again.cubin == first[0].cubin


def test_a_worker_removes_no_folder_but_the_one_it_was_given(tmp_path: pathlib.Path) -> None:
    mine, made = tmp_path / "mine", tmp_path / "parent" / "made"
    for folder in (mine, made):
        folder.mkdir(parents=True)
        (folder / "file").touch()
    for folder, arguments in ((mine, []), (made, [str(made)])):
        subprocess.run(
            [sys.executable, "-m", aot.WORKER_MODULE, *arguments],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(folder)},
            stdin=subprocess.DEVNULL,
            check=True,
        )
    assert (mine / "file").exists() and not made.parent.exists()


def test_a_killed_program_leaves_no_compiler_and_no_file(tmp_path: pathlib.Path) -> None:
    """Nobody is left to clean up but the compilers themselves, when their input ends."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    command = [
        sys.executable,
        "-m",
        "plansmith.plugins.aot",
        "--output",
        str(tmp_path / "out"),
        "--jobs",
        "2",
    ]
    path = os.pathsep.join(sys.path)
    with subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": path, "TMPDIR": str(folder)}, stderr=subprocess.DEVNULL
    ) as program:
        end = time.monotonic() + 60
        while len(list(folder.glob("plansmith-kernels-*/*/cache/*"))) < 2:  # both are compiling
            assert program.poll() is None and time.monotonic() < end
            time.sleep(0.02)
        program.kill()
    while list(folder.iterdir()):
        assert time.monotonic() < end
        time.sleep(0.1)


def without(kernel: Kernel, name: str) -> Kernel:
    return dataclasses.replace(
        kernel, signature={key: value for key, value in kernel.signature.items() if key != name}
    )


@pytest.mark.parametrize(
    ("kernel", "words"),
    [
        (dataclasses.replace(LOGPROBS, constants={**LOGPROBS.constants, "BLOCK": 3}), "range must be a power of 2"),
        (without(LOGPROBS, "rows"), r"takes \(logits, rows, .*described are \(logits, raw_block_best"),
        (
            dataclasses.replace(LOGPROBS, signature=dict(reversed(LOGPROBS.signature.items()))),
            r"takes \(logits, .*described are \(vocab_size",
        ),
        (dataclasses.replace(LOGPROBS, function="sampling.logprobs:none"), "has no attribute 'none'"),
        (dataclasses.replace(LOGPROBS, function="nowhere.kernels:x"), "No module named"),
    ],
)  # fmt: skip
def test_a_kernel_that_does_not_compile(kernel: Kernel, words: str, scratch: pathlib.Path) -> None:
    with pytest.raises(
        BuildError, match=f"^the kernel {kernel.name} does not compile for sm80: .*{words}"
    ) as e:
        aot.compile_kernels([kernel, LOGPROBS], [80, 90])
    assert any(re.search(words, line) for line in e.value.log_lines)


def script(path: pathlib.Path, body: str) -> str:
    """Return an interpreter that does something else."""
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("body", "kind", "words"),
    [
        ("read line; kill -9 $$", OutOfMemoryError, "of kernel sampling_logprobs for sm80 was killed, most likely"),
        ("read line; kill -11 $$", BuildError, "was ended by SIGSEGV: no output"),
        ("read line; echo why >&2; exit 3", BuildError, "ended with exit code 3: why"),
        ("exec >&-; read line; read line", BuildError, "ended with exit code 1"),
    ],
)  # fmt: skip
def test_a_compiler_that_ends(
    tmp_path: pathlib.Path, scratch: pathlib.Path, body: str, kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words):
        aot.compile_kernels([LOGPROBS], [80], python=script(tmp_path / "python", body))


def test_an_interrupt_leaves_no_process(scratch: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[str]] = []
    popen = subprocess.Popen

    def noted(*arguments: Any, **options: Any) -> Any:
        started.append(popen(*arguments, **options))
        return started[-1]

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "Popen", noted)
    kernels = [dataclasses.replace(GATHER_LAST, name=f"copy_{n}") for n in range(8)]
    with pytest.raises(KeyboardInterrupt):
        aot.compile_kernels(kernels, [80], jobs=2, progress=interrupt)
    assert len(started) == 2 and all(process.returncode is not None for process in started)


def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(UnsupportedError, match=r"not installed; run: pip install 'plansmith\[kernels\]'"):
        aot.compile_kernels([LOGPROBS], [80])
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "3.5.1")
    with pytest.raises(UnsupportedError, match=r"triton is 3.5.1, at least 3.6 is needed"):
        aot.compile_kernels([LOGPROBS], [80])


def test_the_caller_needs_neither_triton_nor_torch() -> None:
    code = """
import sys
sys.modules["torch"] = sys.modules["triton"] = None
from plansmith.plugins import aot
from plansmith.plugins.catalog import catalog
(one,) = aot.compile_kernels([k for k in catalog(80, "gather_last") if k.name == "gather_last_fp16"], [80])
print(one.symbol)
"""
    path = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.stdout == "gather_last\n", done.stderr


def fake(spilled_sm: int = 0, shared_bytes: int = 512) -> Any:
    """Return a compiler of nothing, whose kernels spill on one SM."""

    def compile_tasks(tasks: Sequence[tuple[Kernel, int]], *_: Any, **__: Any) -> list[aot.CompiledKernel]:
        def took(sm: int) -> Resources:
            return Resources(40, 8, 4 * (sm == spilled_sm), 0, 0, 1024)

        return [
            aot.CompiledKernel(kernel, sm, "f", b"cubin", "ptx", shared_bytes, 4, took(sm), 0.25)
            for kernel, sm in tasks
        ]

    return compile_tasks


def test_the_report(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compile_catalog, "compile_tasks", fake())
    assert compile_catalog.main(["--output", str(tmp_path / "k"), "--sm", "75,sm90", "--op", "sampling"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^sampling_scan +75 +40 +1536 +8 +0 +0.25$", out, re.M)
    count = len(catalog(75, "sampling"))
    assert f"{2 * count} kernels in" in out and "none of them spill" in out
    assert (tmp_path / "k/sampling/sampling_scan.sm90.cubin").read_bytes() == b"cubin"
    assert (tmp_path / "k/sampling/sampling_scan.sm75.ptx").read_text() == "ptx"
    report = json.loads((tmp_path / "k/resources.json").read_text())
    assert {(row["op"], row["sm"]) for row in report["kernels"]} == {("sampling", 75), ("sampling", 90)}
    assert compile_catalog.main(["--output", str(tmp_path / "k"), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["kernels"]
    assert {row["sm"] for row in rows} == set(compile_catalog.DEFAULT_SMS)
    turing = {row["name"] for row in rows if row["sm"] == 75}
    assert "attention_combine_fp16_same_d128" in turing and COMBINE.name not in turing


def test_without_an_output_only_the_table_is_made(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compile_catalog, "compile_tasks", fake())
    monkeypatch.chdir(tmp_path)
    assert compile_catalog.main(["--sm", "80", "--op", "sampling"]) == 0
    assert "none of them spill" in capsys.readouterr().out and not list(tmp_path.iterdir())


@pytest.mark.parametrize(("sm", "code"), [(80, 1), (90, 1), (75, 0), (120, 0)])
def test_spills_where_kernels_are_tuned_are_an_error(
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    sm: int,
    code: int,
) -> None:
    monkeypatch.setattr(compile_catalog, "compile_tasks", fake(sm))
    assert compile_catalog.main(["--output", str(tmp_path), "--op", "sampling"]) == code
    assert (f"error: sampling_scan spills registers on sm{sm}" in capsys.readouterr().err) is (code == 1)


def test_a_kernel_that_does_not_fit_is_an_error(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compile_catalog, "compile_tasks", fake(shared_bytes=100 << 10))
    arguments = ["--output", str(tmp_path), "--op", "sampling", "--sm"]
    assert compile_catalog.main([*arguments, "80,90"]) == 0
    assert compile_catalog.main([*arguments, "89"]) == 1
    words = "error: sampling_scan takes 102400 bytes of shared memory on sm89, which has 101376 for a program"
    assert words in capsys.readouterr().err
    assert set(compile_catalog.MAX_SHARED_BYTES) == set(aot.ALL_SMS)


def test_a_compile_error_is_the_programs(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing(*_: Any, **__: Any) -> Any:
        raise BuildError("the kernel x does not compile for sm80: why", ["line 1", "why"])

    monkeypatch.setattr(compile_catalog, "compile_tasks", failing)
    assert compile_catalog.main(["--output", str(tmp_path)]) == 1
    assert capsys.readouterr().err == "line 1\nwhy\nerror: the kernel x does not compile for sm80: why\n"


def test_an_output_that_cannot_be_written(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is told in one line, and before the compilation where it can be known then."""
    file = tmp_path / "file"
    file.write_text("")
    done: list[int] = []

    def compile_tasks(*arguments: Any, **options: Any) -> Any:
        done.append(1)
        return fake()(*arguments, **options)

    monkeypatch.setattr(compile_catalog, "compile_tasks", compile_tasks)
    for output in (file, file / "below", pathlib.Path("/proc/none")):
        assert compile_catalog.main(["--output", str(output), "--op", "sampling"]) == 1
        assert re.fullmatch(
            r"error: \S+ cannot be written to \(.*\); give another --output\n", capsys.readouterr().err
        )
    assert not done
    (tmp_path / "sampling").write_text("")  # where a folder has to be
    assert compile_catalog.main(["--output", str(tmp_path), "--op", "sampling"]) == 1
    assert "cannot be written to (File exists)" in capsys.readouterr().err and done


@pytest.mark.parametrize(
    "wrong", [["--sm", "70"], ["--sm", ""], ["--op", "nothing"], ["--jobs", "0"], ["--jobs", "x"]]
)
def test_wrong_options(wrong: list[str], tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        compile_catalog.main(["--output", str(tmp_path), *wrong])
    assert wrong[0] in capsys.readouterr().err
