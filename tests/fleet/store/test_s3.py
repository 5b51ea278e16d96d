"""A store in a bucket, over the wire: s3fs against a server of the protocol, where both are installed."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from plansmith.fleet.store import (
    DamagedError,
    PrivateKey,
    Ref,
    RemoteError,
    RemoteStore,
    collect,
    open_store,
    pull,
    push,
    verify,
)
from plansmith.runtime.errors import InvalidArgumentError
from stores import HOUR_S, noise, put, read_back

s3fs = pytest.importorskip("s3fs", reason="the driver of s3:// is not installed")
moto = pytest.importorskip("moto.server", reason="moto, a server of S3's protocol, is not installed")

FILES = {"targets/cpu/model.plan": noise(1, 3_000_000), "empty": b"", "log": b"built"}
KEY = PrivateKey(b"1" * 32)


@pytest.fixture(scope="module")
def options() -> Iterator[dict[str, Any]]:
    """Return what the driver needs to reach a server that ends with the tests."""
    server = moto.ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        yield {"endpoint_url": f"http://{host}:{port}", "key": "x", "secret": "y"}
    server.stop()


@pytest.fixture
def remote(options: dict[str, Any]) -> RemoteStore:
    bucket = f"b{uuid.uuid4().hex}"
    s3fs.S3FileSystem(**options).mkdir(bucket)
    return RemoteStore(f"s3://{bucket}/team/store", options=options, trust=[KEY.public])


def test_there_and_back(tmp_path: Path, remote: RemoteStore) -> None:
    local = open_store(tmp_path / "local", key=KEY)
    key = put(local, tmp_path, "a", FILES).key
    assert remote.record(key) is None
    first = push(local, remote, [key], {("chat", "smol/int8"): Ref.now(key)})
    assert (first.records, first.num_bytes) == (1, 3_000_005)
    assert push(local, remote, [key]).chunks == 0
    assert verify(remote) == []
    assert list(remote.refs("chat")) == ["smol/int8"]
    other = open_store(tmp_path / "other", trust=[KEY.public])
    pull(remote, other, [key])
    assert read_back(other, key, tmp_path / "out") == FILES


def test_collections(tmp_path: Path, remote: RemoteStore) -> None:
    local = open_store(tmp_path / "local", key=KEY)
    kept, gone = (
        put(local, tmp_path, name, FILES | {"name": name.encode()}).key for name in ("kept", "gone")
    )
    push(local, remote, [kept, gone], {("chat", "kept"): Ref.now(kept)})
    assert collect(remote, keep_days=1).aside == 0
    assert collect(remote, keep_days=0).aside == 3
    assert verify(remote) == []
    pull(remote, open_store(tmp_path / "late"), [gone])
    assert collect(remote, keep_days=0, grace_s=-HOUR_S).records == 1
    assert list(remote.objects.names("trash")) == []
    assert verify(remote) == []


@pytest.mark.parametrize("damage", ["missing", "empty", "short", "long"])
def test_damaged_chunks_do_not_come_in(tmp_path: Path, remote: RemoteStore, damage: str) -> None:
    local = open_store(tmp_path / "local", key=KEY)
    key = put(local, tmp_path, "a", FILES).key
    push(local, remote, [key])
    name = next(remote.objects.names("chunks"))
    data = remote.objects.read(name) or b""
    remote.objects.remove(name)
    bad = {"empty": b"", "short": data[:-1], "long": data + b"x"}
    if damage in bad:
        remote.objects.write(name, bad[damage])
    other = open_store(tmp_path / "other")
    with pytest.raises(DamagedError, match=name):
        pull(remote, other, [key])
    assert verify(other) == []
    remote.objects.remove(name)
    assert push(local, remote, [key]).chunks == 1
    pull(remote, other, [key])
    assert verify(other) == []


def test_places_that_are_no_store(tmp_path: Path, remote: RemoteStore, options: dict[str, Any]) -> None:
    local = open_store(tmp_path / "local", key=KEY)
    key = put(local, tmp_path, "a", FILES).key
    push(local, remote, [key])
    above = remote.url.removesuffix("/store")
    with pytest.raises(InvalidArgumentError, match=r"is no store.*store"):
        push(local, RemoteStore(above, options=options), [key])
    with pytest.raises(RemoteError, match="bucket does not exist"):
        push(local, RemoteStore("s3://nosuchbucket/store", options=options), [key])
    nowhere = options | {
        "endpoint_url": "http://127.0.0.1:9",
        "config_kwargs": {"retries": {"max_attempts": 1}},
    }
    with pytest.raises(RemoteError, match=r"reading plansmith-store.json .*Could not connect"):
        RemoteStore(remote.url, options=nowhere).record(key)
