"""The supervisor of a real tritonserver: what it does when things die, hang or are told to stop."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from plansmith.serving.supervisor import processes
from plansmith.serving.supervisor.api import TritonApi, TritonError

from .conftest import START, Commands


def _is_running(state: dict[str, Any]) -> bool:
    return state["phase"] == "running"


def _is_well(state: dict[str, Any]) -> bool:
    canary = state["models"].get("counter", {}).get("canary")
    return _is_running(state) and canary is not None and canary["outcome"] == "answered"


def test_start_status_stop(triton: Commands) -> None:
    assert triton.run("status").returncode == 3
    assert triton.run("stop").stdout == "nothing is running\n"
    with ThreadPoolExecutor() as threads:  # two at once: one of them has it
        both = [threads.submit(triton.start) for _ in range(2)]
        refused, started = sorted((one.result() for one in both), key=lambda one: -one.returncode)
    assert started.returncode == 0, started.stderr
    assert "loading counter" in started.stderr
    assert refused.returncode == 1
    assert "already running" in refused.stderr
    triton.wait_for(_is_well)
    told = triton.run("status")
    assert told.returncode == 0
    assert "counter: ready, answered" in told.stdout
    assert triton.api().generate("all", {"COUNT": 1}, 5)["INDEX"] == 0
    stopped = triton.run("stop")
    assert (stopped.returncode, stopped.stdout) == (
        0,
        "stopped: every running request had come to its end\n",
    )
    assert triton.run("status").returncode == 3
    assert triton.living() == []


def test_a_dead_model_is_loaded_again_and_a_dead_server_started_again(triton: Commands) -> None:
    triton.start()
    first = triton.wait_for(_is_well)
    os.kill(triton.stub_pids()[0], signal.SIGKILL)
    healed = triton.wait_for(lambda state: state["heals"] == 1 and _is_well(state))
    assert healed["server_pid"] == first["server_pid"]
    assert triton.api().generate("all", {"COUNT": 1}, 5)["INDEX"] == 0

    os.kill(first["server_pid"], signal.SIGKILL)
    restarted = triton.wait_for(lambda state: state["restarts"] == 1 and _is_well(state))
    assert restarted["server_pid"] != first["server_pid"]
    assert restarted["http_port"] == first["http_port"]
    assert triton.api().generate("all", {"COUNT": 1}, 5)["INDEX"] == 0
    assert len(triton.stub_pids()) == 1  # that of the dead server was ended
    assert triton.run("stop").returncode == 0


def test_a_hanging_model_is_healed_and_a_busy_one_left_alone(triton: Commands) -> None:
    triton.start()
    first = triton.wait_for(_is_well)
    stub = triton.stub_pids()
    with pytest.raises(TritonError, match="planted"):
        triton.api().generate("counter", {"COUNT": -3}, 5)  # a client's error is no sign of illness
    done: list[int] = []
    queued = [threading.Thread(target=_block, args=(first["http_port"], 400, done)) for _ in range(10)]
    for thread in queued:
        thread.start()
    triton.wait_for(lambda state: state["models"]["counter"]["canary"]["outcome"] == "busy")
    for thread in queued:
        thread.join()
    assert done == [1] * 10
    assert triton.stub_pids() == stub

    threading.Thread(target=_block, args=(first["http_port"], 60_000, done), daemon=True).start()
    healed = triton.wait_for(lambda state: state["heals"] == 1 and _is_well(state))
    assert healed["server_pid"] == first["server_pid"]
    assert triton.stub_pids() != stub
    assert "silent for" in triton.log()
    assert triton.run("stop", "--force").returncode == 0


@pytest.mark.slow
def test_streams_of_a_dead_model_do_not_delay_the_stop(triton: Commands) -> None:
    triton.start("--exit-timeout", "60")
    first = triton.wait_for(_is_well)
    with socket.create_connection(("127.0.0.1", first["http_port"]), 20) as hung:
        _send_stream(hung, 1000)
        hung.recv(4096)
        os.kill(triton.stub_pids()[0], signal.SIGKILL)
        triton.wait_for(lambda state: state["heals"] == 1 and _is_well(state))
        began = time.monotonic()
        assert "connections without a running request were cut" in triton.run("stop").stdout
        assert time.monotonic() - began < 15


def _block(port: int, pause_ms: int, done: list[int]) -> None:
    """Keep the model from doing anything else for a while."""
    with contextlib.suppress(TritonError):
        TritonApi("127.0.0.1", port, 0).generate("counter", {"COUNT": -2, "PAUSE_MS": pause_ms}, 70)
        done.append(1)


def test_after_kill_9_of_the_supervisor(triton: Commands) -> None:
    triton.start()
    first = triton.wait_for(_is_running)
    os.kill(first["supervisor_pid"], signal.SIGKILL)
    while processes.is_same(first["supervisor_pid"], first["supervisor_ticks"]):
        time.sleep(0.01)
    assert triton.api().generate("counter", {"COUNT": 1}, 5)["INDEX"] == 0  # the server serves on
    told = triton.run("status")
    assert told.returncode == 1
    assert told.stdout.startswith("unsupervised")
    started = triton.start()
    assert "ended 3 processes" in started.stderr
    second = triton.wait_for(_is_running)
    assert not processes.is_same(first["server_pid"], first["server_ticks"])
    os.kill(second["supervisor_pid"], signal.SIGKILL)
    assert triton.run("stop").stdout == "stopped a server without supervisor\n"
    assert triton.living() == []


def test_running_streams_end_before_the_server_does(triton: Commands) -> None:
    words = [sys.executable, "-m", "plansmith.cli", "triton", "start", str(triton.repository), *START]
    supervisor = subprocess.Popen(
        [*words, "--foreground", "--exit-timeout", "20"],
        env=triton.environ,
        stderr=subprocess.PIPE,
        text=True,
    )
    state = triton.wait_for(_is_running)
    counted: list[int] = []
    begun = threading.Barrier(5, timeout=30)
    http, grpc = (state["http_port"], 60, counted, begun), (state["grpc_port"], 60, counted, begun)
    threads = [threading.Thread(target=_count, args=http) for _ in range(3)]
    threads.append(threading.Thread(target=_count_ensemble, args=grpc))
    for thread in threads:
        thread.start()
    begun.wait()
    supervisor.send_signal(signal.SIGTERM)
    for thread in threads:
        thread.join()
    _, told = supervisor.communicate(timeout=40)
    assert counted == [60] * 4
    assert supervisor.returncode == 0, told
    assert "draining" in told
    assert triton.state()["phase"] == "stopped"


def _count_ensemble(port: int, count: int, counted: list[int], begun: threading.Barrier) -> None:
    """Note how many answers of an ensemble's slow stream came over gRPC; a step follows each of the first model's."""
    grpc = pytest.importorskip("tritonclient.grpc")
    inputs = [grpc.InferInput(name, [1], "INT32") for name in ("COUNT", "PAUSE_MS")]
    for one, value in zip(inputs, (count, 50), strict=True):
        one.set_data_from_numpy(np.array([value], np.int32))
    answers: queue.Queue[Any] = queue.Queue()
    with grpc.InferenceServerClient(f"127.0.0.1:{port}") as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        client.async_stream_infer("all", inputs, enable_empty_final_response=True)
        num_answers = 0
        while True:
            result, error = answers.get(timeout=20)
            if error is not None:
                break
            num_answers += result.as_numpy("INDEX") is not None
            if num_answers == 1:
                begun.wait()
            if result.get_response().parameters["triton_final_response"].bool_param:
                break
        client.stop_stream()
    counted.append(num_answers)


def _count(port: int, count: int, counted: list[int], begun: threading.Barrier) -> None:
    """Note how many events of a slow stream came, 50 ms apart."""
    with socket.create_connection(("127.0.0.1", port), 20) as one:
        _send_stream(one, count)
        answer = one.recv(65536)
        begun.wait()
        while piece := one.recv(65536):
            answer += piece
    counted.append(answer.count(b"data:"))


def _send_stream(one: socket.socket, count: int) -> None:
    body = b'{"COUNT": %d, "PAUSE_MS": 50}' % count
    one.sendall(
        b"POST /v2/models/counter/generate_stream HTTP/1.1\r\nHost: a\r\nConnection: close\r\n"
        b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
    )


def test_what_fails_at_the_start_is_said(triton: Commands) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        refused = triton.start("--http-port", port)
    assert refused.returncode == 1
    assert f"port {port} of 127.0.0.1 cannot be opened" in refused.stderr
    assert triton.run("status").returncode == 3

    assert "no model nope" in triton.start("--model", "nope").stderr
    assert "tritonserver ended while it started" in triton.start("--server-arg=--nonsense").stderr

    (triton.repository / "counter" / "broken").touch()
    broken = triton.start()
    assert broken.returncode == 1
    assert "the model counter does not load" in broken.stderr
    assert "a planted failure" in broken.stderr
    told = triton.run("status")
    assert (told.returncode, "a planted failure" in told.stdout) == (3, True)
    assert triton.living() == []


def test_a_start_that_is_not_wanted_any_more(triton: Commands) -> None:
    (triton.repository / "counter" / "slow").touch()
    words = [sys.executable, "-m", "plansmith.cli", "triton", "start", str(triton.repository), *START]
    start = subprocess.Popen(words, env=triton.environ, stderr=subprocess.PIPE, text=True)
    triton.wait_for(lambda state: state["message"] == "loading counter")
    began = time.monotonic()
    start.send_signal(signal.SIGINT)
    _, told = start.communicate(timeout=20)
    assert "interrupted" in told
    assert time.monotonic() - began < 15  # not the minute that loading takes
    assert triton.state()["phase"] == "stopped"
    assert triton.living() == []


def test_a_server_that_is_started_anew_for_a_dead_model_until_it_was_too_often(triton: Commands) -> None:
    triton.start("--max-restarts", "1", "--on-dead-model", "restart")
    first = triton.wait_for(_is_well)
    os.kill(triton.stub_pids()[0], signal.SIGKILL)
    second = triton.wait_for(lambda state: state["restarts"] == 1 and _is_well(state))
    assert second["heals"] == 0
    assert second["server_pid"] != first["server_pid"]
    assert not processes.is_same(first["server_pid"], first["server_ticks"])

    os.kill(second["server_pid"], signal.SIGKILL)
    failed = triton.wait_for(lambda state: state["phase"] == "failed")
    assert "given up after 1 restarts" in failed["message"]
    assert "the last reason: tritonserver ended with signal SIGKILL" in failed["message"]
    assert triton.living() == []


def test_a_server_that_cannot_be_started_again(triton: Commands) -> None:
    triton.start("--max-restarts", "1")
    first = triton.wait_for(_is_running)
    (triton.repository / "counter" / "broken").touch()  # from now on it cannot start
    os.kill(first["server_pid"], signal.SIGKILL)
    failed = triton.wait_for(lambda state: state["phase"] == "failed")
    assert "a planted failure" in failed["message"]
    assert triton.living() == []
