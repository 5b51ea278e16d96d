"""The supervisor of a repository with an engine: tensorrt_llm and the model that calls it."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from plansmith.serving.repository.plan import Overrides, make_plan
from plansmith.serving.repository.write import write_repository
from plansmith.serving.supervisor.stubs import living_stubs
from tiny_engines import build_tiny
from triton_servers import server_environ

from .conftest import Commands

BLS = "tensorrt_llm_bls"
PROMPT = {"text_input": "the quick", "max_tokens": 3}


def _answers(state: dict[str, Any]) -> bool:
    canary = state["models"].get(BLS, {}).get("canary")
    return state["phase"] == "running" and canary is not None and canary["outcome"] == "answered"


def _wait_in_bls(port: int, bls_pid: int) -> socket.socket:
    """Return the connection of a request for which tensorrt_llm_bls has a thread that waits."""
    tasks = Path(f"/proc/{bls_pid}/task")
    before, deadline = len(list(tasks.iterdir())), time.monotonic() + 20
    body = json.dumps(PROMPT).encode()
    connection = socket.create_connection(("127.0.0.1", port), 20)
    head = f"POST /v2/models/{BLS}/generate HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    while len(list(tasks.iterdir())) <= before:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return connection


def test_requests_that_wait_for_a_dead_engine_do_not_stay(
    triton: Commands, tiny_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """Each would keep a thread of tensorrt_llm_bls for ever."""
    engine = build_tiny(tiny_checkpoint("llama"), tmp_path / "engine")
    own = Overrides(parameters={("tensorrt_llm", "num_threads"): "1"})
    write_repository(make_plan(engine, triton.repository, own), triton.repository, force=True)
    served = dataclasses.replace(triton, environ={**triton.environ, **server_environ()})
    models = ("--model", "tensorrt_llm", "--model", BLS)
    started = served.start(*models, "--canary-timeout", "2", "--hang-after", "20")
    assert started.returncode == 0, started.stderr
    first = served.wait_for(_answers)
    before = living_stubs(first["server_pid"], first["token"])
    engine_pid = before["tensorrt_llm"][0]
    os.kill(engine_pid, signal.SIGSTOP)  # so that it answers nothing
    with _wait_in_bls(first["http_port"], before[BLS][0]):
        os.kill(engine_pid, signal.SIGKILL)
        healed = served.wait_for(lambda state: state["heals"] == 1 and _answers(state))
        after = living_stubs(healed["server_pid"], healed["token"])
        assert healed["server_pid"] == first["server_pid"]
        assert after["tensorrt_llm"] != before["tensorrt_llm"]
        assert after[BLS] != before[BLS]
        assert f"{BLS}, whose requests waited for it, was loaded again" in healed["message"]
        assert served.api().generate(BLS, PROMPT, 20)["text_output"]
        assert served.run("stop").returncode == 0  # what hangs does not delay it
    assert served.living() == []
