"""litellm, a gateway of others: as a library, and as a router over several servers."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import socket
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai_servers import ScriptedModel, Served, scripted, start
from plansmith.runtime.tokenizer import Tokenizer

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # or the import asks a server
litellm = pytest.importorskip("litellm")
pytestmark = pytest.mark.filterwarnings("ignore")  # its own, of pydantic

MESSAGES: Any = [{"role": "user", "content": "the weather"}]
TOOL: Any = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {}}},
}
KEY = "sk-" + uuid.uuid4().hex + uuid.uuid4().hex
Replicas = Callable[..., tuple[ScriptedModel, Served]]


@pytest.fixture
def replica(tokenizer: Tokenizer) -> Iterator[Replicas]:
    """Return what starts a server whose model says a text. Arguments: of the model and EngineOptions."""
    running: list[Served] = []

    def go(script: str, *, step_s: float = 0.0, **options: Any) -> tuple[ScriptedModel, Served]:
        model = ScriptedModel(tokenizer, script, step_s=step_s)
        running.append(start(scripted(model, tokenizer, **options), drain_s=0.2))
        return model, running[-1]

    yield go
    for one in running:
        one.stop()


def deployment(server: Served, **more: Any) -> dict[str, Any]:
    parameters = {"model": "openai/tiny", "api_base": f"{server.url}/v1", "api_key": "x", **more}
    return {"model_name": "tiny", "litellm_params": parameters}


def test_the_library_completes_streams_and_calls(replica: Replicas) -> None:
    model, server = replica("it is sunny")
    options: Any = {
        "model": "openai/tiny",
        "api_base": f"{server.url}/v1",
        "api_key": "x",
        "messages": MESSAGES,
    }
    whole = litellm.completion(**options)
    assert whole.choices[0].message.content == "it is sunny" and whole.choices[0].finish_reason == "stop"
    assert whole.usage.completion_tokens > 0
    parts = list(litellm.completion(**options, stream=True, stream_options={"include_usage": True}))
    assert "".join(part.choices[0].delta.content or "" for part in parts if part.choices) == "it is sunny"
    assert parts[-1].usage.completion_tokens == whole.usage.completion_tokens
    model.script = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    called = litellm.completion(**options, tools=[TOOL])
    assert called.choices[0].finish_reason == "tool_calls"
    assert called.choices[0].message.tool_calls[0].function.name == "f"
    pieces = list(litellm.completion(**options, tools=[TOOL], stream=True))
    built = litellm.stream_chunk_builder(pieces, messages=MESSAGES)
    assert json.loads(built.choices[0].message.tool_calls[0].function.arguments) == {}


def test_the_library_knows_our_errors(replica: Replicas) -> None:
    _, server = replica("x")
    options: Any = {"api_base": f"{server.url}/v1", "api_key": "x", "messages": MESSAGES, "num_retries": 0}
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(model="openai/tiny", temperature=-1, **options)
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(model="openai/other", **options)
    long: Any = [{"role": "user", "content": "word " * 2000}]
    with pytest.raises(litellm.BadRequestError, match="max_input_len"):
        litellm.completion(model="openai/tiny", **{**options, "messages": long})


def test_a_router_goes_on_with_another_server_when_one_is_dead(replica: Replicas) -> None:
    _, dead = replica("from the dead")
    _, alive = replica("from the living")
    dead.stop()
    router = litellm.Router(
        model_list=[deployment(dead), deployment(alive)], num_retries=3, retry_after=0, allowed_fails=1
    )
    got = [router.completion(model="tiny", messages=MESSAGES).choices[0].message.content for _ in range(6)]
    assert got == ["from the living"] * 6


def test_a_router_goes_on_with_another_server_when_one_is_full(replica: Replicas) -> None:
    """The first one's slots and queue are taken: its 429 sends the request to the second."""
    _, full = replica("late " * 300, step_s=0.05, max_batch_size=1, max_queue_size=1)
    _, free = replica("from the free")
    entries = [deployment(full, order=1), deployment(free, order=2)]
    entries[1]["model_name"] = "spare"
    router = litellm.Router(
        model_list=entries, fallbacks=[{"tiny": ["spare"]}], num_retries=0, disable_cooldowns=True
    )

    async def main() -> list[str]:
        async with httpx.AsyncClient(base_url=full.url, timeout=60) as http:
            body = {"messages": MESSAGES, "stream": True}
            held: list[asyncio.Future[Any]] = []
            for wanted in (1, 2):  # the second is refused until the first has left the queue for its slot
                for _ in range(100):
                    if full.engine.num_open_requests == wanted:
                        break
                    held.append(asyncio.ensure_future(http.post("/v1/chat/completions", json=body)))
                    await asyncio.sleep(0.1)
            assert full.engine.num_open_requests == 2
            answers = await asyncio.gather(
                *(router.acompletion(model="tiny", messages=MESSAGES) for _ in range(4))
            )
            for one in held:
                one.cancel()
            return [one.choices[0].message.content for one in answers]

    assert asyncio.run(main()) == ["from the free"] * 4


class ByPrefix(litellm.types.router.CustomRoutingStrategyBase):  # type: ignore[misc]
    """Sends what begins alike to one server: by the hash of its first blocks, as any of the servers tells it."""

    def __init__(self, router: Any, servers: list[Served], num_blocks: int) -> None:
        self._router, self._servers, self._num_blocks = router, servers, num_blocks
        self.chosen: list[int] = []

    async def async_get_available_deployment(self, model: str, messages: Any = None, **_: Any) -> Any:
        async with httpx.AsyncClient() as http:
            told = await http.post(f"{self._servers[0].url}/tokenize", json={"messages": messages})
        parts = dict(part.split("=") for part in told.headers["x-plansmith-prefix-hash"].split(", "))
        own = parts[max((n for n in parts if int(n) <= self._num_blocks), key=int)]
        digests = [hashlib.sha256(f"{own} {i}".encode()).digest() for i in range(len(self._servers))]
        self.chosen.append(digests.index(max(digests)))  # so that one more server moves few prefixes
        return self._router.model_list[self.chosen[-1]]

    def get_available_deployment(self, *arguments: Any, **more: Any) -> Any:
        raise NotImplementedError


def test_a_router_sends_equal_prefixes_to_the_server_that_has_them(replica: Replicas) -> None:
    servers = [replica("ok")[1] for _ in range(2)]
    router = litellm.Router(model_list=[deployment(one) for one in servers], num_retries=0)
    strategy = ByPrefix(router, servers, num_blocks=2)
    router.set_custom_routing_strategy(strategy)
    systems = [f"{word} " * 30 for word in ("quick", "brown", "lazy", "other", "morning", "animals")]

    async def ask(system: str, question: str) -> int:
        messages: Any = [{"role": "system", "content": system}, {"role": "user", "content": question}]
        got = await router.acompletion(model="tiny", messages=messages)
        return int(got.usage.prompt_tokens_details.cached_tokens or 0)

    async def main() -> tuple[list[int], list[int]]:
        first = [await ask(system, "the first") for system in systems]
        return first, [await ask(system, "the second") for system in systems for _ in range(3)]

    first, later = asyncio.run(main())
    assert all(n >= 32 for n in later), (first, later)
    by_system = [strategy.chosen[i : i + 1] + strategy.chosen[6 + 3 * i : 9 + 3 * i] for i in range(6)]
    assert all(len(set(one)) == 1 for one in by_system)
    assert len(set(strategy.chosen)) == 2


@pytest.fixture
def proxy(replica: Replicas, tmp_path: Path) -> Iterator[tuple[str, list[Served]]]:
    """Return litellm's own server over two of ours, whose models say "one" and "two", and those two.

    It needs packages that litellm alone does not bring: LITELLM_PROXY names a `litellm` that has them.
    """
    program = os.environ.get("LITELLM_PROXY")
    if program is None:
        pytest.skip("LITELLM_PROXY does not name litellm's server (pip install 'litellm[proxy]')")
    servers = [replica(word)[1] for word in ("one", "two")]
    config = {
        "model_list": [deployment(one) for one in servers],
        "router_settings": {"num_retries": 3, "retry_after": 0, "allowed_fails": 0, "cooldown_time": 60},
    }
    path = tmp_path / "proxy.yaml"
    path.write_text(json.dumps(config))
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    process = subprocess.Popen(
        [program, "--config", str(path), "--host", "127.0.0.1", "--port", str(port)],
        env={**environment, "LITELLM_MASTER_KEY": KEY},
        stdout=(tmp_path / "log").open("wb"),
        stderr=subprocess.STDOUT,
    )
    try:
        url = f"http://127.0.0.1:{port}"
        for _ in range(240):
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{url}/health/liveliness").status_code == 200:
                    break
            assert process.poll() is None, (tmp_path / "log").read_text()[-2000:]
            time.sleep(0.5)
        yield url, servers
    finally:
        process.terminate()
        process.wait(30)


@pytest.mark.slow
def test_the_proxy_goes_on_when_one_of_its_servers_ends(proxy: tuple[str, list[Served]]) -> None:
    url, servers = proxy
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=60)

    def ask() -> str | None:
        return client.chat.completions.create(model="tiny", messages=MESSAGES).choices[0].message.content

    assert {ask() for _ in range(12)} == {"one", "two"}
    parts = client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
    assert "".join(part.choices[0].delta.content or "" for part in parts if part.choices) in ("one", "two")
    servers[0].stop()
    assert [ask() for _ in range(6)] == ["two"] * 6
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=-1)
