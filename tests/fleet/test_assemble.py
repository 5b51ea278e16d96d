"""Engines out of a store are those that `plansmith build` makes of the same inputs."""

from __future__ import annotations

import dataclasses
import errno
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from plansmith.builder.build import build_engine, plan_build
from plansmith.fleet.assemble import assemble, can_move
from plansmith.fleet.store import LocalStore
from plansmith.fleet.store.record import FileRef, Record
from plansmith.runtime.errors import EngineFileError, InvalidArgumentError
from plansmith.runtime.manifest import MANIFEST_NAME, load_manifest
from tiny_fleets import QuickRtx, TinyFleet, engines, files, generated, left_behind, manifest_json

MakeFleet = Callable[..., TinyFleet]
LIMITS = {"max_batch_size": 4, "max_num_tokens": 64, "max_seq_len": 128, "tokens_per_block": 8}


@pytest.fixture
def fleet(tiny_fleet: MakeFleet, quick_rtx: QuickRtx) -> TinyFleet:
    """Return a fleet whose one engine has two plans, each with a draft, built."""
    made = tiny_fleet(recipes="{fp16: {draft: int4}}", skus="[cpu, sm89]")
    assert engines(made.build()) == {"tiny-fp16": "assembled"}
    return made


def records(fleet: TinyFleet) -> list[Record]:
    found = [fleet.store.record(unit.key) for unit in fleet.units()]
    return [one for one in found if one is not None]


def test_an_engine_with_drafts_and_kernels_is_that_of_a_build(fleet: TinyFleet, tmp_path: Path) -> None:
    out = fleet.folder / "engines/tiny-fp16"
    plan = plan_build(fleet.folder / "tiny", ["cpu", "sm89"], precision="fp16", limits=LIMITS, draft="int4")
    build_engine(plan, tmp_path / "built")
    assert files(out) == files(tmp_path / "built")
    assert {name.rpartition("/")[0] for name in files(out)} >= {
        "tokenizer",
        "targets/cpu",
        "targets/cpu/draft",
        "targets/sm89",
        "targets/sm89/draft",
        "targets/sm89/kernels",
    }
    assert manifest_json(out) == manifest_json(tmp_path / "built")
    load_manifest(out).check_files(hashes=True)
    ours, theirs = (json.loads((one / "build_report.json").read_text()) for one in (out, tmp_path / "built"))
    assert list(ours["targets"]) == list(theirs["targets"]) == ["cpu", "cpu/draft", "sm89", "sm89/draft"]
    assert ours["draft"] == theirs["draft"] == "int4"
    assert (out / "build_report.html").stat().st_size > 1000


@pytest.mark.parametrize("has_links", [True, False])
def test_what_was_built_just_now_is_not_read_out_of_the_store(
    tiny_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch, has_links: bool
) -> None:
    """Unless the output is on another disk; the engine is the same."""
    extracted: list[str] = []
    extract = LocalStore.extract

    def noted(store: LocalStore, wanted: Sequence[FileRef], out: Path) -> None:
        extracted.extend(file.path for file in wanted)
        extract(store, wanted, out)

    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(LocalStore, "extract", noted)
    if not has_links:
        monkeypatch.setattr("os.link", refuse)  # as between two mounts
    made = tiny_fleet(recipes="{fp16: {draft: int4}}", skus="[cpu]")
    assert engines(made.build()) == {"tiny-fp16": "assembled"}
    out = made.folder / "engines/tiny-fp16"
    stored = [file for record in records(made) for file in record.files]
    assert set(extracted) == (set() if has_links else {file.path for file in stored})
    load_manifest(out).check_files(hashes=True)
    assert {(out / name).stat().st_nlink for name in files(out)} == {1}  # the store's work is gone
    assert all((out / file.path).stat().st_mode & 0o777 == file.mode for file in stored)


def test_another_disk_is_told_from_the_stores(tmp_path: Path) -> None:
    assert can_move(tmp_path, tmp_path / "not" / "there")
    assert not can_move(tmp_path, Path("/proc/not/there"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("change", ["bytes", "shorter", "link", "gone"])
def test_what_changed_since_it_was_stored_comes_out_of_the_store(
    tiny_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    put_record = LocalStore.put_record

    def changed(store: LocalStore, record: Record) -> Record:
        for path in store.root.glob("work/*/*/targets/cpu/model.plan"):
            data = path.read_bytes()
            path.unlink()
            if change == "link":
                path.symlink_to("/etc/hostname")
            elif change != "gone":
                path.write_bytes(data[:-1] + b"?" if change == "bytes" else data[:-1])
        return put_record(store, record)

    monkeypatch.setattr(LocalStore, "put_record", changed)
    made = tiny_fleet(skus="[cpu]")
    assert engines(made.build()) == {"tiny-fp16": "assembled"}
    load_manifest(made.folder / "engines/tiny-fp16").check_files(hashes=True)


def test_a_checkpoint_under_two_names_makes_two_engines_of_their_own(tiny_fleet: MakeFleet) -> None:
    """Their unit is one; a write into one engine's files is none into the other's."""
    made = tiny_fleet({"a": "llama"})
    (made.folder / "again").symlink_to(made.folder / "a")
    made.edit("a: a", "a: a, b: again")
    assert engines(made.build()) == {"a-fp16": "assembled", "b-fp16": "assembled"}
    plans = [made.folder / f"engines/{name}-fp16/targets/cpu/model.plan" for name in "ab"]
    assert plans[0].read_bytes() == plans[1].read_bytes()
    assert plans[0].stat().st_ino != plans[1].stat().st_ino


@pytest.mark.parametrize(
    ("family", "recipe"), [("llama", "fp16"), ("qwen3", "int8"), ("gemma2", "fp32"), ("phi3", "int4")]
)
def test_it_generates_what_a_build_does(
    tiny_fleet: MakeFleet, tmp_path: Path, family: str, recipe: str
) -> None:
    fleet = tiny_fleet(family, recipes=f"[{recipe}]")
    fleet.build()
    out = fleet.folder / f"engines/tiny-{recipe}"
    build_engine(
        plan_build(fleet.folder / "tiny", ["cpu"], precision=recipe, limits=LIMITS), tmp_path / "built"
    )
    assert files(out) == files(tmp_path / "built")
    assert manifest_json(out) == manifest_json(tmp_path / "built")
    assert len(generated(out)) == 6
    assert generated(out) == generated(tmp_path / "built")


def test_a_build_goes_on_from_an_engine_of_a_fleet(fleet: TinyFleet) -> None:
    """To `plansmith build` it is one of its own: nothing is compiled again."""
    out = fleet.folder / "engines/tiny-fp16"
    before = (out / MANIFEST_NAME).read_bytes()
    plan = plan_build(fleet.folder / "tiny", ["cpu", "sm89"], precision="fp16", limits=LIMITS)
    report = build_engine(plan, out)
    assert {one.status for one in report.targets.values()} == {"kept"}
    assert (out / MANIFEST_NAME).read_bytes() == before


def test_what_stays_the_same_is_not_written_again(fleet: TinyFleet) -> None:
    out = fleet.folder / "engines/tiny-fp16"
    before = {name: (out / name).stat().st_ino for name in files(out)}
    fleet.edit("[cpu, sm89]", "[cpu, sm89, sm80]")
    assert engines(fleet.build()) == {"tiny-fp16": "assembled"}
    assert len(load_manifest(out).targets) == 3
    assert {name: (out / name).stat().st_ino for name in before} == before


def test_an_engine_that_lost_a_file_is_made_again(fleet: TinyFleet) -> None:
    out = fleet.folder / "engines/tiny-fp16"
    wanted = files(out)
    (out / "targets/sm89/model.plan").unlink()
    assert engines(fleet.build()) == {"tiny-fp16": "assembled"}
    assert files(out) == wanted
    (out / MANIFEST_NAME).write_text("{}")
    assert engines(fleet.build()) == {"tiny-fp16": "assembled"}
    assert files(out) == wanted and engines(fleet.build()) == {"tiny-fp16": "kept"}


def test_a_target_that_is_gone_from_the_file_goes_from_the_engine(fleet: TinyFleet) -> None:
    fleet.edit("[cpu, sm89]", "[cpu]")
    assert engines(fleet.build()) == {"tiny-fp16": "assembled"}
    out = fleet.folder / "engines/tiny-fp16"
    assert list(load_manifest(out).targets) == ["cpu"] and not (out / "targets/sm89").exists()
    assert generated(out) != ()


def test_units_that_do_not_belong_together(fleet: TinyFleet, tmp_path: Path) -> None:
    first = records(fleet)
    fleet.edit("max_batch_size: 4", "max_batch_size: 2")
    fleet.build()
    second = records(fleet)
    with pytest.raises(EngineFileError, match="differ in limits, so they are no one engine"):
        assemble([first[0], second[1]], fleet.store, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    bare = dataclasses.replace(first[0], content={})
    with pytest.raises(EngineFileError, match="has no manifest, so it is no unit's"):
        assemble([bare], fleet.store, tmp_path / "out")


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_an_output_that_is_something_else(fleet: TinyFleet, tmp_path: Path, kind: str) -> None:
    out = tmp_path / "out"
    if kind == "file":
        out.write_text("mine")
    else:
        out.mkdir()
        (out / "mine").write_text("mine")
    with pytest.raises(InvalidArgumentError, match="out "):
        assemble(records(fleet), fleet.store, out)
    assert (out if kind == "file" else out / "mine").read_text() == "mine"
    assert left_behind(tmp_path) == []


def test_a_fleets_output_that_is_something_else(fleet: TinyFleet) -> None:
    """That engine fails by name, and the others are made."""
    fleet.edit("recipes: {fp16: {draft: int4}}", "recipes: {fp16: {draft: int4}, int8: }")
    other = fleet.folder / "engines/tiny-int8"
    other.mkdir()
    (other / "mine").write_text("mine")
    report = fleet.build()
    assert engines(report) == {"tiny-fp16": "kept", "tiny-int8": "failed"}
    assert "holds files but no manifest.json" in report.failures["tiny-int8"]
    assert (other / "mine").read_text() == "mine"
