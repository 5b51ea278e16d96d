"""Where adapters come from when the engine does not hold them: what requests brought, and directories on disk."""

from __future__ import annotations

import collections
import contextlib
import hashlib
import threading
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...runtime.errors import CheckpointError, InvalidArgumentError
from ...runtime.lora_arrays import CONFIG_NAME, WEIGHTS_NAME
from .row import LoraRequest


class LoraStore:
    """Adapters by task id, those of requests within a bound of bytes, the least recently used out. Any thread."""

    def __init__(self, max_bytes: int = 0, prefetch_dir: Path | str | None = None) -> None:
        """Keep at most max_bytes of arrays; 0 = none.

        prefetch_dir : its directories named by a number are adapters of these task ids: model.lora_config.npy and
            model.lora_weights.npy, or what PEFT saved. They are read when they are loaded
        raises : CheckpointError for a directory that cannot be listed
        """
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._arrays: collections.OrderedDict[int, tuple[LoraRequest, bytes]] = collections.OrderedDict()
        self._num_bytes = 0
        self._of_directories: dict[int, bytes | None] = {}  # fingerprints, as far as they were needed
        self.directories = {} if prefetch_dir is None else _task_directories(Path(prefetch_dir))

    @property
    def num_bytes(self) -> int:
        """The bytes of the arrays that are kept."""
        return self._num_bytes

    def find(self, task_id: int) -> tuple[LoraRequest | Path | None, bytes | None]:
        """Return the arrays of a task id and their fingerprint, or its directory, or nothing."""
        with self._lock:
            if task_id in self._arrays:
                self._arrays.move_to_end(task_id)
                return self._arrays[task_id]
        return self.directories.get(task_id), None

    def keep(self, request: LoraRequest, fingerprint: bytes) -> None:
        """Keep a request's arrays, which nobody changes any more, unless they are more than all that fits."""
        num_bytes = _num_bytes(request)
        if num_bytes > self._max_bytes or request.task_id in self.directories:
            return
        with self._lock:
            self._drop(request.task_id)
            while self._num_bytes + num_bytes > self._max_bytes:
                self._drop(next(iter(self._arrays)))
            self._arrays[request.task_id] = request, fingerprint
            self._num_bytes += num_bytes

    def is_other(self, task_id: int, fingerprint: bytes) -> bool:
        """Return whether a task id is known here, with other arrays than those of the fingerprint."""
        with self._lock:
            if task_id in self._arrays:
                return self._arrays[task_id][1] != fingerprint
        if task_id not in self.directories:
            return False
        if task_id not in self._of_directories:
            self._of_directories[task_id] = _directory_fingerprint(self.directories[task_id])
        return self._of_directories[task_id] != fingerprint

    def _drop(self, task_id: int) -> None:
        """Forget arrays, if they are here. Under the lock."""
        dropped = self._arrays.pop(task_id, None)
        if dropped is not None:
            self._num_bytes -= _num_bytes(dropped[0])


def fingerprint_of(request: LoraRequest) -> bytes | None:
    """Return a hash of a request's arrays, the same in float16 and float32; None when it brings none."""
    if request.config is None or request.weights is None:
        return None
    return _fingerprint(request.config, request.weights)


def refusal(task_id: int) -> InvalidArgumentError:
    """Return the error for other arrays than those that a task id stands for."""
    return InvalidArgumentError(
        f"lora_task_id {task_id} is in the cache with other arrays; use another id for another adapter, or leave "
        "lora_weights and lora_config out"
    )


def _num_bytes(request: LoraRequest) -> int:
    return sum(array.nbytes for array in (request.config, request.weights) if array is not None)


def _task_directories(root: Path) -> dict[int, Path]:
    """Return the directories of `root` that a task id names, by id, ascending."""
    try:
        paths = [path for path in root.iterdir() if path.name.isdecimal() and path.is_dir()]
    except OSError as error:
        raise CheckpointError(
            f"{root}: lora_prefetch_dir cannot be listed ({error.strerror}); give a directory with one of each task id"
        ) from error
    return dict(sorted((int(path.name), path) for path in paths))


def _fingerprint(config: NDArray[Any], weights: NDArray[Any]) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    digest.update(np.ascontiguousarray(config, np.int64).tobytes())
    with np.errstate(over="ignore"):
        for row in weights.reshape(-1, weights.shape[-1]):
            digest.update(np.ascontiguousarray(row, np.float16).tobytes())
    return digest.digest()


def _directory_fingerprint(directory: Path) -> bytes | None:
    """Return the hash of a directory's arrays; None for one of PEFT, which no arrays are the same as."""
    with contextlib.suppress(OSError, ValueError):
        config = np.load(directory / CONFIG_NAME, allow_pickle=False)
        return _fingerprint(config, np.load(directory / WEIGHTS_NAME, allow_pickle=False))
    return None
