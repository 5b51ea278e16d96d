"""Folders, URLs, and what is nearly a URL."""

from __future__ import annotations

from pathlib import Path

import pytest
from plansmith.fleet.places import is_url
from plansmith.fleet.store import RemoteStore, open_store
from plansmith.fleet.store.folder import Folder
from plansmith.runtime.errors import InvalidArgumentError

NEARLY = [
    ("s3//bucket/x", "s3://bucket/x"),
    ("s3:/bucket/x", "s3://bucket/x"),
    ("s3:bucket/x", "s3://bucket/x"),
    ("s3;//bucket/x", "s3://bucket/x"),
    ("S3:/bucket", "s3://bucket"),
    ("gs//bucket", "gs://bucket"),
    ("abfs:/container/x", "abfs://container/x"),
    ("sftp:/host/x", "sftp://host/x"),
    ("s33:/bucket", "s33://bucket"),
    ("file:/mnt/engines", "file:///mnt/engines"),
    ("file//mnt/engines", "file:///mnt/engines"),
    ("file://mnt/engines", "file:///mnt/engines"),
    ("file://localhost/mnt", "file:///mnt"),
]
FOLDERS = [
    "s3",
    "./s3",
    "./s3//bucket/x",
    "./s3:/bucket",
    "s3/bucket",
    "gs.store",
    "/mnt//engines",
    "a:b",
    "~/s3",
    ".",
]


@pytest.mark.parametrize(("text", "meant"), NEARLY)
def test_nearly_a_url(text: str, meant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is made of it: neither as this machine's store, nor as the shared one."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidArgumentError) as error:
        is_url(text, "--remote")
    assert f"--remote {text} " in str(error.value) and f"did you mean {meant}?" in str(error.value)
    for opens in (open_store, RemoteStore):
        with pytest.raises(InvalidArgumentError, match="did you mean"):
            opens(text)
    assert list(tmp_path.iterdir()) == []


def test_a_relative_file_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidArgumentError, match=rf"did you mean file://{tmp_path}/shared\?"):
        is_url("file://./shared", "--remote")


@pytest.mark.parametrize("text", FOLDERS)
def test_folders(text: str) -> None:
    assert not is_url(text, "--store")


@pytest.mark.parametrize(
    "text", ["s3://bucket/x", "file:///mnt", "memory://x", "gopher://x", "simplecache::s3://b"]
)
def test_urls(text: str) -> None:
    assert is_url(text, "--remote")


def test_a_folder_as_the_shared_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As its file:// URL: flushed and locked."""
    monkeypatch.chdir(tmp_path)
    for text in ("s3", "./s3", str(tmp_path / "s3")):
        store = RemoteStore(text)
        assert isinstance(store.objects, Folder) and store.objects.root == tmp_path / "s3"
        store.prepare()
    assert [path.name for path in tmp_path.iterdir()] == ["s3"]
