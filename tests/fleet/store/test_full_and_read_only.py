"""Disks that are full, and stores that cannot be written to: said in words, and nothing is half there."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from plansmith.fleet.store import Ref, collect, open_store, pull, push, verify
from plansmith.runtime.errors import InvalidArgumentError, OutOfMemoryError
from stores import in_child, noise, put, read_back, remotes, sha256, write_files

FILES = {"plan": noise(1, 5_000_000)}


@contextlib.contextmanager
def mounted(*arguments: str) -> Iterator[None]:
    """Mount something; skip the test where that is not allowed."""
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True)
    if os.geteuid() != 0 or done.returncode != 0:
        pytest.skip(f"mounting takes root: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", arguments[-1]], check=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Return a folder with room for 3 MB."""
    folder = tmp_path / "small"
    folder.mkdir()
    with mounted("-t", "tmpfs", "-o", "size=3m", "tmpfs", str(folder)):
        yield folder


def test_adding_to_a_full_disk(tmp_path: Path, small_disk: Path) -> None:
    store = open_store(small_disk / "store")
    key = put(store, tmp_path, "small", {"plan": b"small"}).key
    with pytest.raises(
        OutOfMemoryError, match=r"is full: [0-9.]+ MB to write, [0-9.]+ MB free .No space left"
    ):
        put(store, tmp_path, "large", FILES)
    assert list(store.records()) == [key]
    assert verify(store) == []
    assert list((store.root / "tmp").iterdir()) == []
    # What was stored of it goes as soon as it is old enough, and there is room again.
    assert collect(store, keep_days=14, grace_s=-1).chunks >= 1
    put(store, tmp_path, "medium", {"plan": FILES["plan"][:2_000_000]})
    assert verify(store) == []


def test_pulling_to_a_full_disk(tmp_path: Path, small_disk: Path) -> None:
    local = open_store(tmp_path / "local")
    key = put(local, tmp_path, "large", FILES).key
    remote = remotes(tmp_path)["memory"]
    push(local, remote, [key])
    store = open_store(small_disk / "store")
    with pytest.raises(OutOfMemoryError, match=r"5\.0 MB to write, .* MB free .checked before"):
        pull(remote, store, [key])
    assert list(store.objects.names("chunks")) == []
    with pytest.raises(OutOfMemoryError, match=r"is full"):
        push(local, remotes(small_disk)["file"], [key])
    assert verify(remotes(small_disk)["file"]) == []


def test_extracting_to_a_full_disk(tmp_path: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(tmp_path / "store")
    key = put(store, tmp_path, "large", FILES).key
    with pytest.raises(OutOfMemoryError, match=r"5\.0 MB to write, .*checked before"):
        read_back(store, key, small_disk / "out")
    # Another takes the room after it was looked for.
    monkeypatch.setattr("plansmith.fleet.store.local.check_room", lambda place, num_bytes: None)
    with pytest.raises(OutOfMemoryError, match=r"5\.0 MB to write, .*No space left"):
        read_back(store, key, small_disk / "out")
    assert list((small_disk / "out").iterdir()) == []


def test_files_that_may_not_grow(tmp_path: Path) -> None:
    """A quota, of the kind that needs no root."""
    store = open_store(tmp_path / "store")

    def add() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        with pytest.raises(OutOfMemoryError, match=r"is full: .*File too large"):
            store.add_files(tmp_path / "in", ["plan"])

    write_files(tmp_path / "in", FILES)
    assert in_child(add, None, store.root) > 0
    assert verify(store) == []
    assert list((store.root / "tmp").iterdir()) == []
    assert list(store.objects.names("chunks")) == []


def test_a_read_only_store_can_be_read(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    key = put(store, tmp_path, "a", FILES).key
    store.set_ref("chat", "a", Ref.now(key))
    with mounted("--bind", str(store.root), str(store.root)):
        subprocess.run(["mount", "-o", "remount,ro,bind", str(store.root)], check=True)
        read_only = open_store(store.root)
        assert read_back(read_only, key, tmp_path / "out") == FILES
        assert list(read_only.refs("chat")) == ["a"]
        assert verify(read_only) == []
        push(read_only, remotes(tmp_path)["memory"], [key])
        for write in (
            lambda: put(read_only, tmp_path, "b", FILES),
            lambda: read_only.set_ref("chat", "b", Ref.now(key)),
            lambda: read_only.remove_ref("chat", "a"),
            lambda: read_only.lock_unit(key),
            lambda: collect(read_only, keep_days=14),
            lambda: pull(remotes(tmp_path)["file"], read_only, [key]),
        ):
            with pytest.raises(InvalidArgumentError, match=r"cannot be written to .Read-only file system"):
                write()
        with pytest.raises(InvalidArgumentError, match=r"cannot be (made|written to)"):
            open_store(store.root / "another")
    put(store, tmp_path, "b", FILES)


def test_another_users_chunks_are_written_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Times of another's file cannot be set. Root can set all, so the system's answer is given in its place."""
    store = open_store(tmp_path / "store")
    put(store, tmp_path, "a", {"plan": b"x"})
    chunk = next((store.root / "chunks").rglob("*/*"))
    before = chunk.stat().st_ino

    def refuse(path: object, *_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted", str(path))

    monkeypatch.setattr(os, "utime", refuse)
    write_files(tmp_path / "in", {"plan": b"x"})
    store.add_files(tmp_path / "in", ["plan"])
    assert chunk.stat().st_ino != before
    assert verify(store) == []


def test_a_name_that_is_taken_by_a_folder(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    (store.root / "records" / f"{sha256('a')}.json").mkdir(parents=True)
    assert store.record(sha256("a")) is None
