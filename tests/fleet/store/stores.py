"""Small content, records and remotes for the tests of the store."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import signal
import sys
import threading
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem
from plansmith.fleet.store import LocalStore, Record, RemoteStore

HOUR_S = 3600.0
DAY_S = 24 * HOUR_S


class PlainFileSystem(LocalFileSystem):
    """A file system whose uploads are seen while they grow, as those of SFTP are: on this disk, under another name."""

    protocol = "plain"
    between: Callable[[], None] = staticmethod(lambda: None)

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        """Upload in two halves; `between` is called between them."""
        with self.open(path, "wb") as file:
            file.write(value[: len(value) // 2])
            file.flush()
            type(self).between()
            file.write(value[len(value) // 2 :])


fsspec.register_implementation("plain", PlainFileSystem, clobber=True)


def noise(seed: int, num_bytes: int) -> bytes:
    """Return bytes that are the same for a seed, and do not repeat."""
    return random.Random(seed).randbytes(num_bytes)


def sha256(data: bytes | str) -> str:
    return hashlib.sha256(data if isinstance(data, bytes) else data.encode()).hexdigest()


def write_files(root: Path, files: Mapping[str, bytes]) -> list[str]:
    """Write files below root and return their paths."""
    for path, data in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(data)
    return list(files)


def put(store: LocalStore, work: Path, name: str, files: Mapping[str, bytes], **changes: Any) -> Record:
    """Add files and put a record of them; its key is the hash of name."""
    root = work / f"in-{uuid.uuid4().hex}"
    root.mkdir(parents=True)
    refs = store.add_files(root, write_files(root, files))
    made = {"key": sha256(name), "kind": "unit", "inputs": {"name": name}, "content": {}, "provenance": {}}
    return store.put_record(Record(files=refs, **(made | changes)))


def read_back(store: LocalStore, key: str, out: Path) -> dict[str, bytes]:
    """Return the files of a record, extracted into out."""
    record = store.record(key)
    assert record is not None
    store.extract(record.files, out)
    return {file.path: (out / file.path).read_bytes() for file in record.files}


def remotes(tmp_path: Path) -> dict[str, RemoteStore]:
    """Return an empty remote store of each kind: flushed and locked, renamed after an upload, put whole."""
    return {
        "file": RemoteStore(f"file://{tmp_path}/remote-file"),
        "plain": RemoteStore(f"plain://{tmp_path}/remote-plain"),
        "memory": RemoteStore(f"memory://{uuid.uuid4().hex}"),
    }


def set_raw(store: Any, name: str, data: bytes) -> None:
    """Write an object as somebody would who is not this program."""
    store.objects.write(name, data)


def make_old(folder: Path, days: float) -> None:
    """Make everything below a folder older. What another removes meanwhile is let go."""
    for path in [path for path in folder.rglob("*") if path.is_file()]:
        with contextlib.suppress(FileNotFoundError):
            then = path.stat().st_mtime - days * DAY_S
            os.utime(path, (then, then))


class Dying:
    """Counts what a process does to files, and kills the process at the n-th time.

    Steps are opening, renaming, linking, removing, making folders, and setting times, and the middle of every write of
    a file that is opened as the store does (Path.open), and of every upload to plain://.
    """

    STEPS = frozenset(["open", "os.rename", "os.link", "os.remove", "os.mkdir", "os.utime"])

    def __init__(self, at: int | None) -> None:
        self.at = at
        self.num_steps = 0
        self._mutex = threading.Lock()

    def install(self, below: Path) -> None:
        """Begin. Only what names a path below counts."""

        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            if event in self.STEPS and str(arguments[0]).startswith(str(below)):
                self.step()

        sys.addaudithook(hook)
        PlainFileSystem.between = staticmethod(self.step)
        self._halve_writes()

    def step(self) -> None:
        with self._mutex:
            self.num_steps += 1
            if self.num_steps == self.at:
                os.kill(os.getpid(), signal.SIGKILL)
                signal.pause()

    def _halve_writes(self) -> None:
        real, step = Path.open, self.step

        def open_(path: Path, mode: str = "r", *arguments: Any, **options: Any) -> Any:
            file = real(path, mode, *arguments, **options)
            return _Halving(file, step) if "x" in mode else file

        Path.open = open_  # type: ignore[method-assign, assignment]


class _Halving:
    """A file whose writes are made in two, with a step between."""

    def __init__(self, file: Any, step: Callable[[], None]) -> None:
        self._file = file
        self._step = step

    def write(self, data: bytes) -> int:
        self._file.write(data[: len(data) // 2])
        self._file.flush()
        self._step()
        self._file.write(data[len(data) // 2 :])
        return len(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> _Halving:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def in_child(work: Callable[[], object], at: int | None, below: Path) -> int:
    """Run work in a child process that is killed at its at-th step (None: not); return the steps, -1 when killed."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            dying = Dying(at)
            dying.install(below)
            work()
            os.write(write_end, str(dying.num_steps).encode())
            status = 0
        except BaseException as error:  # the parent shows it
            os.write(write_end, f"error {error!r}".encode())
        finally:
            os._exit(status)
    os.close(write_end)
    with os.fdopen(read_end) as pipe:
        said = pipe.read()
    _, how = os.waitpid(pid, 0)
    if os.WIFSIGNALED(how):
        assert os.WTERMSIG(how) == signal.SIGKILL
        return -1
    assert os.WEXITSTATUS(how) == 0, said
    return int(said)
