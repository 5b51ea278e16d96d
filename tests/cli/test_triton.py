"""`plansmith triton`: what it says where no server runs; the rest is in tests/serving/supervisor."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from plansmith.runtime.errors import InvalidArgumentError
from plansmith.serving.supervisor.ports import choose_ports


def _run(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "plansmith.cli", "triton", *words],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def _repository(folder: Path) -> Path:
    (folder / "m").mkdir(parents=True)
    (folder / "m" / "config.pbtxt").write_text('backend: "python"')
    return folder


def test_help_names_every_option() -> None:
    told = _run("start", "--help", COLUMNS="200").stdout
    for option in (
        "--triton-env",
        "--http-port",
        "--foreground",
        "--canary",
        "--on-dead-model",
        "--server-arg",
    ):
        assert option in told


def test_where_nothing_runs(tmp_path: Path) -> None:
    repository = str(_repository(tmp_path / "models"))
    told = _run("status", repository)
    assert (told.returncode, told.stdout.startswith("stopped: no server was ever started")) == (3, True)
    told = _run("status", repository, "--json")
    assert (told.returncode, json.loads(told.stdout)["status"]) == (3, "stopped")
    told = _run("stop", repository)
    assert (told.returncode, told.stdout) == (0, "nothing is running\n")
    told = _run("stop", repository, "--json")
    assert (told.returncode, json.loads(told.stdout)["message"]) == (0, "nothing is running")
    assert not (tmp_path / "models.run").exists()


def test_stop_of_a_path_that_never_was_a_repository(tmp_path: Path) -> None:
    told = _run("stop", str(tmp_path / "models.run"))
    assert told.returncode == 1
    assert f"{tmp_path / 'models.run'} is no model repository" in told.stderr
    assert not list(tmp_path.iterdir())


def test_a_taken_port_names_its_option() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for option in ("http", "grpc", "metrics"):
            ports = {"http": 0, "grpc": 0, "metrics": 0, option: port}
            with pytest.raises(InvalidArgumentError, match=f"--{option}-port 0 for a free one"):
                choose_ports("127.0.0.1", **ports)


def test_options_that_cannot_be(tmp_path: Path) -> None:
    repository = str(_repository(tmp_path / "models"))
    assert "give reload or restart" in _run("start", repository, "--on-dead-model", "x").stderr
    assert "--canary 'x' is not of the form" in _run("start", repository, "--canary", "x").stderr
    told = _run("start", repository, "--http-port", "70000")
    assert (told.returncode, "70000" in told.stderr) == (2, True)


def test_a_place_that_cannot_be_used(tmp_path: Path) -> None:
    repository = _repository(tmp_path / "models")
    told = _run("start", str(repository), PLANSMITH_TRITON_ENV=str(tmp_path))
    assert told.returncode == 1
    assert "is no virtual environment" in told.stderr
    told = _run("status", str(repository))
    assert (told.returncode, "is no virtual environment" in told.stdout) == (3, True)
    told = _run("start", str(tmp_path / "nowhere"), "--json")
    assert told.returncode == 1
    assert "is no directory" in json.loads(told.stdout)["error"]["message"]
    (tmp_path / "file").touch()
    told = _run("start", str(repository), "--state-dir", str(tmp_path / "file" / "state"))
    assert told.returncode == 1
    assert "Not a directory" in told.stderr
