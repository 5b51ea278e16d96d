"""Push and pull: only what lacks, in an order that leaves the other side whole, and nothing bad comes in."""

from __future__ import annotations

import functools
import http.server
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from plansmith.fleet.store import (
    DamagedError,
    LocalStore,
    PrivateKey,
    Ref,
    RemoteError,
    RemoteStore,
    open_store,
    pull,
    push,
    verify,
)
from plansmith.fleet.store.names import chunk_name
from plansmith.runtime.errors import Error, InvalidArgumentError, NotFoundError, UnsupportedError
from stores import PlainFileSystem, noise, put, read_back, remotes, set_raw, sha256

KINDS = ["file", "plain", "memory"]
FILES = {"targets/cpu/model.plan": noise(1, 2_500_000), "targets/cpu/build.log": b"built", "empty": b""}


@pytest.fixture(params=KINDS)
def remote(request: pytest.FixtureRequest, in_memory: Path) -> RemoteStore:
    return remotes(in_memory)[request.param]


def largest_chunk(remote: RemoteStore) -> tuple[str, bytes]:
    name = max(remote.objects.names("chunks"), key=remote.objects.size)
    data = remote.objects.read(name)
    assert data is not None
    return name, data


def test_there_and_back(in_memory: Path, remote: RemoteStore) -> None:
    local = open_store(in_memory / "local")
    key = put(local, in_memory, "a", FILES).key
    told: list[tuple[str, str, int, int]] = []
    ref = Ref(key, "2026-01-31T12:00:00Z")
    sent = push(local, remote, [key], {("chat", "smol/int8/l40s"): ref}, lambda *says: told.append(says))
    assert (sent.records, sent.files, sent.kept_chunks, sent.num_bytes) == (1, 3, 0, 2_500_005)
    assert [says for says in told if says[1] == "push"][-1] == (remote.url, "push", 2_500_005, 2_500_005)
    assert verify(remote) == []
    assert remote.record(key) == local.record(key)
    assert remote.refs("chat") == {"smol/int8/l40s": ref}
    assert remote.fleets() == ["chat"]
    assert list(remote.records()) == [key]

    other = open_store(in_memory / "other")
    got = pull(remote, other, [key, key])
    assert (got.records, got.files, got.chunks) == (1, 3, sent.chunks)
    assert read_back(other, key, in_memory / "out") == FILES
    assert verify(other) == []
    assert list(remote.objects.names("tmp")) == []


def test_only_what_lacks(in_memory: Path, remote: RemoteStore) -> None:
    local, other = open_store(in_memory / "local"), open_store(in_memory / "other")
    one = put(local, in_memory, "a", FILES).key
    two = put(local, in_memory, "b", {"plan": b"header" + FILES["targets/cpu/model.plan"]}).key
    first = push(local, remote, [one])
    again = push(local, remote, [one])
    assert (again.records, again.files, again.chunks, again.kept_chunks) == (0, 0, 0, first.chunks)
    second = push(local, remote, [one, two])
    assert second.records == 1
    assert second.num_bytes <= 1_500_000
    pull(remote, other, [one])
    got = pull(remote, other, [one, two])
    assert (got.records, got.num_bytes) == (1, second.num_bytes)
    assert pull(remote, other, [one, two]).chunks == 0


def test_the_first_record_stays_there(in_memory: Path, remote: RemoteStore) -> None:
    one, two = open_store(in_memory / "one"), open_store(in_memory / "two")
    key = put(one, in_memory, "a", {"plan": b"one"}).key
    put(two, in_memory, "a", {"plan": b"two"})
    push(one, remote, [key])
    sent = push(two, remote, [key], {("chat", "a"): Ref.now(key)})
    assert (sent.records, sent.chunks) == (0, 0)
    third = open_store(in_memory / "three")
    pull(remote, third, [key])
    assert read_back(third, key, in_memory / "out") == {"plan": b"one"}


def test_keys_that_are_nowhere(in_memory: Path, remote: RemoteStore) -> None:
    local = open_store(in_memory / "local")
    with pytest.raises(NotFoundError, match="build it here, or pull it first"):
        push(local, remote, [sha256("a")])
    with pytest.raises(NotFoundError, match="has no record"):
        pull(remote, local, [sha256("a")])
    with pytest.raises(NotFoundError, match="put or push it first"):
        push(local, remote, [], {("chat", "a"): Ref.now(sha256("a"))})
    assert remote.record(sha256("a")) is None
    assert list(remote.records()) == []


def test_a_record_without_files(in_memory: Path, remote: RemoteStore) -> None:
    """What a gate measured, say."""
    local, other = open_store(in_memory / "local"), open_store(in_memory / "other")
    made = put(local, in_memory, "gate", {}, kind="gate", content={"perplexity": 12.5})
    push(local, remote, [made.key])
    pull(remote, other, [made.key])
    assert other.record(made.key) == made
    assert verify(other) == verify(remote) == []


@pytest.mark.parametrize("damage", ["missing", "short", "empty", "long", "altered"])
def test_damaged_chunks_do_not_come_in(in_memory: Path, remote: RemoteStore, damage: str) -> None:
    local, other = open_store(in_memory / "local"), open_store(in_memory / "other")
    key = put(local, in_memory, "a", FILES).key
    push(local, remote, [key])
    name, data = largest_chunk(remote)
    bad = {"short": data[:-1], "empty": b"", "long": data + b"x", "altered": bytes([data[0] ^ 1]) + data[1:]}
    remote.objects.remove(name)
    if damage in bad:
        set_raw(remote, name, bad[damage])
    words = {"missing": "is missing;", "altered": "was altered", "long": "more than"}
    with pytest.raises(
        DamagedError, match=f"{name} .*{words.get(damage, 'bytes, wanted')}.* again from a store that has it"
    ) as caught:
        pull(remote, other, [key])
    assert (caught.value.name, caught.value.url) == (name, remote.url)
    assert verify(other) == []
    assert list(other.records()) == []
    assert name in [problem.name for problem in verify(remote)]
    remote.objects.remove(name)
    assert push(local, remote, [key]).chunks == 1
    pull(remote, other, [key])
    assert read_back(other, key, in_memory / "out") == FILES


def test_damaged_lists_do_not_come_in(in_memory: Path, remote: RemoteStore) -> None:
    local, other = open_store(in_memory / "local"), open_store(in_memory / "other")
    record = put(local, in_memory, "a", {"plan": b"one", "other": b"two", "long": b"three"})
    push(local, remote, [record.key])
    names = [f"files/{file.sha256[:2]}/{file.sha256}.json" for file in record.files]
    good, other_list, long_list = (remote.objects.read(name) or b"" for name in names)
    for bad, words in (
        (good[:-3], "is no JSON"),
        (b"[]", "is no JSON object"),
        (b'{"chunks":[["x",3]],"size":3}', "has a chunk that is not"),
        (b'{"chunks":[],"size":3}', "and its chunks have 0"),
        (other_list, "lists chunks that make up another file"),
        (long_list, "is of a file of 5 bytes, the record's plan has 3"),
    ):
        set_raw(remote, names[0], bad)
        with pytest.raises(DamagedError, match=words) as caught:
            pull(remote, other, [record.key])
        assert (caught.value.name, caught.value.url) == (names[0], remote.url)
        assert list(other.records()) == []
        assert verify(other) == []
    remote.objects.remove(names[0])
    with pytest.raises(DamagedError, match=r"is missing .plan"):
        pull(remote, other, [record.key])
    push(local, remote, [record.key])
    pull(remote, other, [record.key])
    assert verify(other) == verify(remote) == []


def test_damaged_records_do_not_come_in(in_memory: Path, remote: RemoteStore) -> None:
    local, other = open_store(in_memory / "local"), open_store(in_memory / "other")
    one, two = (put(local, in_memory, name, {"plan": name.encode()}).key for name in "ab")
    push(local, remote, [one, two])
    good = remote.objects.read(f"records/{one}.json") or b""
    for bad, words in (
        (good[: len(good) // 2], "is no JSON"),
        (remote.objects.read(f"records/{two}.json") or b"", "is the record of another key"),
        (b"", "is no JSON"),
    ):
        set_raw(remote, f"records/{one}.json", bad)
        with pytest.raises(DamagedError, match=words):
            pull(remote, other, [one])
        assert list(other.records()) == []
    # A push takes what cannot be read for absent.
    assert push(local, remote, [one]).records == 1
    pull(remote, other, [one])
    assert verify(other) == verify(remote) == []


def test_what_lacks_here_is_pulled_again(in_memory: Path, remote: RemoteStore) -> None:
    local = open_store(in_memory / "local")
    key = put(local, in_memory, "a", FILES).key
    push(local, remote, [key])
    chunk = max((local.root / "chunks").rglob("*/*"), key=lambda path: path.stat().st_size)
    chunk.write_bytes(b"short")
    with pytest.raises(DamagedError, match="delete that file"):
        read_back(local, key, in_memory / "out")
    got = pull(remote, local, [key])
    assert (got.records, got.chunks) == (0, 1)
    assert read_back(local, key, in_memory / "out") == FILES


def test_a_push_of_what_is_damaged_here_sends_no_record(in_memory: Path, remote: RemoteStore) -> None:
    local = open_store(in_memory / "local")
    key = put(local, in_memory, "a", FILES).key
    chunk = max((local.root / "chunks").rglob("*/*"), key=lambda path: path.stat().st_size)
    data = chunk.read_bytes()
    chunk.write_bytes(bytes(len(data)))
    with pytest.raises(DamagedError, match="was altered"):
        push(local, remote, [key])
    assert list(remote.records()) == []
    assert verify(remote) == []
    chunk.write_bytes(data)
    push(local, remote, [key])
    assert verify(remote) == []


def test_places_that_are_no_store(in_memory: Path) -> None:
    (in_memory / "full").mkdir()
    (in_memory / "full" / "thesis.tex").write_text("years of work")
    local = open_store(in_memory / "local")
    for url in (f"file://{in_memory}/full", f"plain://{in_memory}/full"):
        with pytest.raises(InvalidArgumentError, match=r"is no store.*thesis\.tex"):
            push(local, RemoteStore(url), [])
    assert [path.name for path in (in_memory / "full").iterdir()] == ["thesis.tex"]
    with pytest.raises(InvalidArgumentError, match="is no URL of a store"):
        RemoteStore("nosuch://host/store")
    with pytest.raises(UnsupportedError, match="needs a driver that is not installed"):
        RemoteStore("libarchive://x::oci://bucket/store")


class Refusing(PlainFileSystem):
    """A file system that fails as a network does, with the driver's own kind of error."""

    protocol = "refusing"

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: object) -> None:
        raise ConnectionResetError(104, "Connection reset by peer")


def test_a_network_that_fails(in_memory: Path) -> None:
    import fsspec

    fsspec.register_implementation("refusing", Refusing, clobber=True)
    local = open_store(in_memory / "local")
    key = put(local, in_memory, "a", FILES).key
    remote = RemoteStore(f"refusing://{in_memory}/remote")
    with pytest.raises(RemoteError, match=r"writing .* failed .ConnectionResetError.*run it again"):
        push(local, remote, [key])
    assert [path for path in (in_memory / "remote").rglob("*") if path.is_file()] == []


def test_a_server_that_is_not_there(in_memory: Path) -> None:
    pytest.importorskip("aiohttp", reason="the driver of http:// needs it")
    with socket.socket() as taken:  # bound and not listening: nobody answers
        taken.bind(("127.0.0.1", 0))
        remote = RemoteStore(f"http://127.0.0.1:{taken.getsockname()[1]}/store")
        for ask in (
            lambda: remote.record(sha256("a")),
            lambda: remote.refs("chat"),
            lambda: remote.objects.has("plansmith-store.json"),
            lambda: remote.objects.size("plansmith-store.json"),
            lambda: list(remote.objects.names("refs")),
        ):
            with pytest.raises(RemoteError, match=r"of http://.* failed .*Cannot connect.*check the address"):
                ask()


@pytest.mark.timeout(60)
def test_pipes_in_a_folder_that_is_pulled_from(in_memory: Path) -> None:
    remote, local = RemoteStore(f"file://{in_memory}/remote"), open_store(in_memory / "local")
    keys = [put(local, in_memory, name, {"plan": noise(n, 200_000)}).key for n, name in enumerate("abc")]
    push(local, remote, keys)
    record, made = f"records/{keys[0]}.json", local.record(keys[1])
    assert made is not None
    listed = remote.file_list(made.files[0].sha256)
    assert listed is not None
    chunk = chunk_name(listed.chunks[0].sha256)
    for name in (record, chunk):
        (in_memory / "remote" / name).unlink()
        os.mkfifo(in_memory / "remote" / name)
    other = open_store(in_memory / "other")
    failed: dict[str, Error] = {}
    assert pull(remote, other, keys, failed=failed).records == 1
    assert list(failed) == keys[:2]
    assert f"{record} is no regular file" in str(failed[keys[0]])
    assert f"{chunk} is no regular file" in str(failed[keys[1]])
    assert {problem.name for problem in verify(remote)} >= {record, chunk}


class Bucketless(PlainFileSystem):
    """An object store whose bucket is not there."""

    protocol = "s3", "bucketless"

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: object) -> None:
        raise FileNotFoundError("The specified bucket does not exist")


def test_a_bucket_that_is_not_there(in_memory: Path) -> None:
    import fsspec

    fsspec.register_implementation("bucketless", Bucketless, clobber=True)
    remote = RemoteStore(f"bucketless://{in_memory}/remote")
    with pytest.raises(RemoteError, match=r"writing plansmith-store.json .*bucket does not exist"):
        push(open_store(in_memory / "local"), remote, [])


def test_passwords_are_not_shown() -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        RemoteStore("nosuch://user:secret@host/store")
    assert "user:***@host" in str(caught.value)
    assert "secret" not in str(caught.value).replace("user:***@host", "")


@pytest.fixture
def threads(in_memory: Path) -> Iterator[list[threading.Thread]]:
    made: list[threading.Thread] = []
    yield made
    for thread in made:
        thread.join()


def test_two_pushes_at_once(in_memory: Path, remote: RemoteStore, threads: list[threading.Thread]) -> None:
    """Each has what the other has not, and a part that both have."""
    shared = noise(9, 2_000_000)
    stores = [open_store(in_memory / name) for name in ("one", "two")]
    keys = [
        put(store, in_memory, store.root.name, {"plan": noise(n, 500_000) + shared}).key
        for n, store in enumerate(stores)
    ]
    errors: list[BaseException] = []

    def work(store: LocalStore, key: str) -> None:
        try:
            push(store, remote, [key], {("chat", store.root.name): Ref.now(key)})
        except BaseException as error:
            errors.append(error)

    threads += [threading.Thread(target=work, args=pair) for pair in zip(stores, keys, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert verify(remote) == []
    assert sorted(remote.refs("chat")) == ["one", "two"]
    assert sorted(remote.records()) == sorted(keys)


class OneConnection(MemoryFileSystem):  # type: ignore[misc]
    """A file system whose calls share a connection, as those of FTP and SSH do: it notes calls that overlap."""

    protocol = "oneconnection"
    calls: ClassVar[set[int]] = set()
    overlaps = 0

    def _alone(self, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        thread, calls = threading.get_ident(), type(self).calls
        is_inner = thread in calls
        calls.add(thread)
        time.sleep(0.001)  # for another to come in
        type(self).overlaps += len(calls) > 1
        try:
            return call(*arguments, **options)
        finally:
            if not is_inner:
                calls.remove(thread)

    def pipe_file(self, *arguments: Any, **options: Any) -> Any:
        return self._alone(super().pipe_file, *arguments, **options)

    def cat_file(self, *arguments: Any, **options: Any) -> Any:
        return self._alone(super().cat_file, *arguments, **options)

    def info(self, *arguments: Any, **options: Any) -> Any:
        return self._alone(super().info, *arguments, **options)


fsspec.register_implementation("oneconnection", OneConnection, clobber=True)


def test_a_driver_with_one_connection_is_called_by_one_thread_at_a_time(
    in_memory: Path, threads: list[threading.Thread]
) -> None:
    local = open_store(in_memory / "local")
    keys = [put(local, in_memory, str(n), {"plan": noise(n, 300_000)}).key for n in range(3)]
    remote = RemoteStore("oneconnection://team/store")
    push(local, remote, [])
    threads += [threading.Thread(target=push, args=(local, remote, [key])) for key in keys]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(remote.records()) == sorted(keys) and verify(remote) == []
    assert OneConnection.overlaps == 0


class Quiet(http.server.SimpleHTTPRequestHandler):
    """A web server that serves a folder and logs nothing."""

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def web_server(in_memory: Path) -> Iterator[str]:
    """Return the address of in_memory on a web server of this machine."""
    handler = functools.partial(Quiet, directory=str(in_memory))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_folder_on_a_web_server_can_be_pulled_from(in_memory: Path, web_server: str) -> None:
    pytest.importorskip("aiohttp", reason="the driver of http:// needs it")
    private = PrivateKey(b"1" * 32)
    builder = open_store(in_memory / "store", key=private)
    key = put(builder, in_memory, "a", FILES).key
    builder.set_ref("chat", "smol/int8", Ref.now(key))
    remote = RemoteStore(f"{web_server}/store", trust=[private.public])
    assert remote.record(sha256("absent")) is None
    local = open_store(in_memory / "local")
    assert pull(remote, local, [key]).records == 1
    assert read_back(local, key, in_memory / "out") == FILES
    assert list(remote.records()) == [key]
    assert list(remote.refs("chat")) == ["smol/int8"]
    another = put(open_store(local.root, key=private), in_memory, "b", FILES).key
    with pytest.raises(RemoteError, match="writing"):
        push(local, remote, [another])
