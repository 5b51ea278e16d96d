"""Fingerprints of checkpoints, remembered by what the file system says of their files, so that none is read twice."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ...runtime.user_cache import user_cache
from .hf_dir import hash_files

# A file's times may stand still for this long (FAT: 2 s) while it is written again. A file that was hashed so soon
# after its last change may have changed since without a sign; git treats its index so too.
_RACY_NS = 2_000_000_000
_MAX_ENTRIES = 1000

Stats = list[tuple[str, int, int, int, int, int]]
"""Of every file: its absolute path, device, inode, size, time of its content and of its inode, both in ns."""


class HashCache:
    """A folder with a small file a fingerprint, whose name is a hash over the stats of the files it covers.

    folder : where they are; None = "fingerprints" in plansmith's folder of the user's cache
    rehash : read every file again, and remember what comes out
    now_ns : the clock of the files' times

    A damaged entry is one that is not there, and a folder that cannot be written keeps nothing. Several processes may
    use a folder at the same time.
    """

    def __init__(
        self,
        folder: Path | None = None,
        *,
        rehash: bool = False,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._folder = folder if folder is not None else user_cache("fingerprints")
        self._rehash = rehash
        self._now_ns = now_ns

    def fingerprint(self, paths: Sequence[Path]) -> str:
        """Return hash_files(paths), without reading the files where that is known; raises OSError as it does."""
        before = _stats(paths)
        name = hashlib.sha256(json.dumps(before).encode()).hexdigest()
        if not self._rehash and (known := self._read(name)) is not None:
            return known
        start_ns = self._now_ns()
        fingerprint = hash_files(paths)
        if before == _stats(paths) and _are_settled(before, start_ns):
            self._write(name, fingerprint)
        return fingerprint

    def _read(self, name: str) -> str | None:
        """Return what is remembered under a name; None where nothing is that can be believed."""
        try:
            text = (self._folder / name).read_text("ascii")
        except (OSError, UnicodeError):
            return None
        found = re.fullmatch(r"([0-9a-f]{64}) ([0-9a-f]{64})\n", text)
        return found[1] if found and found[2] == _check(name, found[1]) else None

    def _write(self, name: str, fingerprint: str) -> None:
        with contextlib.suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            descriptor, partial = tempfile.mkstemp(prefix=".new-", dir=self._folder)
            try:
                with os.fdopen(descriptor, "w", encoding="ascii") as file:
                    file.write(f"{fingerprint} {_check(name, fingerprint)}\n")
                Path(partial).replace(self._folder / name)
            except BaseException:
                Path(partial).unlink(missing_ok=True)
                raise
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        entries = list(self._folder.iterdir())
        if len(entries) > _MAX_ENTRIES:
            entries.sort(key=lambda path: path.stat().st_mtime_ns)
            for path in entries[: len(entries) - _MAX_ENTRIES // 2]:
                path.unlink(missing_ok=True)


def _stats(paths: Sequence[Path]) -> Stats:
    found = []
    for path in paths:
        one = path.stat()
        where = os.path.realpath(path)
        # The name that is hashed is that of the link, the file's own is what it leads to.
        found.append(
            (
                f"{path.name}\0{where}",
                one.st_dev,
                one.st_ino,
                one.st_size,
                one.st_mtime_ns,
                one.st_ctime_ns,
            )
        )
    return found


def _are_settled(stats: Stats, now_ns: int) -> bool:
    """Return whether no file changed so shortly before that another change could leave the same times."""
    return all(max(mtime_ns, ctime_ns) < now_ns - _RACY_NS for *_, mtime_ns, ctime_ns in stats)


def _check(name: str, fingerprint: str) -> str:
    return hashlib.sha256(f"{name} {fingerprint}".encode()).hexdigest()
