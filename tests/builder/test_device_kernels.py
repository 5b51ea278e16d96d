"""Kernels beside a GPU plan: made and kept with it, made again alone, and what a build says where there are none."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fake_compilers import FakeKernelCompiler
from plansmith.builder import device_kernels
from plansmith.builder.build import build_engine, plan_build
from plansmith.builder.build_report import TargetReport, read_targets
from plansmith.cli import main
from plansmith.plugins.sampling import spec as sampling
from plansmith.runtime.errors import BuildError, EngineFileError
from plansmith.runtime.executors.kernel_bundle import load
from plansmith.runtime.manifest import load_manifest

pytest.importorskip("triton")

LIMITS = {"max_batch_size": 4, "max_num_tokens": 32, "max_seq_len": 64, "tokens_per_block": 8}
NAMES = sorted(kernel.name for kernel in sampling.catalog())


@pytest.fixture
def build(
    tiny_checkpoint: Callable[[str], pathlib.Path], tmp_path: pathlib.Path, fake_rtx: Any
) -> Callable[..., dict[str, TargetReport]]:
    """Return what builds targets into tmp_path/engine."""

    def run(targets: str, draft: str | None = None, **options: Any) -> dict[str, TargetReport]:
        plan = plan_build(
            tiny_checkpoint("llama"), [targets], precision="int8", limits=dict(LIMITS), draft=draft
        )
        return build_engine(plan, tmp_path / "engine", **options).targets

    return run


@contextlib.contextmanager
def no_triton() -> Iterator[None]:
    """Hide triton's package."""
    version = importlib.metadata.version

    def hidden(name: str) -> str:
        if name == "triton":
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.metadata, "version", hidden)
        yield


def test_a_gpu_target_has_kernels_for_its_sms(
    build: Callable[..., Any], tmp_path: pathlib.Path, fake_kernels: FakeKernelCompiler
) -> None:
    report = build("cpu,sm89,rtx", draft="int4")
    assert report["sm89"].notes == report["rtx"].notes == ()
    manifest = load_manifest(tmp_path / "engine")
    manifest.check_files(hashes=True)
    assert manifest.kernels_dir("cpu") is None
    # Each is compiled once, whatever number of targets takes it, and drafts take none.
    (tasks,) = fake_kernels.calls
    assert sorted(tasks) == sorted((name, sm) for name in NAMES for sm in (80, 86, 89, 120))
    folder = manifest.kernels_dir("sm89")
    assert folder == tmp_path / "engine/targets/sm89/kernels"
    assert sorted(path.name for path in folder.iterdir()) == [
        "kernels.json",
        *(f"{name}.sm89.cubin" for name in NAMES),
    ]
    listed = [file.path for file in manifest.targets["sm89"].files]
    assert listed[0] == "targets/sm89/model.plan" and len(listed) == 2 + len(NAMES)
    assert [file.path for file in manifest.targets["sm89"].plan_files()] == listed[:1]
    assert manifest.draft is not None and manifest.draft.targets["sm89"].kernel_files() == ()
    assert report["sm89"].plan_bytes == len("sm89")
    portable = manifest.kernels_dir("rtx")
    assert portable is not None
    assert [load(portable, sm).kernel(NAMES[0]).sm for sm in (80, 86, 87, 89, 120)] == [80, 86, 86, 89, 120]


def test_unchanged_kernels_are_kept(
    build: Callable[..., Any], tmp_path: pathlib.Path, fake_kernels: FakeKernelCompiler
) -> None:
    build("sm89")
    before = (tmp_path / "engine/manifest.json").read_bytes()
    assert build("sm89")["sm89"].status == "kept"
    assert (tmp_path / "engine/manifest.json").read_bytes() == before
    assert build("sm86")["sm89"].status == "kept"  # the kernels of a target that is not asked for go along
    assert len(fake_kernels.calls) == 2
    manifest = load_manifest(tmp_path / "engine")
    manifest.check_files(hashes=True)
    assert [len(manifest.targets[name].kernel_files()) for name in ("sm86", "sm89")] == [1 + len(NAMES)] * 2


def test_other_kernels_are_made_beside_the_plan_that_stays(
    build: Callable[..., Any],
    tmp_path: pathlib.Path,
    fake_kernels: FakeKernelCompiler,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    build("sm89")
    plan = (tmp_path / "engine/targets/sm89/model.plan").stat()
    monkeypatch.setattr(device_kernels, "triton_version", lambda: "99.0")
    report = build("sm89")
    assert report["sm89"].status == "kept" and len(fake_kernels.calls) == 2
    manifest = load_manifest(tmp_path / "engine")
    manifest.check_files(hashes=True)
    folder = manifest.kernels_dir("sm89")
    assert folder is not None and load(folder, 89).entry.triton_version == "99.0"
    assert (tmp_path / "engine/targets/sm89/model.plan").stat().st_mtime_ns == plan.st_mtime_ns
    assert build("sm89")["sm89"].status == "kept" and len(fake_kernels.calls) == 2


def test_without_triton_a_build_says_where_tokens_are_drawn(
    build: Callable[..., Any], tmp_path: pathlib.Path
) -> None:
    with no_triton():
        report = build("cpu,sm89")
    (note,) = report["sm89"].notes
    assert "tokens are drawn on the host" in note and "pip install 'plansmith[kernels]'" in note
    assert report["cpu"].notes == ()
    assert read_targets(tmp_path / "engine") == report
    assert note.partition(":")[0] in (tmp_path / "engine/build_report.html").read_text()
    assert load_manifest(tmp_path / "engine").kernels_dir("sm89") is None
    with no_triton():
        assert build("sm89")["sm89"].status == "kept"
    report = build("sm89")
    assert report["sm89"].status == "kept" and report["sm89"].notes == ()
    assert load_manifest(tmp_path / "engine").kernels_dir("sm89") is not None
    with no_triton():
        assert build("sm89")["sm89"].notes == ()
    assert load_manifest(tmp_path / "engine").kernels_dir("sm89") is not None  # what is there stays


def test_an_older_triton_is_as_none(build: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "3.2.0")
    assert "triton is 3.2.0, at least 3.6 is needed" in build("sm89")["sm89"].notes[0]


def test_kernels_that_do_not_compile_leave_the_plan(
    build: Callable[..., Any], tmp_path: pathlib.Path, fake_kernels: FakeKernelCompiler
) -> None:
    fake_kernels.error = BuildError("the kernel x does not compile for sm89: why")
    assert "does not compile for sm89: why" in build("sm89")["sm89"].notes[0]
    load_manifest(tmp_path / "engine").check_files(hashes=True)
    fake_kernels.error = None
    assert build("sm89")["sm89"].notes == ()


def test_a_damaged_cubin_is_found_and_made_again(build: Callable[..., Any], tmp_path: pathlib.Path) -> None:
    build("sm89")
    cubin = tmp_path / f"engine/targets/sm89/kernels/{NAMES[0]}.sm89.cubin"
    good = cubin.read_bytes()
    cubin.write_bytes(bytes(len(good)))
    with pytest.raises(EngineFileError, match=r"file of target sm89 .*changed after the build"):
        load_manifest(tmp_path / "engine").check_files(hashes=True)
    build("sm89")
    assert cubin.read_bytes() == good


def test_inspect_shows_them(
    build: Callable[..., Any],
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def inspect(*options: str) -> str:
        capsys.readouterr()
        with pytest.raises(SystemExit, match=r"^0$"):
            main(["inspect", str(tmp_path / "engine"), *options])
        return capsys.readouterr().out

    with no_triton():
        build("cpu,sm89")
    text = inspect()
    assert "device kernels" in text and "none: tokens are drawn" in text
    build("cpu,sm89")
    text = inspect()
    version = importlib.metadata.version("triton")
    assert f"{len(NAMES)}, " in text and f"triton {version}" in text
    content = json.loads(inspect("--json"))
    assert list(content["kernels"]) == ["sm89"]
    assert [one["name"] for one in content["kernels"]["sm89"]["kernels"]] == NAMES
