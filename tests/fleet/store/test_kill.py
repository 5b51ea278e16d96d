"""Whatever kills a writer, and wherever: the store is whole, and running it again ends what was begun.

Children are killed by SIGKILL at a step of their work with files: between any two renames, in the middle of a write.
"""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest
from plansmith.fleet.store import LocalStore, Ref, RemoteStore, collect, open_store, pull, push, verify
from stores import in_child, noise, put, read_back, remotes, sha256

FILES = {"plan": noise(1, 2_200_000), "log": b"built"}
MORE = {"plan": noise(2, 300_000) + FILES["plan"], "log": b"built again"}
NUM_KILLS = 50


def build(root: Path, work: Path) -> None:
    """Make a store if there is none, and put two records that share most of their bytes."""
    store = open_store(root)
    for name, files in (("one", FILES), ("two", MORE)):
        store.set_ref("chat", name, Ref.now(put(store, work, name, files).key))


def check_whole(store: LocalStore | RemoteStore) -> None:
    """No problem, and no record or ref before what it names."""
    assert verify(store) == []
    for key in store.records():
        assert store.record(key) is not None


def kill_steps(num_steps: int) -> list[int]:
    """Return where to kill: the first and the last step, and others spread by chance, the same ones each time."""
    chosen = random.Random(0).sample(range(2, num_steps), min(NUM_KILLS - 2, num_steps - 2))
    return [1, *sorted(chosen), num_steps]


def test_kills_while_adding(in_memory: Path) -> None:
    num_steps = in_child(lambda: build(in_memory / "counted", in_memory), None, in_memory / "counted")
    steps = kill_steps(num_steps)
    assert len(steps) == NUM_KILLS
    for step in steps:
        root = in_memory / f"store{step}"
        # The threads of a child may take their steps in another order, so the last ones need not come.
        in_child(lambda root=root: build(root, in_memory), step, root)  # type: ignore[misc]
        check_whole(open_store(root))
        build(root, in_memory)
        check_whole(open_store(root))
        assert read_back(open_store(root), sha256("two"), in_memory / f"out{step}") == MORE
        collect(open_store(root), keep_days=14)
        assert list((root / "tmp").iterdir()) == []


def test_kills_while_adding_go_on(in_memory: Path) -> None:
    """The same store, killed again and again, each time a little later, ends whole."""
    root = in_memory / "store"
    kills = 0
    while in_child(lambda: build(root, in_memory), 7 + 3 * kills, root) == -1:
        kills += 1
        check_whole(open_store(root))
    assert kills > 5
    assert sorted(open_store(root).refs("chat")) == ["one", "two"]


@pytest.mark.parametrize("kind", ["file", "plain"])
def test_kills_while_pushing(in_memory: Path, kind: str) -> None:
    build(in_memory / "local", in_memory)
    local = open_store(in_memory / "local")
    keys, refs = list(local.records()), {("chat", name): ref for name, ref in local.refs("chat").items()}

    def send(where: Path) -> None:
        push(local, remotes(where)[kind], keys, refs)

    num_steps = in_child(lambda: send(in_memory / "counted"), None, in_memory / "counted")
    for step in kill_steps(num_steps)[:: 1 if kind == "file" else 3]:
        where = in_memory / f"at{step}"
        where.mkdir()
        in_child(lambda where=where: send(where), step, where)  # type: ignore[misc]
        remote = remotes(where)[kind]
        check_whole(remote)
        push(local, remote, keys, refs)
        check_whole(remote)
        assert remote.refs("chat") == local.refs("chat")


def test_kills_while_pulling_and_extracting(in_memory: Path) -> None:
    build(in_memory / "local", in_memory)
    remote = remotes(in_memory)["file"]
    key = sha256("two")
    push(open_store(in_memory / "local"), remote, [key])

    def fetch(where: Path) -> None:
        store = open_store(where / "store")
        pull(remote, store, [key])
        read_back(store, key, where / "out")

    num_steps = in_child(lambda: fetch(in_memory / "counted"), None, in_memory / "counted")
    for step in kill_steps(num_steps)[::3]:
        where = in_memory / f"at{step}"
        where.mkdir()
        in_child(lambda where=where: fetch(where), step, where)  # type: ignore[misc]
        check_whole(open_store(where / "store"))
        # A file that has its name is the whole file.
        for path in (where / "out").glob("[a-z]*"):
            assert path.read_bytes() == MORE[path.name]
        fetch(where)
        assert read_back(open_store(where / "store"), key, where / "out") == MORE


def test_kills_at_any_time(in_memory: Path) -> None:
    """Not at a step: from outside, whatever the child and its threads are doing."""
    for n in range(12):
        root = in_memory / f"store{n}"
        read_end, write_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.write(write_end, b"begin")
                while True:
                    build(root, in_memory)
                    open_store(root).remove_ref("chat", "one")
            finally:
                os._exit(1)
        os.read(read_end, 5)
        time.sleep(0.004 * n)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(read_end)
        os.close(write_end)
        check_whole(open_store(root))
        build(root, in_memory)
        check_whole(open_store(root))


def test_two_processes_add_the_same(in_memory: Path) -> None:
    root = in_memory / "store"
    pids = []
    for _ in range(4):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                for _ in range(3):
                    build(root, in_memory)
                status = 0
            finally:
                os._exit(status)
        pids.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * 4
    store = open_store(root)
    check_whole(store)
    assert len(list(store.records())) == 2
    assert read_back(store, sha256("two"), in_memory / "out") == MORE
    assert list((root / "tmp").iterdir()) == []
