"""LoRA adapters that come with requests: task id -> adapter of the engine, the least recently used out."""

from __future__ import annotations

import collections
import dataclasses
import enum
import itertools
import threading
from collections.abc import Callable
from pathlib import Path

from ...runtime.engine_base import EngineBase
from ...runtime.errors import InvalidArgumentError, NotFoundError, OutOfMemoryError, UnsupportedError
from .lora_store import LoraStore, fingerprint_of, refusal
from .row import LoraRequest

_POLL_S = 0.01
_ASK_S = 0.1


class _State(enum.Enum):
    LOADING = enum.auto()
    READY = enum.auto()
    LEAVING = enum.auto()


@dataclasses.dataclass
class _Entry:
    """One adapter that takes room in the engine. Fields change under the cache's lock.

    name : the engine's; another each time it is loaded
    fingerprint : of its arrays; None = it came from a directory
    num_users : requests that have acquired it and not released it
    """

    name: str
    fingerprint: bytes | None
    num_users: int = 1
    state: _State = _State.LOADING


class LoraCache:
    """Adapters by task id. Any thread; loading one, which waits for the engine, makes nobody wait who needs another."""

    def __init__(
        self,
        engine: EngineBase,
        max_adapters: int | None = None,
        *,
        host_memory_bytes: int = 0,
        prefetch_dir: Path | str | None = None,
    ) -> None:
        """Load what is to be there from the start.

        max_adapters : that the engine holds at a time; None = as many as it takes; 0 = none. An engine that takes none
            holds none
        host_memory_bytes : of the arrays of requests, kept so that an adapter that had to leave the engine comes back
            without being sent again
        prefetch_dir : see LoraStore; as many as fit are loaded now, the others when requests name them
        raises : CheckpointError for a directory that cannot be listed, and what load_adapter raises for what is in it
        """
        self._engine = engine
        taken = engine.model_info.max_adapters
        self._max_adapters = taken if max_adapters is None or taken == 0 else max_adapters
        self._store = LoraStore(host_memory_bytes, prefetch_dir)
        self._changed = threading.Condition()
        self._entries: collections.OrderedDict[int, _Entry] = (
            collections.OrderedDict()
        )  # the oldest use first
        self._generations = itertools.count(1)
        for task_id in list(self._store.directories)[: self._max_adapters]:
            self.release(self.acquire(LoraRequest(task_id)))

    @property
    def task_ids(self) -> list[int]:
        """The task ids whose adapters the engine holds, the least recently used first."""
        with self._changed:
            return [task_id for task_id, entry in self._entries.items() if entry.state is _State.READY]

    def acquire_loaded(self, request: LoraRequest) -> str | None:
        """Return what `acquire` would for a request without arrays whose adapter is loaded, else None. Never waits."""
        if request.weights is not None:
            return None
        with self._changed:
            entry = self._entries.get(request.task_id)
            if entry is None or entry.state is not _State.READY:
                return None
            return self._use(request.task_id, entry, None)

    def acquire(self, request: LoraRequest, keep_waiting: Callable[[], bool] = lambda: False) -> str:
        """Return the engine's name of a request's adapter, loading it if need be; it stays until it is released.

        May wait for a step of the engine: not on a thread that others wait for.

        keep_waiting : where all adapters are in use it waits for a release as long as this says so; asked every 0.1 s
        raises : NotFoundError for an id that is not here and comes without arrays; InvalidArgumentError for other
            arrays than those its id stands for; OutOfMemoryError when all adapters are in use; ShapeError or
            CheckpointError for arrays that do not fit the model; UnsupportedError for an engine without adapters
        """
        if self._max_adapters < 1:
            raise UnsupportedError(
                f"lora_task_id is {request.task_id}, but the engine takes no LoRA adapters; leave it out, or run a "
                "target that takes them with max_adapters above 0"
            )
        fingerprint = fingerprint_of(request)
        if fingerprint is not None and self._store.is_other(request.task_id, fingerprint):
            raise refusal(request.task_id)
        while True:
            source: LoraRequest | Path | None = request
            own = fingerprint
            if fingerprint is None:
                source, own = self._store.find(request.task_id)
            with self._changed:
                entry = self._entries.get(request.task_id)
                if entry is not None and entry.state is _State.READY:
                    return self._use(request.task_id, entry, fingerprint)
                if entry is not None:
                    self._changed.wait()  # for the thread that loads or unloads it
                    continue
                if source is None:
                    raise _unknown(request.task_id)
                if len(self._entries) < self._max_adapters:
                    entry = _Entry(f"lora_task_id {request.task_id} ({next(self._generations)})", own)
                    self._entries[request.task_id] = entry
                    break
            if not self._evict() and not self._wait_for_release(keep_waiting):
                raise OutOfMemoryError(
                    f"all {self._max_adapters} LoRA adapters that the engine holds are in use; send the request again "
                    "later, or raise the model's max_adapters"
                )
        self._load(request.task_id, entry, source)
        if fingerprint is not None:
            self._store.keep(request, fingerprint)
        return entry.name

    def release(self, name: str) -> None:
        """Say that a request no longer needs the adapter that `acquire` named."""
        with self._changed:
            for entry in self._entries.values():
                if entry.name == name and entry.num_users:
                    entry.num_users -= 1
                    self._changed.notify_all()
                    return
        raise InvalidArgumentError(f"the adapter {name!r} is released more often than it was acquired")

    def _use(self, task_id: int, entry: _Entry, fingerprint: bytes | None) -> str:
        """Count one more user of a loaded adapter. Under the lock."""
        if None not in (fingerprint, entry.fingerprint) and fingerprint != entry.fingerprint:
            raise refusal(task_id)
        entry.num_users += 1
        self._entries.move_to_end(task_id)
        return entry.name

    def _load(self, task_id: int, entry: _Entry, source: LoraRequest | Path) -> None:
        """Load a reserved entry, which is gone if that fails."""
        try:
            while True:
                try:
                    self._load_into_engine(entry.name, source)
                    break
                except OutOfMemoryError:
                    # The engine has less room than we were told, or others load adapters too.
                    if not self._evict():
                        raise
        except BaseException:
            with self._changed:
                del self._entries[task_id]
                self._changed.notify_all()
            raise
        with self._changed:
            entry.state = _State.READY
            self._changed.notify_all()

    def _load_into_engine(self, name: str, source: LoraRequest | Path) -> None:
        if isinstance(source, Path):
            self._engine.load_adapter(name, source)
            return
        assert source.config is not None and source.weights is not None
        self._engine.load_adapter_arrays(name, source.config, source.weights)

    def _wait_for_release(self, keep_waiting: Callable[[], bool]) -> bool:
        """Wait until an adapter may be free; False when nobody wants to wait."""
        if not keep_waiting():
            return False
        with self._changed:
            # One that nobody uses is still on its way out of the engine, which tells nobody.
            is_unused = not all(one.num_users for one in self._entries.values())
            self._changed.wait(_POLL_S if is_unused else _ASK_S)
        return True

    def _evict(self) -> bool:
        """Make room for one adapter; False when all are in use."""
        refused: set[str] = set()
        while True:
            with self._changed:
                task_id, entry = self._oldest_unused(refused)
                if entry is None:
                    if not any(one.state is _State.LEAVING for one in self._entries.values()):
                        return False
                    self._changed.wait()  # another thread is making room
                    return True
                entry.state = _State.LEAVING
            is_gone = self._unload(task_id, entry)
            if is_gone:
                return True
            refused.add(entry.name)

    def _oldest_unused(self, refused: set[str]) -> tuple[int, _Entry | None]:
        """Return the unused adapter that was used longest ago. Under the lock."""
        for task_id, entry in self._entries.items():
            if entry.state is _State.READY and not entry.num_users and entry.name not in refused:
                return task_id, entry
        return 0, None

    def _unload(self, task_id: int, entry: _Entry) -> bool:
        """Return whether the engine let a leaving adapter go; otherwise it is ready again."""
        is_gone = False
        try:
            self._engine.unload_adapter(entry.name)
            is_gone = True
        except NotFoundError:  # somebody else unloaded it
            is_gone = True
        except InvalidArgumentError:  # a request that was released is still on its way out of the engine
            pass
        finally:
            with self._changed:
                if is_gone:
                    del self._entries[task_id]
                else:
                    entry.state = _State.READY
                self._changed.notify_all()
        return is_gone


def _unknown(task_id: int) -> NotFoundError:
    return NotFoundError(
        f"lora_task_id {task_id} is not in the cache; send lora_weights and lora_config with the request"
    )
