"""A store in a folder: what goes in comes out, what is shared lies there once, what is no store is refused."""

from __future__ import annotations

import json
import os
import socket
import threading
from pathlib import Path

import pytest
from plansmith.fleet.store import DamagedError, LocalStore, Record, Ref, open_store, verify
from plansmith.fleet.store.chunks import MAX_BYTES, MIN_BYTES
from plansmith.runtime.errors import EngineFileError, InvalidArgumentError, NotFoundError
from stores import noise, put, read_back, sha256, write_files


def chunk_bytes(store: LocalStore) -> int:
    return sum(path.stat().st_size for path in (store.root / "chunks").rglob("*") if path.is_file())


def test_files_come_back_as_they_were(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    files = {"targets/cpu/model.plan": noise(1, 3_000_000), "targets/cpu/build.log": b"built\n", "empty": b""}
    root = tmp_path / "in"
    paths = write_files(root, files)
    (root / "targets/cpu/build.log").chmod(0o640)
    (root / "empty").chmod(0o755)
    refs = store.add_files(root, paths)
    for ref, data in zip(refs, files.values(), strict=True):
        assert (ref.size, ref.sha256) == (len(data), sha256(data))
    store.extract(refs, tmp_path / "out")
    for path, data in files.items():
        assert (tmp_path / "out" / path).read_bytes() == data
        assert (tmp_path / "out" / path).stat().st_mode == (root / path).stat().st_mode
    assert sorted(path.name for path in (tmp_path / "out" / "targets" / "cpu").iterdir()) == [
        "build.log",
        "model.plan",
    ]
    assert verify(store) == []


def test_chunks_are_files_named_by_their_sha256(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    data = noise(2, 4_000_000)
    root = tmp_path / "in"
    (ref,) = store.add_files(root, write_files(root, {"plan": data}))
    made = json.loads((store.root / "files" / ref.sha256[:2] / f"{ref.sha256}.json").read_text())
    parts = [(store.root / "chunks" / name[:2] / name).read_bytes() for name, _ in made["chunks"]]
    assert b"".join(parts) == data
    assert [[sha256(part), len(part)] for part in parts] == made["chunks"]
    assert made["size"] == len(data)
    assert all(MIN_BYTES <= len(part) <= MAX_BYTES for part in parts[:-1])


def test_content_at_shifted_offsets_lies_there_once(tmp_path: Path) -> None:
    """Weights that two plans share, behind headers of different lengths and before different tails."""
    store = open_store(tmp_path / "store")
    weights = noise(3, 12_000_000)
    put(store, tmp_path, "one", {"plan": noise(4, 1000) + weights})
    one = chunk_bytes(store)
    files = {"plan": noise(5, 77_777) + weights + noise(6, 50_000)}
    two = put(store, tmp_path, "two", files)
    added = chunk_bytes(store) - one
    # At most the pieces at both ends of the shared part are new.
    assert added <= 4 * MAX_BYTES < len(weights)
    assert read_back(store, two.key, tmp_path / "out") == files
    put(store, tmp_path, "three", files)
    assert chunk_bytes(store) == one + added


def test_a_record_comes_back(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    content = {"entry": {"name": "cpu", "sizes": [1, 2.5, None, True]}, "text": "grün"}
    made = put(store, tmp_path, "a", {"plan": b"x"}, content=content, provenance={"host": "h"})
    found = store.record(made.key)
    assert found == made
    assert found is not None
    assert (found.kind, found.inputs, found.content) == ("unit", {"name": "a"}, content)
    assert found.provenance == {"host": "h"}
    assert store.has_record(made.key)
    assert list(store.records()) == [made.key]
    assert store.record(sha256("b")) is None
    assert not store.has_record(sha256("b"))


def test_the_first_record_of_a_key_stays(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    first = put(store, tmp_path, "a", {"plan": b"first"})
    assert put(store, tmp_path, "a", {"plan": b"second"}) == first
    assert read_back(store, first.key, tmp_path / "out") == {"plan": b"first"}


def test_a_record_that_cannot_be_read_is_replaced(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    key = put(store, tmp_path, "a", {"plan": b"first"}).key
    (store.root / "records" / f"{key}.json").write_text("{")
    put(store, tmp_path, "a", {"plan": b"second"})
    assert read_back(store, key, tmp_path / "out") == {"plan": b"second"}


def test_records_that_cannot_be(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    root = tmp_path / "in"
    (ref,) = store.add_files(root, write_files(root, {"plan": b"x"}))
    good = Record(sha256("a"), "unit", {}, (ref,), {}, {})
    absent = type(ref)("other", 1, sha256("other"), 0o644)
    for changes, words in (
        ({"key": "../../etc"}, "is no key"),
        ({"files": (ref, ref)}, "names a file twice"),
        ({"files": (ref, type(ref)("plan/x/y", 1, ref.sha256, 0o644))}, "has plan as a file and as a folder"),
        ({"files": (absent,)}, "add a record's files first"),
        ({"files": (type(ref)("../plan", 1, ref.sha256, 0o644),)}, "is no path of a file"),
        ({"files": (type(ref)("plan", 1, ref.sha256, 0o044),)}, "has the mode 0044.*chmod"),
        ({"kind": "a\nb"}, "is of the kind"),
        ({"inputs": {"x": "\x1b[31m"}}, "has the input 'x' .*, which is not printable"),
        ({"content": {"x": float("nan")}}, "cannot be written as JSON"),
        ({"content": {"x": b"bytes"}}, "cannot be written as JSON"),
        ({"content": {"x": "\ud800"}}, "cannot be written as JSON"),
    ):
        with pytest.raises(InvalidArgumentError, match=words):
            store.put_record(Record(**(vars(good) | changes)))
    assert list(store.records()) == []


def test_files_that_cannot_be_added(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    root = tmp_path / "in"
    write_files(root, {"plan": b"x"})
    (root / "link").symlink_to("plan")
    (root / "folder").mkdir()
    for path, words in (
        ("absent", "No such file"),
        ("link", "no regular file"),
        ("folder", "no regular file"),
        ("/plan", "is no path of a file"),
        ("a/../plan", "is no path of a file"),
        ("", "is no path of a file"),
        ("a\nb", "is no path of a file"),
        ("ü" * 128, "is no path of a file"),
        ("a/" * 1100 + "b", "is no path of a file"),
    ):
        with pytest.raises(InvalidArgumentError, match=words):
            store.add_files(root, [path])


def test_a_file_that_grows_meanwhile_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(tmp_path / "store")
    root = tmp_path / "in"
    write_files(root, {"plan": noise(1, 400_000)})
    real = store.add_chunk

    def grow(chunk: object, data: bytes) -> None:
        with (root / "plan").open("ab") as file:
            file.write(b"more")
        real(chunk, data)  # type: ignore[arg-type]

    monkeypatch.setattr(store, "add_chunk", grow)
    with pytest.raises(InvalidArgumentError, match="changed while it was stored"):
        store.add_files(root, ["plan"])
    assert verify(store) == []


def test_refs(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    one, two = (put(store, tmp_path, name, {"plan": name.encode()}).key for name in "ab")
    store.set_ref("chat", "smol/int8/l40s", Ref(one, "2026-01-31T12:00:00Z"))
    store.set_ref("chat", "smol/int8", Ref(one, "2026-01-31T12:00:00Z"))
    store.set_ref("chat", "smol/int8/l40s", Ref(two, "2026-02-01T12:00:00Z"))
    store.set_ref("other", "smol", Ref.now(one))
    assert store.refs("chat") == {
        "smol/int8/l40s": Ref(two, "2026-02-01T12:00:00Z"),
        "smol/int8": Ref(one, "2026-01-31T12:00:00Z"),
    }
    assert store.fleets() == ["chat", "other"]
    assert store.refs("nobody") == {}
    store.remove_ref("chat", "smol/int8")
    assert list(store.refs("chat")) == ["smol/int8/l40s"]
    with pytest.raises(NotFoundError, match="put or push it first"):
        store.set_ref("chat", "x", Ref.now(sha256("absent")))
    for fleet, member in (("..", "x"), ("chat", "a/../b"), ("chat", ""), ("a/b", "x"), ("chat", "a b")):
        with pytest.raises(InvalidArgumentError, match="name no member"):
            store.set_ref(fleet, member, Ref.now(one))


def test_a_ref_has_a_time_in_one_form(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    key = put(store, tmp_path, "a", {"plan": b"x"}).key
    with pytest.raises(InvalidArgumentError, match="'yesterday' is no time of a ref"):
        store.set_ref("chat", "a", Ref(key, "yesterday"))
    assert store.refs("chat") == {}


def test_what_is_no_store_is_refused(tmp_path: Path) -> None:
    full = tmp_path / "full"
    write_files(full, {"thesis.tex": b"years of work"})
    with pytest.raises(InvalidArgumentError, match=r"is no store.*thesis\.tex"):
        open_store(full)
    with pytest.raises(InvalidArgumentError, match="is no store"):
        LocalStore(full).has_record(sha256("a"))
    with pytest.raises(InvalidArgumentError, match="is a file"):
        open_store(full / "thesis.tex")
    with pytest.raises(InvalidArgumentError, match="cannot be made"):
        open_store(full / "thesis.tex" / "store")
    with pytest.raises(InvalidArgumentError, match="is a URL"):
        open_store("s3://bucket/store")
    assert [path.name for path in full.iterdir()] == ["thesis.tex"]


def test_other_versions_are_refused(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    marker = store.root / "plansmith-store.json"
    assert json.loads(marker.read_text()) == {"format": 1}
    marker.write_text('{"format": 2}')
    with pytest.raises(EngineFileError, match="format 2, this plansmith reads format 1"):
        open_store(store.root)
    marker.write_text("format")
    with pytest.raises(EngineFileError, match="is no JSON"):
        open_store(store.root)


def test_a_store_is_made_only_if_asked(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="there is no store"):
        open_store(tmp_path / "store", create=False)
    assert list(tmp_path.iterdir()) == []
    open_store(tmp_path / "store")
    open_store(tmp_path / "store", create=False)


def test_units_are_locked_by_one(tmp_path: Path) -> None:
    one, two = open_store(tmp_path / "store"), open_store(tmp_path / "store")
    key, other = sha256("unit"), sha256("other")
    held = one.lock_unit(key)
    assert held is not None
    assert two.lock_unit(key) is None
    with two.lock_unit(other) or pytest.fail("the other unit is free"):
        assert two.lock_unit(key) is None

    def wait() -> None:
        with two.lock_unit(key, blocking=True) or pytest.fail("it waits"):
            waited.append(one.lock_unit(key))

    waited: list[object] = []
    thread = threading.Thread(target=wait)
    thread.start()
    held.release()
    held.release()
    thread.join()
    assert waited == [None]
    assert [path.name for path in (one.root / "locks").iterdir()] == ["store"]
    with pytest.raises(InvalidArgumentError, match="is no key"):
        one.lock_unit("../x")


def test_a_killed_holder_frees_its_lock(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    key = sha256("unit")
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        store.lock_unit(key)
        os.write(write_end, b"held")
        threading.Event().wait()
        os._exit(1)
    assert os.read(read_end, 4) == b"held"
    assert store.lock_unit(key) is None
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    with store.lock_unit(key) or pytest.fail("its holder is dead"):
        pass
    os.close(read_end)
    os.close(write_end)


@pytest.mark.parametrize("damage", ["missing", "short", "long", "altered"])
def test_extracting_what_is_damaged(tmp_path: Path, damage: str) -> None:
    store = open_store(tmp_path / "store")
    key = put(store, tmp_path, "a", {"plan": noise(1, 2_000_000), "log": b"log"}).key
    chunk = max((store.root / "chunks").rglob("*/*"), key=lambda path: path.stat().st_size)
    data = chunk.read_bytes()
    match damage:
        case "missing":
            chunk.unlink()
        case "short":
            chunk.write_bytes(data[:-1])
        case "long":
            chunk.write_bytes(data + b"x")
        case "altered":
            chunk.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(
        EngineFileError, match=f"chunks/{chunk.parent.name}/{chunk.name}.*build or pull again"
    ):
        read_back(store, key, tmp_path / "out")
    assert [path for path in (tmp_path / "out").rglob("*") if path.name != "log"] == []
    (problem, *_) = [one for one in verify(store) if one.name.startswith("chunks/")]
    assert problem.name == f"chunks/{chunk.parent.name}/{chunk.name}"
    if (
        damage != "altered"
    ):  # what is not whole is mended by adding it again; what is altered has to be deleted first
        put(store, tmp_path, "a", {"plan": noise(1, 2_000_000), "log": b"log"})
        assert verify(store) == []


def make_other(path: Path, kind: str) -> None:
    """Put something in place of a file that is no file; opening or reading it may never end."""
    path.unlink()
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "link to a pipe":
            os.mkfifo(path.parent.parent.parent / "pipe")
            path.symlink_to(path.parent.parent.parent / "pipe")
        case "device":
            path.symlink_to("/dev/zero")
        case "socket":
            path.symlink_to("socket")
            here = Path.cwd()
            os.chdir(path.parent)  # a socket's path has room for 107 bytes
            try:
                socket.socket(socket.AF_UNIX).bind("socket")
            finally:
                os.chdir(here)
        case "circle":
            path.symlink_to(path.name)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["pipe", "link to a pipe", "device", "socket", "circle"])
@pytest.mark.parametrize("folder", ["chunks", "files", "records", "refs"])
def test_what_is_no_file_is_refused(tmp_path: Path, folder: str, kind: str) -> None:
    store = open_store(tmp_path / "store")
    key = put(store, tmp_path, "a", {"plan": b"x"}).key
    store.set_ref("chat", "a", Ref.now(key))
    path = next(path for path in (store.root / folder).rglob("*") if path.is_file())
    name = path.relative_to(store.root).as_posix()
    make_other(path, kind)
    with pytest.raises(DamagedError, match=f"{name} is no regular file; delete it"):
        store.objects.read(name)
    assert (store.objects.has(name), store.objects.keep(name)) == (False, False)
    assert (store.objects.size(name), store.objects.age_s(name)) == (0, None)
    assert list(store.objects.names(folder))  # a collection removes what nothing needs, whatever it is
    with pytest.raises(DamagedError, match=name):
        store.refs("chat") if folder == "refs" else read_back(store, key, tmp_path / "out")
    if folder != "refs":
        put(store, tmp_path, "a", {"plan": b"x"})
    store.set_ref("chat", "a", Ref.now(key))
    assert read_back(store, key, tmp_path / "out") == {"plan": b"x"}


def test_a_list_of_other_chunks(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    one = put(store, tmp_path, "a", {"plan": b"one"})
    two = put(store, tmp_path, "b", {"plan": b"two"})
    lists = [store.root / "files" / r.files[0].sha256[:2] / f"{r.files[0].sha256}.json" for r in (one, two)]
    lists[0].write_bytes(lists[1].read_bytes())
    with pytest.raises(EngineFileError, match=r"files/.*make up another file"):
        read_back(store, one.key, tmp_path / "out")
    assert [problem.name for problem in verify(store)] == [lists[0].relative_to(store.root).as_posix()]
    lists[0].write_text('{"size":7,"chunks":[]}')
    with pytest.raises(EngineFileError, match="says that the file has 7 bytes, and its chunks have 0"):
        read_back(store, one.key, tmp_path / "out")
    lists[0].unlink()
    with pytest.raises(EngineFileError, match=r"is missing .plan"):
        read_back(store, one.key, tmp_path / "out")


def test_verify_knows_what_does_not_belong(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    one, two = (put(store, tmp_path, name, {"plan": name.encode()}).key for name in "ab")
    store.set_ref("chat", "a", Ref.now(one))
    assert verify(store) == []
    records = store.root / "records"
    (records / f"{one}.json").rename(records / f"{two}.json")
    (store.root / "refs" / "chat" / "b.json").write_text("[]")
    write_files(store.root, {"chunks/zz/readme": b"hello", "refs/stray": b"", "files/00/x.json": b"{}"})
    assert [(problem.name, problem.what) for problem in verify(store)] == [
        ("chunks/zz/readme", "has a name that nothing in a store has"),
        ("files/00/x.json", "has a name that nothing in a store has"),
        (f"records/{two}.json", f"is the record of another key, {one}"),
        ("refs/chat/a.json", f"names the record {one}, which is missing"),
        ("refs/chat/b.json", "is no JSON object; " + store.fix),
        ("refs/stray", "has a name that nothing in a store has"),
    ]
