"""A store in a folder: where builders put files, and engines are assembled from."""

from __future__ import annotations

import hashlib
import os
import pathlib
import stat
import uuid
from collections.abc import Iterator, Sequence

from ...builder.engine_dir import NO_SPACE, sync
from ...runtime.errors import InvalidArgumentError
from .chunks import Chunk, FileList, cut, describe, dump_list
from .envelope import Envelope
from .errors import SignatureError
from .fields import Refuse
from .folder import Folder, check_room, no_room
from .locks import Held, own
from .names import BUILT, LOCKS, check_key, check_path, chunk_name, list_name
from .record import FileRef, Record, Ref, dump_record
from .signing import PrivateKey, PublicKey
from .store import Store
from .threads import side_by_side

OTHER_FILE = "lists chunks that make up another file"


class LocalStore(Store):
    """A store in a folder of this machine, or one that machines mount whose system has flock for all of them.

    trusts_own : a record that was put here by its maker, and refs, need no signature, whatever `trust` says: for a
        folder that nobody else writes to
    """

    objects: Folder
    fix = "delete that file, then build or pull again"
    fix_missing = "build or pull again"

    def __init__(
        self,
        root: pathlib.Path,
        trust: Sequence[PublicKey] = (),
        key: PrivateKey | None = None,
        *,
        trusts_own: bool = False,
    ) -> None:
        super().__init__(Folder(root), trust, key)
        self.root = root
        self.trusts_own = trusts_own

    def add_files(self, root: pathlib.Path, paths: Sequence[str]) -> tuple[FileRef, ...]:
        """Return what names the files at `paths` below root, once their chunks and lists are stored.

        What nothing names yet stays for a collection's grace period: put the record soon.
        raises InvalidArgumentError for what is no regular file, or changes meanwhile
        """
        self.prepare()
        return tuple(self._add(root, check_path(path)) for path in paths)

    def put_record(self, record: Record) -> Record:
        """Put a record that was made here; see Store.put_record. A push with a private key signs such records."""
        self.prepare()
        # Before the record, so that a kill leaves none of ours unmarked; a mark alone says nothing.
        self.objects.write(_built_name(Envelope(dump_record(record))), b"")
        return super().put_record(record)

    def is_built_here(self, envelope: Envelope) -> bool:
        """Return whether a record was put here by its maker, not pulled from another store."""
        return self.objects.has(_built_name(envelope))

    def check_trust(self, envelope: Envelope, what: str) -> tuple[str, ...]:
        """Return the ids of the trusted keys that signed; see Store.check_trust, and trusts_own."""
        try:
            return super().check_trust(envelope, what)
        except SignatureError:
            if self.trusts_own and self.is_built_here(envelope):
                return ()
            raise

    def check_ref(self, fleet: str, member: str, ref: Ref) -> None:
        """Raise SignatureError as Store.check_ref does; a folder of our own has refs of our own."""
        if not self.trusts_own:
            super().check_ref(fleet, member, ref)

    def extract(self, files: Sequence[FileRef], out: pathlib.Path) -> None:
        """Write files below out, each whole and flushed before it has its name, with its permission bits.

        raises OutOfMemoryError when the disk has no room, DamagedError when one cannot be put together as it was
        """
        out.mkdir(parents=True, exist_ok=True)
        check_room(out, sum(file.size for file in files))
        folders = set()
        for file in files:
            target = out / check_path(file.path)
            target.parent.mkdir(parents=True, exist_ok=True)
            self._extract(file, target)
            folders |= {folder for folder in target.parents if out in (folder, *folder.parents)}
        for folder in sorted(folders, reverse=True):
            sync(folder)

    def add_list(self, made: FileList, refuse: Refuse) -> None:
        """Store the list of a file whose chunks are there; raises what refuse makes unless they make up the file."""
        digest = hashlib.sha256()
        for data in side_by_side(self.chunk, made.chunks, self.objects.jobs):
            digest.update(data)
        if digest.hexdigest() != made.sha256:
            raise refuse(OTHER_FILE)
        self.objects.write(list_name(made.sha256), dump_list(made))

    def has_list(self, made: FileList) -> bool:
        """Return whether this very list is there; if so it stays for a collection's grace period."""
        return self.objects.keep(list_name(made.sha256)) and self.readable_list(made.sha256) == made

    def add_chunk(self, chunk: Chunk, data: bytes) -> None:
        """Store data, which has to be that chunk's."""
        self.objects.write(chunk_name(chunk.sha256), data)

    def has_chunk(self, chunk: Chunk) -> bool:
        """Return whether a chunk is there with all its bytes; if so it stays for a collection's grace period."""
        name = chunk_name(chunk.sha256)
        return self.objects.size(name) == chunk.size and self.objects.keep(name)

    def lock_unit(self, key: str, blocking: bool = False) -> Held | None:
        """Return the lock of a unit, to be used in a `with` or released; None when another process holds it.

        blocking : wait for it instead. The kernel frees it with the process that holds it.
        """
        self.prepare()
        with self.objects.sharing():
            pass  # makes the folder, and says so where nothing can be written
        return own(self._lock_path(key), blocking)

    def _lock_path(self, key: str) -> pathlib.Path:
        return self.root / LOCKS / check_key(key)

    def _add(self, root: pathlib.Path, path: str) -> FileRef:
        before = _regular(root / path)
        digest = hashlib.sha256()

        def pieces() -> Iterator[bytes]:
            for data in cut(root / path):
                digest.update(data)
                yield data

        chunks = tuple(side_by_side(self._add_piece, pieces(), self.objects.jobs))
        made = FileList(digest.hexdigest(), chunks)
        after = _regular(root / path)
        if (before.st_size, before.st_mtime_ns) != (
            after.st_size,
            after.st_mtime_ns,
        ) or made.size != after.st_size:
            raise InvalidArgumentError(
                f"{root / path} changed while it was stored; let whoever writes it end first"
            )
        # Written even where there is one: that one may be damaged, and this one's chunks are known to be there.
        self.objects.write(list_name(made.sha256), dump_list(made))
        return FileRef(path, made.size, made.sha256, stat.S_IMODE(after.st_mode) & 0o777)

    def _add_piece(self, data: bytes) -> Chunk:
        chunk = describe(data)
        if not self.has_chunk(chunk):
            self.add_chunk(chunk, data)
        return chunk

    def _extract(self, file: FileRef, target: pathlib.Path) -> None:
        made = self.file_list(file.sha256)
        if made is None:
            raise self.missing(list_name(file.sha256), file.path)
        if made.size != file.size:
            raise self.refuse(list_name(file.sha256))(
                f"is of a file of {made.size} bytes, the record's {file.path} has {file.size}"
            )
        aside = target.parent / f".plansmith-{uuid.uuid4().hex}.part"
        try:
            self._assemble(made, aside, file.mode)
            aside.replace(target)
        except OSError as error:
            if error.errno not in NO_SPACE:
                raise
            raise no_room(target.parent, file.size, error.strerror or "no space left") from error
        finally:
            aside.unlink(missing_ok=True)

    def _assemble(self, made: FileList, path: pathlib.Path, mode: int) -> None:
        """Write a file of its chunks. Each byte is hashed once, for the file; the chunks' when that is wrong."""
        digest = hashlib.sha256()
        with path.open("xb") as out:
            for chunk in made.chunks:
                data = self.objects.read(chunk_name(chunk.sha256), limit=chunk.size)
                if data is None or len(data) != chunk.size:
                    data = self.chunk(chunk)  # says what is wrong with it
                digest.update(data)
                out.write(data)
            if digest.hexdigest() != made.sha256:
                for chunk in made.chunks:
                    self.chunk(chunk)
                raise self.refuse(list_name(made.sha256))(OTHER_FILE)
            out.flush()
            os.fchmod(out.fileno(), mode)
            os.fsync(out.fileno())


def _built_name(envelope: Envelope) -> str:
    return f"{BUILT}/{hashlib.sha256(envelope.payload).hexdigest()}"


def _regular(path: pathlib.Path) -> os.stat_result:
    """Return what the file system says of a regular file; InvalidArgumentError for anything else."""
    try:
        found = path.lstat()
    except OSError as error:
        raise InvalidArgumentError(f"{path} cannot be stored ({error.strerror}); name a file") from error
    if not stat.S_ISREG(found.st_mode):
        raise InvalidArgumentError(
            f"{path} is no regular file; links and folders are not stored, name what is in them"
        )
    return found
