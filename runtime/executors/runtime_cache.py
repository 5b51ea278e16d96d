"""TensorRT-RTX's compiled kernels, kept from one start to the next: a file for each GPU, driver and plan.

The file lies beside the plan, or, where that cannot be written, in the user's cache directory. It is a cache: whatever
is wrong with it, the engine opens without it. The library checks its contents; a hash finds what was cut short.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import tempfile
from pathlib import Path

from ..user_cache import user_cache

_MAX_BYTES = 1 << 30
_HASH_BYTES = 32


class RuntimeCache:
    """The file of one plan on one GPU.

    plan_dir : the plan's folder; cache_dir : instead of it, None = as the module says
    key : the plan's, from the manifest
    """

    def __init__(
        self,
        plan_dir: Path,
        cache_dir: Path | None,
        key: str,
        gpu: str,
        driver: tuple[int, int],
        library: str,
    ) -> None:
        words = f"{gpu}-cuda{driver[0]}.{driver[1]}-{library}"
        self._name = "runtime_cache." + re.sub(r"[^A-Za-z0-9.]+", "-", words).strip("-") + ".bin"
        self._folders = [plan_dir, user_cache(key[:16])] if cache_dir is None else [cache_dir / key[:16]]
        self.note: str | None = None  # what was wrong with the file
        self._read: bytes | None = None

    def load(self) -> bytes | None:
        """Return what was kept, or None; `note` says what was wrong with a file that is there."""
        for folder in self._folders:
            path = folder / self._name
            with contextlib.suppress(OSError):
                if not path.is_file() or path.stat().st_size > _MAX_BYTES:
                    continue
                data = path.read_bytes()
                if hashlib.sha256(data[_HASH_BYTES:]).digest() == data[:_HASH_BYTES]:
                    self._read = data[_HASH_BYTES:]
                    return self._read
                self.note = f"{path} is damaged and is made again"
        return None

    def save(self, data: bytes | None) -> Path | None:
        """Keep what is new and return where, or None: nothing to keep, or no place to write. Never fails.

        The file is there whole or as it was: another process may read it at the same time.
        """
        if not data or data == self._read:
            return None
        for folder in self._folders:
            with contextlib.suppress(OSError):
                folder.mkdir(parents=True, exist_ok=True)
                return self._write(folder, data)
        return None

    def _write(self, folder: Path, data: bytes) -> Path:
        handle, name = tempfile.mkstemp(dir=folder, prefix=".runtime_cache.")
        temporary = Path(name)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(hashlib.sha256(data).digest() + data)
            target = folder / self._name
            temporary.replace(target)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        self._read = data
        return target
