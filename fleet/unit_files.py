"""The files of a unit: on their way into a store, and afterwards, while they still lie where they were built."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ..runtime.manifest_entries import FileEntry
from .store.local import LocalStore
from .store.record import FileRef

Stamp = tuple[int, ...]


def stamp_of(path: Path) -> Stamp:
    """Return what changes when a file is written or replaced; OSError where there is none."""
    found = path.lstat()
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_mode


class KeptFiles:
    """Files that are stored and still lie where they were built, each as it was before it was stored.

    folder : where they lie; it may have been renamed since
    stamps : what the file system said of them then, by path below it
    """

    def __init__(self, folder: Path, stamps: Mapping[str, Stamp]) -> None:
        self.folder = folder
        self._stamps = dict(stamps)

    def move(self, path: str, to: Path) -> bool:
        """Move a file; False where it is not there as it was, or to is on another disk: the store has it."""
        try:
            if stamp_of(self.folder / path) != self._stamps[path]:
                return False
            (self.folder / path).rename(to)
        except OSError:
            return False
        return True


class UnitFiles:
    """The files of a unit on their way into a store, each hashed once: for the store and for the manifest alike.

    stamps : see KeptFiles
    """

    def __init__(self, store: LocalStore) -> None:
        self.stamps: dict[str, Stamp] = {}
        self._store = store
        self._stored: dict[str, FileRef] = {}

    def describe(self, root: Path, path: Path) -> FileEntry:
        """Store a file below root, and return the manifest's entry, its size in bytes.

        raises what LocalStore.add_files raises, and OSError
        """
        name = path.relative_to(root).as_posix()
        self.stamps[name] = stamp_of(path)
        (stored,) = self._store.add_files(root, [name])
        self._stored[name] = stored
        return FileEntry(path=name, size=stored.size, sha256=stored.sha256)

    def complete(self, root: Path, names: Sequence[str]) -> tuple[FileRef, ...]:
        """Return what the store has of files below root, once it has those too that were not described.

        names : their paths below root; raises what describe raises
        """
        for name in names:
            if name not in self._stored:
                self.describe(root, root / name)
        return tuple(self._stored[name] for name in names)
