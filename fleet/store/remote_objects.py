"""Objects behind a URL: whatever fsspec has a driver for."""

from __future__ import annotations

import contextlib
import datetime
import re
import threading
import uuid
from collections.abc import Iterator
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from ...runtime.errors import Error, InvalidArgumentError, UnsupportedError
from .errors import RemoteError
from .fields import MAX_JSON_BYTES
from .names import BEFORE_MARKER, TMP, TRASH

# A put to these is there whole or not at all, and a move is a copy. Everything else is taken for a file system, where
# an upload is seen while it grows and a rename is one step.
_WHOLE_PUTS = frozenset(
    ["s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oss", "oci", "obs", "tos", "memory"]
)
STAMP = "%Y%m%dT%H%M%SZ"


class RemoteObjects:
    """Objects behind a URL; see `Objects`. What a collection took aside into trash/ is still found by `read`."""

    def __init__(self, url: str, options: dict[str, Any]) -> None:
        self.url = _without_password(url)
        self._fs, self._root = _connect(url, options)
        self._root = self._root.rstrip("/")
        self._folders: set[str] = set()  # that are known to be there
        protocols = {self._fs.protocol} if isinstance(self._fs.protocol, str) else set(self._fs.protocol)
        self._whole_puts = bool(protocols & _WHOLE_PUTS)
        # Drivers with a loop of their own take calls of any thread; one connection of FTP or SSH takes one at a time.
        safe = self._fs.async_impl or "memory" in protocols or isinstance(self._fs, LocalFileSystem)
        self.jobs = 8 if safe else 1
        self._turn = contextlib.nullcontext() if safe else threading.Lock()

    def read(self, name: str, limit: int = MAX_JSON_BYTES) -> bytes | None:
        """Return an object, at most the first limit + 1 bytes of it; None when there is none."""
        found = self._read(name, limit)
        if found is not None:
            return found
        aside = (self._read(f"{folder}/{name}", limit) for folder in self.trash_folders())
        return next((one for one in aside if one is not None), None)

    def write(self, name: str, data: bytes, replace: bool = True) -> bool:
        """Write an object; False when there was one and replace is False, which stays as it is."""
        if not replace and self.has(name):
            return False
        with self._errors("writing", name):
            try:
                self._make_parents(name)
                if self._whole_puts:
                    self._fs.pipe_file(self._path(name), data)
                else:
                    self._put_aside(name, data)
            except FileNotFoundError as error:
                raise self._failed("writing", name, error) from error  # no such bucket
        return True

    def has(self, name: str) -> bool:
        """Return whether there is such an object; one that a collection took aside does not count."""
        return self._info(name) is not None

    def keep(self, name: str) -> bool:
        """Return whether there is such an object. A collection that starts later takes it aside at most."""
        return self.has(name)

    def names(self, folder: str) -> Iterator[str]:
        """Return the names of all objects below a folder, sorted."""
        with self._errors("listing", folder):
            self._fs.invalidate_cache()
            try:
                found = self._fs.find(self._path(folder))
            except FileNotFoundError as error:
                _check_absent(error)
                found = []
            if not found:
                self._check_listed(folder)
        start = len(self._path("")) + 1
        yield from sorted(path[start:] for path in found)

    def age_s(self, name: str) -> float | None:
        """Return how long ago an object was written; None when there is none."""
        with self._errors("asking the age of", name):
            try:
                written = self._fs.modified(self._path(name))
            except FileNotFoundError as error:
                _check_absent(error)
                return None
            except NotImplementedError:
                raise UnsupportedError(
                    f"{self.url} does not say when an object was written, which a collection has to know; "
                    "collect where the store lies"
                ) from None
        now = datetime.datetime.now(datetime.timezone.utc)
        written = written.replace(tzinfo=written.tzinfo or datetime.timezone.utc)
        return float((now - written).total_seconds())

    def size(self, name: str) -> int:
        """Return an object's bytes, 0 when there is none."""
        info = self._info(name)
        return int((info or {}).get("size") or 0)

    def remove(self, name: str) -> None:
        """Remove an object, if there is one."""
        with self._errors("removing", name), contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._path(name))

    def sharing(self) -> contextlib.AbstractContextManager[None]:
        """Do nothing: no lock reaches every machine. See trash.py for what takes its place."""
        return contextlib.nullcontext()

    def others(self) -> list[str]:
        """Return some of the names directly below the place: empty when there is nothing."""
        with self._errors("listing", "/"):
            self._fs.invalidate_cache()
            try:
                found = self._fs.ls(self._path(""), detail=False)
            except (FileNotFoundError, NotADirectoryError) as error:
                _check_absent(error)
                return []
        names = sorted(path.rstrip("/").rsplit("/", 1)[-1] for path in found)
        return [name for name in names if name not in BEFORE_MARKER][:3]

    def trash_folders(self) -> list[str]:
        """Return the folders below trash/, oldest first, each named by the time of a collection."""
        with self._errors("listing", TRASH):
            self._fs.invalidate_cache()
            try:
                found = self._fs.ls(self._path(TRASH), detail=False)
            except (FileNotFoundError, NotADirectoryError) as error:
                _check_absent(error)
                return []
        stamps = (path.rstrip("/").rsplit("/", 1)[-1] for path in found)
        return [f"{TRASH}/{stamp}" for stamp in sorted(stamps) if re.fullmatch(r"\d{8}T\d{6}Z", stamp)]

    def move(self, source: str, target: str) -> None:
        """Give an object another name; nothing happens when there is none. After a kill it may have both."""
        with self._errors("moving", source), contextlib.suppress(FileNotFoundError):
            self._make_parents(target)
            if self._whole_puts:
                self._fs.cp_file(self._path(source), self._path(target))
                self._fs.rm_file(self._path(source))
            else:
                self._rename(self._path(source), self._path(target))

    def _read(self, name: str, limit: int) -> bytes | None:
        with self._errors("reading", name):
            try:
                data: bytes = self._fs.cat_file(self._path(name), start=0, end=limit + 1)
            except (FileNotFoundError, IsADirectoryError) as error:
                _check_absent(error)
                return None
            except Exception:
                # An empty object has no first byte to ask for, which some servers refuse.
                if not self._is_empty(name):
                    raise
                return b""
        return data

    def _is_empty(self, name: str) -> bool:
        """Return whether a driver says that an object has no bytes; False where it says nothing."""
        try:
            return bool(self._fs.size(self._path(name)) == 0)
        except Exception:
            return False

    def _check_listed(self, folder: str) -> None:
        """Raise what kept a driver from listing a folder, which its `find` may take for an empty one."""
        try:
            self._fs.ls(self._path(folder), detail=False)
        except (FileNotFoundError, NotADirectoryError) as error:
            _check_absent(error)

    def _info(self, name: str) -> dict[str, Any] | None:
        with self._errors("looking for", name):
            self._fs.invalidate_cache()
            try:
                info: dict[str, Any] = self._fs.info(self._path(name))
            except (FileNotFoundError, NotADirectoryError) as error:
                _check_absent(error)
                return None
        return info if info.get("type") != "directory" else None

    def _put_aside(self, name: str, data: bytes) -> None:
        stamp = datetime.datetime.now(datetime.timezone.utc).strftime(STAMP)
        aside = f"{TMP}/{stamp}-{uuid.uuid4().hex}"
        self._make_parents(aside)
        try:
            self._fs.pipe_file(self._path(aside), data)
            self._rename(self._path(aside), self._path(name))
        except BaseException:
            with contextlib.suppress(Exception):
                self._fs.rm_file(self._path(aside))
            raise

    def _rename(self, source: str, target: str) -> None:
        try:
            self._fs.mv(source, target)
        except FileNotFoundError:
            raise
        except Exception:
            # Some servers rename onto nothing that is there.
            if not self._fs.exists(target):
                raise
            self._fs.rm_file(target)
            self._fs.mv(source, target)

    def _make_parents(self, name: str) -> None:
        folder = name.rpartition("/")[0]
        if not self._whole_puts and folder not in self._folders:
            self._fs.makedirs(self._path(folder), exist_ok=True)
            self._folders.add(folder)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}".rstrip("/")

    @contextlib.contextmanager
    def _errors(self, doing: str, name: str) -> Iterator[None]:
        """Wait for our turn, and turn whatever a driver raises into RemoteError; that an object is absent passes."""
        try:
            with self._turn:
                yield
        except (Error, FileNotFoundError):
            raise
        except Exception as error:
            raise self._failed(doing, name, error) from error

    def _failed(self, doing: str, name: str, error: Exception) -> RemoteError:
        return RemoteError(
            f"{doing} {name} of {self.url} failed ({type(error).__name__}: {error}); check the address, the network "
            "and your credentials, then run it again: what was sent stays"
        )


def _check_absent(error: OSError) -> None:
    """Raise the cause of an error that says that an object is absent, where it is that nobody could be asked.

    fsspec's driver of http:// says so of every failure. Others have the server's own "not found" as the cause.
    """
    cause = error.__cause__
    failed = isinstance(cause, OSError) and not isinstance(cause, (FileNotFoundError, NotADirectoryError))
    if cause is not None and (failed or getattr(cause, "status", 404) not in (404, 410)):
        raise cause


def _connect(url: str, options: dict[str, Any]) -> tuple[Any, str]:
    shown = _without_password(url)
    try:
        fs, root = fsspec.url_to_fs(url, **options)
    except ImportError as error:
        raise UnsupportedError(f"{shown} needs a driver that is not installed: {error}") from error
    except ValueError as error:
        raise InvalidArgumentError(
            f"{shown} is no URL of a store ({error}); give one such as s3://bucket/folder"
        ) from None
    except Exception as error:
        raise RemoteError(
            f"{shown} cannot be reached ({type(error).__name__}: {error}); check the address"
        ) from error
    return fs, str(root)


def _without_password(url: str) -> str:
    return re.sub(r"(://[^/@:]*):[^/@]*@", r"\1:***@", url)
