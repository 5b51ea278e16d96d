"""A unit's files on their way into a store: hashed once, after the compilers, and moved only as they were."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from plansmith.builder.progress import no_progress
from plansmith.fleet.engine_graphs import EngineGraphs
from plansmith.fleet.store.local import LocalStore
from plansmith.fleet.unit_build import Workshop, build_unit
from plansmith.fleet.unit_files import KeptFiles, UnitFiles
from plansmith.runtime.manifest_entries import FileEntry
from tiny_fleets import QuickRtx, TinyFleet


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a plan and another file."""
    made = tmp_path / "made"
    made.mkdir()
    (made / "model.plan").write_bytes(b"plan" * 1000)
    (made / "other").write_bytes(b"other")
    return made


def test_an_entry_is_that_of_the_bytes(store: LocalStore, folder: Path) -> None:
    plan = folder / "model.plan"
    entry = UnitFiles(store).describe(folder, plan)
    assert entry == FileEntry("model.plan", 4000, hashlib.sha256(plan.read_bytes()).hexdigest())
    made = store.file_list(entry.sha256)
    assert made is not None and made.size == 4000


def test_what_was_described_is_not_stored_again(
    store: LocalStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, stored = UnitFiles(store), list[str]()
    add = store.add_files

    def counted(root: Path, paths: Sequence[str]) -> Any:
        stored.extend(paths)
        return add(root, paths)

    monkeypatch.setattr(store, "add_files", counted)
    files.describe(folder, folder / "model.plan")
    refs = files.complete(folder, ["model.plan", "other"])
    assert [ref.path for ref in refs] == ["model.plan", "other"]
    assert stored == ["model.plan", "other"]


def test_a_file_written_after_it_was_stored_is_not_moved(
    store: LocalStore, folder: Path, tmp_path: Path
) -> None:
    """The store has what was hashed, so that is taken instead."""
    files = UnitFiles(store)
    refs = files.complete(folder, ["model.plan", "other"])
    (folder / "model.plan").write_bytes(b"flan" * 1000)
    kept = KeptFiles(folder, files.stamps)
    assert not kept.move("model.plan", tmp_path / "moved")
    assert kept.move("other", tmp_path / "moved") and (tmp_path / "moved").read_bytes() == b"other"
    store.extract(refs, tmp_path / "out")
    assert (tmp_path / "out/model.plan").read_bytes() == b"plan" * 1000


def test_a_file_that_is_stored_is_still_there_as_it_was_when_its_folder_moves(
    store: LocalStore, folder: Path, tmp_path: Path
) -> None:
    """A build describes files in the directory that it works in, which then gets another name."""
    files = UnitFiles(store)
    files.describe(folder, folder / "model.plan")
    folder.rename(tmp_path / "done")
    assert KeptFiles(tmp_path / "done", files.stamps).move("model.plan", tmp_path / "moved")


@pytest.mark.parametrize("precision", ["{fp16: }", "{int8: {draft: int4}}"])
def test_a_unit_lets_go_once_and_before_it_stores(
    tiny_fleet: Callable[..., TinyFleet],
    tmp_path: Path,
    quick_rtx: QuickRtx,
    monkeypatch: pytest.MonkeyPatch,
    precision: str,
) -> None:
    """The next compile starts while plans are hashed: all compilers are done then, the draft's and the kernels' too."""
    from plansmith.builder import compile, device_kernels

    fleet = tiny_fleet(recipes=precision, skus="[sm89]")
    store = fleet.store
    (unit,) = fleet.units()
    happened: list[str] = []

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            happened.append(name)
            return function(*args, **named)

        return call

    monkeypatch.setattr(compile, "_compile_rtx", noted("compile", quick_rtx))
    monkeypatch.setattr(device_kernels, "compile_tasks", noted("kernels", device_kernels.compile_tasks))
    monkeypatch.setattr(store, "add_files", noted("store", store.add_files))
    graphs = EngineGraphs(tmp_path / "graphs", threading.Event())
    graphs.expect(unit.engine.name)
    shop = Workshop(store, tmp_path, fleet.hashes(), graphs, no_progress)
    assert build_unit(unit, shop, lambda: happened.append("let go")) is not None
    num_plans = 2 if "draft" in precision else 1
    before = happened[: happened.index("let go") + 1]
    assert before == [*["compile"] * num_plans, "kernels", "let go"]
    after = happened[len(before) :]
    assert set(after) == {"store"} and len(after) > num_plans
