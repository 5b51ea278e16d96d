"""What clients do to a connection: half requests, long bodies, slow readers, sudden ends. Raw sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import httpx
import pydantic
import pytest
from openai_servers import ScriptedModel, Served, scripted, start
from plansmith.runtime.tokenizer import Tokenizer
from plansmith.serving.openai.context import LONG_TEXT, Context
from plansmith.serving.openai.errors import ApiError
from plansmith.serving.openai.protocol import ChatBody, CompletionBody, parse
from plansmith.serving.openai.settings import Settings
from plansmith.serving.openai.stream import EventStream

CHAT = {"messages": [{"role": "user", "content": "a"}]}


@pytest.fixture(scope="module")
def quick(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Return a server with short times and a small body limit; its model says "a" for ever, 2 ms a token."""
    from tiny_models import write_tokenizer

    path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(path)
    tokenizer = Tokenizer.from_directory(path)
    model = ScriptedModel(tokenizer, "the end", step_s=0.002)
    one = start(
        scripted(model, tokenizer, max_queue_size=4),
        max_body_bytes=20_000,
        header_timeout_s=0.5,
        body_timeout_s=0.7,
        write_timeout_s=1.0,
        keep_alive_s=1.0,
        stream_interval_s=0.0,
    )
    yield one
    one.stop()


def connect(server: Served) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", server.port), timeout=15)
    return sock


def head(body_length: int | None, path: str = "/v1/completions", **headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "host: x", "content-type: application/json"]
    if body_length is not None:
        lines.append(f"content-length: {body_length}")
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode()


def read_all(sock: socket.socket) -> bytes:
    """Return what comes until the server closes."""
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while part := sock.recv(65536):
            data += part
    return data


def error_of(data: bytes) -> tuple[int, str]:
    """Return status and error code of an answer."""
    top, _, body = data.partition(b"\r\n\r\n")
    return int(top.split()[1]), json.loads(body)["error"]["code"]


def until_idle(server: Served, seconds: float = 10.0) -> None:
    """Wait until the engine runs nothing."""
    end = time.monotonic() + seconds
    while server.engine.num_open_requests:
        assert time.monotonic() < end, "the engine still runs a request whose client has gone"
        time.sleep(0.01)


def until_running(server: Served) -> None:
    """Wait until the engine runs something."""
    end = time.monotonic() + 10
    while not server.engine.num_open_requests:
        assert time.monotonic() < end
        time.sleep(0.002)


@pytest.mark.parametrize(
    "garbage", [b"\x16\x03\x01\x02\x00\x01\x00", b"hello\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n"]
)
def test_what_is_no_http_is_400(quick: Served, garbage: bytes) -> None:
    with connect(quick) as sock:
        sock.sendall(garbage)
        assert error_of(read_all(sock)) == (400, "invalid_http")


def test_a_silent_connection_is_closed(quick: Served) -> None:
    with connect(quick) as sock:
        assert error_of(read_all(sock)) == (408, "header_timeout")


def test_a_head_that_drips_is_closed(quick: Served) -> None:
    begin = time.monotonic()
    with connect(quick) as sock:
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\n")
        sock.settimeout(0.1)
        data = b""
        for i in range(100):
            with contextlib.suppress(OSError):
                sock.sendall(f"x-{i}: 1\r\n".encode())
            try:
                data += (part := sock.recv(4096))
                if not part:
                    break
            except TimeoutError:
                continue
            except ConnectionResetError:
                break
    assert time.monotonic() - begin < 5
    assert error_of(data) == (408, "header_timeout")


def test_empty_lines_do_not_keep_a_connection(quick: Served) -> None:
    begin = time.monotonic()
    with connect(quick) as sock, contextlib.suppress(OSError):
        for _ in range(50):
            sock.sendall(b"\r\n")
            time.sleep(0.1)
    assert time.monotonic() - begin < 4


def test_a_head_without_end_is_cut_off(quick: Served) -> None:
    sent = 0
    with connect(quick) as sock:
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nx: ")
        with contextlib.suppress(OSError):
            for _ in range(400):
                sock.sendall(b"a" * 65536)
                sent += 65536
        data = b""
        with contextlib.suppress(OSError):
            data = read_all(sock)
    assert sent < 20 << 20
    assert not data or error_of(data)[0] == 431


def test_half_a_body_is_a_timeout(quick: Served) -> None:
    with connect(quick) as sock:
        sock.sendall(head(100) + b'{"prompt": ')
        assert error_of(read_all(sock)) == (408, "body_timeout")


def test_half_a_body_and_gone_leaves_nothing(quick: Served) -> None:
    for _ in range(20):
        with connect(quick) as sock:
            sock.sendall(head(100) + b'{"prompt": ')
    with quick.http() as http:
        assert http.get("/health/live").status_code == 200


def test_a_body_that_says_it_is_too_long_is_not_read(quick: Served) -> None:
    with connect(quick) as sock:
        sock.sendall(head(1 << 30))
        status, code = error_of(read_all(sock))
    assert (status, code) == (413, "body_too_large")


@pytest.mark.parametrize("chunked", [True, False])
def test_a_body_is_cut_off_at_the_limit(quick: Served, chunked: bool) -> None:
    """A gigabyte is not taken to its end, and the client still sees why."""
    sent = 0
    begin = time.monotonic()
    with connect(quick) as sock:
        sock.sendall(head(None, transfer_encoding="chunked") if chunked else head(1 << 30))
        with contextlib.suppress(OSError):
            for _ in range(1 << 14):
                sock.sendall(b"10000\r\n" + b"a" * 65536 + b"\r\n" if chunked else b"a" * 65536)
                sent += 65536
        data = b""
        with contextlib.suppress(OSError):
            data = read_all(sock)
    assert sent < 256 << 20 and time.monotonic() - begin < 20
    if data:
        assert error_of(data) == (413, "body_too_large")


def test_a_client_that_sends_a_little_too_much_sees_413(quick: Served) -> None:
    with quick.http() as http:
        got = http.post("/v1/completions", json={"prompt": "a" * 30_000})
        assert (got.status_code, got.json()["error"]["code"]) == (413, "body_too_large")

        def chunks() -> Iterator[bytes]:
            for _ in range(10):
                yield b" " * 5000

        got = http.post("/v1/completions", content=chunks(), headers={"content-type": "application/json"})
        assert (got.status_code, got.json()["error"]["code"]) == (413, "body_too_large")
        assert http.get("/health").status_code == 200


def test_paths_that_there_are_not_say_what_the_server_does(quick: Served) -> None:
    with quick.http() as http:
        for path in ("/v1/embeddings", "/v1/images/generations"):
            got = http.post(path, json={"model": "tiny", "input": "a"})
            assert (got.status_code, got.json()["error"]["code"]) == (404, "unknown_url")
            assert "generates text" in got.json()["error"]["message"]


def test_other_content_types_are_415(quick: Served) -> None:
    with quick.http() as http:
        got = http.post("/v1/completions", content=b"{}", headers={"content-type": "text/xml"})
        assert got.status_code == 415
        assert "send the header 'content-type: application/json'" in got.json()["error"]["message"]
        assert http.post("/v1/completions", content=b'{"prompt":"a","max_tokens":1}').status_code == 200


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"5", b"{", b"\xff\xfe", b'{"prompt":' + b"[" * 9000, b'{"prompt": NaN}']
)
def test_bodies_that_are_no_request_are_400(quick: Served, body: bytes) -> None:
    with quick.http() as http:
        got = http.post("/v1/completions", content=body)
    assert got.status_code == 400 and got.json()["error"]["type"] == "invalid_request_error", got.text


@pytest.mark.parametrize(
    ("cls", "body", "where"),
    [
        (CompletionBody, {"prompt": [True] * 100_000}, "prompt.0 has"),
        (CompletionBody, {"prompt": [["a"]] * 100_000}, "prompt.0.0 has"),
        (CompletionBody, {"prompt": [1] * 100_000 + ["a"]}, "prompt.100000 has"),
        (CompletionBody, {"prompt": "a", "stop": [1] * 100_000}, "stop.0 has"),
        (
            CompletionBody,
            {"prompt": "a", "logit_bias": {str(i): "x" for i in range(50_000)}},
            "logit_bias has the wrong type or value, it must be an object of numbers",
        ),
        (ChatBody, {"messages": [1] * 100_000}, "messages.0 has"),
        (ChatBody, {"messages": [], "tools": [1] * 100_000}, "tools.0 has"),
    ],
)
def test_a_long_list_of_what_is_wrong_makes_one_error(cls: Any, body: Any, where: str) -> None:
    """One for each entry would keep the event loop for seconds."""
    data = json.dumps(body).encode()
    with pytest.raises(pydantic.ValidationError) as found:
        cls.model_validate_json(data)
    assert found.value.error_count() < 8  # one for each type that it may have
    with pytest.raises(ApiError, match=where):
        parse(cls, data)


def test_a_client_that_leaves_before_the_first_event_ends_the_run() -> None:
    """Its headers wait for a reader that is gone, so that nothing ever asks for an event."""
    ended: list[str] = []

    @contextlib.contextmanager
    def run() -> Iterator[None]:
        yield
        ended.append("run")

    async def never() -> AsyncGenerator[bytes, None]:
        yield b""

    async def gone() -> dict[str, str]:
        return {"type": "http.disconnect"}

    async def blocked(_message: Any) -> None:
        await asyncio.sleep(60)

    ctx: Any = None
    asyncio.run(EventStream(ctx, run(), never(), {})({}, gone, blocked))
    assert ended == ["run"]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_cancels_its_request(quick: Served, stream: bool) -> None:
    body = json.dumps({"prompt": "a", "max_tokens": 2000, "stream": stream, "n": 2}).encode()
    with connect(quick) as sock:
        sock.sendall(head(len(body)) + body)
        until_running(quick)
    until_idle(quick, 2.0)


def test_a_client_that_resets_cancels_its_request(quick: Served) -> None:
    body = json.dumps({"prompt": "a", "max_tokens": 2000, "stream": True}).encode()
    sock = connect(quick)
    sock.sendall(head(len(body)) + body)
    until_running(quick)
    sock.recv(100)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
    sock.close()
    until_idle(quick, 2.0)


def test_a_slow_reader_is_cut_off_and_holds_up_nobody(quick: Served) -> None:
    """It never reads; its socket's buffers are small, so that the server's own soon fill."""
    big = json.dumps({"prompt": "a", "max_tokens": 600, "stream": True, "logprobs": 20, "n": 4}).encode()
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    sock.connect(("127.0.0.1", quick.port))
    sock.sendall(head(len(big)) + big)
    until_running(quick)
    begin = time.monotonic()
    with quick.http() as http:
        for _ in range(5):
            assert http.post("/v1/completions", json={"prompt": "a", "max_tokens": 5}).status_code == 200
    assert time.monotonic() - begin < 10
    until_idle(quick, 20.0)
    sock.settimeout(10)
    time.sleep(2.5)
    data = read_all(sock)
    sock.close()
    assert data.startswith(b"HTTP/1.1 200") and b"[DONE]" not in data[-100:]
    assert len(data) < 1 << 20


def test_requests_in_one_packet_are_answered_in_order(quick: Served) -> None:
    one = json.dumps({"prompt": "a", "max_tokens": 3}).encode()
    two = json.dumps({"prompt": "b", "max_tokens": 2}).encode()
    with connect(quick) as sock:
        sock.sendall(
            head(len(one), x_request_id="r1")
            + one
            + head(len(two), x_request_id="r2", connection="close")
            + two
        )
        data = read_all(sock)
    assert data.count(b"HTTP/1.1 200") == 2
    assert data.index(b"x-request-id: r1") < data.index(b"x-request-id: r2")


def test_an_idle_connection_is_kept_and_then_closed(quick: Served) -> None:
    request = b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n"
    with connect(quick) as sock:
        for _ in range(2):
            sock.sendall(request)
            data = b""
            while b'"version"' not in data:
                data += sock.recv(4096)
            assert data.startswith(b"HTTP/1.1 200")
            time.sleep(0.6)  # longer than a head may take: an idle connection is no late one
        begin = time.monotonic()
        assert sock.recv(4096) == b""
        assert time.monotonic() - begin < 3


def test_http_1_0_and_expect_100_work(quick: Served) -> None:
    body = json.dumps({"prompt": "a", "max_tokens": 2}).encode()
    with connect(quick) as sock:
        sock.sendall(head(len(body)).replace(b"HTTP/1.1", b"HTTP/1.0") + body)
        assert b" 200 " in read_all(sock)
    with connect(quick) as sock:
        sock.sendall(head(len(body), expect="100-continue", connection="close"))
        assert sock.recv(100).startswith(b"HTTP/1.1 100")
        sock.sendall(body)
        assert b" 200 " in read_all(sock)


def test_ids_go_in_and_out(quick: Served) -> None:
    with quick.http() as http:
        got = http.get("/version", headers={"x-request-id": "mine-1", "x-session-id": "s/7"})
        assert (got.headers["x-request-id"], got.headers["x-session-id"]) == ("mine-1", "s/7")
        made = http.get("/version").headers["x-request-id"]
        assert len(made) == 32 and made != http.get("/version").headers["x-request-id"]
        assert http.get("/version", headers={"x-request-id": "a" * 500}).headers["x-request-id"] != "a" * 500
        wrong = http.post("/v1/completions", json={}, headers={"x-request-id": "mine-2"})
        assert wrong.status_code == 400 and wrong.headers["x-request-id"] == "mine-2"


def test_what_waits_is_limited_and_told_when_to_come_again(quick: Served) -> None:
    """Slots and queue are full of long requests: 429 at once, and all is well when they have gone."""
    body = {"prompt": "a", "max_tokens": 1900, "stream": True}
    with contextlib.ExitStack() as stack:
        http = stack.enter_context(quick.http(limits=httpx.Limits(max_connections=100)))
        statuses: list[int] = []
        for _ in range(30):
            got = stack.enter_context(http.stream("POST", "/v1/completions", json=body))
            statuses.append(got.status_code)
            if got.status_code == 429:
                assert 1 <= int(got.headers["retry-after"]) <= 30
                assert json.loads(got.read())["error"]["code"] == "queue_full"
                break
        assert statuses[-1] == 429 and len(statuses) > 16
        batch = http.post("/v1/completions", json={"prompt": ["a"] * 8, "max_tokens": 5})
        assert batch.status_code == 429  # all of a batch, or none
    until_idle(quick, 5.0)
    with quick.http() as http:
        assert http.post("/v1/completions", json={"prompt": "a", "max_tokens": 2}).status_code == 200


def test_a_timeout_ends_with_what_is_there_or_says_so(quick: Served) -> None:
    with quick.http() as http:
        got = http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1900, "timeout_ms": 100}).json()
    assert got["choices"][0]["finish_reason"] == "length" and got["choices"][0]["stop_reason"] == "timeout"
    assert 0 < got["usage"]["completion_tokens"] < 1900


def test_streams_are_events(quick: Served) -> None:
    with quick.http() as http:
        got = http.post("/v1/chat/completions", json={**CHAT, "stream": True})
    assert got.headers["content-type"].startswith("text/event-stream")
    assert got.headers["cache-control"] == "no-cache"
    events = [one for one in got.text.split("\n\n") if one]
    assert all(one.startswith("data: ") for one in events) and events[-1] == "data: [DONE]"
    texts = [json.loads(one[6:])["choices"][0]["delta"].get("content", "") for one in events[:-1]]
    assert "".join(texts) == "the end"


def test_work_on_a_long_text_leaves_the_loop_free(tokenizer: Tokenizer) -> None:
    """The work waits for something that only the loop can do meanwhile."""

    async def main() -> bool:
        async with scripted(ScriptedModel(tokenizer), tokenizer)() as engine:
            ctx = Context(engine, Settings(model_names=("tiny",)))
            done = threading.Event()
            asyncio.get_running_loop().call_later(0.05, done.set)
            try:
                return await ctx.beside(LONG_TEXT + 1, lambda: done.wait(10))
            finally:
                ctx.close()

    assert asyncio.run(main())


def test_a_long_text_is_encoded_without_pythons_lock(tokenizer: Tokenizer) -> None:
    """Its ids are those of its lines together, and other threads run on while it is encoded."""
    line = "the quick brown fox jumps over the lazy dog\n"
    counts = [0]
    done = threading.Event()

    def count() -> None:
        while not done.is_set():
            counts[0] += 1
            time.sleep(0)

    thread = threading.Thread(target=count)
    thread.start()
    try:
        before = counts[0]
        ids = tokenizer.encode(line * 10_000, add_special_tokens=False)
        assert counts[0] > before + 100
    finally:
        done.set()
        thread.join()
    assert ids == tokenizer.encode(line, add_special_tokens=False) * 10_000


@pytest.mark.parametrize("size", [4096, 1, 7])
def test_a_request_that_offers_http_2_is_answered_in_http_1(quick: Served, size: int) -> None:
    """Java's client offers it with every request, the body behind it; the head may come in pieces."""
    body = json.dumps({"prompt": "upgrade: a\r\nupgrade: b", "max_tokens": 2}).encode()
    offer = {"connection": "Upgrade, HTTP2-Settings", "upgrade": "h2c", "http2_settings": "AAMAAABk"}
    with connect(quick) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(2):
            data = head(len(body), **offer) + body
            for at in range(0, len(data), size):
                sock.sendall(data[at : at + size])
            answer = b""
            while b'"usage"' not in answer:
                part = sock.recv(65536)
                assert part, answer
                answer += part
            assert answer.startswith(b"HTTP/1.1 200")
