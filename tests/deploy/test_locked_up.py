"""The arguments of deploy/kubernetes on the real servers, locked up as in their containers: probes, metrics, drains."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import plansmith
import pytest
from manifests import container, exec_form, last
from triton_servers import find_install

_HERE = Path(__file__).parent
_START_S = 180
TRITON_ENV = Path(os.environ.get("PLANSMITH_TRITON_ENV") or _HERE.parents[1] / ".venv-triton")


def _can_unshare() -> bool:
    if os.geteuid() != 0 or not all(map(shutil.which, ("unshare", "setpriv", "mount"))):
        return False
    words = ["unshare", "--mount", "sh", "-c", "mount -t tmpfs tmpfs /mnt"]
    return subprocess.run(words, capture_output=True, check=False).returncode == 0


pytestmark = pytest.mark.skipif(not _can_unshare(), reason="mounts need root and a mount namespace")


def free_ports(count: int) -> list[int]:
    """Return ports that nobody listens at now."""
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    found = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return found


@pytest.fixture
def models(engine_dir: Path, environ: dict[str, str], tmp_path: Path) -> Path:
    """Return a folder as the volume has it: engine/ and repo/, which others can read."""
    folder = tmp_path / "models"
    shutil.copytree(engine_dir, folder / "engine")
    words = ["plansmith", "triton-repo", "engine", "-o", "repo", "--relative", "--set", "num_threads=1"]
    subprocess.run(words, cwd=folder, env=environ, check=True, capture_output=True)
    for one in [folder, *folder.rglob("*")]:
        one.chmod(0o755 if one.is_dir() else 0o644)
    return folder


def _needed() -> set[Path]:
    """Return the folders that the servers need: interpreters, packages, libraries."""
    found = [sys.prefix, sys.base_prefix, _HERE.parents[1], *plansmith.__path__, TRITON_ENV]
    found += [os.path.realpath(one) for one in found] + [os.path.realpath(TRITON_ENV / "bin" / "python3")]
    library = os.environ.get("PLANSMITH_LIBRARY")
    return {Path(one) for one in (*found, library) if one}


def _keep() -> str:
    """Return the folders right under $HOME and /tmp in which lies what the servers need, with colons between."""
    home, found = Path(os.environ["HOME"]), set()
    for path in _needed():
        for folder in (path, *path.parents):
            if folder != home and folder.exists() and folder.stat().st_mode & 0o005 != 0o005:
                pytest.skip(f"{folder} is closed to other users")
        for parent in {home, Path("/tmp")} - {Path("/")}:
            if path.is_relative_to(parent) and path != parent:
                found.add(os.fspath(parent / path.relative_to(parent).parts[0]))
    return ":".join(sorted(found))


class Locked:
    """A running container, but for the image."""

    def __init__(self, models: Path, args: list[str], environ: dict[str, str], log: Path) -> None:
        words = [
            "unshare",
            "--mount",
            "--propagation",
            "private",
            "sh",
            str(_HERE / "locked_up.sh"),
            str(models),
        ]
        self.log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [*words, sys.executable, "-m", "plansmith.cli", *args],
                env={**environ, "KEEP": _keep()},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def check(self) -> None:
        """Check that it runs as nobody in particular, and that / is read-only for it."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        assert status.split("Uid:")[1].split()[0] == "10001"
        assert set(status.split("CapBnd:")[1].split()[0] + status.split("CapEff:")[1].split()[0]) == {"0"}
        mounts = [
            line.split() for line in Path(f"/proc/{self.process.pid}/mountinfo").read_text().splitlines()
        ]
        options = {mount[4]: mount[5].split(",")[0] for mount in mounts}
        assert options["/"] == "ro" and options["/mnt/models"] == "ro"
        assert options["/tmp"] == options["/run"] == options["/dev/shm"] == "rw"

    def wait_for(self, url: str) -> list[int]:
        """Wait until a path answers 200, as a startup probe does; returns the statuses before, 0 = nobody listens."""
        seen = []
        deadline = time.monotonic() + _START_S
        while (status := _status(url)) != 200:
            assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text()
            seen.append(status)
            time.sleep(0.1)
        return seen

    def end(self, timeout_s: float) -> int:
        """Tell it to drain, and return its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout_s)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Return where a server's output goes."""
    return tmp_path / "log"


@pytest.fixture
def locked(models: Path, environ: dict[str, str], log: Path) -> Iterator[Any]:
    """Return what starts a container with the arguments given; it is ended with the test."""
    made: list[Locked] = []

    def start(args: list[str], **more: str) -> Locked:
        made.append(
            Locked(models, [one.replace("/models", "/mnt/models") for one in args], environ | more, log)
        )
        return made[-1]

    yield start
    for one in made:
        if one.process.poll() is None:
            one.process.send_signal(signal.SIGTERM)
            time.sleep(0.5)
            one.process.send_signal(signal.SIGTERM)  # the second one ends it at once
            one.process.wait(30)


def _status(url: str, body: Any = None, key: str = "") -> int:
    try:
        return _answer(url, body, key)[0]
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def _answer(url: str, body: Any = None, key: str = "") -> tuple[int, str]:
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        return response.status, response.read().decode()


def _paths(server: str) -> dict[str, str]:
    one = container(server)
    return {name: one[name]["httpGet"]["path"] for name in one if name.endswith("Probe")}


def test_triton(locked: Any, log: Path) -> None:
    find_install()
    http, grpc, metrics = free_ports(3)
    args = [
        one if not one.startswith("--host=") else "--host=127.0.0.1" for one in container("triton")["args"]
    ]
    ports = [f"--http-port={http}", f"--grpc-port={grpc}", f"--metrics-port={metrics}"]
    server = locked([*args, "--triton-env", str(TRITON_ENV), *ports])
    url = f"http://127.0.0.1:{http}"
    paths = _paths("triton")
    seen = server.wait_for(url + paths["startupProbe"])
    assert set(seen) <= {0, 400} and 400 in seen, "it was not seen before it was ready"
    assert _status(url + paths["readinessProbe"]) == 200
    body = {"text_input": "the quick", "max_tokens": 4}
    assert "text_output" in _answer(f"{url}/v2/models/ensemble/generate", body)[1]
    assert "plansmith_requests{" in _answer(f"http://127.0.0.1:{metrics}/metrics")[1]
    told = Path(f"/proc/{server.process.pid}/root/run/plansmith")
    assert told.is_dir() and any(told.iterdir()), "the state is in the pod's own volume"
    server.check()
    assert server.end(75) == 0, log.read_text()
    assert _status(url + paths["readinessProbe"]) == 0


def test_serve(locked: Any, log: Path) -> None:
    (port,) = free_ports(1)
    replaced = {"--host": "127.0.0.1", "--port": str(port), "--threads": "1"}
    args = [
        f"{one.partition('=')[0]}={replaced[one.partition('=')[0]]}"
        if one.partition("=")[0] in replaced
        else one
        for one in container("openai")["args"]
    ]
    server = locked(args, PLANSMITH_API_KEY="secret")
    url = f"http://127.0.0.1:{port}"
    paths = _paths("openai")
    server.wait_for(url + paths["startupProbe"])
    server.check()
    assert {_status(url + path) for path in paths.values()} == {200}
    check = exec_form(last("Dockerfile.serve", "HEALTHCHECK"))
    assert check[0] == "python3"
    program = [sys.executable, *(word.replace(":8000/", f":{port}/") for word in check[1:])]
    assert subprocess.run(program, check=False, timeout=30).returncode == 0
    assert _status(f"{url}/metrics") == 401
    assert "plansmith_requests{" in _answer(f"{url}/metrics", key="secret")[1]
    body = {"model": "smollm2", "prompt": "the quick", "max_tokens": 100, "ignore_eos": True}
    answers: list[tuple[int, str]] = []
    running = threading.Thread(
        target=lambda: answers.append(_answer(f"{url}/v1/completions", body, "secret"))
    )
    running.start()
    in_flight = 'plansmith_http_requests_in_flight{model="smollm2",version="1"} 1'
    while not answers and in_flight not in _answer(f"{url}/metrics", key="secret")[1]:
        assert server.process.poll() is None
    assert server.end(75) == 0, log.read_text()
    running.join(30)
    assert answers and answers[0][0] == 200 and '"text"' in answers[0][1]
    assert subprocess.run(program, check=False, timeout=30, stderr=subprocess.DEVNULL).returncode == 1
