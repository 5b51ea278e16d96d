"""Compiled kernels kept on disk, and what they depend on."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import pathlib
from typing import Any

from .kernel import Kernel

_HERE = pathlib.Path(__file__).parent


def kernel_key(kernel: Kernel, sm: int, triton_version: str) -> str:
    """Return a sha256; equal ones mean that compiling again gives the same cubin."""
    content = {
        "kernel": dataclasses.asdict(kernel),
        "sm": sm,
        "triton": triton_version,
        "sources": sources_digest(),
    }
    return hashlib.sha256(json.dumps(content, sort_keys=False).encode()).hexdigest()


@functools.cache
def sources_digest() -> str:
    """Return a hash over the sources of all kernels: operators share functions, and compiling again takes seconds."""
    digest = hashlib.sha256()
    for path in sorted(_HERE.rglob("*.py")):
        digest.update(f"{path.relative_to(_HERE).as_posix()}\0".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _digest(path: pathlib.Path, answer: dict[str, Any]) -> str:
    """Return a hash of an entry: its name, which is the kernel's key, and what it holds."""
    return hashlib.sha256(json.dumps([path.stem, answer], sort_keys=True).encode()).hexdigest()


class Cache:
    """A directory of compile_worker's answers. Several processes may use it at once; a damaged file is no answer.

    One that cannot be made or read keeps nothing.
    """

    def __init__(self, directory: pathlib.Path, triton_version: str) -> None:
        self._directory, self._version = directory, triton_version
        with contextlib.suppress(OSError):
            directory.mkdir(parents=True, exist_ok=True)

    def find(self, kernel: Kernel, sm: int) -> dict[str, Any] | None:
        """Return what was kept; None where nothing was."""
        path = self._path(kernel, sm)
        try:
            if not path.is_file():  # a pipe would never end
                return None
            kept = json.loads(path.read_text(encoding="utf-8"))
            answer: dict[str, Any] = kept["answer"]
            return answer if kept["sha256"] == _digest(path, answer) else None
        except (OSError, ValueError, RecursionError, LookupError, TypeError):
            return None

    def keep(self, kernel: Kernel, sm: int, answer: dict[str, Any]) -> None:
        """Keep an answer; a full disk keeps nothing."""
        path = self._path(kernel, sm)
        new = path.with_suffix(f".{os.getpid()}.new")
        try:
            new.write_text(json.dumps({"sha256": _digest(path, answer), "answer": answer}), encoding="utf-8")
            new.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                new.unlink()

    def _path(self, kernel: Kernel, sm: int) -> pathlib.Path:
        return self._directory / f"{kernel_key(kernel, sm, self._version)}.json"
