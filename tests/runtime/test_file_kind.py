"""What lies where a file is wanted, without opening it."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from plansmith.builder.checkpoint import open_checkpoint
from plansmith.builder.checkpoint.safetensors_file import SafetensorsFile
from plansmith.builder.targets.cpu.plan_reader import read_plan
from plansmith.runtime import lora_arrays
from plansmith.runtime.errors import CheckpointError, EngineFileError
from plansmith.runtime.file_kind import MISSING, no_file
from plansmith.runtime.json_file import read_json_object
from plansmith.runtime.tokenizer import Tokenizer


def test_every_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a socket's name is short
    Path("file").write_bytes(b"")
    Path("folder").mkdir()
    os.mkfifo("fifo")
    Path("good").symlink_to("file")
    Path("dangling").symlink_to("nothing")
    Path("loop").symlink_to("loop")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")
        assert no_file(Path("socket")) == "is a socket, not a file"
    assert no_file(Path("file")) is None and no_file(Path("good")) is None
    assert no_file(Path("absent")) == no_file(Path("file/below")) == MISSING
    assert no_file(Path("folder")) == "is a directory, not a file"
    assert no_file(Path("fifo")) == "is a FIFO, not a file"
    assert no_file(Path("/dev/null")) == "is a device, not a file"
    assert no_file(Path("dangling")) == "is a link to nothing"
    assert no_file(Path("loop")) == "is a loop of links"
    with pytest.raises(OSError, match="too long"):
        no_file(Path("a" * 300))


def test_readers_wait_for_no_fifo(tmp_path: Path) -> None:
    for name in ("config.json", "model.plan", "tokenizer.json", "model.lora_weights.npy"):
        os.mkfifo(tmp_path / name)
    with pytest.raises(CheckpointError, match=r"config\.json: is a FIFO"):
        read_json_object(tmp_path / "config.json", "")
    with pytest.raises(CheckpointError, match=r"config\.json: is a FIFO"):
        open_checkpoint(tmp_path, 64)
    for name in ("model.safetensors", "model.gguf"):
        os.mkfifo(tmp_path / name)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: is a FIFO"):
        SafetensorsFile(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.gguf: is a FIFO"):
        open_checkpoint(tmp_path / "model.gguf")
    with pytest.raises(EngineFileError, match=r"model\.plan: is a FIFO"):
        read_plan(tmp_path / "model.plan")
    with pytest.raises(EngineFileError, match=r"tokenizer\.json is a FIFO"):
        Tokenizer.from_directory(tmp_path)

    with pytest.raises(CheckpointError, match=r"weights\.npy: is a FIFO"):
        lora_arrays._load(tmp_path / "model.lora_weights.npy")
