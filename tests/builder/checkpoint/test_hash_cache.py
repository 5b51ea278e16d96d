"""Fingerprints that are remembered: the same values as without, read again whenever a file may have changed."""

from __future__ import annotations

import os
import shutil
import stat
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from plansmith.builder.checkpoint import hash_cache, open_checkpoint
from plansmith.builder.checkpoint.hash_cache import HashCache
from plansmith.builder.checkpoint.hf_dir import hash_files
from plansmith.runtime.user_cache import user_cache

LATER_NS = 10_000_000_000


def in_ten_seconds() -> int:
    """Return a clock that makes files of now old enough."""
    return time.time_ns() + LATER_NS


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    made = [tmp_path / name for name in ("config.json", "model.safetensors")]
    for path in made:
        path.write_bytes(path.name.encode() * 100)
    return made


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that grows with every real hashing."""
    seen: list[int] = []

    def counted(paths: Iterable[Path]) -> str:
        seen.append(1)
        return hash_files(paths)

    monkeypatch.setattr(hash_cache, "hash_files", counted)
    return seen


@pytest.fixture
def cache(tmp_path: Path) -> HashCache:
    return HashCache(tmp_path / "cache", now_ns=in_ten_seconds)


def test_is_the_fingerprint_and_reads_once(cache: HashCache, files: list[Path], reads: list[int]) -> None:
    wanted = hash_files(files)
    assert [cache.fingerprint(files) for _ in range(3)] == [wanted] * 3
    assert len(reads) == 1


def test_of_a_checkpoint(tiny_checkpoint: Callable[[str], Path], cache: HashCache, reads: list[int]) -> None:
    path = tiny_checkpoint("llama")
    plain = open_checkpoint(path).fingerprint()
    assert open_checkpoint(path).fingerprint(cache) == plain
    assert open_checkpoint(path).fingerprint(cache) == plain
    assert len(reads) == 1


def test_other_contents_of_the_same_size_and_time(
    cache: HashCache, files: list[Path], reads: list[int]
) -> None:
    before = cache.fingerprint(files)
    kept = files[1].stat()
    data = files[1].read_bytes()
    files[1].write_bytes(b"X" + data[1:])
    os.utime(files[1], ns=(kept.st_atime_ns, kept.st_mtime_ns))  # the inode's own time cannot be set back
    assert cache.fingerprint(files) == hash_files(files) != before
    assert len(reads) == 2


@pytest.mark.parametrize("what", ["replaced", "renamed", "one less", "other order", "linked elsewhere"])
def test_what_makes_another_fingerprint(
    cache: HashCache, files: list[Path], reads: list[int], what: str
) -> None:
    cache.fingerprint(files)
    if what == "replaced":
        shutil.copy2(files[1], files[1].with_name("copy"))
        files[1].with_name("copy").replace(files[1])
    elif what == "renamed":
        files = [files[0], files[1].rename(files[1].with_name("other.safetensors"))]
    elif what == "one less":
        files = files[:1]
    elif what == "other order":
        files = files[::-1]
    else:
        real = files[1].rename(files[1].with_name("blob"))
        files[1].symlink_to(real)
    assert cache.fingerprint(files) == hash_files(files)
    assert len(reads) == 2


def test_a_file_of_just_now_is_read_again(tmp_path: Path, files: list[Path], reads: list[int]) -> None:
    cache = HashCache(tmp_path / "cache", now_ns=lambda: files[1].stat().st_mtime_ns + 1_000_000_000)
    assert cache.fingerprint(files) == cache.fingerprint(files) == hash_files(files)
    assert len(reads) == 2
    assert not (tmp_path / "cache").exists()


def test_a_file_that_changes_meanwhile_is_not_remembered(
    cache: HashCache, files: list[Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def slow(paths: Iterable[Path]) -> str:
        result = hash_files(paths)
        files[1].write_bytes(b"something else")
        return result

    monkeypatch.setattr(hash_cache, "hash_files", slow)
    cache.fingerprint(files)
    assert not (tmp_path / "cache").exists()


def test_rehash_reads_and_corrects(tmp_path: Path, files: list[Path], reads: list[int]) -> None:
    folder = tmp_path / "cache"
    wanted = HashCache(folder, now_ns=in_ten_seconds).fingerprint(files)
    (entry,) = folder.iterdir()
    wrong = "0" * 64
    entry.write_text(f"{wrong} {hash_cache._check(entry.name, wrong)}\n")
    assert HashCache(folder, now_ns=in_ten_seconds).fingerprint(files) == wrong  # it is believed
    assert HashCache(folder, rehash=True, now_ns=in_ten_seconds).fingerprint(files) == wanted
    assert HashCache(folder, now_ns=in_ten_seconds).fingerprint(files) == wanted
    assert len(reads) == 2


def test_every_damaged_entry_is_one_that_is_not_there(
    tmp_path: Path, files: list[Path], reads: list[int]
) -> None:
    folder = tmp_path / "cache"
    wanted = HashCache(folder, now_ns=in_ten_seconds).fingerprint(files)
    (entry,) = folder.iterdir()
    good = entry.read_bytes()
    damaged = [good[:n] for n in range(0, len(good), 13)] + [
        good[:n] + bytes([good[n] ^ 1]) + good[n + 1 :] for n in range(0, len(good), 7)
    ]
    for idx, data in enumerate([*damaged, b"\xff" * 130, b""]):
        entry.write_bytes(data)
        assert HashCache(folder, now_ns=in_ten_seconds).fingerprint(files) == wanted
        assert len(reads) == idx + 2
        assert entry.read_bytes() == good


def test_a_folder_that_cannot_be_written(tmp_path: Path, files: list[Path]) -> None:
    (tmp_path / "file").write_text("no folder")
    cache = HashCache(tmp_path / "file" / "cache", now_ns=in_ten_seconds)
    assert cache.fingerprint(files) == hash_files(files)


def test_old_entries_go(tmp_path: Path, files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hash_cache, "_MAX_ENTRIES", 4)
    folder = tmp_path / "cache"
    cache = HashCache(folder, now_ns=in_ten_seconds)
    for idx in range(12):
        files[0].write_bytes(bytes(idx))
        cache.fingerprint(files)
        assert len(list(folder.iterdir())) <= 4
    assert stat.S_IMODE(next(folder.iterdir()).stat().st_mode) == 0o600


def test_a_missing_file_is_an_error(cache: HashCache, files: list[Path]) -> None:
    files[0].unlink()
    with pytest.raises(FileNotFoundError):
        cache.fingerprint(files)


def test_the_users_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert user_cache("fingerprints") == tmp_path / "plansmith" / "fingerprints"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert user_cache("fingerprints") == tmp_path / "home" / ".cache" / "plansmith" / "fingerprints"
