"""A build of a fleet: what is compiled again, what is kept, and what a failure leaves."""

from __future__ import annotations

import dataclasses
import errno
import os
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from plansmith.builder import compile
from plansmith.fleet.budget import Budget
from plansmith.fleet.store import LocalStore
from plansmith.fleet.stored import forget
from plansmith.runtime.errors import BuildError, CheckpointError, EngineFileError, InvalidArgumentError
from plansmith.runtime.manifest import load_manifest
from tiny_fleets import (
    QuickRtx,
    TinyFleet,
    engines,
    generated,
    left_behind,
    names,
    statuses,
)

MakeFleet = Callable[..., TinyFleet]
TWO = {"a": "llama", "b": "qwen3"}
FOUR = "[cpu, sm80, sm89, sm120]"


def built(fleet: TinyFleet, *only: str, **options: Any) -> set[str]:
    """Build a fleet, which has to succeed, and return the units that were compiled."""
    report = fleet.build(*only, **options)
    assert report.failures == {}
    return {name for name, status in statuses(report).items() if status == "built"}


@pytest.fixture
def fleet(tiny_fleet: MakeFleet, quick_rtx: QuickRtx) -> TinyFleet:
    """Return a fleet of two models for four targets, built."""
    made = tiny_fleet(TWO, recipes="[fp16]", skus=FOUR)
    assert len(built(made)) == 8
    assert len(quick_rtx.compiled) == 6
    quick_rtx.compiled.clear()
    return made


class Eyes:
    """Counts what this process opens and maps while it looks; an audit hook cannot be taken out again."""

    def __init__(self) -> None:
        self.is_looking = False
        self.opened: list[str] = []
        self.num_maps = 0

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.is_looking:
            return
        if event == "open":
            self.opened.append(str(arguments[0]))
        self.num_maps += event == "mmap.__new__"


@pytest.fixture(scope="session")
def eyes() -> Eyes:
    made = Eyes()
    sys.addaudithook(made)
    return made


def read_bytes() -> int:
    """Return how many bytes this process has read from files, as the kernel counts them."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


def test_an_unchanged_fleet_compiles_and_reads_nothing(
    tmp_path: Path, quick_rtx: QuickRtx, eyes: Eyes, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tiny_models import make_tiny

    large = {
        name: make_tiny("llama", tmp_path / name, intermediate_size=4096, seed=n)
        for n, name in enumerate("ab")
    }
    fleet = TinyFleet(tmp_path / "fleet", large, skus=FOUR)
    weights = [fleet.folder / name / "model.safetensors" for name in "ab"]
    assert min(path.stat().st_size for path in weights) > 6 << 20
    assert len(built(fleet)) == 8
    before = fleet.records()

    def build_engine(*arguments: object, **options: object) -> None:
        raise AssertionError("a compiler was called")

    monkeypatch.setattr("plansmith.builder.build.build_engine", build_engine)
    fleet.build()  # what is imported late is there then
    bytes_before, eyes.is_looking = read_bytes(), True
    try:
        report = fleet.build()
    finally:
        eyes.is_looking = False
    assert set(statuses(report).values()) == {"kept"}
    assert engines(report) == {"a-fp16": "kept", "b-fp16": "kept"}
    # Headers are read, which say what there is; of the weights nothing is read or mapped.
    assert {Path(path) for path in eyes.opened if path.endswith(".safetensors")} <= set(weights)
    assert eyes.num_maps == 0
    assert 0 < read_bytes() - bytes_before < 4 << 20
    assert fleet.records() == before


def test_the_limits_of_one_sku(fleet: TinyFleet) -> None:
    """It gets an engine of its own; who is left in the other one is not touched."""
    fleet.edit("[cpu, sm80, sm89, sm120]", "{cpu: , sm80: , sm89: {limits: {max_batch_size: 2}}, sm120: }")
    assert built(fleet) == {"a/fp16/sm89@sm89", "b/fp16/sm89@sm89"}
    assert sorted(path.name for path in (fleet.folder / "engines").iterdir()) == [
        "a-fp16",
        "a-fp16-sm89",
        "b-fp16",
        "b-fp16-sm89",
    ]
    own = load_manifest(fleet.folder / "engines/a-fp16-sm89")
    assert list(own.targets) == ["sm89"] and own.limits.max_batch_size == 2
    rest = load_manifest(fleet.folder / "engines/a-fp16")
    assert sorted(rest.targets) == ["cpu", "sm120", "sm80"] and rest.limits.max_batch_size == 4
    fleet.edit("max_batch_size: 2", "max_batch_size: 3")
    assert built(fleet) == {"a/fp16/sm89@sm89", "b/fp16/sm89@sm89"}
    fleet.edit("max_batch_size: 3", "max_batch_size: 2")
    assert built(fleet) == set()  # the store still has them


def flip(path: Path, *, keep_time: bool) -> None:
    """Change the last byte of a file."""
    found = path.stat()
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        (last,) = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))
    if keep_time:
        os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))
        assert path.stat().st_mtime_ns == found.st_mtime_ns
    assert path.stat().st_size == found.st_size


@pytest.mark.parametrize("keep_time", [False, True])
def test_a_changed_weight(fleet: TinyFleet, keep_time: bool) -> None:
    """All plans of its model are compiled again, and none of the other's, also where its time was put back."""
    flip(fleet.folder / "a/model.safetensors", keep_time=keep_time)
    assert built(fleet) == {"a/fp16/cpu", "a/fp16/sm80", "a/fp16/sm89", "a/fp16/sm120"}


def test_a_file_that_is_touched_or_copied_is_what_it_was(fleet: TinyFleet) -> None:
    weights = fleet.folder / "a/model.safetensors"
    weights.touch()
    shutil.copy(weights, fleet.folder / "copy")
    (fleet.folder / "copy").replace(weights)
    assert built(fleet) == set()


def test_a_changed_tokenizer_is_the_models_alone(fleet: TinyFleet) -> None:
    path = fleet.folder / "a/tokenizer_config.json"
    path.write_text(path.read_text().replace("assistant", "helper"))
    assert {name.split("/")[0] for name in built(fleet)} == {"a"}
    assert "helper" in (fleet.folder / "engines/a-fp16/tokenizer/tokenizer_config.json").read_text()


def test_an_option_of_one_recipe(tiny_fleet: MakeFleet, quick_rtx: QuickRtx) -> None:
    fleet = tiny_fleet(recipes="{fp16: , int8: {draft: int4}}", skus="[cpu, sm89]")
    assert len(built(fleet)) == 4
    assert "tiny/int4/sm89/draft" in quick_rtx.compiled
    fleet.edit("{draft: int4}", "{draft: none}")
    assert built(fleet) == {"tiny/int8/cpu", "tiny/int8/sm89"}
    assert load_manifest(fleet.folder / "engines/tiny-int8").draft is None


def test_gpus_of_one_capability_share_a_unit(tiny_fleet: MakeFleet, quick_rtx: QuickRtx) -> None:
    fleet = tiny_fleet(skus="[l4, l40s]")
    assert built(fleet) == {"tiny/fp16/sm89"}
    assert quick_rtx.compiled == ["tiny/fp16/sm89"]
    refs = fleet.store.refs("chat")
    assert set(refs) == {"tiny/fp16/l4", "tiny/fp16/l40s"}
    assert refs["tiny/fp16/l4"].key == refs["tiny/fp16/l40s"].key
    fleet.edit("[l4, l40s]", "[l4, l40s, sm89]")
    assert built(fleet) == set()
    assert len(fleet.store.refs("chat")) == 3


def test_units_of_one_key_are_compiled_once(tiny_fleet: MakeFleet, quick_rtx: QuickRtx) -> None:
    """Two models of one checkpoint, side by side in one process."""
    fleet = tiny_fleet(skus="[cpu, sm89]")
    fleet.edit("{tiny: tiny}", "{tiny: tiny, other: tiny}")
    quick_rtx.meanwhile = lambda name: None
    report = fleet.build()
    assert report.failures == {}
    assert sorted(statuses(report).values()) == ["built", "built", "kept", "kept"]
    assert quick_rtx.compiled == ["tiny/fp16/sm89"]
    assert engines(report) == {"tiny-fp16": "assembled", "other-fp16": "assembled"}


def test_a_failure_stops_nobody_else(tiny_fleet: MakeFleet, quick_rtx: QuickRtx) -> None:
    fleet = tiny_fleet(TWO, skus="[cpu, sm80, sm89]")
    quick_rtx.errors["a/fp16/sm89"] = BuildError("no plan for sm89", ["line"])
    report = fleet.build()
    assert report.failures == {"a/fp16/sm89": "no plan for sm89"}
    assert sorted(statuses(report).values()) == ["built"] * 5 + ["failed"]
    assert engines(report) == {"a-fp16": "waiting", "b-fp16": "assembled"}
    assert "a/fp16/sm89" in report.engines[0].why
    assert not (fleet.folder / "engines/a-fp16").exists()
    quick_rtx.errors.clear()
    assert built(fleet) == {"a/fp16/sm89"}
    assert generated(fleet.folder / "engines/a-fp16") != ()


def test_a_failure_leaves_the_engine_that_was_there(fleet: TinyFleet, quick_rtx: QuickRtx) -> None:
    flip(fleet.folder / "a/model.safetensors", keep_time=False)
    quick_rtx.errors["a/fp16/sm89"] = BuildError("no plan")
    before = (fleet.folder / "engines/a-fp16/manifest.json").read_bytes()
    report = fleet.build()
    assert engines(report) == {"a-fp16": "waiting", "b-fp16": "kept"}
    assert (fleet.folder / "engines/a-fp16/manifest.json").read_bytes() == before


def test_a_bug_is_raised_and_leaves_nothing(tiny_fleet: MakeFleet, quick_rtx: QuickRtx) -> None:
    fleet = tiny_fleet(skus="[cpu, sm89]")
    quick_rtx.errors["tiny/fp16/sm89"] = KeyError("a bug")
    with pytest.raises(KeyError, match="a bug"):
        fleet.build()
    assert left_behind(fleet.folder) == [] and fleet.problems() == []


def test_kernels_that_fail_are_no_plan(
    tiny_fleet: MakeFleet, quick_rtx: QuickRtx, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key says that its plan has kernels: a record without them would never be made again."""
    from plansmith.builder import device_kernels

    def no_kernels(*arguments: object, **options: object) -> None:
        raise BuildError("the kernel compiler crashed")

    fleet = tiny_fleet(skus="[cpu, sm89]")
    with monkeypatch.context() as broken:
        broken.setattr(device_kernels, "compile_tasks", no_kernels)
        report = fleet.build()
    assert set(report.failures) == {"tiny/fp16/sm89"}
    assert "its kernels could not be compiled" in report.failures["tiny/fp16/sm89"]
    assert "the kernel compiler crashed" in report.failures["tiny/fp16/sm89"]
    assert built(fleet) == {"tiny/fp16/sm89"}


def test_the_log_of_a_failed_compile_stays(tiny_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names it, and the next compile that succeeds removes it."""

    def fails(request: compile.CompileRequest, targets: Any, *arguments: Any) -> Any:
        log = compile.failure_log(request.out, "sm89")
        log.write_text("line 1\nline 2\n")
        raise BuildError(f"no plan; the whole log is {log}", ["line 2"])
        yield

    fleet = tiny_fleet(skus="[sm89]")
    with monkeypatch.context() as broken:
        broken.setattr(compile, "_compile_rtx", fails)
        report = fleet.build()
    log = Path(report.failures["tiny/fp16/sm89"].rpartition(" ")[2])
    assert log.parent == fleet.folder / ".plansmith/store/logs"
    assert log.read_text() == "line 1\nline 2\n"
    assert fleet.problems() == []
    from tiny_fleets import quick_kernels

    monkeypatch.setattr("plansmith.builder.device_kernels.compile_tasks", quick_kernels)
    monkeypatch.setattr(compile, "_compile_rtx", QuickRtx())
    assert built(fleet) == {"tiny/fp16/sm89"}
    assert not log.exists()


def test_a_checkpoint_that_changes_meanwhile(tiny_fleet: MakeFleet, quick_rtx: QuickRtx) -> None:
    """What came of it is thrown away: no record says that it is the plan of either."""
    fleet = tiny_fleet(TWO, skus="[sm89]")

    def change(name: str) -> None:
        if name.startswith("a/"):
            flip(fleet.folder / "a/model.safetensors", keep_time=True)

    quick_rtx.meanwhile = change
    report = fleet.build()
    assert set(report.failures) == {"a/fp16/sm89"}
    assert "changed while it was compiled" in report.failures["a/fp16/sm89"]
    assert len(names(fleet.store)) == 1
    quick_rtx.meanwhile = lambda name: None
    assert built(fleet) == {"a/fp16/sm89"}


def test_a_tokenizer_that_changes_meanwhile(tiny_fleet: MakeFleet, quick_rtx: QuickRtx) -> None:
    """It is read before and behind the compile: either way the record's inputs have to be what is in it."""
    fleet = tiny_fleet(skus="[sm89]")
    path = fleet.folder / "tiny/tokenizer_config.json"
    units = fleet.units()
    path.write_text(path.read_text().replace("assistant", "helper"))
    shop_report = _build_units(fleet, units)
    assert "the tokenizer of" in shop_report.failures["tiny/fp16/sm89"]
    assert names(fleet.store) == []
    assert built(fleet) == {"tiny/fp16/sm89"}


def _build_units(fleet: TinyFleet, units: Any) -> Any:
    from plansmith.fleet.build import BuildOptions, build_fleet

    return build_fleet(
        fleet.fleet, units, fleet.store, BuildOptions(Budget(64 << 30, 2), hashes=fleet.hashes())
    )


def test_a_checkpoint_that_is_gone(fleet: TinyFleet) -> None:
    shutil.rmtree(fleet.folder / "b")
    with pytest.raises(CheckpointError, match=r"plansmith\.yaml:4: .*/b"):
        fleet.build()


def test_graphs_go_with_their_engines_last_unit(
    tiny_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are as large as the weights: those of an engine that is done are not on the disk beside the next one's."""
    from tiny_fleets import quick_kernels

    graphs: list[tuple[str, int]] = []

    class Lowers(QuickRtx):
        def __call__(self, request: compile.CompileRequest, targets: Any, *rest: Any) -> Any:
            for target in targets:
                path = request.lowered(request.graph(target), "float16")
                assert path is not None
                there = list(fleet.folder.rglob("graph.onnx"))
                graphs.append((request.checkpoint.path.name, len(there)))
            yield from super().__call__(request, targets, *rest)

    fleet = tiny_fleet(TWO, skus="[sm80, sm89]")
    monkeypatch.setattr("plansmith.builder.device_kernels.compile_tasks", quick_kernels)
    monkeypatch.setattr(compile, "_compile_rtx", Lowers())
    assert len(built(fleet, budget=Budget(64 << 30, 1))) == 4
    assert graphs == [("a", 1), ("a", 1), ("b", 1), ("b", 1)]
    assert list(fleet.folder.rglob("graph.onnx")) == []


def test_a_graph_waits_for_a_unit_that_another_builder_has(tiny_fleet: MakeFleet, tmp_path: Path) -> None:
    from plansmith.builder.progress import no_progress
    from plansmith.fleet.engine_graphs import EngineGraphs
    from plansmith.fleet.unit_build import Workshop, build_unit

    fleet = tiny_fleet(skus="[cpu]")
    (unit,) = fleet.units()
    graphs = EngineGraphs(tmp_path / "graphs", threading.Event())
    graphs.expect(unit.engine.name)
    path = graphs.of(unit.engine.name).graphs.file("graph", lambda path: path.touch())
    shop = Workshop(fleet.store, tmp_path, fleet.hashes(), graphs, no_progress)
    held = fleet.store.lock_unit(unit.key)
    assert held is not None
    with held:
        assert build_unit(unit, shop) is None
    assert path.exists()
    assert build_unit(unit, shop) is not None
    assert not path.exists()


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES])
def test_what_a_disk_says_while_a_unit_is_stored_fails_that_unit(
    tiny_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """The others are built, and the unit with the next run."""
    add_files, calls = LocalStore.add_files, list[Path]()

    def fails_once(store: LocalStore, root: Path, paths: Any) -> Any:
        calls.append(root)
        if len(calls) == 1:
            raise OSError(number, os.strerror(number), "/a/disk")
        return add_files(store, root, paths)

    monkeypatch.setattr(LocalStore, "add_files", fails_once)
    fleet = tiny_fleet(recipes="[fp16, int8]")
    report = fleet.build(budget=Budget(64 << 30, 1))
    assert sorted(statuses(report).values()) == ["built", "failed"]
    (why,) = (text for name, text in report.failures.items() if "/" in name)
    assert f"{os.strerror(number)} (/a/disk); run it again" in why
    assert sorted(statuses(fleet.build()).values()) == ["built", "kept"]
    assert left_behind(fleet.folder) == []


@pytest.mark.parametrize("lack", ["files", "one", "manifest", "kind"])
def test_a_record_that_is_no_engine_is_built_again(tiny_fleet: MakeFleet, lack: str) -> None:
    """Whoever put it there: kept, it would fail its engine for good."""
    fleet = tiny_fleet()
    (unit,) = fleet.units()
    assert engines(fleet.build()) == {"tiny-fp16": "assembled"}
    record = fleet.store.record(unit.key)
    assert record is not None
    changes: dict[str, dict[str, Any]] = {
        "files": {"files": ()},
        "one": {"files": record.files[:-1]},
        "manifest": {"content": {}},
        "kind": {"kind": "gate", "content": {}, "files": ()},
    }
    forget(fleet.store, unit.key)
    fleet.store.put_record(dataclasses.replace(record, **changes[lack]))
    shutil.rmtree(fleet.folder / "engines")
    report = fleet.build()
    assert report.failures == {} and engines(report) == {"tiny-fp16": "assembled"}
    load_manifest(fleet.folder / "engines/tiny-fp16").check_files(hashes=True)


def test_a_file_that_changes_before_it_is_stored_is_not(
    tiny_fleet: MakeFleet, quick_rtx: QuickRtx, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bytes would not be those that the manifest tells: kernels are described before they are stored."""
    add_files = LocalStore.add_files

    def changed(store: LocalStore, root: Path, paths: Any) -> Any:
        for path in paths:
            if path.endswith(".cubin"):
                (root / path).write_bytes(b"another")
        return add_files(store, root, paths)

    fleet = tiny_fleet(skus="[sm89]")
    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "add_files", changed)
        report = fleet.build()
    assert "changed before it was stored" in report.failures["tiny/fp16/sm89"]
    assert names(fleet.store) == []
    assert engines(fleet.build()) == {"tiny-fp16": "assembled"}


def test_a_plan_that_changes_once_it_is_stored_is_taken_from_the_store(
    tiny_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the manifest tells of a plan are the bytes that were stored."""
    add_files = LocalStore.add_files

    def changes(store: LocalStore, root: Path, paths: Any) -> Any:
        added = add_files(store, root, paths)
        for path in paths:
            (root / path).write_bytes(b"another")
        return added

    fleet = tiny_fleet(skus="[cpu]")
    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "add_files", changes)
        assert engines(fleet.build()) == {"tiny-fp16": "assembled"}
    manifest = load_manifest(fleet.folder / "engines/tiny-fp16")
    manifest.check_files(hashes=True)
    assert (fleet.folder / "engines/tiny-fp16/targets/cpu/model.plan").stat().st_size > 1000


def test_a_unit_larger_than_the_budget(tiny_fleet: MakeFleet, quick_rtx: QuickRtx) -> None:
    """It fails by name with the size to give, and the others are built."""
    fleet = tiny_fleet(skus="[cpu, sm89]")
    from plansmith.fleet.memory_watch import tree_bytes

    report = fleet.build(budget=Budget(tree_bytes(os.getpid()) + (100 << 20), 2))
    assert statuses(report) == {"tiny/fp16/cpu": "built", "tiny/fp16/sm89": "failed"}
    assert "tiny/fp16/sm89 needs about" in report.failures["tiny/fp16/sm89"]
    assert "give --memory" in report.failures["tiny/fp16/sm89"]
    assert engines(report) == {"tiny-fp16": "waiting"}
    assert quick_rtx.compiled == []


def test_only(fleet: TinyFleet, quick_rtx: QuickRtx) -> None:
    """The engine is made of all its plans, those that were not asked for as they are in the store."""
    fleet.edit("max_batch_size: 4", "max_batch_size: 2")
    report = fleet.build("a/fp16/sm89")
    assert statuses(report) == {"a/fp16/sm89": "built"}
    assert engines(report) == {"a-fp16": "waiting"} and "a/fp16/cpu" in report.engines[0].why
    assert load_manifest(fleet.folder / "engines/a-fp16").limits.max_batch_size == 4
    assert built(fleet, "a/fp16/cpu", "a/*/sm80") == {"a/fp16/cpu", "a/fp16/sm80"}
    report = fleet.build("a/*/sm120")
    assert engines(report) == {"a-fp16": "assembled"}
    manifest = load_manifest(fleet.folder / "engines/a-fp16")
    assert manifest.limits.max_batch_size == 2 and len(manifest.targets) == 4
    with pytest.raises(InvalidArgumentError, match="matches no unit"):
        fleet.build("a/fp16/sm90")


def test_another_machines_unit(tiny_fleet: MakeFleet, quick_rtx: QuickRtx) -> None:
    """TensorRT's plans are compiled on their GPU: the engine is made without, and says so."""
    fleet = tiny_fleet(skus="{cpu: , l4: {compiler: tensorrt}}")
    report = fleet.build()
    if statuses(report)["tiny/fp16/sm89-tensorrt"] == "built":
        pytest.skip("this machine has that GPU")
    assert report.failures == {}
    assert statuses(report) == {"tiny/fp16/cpu": "built", "tiny/fp16/sm89-tensorrt": "elsewhere"}
    (engine,) = report.engines
    assert (engine.status, engine.why) == ("assembled", "without sm89-tensorrt")
    assert list(load_manifest(fleet.folder / "engines/tiny-fp16").targets) == ["cpu"]
    assert engines(fleet.build()) == {"tiny-fp16": "kept"}
    fleet.edit("cpu: , ", "")
    (engine,) = fleet.build().engines
    assert engine.status == "waiting"


def test_a_build_by_another_store_format(fleet: TinyFleet) -> None:
    marker = fleet.folder / ".plansmith/store/plansmith-store.json"
    marker.write_text('{"format": 2}')
    with pytest.raises(EngineFileError, match="is a store of format 2, this plansmith reads format 1"):
        fleet.build()


def test_without_assembling(tiny_fleet: MakeFleet) -> None:
    fleet = tiny_fleet()
    report = fleet.build(assemble=False)
    assert report.engines == () and not (fleet.folder / "engines").exists()
    assert engines(fleet.build()) == {"tiny-fp16": "assembled"}


def test_a_report_as_json(tiny_fleet: MakeFleet) -> None:
    import json

    report = tiny_fleet().build()
    made = json.loads(json.dumps(report.to_json()))
    (unit,) = made["units"]
    assert unit["status"] == "built" and unit["predicted_bytes"] > 0 and unit["compile_seconds"] > 0
    assert made["fleet"] == "chat" and made["peak_bytes"] > 6 << 20 and len(unit["key"]) == 64


def damage(store: LocalStore, *, of_same_size: bool) -> Path:
    """Alter the largest chunk of a store, and return it."""
    path = max((store.root / "chunks").rglob("*"), key=lambda one: one.stat().st_size if one.is_file() else 0)
    data = path.read_bytes()
    path.write_bytes(bytes([data[0] ^ 1]) + data[1:] if of_same_size else data[:-1])
    return path


def test_a_chunk_that_was_cut_short_is_made_again(tiny_fleet: MakeFleet) -> None:
    fleet = tiny_fleet()
    built(fleet)
    damage(fleet.store, of_same_size=False)
    assert fleet.problems() != []
    assert built(fleet) == {"tiny/fp16/cpu"}
    assert fleet.problems() == []


def test_a_chunk_that_was_altered_says_what_to_do(tiny_fleet: MakeFleet) -> None:
    """Nothing is made of it; once it is removed, the next build makes it again."""
    fleet = tiny_fleet()
    built(fleet)
    tokens = generated(fleet.folder / "engines/tiny-fp16")
    path = damage(fleet.store, of_same_size=True)
    (problem,) = fleet.problems()[:1]
    assert path.name in problem
    shutil.rmtree(fleet.folder / "engines")
    report = fleet.build()
    assert engines(report) == {"tiny-fp16": "failed"} and not (fleet.folder / "engines/tiny-fp16").exists()
    assert path.name in report.engines[0].why and "delete that file" in report.engines[0].why
    path.unlink()
    assert built(fleet) == {"tiny/fp16/cpu"}
    assert fleet.problems() == [] and generated(fleet.folder / "engines/tiny-fp16") == tokens


def test_a_record_that_cannot_be_read_is_made_again(tiny_fleet: MakeFleet) -> None:
    fleet = tiny_fleet()
    built(fleet)
    (path,) = (fleet.store.root / "records").glob("*.json")
    path.write_bytes(path.read_bytes()[:-20])
    assert built(fleet) == {"tiny/fp16/cpu"}
    assert fleet.problems() == []


def test_a_cpu_plan_is_stopped_as_compilers_are(tiny_fleet: MakeFleet, tmp_path: Path) -> None:
    """It is made in a thread, which looks at the event between two tensors."""
    from plansmith.builder.targets.compiler_process import Stopped
    from plansmith.fleet.engine_graphs import EngineGraphs
    from plansmith.fleet.unit_build import Workshop, build_unit

    fleet, stop = tiny_fleet(), threading.Event()
    phases: list[str] = []

    def progress(who: str, phase: str, done: int, total: int) -> None:
        phases.append(phase)
        if len(phases) == 4:
            stop.set()

    graphs = EngineGraphs(tmp_path / "graphs", stop)
    (tmp_path / "scratch").mkdir()
    shop = Workshop(fleet.store, tmp_path / "scratch", fleet.hashes(), graphs, progress)
    with pytest.raises(Stopped):
        build_unit(fleet.units()[0], shop)
    assert len(phases) == 4 and phases[-1].startswith("packing")
    assert names(fleet.store) == [] and list((tmp_path / "scratch").iterdir()) == []
    held = fleet.store.lock_unit(fleet.units()[0].key)
    assert held is not None
    held.release()
