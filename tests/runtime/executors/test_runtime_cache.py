"""Compiled kernels in a file: whole or as they were, whatever happens while they are written."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from plansmith.runtime.executors import runtime_cache
from plansmith.runtime.executors.runtime_cache import RuntimeCache


def cache(folder: Path, key: str = "k" * 64, **other: Any) -> RuntimeCache:
    facts = {"gpu": "NVIDIA L4-sm89", "driver": (13, 0), "library": "1.7.1", **other}
    return RuntimeCache(folder, None, key, **facts)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "plansmith"


def test_what_is_kept_comes_back_for_the_same_machine_alone(tmp_path: Path) -> None:
    plan = tmp_path / "plan"
    assert cache(plan).load() is None
    saved = cache(plan).save(b"kernels")
    assert saved is not None and saved.parent == plan
    assert cache(plan).load() == b"kernels"
    for other in ({"gpu": "NVIDIA L40-sm89"}, {"driver": (13, 1)}, {"library": "1.7.2"}):
        assert cache(plan, **other).load() is None
    same = cache(plan)
    same.load()
    assert same.save(b"kernels") is None and same.save(b"") is None and same.save(None) is None


def test_a_disk_that_is_full_half_way_leaves_what_was_there(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = tmp_path / "plan"
    assert cache(plan).save(b"old") is not None
    real = runtime_cache.os.fdopen

    class Full:
        def __init__(self, handle: int, mode: str) -> None:
            self.file = real(handle, mode)

        def __enter__(self) -> Full:
            return self

        def __exit__(self, *error: object) -> None:
            self.file.close()

        def write(self, data: bytes) -> None:
            self.file.write(data[: len(data) // 2])
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(runtime_cache.os, "fdopen", Full)
    assert cache(plan).save(b"new" * 100) is None
    monkeypatch.undo()
    assert cache(plan).load() == b"old"
    assert [path.name for path in plan.iterdir()] == [cache(plan)._name]


def test_a_reader_beside_a_writer_finds_it_whole(tmp_path: Path) -> None:
    plan = tmp_path / "plan"
    blobs = [bytes([n]) * (200_000 + n) for n in range(2)]
    cache(plan).save(blobs[0])
    stop, wrong = threading.Event(), []

    def read() -> None:
        while not stop.is_set():
            one = cache(plan)
            if one.load() not in blobs or one.note is not None:
                wrong.append(one.note)

    reader = threading.Thread(target=read)
    reader.start()
    for n in range(100):
        cache(plan).save(blobs[n % 2])
    stop.set()
    reader.join()
    assert wrong == []


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: data + b"x", lambda data: data[:20]])
def test_what_is_damaged_is_not_used_and_said(tmp_path: Path, damage: Any) -> None:
    path = cache(tmp_path).save(b"kernels")
    assert path is not None
    path.write_bytes(damage(path.read_bytes()))
    one = cache(tmp_path)
    assert one.load() is None and one.note == f"{path} is damaged and is made again"
    assert one.save(b"kernels") == path
    assert cache(tmp_path).load() == b"kernels"
