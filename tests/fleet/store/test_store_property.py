"""Any order of builds, pushes, pulls, collections and kills leaves stores that are whole.

Three builders, two of which share a folder, and a remote store of each kind. Kills are real: the operation runs in a
child that is killed at a step.
"""

from __future__ import annotations

import datetime
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from plansmith.fleet.store import Ref, Store, collect, open_store, pull, push, verify
from plansmith.fleet.store.remote_objects import STAMP, RemoteObjects
from plansmith.runtime.errors import NotFoundError
from stores import in_child, make_old, noise, put, remotes, sha256

SHARED = noise(1, 700_000)
NAMES = ["a", "b", "c"]
BUILDERS = ["one", "two", "three"]
KINDS = ["file", "plain", "memory"]

names = st.sampled_from(NAMES)
builders = st.sampled_from(BUILDERS)
kinds = st.sampled_from(KINDS)
# Mostly not killed; the memory of a child is not its parent's, so nothing that writes there is killed.
kills = st.one_of(st.none(), st.integers(1, 60))


def files(name: str) -> dict[str, bytes]:
    return {"plan": name.encode() * 50 + SHARED, "log": name.encode()}


class Stores(RuleBasedStateMachine):
    """The model is simple: a record that can be read has the files that its name says."""

    @initialize()
    def begin(self) -> None:
        memory = Path("/dev/shm")
        self.root = Path(tempfile.mkdtemp(dir=memory if memory.is_dir() else None, prefix="plansmith-test-"))
        folders = {"one": "shared", "two": "shared", "three": "own"}
        self.local = {name: open_store(self.root / folder) for name, folder in folders.items()}
        self.remote = remotes(self.root)

    def teardown(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)

    @rule(builder=builders, name=names, kill=kills, with_ref=st.booleans())
    def build(self, builder: str, name: str, kill: int | None, with_ref: bool) -> None:
        store = self.local[builder]

        def work() -> None:
            key = put(store, self.root, name, files(name)).key
            if with_ref:
                store.set_ref("chat", name, Ref.now(key))

        self._run(work, kill)

    @rule(
        builder=builders, kind=kinds, chosen=st.sets(names, min_size=1), kill=kills, with_refs=st.booleans()
    )
    def push(self, builder: str, kind: str, chosen: set[str], kill: int | None, with_refs: bool) -> None:
        store = self.local[builder]
        keys = [sha256(name) for name in sorted(chosen) if store.has_record(sha256(name))]
        refs = {("chat", name): Ref.now(sha256(name)) for name in chosen if sha256(name) in keys}
        remote = self.remote[kind]
        self._run(
            lambda: push(store, remote, keys, refs if with_refs else {}), kill if kind != "memory" else None
        )

    @rule(builder=builders, kind=kinds, name=names, kill=kills)
    def pull(self, builder: str, kind: str, name: str, kill: int | None) -> None:
        remote, store = self.remote[kind], self.local[builder]

        def work() -> None:
            try:
                pull(remote, store, [sha256(name)])
            except NotFoundError:
                assert remote.record(sha256(name)) is None

        self._run(work, kill)

    @rule(builder=builders, name=names)
    def forget(self, builder: str, name: str) -> None:
        self.local[builder].remove_ref("chat", name)

    @rule(kind=kinds, name=names)
    def forget_there(self, kind: str, name: str) -> None:
        self.remote[kind].remove_ref("chat", name)

    @rule(days=st.integers(1, 20))
    def wait(self, days: int) -> None:
        make_old(self.root, days)
        for remote in self.remote.values():
            if isinstance(remote.objects, RemoteObjects):
                for place in list(remote.objects.names("trash")):
                    _, stamp, name = place.split("/", 2)
                    then = datetime.datetime.strptime(stamp, STAMP) - datetime.timedelta(days=days)
                    remote.objects.move(place, f"trash/{then:{STAMP}}/{name}")

    @rule(builder=builders, keep_days=st.integers(0, 10), kill=kills)
    def collect(self, builder: str, keep_days: int, kill: int | None) -> None:
        store = self.local[builder]
        self._run(lambda: collect(store, keep_days=keep_days), kill)

    @rule(kind=kinds, keep_days=st.integers(0, 10), kill=kills)
    def collect_there(self, kind: str, keep_days: int, kill: int | None) -> None:
        remote = self.remote[kind]
        self._run(lambda: collect(remote, keep_days=keep_days), kill if kind != "memory" else None)

    @invariant()
    def all_whole(self) -> None:
        for store in (*self.local.values(), *self.remote.values()):
            self._check(store)

    def _check(self, store: Store) -> None:
        assert verify(store) == []
        for key in store.records():
            record = store.record(key)
            assert record is not None
            wanted = files(record.inputs["name"])
            assert key == sha256(record.inputs["name"])
            for file in record.files:
                made = store.file_list(file.sha256)
                assert made is not None
                assert b"".join(store.chunk(chunk) for chunk in made.chunks) == wanted[file.path]

    def _run(self, work: Callable[[], object], kill: int | None) -> None:
        if kill is None:
            work()
        else:
            in_child(work, kill, self.root)


TestStores = Stores.TestCase
TestStores.settings = settings(max_examples=15, stateful_step_count=25, derandomize=True)
