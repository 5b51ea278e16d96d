"""Collection takes what nothing needs, and nothing else, whatever is built or pushed meanwhile."""

from __future__ import annotations

import datetime
import shutil
import threading
import uuid
from pathlib import Path

import pytest
from plansmith.fleet.store import (
    DamagedError,
    LocalStore,
    Ref,
    RemoteStore,
    SignatureError,
    collect,
    open_store,
    pull,
    push,
    verify,
)
from plansmith.fleet.store.chunks import Chunk
from plansmith.fleet.store.reach import named_by_lists, named_by_records
from plansmith.fleet.store.remote_objects import STAMP
from plansmith.runtime.errors import NotFoundError
from stores import DAY_S, in_child, make_old, noise, put, read_back, remotes, sha256, write_files

SHARED = noise(1, 1_500_000)
REMOTES = ["plain", "memory"]


def files(name: str) -> dict[str, bytes]:
    """Return files of which one is shared with all others', and one is not."""
    return {"shared.plan": SHARED, f"{name}.log": name.encode()}


def everything(store: LocalStore | RemoteStore) -> set[str]:
    return {name for folder in ("records", "files", "chunks") for name in store.objects.names(folder)}


def test_what_refs_name_stays(in_memory: Path) -> None:
    store = open_store(in_memory / "store")
    kept, gone = (put(store, in_memory, name, files(name)).key for name in ("kept", "gone"))
    store.set_ref("chat", "smol/int8/l40s", Ref.now(kept))
    make_old(store.root, days=30)
    before = everything(store)
    would = collect(store, keep_days=14, dry_run=True)
    assert everything(store) == before
    done = collect(store, keep_days=14)
    assert done == would
    assert (done.records, done.files, done.chunks, done.kept_records) == (1, 1, 1, 1)
    assert list(store.records()) == [kept]
    assert verify(store) == []
    assert read_back(store, kept, in_memory / "out") == files("kept")
    assert done.num_bytes > 0
    assert not store.has_record(gone)
    again = collect(store, keep_days=14)
    assert (again.records, again.files, again.chunks, again.num_bytes) == (0, 0, 0, 0)
    store.remove_ref("chat", "smol/int8/l40s")
    collect(store, keep_days=14)
    assert everything(store) == set()


def test_what_is_young_stays(in_memory: Path) -> None:
    store = open_store(in_memory / "store")
    key = put(store, in_memory, "a", files("a")).key
    root = in_memory / "in"
    (unnamed,) = store.add_files(root, write_files(root, {"plan": noise(7, 300_000)}))
    make_old(store.root, days=3)
    old = everything(store)
    assert collect(store, keep_days=4, grace_s=4 * DAY_S).num_bytes == 0
    assert everything(store) == old
    # The record is kept for longer than what nothing names.
    done = collect(store, keep_days=4)
    assert (done.records, done.files, done.chunks) == (0, 1, 1)
    with pytest.raises(DamagedError):
        store.extract([unnamed], in_memory / "out")
    assert read_back(store, key, in_memory / "out") == files("a")
    collect(store, keep_days=2)
    assert everything(store) == set()


def test_what_is_added_again_is_young_again(in_memory: Path) -> None:
    """The chunks are found there, nothing names them yet, a collection comes, then the record."""
    store = open_store(in_memory / "store")
    put(store, in_memory, "a", files("a"))
    make_old(store.root, days=30)
    root = in_memory / "in"
    refs = store.add_files(root, write_files(root, files("a")))
    done = collect(store, keep_days=14)
    assert (done.records, done.files, done.chunks) == (1, 0, 0)
    store.extract(refs, in_memory / "out")
    assert verify(store) == []


@pytest.mark.parametrize("how", ["add", "pull"])
def test_what_is_found_stays_until_it_is_named(
    in_memory: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """The chunks of an old file are found there, a collection comes, then the file's list and record are written."""
    store, remote = open_store(in_memory / "store"), remotes(in_memory)["memory"]
    key = put(store, in_memory, "a", files("a")).key
    push(store, remote, [key])
    make_old(store.root, days=30)
    has_chunk, collected = store.has_chunk, []

    def found(chunk: Chunk) -> bool:
        there = has_chunk(chunk)
        # The last one: of the small file, whose chunk is the file.
        if there and chunk.sha256 == sha256("a"):
            collected.append(collect(store, keep_days=14))
        return there

    monkeypatch.setattr(store, "has_chunk", found)
    if how == "add":
        put(store, in_memory, "a", files("a"))
        assert len(collected) == 1
    else:
        (store.root / "records" / f"{key}.json").unlink()
        pull(remote, store, [key])
        assert (len(collected), collected[0].chunks) == (1, 0)
    assert verify(store) == []
    assert read_back(store, key, in_memory / "out") == files("a")


def test_a_record_that_is_found_is_not_lost_silently(in_memory: Path) -> None:
    """Between "it is there" and its ref a collection may come: then the ref is refused, else the record stays."""
    store = open_store(in_memory / "store")
    key = put(store, in_memory, "a", files("a")).key
    make_old(store.root, days=30)
    assert store.has_record(key)
    collect(store, keep_days=14)
    with pytest.raises(NotFoundError, match="put or push it first"):
        store.set_ref("chat", "a", Ref.now(key))


def test_what_killed_writers_left_goes(in_memory: Path) -> None:
    store = open_store(in_memory / "store")
    key = put(store, in_memory, "a", files("a")).key
    store.set_ref("chat", "a", Ref.now(key))
    held = store.lock_unit(sha256("held"))
    left = {
        f"tmp/123-{uuid.uuid4().hex}": b"half",
        f"locks/{sha256('killed')}": b"123",
        "tmp/mine": b"not the store's",
    }
    write_files(store.root, left)
    assert collect(store, keep_days=14).leftovers == 1
    assert sorted(path.name for path in (store.root / "tmp").iterdir()) == ["mine"]
    assert sorted(path.name for path in (store.root / "locks").iterdir()) == sorted([sha256("held"), "store"])
    assert held is not None
    assert store.lock_unit(sha256("held")) is None
    held.release()
    # The mark of a record that was built here goes with it.
    assert len(list((store.root / "built").iterdir())) == 1
    store.remove_ref("chat", "a")
    make_old(store.root, days=30)
    collect(store, keep_days=14)
    assert list((store.root / "built").iterdir()) == []


@pytest.mark.parametrize("kind", ["file", *REMOTES])
def test_nothing_goes_when_what_is_needed_cannot_be_read(in_memory: Path, kind: str) -> None:
    local, store = open_store(in_memory / "local"), remotes(in_memory)[kind]
    record = put(local, in_memory, "a", files("a"))
    push(local, store, [record.key], {("chat", "a"): Ref.now(record.key)})
    for name in (
        "refs/chat/a.json",
        f"records/{record.key}.json",
        f"files/{record.files[0].sha256[:2]}/{record.files[0].sha256}.json",
    ):
        good = store.objects.read(name) or b""
        store.objects.write(name, good[:-2])
        before = everything(store)
        with pytest.raises(DamagedError, match=name):
            collect(store, keep_days=0, grace_s=-1)
        assert everything(store) == before
        store.objects.write(name, good)
    assert verify(store) == []


def test_a_collection_waits_for_writers_and_they_for_it(in_memory: Path) -> None:
    store = open_store(in_memory / "store")
    ended: list[str] = []
    with store.objects.sharing():
        thread = threading.Thread(target=lambda: ended.append(str(collect(store, keep_days=0).records)))
        thread.start()
        thread.join(timeout=0.2)
        assert ended == []
    thread.join()
    assert ended == ["0"]
    with store.objects.alone():
        writer = threading.Thread(target=lambda: ended.append(put(store, in_memory, "a", files("a")).kind))
        writer.start()
        writer.join(timeout=0.2)
        assert ended == ["0"]
    writer.join()
    assert ended == ["0", "unit"]


def test_builds_beside_collections(in_memory: Path) -> None:
    """One collects as fast as it can while another builds from what is there, all of it old enough to go."""
    store = open_store(in_memory / "store")
    stop = threading.Event()
    errors: list[BaseException] = []

    def collector() -> None:
        try:
            while not stop.is_set():
                collect(open_store(store.root), keep_days=0)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=collector)
    thread.start()
    try:
        for n in range(12):
            name = f"unit{n % 3}"
            make_old(store.root, days=30)
            key = put(store, in_memory, name, files(name)).key
            try:
                store.set_ref("chat", f"m{n % 2}", Ref.now(key))
            except NotFoundError:
                continue  # it was collected between: said, and nothing is broken
    finally:
        stop.set()
        thread.join()
    assert errors == []
    assert verify(store) == []
    for n, ref in enumerate(store.refs("chat").values()):
        assert read_back(store, ref.key, in_memory / f"out{n}")["shared.plan"] == SHARED


def back_in_time(remote: RemoteStore, days: float) -> None:
    """Make what lies in trash/ as if it had been taken aside earlier."""
    for place in list(remote.objects.names("trash")):
        _, stamp, name = place.split("/", 2)
        then = datetime.datetime.strptime(stamp, STAMP) - datetime.timedelta(days=days)
        remote.objects.move(place, f"trash/{then:{STAMP}}/{name}")  # type: ignore[attr-defined]


@pytest.fixture(params=REMOTES)
def remote(request: pytest.FixtureRequest, in_memory: Path) -> RemoteStore:
    return remotes(in_memory)[request.param]


@pytest.fixture
def local(in_memory: Path) -> LocalStore:
    return open_store(in_memory / "local")


def test_remote_objects_are_taken_aside_then_removed(
    in_memory: Path, remote: RemoteStore, local: LocalStore
) -> None:
    kept, gone = (put(local, in_memory, name, files(name)).key for name in ("kept", "gone"))
    push(local, remote, [kept, gone], {("chat", "kept"): Ref.now(kept)})
    assert collect(remote, keep_days=14).aside == 0
    before = everything(remote)
    would = collect(remote, keep_days=0, dry_run=True)
    assert everything(remote) == before
    done = collect(remote, keep_days=0)
    assert done == would
    assert (done.aside, done.records, done.num_bytes, done.kept_records) == (3, 0, 0, 1)
    assert list(remote.records()) == [kept]
    assert verify(remote) == []
    # Who found it before still reads it.
    pull(remote, open_store(in_memory / "late"), [gone])
    assert collect(remote, keep_days=0).num_bytes == 0
    back_in_time(remote, days=2)
    done = collect(remote, keep_days=0)
    assert (done.records, done.files, done.chunks, done.aside) == (1, 1, 1, 0)
    assert list(remote.objects.names("trash")) == []
    with pytest.raises(NotFoundError):
        pull(remote, open_store(in_memory / "later"), [gone])
    assert verify(remote) == []


def test_what_a_slow_push_relied_on_is_put_back(
    in_memory: Path, remote: RemoteStore, local: LocalStore
) -> None:
    """The push finds the chunks of an old record, then a collection comes, then the push ends."""
    old = put(local, in_memory, "old", files("old")).key
    push(local, remote, [old])
    new = put(local, in_memory, "new", files("new")).key
    found = remote.objects.keep
    collections = []

    def keep(name: str) -> bool:
        there = found(name)
        if name.startswith("files/") and not collections:
            collections.append(collect(remote, keep_days=0))
        return there

    remote.objects.keep = keep  # type: ignore[method-assign]
    sent = push(local, remote, [new], {("chat", "new"): Ref.now(new)})
    remote.objects.keep = found  # type: ignore[method-assign]
    assert sent.kept_chunks > 0
    assert collections[0].aside >= sent.kept_chunks
    assert verify(remote) == []
    assert read_back(pulled(remote, in_memory / "one", new), new, in_memory / "out1") == files("new")
    back_in_time(remote, days=20)
    done = collect(remote, keep_days=0)
    assert done.restored == collections[0].aside - 3  # all but the old record, its log's list and chunk
    assert verify(remote) == []
    assert read_back(pulled(remote, in_memory / "two", new), new, in_memory / "out2") == files("new")


def pulled(remote: RemoteStore, root: Path, key: str) -> LocalStore:
    store = open_store(root)
    pull(remote, store, [key])
    return store


def test_a_record_that_gets_a_ref_again_is_put_back(
    in_memory: Path, remote: RemoteStore, local: LocalStore
) -> None:
    key = put(local, in_memory, "a", files("a")).key
    push(local, remote, [key])
    there = remote.objects.keep
    remote.objects.keep = lambda name: collect(remote, keep_days=0) is None or there(name) or True  # type: ignore[method-assign]
    remote.set_ref("chat", "a", Ref.now(key))  # found it, and a collection came before the ref was written
    remote.objects.keep = there  # type: ignore[method-assign]
    assert list(remote.records()) == []
    assert verify(remote) == []
    back_in_time(remote, days=2)
    assert collect(remote, keep_days=0).restored > 0
    assert list(remote.records()) == [key]
    assert list(remote.objects.names("trash")) == []
    assert verify(remote) == []


def test_what_was_taken_aside_is_sent_again(in_memory: Path, remote: RemoteStore, local: LocalStore) -> None:
    """A push does not rely on what is in trash/: a collection may be removing it."""
    key = put(local, in_memory, "a", files("a")).key
    first = push(local, remote, [key])
    collect(remote, keep_days=0)
    again = push(local, remote, [key], {("chat", "a"): Ref.now(key)})
    assert (again.records, again.chunks) == (1, first.chunks)
    back_in_time(remote, days=2)
    assert collect(remote, keep_days=0).restored == 0
    assert verify(remote) == []
    assert read_back(pulled(remote, in_memory / "other", key), key, in_memory / "out") == files("a")


def test_uploads_that_were_killed_go(in_memory: Path) -> None:
    remote = remotes(in_memory)["plain"]
    remote.prepare()
    now = datetime.datetime.now(datetime.timezone.utc)
    for hours in (1, 48):
        stamp = (now - datetime.timedelta(hours=hours)).strftime(STAMP)
        write_files(in_memory / "remote-plain", {f"tmp/{stamp}-{uuid.uuid4().hex}": b"half"})
    write_files(in_memory / "remote-plain", {"tmp/notes": b"not the store's"})
    assert collect(remote, keep_days=0).leftovers == 1
    assert len(list((in_memory / "remote-plain" / "tmp").iterdir())) == 2


@pytest.mark.parametrize("kind", ["folder", "plain"])
def test_a_killed_collection_breaks_nothing(in_memory: Path, kind: str) -> None:
    """Killed at each step of its second half, where it removes or moves."""
    local, remote = open_store(in_memory / "all" / "local"), remotes(in_memory / "all")["plain"]
    kept, gone = (put(local, in_memory, name, files(name)).key for name in ("kept", "gone"))
    push(local, remote, [kept, gone], {("chat", "kept"): Ref.now(kept)})
    local.set_ref("chat", "kept", Ref.now(kept))
    make_old(in_memory / "all", days=30)

    def copied(name: str) -> LocalStore | RemoteStore:
        shutil.copytree(in_memory / "all", in_memory / name)
        return (
            open_store(in_memory / name / "local") if kind == "folder" else remotes(in_memory / name)["plain"]
        )

    counted = copied("counted")
    num_steps = in_child(lambda: collect(counted, keep_days=14), None, in_memory)
    assert list(counted.records()) == [kept]
    for step in range(num_steps // 2, num_steps + 1):
        store = copied(f"at{step}")
        in_child(lambda store=store: collect(store, keep_days=14), step, in_memory)  # type: ignore[misc]
        assert verify(store) == []
        # What is under its own name names nothing that is not: pushes rely on that.
        there = everything(store)
        assert named_by_records(store, store.objects.names("records")) <= there
        assert named_by_lists(store, store.objects.names("files")) <= there
        collect(store, keep_days=14)
        assert list(store.records()) == [kept]
        assert verify(store) == []


def test_collecting_does_not_ask_who_signed(in_memory: Path) -> None:
    """A record that is not trusted may be needed by those who trust it."""
    from plansmith.fleet.store import PrivateKey

    store = open_store(in_memory / "store")
    key = put(store, in_memory, "a", files("a")).key
    store.set_ref("chat", "a", Ref.now(key))
    make_old(store.root, days=30)
    strict = open_store(store.root, trust=[PrivateKey(b"1" * 32).public])
    with pytest.raises(SignatureError):
        strict.record(key)
    assert collect(strict, keep_days=14).kept_records == 1
    assert read_back(store, key, in_memory / "out") == files("a")


def test_steps_are_counted(in_memory: Path) -> None:
    """The tests that kill at a step must have steps to kill at."""
    store = open_store(in_memory / "store")
    assert in_child(lambda: put(store, in_memory, "a", files("a")), None, store.root) > 30
    assert in_child(lambda: put(store, in_memory, "b", files("b")), 10, store.root) == -1
