"""Fleets between machines: what is pushed and pulled, what is refused, and what a collection leaves."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from plansmith.fleet.share import Pulled, collect_fleet, pull_fleet, push_fleet, verify_engines
from plansmith.fleet.store import Ref, RemoteStore, open_store, verify
from plansmith.fleet.store.errors import SignatureError
from plansmith.fleet.store.signing import PublicKey, load_private, load_public, make_key
from plansmith.runtime.errors import InvalidArgumentError
from plansmith.runtime.manifest import load_manifest
from tiny_fleets import QuickRtx, TinyFleet, engines, generated, left_behind, names, statuses

MakeFleet = Callable[..., TinyFleet]
TWO = {"a": "llama", "b": "qwen3"}


@pytest.fixture
def remote(tmp_path: Path) -> RemoteStore:
    return RemoteStore(f"file://{tmp_path}/remote")


class Machine:
    """Another machine: a folder with a store of its own, and where it has the fleet's engines."""

    def __init__(self, folder: Path) -> None:
        self.store = open_store(folder / "store")
        self.engines = folder / "engines"

    def pull(self, fleet: TinyFleet, remote: RemoteStore, *only: str, check_hashes: bool = False) -> Pulled:
        """Pull a fleet, whose checkpoints this machine does not have."""
        moved = dataclasses.replace(fleet.fleet, output=self.engines)
        return pull_fleet(moved, only, self.store, remote, check_hashes=check_hashes)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "machine")


def test_push_and_pull(
    tiny_fleet: MakeFleet, remote: RemoteStore, machine: Machine, quick_rtx: QuickRtx
) -> None:
    fleet = tiny_fleet(TWO, skus="[cpu, l4, l40s]")
    fleet.build("a/*")
    sent, absent = push_fleet(fleet.fleet, fleet.units(), fleet.store, remote)
    assert (sent.records, absent) == (2, ["b/fp16/cpu", "b/fp16/sm89"])
    fleet.build()
    sent, absent = push_fleet(fleet.fleet, fleet.units(), fleet.store, remote)
    assert (sent.records, absent) == (2, [])
    assert push_fleet(fleet.fleet, fleet.units(), fleet.store, remote)[0].num_bytes == 0
    assert verify(remote) == []
    tokens = generated(fleet.folder / "engines/a-fp16")
    for name in TWO:
        shutil.rmtree(fleet.folder / name)  # who serves needs no checkpoints
    pulled = machine.pull(fleet, remote)
    assert {one.name: one.status for one in pulled.engines} == {"a-fp16": "assembled", "b-fp16": "assembled"}
    assert pulled.absent == () and pulled.transferred.records == 4
    for name in ("a-fp16", "b-fp16"):
        made = (machine.engines / name / "manifest.json").read_bytes()
        assert made == (fleet.folder / "engines" / name / "manifest.json").read_bytes()
    assert generated(machine.engines / "a-fp16") == tokens
    again = machine.pull(fleet, remote)
    assert again.transferred.num_bytes == 0 and {one.status for one in again.engines} == {"kept"}
    assert verify(machine.store) == []


def test_a_pull_of_some_members_keeps_the_engine_whole(
    tiny_fleet: MakeFleet, remote: RemoteStore, machine: Machine, quick_rtx: QuickRtx
) -> None:
    """What was pulled before stays in its engine, unless it is another plan by now."""
    fleet = tiny_fleet(skus="[cpu, l4]")
    fleet.build(remote=remote, push=True)
    machine.pull(fleet, remote, "*/cpu")
    machine.pull(fleet, remote, "*/l4")
    assert set(load_manifest(machine.engines / "tiny-fp16").targets) == {"cpu", "sm89"}
    fleet.edit("max_batch_size: 4", "max_batch_size: 2")
    fleet.build(remote=remote, push=True)
    machine.pull(fleet, remote, "*/l4")
    assert set(load_manifest(machine.engines / "tiny-fp16").targets) == {"sm89"}


def test_a_machine_pulls_what_it_serves(
    tiny_fleet: MakeFleet, remote: RemoteStore, machine: Machine, quick_rtx: QuickRtx
) -> None:
    fleet = tiny_fleet(TWO, skus="[cpu, l4, sm80]")
    fleet.build(remote=remote, push=True)
    pulled = machine.pull(fleet, remote, "a/*/l4")
    assert [one.name for one in pulled.engines] == ["a-fp16"]
    assert list(load_manifest(machine.engines / "a-fp16").targets) == ["sm89"]
    assert list(machine.store.refs("chat")) == ["a/fp16/l4"]
    pulled = machine.pull(fleet, remote, "a/*")
    assert len(load_manifest(machine.engines / "a-fp16").targets) == 3
    with pytest.raises(InvalidArgumentError, match="matches no"):
        machine.pull(fleet, remote, "c/*")


def test_what_is_not_there_yet_is_told(tiny_fleet: MakeFleet, remote: RemoteStore, machine: Machine) -> None:
    fleet = tiny_fleet(TWO)
    fleet.build("a/*", remote=remote, push=True)
    pulled = machine.pull(fleet, remote)
    assert pulled.absent == ("b/fp16/cpu",)
    assert [one.status for one in pulled.engines] == ["assembled"]


def test_what_the_remote_has_is_not_compiled(tiny_fleet: MakeFleet, remote: RemoteStore) -> None:
    fleet = tiny_fleet(TWO)
    fleet.build(remote=remote, push=True)
    shutil.rmtree(fleet.folder / ".plansmith")
    shutil.rmtree(fleet.folder / "engines")
    report = fleet.build(remote=remote)
    assert set(statuses(report).values()) == {"remote"} and report.failures == {}
    assert engines(report) == {"a-fp16": "waiting", "b-fp16": "waiting"}
    pull_fleet(fleet.fleet, (), fleet.store, remote)
    report = fleet.build(remote=remote)
    assert set(statuses(report).values()) == {"kept"} and set(engines(report).values()) == {"kept"}


def test_pushing_goes_on_where_the_remote_was_away(tiny_fleet: MakeFleet, tmp_path: Path) -> None:
    """What was built stays built: it is pushed by the next run, and nothing is compiled again."""
    fleet = tiny_fleet(TWO)
    (tmp_path / "remote").write_text("in the way")
    away = RemoteStore(f"file://{tmp_path}/remote/store")
    try:
        failures = fleet.build(remote=away, push=True).failures
    except Exception as error:  # said at once, before anything is compiled
        failures = {"fleet": str(error)}
    assert failures
    before = set(names(fleet.store))
    (tmp_path / "remote").unlink()
    back = RemoteStore(f"file://{tmp_path}/remote/store")
    report = fleet.build(remote=back, push=True)
    assert report.failures == {}
    assert before <= set(names(fleet.store))
    assert sorted(back.refs("chat")) == ["a/fp16/cpu", "b/fp16/cpu"] and verify(back) == []


def largest(folder: Path) -> Path:
    return max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


@pytest.mark.parametrize("kind", ["chunks", "files"])
def test_a_tampered_remote(
    tiny_fleet: MakeFleet, remote: RemoteStore, machine: Machine, tmp_path: Path, kind: str
) -> None:
    """A pull refuses it by name, and nothing of it gets in."""
    fleet = tiny_fleet()
    fleet.build(remote=remote, push=True)
    path = largest(tmp_path / "remote" / kind)
    data = path.read_bytes()
    middle = len(data) // 2
    path.write_bytes(data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])
    pulled = machine.pull(fleet, remote)
    assert list(pulled.damaged) == ["tiny/fp16/cpu"] and path.name in pulled.damaged["tiny/fp16/cpu"]
    assert [(one.status, one.why) for one in pulled.engines] == [
        ("failed", "tiny/fp16/cpu did not come whole")
    ]
    assert list(machine.store.records()) == [] and verify(machine.store) == []
    assert machine.store.refs("chat") == {} and not machine.engines.exists()
    # It is put right by whoever has it, once what is wrong is removed, as the error says.
    path.unlink()
    push_fleet(fleet.fleet, fleet.units(), fleet.store, remote)
    assert verify(remote) == []
    assert [one.status for one in machine.pull(fleet, remote).engines] == ["assembled"]


def of_unit(remote: RemoteStore, member: str, kind: str) -> str:
    """Return the name of an object that a member alone has, of that kind."""
    key = remote.refs("chat")[member].key
    record = remote.record(key)
    assert record is not None
    plan = next(file for file in record.files if file.path.endswith("model.plan"))
    made = remote.file_list(plan.sha256)
    assert made is not None
    found = {
        "chunk": f"chunks/{made.chunks[0].sha256[:2]}/{made.chunks[0].sha256}",
        "list": f"files/{plan.sha256[:2]}/{plan.sha256}.json",
        "record": f"records/{key}.json",
        "ref": f"refs/chat/{member}.json",
    }
    return found[kind]


@pytest.mark.parametrize("is_missing", [False, True])
@pytest.mark.parametrize("kind", ["chunk", "list", "record", "ref"])
def test_what_is_damaged_stops_no_other_engine(
    tiny_fleet: MakeFleet,
    remote: RemoteStore,
    machine: Machine,
    tmp_path: Path,
    quick_rtx: QuickRtx,
    kind: str,
    is_missing: bool,
) -> None:
    """Its member is named with what is wrong; what else the pull is about comes, and opens."""
    fleet = tiny_fleet(TWO, skus="[cpu, l4]")
    fleet.build(remote=remote, push=True)
    path = tmp_path / "remote" / of_unit(remote, "a/fp16/cpu", kind)
    whole = path.read_bytes()
    if is_missing:
        path.unlink()
    else:
        path.write_bytes(b"?" + whole[1:])
    pulled = machine.pull(fleet, remote)
    if kind == "ref" and is_missing:  # which is as if it was never pushed
        assert pulled.absent == ("a/fp16/cpu",) and pulled.damaged == {}
        return
    assert list(pulled.damaged) == ["a/fp16/cpu"] and pulled.absent == ()
    assert path.name.removesuffix(".json") in pulled.damaged["a/fp16/cpu"]
    assert {one.name: one.status for one in pulled.engines} == {"a-fp16": "failed", "b-fp16": "assembled"}
    assert "a/fp16/cpu" in pulled.engines[0].why and "a/fp16/l4" not in pulled.engines[0].why
    assert len(generated(machine.engines / "b-fp16")) == 6 and not (machine.engines / "a-fp16").exists()
    assert verify(machine.store) == [] and "a/fp16/cpu" not in machine.store.refs("chat")
    path.write_bytes(whole)
    pulled = machine.pull(fleet, remote)
    assert {one.name: one.status for one in pulled.engines} == {"a-fp16": "assembled", "b-fp16": "kept"}
    assert pulled.damaged == {}


def test_an_altered_engine(tiny_fleet: MakeFleet, remote: RemoteStore, machine: Machine) -> None:
    """It is found and mended where that is asked for; otherwise it is not read, which takes long."""
    fleet = tiny_fleet(TWO)
    fleet.build(remote=remote, push=True)
    machine.pull(fleet, remote)
    moved = dataclasses.replace(fleet.fleet, output=machine.engines)
    engine = machine.engines / "a-fp16"
    plan = engine / "targets/cpu/model.plan"
    whole, inode = plan.read_bytes(), plan.stat().st_ino
    assert verify_engines(moved, "mend it") == []
    data = bytearray(whole)
    data[len(data) // 2] ^= 1
    plan.write_bytes(data)
    assert {one.status for one in machine.pull(fleet, remote).engines} == {"kept"}
    (problem,) = verify_engines(moved, "mend it")
    assert (problem.name, problem.fix) == (str(plan), "mend it") and "was altered" in problem.what
    first, second = machine.pull(fleet, remote, check_hashes=True).engines
    assert (first.status, second.status) == ("assembled", "kept")
    assert first.why == "written anew, for they were altered: targets/cpu/model.plan"
    # Under another inode: who has the old one mapped keeps it.
    assert plan.read_bytes() == whole and plan.stat().st_ino != inode
    assert verify_engines(moved, "mend it") == []
    assert {one.status for one in machine.pull(fleet, remote, check_hashes=True).engines} == {"kept"}
    plan.write_bytes(whole[:-1])
    (problem,) = verify_engines(moved, "mend it")
    assert problem.what == f"has {len(whole) - 1} bytes, wanted {len(whole)}"
    plan.unlink()
    assert [one.what for one in verify_engines(moved, "mend it")] == ["is missing"]
    (engine / "manifest.json").write_text("{")
    (problem,) = verify_engines(moved, "mend it")
    assert problem.name == str(engine) and problem.what.startswith("cannot be read (")
    shutil.rmtree(engine)
    assert verify_engines(moved, "mend it") == []


def test_what_the_store_here_cannot_give_back(
    tiny_fleet: MakeFleet, remote: RemoteStore, machine: Machine
) -> None:
    """The engine stays as it is, and what to do is told."""
    fleet = tiny_fleet()
    fleet.build(remote=remote, push=True)
    machine.pull(fleet, remote)
    plan = machine.engines / "tiny-fp16/targets/cpu/model.plan"
    plan.write_bytes(b"?" + plan.read_bytes()[1:])
    altered = plan.read_bytes()
    chunk = largest(machine.store.root / "chunks")
    chunk.write_bytes(b"?" + chunk.read_bytes()[1:])
    (engine,) = machine.pull(fleet, remote, check_hashes=True).engines
    assert engine.status == "failed" and chunk.name in engine.why
    assert "delete that file, then build or pull again" in engine.why
    assert plan.read_bytes() == altered
    chunk.unlink()
    assert [one.status for one in machine.pull(fleet, remote, check_hashes=True).engines] == ["assembled"]


def test_a_push_keeps_when_it_was_built(
    tiny_fleet: MakeFleet, remote: RemoteStore, machine: Machine, tmp_path: Path
) -> None:
    fleet = tiny_fleet()
    fleet.build(remote=remote, push=True)
    key = fleet.store.refs("chat")["tiny/fp16/cpu"].key
    then = "2026-01-31T12:00:00Z"
    fleet.store.set_ref("chat", "tiny/fp16/cpu", Ref(key, then))
    push_fleet(fleet.fleet, fleet.units(), fleet.store, remote)
    assert remote.refs("chat")["tiny/fp16/cpu"].time == then
    other = RemoteStore(f"file://{tmp_path}/other")
    fleet.build(remote=other, push=True)
    assert other.refs("chat")["tiny/fp16/cpu"].time == then
    machine.pull(fleet, remote)
    assert machine.store.refs("chat")["tiny/fp16/cpu"].time == then
    # Where no ref says it, the record does: a member that comes to have a plan that is there.
    fleet.store.remove_ref("chat", "tiny/fp16/cpu")
    record = fleet.store.record(key)
    assert record is not None
    push_fleet(fleet.fleet, fleet.units(), fleet.store, remote)
    assert remote.refs("chat")["tiny/fp16/cpu"].time == record.content["manifest"]["created"]
    fleet.build()
    assert fleet.store.refs("chat")["tiny/fp16/cpu"].time == record.content["manifest"]["created"]


def test_a_collection_tells_what_waits(tiny_fleet: MakeFleet) -> None:
    """Files that nothing needs any more are a day old before they go."""
    fleet = tiny_fleet(TWO)
    fleet.build()
    fleet.edit("a: a, b: b", "a: a")
    before = {path for path in fleet.store.root.rglob("*") if path.is_file()}
    _, gone = collect_fleet(fleet.fleet, fleet.store, keep_days=0)
    assert gone.records == 1 and gone.chunks == 0 and gone.waiting > 0
    stay = [path for path in before if path.exists()]
    _, again = collect_fleet(fleet.fleet, fleet.store, keep_days=0)
    assert again.waiting_bytes == gone.waiting_bytes
    for path in stay:
        os.utime(path, (1, 1))
    _, then = collect_fleet(fleet.fleet, fleet.store, keep_days=0)
    assert then.files + then.chunks == gone.waiting and then.waiting == 0
    assert then.num_bytes >= gone.waiting_bytes and fleet.problems() == []


def key_pair(folder: Path, name: str) -> tuple[object, PublicKey]:
    public = make_key(folder / f"{name}.pem")
    return load_private(str(folder / f"{name}.pem")), load_public(public)


def test_signatures(tiny_fleet: MakeFleet, tmp_path: Path, machine: Machine) -> None:
    """A remote store with trust takes nothing unsigned, or of others; and gives nothing of that kind."""
    private, public = key_pair(tmp_path, "ours")
    stranger, _ = key_pair(tmp_path, "strange")
    url = f"file://{tmp_path}/remote"
    ours = RemoteStore(url, trust=[public])
    fleet = tiny_fleet()
    for key in (None, stranger):
        store = open_store(fleet.fleet.store, key=key)  # type: ignore[arg-type]
        fleet.build(assemble=False)
        with pytest.raises(SignatureError):
            push_fleet(fleet.fleet, fleet.units(), store, ours)
        assert list(ours.records()) == []
    signing = open_store(fleet.fleet.store, key=private)  # type: ignore[arg-type]
    assert push_fleet(fleet.fleet, fleet.units(), signing, ours)[0].records == 1
    assert [one.status for one in machine.pull(fleet, ours).engines] == ["assembled"]
    # Somebody who cares for no signature puts a record of his own there.
    (key,) = list(ours.records())
    record = fleet.store.record(key)
    assert record is not None
    ours.objects.remove(f"records/{key}.json")
    RemoteStore(url).put_record(dataclasses.replace(record, provenance={"by": "a stranger"}))
    other = Machine(tmp_path / "other")
    assert key in other.pull(fleet, ours).damaged["tiny/fp16/cpu"]
    assert list(other.store.records()) == [] and not other.engines.exists()
    # A push puts it right; then somebody alters a byte of what was signed.
    push_fleet(fleet.fleet, fleet.units(), signing, ours)
    path = tmp_path / f"remote/records/{key}.json"
    whole = path.read_bytes()
    for place in range(20, len(whole) - 20, len(whole) // 7):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        assert key in other.pull(fleet, ours).damaged["tiny/fp16/cpu"]
    assert list(other.store.records()) == [] and not other.engines.exists()
    path.write_bytes(whole)
    assert [one.status for one in other.pull(fleet, ours).engines] == ["assembled"]


def test_a_collection_leaves_what_members_need(
    tiny_fleet: MakeFleet, remote: RemoteStore, quick_rtx: QuickRtx
) -> None:
    """What only a member had that is no more goes; all else stays, and still opens."""
    fleet = tiny_fleet(TWO, skus="[cpu, sm89]")
    fleet.build(remote=remote, push=True)
    tokens = generated(fleet.folder / "engines/a-fp16")
    fleet.edit("a: a, b: b", "a: a")
    forgotten, would = collect_fleet(fleet.fleet, fleet.store, keep_days=0, dry_run=True)
    assert forgotten == ["b/fp16/cpu", "b/fp16/sm89"] and len(names(fleet.store)) == 4
    forgotten, gone = collect_fleet(fleet.fleet, fleet.store, keep_days=0)
    assert forgotten == ["b/fp16/cpu", "b/fp16/sm89"] and gone.records == 2 and gone.kept_records == 2
    assert would == gone
    assert set(fleet.store.refs("chat")) == {"a/fp16/cpu", "a/fp16/sm89"}
    assert fleet.problems() == []
    shutil.rmtree(fleet.folder / "engines")
    assert engines(fleet.build()) == {"a-fp16": "assembled"}
    assert generated(fleet.folder / "engines/a-fp16") == tokens
    # The other store is another's: it is collected apart.
    assert len(list(remote.records())) == 4
    forgotten, gone = collect_fleet(fleet.fleet, remote, keep_days=0)
    assert forgotten == ["b/fp16/cpu", "b/fp16/sm89"] and gone.records + gone.aside > 0
    assert verify(remote) == []
    assert len(list(remote.records())) == 2


def test_a_member_that_comes_back_is_built_again_where_it_is_gone(tiny_fleet: MakeFleet) -> None:
    fleet = tiny_fleet(TWO)
    fleet.build()
    fleet.edit("a: a, b: b", "a: a")
    collect_fleet(fleet.fleet, fleet.store, keep_days=30)
    fleet.edit("a: a", "a: a, b: b")
    assert set(statuses(fleet.build()).values()) == {"kept"}  # young enough
    fleet.edit("a: a, b: b", "a: a")
    collect_fleet(fleet.fleet, fleet.store, keep_days=0)
    fleet.edit("a: a", "a: a, b: b")
    assert statuses(fleet.build()) == {"a/fp16/cpu": "kept", "b/fp16/cpu": "built"}


def test_another_fleets_members_stay(tiny_fleet: MakeFleet) -> None:
    """Fleets may share a store."""
    fleet = tiny_fleet(TWO)
    fleet.build()
    fleet.edit("name: chat", "name: code")
    fleet.edit("a: a, b: b", "b: b")
    assert statuses(fleet.build()) == {"b/fp16/cpu": "kept"}
    assert collect_fleet(fleet.fleet, fleet.store, keep_days=0)[0] == []
    assert len(names(fleet.store)) == 2
    assert left_behind(fleet.folder) == []
