"""OpenAI servers in a thread of the test's process, and models that say what a test tells them to."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai

sys.path.insert(0, str(Path(__file__).parent / "runtime"))

from fake_executor import INFO, FakeModel, Float32Array, History
from plansmith.runtime.async_engine import AsyncEngine
from plansmith.runtime.engine_options import EngineOptions
from plansmith.runtime.executor import PythonExecutor
from plansmith.runtime.tokenizer import Tokenizer
from plansmith.serving.openai.server import listen, serve
from plansmith.serving.openai.settings import Settings

# Renders tools as Qwen and Hermes models have them, and calls of earlier turns.
HERMES_TEMPLATE = (
    "{% if tools %}<|im_start|>system\nTools:{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}\n"
    'Call with <tool_call>\n{"name": .., "arguments": ..}\n</tool_call><|im_end|>\n{% endif %}'
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VOCAB_SIZE = 320
SCRIPT_INFO = dataclasses.replace(
    INFO,
    vocab_size=VOCAB_SIZE,
    max_batch_size=16,
    max_num_tokens=512,
    max_input_len=1500,
    max_seq_len=2048,
    tokens_per_block=16,
    max_logits_rows=512,
)


class ScriptedModel(FakeModel):
    """Says its script after the last <|im_start|>assistant, then ends; without one it goes on for ever with "a".

    script : what it says; may be set between requests
    hold_at, go_on : before token `hold_at` of the script it waits for `go_on`, so that a test can hold an answer
        in its middle
    """

    def __init__(self, tokenizer: Tokenizer, script: str = "", **options: Any) -> None:
        super().__init__(info=SCRIPT_INFO, **options)
        self._tokenizer = tokenizer
        self._begin = tokenizer.encode("<|im_start|>assistant\n", add_special_tokens=False)
        self._eos = tokenizer.eos_token_ids[0]
        self._a = tokenizer.encode("a", add_special_tokens=False)[0]
        self.script = script
        self.hold_at = -1
        self.go_on = threading.Event()

    def _logits(self, history: History, slot: int) -> Float32Array:
        logits = np.zeros(VOCAB_SIZE, np.float32)
        logits[self._next(history)] = 30.0
        return logits

    def _next(self, history: Sequence[int]) -> int:
        size = len(self._begin)
        for at in range(len(history) - size, -1, -1):
            if list(history[at : at + size]) == self._begin:
                said = self._tokenizer.encode(self.script, add_special_tokens=False)
                k = len(history) - at - size
                if k == self.hold_at:
                    assert self.go_on.wait(30)
                return said[k] if k < len(said) else self._eos
        return self._a


def scripted(model: FakeModel, tokenizer: Tokenizer | None, **options: Any) -> Callable[[], AsyncEngine]:
    """Return what makes an engine of a model in Python. options : of EngineOptions."""
    return lambda: AsyncEngine.from_executor(
        PythonExecutor(model), EngineOptions(**options), tokenizer=tokenizer
    )


@dataclasses.dataclass
class Served:
    """A running server. engine : its engine, for the loop's thread"""

    url: str
    engine: AsyncEngine
    loop: asyncio.AbstractEventLoop
    end: Callable[[], None]
    thread: threading.Thread

    def client(self, **options: Any) -> openai.OpenAI:
        """Return the official client; it tries nothing twice unless told to."""
        return openai.OpenAI(
            **{"base_url": f"{self.url}/v1", "api_key": "none", "max_retries": 0, "timeout": 60, **options}
        )

    def async_client(self, **options: Any) -> openai.AsyncOpenAI:
        """Return the official client for asyncio."""
        return openai.AsyncOpenAI(
            **{"base_url": f"{self.url}/v1", "api_key": "none", "max_retries": 0, "timeout": 60, **options}
        )

    def http(self, **options: Any) -> httpx.Client:
        """Return a plain client."""
        return httpx.Client(base_url=self.url, timeout=60, **options)

    @property
    def port(self) -> int:
        """The server's port."""
        return int(self.url.rsplit(":", 1)[1])

    def stop(self) -> None:
        """Drain and wait for the end."""
        self.start_stop()
        self.thread.join(60)
        assert not self.thread.is_alive()

    def start_stop(self) -> None:
        """Drain, as SIGTERM does."""
        with contextlib.suppress(RuntimeError):  # it has ended
            self.loop.call_soon_threadsafe(self.end)


@contextlib.contextmanager
def served(make: Callable[[], AsyncEngine], **settings: Any) -> Iterator[Served]:
    """Serve an engine on a free port inside the block. settings : fields of Settings"""
    one = start(make, **settings)
    try:
        yield one
    finally:
        one.stop()


def start(make: Callable[[], AsyncEngine], **settings: Any) -> Served:
    """Serve an engine on a free port until stop()."""
    options = Settings(**{"model_names": ("tiny",), "drain_s": 10.0, **settings})
    engine = make()
    sockets = listen("127.0.0.1", 0)
    url = f"http://127.0.0.1:{sockets[0].getsockname()[1]}"
    is_ready = threading.Event()
    found: list[Any] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()

        def ready(end: Callable[[], None]) -> None:
            found.extend((loop, end))
            is_ready.set()

        await serve(engine, options, sockets, ready)

    thread = threading.Thread(target=lambda: asyncio.run(main()), name="served", daemon=True)
    thread.start()
    assert is_ready.wait(30)
    return Served(url, engine, found[0], found[1], thread)


def demo_checkpoint() -> Path | None:
    """Return the demo's checkpoint where `make demo` has put it."""
    path = Path(__file__).parents[1] / "demo" / "smollm2"
    return path if (path / "model.safetensors").is_file() else None
