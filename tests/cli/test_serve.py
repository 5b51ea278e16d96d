"""plansmith serve as a process of its own: the ready line, signals, sockets, options."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

Start = Callable[..., "Process"]


class Process:
    """A running `plansmith serve`."""

    def __init__(self, arguments: list[str], environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "plansmith.cli", "serve", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )
        self.lines: list[str] = []
        self._is_ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self.lines.append(line.rstrip())
            if "plansmith: ready" in line:
                self._is_ready.set()
        self._is_ready.set()

    def until_ready(self) -> str:
        """Return where it listens."""
        assert self._is_ready.wait(60)
        ready = [line for line in self.lines if line.startswith("plansmith: ready")]
        assert ready, self.lines
        return ready[0].rsplit(" ", 1)[1]

    def maps(self) -> str:
        """Return /proc/.../maps."""
        return Path(f"/proc/{self._process.pid}/maps").read_text()

    def signal(self, number: int) -> None:
        """Send a signal."""
        self._process.send_signal(number)

    def wait(self, seconds: float = 30) -> int:
        """Return the exit code."""
        code = self._process.wait(seconds)
        self._reader.join(5)
        return code

    def end(self) -> None:
        """End it if it still runs."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()


@pytest.fixture
def start(engine_dir: Path) -> Iterator[Start]:
    """Return what starts a server of the tiny engine on a free port, with further arguments."""
    begun: list[Process] = []

    def go(*arguments: str, **environment: str) -> Process:
        words = [str(engine_dir), "--threads", "1", "--served-model-name", "tiny", *arguments]
        if "--uds" not in arguments and "--port" not in arguments:
            words += ["--port", "0"]
        begun.append(Process(words, {"OMP_NUM_THREADS": "1", **environment}))
        return begun[-1]

    yield go
    for process in begun:
        process.end()


def test_sigterm_under_load_ends_the_streams_and_exits_0(start: Start) -> None:
    process = start("--drain-seconds", "20", "--access-log")
    url = process.until_ready()
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+", url)
    texts: list[str] = []
    failures: list[BaseException] = []
    begun = threading.Barrier(7, timeout=30)

    def stream() -> None:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0)
        try:
            text, is_first = "", True
            options: Any = {"model": "tiny", "prompt": "the", "max_tokens": 100, "temperature": 0}
            for chunk in client.completions.create(**options, stream=True, extra_body={"ignore_eos": True}):
                text += chunk.choices[0].text
                if is_first:
                    begun.wait()
                    is_first = False
            texts.append(text)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=stream) for _ in range(6)]
    for thread in threads:
        thread.start()
    begun.wait()
    process.signal(signal.SIGTERM)
    for thread in threads:
        thread.join(30)
    assert process.wait() == 0
    assert not failures and len(texts) == 6 and len(set(texts)) == 1
    logged = [json.loads(line) for line in process.lines if line.startswith("{")]
    assert [one["status"] for one in logged] == [200] * 6
    assert all(one["output_tokens"] == 100 and one["path"] == "/v1/completions" for one in logged)


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Wait until something is so."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_second_sigterm_ends_at_once(start: Start) -> None:
    process = start("--drain-seconds", "60")
    url = process.until_ready()
    port = int(url.rsplit(":", 1)[1])
    with socket.create_connection(("127.0.0.1", port)) as sock:  # a request whose body never comes
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 50\r\n\r\n{")
        running = re.compile(r"^plansmith_http_requests_in_flight(\{.*\})? 1", re.M)
        until(lambda: running.search(httpx.get(f"{url}/metrics").text) is not None)
        process.signal(signal.SIGTERM)
        until(lambda: httpx.get(f"{url}/health/ready").status_code == 503)
        process.signal(signal.SIGTERM)
        assert process.wait(20) == 128 + signal.SIGTERM  # not the minute of its limit
    assert any("draining, 1 request running;" in line for line in process.lines)


def test_ctrl_c_ends_an_idle_server_with_0(start: Start) -> None:
    process = start()
    process.until_ready()
    process.signal(signal.SIGINT)
    assert process.wait(10) == 0
    assert not [line for line in process.lines if "Traceback" in line or "Error" in line]


def test_sigterm_ends_a_server_whose_log_nobody_reads(engine_dir: Path) -> None:
    words = [sys.executable, "-m", "plansmith.cli", "serve", str(engine_dir), "--threads", "1", "--port", "0"]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        assert process.stderr is not None
        while b"plansmith: ready" not in process.stderr.readline():
            assert process.poll() is None
        process.stderr.close()
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()


def test_a_unix_socket_is_served_and_taken_over(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "s"
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(path))
    stale.close()
    process = start("--uds", str(path))
    assert process.until_ready() == f"unix:{path}"
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://x") as http:
        assert http.get("/health").status_code == 200
    again = start("--uds", str(path))
    assert again.wait(60) == 1 and "somebody listens" in again.lines[-1]
    process.signal(signal.SIGTERM)
    assert process.wait(10) == 0


def test_keys_come_from_the_environment_and_a_file(start: Start, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# ours\nsk-file\n\n")
    process = start("--api-key-file", str(keys), "--api-key", "sk-flag", PLANSMITH_API_KEY="sk-e1,sk-e2")
    url = process.until_ready()
    for key, status in (("sk-file", 200), ("sk-flag", 200), ("sk-e2", 200), ("# ours", 401), ("-", 401)):
        got = httpx.get(f"{url}/v1/models", headers={"authorization": f"Bearer {key}"})
        assert got.status_code == status, key


def test_a_template_of_ones_own_brings_tools(start: Start, tmp_path: Path) -> None:
    template = tmp_path / "t.jinja"
    template.write_text(
        "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}"
        "<tool_call>"
    )
    process = start("--chat-template", str(template))
    client = openai.OpenAI(base_url=f"{process.until_ready()}/v1", api_key="x", max_retries=0)
    tool: Any = {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "maxProperties": 0}},
    }
    got = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "a"}],
        tools=[tool],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=80,
        temperature=0,
    )
    calls: Any = got.choices[0].message.tool_calls
    assert calls[0].function.name == "f"


@pytest.mark.skipif(
    not Path("/proc/self/maps").exists(), reason="what a process has mapped is read from /proc"
)
def test_weights_lie_where_the_flag_says(start: Start) -> None:
    mapped = {}
    for where in ("mapped", "huge_pages"):
        process = start("--weights", where)
        try:
            process.until_ready()
        except AssertionError:
            assert where == "huge_pages" and "offers no huge pages" in process.lines[-1]
            continue
        mapped[where] = "model.plan" in process.maps()
        process.end()
    assert mapped.pop("mapped") and not any(mapped.values())


def test_a_port_that_is_taken_is_told_before_the_engine_is_read(start: Start) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        process = start("--port", str(taken.getsockname()[1]))
        assert process.wait(60) == 1
    assert "cannot listen on" in process.lines[-1] and "--port" in process.lines[-1]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--api-key", "a b"), "API key"),
        (("--api-key-file", "/nowhere/keys"), "/nowhere/keys"),
        (("--tool-format", "xml"), "hermes"),
        (("--chat-template", "/nowhere/t"), "/nowhere/t"),
        (("--host", "999.1.1.1"), "--host"),
    ],
)
def test_wrong_options_are_one_sentence(
    plansmith: Callable[..., Any], engine_dir: Path, arguments: tuple[str, ...], says: str
) -> None:
    outcome = plansmith("serve", engine_dir, "--port", "0", *arguments)
    assert outcome.status == 1 and says in outcome.err and "Traceback" not in outcome.err
    with contextlib.suppress(IndexError):
        assert outcome.err.strip().splitlines()[-1].startswith("plansmith: ")
