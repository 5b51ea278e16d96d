"""Requests on a real engine: their tokens are the engine's, and each gets its own end, whatever happens to others."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plansmith.runtime.engine import Engine
from plansmith.runtime.errors import (
    Error,
    InvalidArgumentError,
    NotFoundError,
    QueueFullError,
    ShapeError,
    ShutdownError,
    UnsupportedError,
)
from plansmith.runtime.guided import GuidedParams
from plansmith.runtime.sampling import SamplingParams
from plansmith.runtime.stats import RequestStats
from plansmith.serving.triton import host as host_module
from plansmith.serving.triton.host import EngineHost
from plansmith.serving.triton.request_ids import inner_id
from plansmith.serving.triton.row import LoraRequest, Row
from plansmith.serving.triton.settings import Settings
from tiny_engines import build_tiny
from triton_rows import ALL_WANTS, BASIC, PERF_METRICS, RecordingReply

PROMPT = [5, 9, 23, 41, 77, 6, 9]
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "detokenize": False}


class Counted:
    """An observer that writes down what it is told."""

    def __init__(self) -> None:
        self.ends: list[tuple[int, str, int]] = []
        self.num_cancelled = 0
        self.errors: list[BaseException] = []

    def observe(self, stats: RequestStats, reason: str = "stop", *, num_sequences: int = 1) -> None:
        self.ends.append((stats.num_generated_tokens, reason, num_sequences))

    def observe_cancelled(self) -> None:
        self.num_cancelled += 1

    def observe_error(self, error: BaseException) -> None:
        self.errors.append(error)


@pytest.fixture(scope="module")
def engine_dir(tiny_checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tiny_checkpoint("llama"), tmp_path_factory.mktemp("host") / "engine")


@pytest.fixture
def hosts(engine_dir: Path) -> Iterator[Callable[..., EngineHost]]:
    """Return what makes hosts; options= are the engine's, the rest settings. All are closed at the end."""
    made: list[EngineHost] = []

    def make(
        observer: Counted | None = None, options: dict[str, Any] | None = None, **fields: Any
    ) -> EngineHost:
        engine = Engine.open(engine_dir, num_threads=1, **(options or {}))
        made.append(EngineHost(engine, Settings(engine_dir, options=options or {}, **fields), observer))
        return made[-1]

    yield make
    for host in made:
        host.close()


@pytest.fixture(scope="module")
def expected(engine_dir: Path) -> Iterator[Callable[..., list[list[int]]]]:
    """Return prompt, fields of SamplingParams -> the tokens of each output, by an engine of its own."""
    with Engine.open(engine_dir, num_threads=1) as engine:

        def tokens(prompt: list[int] = PROMPT, **params: Any) -> list[list[int]]:
            (one,) = engine.generate([prompt], SamplingParams(**{**GREEDY, **params}))
            return [list(output.token_ids) for output in one.outputs]

        yield tokens


def slowly(_token_ids: object, _logits: object) -> None:
    """Change nothing, but take as long as a real model."""
    time.sleep(0.003)


def make_row(prompt: list[int] = PROMPT, **fields: Any) -> Row:
    """Return a row; fields that are not Row's are SamplingParams'."""
    own = {name: fields.pop(name) for name in list(fields) if name in Row.__dataclass_fields__}
    own.setdefault("exclude_input", True)
    return Row(np.array(prompt, np.int32), {**GREEDY, "max_tokens": 12, **fields}, **own)


def wait_for(condition: Callable[[], bool], timeout: float = 20.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_streams_and_whole_answers_have_the_engines_tokens(
    hosts: Callable[..., EngineHost], expected: Callable[..., list[list[int]]]
) -> None:
    host = hosts()
    prompts = [[3 + i, 50 + i, 7] + [i] * (i % 5) for i in range(24)]
    replies = [RecordingReply(f"r{i}") for i in range(24)]
    for i, reply in enumerate(replies):
        host.submit([make_row(prompts[i], streaming=i % 2 == 0)], reply)
    for i, reply in enumerate(replies):
        assert [reply.tokens()] == expected(prompts[i], max_tokens=12)
        assert set(reply.answers[0]) == BASIC
        assert i % 2 == 0 or len(reply.answers) == 1
        assert reply.answers[-1]["is_final"].all() and reply.answers[-1]["finish_reasons"].tolist() == [[3]]
    wait_for(lambda: host.num_open_requests == 0)


def test_rows_of_a_batch_are_answered_by_themselves_with_one_end(
    hosts: Callable[..., EngineHost], expected: Callable[..., list[list[int]]]
) -> None:
    host = hosts()
    for streaming in (False, True):
        reply = RecordingReply()
        rows = [
            make_row([9, 4, i], max_tokens=3 + 4 * i, streaming=streaming, row_idx=i, is_batch=True)
            for i in range(4)
        ]
        host.submit(rows, reply)
        for i in range(4):
            assert [reply.tokens(row=i)] == expected([9, 4, i], max_tokens=3 + 4 * i)
        finals = [one["batch_index"].item() for one in reply.answers if one["is_final"].all()]
        assert sorted(finals) == [0, 1, 2, 3]


def test_several_outputs_carry_their_index_or_are_stacked(
    hosts: Callable[..., EngineHost], expected: Callable[..., list[list[int]]]
) -> None:
    sampled = {"temperature": 0.9, "seed": 4, "n": 3}
    wanted = expected(**sampled, max_tokens=12)
    host = hosts()
    for streaming in (False, True):
        reply = RecordingReply()
        host.submit([make_row(**sampled, streaming=streaming)], reply)
        assert [reply.tokens(index=i) for i in range(3)] == wanted
        assert sum(bool(one["is_final"].all()) for one in reply.answers) == 3
    reply = RecordingReply()
    hosts(is_decoupled=False).submit([make_row(**sampled)], reply)
    (answer,) = reply.wait()
    assert answer["output_ids"][0].tolist() == wanted and "sequence_index" not in answer


def test_beams_come_as_one_answer_even_of_a_stream(
    tiny_checkpoint: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    from plansmith.builder.build import build_engine, plan_build
    from tiny_engines import LIMITS

    limits = {**LIMITS, "max_beam_width": 3}
    build_engine(
        plan_build(tiny_checkpoint("llama"), ["cpu"], precision="fp32", limits=limits), tmp_path / "e"
    )
    engine = Engine.open(tmp_path / "e", num_threads=1)
    params = {"beam_width": 3, "length_penalty": 0.0}
    (wanted,) = engine.generate([PROMPT], SamplingParams(**{**GREEDY, **params, "max_tokens": 12}))
    host = EngineHost(engine, Settings(tmp_path / "e", max_beam_width=3))
    try:
        for streaming in (False, True):
            reply = RecordingReply()
            host.submit([make_row(**params, streaming=streaming, wants=frozenset(["log_probs"]))], reply)
            (answer,) = reply.wait()
            assert answer["output_ids"].shape == (1, 3, 12)
            assert answer["output_ids"][0].tolist() == [list(one.token_ids) for one in wanted.outputs]
            sums = [one.cumulative_logprob for one in wanted.outputs]
            assert answer["cum_log_probs"][0].tolist() == pytest.approx(sums, abs=1e-4)
    finally:
        host.close()


def test_what_is_wanted_comes_of_a_stream_as_of_a_whole_answer(hosts: Callable[..., EngineHost]) -> None:
    host = hosts(logits_dtype="float16")
    params = {"logprobs": 0, "return_context_logits": True, "return_generation_logits": True}
    whole, stream = RecordingReply(), RecordingReply()
    host.submit([make_row(wants=ALL_WANTS, **params)], whole)
    host.submit([make_row(wants=ALL_WANTS, streaming=True, **params)], stream)
    (answer,) = whole.wait()
    parts = stream.wait()
    assert answer["context_logits"].shape == (1, len(PROMPT), 320)
    assert answer["context_logits"].dtype == np.float16
    assert parts[0]["context_logits"].tobytes() == answer["context_logits"].tobytes()
    for name, axis in (("output_ids", 2), ("output_log_probs", 2), ("generation_logits", 2)):
        pieces = [one[name] for one in parts if one["output_ids"].size]
        assert np.concatenate(pieces, axis=axis).tobytes() == answer[name].tobytes()
    assert parts[-1]["cum_log_probs"] == pytest.approx(answer["cum_log_probs"], abs=1e-4)
    assert sum(int(one["num_output_tokens"].item()) for one in parts) == 12
    for name in PERF_METRICS:
        assert all(one[name].shape == (1, 1) for one in parts)
    assert [bool(one["arrival_time_ns"].item()) for one in parts] == [False] * (len(parts) - 1) + [True]
    times = [answer[f"{name}_ns"].item() for name in ("arrival_time", "first_token_time", "last_token_time")]
    assert 0 < times[0] < times[1] < times[2]


def test_a_stop_ends_the_request_of_that_id_with_what_it_has(
    hosts: Callable[..., EngineHost], expected: Callable[..., list[list[int]]]
) -> None:
    host = hosts()
    reply, other = RecordingReply("long"), RecordingReply("other")
    host.submit([make_row(max_tokens=110, streaming=True, logits_processor=slowly)], reply)
    host.submit([make_row(max_tokens=30)], other)
    wait_for(lambda: len(reply.answers) > 1)
    host.stop("long")
    host.stop("long")
    host.stop("nobody")
    with pytest.raises(InvalidArgumentError, match="no id"):
        host.stop("")
    tokens = reply.tokens()
    assert 0 < len(tokens) < 110 and tokens == expected(max_tokens=110)[0][: len(tokens)]
    assert reply.answers[-1]["finish_reasons"].tolist() == [[5]]
    assert [other.tokens()] == expected(max_tokens=30)
    host.stop("other")  # it has ended


def test_requests_of_one_id_are_all_answered_and_end_together(
    hosts: Callable[..., EngineHost],
) -> None:
    counted = Counted()
    host = hosts(counted)
    replies = [RecordingReply("one") for _ in range(3)]
    for reply in replies[:2]:
        host.submit([make_row(max_tokens=60, streaming=True, logits_processor=slowly)], reply)
    host.submit([make_row()], replies[2])
    assert len(replies[2].tokens()) == 12
    host.stop("one")
    assert all(len(reply.tokens()) < 60 for reply in replies[:2])
    third = RecordingReply("one")
    host.submit([make_row()], third)
    assert len(third.tokens()) == 12
    nameless = [RecordingReply() for _ in range(3)]
    for reply in nameless:
        host.submit([make_row()], reply)
    assert [len(reply.tokens()) for reply in nameless] == [12] * 3
    wait_for(lambda: len(counted.ends) == 7)
    assert not counted.errors


def test_a_request_that_a_model_made_is_stopped_by_its_own_id_alone_and_by_its_clients(
    hosts: Callable[..., EngineHost],
) -> None:
    """tensorrt_llm_bls ends one at a stop word; another client's of the same id goes on."""
    host = hosts()
    replies = [RecordingReply(inner_id("a")) for _ in range(2)]
    for reply in replies:
        host.submit([make_row(max_tokens=110, streaming=True, logits_processor=slowly)], reply)
    host.stop(replies[0].request_id)
    assert len(replies[0].tokens()) < 110
    assert not replies[1].ended.is_set()
    host.stop("a")
    assert len(replies[1].tokens()) < 110
    wait_for(lambda: host.num_open_requests == 0)
    assert not host._by_id


def test_a_client_that_went_away_is_noticed_and_its_request_ends(hosts: Callable[..., EngineHost]) -> None:
    counted = Counted()
    host = hosts(counted, cancellation_check_period_ms=10)
    gone, other = RecordingReply("gone"), RecordingReply()
    host.submit([make_row(max_tokens=120, streaming=True, logits_processor=slowly)], gone)
    host.submit([make_row(max_tokens=20)], other)
    wait_for(lambda: bool(gone.answers))
    gone.cancelled = True
    assert len(gone.tokens()) < 120
    assert len(other.tokens()) == 20
    wait_for(lambda: host.num_open_requests == 0)
    wait_for(lambda: "cancelled" in [reason for _, reason, _ in counted.ends])
    assert host._engine.stats().num_active_requests == 0


def test_looks_for_clients_that_went_away_are_bounded(hosts: Callable[..., EngineHost]) -> None:
    host = hosts(cancellation_check_period_ms=50)

    class SlowLook(RecordingReply):
        def is_cancelled(self) -> bool:
            start = time.thread_time()
            while time.thread_time() - start < 0.0005:
                pass
            return super().is_cancelled()

    replies = [SlowLook() for _ in range(20)]
    start = time.monotonic()
    for reply in replies:
        host.submit([make_row(max_tokens=40, logits_processor=slowly)], reply)
    for reply in replies:
        reply.wait()
    seconds = time.monotonic() - start
    looks = sum(reply.num_looks for reply in replies)
    assert 0 < looks <= seconds * 0.02 / 0.0005 + 2  # 2 % of the time at most
    assert max(reply.num_looks for reply in replies) <= seconds / 0.05 + 1


def test_an_error_goes_to_its_request_alone_and_takes_its_other_rows_with_it(
    hosts: Callable[..., EngineHost], expected: Callable[..., list[list[int]]]
) -> None:
    counted = Counted()
    host = hosts(counted)
    good, bad, long, batch = (RecordingReply() for _ in range(4))
    host.submit([make_row()], good)
    host.submit([make_row(temperature=-1.0)], bad)
    host.submit([make_row(list(range(3, 103)))], long)
    host.submit(
        [make_row(row_idx=0, is_batch=True, max_tokens=100), make_row([1] * 200, row_idx=1, is_batch=True)],
        batch,
    )
    with pytest.raises(InvalidArgumentError, match="temperature"):
        bad.wait()
    with pytest.raises(ShapeError, match="max_input_len"):
        long.wait()
    with pytest.raises(ShapeError, match="max_input_len"):
        batch.wait()
    assert [good.tokens()] == expected(max_tokens=12)
    wait_for(lambda: host.num_open_requests == 0 and host._engine.num_open_requests == 0)
    assert len(counted.errors) == 3


def test_a_stream_that_fails_in_the_middle_ends_with_its_error(hosts: Callable[..., EngineHost]) -> None:
    def fails(token_ids: Any, _logits: object) -> None:
        time.sleep(0.003)
        if len(token_ids) == len(PROMPT) + 20:
            raise ValueError("no more")

    host = hosts()
    failing, other = RecordingReply("x"), RecordingReply()
    host.submit([make_row(max_tokens=60, streaming=True, logits_processor=fails)], failing)
    host.submit([make_row(max_tokens=60, streaming=True)], other)
    with pytest.raises(Error, match="no more"):
        failing.wait()
    assert failing.answers and not any(one["is_final"].all() for one in failing.answers)
    assert len(other.tokens()) == 60


def test_a_full_queue_refuses_at_once(hosts: Callable[..., EngineHost]) -> None:
    host = hosts(options={"max_queue_size": 2, "max_batch_size": 1})
    replies = [RecordingReply(str(i)) for i in range(12)]
    for reply in replies:
        host.submit([make_row(max_tokens=100)], reply)
    refused = 0
    for reply in replies:
        try:
            assert len(reply.tokens()) == 100
        except QueueFullError:
            refused += 1
    assert 0 < refused < 12


def test_a_model_that_gives_one_answer_refuses_streams_and_batches(hosts: Callable[..., EngineHost]) -> None:
    host = hosts(is_decoupled=False)
    for rows in ([make_row(streaming=True)], [make_row(), make_row()]):
        reply = RecordingReply()
        host.submit(rows, reply)
        with pytest.raises(InvalidArgumentError, match="decoupled"):
            reply.wait()
    reply = RecordingReply()
    host.submit([make_row()], reply)
    assert len(reply.tokens()) == 12 and len(reply.answers) == 1


def test_a_grammar_is_compiled_beside_and_can_be_off(
    hosts: Callable[..., EngineHost], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("llguidance")
    guided = {"guided": GuidedParams(regex="[ab]{6}"), "ignore_eos": False}
    host = hosts()
    submit, compiled_by = host._engine.submit, set()

    def note_thread(*args: Any, **kwargs: Any) -> Any:
        compiled_by.add(threading.get_ident())
        return submit(*args, **kwargs)

    monkeypatch.setattr(host._engine, "submit", note_thread)
    reply = RecordingReply()
    host.submit([make_row(**guided, streaming=True)], reply)
    text = host._engine.tokenizer.decode(reply.tokens())  # type: ignore[union-attr]
    assert len(compiled_by) == 1 and threading.get_ident() not in compiled_by
    assert len(text) == 6 and set(text) <= set("ab")
    bad = RecordingReply()
    host.submit([make_row(guided=GuidedParams(regex="(("), ignore_eos=False)], bad)
    with pytest.raises(Error):
        bad.wait()
    off = RecordingReply()
    hosts(guided_backend="off").submit([make_row(**guided)], off)
    with pytest.raises(UnsupportedError, match="guided_decoding_backend"):
        off.wait()


def test_a_request_that_is_stopped_while_its_grammar_is_compiled_ends_empty(
    hosts: Callable[..., EngineHost],
) -> None:
    counted = Counted()
    host = hosts(counted)
    go = threading.Event()
    for _ in range(2):
        host._preparing.submit(go.wait, 30)  # both threads are busy
    reply = RecordingReply("slow")
    host.submit([make_row(guided=GuidedParams(regex="a"), ignore_eos=False)], reply)
    host.stop("slow")
    go.set()
    assert reply.wait() == []
    wait_for(lambda: host.num_open_requests == 0)
    assert (counted.ends, counted.num_cancelled, counted.errors) == ([], 1, [])


def test_close_ends_what_waits_for_its_grammar_too(
    hosts: Callable[..., EngineHost], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two are in the middle of it when the host closes, which cannot be hurried; three have not begun."""
    pytest.importorskip("llguidance")
    monkeypatch.setattr(host_module, "_CANCEL_WAIT_S", 0.05)
    counted = Counted()
    host = hosts(counted)
    go, submit = threading.Event(), host._engine.submit
    num_compiling = itertools.count()

    def compile_slowly(*args: Any, **kwargs: Any) -> Any:
        next(num_compiling)
        go.wait(30)
        return submit(*args, **kwargs)

    monkeypatch.setattr(host._engine, "submit", compile_slowly)
    replies = [RecordingReply(str(i)) for i in range(5)]
    for reply in replies:
        host.submit([make_row(guided=GuidedParams(regex="a"), ignore_eos=False)], reply)
    closing = threading.Thread(target=host.close)
    closing.start()
    for reply in replies[2:]:
        with pytest.raises(ShutdownError):
            reply.wait()
    assert closing.is_alive() and next(num_compiling) == 2
    go.set()
    closing.join(30)
    for reply in replies[:2]:
        with pytest.raises(ShutdownError):
            reply.wait()
    assert host.num_open_requests == 0 and len(counted.errors) == 5


def test_an_observer_that_fails_keeps_no_request_open(hosts: Callable[..., EngineHost]) -> None:
    class Broken(Counted):
        def observe(self, stats: RequestStats, reason: str = "stop", *, num_sequences: int = 1) -> None:
            raise ValueError("the observer's own fault")

    host = hosts(Broken())
    for _ in range(4):  # there are two threads that send
        reply = RecordingReply()
        host.submit([make_row()], reply)
        assert len(reply.tokens()) == 12
    wait_for(lambda: host.num_open_requests == 0)


def test_an_adapter_that_nobody_knows_is_an_error(hosts: Callable[..., EngineHost]) -> None:
    host = hosts()
    reply = RecordingReply()
    host.submit([make_row(lora=LoraRequest(77))], reply)
    with pytest.raises(NotFoundError, match="lora_task_id 77"):
        reply.wait()


def test_a_server_that_hangs_in_one_send_serves_the_others(hosts: Callable[..., EngineHost]) -> None:
    host = hosts(cancellation_check_period_ms=20)
    gate = threading.Event()
    stuck = [RecordingReply(gate=gate) for _ in range(3)]
    for reply in stuck:
        host.submit([make_row(streaming=True, max_tokens=40)], reply)
    others = [RecordingReply() for _ in range(6)]
    for reply in others:
        host.submit([make_row(streaming=True, max_tokens=40)], reply)
    assert [len(reply.tokens()) for reply in others] == [40] * 6
    assert not any(reply.answers for reply in stuck)
    gate.set()
    assert [len(reply.tokens()) for reply in stuck] == [40] * 3
    assert all(len(reply.answers) <= 3 for reply in stuck)  # the rest had waited, and came as one


def test_a_reply_that_fails_ends_its_request(hosts: Callable[..., EngineHost]) -> None:
    class Broken(RecordingReply):
        def send(self, outputs: dict[str, Any], final: bool) -> None:
            raise ConnectionError("the server is gone")

    host = hosts()
    broken, other = Broken("x"), RecordingReply()
    host.submit([make_row(max_tokens=110, streaming=True, logits_processor=slowly)], broken)
    host.submit([make_row()], other)
    assert len(other.tokens()) == 12
    with pytest.raises(ConnectionError):
        broken.wait()
    wait_for(lambda: host.num_open_requests == 0 and host._engine.num_open_requests == 0)


def test_close_lets_requests_end_and_then_ends_them(hosts: Callable[..., EngineHost]) -> None:
    drained = hosts()
    reply = RecordingReply()
    drained.submit([make_row(max_tokens=100, streaming=True, logits_processor=slowly)], reply)
    drained.close(drain_s=30)
    assert len(reply.tokens()) == 100
    late = RecordingReply()
    drained.submit([make_row()], late)
    with pytest.raises(ShutdownError, match="shutting down"):
        late.wait()
    drained.close()

    cut = hosts(options={"max_batch_size": 1})
    replies = [RecordingReply() for _ in range(6)]
    for reply in replies:
        cut.submit([make_row(max_tokens=110, streaming=True, logits_processor=slowly)], reply)
    cut.close(drain_s=0)
    assert all(reply.ended.is_set() for reply in replies)
    assert sum(len(reply.tokens()) for reply in replies) < 600
    assert cut.num_open_requests == 0
