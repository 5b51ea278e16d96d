"""plansmith fleet build, as it is typed."""

from __future__ import annotations

import contextlib
import json
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from plansmith.runtime.manifest import load_manifest
from tiny_fleets import TinyFleet, generated, left_behind, names

Run = Callable[..., Any]
TWO = {"a": "llama", "b": "qwen3"}


@pytest.fixture
def make(
    tmp_path: Path, tiny_checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., TinyFleet]:
    """Return a function that makes a fleet, whose folder is the current one then."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user_cache"))

    def make_fleet(models: dict[str, str] | None = None, **fields: str) -> TinyFleet:
        families = models or {"tiny": "llama"}
        fleet = TinyFleet(
            tmp_path / "fleet", {name: tiny_checkpoint(one) for name, one in families.items()}, **fields
        )
        monkeypatch.chdir(fleet.folder)
        return fleet

    return make_fleet


def test_build(plansmith: Run, make: Callable[..., TinyFleet]) -> None:
    fleet = make(TWO)
    result = plansmith("fleet", "build")
    assert result.status == 0, result.err
    assert "a/fp16/cpu" in result.out and "built" in result.out
    assert f"{fleet.folder}/engines/a-fp16: assembled" in result.out
    assert plansmith("fleet", "status").status == 0
    result = plansmith("fleet", "build", "-f", fleet.folder, "--workers", 1, "--memory", "8GiB")
    assert result.status == 0 and "kept" in result.out and "built" not in result.out.replace("not built", "")
    assert f"{fleet.folder}/engines/b-fp16: kept" in result.out
    assert plansmith("inspect", "engines/a-fp16").status == 0
    assert len(generated(fleet.folder / "engines/a-fp16")) == 6


def test_build_as_json(plansmith: Run, make: Callable[..., TinyFleet]) -> None:
    fleet = make()
    report = json.loads(plansmith("fleet", "build", "--json").out)
    (unit,), (engine,) = report["units"], report["engines"]
    assert (unit["name"], unit["status"], unit["key"]) == ("tiny/fp16/cpu", "built", fleet.units()[0].key)
    assert engine == {
        "name": "tiny-fp16",
        "path": str(fleet.folder / "engines/tiny-fp16"),
        "status": "assembled",
        "why": "",
    }
    assert report["seconds"] > 0 and report["peak_bytes"] > 1 << 20


def test_only_and_shards(plansmith: Run, make: Callable[..., TinyFleet]) -> None:
    fleet = make(TWO, recipes="[fp16, int8]")
    result = plansmith("fleet", "build", "--only", "a/*", "--no-assemble")
    assert result.status == 0 and not (fleet.folder / "engines").exists()
    assert len(names(fleet.store)) == 2
    for part in ("1/2", "2/2"):
        result = plansmith("fleet", "build", "--shard", part)
        assert result.status == 0, result.err
        assert not (fleet.folder / "engines").exists()  # who has all parts assembles
    assert len(names(fleet.store)) == 4
    report = json.loads(plansmith("fleet", "build", "--json").out)
    assert {one["status"] for one in report["engines"]} == {"assembled"}
    assert {one["status"] for one in report["units"]} == {"kept"}
    result = plansmith("fleet", "build", "--only", "c/*")
    assert result.status == 1 and "matches no unit and no member" in result.err


def test_a_failure_is_told_and_is_the_exit_code(plansmith: Run, make: Callable[..., TinyFleet]) -> None:
    fleet = make(recipes="{int4: {gate: 'kl<=0.0000001'}, fp16: }")
    for _ in range(2):
        result = plansmith("fleet", "build")
        assert result.status == 1
        assert "engines/tiny-int4: failed (" in result.out and "wanted <= 1e-07" in result.out
        assert f"{fleet.folder}/engines/tiny-fp16: " in result.out
    assert not (fleet.folder / "engines/tiny-int4").exists()
    assert list(load_manifest(fleet.folder / "engines/tiny-fp16").targets) == ["cpu"]


def test_a_unit_that_no_machine_can_build(plansmith: Run, make: Callable[..., TinyFleet]) -> None:
    """float32 has no plan for a GPU: it is told by name, the others are built, and the exit code says so."""
    fleet = make(recipes="[fp32, fp16]", skus="[cpu]")
    fleet.edit("skus: [cpu]", "skus: [cpu, sm89]\nengines:\n- {model: tiny, recipe: fp32, skus: [cpu, sm89]}")
    result = plansmith("fleet", "build")
    assert result.status == 1
    assert "tiny/fp32/sm89" in result.out and "refused" in result.out
    assert "tiny/fp32/cpu" in result.out and len(names(fleet.store)) == 1


def test_memory(plansmith: Run, make: Callable[..., TinyFleet]) -> None:
    fleet = make()
    for text in ("much", "0", "-1GB", "8 Gigs"):
        result = plansmith("fleet", "build", "--memory", text)
        assert result.status == 1 and "a size above 0 such as 8GiB" in result.err
    assert not (fleet.folder / ".plansmith").exists()
    result = plansmith("fleet", "build", "--memory", "1MB")
    assert result.status == 1
    assert "tiny/fp16/cpu needs about" in result.out and "the budget is 1 MB; give --memory " in result.out
    assert plansmith("fleet", "build", "--workers", 0).status == 2


def test_push_without_a_remote(plansmith: Run, make: Callable[..., TinyFleet]) -> None:
    fleet = make()
    result = plansmith("fleet", "build", "--push")
    assert result.status == 1 and "name a shared one: --remote" in result.err
    assert names(fleet.store) == []


def test_push_of_a_build(plansmith: Run, make: Callable[..., TinyFleet], tmp_path: Path) -> None:
    make(TWO)
    url = f"file://{tmp_path}/remote"
    assert plansmith("fleet", "build", "--push", "--remote", url).status == 0
    assert plansmith("fleet", "verify", "--of-remote", "--remote", url).status == 0
    assert plansmith("fleet", "status", "--remote", url).status == 0
    assert len(list((tmp_path / "remote/records").iterdir())) == 2


def test_a_store_that_is_none(plansmith: Run, make: Callable[..., TinyFleet], tmp_path: Path) -> None:
    fleet = make()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/file").write_text("mine")
    result = plansmith("fleet", "build", "--store", tmp_path / "mine")
    assert result.status == 1 and "is no store" in result.err
    result = plansmith("fleet", "build", "--store", tmp_path / "mine/file")
    assert result.status == 1 and "is a file, a store is a folder" in result.err
    result = plansmith("fleet", "build", "--store", f"file://{tmp_path}/x")
    assert result.status == 1 and f"give --remote file://{tmp_path}/x" in result.err
    assert plansmith("fleet", "build", "--store", tmp_path / "other").status == 0
    marker = tmp_path / "other/plansmith-store.json"
    marker.write_text(marker.read_text().replace("1", "7"))
    result = plansmith("fleet", "build", "--store", tmp_path / "other")
    assert result.status == 1 and "is a store of format 7, this plansmith reads format 1" in result.err
    assert not (fleet.folder / ".plansmith").exists()
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["file"]


@contextlib.contextmanager
def mounted(*arguments: str) -> Iterator[None]:
    """Mount something; skip the test where that is not allowed."""
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"mounting takes root: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", arguments[-1]], check=True)


def test_a_read_only_store(plansmith: Run, make: Callable[..., TinyFleet]) -> None:
    """What is in it is still of use; what has to be built says why it cannot."""
    fleet = make(TWO)
    assert plansmith("fleet", "build", "--only", "a/*").status == 0
    place = str(fleet.folder / ".plansmith/store")
    with mounted("--bind", place, place):
        remount = subprocess.run(["mount", "-o", "remount,ro,bind", place], capture_output=True, text=True)
        if remount.returncode != 0:
            pytest.skip(f"no read-only mounts here: {remount.stderr.strip()}")
        result = plansmith("fleet", "build")
        assert result.status == 1
        assert "cannot be written to" in result.err and "Read-only file system" in result.err
        assert "Traceback" not in result.err
        assert plansmith("fleet", "status", "--only", "a/*").status == 0
        assert plansmith("fleet", "verify").status == 0
        assert plansmith("fleet", "gc", "--keep-days", 0).status in (0, 1)
    assert fleet.problems() == []
    assert plansmith("fleet", "build").status == 0


def test_a_full_disk(plansmith: Run, make: Callable[..., TinyFleet], tmp_path: Path) -> None:
    """It is said in words, nothing is half there, and with room again it goes on."""
    fleet = make(TWO)
    (tmp_path / "small").mkdir()
    with mounted("-t", "tmpfs", "-o", "size=600k", "tmpfs", str(tmp_path / "small")):
        result = plansmith("fleet", "build", "--store", tmp_path / "small/store")
        assert result.status == 1
        told = result.out + result.err
        assert "free some space" in told and "Traceback" not in told
        assert left_behind(tmp_path / "small") == []
        result = plansmith("fleet", "verify", "--store", tmp_path / "small/store")
        assert result.status == 0, result.out + result.err
        subprocess.run(["mount", "-o", "remount,size=64m", str(tmp_path / "small")], check=True)
        result = plansmith("fleet", "build", "--store", tmp_path / "small/store")
        assert result.status == 0, result.out + result.err
    assert left_behind(fleet.folder) == []


def test_files_that_may_not_grow(make: Callable[..., TinyFleet]) -> None:
    """A limit on the size of files is a full disk, too."""
    fleet = make()

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    done = fleet.run("build", preexec_fn=limit)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr and "space" in done.stdout + done.stderr
    assert fleet.problems() == [] and left_behind(fleet.folder) == []
    assert fleet.run("build").returncode == 0


def test_an_output_that_is_something_else(plansmith: Run, make: Callable[..., TinyFleet]) -> None:
    fleet = make(TWO)
    place = fleet.folder / "engines/a-fp16"
    place.mkdir(parents=True)
    (place / "mine").write_text("mine")
    result = plansmith("fleet", "build")
    assert result.status == 1
    assert "holds files but no manifest.json" in result.out
    assert f"{fleet.folder}/engines/b-fp16: assembled" in result.out
    assert (place / "mine").read_text() == "mine"


def test_what_is_current_loads_no_compiler(make: Callable[..., TinyFleet]) -> None:
    """A fleet that is there already needs none of the libraries that take longest to import."""
    fleet = make()
    assert fleet.run("build").returncode == 0
    code = (
        "import sys\n"
        "from plansmith.cli import main\n"
        "try:\n"
        "    main(['fleet', 'build', '-f', sys.argv[1]])\n"
        "except SystemExit as end:\n"
        "    assert not end.code, end.code\n"
        "heavy = {'torch', 'transformers', 'tensorrt_rtx', 'triton'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    words = [sys.executable, "-c", code, str(fleet.file)]
    done = subprocess.run(words, env=fleet.environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
