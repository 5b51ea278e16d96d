"""Which record each member of a fleet has now: noted in this machine's store, and told to the shared one."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from ..runtime.errors import EngineFileError
from .store.local import LocalStore
from .store.push import push
from .store.record import Ref, is_time
from .store.store import Store


def member_ref(local: LocalStore, key: str, here: Ref | None) -> Ref:
    """Return the ref of a member that has a record of this machine's store, with the time when that was built.

    here : what the store here has of the member; None = nothing
    """
    if here is not None and here.key == key:
        return here
    record = local.readable(key)
    manifest = None if record is None else record.content.get("manifest")
    created = manifest.get("created") if isinstance(manifest, Mapping) else None
    if isinstance(created, str) and is_time(created):
        return Ref(key, created)
    return Ref.now(key)


class MemberRefs:
    """The refs of one run. Any thread may keep; what the stores have is read once.

    remote : where records and refs are pushed as well; None = nowhere
    """

    def __init__(self, local: LocalStore, remote: Store | None) -> None:
        self._local = local
        self._remote = remote
        self._lock = threading.Lock()
        self._seen: dict[tuple[str, str], dict[str, Ref]] = {}

    def keep(self, fleet: str, keys: Mapping[str, str]) -> None:
        """Say which records members have now: name -> key; what is said already is not written again."""
        with self._lock:
            refs = self._refs(self._local, fleet)
            for name, key in keys.items():
                if name not in refs or refs[name].key != key:
                    refs[name] = member_ref(self._local, key, None)
                    self._local.set_ref(fleet, name, refs[name])
        if self._remote is not None:
            self._push(self._remote, fleet, keys)

    def _push(self, remote: Store, fleet: str, keys: Mapping[str, str]) -> None:
        with self._lock:
            there, here = dict(self._refs(remote, fleet)), dict(self._refs(self._local, fleet))
        new = {
            name: member_ref(self._local, key, here.get(name))
            for name, key in keys.items()
            if not _is_told(remote, fleet, name, key, there)
        }
        if new:
            refs = {(fleet, name): ref for name, ref in new.items()}
            push(self._local, remote, [ref.key for ref in new.values()], refs)

    def _refs(self, store: Store, fleet: str) -> dict[str, Ref]:
        key = (store.url, fleet)
        if key not in self._seen:
            self._seen[key] = store.refs(fleet, {})  # one that cannot be read is written anew
        return self._seen[key]


def _is_told(remote: Store, fleet: str, name: str, key: str, there: Mapping[str, Ref]) -> bool:
    """Return whether a shared store says so already, in a way that others believe, of a record that they can read."""
    if name not in there or there[name].key != key or remote.readable(key) is None:
        return False
    try:
        remote.check_ref(fleet, name, there[name])
    except EngineFileError:
        return False
    return True
