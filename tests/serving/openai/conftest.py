"""Servers of tiny engines, shared by the tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from openai_servers import HERMES_TEMPLATE, ScriptedModel, Served, scripted, start
from plansmith.runtime.async_engine import AsyncEngine
from plansmith.runtime.chat import ChatTemplate
from plansmith.runtime.engine import Engine
from plansmith.runtime.tokenizer import Tokenizer
from tiny_engines import build_tiny
from tiny_models import write_tokenizer


@pytest.fixture(scope="session")
def engine_dir(tiny_checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the engine directory of the tiny llama; do not change the files."""
    return build_tiny(tiny_checkpoint("llama"), tmp_path_factory.mktemp("engine") / "llama")


@pytest.fixture(scope="session")
def tiny(engine_dir: Path) -> Iterator[Served]:
    """Return a server of the tiny llama; tests leave it as it is."""
    one = start(lambda: AsyncEngine.open(engine_dir, num_threads=1, max_num_tokens=32), max_prompts=16)
    yield one
    one.stop()


@pytest.fixture(scope="session")
def local(engine_dir: Path) -> Iterator[Engine]:
    """Return the same engine in this process, whose texts the server's must be."""
    with Engine.open(engine_dir, num_threads=1) as engine:
        yield engine


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    """Return a new tiny tokenizer with a chat template that knows tools."""
    write_tokenizer(tmp_path)
    made = Tokenizer.from_directory(tmp_path)
    made.chat_template = ChatTemplate(HERMES_TEMPLATE, made.special_tokens)
    return made


@pytest.fixture
def script(tokenizer: Tokenizer) -> Iterator[tuple[ScriptedModel, Served]]:
    """Return a model that says its script, and its server."""
    model = ScriptedModel(tokenizer)
    one = start(scripted(model, tokenizer))
    yield model, one
    one.stop()
