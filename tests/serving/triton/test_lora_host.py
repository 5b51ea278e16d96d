"""Requests with adapters on a host: who loads, who waits, and that nobody keeps an adapter."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lora_requests import request
from plansmith.runtime.engine import Engine
from plansmith.runtime.errors import OutOfMemoryError, ShapeError
from plansmith.runtime.sampling import SamplingParams
from plansmith.serving.triton.host import EngineHost
from plansmith.serving.triton.row import LoraRequest, Row
from plansmith.serving.triton.settings import Settings
from tiny_engines import build_tiny
from triton_rows import RecordingReply

PROMPT = [5, 9, 23, 41]
GREEDY: dict[str, Any] = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True, "detokenize": False}


@pytest.fixture(scope="module")
def engine_dir(tiny_checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tiny_checkpoint("llama"), tmp_path_factory.mktemp("lora_host") / "engine")


@pytest.fixture
def host(engine_dir: Path) -> Iterator[EngineHost]:
    engine = Engine.open(engine_dir, num_threads=1, max_adapters=2)
    host = EngineHost(engine, Settings(engine_dir, lora_host_memory_bytes=1 << 30))
    yield host
    host.close()
    assert not any(entry.num_users for entry in host._adapters._entries.values())


@pytest.fixture(scope="module")
def expected(engine_dir: Path) -> Iterator[Callable[[int | None], list[int]]]:
    """Return task id -> the tokens of its adapter, by an engine of its own; None = the model's."""
    with Engine.open(engine_dir, num_threads=1) as engine:

        def tokens(task_id: int | None) -> list[int]:
            name = None if task_id is None else str(task_id)
            if name is not None and name not in engine.adapters:
                one = request(engine, task_id)  # type: ignore[arg-type]
                assert one.config is not None and one.weights is not None
                engine.load_adapter_arrays(name, one.config, one.weights)
            return list(engine.generate(PROMPT, SamplingParams(**GREEDY, adapter=name))[0].token_ids)

        yield tokens


def slowly(_token_ids: object, _logits: object) -> None:
    """Change nothing, but take as long as a real model."""
    time.sleep(0.003)


def row(lora: LoraRequest | None, row_idx: int = 0, **params: Any) -> Row:
    return Row(
        np.array(PROMPT, np.int32),
        GREEDY | params,
        exclude_input=True,
        lora=lora,
        row_idx=row_idx,
        streaming=True,
    )


def send(host: EngineHost, *rows: Row, request_id: str = "") -> RecordingReply:
    reply = RecordingReply(request_id)
    host.submit(rows, reply)
    return reply


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_more_adapters_than_the_engine_holds_take_turns(
    host: EngineHost, expected: Callable[[int | None], list[int]]
) -> None:
    engine = host._engine
    first = [send(host, row(request(engine, task_id))) for task_id in range(5)]
    assert [reply.tokens() for reply in first] == [expected(task_id) for task_id in range(5)]
    again = [send(host, row(LoraRequest(task_id % 5))) for task_id in range(20)]
    assert [reply.tokens() for reply in again] == [expected(task_id % 5) for task_id in range(20)]
    assert send(host, row(None)).tokens() == expected(None)


def test_a_loaded_adapter_does_not_wait_behind_those_that_are_not(
    host: EngineHost, expected: Callable[[int | None], list[int]]
) -> None:
    engine = host._engine
    long = {"max_tokens": 100, "logits_processor": slowly}
    held = [send(host, row(request(engine, task_id), **long), request_id=str(task_id)) for task_id in (0, 1)]
    wait_for(lambda: len(host._adapters.task_ids) == 2)
    waiting = [send(host, row(request(engine, task_id))) for task_id in range(2, 8)]
    assert send(host, row(LoraRequest(1))).tokens() == expected(1)
    assert not any(reply.answers for reply in waiting) and not held[1].ended.is_set()
    host.stop("0")
    assert [reply.tokens() for reply in waiting] == [expected(task_id) for task_id in range(2, 8)]
    host.stop("1")


def test_a_request_that_waits_for_room_can_be_stopped(host: EngineHost) -> None:
    engine = host._engine
    long = {"max_tokens": 100, "logits_processor": slowly}
    for task_id in (0, 1):
        send(host, row(request(engine, task_id), **long), request_id=str(task_id))
    wait_for(lambda: len(host._adapters.task_ids) == 2)
    waiting = send(host, row(request(engine, 2)), request_id="2")
    time.sleep(0.05)
    host.stop("2")
    assert waiting.wait() == [] and host._adapters.task_ids == [0, 1]
    for task_id in ("0", "1"):
        host.stop(task_id)


def test_a_host_that_closes_lets_those_who_wait_for_room_end_too(
    engine_dir: Path, expected: Callable[[int | None], list[int]]
) -> None:
    engine = Engine.open(engine_dir, num_threads=1, max_adapters=1)
    host = EngineHost(engine, Settings(engine_dir))
    send(host, row(request(engine, 0), max_tokens=60, logits_processor=slowly))
    waiting = send(host, row(request(engine, 1)))
    wait_for(lambda: host._adapters.task_ids == [0])
    host.close(20)
    assert waiting.tokens() == expected(1)
    stuck = EngineHost(Engine.open(engine_dir, num_threads=1, max_adapters=1), Settings(engine_dir))
    send(stuck, row(request(stuck._engine, 0), max_tokens=100, logits_processor=slowly))
    wait_for(lambda: stuck._adapters.task_ids == [0])
    waiting = send(stuck, row(request(stuck._engine, 1)))
    stuck.close(0)
    waiting.wait()


def test_a_batch_of_more_adapters_than_fit_is_an_error(host: EngineHost) -> None:
    rows = [row(request(host._engine, i), i) for i in range(3)]
    reply = send(host, *rows)
    with pytest.raises(OutOfMemoryError, match="max_adapters"):
        reply.wait()
    two = send(host, *rows[:2])
    two.wait()
    assert len(two.answers) > 0


def test_an_error_of_one_row_lets_go_of_the_others_adapters(host: EngineHost) -> None:
    good = request(host._engine, 0)
    assert good.weights is not None
    bad = LoraRequest(1, good.weights[:, :10], good.config)
    reply = send(host, row(good), row(bad, 1))
    with pytest.raises(ShapeError):
        reply.wait()
    wait_for(lambda: host.num_open_requests == 0)
    assert host._adapters.task_ids == [0]
