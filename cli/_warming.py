"""The files of engines that `plansmith warm` has in memory, and what it says of them."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import resource
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..runtime.control_groups import available_memory_bytes
from ..runtime.errors import OutOfMemoryError, UnsupportedError
from ..runtime.executors.opening import usable_target
from ..runtime.executors.options import AUTO
from ..runtime.manifest import MANIFEST_NAME, Manifest, load_manifest
from ..runtime.page_cache import MappedFile, check_system
from ._output import size_text


@dataclasses.dataclass(frozen=True)
class EngineFiles:
    """One target of an engine, its files mapped, in the order in which an engine that opens needs them."""

    root: Path
    target: str
    files: tuple[MappedFile, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return sum(one.num_bytes for one in self.files)


@dataclasses.dataclass(frozen=True)
class Readied:
    """What it took to have an engine's files in memory.

    resident_before : bytes of them that were there; None where the system does not tell
    huge_bytes : of what is there now, what the file system has in huge pages
    """

    root: Path
    target: str
    num_files: int
    num_bytes: int
    resident_before: int | None
    huge_bytes: int
    seconds: float

    @property
    def bytes_per_s(self) -> float | None:
        """Speed at which the missing bytes came; None where none were, or nobody knows."""
        if self.resident_before is None or self.resident_before >= self.num_bytes:
            return None
        return (self.num_bytes - self.resident_before) / max(self.seconds, 1e-9)

    def text(self) -> str:
        """Return it as a line for people."""
        head = f"{self.root} ({self.target}): {size_text(self.num_bytes)} in {self.num_files} files in memory"
        if self.resident_before is None:
            come = f"read in {self.seconds:.2f} s"
        elif self.bytes_per_s is None:
            come = "all of it was there already"
        else:
            come = (
                f"{size_text(self.resident_before)} was there already, the rest read in {self.seconds:.2f} s "
                f"({size_text(round(self.bytes_per_s))}/s)"
            )
        return f"{head}; {come}; {size_text(self.huge_bytes)} in huge pages"

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON."""
        return {
            "engine": str(self.root),
            "target": self.target,
            "files": self.num_files,
            "bytes": self.num_bytes,
            "resident_before_bytes": self.resident_before,
            "huge_page_bytes": self.huge_bytes,
            "seconds": self.seconds,
            "bytes_per_s": self.bytes_per_s,
        }


class Warming:
    """The engines to be readied."""

    def __init__(self, engines: Sequence[EngineFiles]) -> None:
        self.engines = tuple(engines)
        self.num_bytes = sum(one.num_bytes for one in engines)

    def check_memory(self, available: int | None = None) -> None:
        """Refuse what would not stay: files that take more than there is push each other out.

        available : bytes, files in the page cache included, for they can go; None = this machine's
        raises OutOfMemoryError
        """
        available = available_memory_bytes() if available is None else available
        if self.num_bytes > available:
            names = ", ".join(str(one.root) for one in self.engines)
            raise OutOfMemoryError(
                f"the files of {names} take {self.num_bytes} bytes, and this machine or control group has {available} "
                "for them: they would push each other out; raise its memory limit, which counts files too, or warm "
                "fewer engines"
            )

    def read_in(self, engine: EngineFiles) -> Readied:
        """Have an engine's files in memory. Raises EngineFileError for one that is cut or cannot be read."""
        there = [one.resident_bytes() for one in engine.files]
        begin = time.perf_counter()
        for file in engine.files:
            file.read_in()
        seconds = time.perf_counter() - begin
        known = [one for one in there if one is not None]
        return Readied(
            engine.root,
            engine.target,
            len(engine.files),
            engine.num_bytes,
            sum(known) if len(known) == len(there) else None,
            sum(one.huge_bytes() for one in engine.files),
            seconds,
        )

    def lock(self) -> None:
        """Keep all of it in memory while this process lives. Raises UnsupportedError, OutOfMemoryError."""
        soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_MEMLOCK, (hard, hard))
            soft = hard
        for engine in self.engines:
            for file in engine.files:
                if failed := file.lock():
                    raise self._locking_failed(file.path, failed, soft)

    def _locking_failed(self, path: Path, failed: int, limit: int) -> Exception:
        is_limited = limit != resource.RLIM_INFINITY and limit < self.num_bytes
        if is_limited and failed in (errno.ENOMEM, errno.EPERM):
            return UnsupportedError(
                f"{path} cannot be locked in memory: this process may lock {limit} bytes (RLIMIT_MEMLOCK), and the "
                f"files take {self.num_bytes}; raise it (ulimit -l, LimitMEMLOCK=infinity of a service), or give a "
                "container the capability IPC_LOCK"
            )
        return OutOfMemoryError(
            f"{path} cannot be locked in memory: {os.strerror(failed)}; free memory, or leave --lock out"
        )


@contextlib.contextmanager
def open_files(
    engine_dirs: Sequence[Path],
    target: str,
    draft: Path | None,
    device: str | None,
    *,
    check_hashes: bool,
) -> Iterator[Warming]:
    """Check the files of a target of each engine and map them; unmaps them at the end of the block.

    target : "auto" = what an engine would open here
    draft : another engine directory, whose plan of the same target drafts
    raises EngineFileError for what is no engine, has no such target, or has a file that is cut or changed;
        UnsupportedError where there is no Linux
    """
    check_system()
    with contextlib.ExitStack() as stack:
        engines = []
        for root in engine_dirs:
            manifest = load_manifest(root)
            name = usable_target(manifest, device=device) if target == AUTO else target
            manifest.target(name)
            manifest.check_files([name], hashes=check_hashes)
            paths = [*_paths(manifest, name), *_draft_paths(draft, name, check_hashes)]
            files = tuple(stack.enter_context(MappedFile(path)) for path in paths)
            engines.append(EngineFiles(root, name, files))
        yield Warming(engines)


def _paths(manifest: Manifest, target: str) -> list[Path]:
    """Return an engine's files: small ones, the plan, whose weights lie in the order of use, then a draft's."""
    entry = manifest.target(target)
    listed = [
        *manifest.tokenizer.files,
        *entry.kernel_files(),
        *entry.plan_files(),
        *manifest.draft_files(target),
    ]
    return [manifest.root / MANIFEST_NAME, *(manifest.path(one) for one in listed)]


def _draft_paths(draft: Path | None, target: str, check_hashes: bool) -> list[Path]:
    if draft is None:
        return []
    manifest = load_manifest(draft)
    file = manifest.target(target).files[0]
    fix = f"rebuild the draft with: {manifest.build_command(target)} --force"
    manifest.check_file(file, hashes=check_hashes, what="draft plan", fix=fix)
    return [manifest.path(file)]
